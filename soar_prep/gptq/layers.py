"""Which linears of a decoder layer are quantized, and which of them read the same input.

Linears with a common input (q, k, v and any gates; gate and up) are solved together: they share one Hessian, one
tensor scale and one input scale. Servers that fuse such linears at load need exactly that, whichever they fuse.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.layouts import FUSED_GROUPS
from soar_prep.streaming import StreamedModel, linears_of, watching_inputs

PROBE_TOKENS = 2


@dataclass(frozen=True)
class LayerPlan:
    """groups: names of quantized linears, those with the same input together; kept: name -> why it stays as it is."""

    groups: list[tuple[str, ...]]
    kept: dict[str, str]


def check_layers(model: StreamedModel, keep_patterns: list[str]) -> None:
    """UserError, before any layer is read, for what `plan_layer` cannot plan in a way that servers load.

    keep_patterns: globs over full module names.
    """
    names = list(linears_of(model.model))
    for pattern in keep_patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            examples = f"such as {names[0]}" if names else "of which there are none"
            raise UserError(f"keep_unquantized: {pattern!r} matches no linear; expected full names, {examples}")
    model.embed(torch.arange(PROBE_TOKENS)[None])  # refuses layers that are given more than hidden states
    is_anything_left = False
    for index, layer in enumerate(model.layers):
        prefix = model.layer_prefix(index)
        refuse_fused_experts(layer, prefix)
        kept = reasons_to_keep(layer, prefix, keep_patterns)
        refuse_split_groups(layer, prefix, kept)
        is_anything_left |= len(kept) < len(linears_of(layer))
    if not is_anything_left:
        raise UserError(
            f"{type(model.model).__name__}: no linear in its layers is left to quantize; expected some that "
            f"keep_unquantized={keep_patterns} does not name, with input columns that divide into blocks of {BLOCK}"
        )


def reasons_to_keep(layer: nn.Module, prefix: str, keep_patterns: list[str]) -> dict[str, str]:
    """Linears of a layer that stay as they are, with the reason."""
    kept: dict[str, str] = {}
    for name, linear in linears_of(layer).items():
        if any(fnmatchcase(prefix + name, pattern) for pattern in keep_patterns):
            kept[name] = "keep_unquantized"
        elif linear.in_features % BLOCK:
            kept[name] = f"{linear.in_features} input columns do not divide into blocks of {BLOCK}"
    return kept


def plan_layer(model: StreamedModel, index: int, layer: nn.Module, keep_patterns: list[str]) -> LayerPlan:
    """Plan one decoder layer; runs it once on two tokens to see which linears are given the same tensor."""
    kept = reasons_to_keep(layer, model.layer_prefix(index), keep_patterns)
    groups = group_by_input(model, index, layer, [name for name in linears_of(layer) if name not in kept])
    called = {name for group in groups for name in group}
    kept |= {name: "the layer does not call it" for name in linears_of(layer) if name not in called | kept.keys()}
    return LayerPlan(groups, kept)


def group_by_input(model: StreamedModel, index: int, layer: nn.Module, names: list[str]) -> list[tuple[str, ...]]:
    """Names of linears that the layer feeds the very same tensor, in the order of their first call.

    UserError for a linear that is not given every token, such as an expert behind a router.
    """
    inputs: list[Tensor] = []
    groups: list[list[str]] = []

    def note(x: Tensor, name: str) -> None:
        if x.shape[:-1].numel() != PROBE_TOKENS:
            raise UserError(
                f"{model.layer_prefix(index)}{name}: given {x.shape[:-1].numel()} of {PROBE_TOKENS} tokens; "
                "mixture-of-experts models are not supported"
            )
        for seen, group in zip(inputs, groups, strict=True):
            if seen is x:
                group.append(name)
                return
        inputs.append(x)
        groups.append([name])

    hidden = torch.zeros(1, PROBE_TOKENS, model.hidden_size, device=model.device, dtype=model.dtype)
    with watching_inputs(layer, {name: partial(note, name=name) for name in names}):
        model.run_layer(index, layer, hidden)
    return [tuple(group) for group in groups]


def refuse_split_groups(layer: nn.Module, prefix: str, kept: dict[str, str]) -> None:
    """UserError where only some linears of a group that servers fuse would be quantized."""
    names = linears_of(layer).keys()
    for name in kept:
        parent, dot, own = name.rpartition(".")
        for group in FUSED_GROUPS:
            others = [parent + dot + member for member in group if own in group and parent + dot + member in names]
            split = [other for other in others if other not in kept]
            if split:
                raise UserError(
                    f"keep_unquantized: keeps {prefix}{name} but not {', '.join(split)}, and servers fuse them; "
                    "keep all of them or none"
                )


def refuse_fused_experts(layer: nn.Module, prefix: str) -> None:
    for name, parameter in layer.named_parameters():
        owner = layer.get_submodule(name.rpartition(".")[0])
        if parameter.ndim == 3 and not isinstance(owner, nn.Conv1d):
            raise UserError(
                f"{prefix}{name}: shape {list(parameter.shape)} looks like fused experts; "
                "mixture-of-experts models are not supported"
            )
