"""The quantize road: every step from a Hugging Face directory to an NVFP4 checkpoint, in order."""

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from soar_prep.checkpoint import Checkpoint, PartialOutput, find_model, refuse_existing
from soar_prep.errors import UserError
from soar_prep.fouroversix.tensor import input_scale_for
from soar_prep.gptq.budget import plan_budget
from soar_prep.gptq.hessian import InputStatistics
from soar_prep.gptq.layers import check_layers, plan_layer
from soar_prep.gptq.passes import LayerPasses
from soar_prep.gptq.report_page import write_page
from soar_prep.gptq.solve import solve_group
from soar_prep.layouts import QuantizedWeight, from_tensors, quantization_config, side_configs, to_tensors
from soar_prep.processes import from_main
from soar_prep.quality import Quality, check_gate, measure, quality_lines
from soar_prep.report import Progress, environment, plain
from soar_prep.settings import Method, Quantize, Scheme
from soar_prep.streaming import StreamedModel, linears_of, quantized_inputs
from soar_prep.text import Windows, load_tokenizer, load_windows

PATIENCE = timedelta(days=1)  # of processes that wait for the main one, which measures the quality alone


@torch.no_grad()
def quantize(settings: Quantize) -> Path:
    """Quantize settings.model into settings.output and return that directory.

    Raises UserError for anything the user can mend, most of it before heavy work. Interrupted, it resumes. With several
    processes every one of them calls this: each runs its turn of the calibration batches and solves its share of rows.
    """
    processes = PartialState(cpu=settings.compute.device == "cpu", timeout=PATIENCE)
    source = open_source(settings)
    model = StreamedModel(source, settings.compute, settings.trust_remote_code)
    check_layers(model, settings.keep_unquantized)
    windows, held_out = load_texts(settings, model)
    hashes = source.check_and_hash()
    first_plan = plan_layer(model, 0, model.load_layer(0), settings.keep_unquantized)
    budget = plan_budget(settings, source, model, first_plan, windows)
    say(*budget.lines())
    budget.check()
    output = open_output(settings, identity(settings, hashes, windows), len(model.layers) + 1)
    progress = None
    if processes.is_main_process:
        progress = Progress(output.directory, len(model.layers), "layer", settings.wandb, plain(settings))
        if output.record(0) is None:
            output.write_behind(0, tensors_outside_layers(source, model), record={})

    batches = list(windows.batches(settings.compute.batch_tokens))[processes.process_index :: processes.num_processes]
    masks = [windows.mask[batch] for batch in batches]
    store = model.device if budget.keep_activations_on_gpu else torch.device("cpu")
    hidden = [model.embed(windows.token_ids[batch]).to(store) for batch in batches]
    reference = list(hidden) if settings.corrects_targets else None
    records = []
    for index in range(len(model.layers)):
        layer, prefix = model.load_layer(index), model.layer_prefix(index)
        ours = LayerPasses(model, index, copy.deepcopy(layer), hidden)
        sources = None if reference is None else LayerPasses(model, index, layer, reference)
        record = from_main(output.record(index + 1))
        if record is None:
            record, tensors, input_scales = quantize_layer(source, ours, sources, masks, settings)
            if processes.is_main_process:
                output.write_behind(index + 1, tensors, record)
        else:
            input_scales = replace_weights(ours.layer, prefix, output.read(index + 1), model.dtype)
        if index + 1 < len(model.layers):
            with quantized_inputs(ours.layer, input_scales if settings.scheme is Scheme.w4a4 else {}):
                ours.advance()
            if sources is not None:
                sources.advance()
        if progress is not None:
            progress.step(*layer_figures(record))
        records.append(record)
    del hidden, reference, ours, sources, layer
    if progress is not None:
        finish(settings, source, model, output, progress, windows, held_out, hashes, records)
    return output.output


def finish(
    settings: Quantize,
    source: Checkpoint,
    model: StreamedModel,
    output: PartialOutput,
    progress: Progress,
    windows: Windows,
    held_out: Windows,
    hashes: dict[str, str],
    records: list[dict[str, Any]],
) -> None:
    """Config, index and side files; the quality of what is written; report; the final name."""
    ignore = unquantized_linears(model, records)
    output.complete(
        source.config
        | {"quantization_config": quantization_config(settings.export, ignore, settings.weight_only_config)},
        source,
        side_configs(settings.export, ignore, settings.weight_only_config),
    )
    written = Checkpoint(output.directory)
    quality = measure(model, written, held_out, settings.compute)
    say(*quality_lines(quality))
    check_gate(quality[settings.scheme.value], settings.gate, output.directory)
    facts = run_facts(settings, model.device, hashes, windows, held_out, records, quality)
    facts |= {"source_bytes": source.size(), "output_bytes": written.size()}
    output.add_json("run.json", facts)
    write_page(output.directory / "report.html", facts, progress.elapsed())
    progress.close({f"{scheme}_kl": q.kl for scheme, q in quality.items()})
    output.finish()


def say(*lines: str) -> None:
    if PartialState().is_main_process:
        print(*lines, sep="\n", flush=True)


