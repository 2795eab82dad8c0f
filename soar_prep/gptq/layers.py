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
from soar_prep.streaming import StreamedModel, linears_of, watching_inputs


@dataclass(frozen=True)
class LayerPlan:
    """groups: names of quantized linears, those with the same input together; kept: name -> why it stays as it is."""

    groups: list[tuple[str, ...]]
    kept: dict[str, str]


def plan_layer(model: StreamedModel, index: int, layer: nn.Module, keep_patterns: list[str]) -> LayerPlan:
    """Plan one decoder layer; runs it once on a few tokens to see which linears are given the same tensor.

    keep_patterns: globs over full module names. UserError for experts fused into one tensor.
    """
    prefix = model.layer_prefix(index)
    kept: dict[str, str] = {}
    wanted: list[str] = []
    for name, linear in linears_of(layer).items():
        if any(fnmatchcase(prefix + name, pattern) for pattern in keep_patterns):
            kept[name] = "keep_unquantized"
        elif linear.in_features % BLOCK:
            kept[name] = f"{linear.in_features} input columns do not divide into blocks of {BLOCK}"
        else:
            wanted.append(name)
    refuse_fused_experts(layer, prefix)
    return LayerPlan(group_by_input(model, index, layer, wanted), kept)


def group_by_input(model: StreamedModel, index: int, layer: nn.Module, names: list[str]) -> list[tuple[str, ...]]:
    """Names of linears that the layer feeds the very same tensor, in the order of their first call."""
    inputs: list[Tensor] = []
    groups: list[list[str]] = []

    def note(x: Tensor, name: str) -> None:
        for seen, group in zip(inputs, groups, strict=True):
            if seen is x:
                group.append(name)
                return
        inputs.append(x)
        groups.append([name])

    with watching_inputs(layer, {name: partial(note, name=name) for name in names}):
        model.run_layer(index, layer, torch.zeros(1, 2, model.hidden_size, device=model.device, dtype=model.dtype))
    return [tuple(group) for group in groups]


def refuse_fused_experts(layer: nn.Module, prefix: str) -> None:
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 3:
            raise UserError(
                f"{prefix}{name}: shape {list(parameter.shape)} looks like fused experts; "
                "mixture-of-experts models are not supported"
            )
