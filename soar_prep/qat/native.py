"""`matmul` of gemm.py for W4A4 on GPUs with FP4 units, sm_100 and sm_120: codes and scales go into the MMA as they are.

x [M, K] packed activations   W [N, K] packed weight   t u tensor scales   y = t u sum_k (e_x s_x)(e_w s_w)

Truth: gemm.py. The instruction multiplies E2M1 values, scales blocks of 16 by their E4M3 scales and sums in fp32
(PTX: mma with kind::mxf4nvf4, scale_vec::4X, ue4m3 on sm_120; tcgen05.mma with kind::mxf4nvf4 and block16 on sm_100).
t u comes in once, in fp32, before the one rounding to the output dtype.
Layout: nothing is packed anew. Both operands have the even column in the low nibble, as `tl.dot_scaled` wants it, and
their block scales are read plain, [rows, K/16], not swizzled.

NOT RUN YET on such a GPU: none was at hand. What is checked is that it compiles for both and that the instruction is in
the code. `soar-prep selftest` compares it with the truth where there is one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.qat.triton_gemm import aligned, check_operands


def matmul(x: NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of weight [N, K]: [M, N], rounded once to dtype (fp32, bf16 or fp16).

    Both on one GPU with FP4 units; any M and N, K a multiple of 16.
    """
    if not isinstance(x, NVFP4Tensor):
        raise ValueError(f"x is a tensor of {x.dtype}; expected NVFP4: an FP4 product has two packed operands")
    check_operands(x, weight)
    rows, outputs, half = len(x.codes), len(weight.codes), weight.codes.shape[1]
    y = torch.empty(rows, outputs, dtype=dtype, device=weight.codes.device)
    with torch.cuda.device_of(y):
        native_kernel[(triton.cdiv(rows, 128) * triton.cdiv(outputs, 128),)](
            aligned(x.codes),
            aligned(x.block_scales),
            aligned(weight.codes),
            aligned(weight.block_scales),
            weight.tensor_scale * x.tensor_scale,
            y,
            rows,
            outputs,
            half,
            BLOCK_M=128,  # what tcgen05 takes; sm_120 would take less, but a small M is bound by the bytes of W
            BLOCK_N=128,
            BLOCK_K=128,
            num_warps=8,
            num_stages=3,
        )
    return y


@triton.jit
def native_kernel(
    x,
    x_scales,
    codes,
    block_scales,
    scale,
    y,
    rows,
    outputs,
    half,  # K / 2, the bytes of a row
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs that follow one another share rows of W, the larger operand.
    tiles = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row once more, which is not stored.
    own_m, own_n = tl.minimum(m, rows - 1).to(tl.int64), tl.minimum(n, outputs - 1).to(tl.int64)
    byte, block = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 16)
    x_places = x + own_m[:, None] * half + byte[None, :]
    code_places = codes + own_n[None, :] * half + byte[:, None]
    x_scale_places = x_scales + own_m[:, None] * (half // 8) + block[None, :]
    scale_places = block_scales + own_n[:, None] * (half // 8) + block[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, half, BLOCK_K // 2):
        # Past the end codes and scales are zero: what a NaN scale times a zero code adds is not.
        is_byte, is_block = byte < half - k, block[None, :] < (half - k) // 8
        sums = tl.dot_scaled(
            tl.load(x_places, mask=is_byte[None, :], other=0),
            tl.load(x_scale_places, mask=is_block, other=0.0),
            "e2m1",
            tl.load(code_places, mask=is_byte[:, None], other=0),
            tl.load(scale_places, mask=is_block, other=0.0),
            "e2m1",
            sums,
        )
        x_places += BLOCK_K // 2
        code_places += BLOCK_K // 2
        x_scale_places += BLOCK_K // 16
        scale_places += BLOCK_K // 16
    result = (sums * tl.load(scale)).to(y.dtype.element_ty)
    places = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(places, result, mask=(m[:, None] < rows) & (n[None, :] < outputs))
