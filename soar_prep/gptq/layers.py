"""Which linears of a decoder layer are quantized, and which of them read the same input.

Linears with a common input (q, k, v and any gates; gate and up) are solved together: they share one Hessian, one
tensor scale and one input scale. Servers that fuse such linears at load need exactly that, whichever they fuse.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.streaming import linears_of


@dataclass(frozen=True)
class LayerPlan:
    """groups: names of quantized linears, those with the same input together; kept: name -> why it stays as it is."""

    groups: list[tuple[str, ...]]
    kept: dict[str, str]


def plan_layer(layer: nn.Module, prefix: str, keep_patterns: list[str], run: Callable[[], object]) -> LayerPlan:
    """Plan one decoder layer; `run` runs it once, on any input, to see which linears are given the same tensor.

    prefix: the layer's full name with a dot, for the patterns. UserError if nothing is left to quantize.
    """
    kept: dict[str, str] = {}
    wanted: dict[str, nn.Linear] = {}
    for name, linear in linears_of(layer).items():
        if any(fnmatchcase(prefix + name, pattern) for pattern in keep_patterns):
            kept[name] = "keep_unquantized"
        elif linear.in_features % BLOCK:
            kept[name] = f"{linear.in_features} input columns do not divide into blocks of {BLOCK}"
        else:
            wanted[name] = linear
    refuse_fused_experts(layer, prefix)
    return LayerPlan(group_by_input(wanted, run), kept)


def group_by_input(linears: dict[str, nn.Linear], run: Callable[[], object]) -> list[tuple[str, ...]]:
    """Names of linears that `run` feeds the very same tensor, in the order of their first call."""
    inputs: list[Tensor] = []
    groups: list[list[str]] = []

    def note(name: str, x: Tensor) -> None:
        for seen, group in zip(inputs, groups, strict=True):
            if seen is x:
                group.append(name)
                return
        inputs.append(x)
        groups.append([name])

    with ExitStack() as stack:
        for name, linear in linears.items():
            handle = linear.register_forward_pre_hook(lambda _module, args, name=name: note(name, args[0]))
            stack.callback(handle.remove)
        run()
    return [tuple(group) for group in groups]


def refuse_fused_experts(layer: nn.Module, prefix: str) -> None:
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 3:
            raise UserError(
                f"{prefix}{name}: shape {list(parameter.shape)} looks like fused experts; "
                "mixture-of-experts models are not supported"
            )