def open_output(settings: Quantize, identity: dict[str, Any], parts: int) -> PartialOutput:
    """The main process opens the directory, and alone writes to it; the others read what it finds there."""
    if PartialState().is_main_process:
        output = PartialOutput(Path(settings.output), identity, parts)
    PartialState().wait_for_everyone()
    return output if PartialState().is_main_process else PartialOutput.joined(Path(settings.output), parts)


def open_source(settings: Quantize) -> Checkpoint:
    refuse_existing(Path(settings.output))
    if settings.weight_only_config and settings.scheme is Scheme.w4a4:
        raise UserError("weight_only_config=true: excludes scheme=w4a4; use scheme=w4a16, or leave the config open")
    if settings.exact_loss and settings.method is not Method.gptq:
        raise UserError("exact_loss=true: what GPTQ loses needs method=gptq")
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
    say(
        f"calibration: {len(windows)} of {wanted} windows, {windows.n_tokens} tokens, {windows.truncated} cut at "
        f"{settings.calibration.length}; evaluation: {len(held_out)} windows, {held_out.n_tokens} tokens"
    )
    return windows, held_out


def identity(settings: Quantize, hashes: dict[str, str], windows: Windows) -> dict[str, Any]:
    """All that the written weights depend on: a resumed run must agree with it."""
    chosen = plain(settings)
    for name in ("model", "output", "evaluation", "gate", "wandb", "calibration", "memory"):
        del chosen[name]
    versions = environment(torch.device("cpu"))["packages"]
    return chosen | {"model": hashes, "calibration": windows.sha256(), "versions": versions}


def tensors_outside_layers(source: Checkpoint, model: StreamedModel) -> dict[str, Tensor]:
    """Embeddings, last norm, head: as they are, but a head tied to the embeddings is not written a second time."""
    names = [name for name in source.files if not name.startswith(model.layers_name + ".")]
    tied = model.tied_names()
    return {name: source[name] for name in names if name not in tied}


def quantize_layer(
    source: Checkpoint,
    ours: LayerPasses,
    sources: LayerPasses | None,
    masks: list[Tensor],
    settings: Quantize,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Solve one decoder layer and put the result into `ours`.

    Returns its record for run.json, all its tensors as the file will hold them, and the activation scales by linear.

    ours: the layer, on what the quantized layers before it give; sources: the source's, on what the source's give, if
    targets are corrected; masks: bool [B, T] of each batch, True on real tokens. With corrected targets each group of
    linears is solved on what those before it in the layer, already rounded, give; without, all are solved on what the
    layer gives as it is.
    """
    model = ours.model
    prefix = model.layer_prefix(ours.index)
    plan = plan_layer(model, ours.index, ours.layer, settings.keep_unquantized)
    stages = [plan.groups] if sources is None else [[group] for group in plan.groups]
    tensors = {name: source[name] for name in source.names(prefix)}
    record: dict[str, Any] = {"linears": {}, "kept": {prefix + name: reason for name, reason in plan.kept.items()}}
    input_scales: dict[str, Tensor] = {}
    linears, final = linears_of(ours.layer), set(plan.kept)
    if sources is not None:
        sources.settle(linears_of(sources.layer))
    for groups in stages:
        with quantized_inputs(ours.layer, input_scales if settings.scheme is Scheme.w4a4 else {}):
            statistics = collect_statistics(ours, sources, groups, masks)
        solved: dict[str, Tensor] = {}
        for group in groups:
            inputs = statistics.pop(group)
            input_scale = input_scale_for(finite_largest(inputs, prefix + group[0]))
            weights = {name: as_in_file(linears[name].weight, tensors.pop(f"{prefix}{name}.weight")) for name in group}
            hessian, drift = inputs.finish()
            for name, result in solve_group(weights, hessian, settings, drift).items():
                quantized = QuantizedWeight(result.weight, None if settings.weight_only_config else input_scale)
                solved |= to_tensors(prefix + name, quantized, settings.export)
                record["linears"][prefix + name] = result.facts() | {"input_scale": input_scale.item()}
            final |= set(group)
        tensors |= solved
        input_scales |= replace_weights(ours.layer, prefix, solved, model.dtype)
        ours.settle(final)
    return record, tensors, input_scales


def as_in_file(weight: Tensor, stored: Tensor) -> Tensor:
    """The stored weight on the device of the loaded one, which saves the way there if nothing was cast."""
    return weight if weight.dtype == stored.dtype else stored.to(weight.device)


def collect_statistics(
    ours: LayerPasses, sources: LayerPasses | None, groups: list[tuple[str, ...]], masks: list[Tensor]
) -> dict[tuple[str, ...], InputStatistics]:
    """Hessian, and drift from the source's if that is given, of each shared input."""
    device, columns = ours.model.device, linears_of(ours.layer)
    statistics = {g: InputStatistics(columns[g[0]].in_features, device, sources is not None) for g in groups}
    names = [group[0] for group in groups]
    for batch, mask in enumerate(masks):
        real = mask.to(device)
        inputs = ours.linear_inputs(batch, names)
        references = {} if sources is None else sources.linear_inputs(batch, names)
        for group in groups:
            statistics[group].add(inputs[group[0]], real, references.get(group[0]))
    for each in statistics.values():
        each.gather()
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
