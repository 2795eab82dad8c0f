"""The quantize road: every step from a Hugging Face directory to an NVFP4 checkpoint, in order."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soar_prep.checkpoint import Checkpoint, PartialOutput, find_model, refuse_existing
from soar_prep.errors import UserError
from soar_prep.fouroversix.tensor import input_scale_for
from soar_prep.gptq.budget import plan_budget
from soar_prep.gptq.hessian import InputStatistics
from soar_prep.gptq.layers import check_layers, plan_layer
from soar_prep.gptq.report_page import write_page
from soar_prep.gptq.solve import solve_group
from soar_prep.layouts import QuantizedWeight, from_tensors, quantization_config, side_configs, to_tensors
from soar_prep.quality import Quality, check_gate, measure, quality_lines
from soar_prep.report import Progress, environment, plain
from soar_prep.settings import Quantize, Scheme
from soar_prep.streaming import StreamedModel, linears_of, quantized_inputs
from soar_prep.text import Windows, load_tokenizer, load_windows


@torch.no_grad()
def quantize(settings: Quantize) -> Path:
    """Quantize settings.model into settings.output and return that directory.

    Raises UserError for anything the user can mend, most of it before heavy work. Interrupted, it resumes.
    """
    source = open_source(settings)
    model = StreamedModel(source, settings.compute, settings.trust_remote_code)
    check_layers(model, settings.keep_unquantized)
    windows, held_out = load_texts(settings, model)
    hashes = source.check_and_hash()
    first_plan = plan_layer(model, 0, model.load_layer(0), settings.keep_unquantized)
    budget = plan_budget(settings, source, model, first_plan, windows)
    print(*budget.lines(), sep="\n", flush=True)
    budget.check()
    output = PartialOutput(Path(settings.output), identity(settings, hashes, windows), parts=len(model.layers) + 1)
    progress = Progress(output.directory, len(model.layers), "layer", settings.wandb, plain(settings))

    if output.record(0) is None:
        output.write(0, tensors_outside_layers(source, model), record={})
    store = model.device if budget.keep_activations_on_gpu else torch.device("cpu")
    batches = list(windows.batches(settings.compute.batch_tokens))
    hidden = [model.embed(windows.token_ids[batch]).to(store) for batch in batches]
    reference = list(hidden) if settings.corrects_targets else None
    calibration = Calibration(hidden, reference, [windows.mask[batch] for batch in batches])
    records = []
    for index in range(len(model.layers)):
        layer = model.load_layer(index)
        record = output.record(index + 1)
        if record is None:
            record, tensors = quantize_layer(source, model, index, layer, calibration, settings)
            output.write(index + 1, tensors, record)
        is_last = index + 1 == len(model.layers)
        if reference and not is_last:
            propagate(model, index, layer, {}, reference)
        tensors = output.read(index + 1)
        input_scales = replace_weights(layer, model.layer_prefix(index), tensors, model.dtype)
        if not is_last:
            propagate(model, index, layer, input_scales if settings.scheme is Scheme.w4a4 else {}, hidden)
        progress.step(*layer_figures(record))
        records.append(record)
    del hidden, reference, calibration, layer

    ignore = unquantized_linears(model, records)
    output.complete(
        source.config
        | {"quantization_config": quantization_config(settings.export, ignore, settings.weight_only_config)},
        source,
        side_configs(settings.export, ignore, settings.weight_only_config),
    )
    written = Checkpoint(output.directory)
    quality = measure(model, written, held_out, settings.compute)
    print(*quality_lines(quality), sep="\n", flush=True)
    check_gate(quality[settings.scheme.value], settings.gate, output.directory)
    facts = run_facts(settings, model.device, hashes, windows, held_out, records, quality)
    facts |= {"source_bytes": source.size(), "output_bytes": written.size()}
    output.add_json("run.json", facts)
    write_page(output.directory / "report.html", facts, progress.elapsed())
    progress.close({f"{scheme}_kl": q.kl for scheme, q in quality.items()})
    output.finish()
    return output.output


def open_source(settings: Quantize) -> Checkpoint:
    refuse_existing(Path(settings.output))
    if settings.weight_only_config and settings.scheme is Scheme.w4a4:
        raise UserError("weight_only_config=true: excludes scheme=w4a4; use scheme=w4a16, or leave the config open")
    checkpoint = Checkpoint(find_model(settings.model))
    if checkpoint.config.get("quantization_config"):
        method = checkpoint.config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"model={settings.model}: quantized already ({method}); give the BF16 or FP32 model")
    architectures = checkpoint.config.get("architectures") or ["ForCausalLM"]
    if not any("ForCausalLM" in name for name in architectures):
        raise UserError(f"model={settings.model}: {architectures[0]} is not a causal LM; expected ...ForCausalLM")
    return checkpoint


def load_texts(settings: Quantize, model: StreamedModel) -> tuple[Windows, Windows]:
    """Calibration and evaluation windows."""
    tokenizer = load_tokenizer(model.checkpoint.directory, settings.trust_remote_code)
    windows = load_windows(settings.calibration, tokenizer, model.context, "calibration")
    held_out = load_windows(settings.evaluation, tokenizer, model.context, "evaluation", held_out=True)
    largest = int(max(windows.token_ids.max(), held_out.token_ids.max()))
    if largest >= model.vocab_size:
        raise UserError(
            f"{model.checkpoint.directory}: the tokenizer gives token id {largest}, but the model embeds only "
            f"{model.vocab_size} tokens; do both belong together?"
        )
    wanted = settings.calibration.samples
    print(
        f"calibration: {len(windows)} of {wanted} windows, {windows.n_tokens} tokens, {windows.truncated} cut at "
        f"{settings.calibration.length}; evaluation: {len(held_out)} windows, {held_out.n_tokens} tokens"
    )
    return windows, held_out


def identity(settings: Quantize, hashes: dict[str, str], windows: Windows) -> dict[str, Any]:
    """All that the written weights depend on: a resumed run must agree with it."""
    chosen = plain(settings)
    for name in ("model", "output", "evaluation", "gate", "wandb", "calibration"):
        del chosen[name]
    versions = environment(torch.device("cpu"))["packages"]
    return chosen | {"model": hashes, "calibration": windows.sha256(), "versions": versions}


def tensors_outside_layers(source: Checkpoint, model: StreamedModel) -> dict[str, Tensor]:
    """Embeddings, last norm, head: as they are, but a head tied to the embeddings is not written a second time."""
    names = [name for name in source.files if not name.startswith(model.layers_name + ".")]
    tied = model.tied_names()
    return {name: source[name] for name in names if name not in tied}


@dataclass(frozen=True)
class Calibration:
    """What the next layer is given, batch by batch, each [B, T, D]: by the quantized layers before it, and by the
    source's own if targets are corrected. masks: bool [B, T], True on real tokens."""

    hidden: list[Tensor]
    reference: list[Tensor] | None
    masks: list[Tensor]


