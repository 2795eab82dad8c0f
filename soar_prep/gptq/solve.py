"""GPTQ on NVFP4: round one column, move its error onto the columns still to come.

W [N, K] weight, rows are outputs   H [K, K] input second moment   U upper factor of H^-1   p the solving order

    e_j = (w_j - q_j) / U_jj         w_l -= e_j U_jl  for l after j         loss = sum_j |e_j|^2

Scales are chosen once, on the original weights, and belong to original columns: only the order of solving changes
("static act-order"), so the file needs no permutation; refine.py may choose them again afterwards. Columns go in order
of falling diag(H), so that the inputs that matter most are rounded while the most columns can still make up for it.
Source: GPTQ (Frantar et al., 2022); static groups and act-order as in its authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK, share_of_fours, tensor_scale_for
from soar_prep.fouroversix.e2m1 import encode_e2m1, pack_codes, round_to_e2m1
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_to_nvfp4
from soar_prep.gptq.hessian import damped_diagonal, factorize
from soar_prep.gptq.refine import refine
from soar_prep.settings import Method, Quantize

LAZY_COLUMNS = 128  # columns whose errors reach the rest of the matrix in one product


@dataclass(frozen=True)
class Solved:
    """One linear: its NVFP4 weight and how it went."""

    weight: NVFP4Tensor
    method: str
    damping: float | None
    relative_error: float  # tr(D H D^T) / tr(W H W^T), D = W - Q: the share of output energy lost
    share_of_fours: float

    def facts(self) -> dict[str, Any]:
        """All but the weight, as JSON types."""
        return {
            "method": self.method,
            "damping": self.damping,
            "relative_error": self.relative_error,
            "share_of_fours": self.share_of_fours,
        }


def solve_group(weights: dict[str, Tensor], hessian: Tensor, settings: Quantize) -> dict[str, Solved]:
    """Quantize linears that share one input: weights [N_i, K] by name, hessian fp32 [K, K]."""
    stacked = torch.cat([weight.float() for weight in weights.values()])
    tensor_scale = tensor_scale_for(stacked.abs().max(), settings.scale_rule, settings.power_of_two)
    diagonal = damped_diagonal(hessian, settings.damping)
    quantize = quantizer_for(stacked.device)
    quantized = quantize(stacked, tensor_scale, settings.scale_rule, settings.scale_error, diagonal)
    damping = None
    if settings.method is Method.gptq:
        order = torch.argsort(diagonal, descending=True, stable=True) if settings.act_order else None
        quantized, damping = solve(stacked, hessian, quantized.block_scales, tensor_scale, settings.damping, order)
        if settings.refine_passes:
            damped = hessian.clone()
            damped.diagonal().copy_(damped_diagonal(hessian, damping))
            quantized = refine(stacked, quantized, damped, settings.scale_rule, settings.refine_passes)
    difference = stacked - quantized.dequantize()
    lost = ((difference @ hessian) * difference).sum(dim=1)
    whole = ((stacked @ hessian) * stacked).sum(dim=1)

    solved, start = {}, 0
    for name, weight in weights.items():
        rows = slice(start, start + len(weight))
        start += len(weight)
        part = NVFP4Tensor(quantized.codes[rows], quantized.block_scales[rows], tensor_scale)
        solved[name] = Solved(
            weight=part,
            method=settings.method.value,
            damping=damping,
            relative_error=(lost[rows].sum() / whole[rows].sum().clamp(min=1e-30)).item(),
            share_of_fours=share_of_fours(stacked[rows], part.block_scales, tensor_scale),
        )
    return solved


def quantizer_for(device: torch.device) -> Callable[..., NVFP4Tensor]:
    """The truth; on a GPU its Triton twin, which gives the same bits in one pass instead of fifty."""
    if device.type != "cuda":
        return quantize_to_nvfp4
    from soar_prep.fouroversix import triton_quantize  # triton is not there on every platform

    return triton_quantize.quantize_to_nvfp4


def solve(
    weight: Tensor,
    hessian: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    damping: float,
    order: Tensor | None = None,
) -> tuple[NVFP4Tensor, float]:
    """GPTQ of weight fp32 [N, K] under given scales; also the damping that the factor took.

    order: int64 [K], the columns in solving order; None keeps them as they are.
    """
    columns = weight.shape[1]
    order = torch.arange(columns, device=weight.device) if order is None else order
    factor = factorize(hessian[order][:, order], damping)
    scales = block_scales.float().T[order // BLOCK]  # [K, N], in solving order like all below
    values = round_columns(weight.T[order].contiguous(), scales, tensor_scale, factor.upper)
    codes = torch.empty(columns, len(weight), dtype=torch.uint8, device=weight.device)
    codes[order] = encode_e2m1(values)
    return NVFP4Tensor(pack_codes(codes.T.contiguous()), block_scales, tensor_scale), factor.damping


def round_columns(w: Tensor, scales: Tensor, tensor_scale: Tensor, upper: Tensor) -> Tensor:
    """The GPTQ loop. All column-major: w fp32 [K, N] (overwritten), scales fp32 [K, N], upper fp32 [K, K].

    Returns E2M1 values, fp32 [K, N].
    """
    values = torch.empty_like(w)
    round_of = block_rounder_for(w.device)
    for start in range(0, len(w), LAZY_COLUMNS):
        block = slice(start, start + LAZY_COLUMNS)
        values[block], errors = round_of(w[block], scales[block], tensor_scale, upper[block, block])
        w[block.stop :].addmm_(upper[block, block.stop :].T, errors, alpha=-1)
    return values


def round_block(w: Tensor, scales: Tensor, tensor_scale: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(E2M1 values, errors e), both fp32 [C, N], of C columns one after another.

    w fp32 [C, N], overwritten; scales fp32 [C, N]; upper fp32 [C, C], the block of U on its diagonal.
    """
    values, errors = torch.empty_like(w), torch.empty_like(w)
    reciprocals, steps = 1 / (tensor_scale * scales), scales * tensor_scale
    for j in range(len(w)):
        values[j] = round_to_e2m1(w[j] * reciprocals[j])
        errors[j] = (w[j] - values[j] * steps[j]) / upper[j, j]
        w[j + 1 :].addmm_(upper[j, j + 1 :, None], errors[None, j], alpha=-1)  # on a CPU far faster than addr_
    return values, errors


def block_rounder_for(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    if device.type != "cuda":
        return round_block
    from soar_prep.gptq import triton_solve

    return triton_solve.round_block
