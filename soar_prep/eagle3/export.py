"""The directory that SGLang loads as a draft (--speculative-algorithm EAGLE3): config.json and model.safetensors.

A draft in NVFP4 has ModelOpt's layout. SGLang builds its linears under bare names, so `ignore` holds those.

SGLang drops tensors whose names it does not know and leaves those it misses as they were drawn, both without a word;
options missing from config.json are off. So everything is written explicitly, and `read_draft` refuses any difference.
Source: SGLang 0.5.21, models/llama_eagle3.py, models/llama.py (RoPE) and speculative/eagle_utils.py.
"""

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from soar_prep.checkpoint import (
    SINGLE,
    Checkpoint,
    has_only_finite,
    partial_directory,
    refuse_existing,
    write_atomically,
    write_json,
)
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.nvfp4 import FC, HEAD, LAYER, hold_stored
from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.layouts import (
    INPUT_TENSOR,
    WEIGHT_TENSORS,
    QuantizedWeight,
    from_tensors,
    quantization_config,
    to_tensors,
)
from soar_prep.qat.linear import nvfp4_linears, to_nvfp4_linears
from soar_prep.settings import Activations, Layout

ARCHITECTURE = "LlamaForCausalLMEagle3"
# What this draft is and has no option for; a config that says otherwise is of another network.
FIXED = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA_DEFAULTS = ("hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias")  # may be missing
# Options of SGLang's class that make another network of it, where no tensor's shape would tell.
FOREIGN = ("norm_before_fc", "use_aux_norm", "bias")


def write_draft(draft: Draft, output: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the draft, its weights rounded to dtype; `output` is complete or is not there.

    UserError if `output` exists, or a weight is not finite.
    """
    output = output.expanduser()
    refuse_existing(output)
    partial = partial_directory(output)
    remove_own(partial)
    write_files(draft, partial, dtype)
    os.rename(partial, output)


def write_files(draft: Draft, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Put the draft's files into a directory, in place of those of an earlier one; UserError as `write_draft`."""
    tensors = tensors_of(draft, dtype)  # before the directory: weights that are refused leave nothing behind
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SINGLE, save(tensors, metadata={"format": "pt"}))
    write_json(directory / "config.json", config_json(draft.config, dtype) | quantization_of(draft))


def read_draft(directory: Path) -> Draft:
    """The draft of a directory, in the dtype it is stored in, on the CPU; NVFP4 weights dequantized to BF16, exactly.

    UserError for a directory of another kind, a tensor that is missing, unknown or of another shape, or a vocabulary
    that contradicts itself.
    """
    checkpoint = Checkpoint(directory)
    with torch.device("meta"):
        draft = Draft(read_config(checkpoint))
    names, activations = read_quantization(checkpoint)
    to_nvfp4_linears(draft, names, activations)
    expected = shapes_of(draft, names)
    for name in sorted(expected.keys() | set(checkpoint.names())):
        if name not in checkpoint:
            raise UserError(f"{directory}: tensor {name} is missing; expected a draft as SGLang loads it")
        if name not in expected:
            raise UserError(f"{directory}: tensor {name} is none of an EAGLE-3 draft's; SGLang would drop it")
        shape = checkpoint.dtype_and_shape(name)[1]
        if shape != expected[name]:
            raise UserError(f"{directory}: {name} is {shape}, config.json makes it {expected[name]}")
    quantized = {name: from_tensors(name, checkpoint) for name in names}
    tensors = {name: checkpoint[name] for name in draft.state_dict() if name.removesuffix(".weight") not in names}
    tensors |= {f"{name}.weight": q.weight.dequantize(torch.bfloat16) for name, q in quantized.items() if q is not None}
    draft.load_state_dict(tensors, assign=True)
    hold_stored(draft, {name: q for name, q in quantized.items() if q is not None})
    check_vocabulary(draft, directory)
    return draft