def quantize_layer(
    source: Checkpoint,
    model: StreamedModel,
    index: int,
    layer: nn.Module,
    calibration: Calibration,
    settings: Quantize,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Solve one decoder layer: its record for run.json, and all its tensors as the file will hold them.

    With corrected targets each group of linears is solved on what those before it in the layer, already rounded, give;
    without, all are solved on what the layer gives as it is.
    """
    prefix = model.layer_prefix(index)
    plan = plan_layer(model, index, layer, settings.keep_unquantized)
    ours = copy.deepcopy(layer) if calibration.reference else layer
    stages = [[group] for group in plan.groups] if calibration.reference else [plan.groups]
    tensors = {name: source[name] for name in source.names(prefix)}
    record: dict[str, Any] = {"linears": {}, "kept": {prefix + name: reason for name, reason in plan.kept.items()}}
    input_scales: dict[str, Tensor] = {}
    for groups in stages:
        with quantized_inputs(ours, input_scales if settings.scheme is Scheme.w4a4 else {}):
            statistics = collect_statistics(model, index, ours, layer, groups, calibration)
        for group in groups:
            inputs = statistics.pop(group)
            input_scale = input_scale_for(finite_largest(inputs, prefix + group[0]))
            weights = {name: tensors.pop(f"{prefix}{name}.weight").to(model.device) for name in group}
            for name, solved in solve_group(weights, inputs.hessian(), settings, inputs.drift()).items():
                quantized = QuantizedWeight(solved.weight, None if settings.weight_only_config else input_scale)
                tensors |= to_tensors(prefix + name, quantized, settings.export)
                record["linears"][prefix + name] = solved.facts() | {"input_scale": input_scale.item()}
        if calibration.reference:
            input_scales = replace_weights(ours, prefix, tensors, model.dtype)
    return record, tensors


def collect_statistics(
    model: StreamedModel,
    index: int,
    ours: nn.Module,
    layer: nn.Module,
    groups: list[tuple[str, ...]],
    calibration: Calibration,
) -> dict[tuple[str, ...], InputStatistics]:
    """Hessian, and drift if targets are corrected, of each shared input; ours: the layer as far as it is rounded."""
    columns = {group: linears_of(layer)[group[0]].in_features for group in groups}
    reference: list[Any] = calibration.reference or [None] * len(calibration.hidden)
    with_drift = calibration.reference is not None
    statistics = {group: InputStatistics(width, model.device, with_drift) for group, width in columns.items()}
    names = [group[0] for group in groups]
    for h, r, mask in zip(calibration.hidden, reference, calibration.masks, strict=True):
        real = mask.to(model.device)
        inputs = model.linear_inputs(index, ours, h.to(model.device), names)
        sources = {} if r is None else model.linear_inputs(index, layer, r.to(model.device), names)
        for group in groups:
            statistics[group].add(inputs[group[0]], real, sources.get(group[0]))
    return statistics


def finite_largest(inputs: InputStatistics, module: str) -> Tensor:
    """Largest input magnitude, fp32 []; UserError names module and sample if one is NaN or infinite."""
    by_sample = inputs.largest_by_sample()
    bad = (~torch.isfinite(by_sample)).nonzero()
    if len(bad):
        raise UserError(
            f"{module}: NaN or infinite activations in calibration sample {bad[0].item()}; try compute.dtype=float32, "
            "or leave that sample out"
        )
    return by_sample.max()


def replace_weights(layer: nn.Module, prefix: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Put the written weights into the layer, dequantized; returns the activation scales by linear."""
    input_scales = {}
    for name, linear in linears_of(layer).items():
        quantized = from_tensors(prefix + name, tensors)
        if quantized is None:
            continue
        device = linear.weight.device
        linear.weight.data = quantized.weight.to(device).dequantize(dtype)
        if quantized.input_scale is not None:
            input_scales[name] = quantized.input_scale.to(device)
    return input_scales


def propagate(
    model: StreamedModel, index: int, layer: nn.Module, input_scales: dict[str, Tensor], hidden: list[Tensor]
) -> None:
    """Turn each batch of `hidden` into the quantized layer's output, in place in the list."""
    with quantized_inputs(layer, input_scales):
        for batch, h in enumerate(hidden):
            hidden[batch] = model.run_layer(index, layer, h.to(model.device)).to(h.device)


def unquantized_linears(model: StreamedModel, records: list[dict[str, Any]]) -> list[str]:
    """Full names of all Linear modules that stay as they were, the head among them."""
    quantized = {name for record in records for name in record["linears"]}
    return [name for name in linears_of(model.model) if name not in quantized]


def layer_figures(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What progress keeps of a layer, and what it shows."""
    linears = record["linears"].values()
    if not linears:
        return {"linears": {}}, "nothing to quantize"
    error = sum(linear["relative_error"] for linear in linears) / len(linears)
    fours = sum(linear["share_of_fours"] for linear in linears) / len(linears)
    figures = {"relative_error": error, "share_of_fours": fours, "linears": record["linears"]}
    return figures, f"error {error:.4f}, 4-blocks {fours:.0%}"


def run_facts(
    settings: Quantize,
    device: torch.device,
    hashes: dict[str, str],
    windows: Windows,
    held_out: Windows,
    records: list[dict[str, Any]],
    quality: dict[str, Quality],
) -> dict[str, Any]:
    """run.json: what went in and what came out. No times, so that a resumed run writes the same bytes."""
    return {
        "settings": plain(settings),
        "environment": environment(device),
        "model_sha256": hashes,
        "calibration": windows.facts(),
        "evaluation": held_out.facts(),
        "quality": {scheme: q.to_dict() for scheme, q in quality.items()},
        "linears": {name: facts for record in records for name, facts in record["linears"].items()},
        "kept": {name: reason for record in records for name, reason in record["kept"].items()},
    }
