"""`soar-prep verify`: is an NVFP4 checkpoint one that servers load right, and how good is it?

The structure checks read config, headers and scales alone, for either layout and any tool's files. Each stands for a
way in which a loader goes wrong, most of them silently: a scale that is missing or NaN is garbage output; a fused
group keeps one member's scalar for all; an ignore entry that matches nothing leaves a linear misread.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from soar_prep.checkpoint import INDEX, Checkpoint, find_model, open_shard
from soar_prep.errors import CheckFailed, UserError
from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.layouts import FUSED_GROUPS, INPUT_TENSOR, WEIGHT_TENSORS, from_tensors, is_weight_only, layout_of
from soar_prep.settings import Layout, Scheme, Verify

EMBEDDING = re.compile(r"emb|wte|wpe")


def verify(settings: Verify) -> None:
    """Print what was checked. CheckFailed with one line a problem; with a reference also for gate.max_kl."""
    directory = Path(settings.directory).expanduser()
    if not directory.is_dir():
        raise UserError(f"directory={settings.directory}: no such directory; expected an NVFP4 checkpoint")
    checkpoint = Checkpoint(directory)
    problems = structure_problems(checkpoint)
    if problems:
        raise CheckFailed("\n  ".join([f"{directory}: {len(problems)} problems", *problems]))
    modules = quantized_modules(checkpoint)
    print(f"{directory}: sound; {len(modules)} NVFP4 linears, {checkpoint.size() / 2**30:.2f} GiB")
    if settings.reference is not None:
        verify_quality(settings, checkpoint)


def verify_quality(settings: Verify, checkpoint: Checkpoint) -> None:
    from soar_prep.quality import check_gate, measure, quality_lines  # with transformers: structure needs none
    from soar_prep.streaming import StreamedModel
    from soar_prep.text import load_tokenizer, load_windows

    if settings.scheme is Scheme.w4a4 and is_weight_only(checkpoint.config):
        raise UserError("scheme=w4a4: this checkpoint is weight-only; use scheme=w4a16")
    source = StreamedModel(
        Checkpoint(find_model(str(settings.reference), "reference")), settings.compute, settings.trust_remote_code
    )
    tokenizer = load_tokenizer(source.checkpoint.directory, settings.trust_remote_code)
    windows = load_windows(settings.evaluation, tokenizer, source.context, "evaluation", held_out=True)
    quality = measure(source, checkpoint, windows, settings.compute)
    print(*quality_lines(quality), sep="\n")
    check_gate(quality[settings.scheme.value], settings.gate, checkpoint.directory)


def structure_problems(checkpoint: Checkpoint) -> list[str]:
    """One line for each thing that a loader would trip over; empty for a sound checkpoint."""
    if "quantization_config" not in checkpoint.config:
        return ["config.json: no quantization_config, so loaders would read the packed weights as dense ones"]
    problems = index_problems(checkpoint)
    if problems:
        return problems  # what follows reads tensors by the index
    modules = quantized_modules(checkpoint)
    if not modules:
        return ["no NVFP4 tensors: expected weight_packed or weight_scale_2 for at least one module"]
    for module, layout in modules.items():
        problems += module_problems(checkpoint, module, layout)
    if not problems:
        problems = fused_group_problems(checkpoint, modules)
    return problems + ignore_problems(checkpoint, set(modules))


def quantized_modules(checkpoint: Checkpoint) -> dict[str, Layout]:
    """Layout of each NVFP4 module."""
    parents = sorted({name.rpartition(".")[0] for name in checkpoint.files})
    layouts = {module: layout_of(module, checkpoint) for module in parents}
    return {module: layout for module, layout in layouts.items() if layout is not None}


def index_problems(checkpoint: Checkpoint) -> list[str]:
    """Tensors that the index promises and the shards lack, and the reverse."""
    held: set[str] = set()
    for path in sorted(checkpoint.directory.glob("*.safetensors")):
        with open_shard(path) as shard:
            held |= set(shard.keys())
    promised = set(checkpoint.files)
    problems = [f"{name}: in {INDEX} but in no shard" for name in sorted(promised - held)]
    return problems + [f"{name}: in a shard but not in {INDEX}" for name in sorted(held - promised)]


def module_problems(checkpoint: Checkpoint, module: str, layout: Layout) -> list[str]:
    """Missing companions, wrong types or shapes, scales that are not positive numbers."""
    needed = list(WEIGHT_TENSORS[layout])
    if not is_weight_only(checkpoint.config):
        needed.append(INPUT_TENSOR[layout])
    missing = [name for name in needed if f"{module}.{name}" not in checkpoint]
    if missing:
        return [f"{module}: {name} is missing" for name in missing]
    codes, scales = (checkpoint.dtype_and_shape(f"{module}.{name}") for name in WEIGHT_TENSORS[layout][:2])
    expected = [codes[1][0], codes[1][1] * 2 // BLOCK]
    if codes[0] != "U8" or scales[0] != "F8_E4M3" or scales[1] != expected:
        return [f"{module}: codes {codes}, block scales {scales}; expected U8 [N, K/2] and F8_E4M3 {expected}"]
    quantized = from_tensors(module, checkpoint)
    assert quantized is not None
    problems = []
    block_scales = quantized.weight.block_scales.float()
    if not bool(torch.isfinite(block_scales).all()) or bool((block_scales < 0).any()):
        problems.append(f"{module}: a block scale is NaN or negative")
    scalars = {"weight": quantized.weight.tensor_scale, "input": quantized.input_scale}
    for name, scalar in scalars.items():
        if scalar is not None and not (torch.isfinite(scalar) and scalar > 0):
            problems.append(f"{module}: the {name} scale is {scalar.item()}; expected a positive number")
    return problems


def fused_group_problems(checkpoint: Checkpoint, modules: dict[str, Layout]) -> list[str]:
    """Members of a fused group that disagree on a scalar, or of which only some are quantized."""
    problems = []
    for group in FUSED_GROUPS:
        for parent in sorted({m.rpartition(".")[0] for m in modules if m.rpartition(".")[2] in group}):
            members = [f"{parent}.{name}" for name in group]
            present = [m for m in members if m in modules or f"{m}.weight" in checkpoint]
            quantized = [from_tensors(m, checkpoint) for m in present if m in modules]
            scalars = {
                (q.weight.tensor_scale.item(), None if q.input_scale is None else q.input_scale.item())
                for q in quantized
                if q is not None
            }
            if len(quantized) < len(present):
                problems.append(f"{parent}: only some of {', '.join(group)} are quantized, but servers fuse them")
            elif len(scalars) > 1:
                problems.append(f"{parent}: {', '.join(group)} have different weight or input scales: {scalars}")
    return problems


def ignore_problems(checkpoint: Checkpoint, quantized: set[str]) -> list[str]:
    """Ignore entries that match nothing or a quantized module, and linears neither quantized nor ignored."""
    config = checkpoint.config["quantization_config"]
    ignore: list[str] = config.get("ignore") or config.get("exclude_modules") or []
    modules = {name.rpartition(".")[0] for name in checkpoint.files}
    if checkpoint.config.get("tie_word_embeddings"):
        modules.add("lm_head")
    problems = [f"ignore: {entry!r} matches no module" for entry in ignore if not any_match([entry], modules)]
    problems += [f"{m}: NVFP4, but ignored in config.json" for m in sorted(quantized) if any_match(ignore, {m})]
    for name in sorted(checkpoint.files):
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module in quantized or EMBEDDING.search(module.rpartition(".")[2]):
            continue
        if len(checkpoint.dtype_and_shape(name)[1]) == 2 and not any_match(ignore, {module}):
            problems.append(f"{module}: neither quantized nor ignored")
    return problems


def any_match(patterns: list[str], modules: set[str]) -> bool:
    """Whether one of the patterns (full names, globs, `re:` expressions) names one of the modules or a parent of it."""

    def matches(pattern: str, module: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], module) is not None
        return fnmatchcase(module, pattern) or module.startswith(pattern + ".")

    return any(matches(pattern, module) for pattern in patterns for module in modules)
