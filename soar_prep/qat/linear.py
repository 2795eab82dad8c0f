"""Linear layers that are trained under the numbers they will be served in.

master weight, fp32, the optimizer's  ->  codes, block scales, tensor scale, as the file will have them  ->  the weight
that is multiplied. What is multiplied is exact in bf16, since tensor scales and input scales are powers of two: the
products are those of gemm.py, bit for bit, and an ordinary GEMM forms them. The gradient goes straight through both
roundings: that of the rounded weight is taken for the master's, that of the rounded input for the input's.
Source: straight-through estimator (Bengio et al., 2013).
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soar_prep.fouroversix.blocks import BLOCK, power_of_two_from, tensor_scale_for
from soar_prep.fouroversix.quantizer import quantizer_for
from soar_prep.fouroversix.tensor import NVFP4Tensor, input_scale_for, round_activations
from soar_prep.layouts import FUSED_GROUPS
from soar_prep.settings import Activations, ScaleError, ScaleRule


class NVFP4Linear(nn.Linear):
    """A linear layer without bias whose weight is to become NVFP4.

    is_rounded: off, it is an ordinary linear layer; on, its inputs are rounded as `activations` says, and whoever runs
    it puts `rounded_weights` in place of its own weight. input_scale: fp32 [], a power of two, once it is calibrated.
    stored: the numbers that `weight` was dequantized from, where it was.
    """

    input_scale: Tensor | None

    def __init__(self, weight: nn.Parameter, activations: Activations = Activations.none):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.activations = activations
        self.is_rounded = False
        self.stored: NVFP4Tensor | None = None
        self.register_buffer("input_scale", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_rounded and self.activations is not Activations.none:
            scale = self.input_scale
            if self.activations is Activations.dynamic:
                scale = input_scale_of(x.detach().abs().amax())
            x = _RoundedInput.apply(x, scale)
        return F.linear(x, self.weight)


def to_nvfp4_linears(model: nn.Module, names: Collection[str], activations: Activations) -> None:
    """Put an NVFP4Linear with the very same weight in place of each named linear. ValueError for one that cannot be."""
    for name in names:
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear) or linear.bias is not None or linear.in_features % BLOCK:
            raise ValueError(f"{name}: expected a linear layer without bias, its inputs a multiple of {BLOCK}")
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, NVFP4Linear(linear.weight, activations))


def nvfp4_linears(model: nn.Module) -> dict[str, NVFP4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}


def quantize_weights(weights: dict[str, Tensor], rule: ScaleRule, error: ScaleError) -> dict[str, NVFP4Tensor]:
    """Weights [N, K] of linears, by module name, as the file has them: fused groups share a tensor scale."""
    quantized = {}
    for group in fused_groups(weights):
        largest = torch.stack([weights[name].detach().abs().amax() for name in group]).amax()
        tensor_scale = tensor_scale_for(largest, rule, power_of_two=True)
        for name in group:
            quantize = quantizer_for(weights[name].device)
            quantized[name] = quantize(weights[name].detach(), tensor_scale, rule, error)
    return quantized


def rounded_weights(model: nn.Module, dtype: torch.dtype, rule: ScaleRule, error: ScaleError) -> dict[str, Tensor]:
    """All parameters by name, for `torch.func.functional_call`: those of rounded NVFP4Linears as they will be served,
    the others rounded to dtype. Gradients arrive at the parameters themselves."""
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    masters = {name: linear.weight for name, linear in nvfp4_linears(model).items() if linear.is_rounded}
    for name, stored in quantize_weights(dict(masters), rule, error).items():
        weights[f"{name}.weight"] = _RoundedWeight.apply(masters[name], stored.dequantize(dtype))
    return weights


def fused_groups(names: Collection[str]) -> list[list[str]]:
    """Module names, those that a server fuses together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        leader = next((group[0] for group in FUSED_GROUPS if own in group), own)
        groups.setdefault((parent, leader), []).append(name)
    return list(groups.values())


def input_scale_of(largest: Tensor) -> Tensor:
    """Activation scale, fp32 [], a power of two, for inputs up to `largest` (fp32 [])."""
    return power_of_two_from(input_scale_for(largest))


class _RoundedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _RoundedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, input_scale: Tensor) -> Tensor:
        return round_activations(x, input_scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
