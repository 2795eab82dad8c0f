"""`solve_block` on a GPU: every candidate scale of a block tried in one kernel, where the truth launches hundreds.

A program takes 32 rows, one a thread, and holds a row's 16 numbers in registers. It rounds them once for every
candidate, keeping the loss alone, and once more under the best. Products and sums are not fused and divisions are IEEE,
so values and scales have the truth's bits.

Truth: refine.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.fouroversix.triton_quantize import SWEEP_FIRST, SWEEP_LAST, e4m3_code, round_to_step, sixth, to_e4m3
from soar_prep.settings import ScaleRule

ROWS = 32  # of a program: one a thread


def solve_block(
    x: Tensor, values: Tensor, scales: Tensor, upper: Tensor, tensor_scale: Tensor, rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """(E2M1 values fp32 [16, N], block scales e4m3 [N]); see refine.solve_block. All contiguous.

    On CPU tensors it runs in Triton's interpreter alone.
    """
    rows = x.shape[1]
    found, chosen = torch.empty_like(values), torch.empty_like(scales)
    with torch.cuda.device_of(x):
        solve_kernel[(triton.cdiv(rows, ROWS),)](
            *(x, values, scales.view(torch.uint8), upper, tensor_scale, found, chosen.view(torch.uint8), rows),
            RULE=rule.value,
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return found, chosen


@triton.jit
def solve_kernel(x, values, scales, upper, tensor_scale, found, chosen, rows, RULE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    place = tl.arange(0, 16)[:, None] * rows + row
    tile = tl.load(x + place, mask=is_row, other=0.0)
    given = tl.load(values + place, mask=is_row, other=0.0)
    t = tl.load(tensor_scale)
    given_scale = from_e4m3_code(tl.load(scales + row, mask=is_row, other=1).to(tl.int32))
    best, _ = losses(tile, given, given_scale, t, upper, False)
    s = given_scale

    ideal = sixth(tl.max(tl.abs(tile), axis=0)) * tl.div_rn(1.0, t)
    six = to_e4m3(ideal)
    s, best = better(tile, given, six, s, best, t, upper)
    if RULE == "four_over_six":
        s, best = better(tile, given, to_e4m3(ideal * 1.5), s, best, t, upper)
    elif RULE == "sweep":
        for step in range(SWEEP_FIRST, SWEEP_LAST):
            offset = tl.where(step < 0, step, step + 1)  # the truth's offsets without 0, which is six
            code = tl.minimum(tl.maximum(e4m3_code(six) + offset, 0x01), 0x7E)
            s, best = better(tile, given, from_e4m3_code(code), s, best, t, upper)
    before, _ = losses(tile, given, given_scale, t, upper, False)
    _, rounded = losses(tile, given, s, t, upper, True)
    tl.store(found + place, tl.where((best < before)[None, :], rounded, given), mask=is_row)
    tl.store(chosen + row, e4m3_code(s).to(tl.uint8), mask=is_row)


@triton.jit
def better(tile, given, candidate, s, best, t, upper):
    loss, _ = losses(tile, given, candidate, t, upper, True)
    return tl.where(loss < best, candidate, s), tl.minimum(loss, best)


@triton.jit
def losses(tile, given, s, t, upper, ROUND: tl.constexpr):
    """(loss [ROWS], values [16, ROWS]) of a tile under scales s [ROWS]: rounded, or those given."""
    column = tl.arange(0, 16)
    reciprocal, step = tl.div_rn(1.0, t * s), s * t
    loss = tl.zeros_like(s)
    values = given
    for j in range(16):
        here = column[:, None] == j
        w_j = pick(tile, here)
        if ROUND:
            v = w_j * reciprocal
            magnitude = round_to_step(tl.minimum(tl.abs(v), 6.0), 1.0, 1.5 * 2.0**22)
            sign = v.to(tl.int32, bitcast=True) & -0x80000000
            value = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
            values = tl.where(here, value[None, :], values)
        else:
            value = pick(given, here)
        error = tl.div_rn(w_j - value * step, tl.load(upper + j * 16 + j))
        loss += error * error
        u = tl.load(upper + j * 16 + column, mask=column > j, other=0.0)
        tile = tl.where((column > j)[:, None], tile - u[:, None] * error, tile)
    return loss, values


@triton.jit
def pick(tile, here):
    """Row of a tile, as the sum of its bits and of zeros."""
    bits = tl.where(here, tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3_code(code):
    return (code << 20).to(tl.float32, bitcast=True) * 2.0**120