def config_json(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json: every option by name, those of a Llama as transformers reads them."""
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "aux_layers"}
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
    return FIXED | options | {"torch_dtype": str(dtype).removeprefix("torch."), "eagle_config": eagle}


def quantization_of(draft: Draft) -> dict[str, Any]:
    """config.json's entry for the rounded linears; nothing for a draft in BF16."""
    rounded = {name: linear for name, linear in nvfp4_linears(draft).items() if linear.stored is not None}
    if not rounded:
        return {}
    ignore = [name for name in (FC, HEAD) if name not in rounded]
    config = quantization_config(Layout.modelopt, ignore, weight_only=False)
    activations = next(iter(rounded.values())).activations
    # SGLang 0.5.21 wants input scales whatever it does with activations; what they were in training is told beside it.
    return {"quantization_config": config | {"producer": {"name": "soar-prep", "activations": activations.value}}}


def read_quantization(checkpoint: Checkpoint) -> tuple[list[str], Activations]:
    """The linears in NVFP4, and how they were trained to take their inputs; UserError for another quantization."""
    found = checkpoint.config.get("quantization_config")
    if not found:
        return [], Activations.none
    where, ignore = checkpoint.directory / "config.json", found.get("ignore") or []
    kind = f"{found.get('quant_method')} {found.get('quant_algo')}"
    if kind != "modelopt NVFP4":
        raise UserError(f"{where}: quantization_config is of {kind}; expected modelopt NVFP4, or none")
    if not {FC} <= set(ignore) <= {FC, HEAD}:
        raise UserError(f"{where}: quantization_config ignores {ignore}; expected {FC}, with or without {HEAD}")
    activations = (found.get("producer") or {}).get("activations", Activations.none.value)
    known = [each.value for each in Activations]
    if activations not in known:
        raise UserError(
            f"{where}: quantization_config.producer.activations is {activations!r}; expected one of {', '.join(known)}"
        )
    return [name for name in (*LAYER, HEAD) if name not in ignore], Activations(activations)


def shapes_of(draft: Draft, quantized: list[str]) -> dict[str, list[int]]:
    """Names and shapes of a draft's tensors in the file."""
    shapes = {name: list(tensor.shape) for name, tensor in draft.state_dict().items()}
    for name in quantized:
        rows, columns = shapes.pop(f"{name}.weight")
        codes, scales, scalar = WEIGHT_TENSORS[Layout.modelopt]
        shapes |= {f"{name}.{codes}": [rows, columns // 2], f"{name}.{scales}": [rows, columns // BLOCK]}
        shapes |= {f"{name}.{scalar}": [], f"{name}.{INPUT_TENSOR[Layout.modelopt]}": []}
    return shapes


def read_config(checkpoint: Checkpoint) -> DraftConfig:
    """UserError if config.json is not that of such a draft."""
    where, found = checkpoint.directory / "config.json", checkpoint.config
    for name, value in FIXED.items():
        if found.get(name, value if name in LLAMA_DEFAULTS else None) != value:
            raise UserError(f"{where}: {name} is {found.get(name)!r}; a draft of this kind has {value!r}")
    eagle = found.get("eagle_config") or {}
    for name in FOREIGN:
        if found.get(name) or eagle.get(name):
            raise UserError(f"{where}: {name} is an option of another kind of draft; expected it off")
    layers = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not layers or not eagle.get("use_aux_hidden_state", True):
        raise UserError(f"{where}: eagle_config names no eagle_aux_hidden_state_layer_ids; expected three layers")
    known: dict[str, Any] = {"fc_norm": False, "norm_output": False, "aux_layers": tuple(layers)}
    options = {f.name: found[f.name] for f in fields(DraftConfig) if f.name in found} | rope(found, where)
    missing = [f.name for f in fields(DraftConfig) if f.name not in options | known]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing; a server would take a default for it")
    return DraftConfig(**(known | options))


def rope(found: dict[str, Any], where: Path) -> dict[str, float]:
    """rope_theta in the old spelling or in that of transformers 5; UserError for scaled RoPE."""
    parameters = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UserError(f"{where}: RoPE of type {kind}; this draft knows plain RoPE alone")
    theta = parameters.get("rope_theta", found.get("rope_theta"))
    return {} if theta is None else {"rope_theta": float(theta)}


def tensors_of(draft: Draft, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors, on the CPU: rounded linears as ModelOpt has them, other floating-point tensors in dtype.

    UserError for a weight that is not finite.
    """
    tensors: dict[str, Tensor] = {}
    rounded = {name: linear for name, linear in nvfp4_linears(draft).items() if linear.stored is not None}
    for name, tensor in draft.state_dict().items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        if tensor.is_floating_point() and not has_only_finite(tensor):
            raise UserError(f"{name}: holds NaN or infinity in {dtype}; the draft is not written, training diverged")
        if name.removesuffix(".weight") not in rounded:
            tensors[name] = tensor
    for name, linear in rounded.items():
        assert linear.stored is not None
        assert linear.input_scale is not None
        quantized = QuantizedWeight(linear.stored.to("cpu"), linear.input_scale.float().cpu())
        tensors |= to_tensors(name, quantized, Layout.modelopt)
    return tensors


def remove_own(partial: Path) -> None:
    """Remove what a killed run left at `partial`; UserError if anything else is there."""
    if not partial.exists():
        return
    own = {name + end for name in (SINGLE, "config.json") for end in ("", ".tmp")}
    foreign = [path.name for path in partial.iterdir() if path.name not in own]
    if foreign:
        raise UserError(f"{partial}: holds {foreign[0]}, which is no part of a draft; move the directory away")
    shutil.rmtree(partial)


def check_vocabulary(draft: Draft, where: Path) -> None:
    """UserError unless d2t gives ascending target ids and t2d marks exactly those."""
    ids = draft.target_ids()
    marked = torch.zeros_like(draft.t2d)
    if draft.d2t.dtype != torch.long or draft.t2d.dtype != torch.bool:
        raise UserError(f"{where}: d2t is {draft.d2t.dtype} and t2d {draft.t2d.dtype}; expected int64 and bool")
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= len(marked):
        raise UserError(f"{where}: d2t: expected offsets (target id - draft id) that give ascending target ids")
    marked[ids] = True
    if not torch.equal(marked, draft.t2d):
        raise UserError(f"{where}: t2d marks other target ids than d2t gives; the vocabulary is damaged")
