"""`round_block` on a GPU: all columns of a lazy block in one kernel, where the truth launches six for each.

Rows of the weight meet only in the Hessian, so a program takes 32 rows, one a thread, and holds their whole block in
registers: what the loop over columns shares is a row of U. A column is read out of the registers as a sum of its bits
and of zeros.

Products and sums are not fused and divisions are IEEE: values and errors have the bits that the truth has if its BLAS
rounds every product.

Truth: solve.round_block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.fouroversix.triton_quantize import round_to_step

ROWS = 32  # of a program: one a thread
MOST_COLUMNS = 128  # of a block: each is a register


def round_block(w: Tensor, scales: Tensor, tensor_scale: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(E2M1 values, errors), both fp32 [C, N], of C <= 128 columns; see solve.round_block. w stays as it is.

    ValueError for more columns, or 2^24 rows and more. On a CPU tensor it runs in Triton's interpreter alone.
    """
    columns, rows = w.shape
    if columns > MOST_COLUMNS or w.stride(0) >= 2**24:  # offsets are 32 bits wide
        raise ValueError(f"w {list(w.shape)}: expected at most {MOST_COLUMNS} columns of fewer than 2^24 rows")
    values, errors = torch.empty_like(w), torch.empty_like(w)
    scales, upper = scales.contiguous(), upper.contiguous()
    with torch.cuda.device_of(w):
        round_kernel[(triton.cdiv(rows, ROWS),)](
            w,
            scales,
            tensor_scale,
            upper,
            values,
            errors,
            columns,
            rows,
            w.stride(0),
            COLUMNS=max(triton.next_power_of_2(columns), 2),
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return values, errors


@triton.jit
def round_kernel(
    w,
    scales,
    tensor_scale,
    upper,
    values,
    errors,
    columns,
    rows,
    w_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    tile = tl.load(w + column[:, None] * w_stride + row, mask=is_column[:, None] & is_row, other=0.0)
    t = tl.load(tensor_scale)
    for j in range(columns):
        place = j * rows + row
        s = tl.load(scales + place, mask=is_row, other=1.0)
        bits = tl.where(column[:, None] == j, tile.to(tl.int32, bitcast=True), 0)
        w_j = tl.sum(bits, axis=0).to(tl.float32, bitcast=True)
        v = w_j * tl.div_rn(1.0, t * s)
        magnitude = round_to_step(tl.minimum(tl.abs(v), 6.0), 1.0, 1.5 * 2.0**22)
        sign = v.to(tl.int32, bitcast=True) & -0x80000000
        value = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        error = tl.div_rn(w_j - value * (s * t), tl.load(upper + j * columns + j))
        tl.store(values + place, value, mask=is_row)
        tl.store(errors + place, error, mask=is_row)
        later = is_column & (column > j)
        u = tl.load(upper + j * columns + column, mask=later, other=0.0)
        tile = tl.where(later[:, None], tile - u[:, None] * error, tile)
