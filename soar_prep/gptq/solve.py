"""GPTQ on NVFP4: round one column, move its error onto the columns still to come.

W [N, K] weight, rows are outputs   H [K, K] input second moment   U upper factor of H^-1   D drift   c correction

    V = W + c W D H^-1     e_j = (v_j - q_j) / U_jj     v_l -= e_j U_jl  for l after j     loss = sum_j |e_j|^2

What is rounded is not W but V. The layers before a linear are rounded already, so it is given X where the source's was
given Y; with c = 1 V X comes as near to W Y as a matrix can bring it, in the least squares over the calibration text,
and so makes up for errors that are not its own. Less than that leaves some to chance: it fits other text better.

Scales are chosen once, on the original weights, and belong to original columns: only the order of solving changes
("static act-order"), so the file needs no permutation; refine.py may choose them again afterwards. Columns go in order
of falling diag(H), so that the inputs that matter most are rounded while the most columns can still make up for it.
Source: GPTQ (Frantar et al., 2022); static groups and act-order as in its authors' code; the corrected target as in
GPTAQ (Li et al., 2025) and Qronos (Zhang et al., 2025), here before the solve and by a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK, share_of_fours, tensor_scale_for
from soar_prep.fouroversix.e2m1 import encode_e2m1, pack_codes, round_to_e2m1
from soar_prep.fouroversix.quantizer import quantizer_for
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.gptq.exact import group_aware_order, solve_exactly
from soar_prep.gptq.hessian import Factor, damped_diagonal, factorize, product
from soar_prep.gptq.refine import refine
from soar_prep.processes import all_max, all_rows, my_rows
from soar_prep.settings import Method, Quantize

LAZY_COLUMNS = 128  # columns whose errors reach the rest of the matrix in one product


@dataclass(frozen=True)
class Solved:
    """One linear: its NVFP4 weight and how it went."""

    weight: NVFP4Tensor
    method: str
    damping: float | None
    relative_error: float  # tr((V - Q) H (V - Q)^T) / tr(V H V^T): the share of output energy lost by rounding
    share_of_fours: float

    def facts(self) -> dict[str, Any]:
        """All but the weight, as JSON types."""
        return {
            "method": self.method,
            "damping": self.damping,
            "relative_error": self.relative_error,
            "share_of_fours": self.share_of_fours,
        }


def solve_group(
    weights: dict[str, Tensor], hessian: Tensor, settings: Quantize, drift: Tensor | None = None
) -> dict[str, Solved]:
    """Quantize linears that share one input: weights [N_i, K] by name, hessian fp32 [K, K].

    drift: fp32 [K, K], if the targets are to be corrected by it; see above. Several processes each solve their share of
    the rows, which do not depend on each other, and all get all.
    """
    stacked = torch.cat([weight.float() for weight in weights.values()])
    count = len(stacked)
    w = stacked[my_rows(count)]
    diagonal = damped_diagonal(hessian, settings.damping)
    factor = None
    if settings.method is Method.gptq:
        factor = factorize(hessian, settings.damping, order_of(diagonal, settings))
        if drift is not None:
            w = w + settings.correction * factor.times_inverse(product(w, drift))
    tensor_scale = tensor_scale_for(all_max(w.abs().max()), settings.scale_rule, settings.power_of_two)
    if factor is not None and settings.exact_loss:
        quantized = solve_exactly(w, tensor_scale, settings.scale_rule, factor)
    else:
        quantize = quantizer_for(w.device)
        quantized = quantize(w, tensor_scale, settings.scale_rule, settings.scale_error, diagonal)
        if factor is not None:
            quantized = solve(w, quantized.block_scales, tensor_scale, factor)
    if factor is not None and settings.refine_passes:
        damped = hessian.clone()
        damped.diagonal().copy_(damped_diagonal(hessian, factor.damping))
        quantized = refine(w, quantized, damped, settings.scale_rule, settings.refine_passes)
    difference = w - quantized.dequantize()
    lost = all_rows((product(difference, hessian) * difference).sum(dim=1), count)
    whole = all_rows((product(w, hessian) * w).sum(dim=1), count)
    fours = all_rows(share_of_fours(w, quantized.block_scales, tensor_scale), count)
    codes = all_rows(quantized.codes, count)
    block_scales = all_rows(quantized.block_scales.view(torch.uint8), count).view(torch.float8_e4m3fn)

    solved, start = {}, 0
    for name, weight in weights.items():
        rows = slice(start, start + len(weight))
        start += len(weight)
        solved[name] = Solved(
            weight=NVFP4Tensor(codes[rows], block_scales[rows], tensor_scale),
            method=settings.method.value,
            damping=None if factor is None else factor.damping,
            relative_error=(lost[rows].sum() / whole[rows].sum().clamp(min=1e-30)).item(),
            share_of_fours=fours[rows].mean().item(),
        )
    return solved


def order_of(diagonal: Tensor, settings: Quantize) -> Tensor | None:
    """The columns in the order of solving, int64 [K]; None as they are."""
    if not settings.act_order:
        return None
    if settings.exact_loss:
        return group_aware_order(diagonal)
    return torch.argsort(diagonal, descending=True, stable=True)


def solve(weight: Tensor, block_scales: Tensor, tensor_scale: Tensor, factor: Factor) -> NVFP4Tensor:
    """GPTQ of weight fp32 [N, K] under given scales (e4m3 [N, K/16], fp32 []), in the factor's order."""
    order = factor.order
    scales = block_scales.float().T[order // BLOCK]  # [K, N], in solving order like all below
    values = round_columns(weight.T[order].contiguous(), scales, tensor_scale, factor.upper)
    codes = torch.empty(len(order), len(weight), dtype=torch.uint8, device=weight.device)
    codes[order] = encode_e2m1(values)
    return NVFP4Tensor(pack_codes(codes.T.contiguous()), block_scales, tensor_scale)


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
