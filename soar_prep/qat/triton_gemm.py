"""`matmul` of gemm.py on GPUs without FP4 units: the truth's products, each exact, on BF16 or FP16 tensor cores.

x [M, K] activations   W [N, K] weight   e [.., K] E2M1 values   s [.., K/16] E4M3 block scales   t tensor scale
y = t sum_k x (e s), t of both operands where both are packed

Truth: gemm.py. Every e s is exact in bf16 and in fp16 and so is its product with an x in fp32; sums are in fp32; t
comes in once, in fp32, before the one rounding to the output dtype. Two roads:

    M <= 64   one kernel decodes W in registers as it multiplies: W's packed bytes are read once.
    above     a kernel writes e s [N, K] and cuBLAS multiplies.

Layout: a 32-bit word holds columns 8 i .. 8 i + 7 of a row, one a nibble. Nibbles j and j + 4 are 16 bits apart, so
shifts and masks take both to where bf16 and fp16 have sign, exponent and mantissa, with no move of their own. The sum
is four dots, dot j over columns j, j + 4, j + 8, ...; x, read as 64-bit words of four columns, splits the same way.

Limits: x in bf16 or fp16, or packed; K a multiple of 16; M and N any. What may differ from the truth is the order of
the sums. The bar is fp32 y within 2e-6 of the exact one, relative to the largest |y|, and the truth's bits in bf16 or
fp16 except where the exact value is that near to a tie. Under the interpreter, which multiplies operands in fp32, it
holds; the kernels compile for sm_80, sm_90 and sm_120. NOT RUN YET on a GPU: `soar-prep selftest` compares them there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.qat import gemm as truth

# The largest M that the one kernel takes: one tile of x holds it, so W is read and decoded once.
MOST_ROWS = 64
# Rows of x that go through cuBLAS at a time: bounds the fp32 sums [2048, N] that wait for their scale.
ROWS_AT_ONCE = 2048


def matmul(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of weight [N, K]: [M, N], rounded once to dtype.

    x: bf16, fp16 or packed; fp32 has no exact form here, and only the truth takes it. dtype: fp32, bf16 or fp16.
    On the CPU the truth runs, unless TRITON_INTERPRET=1 was set when triton was imported.
    """
    check_operands(x, weight)
    if weight.codes.device.type == "cpu" and not INTERPRETED:
        return truth.matmul(x, weight, dtype)
    return (matmul_few if len(x if isinstance(x, Tensor) else x.codes) <= MOST_ROWS else matmul_many)(x, weight, dtype)


def matmul_few(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """matmul of at most MOST_ROWS rows, by the kernel that decodes W as it multiplies; nothing is checked."""
    x, scale = dense(x, weight)
    # Few rows of W a program, so that 4096 of them are a program for each processor. A step of x waits in shared
    # memory, of which sm_120 has 99 KiB.
    return launch(x, weight, scale, dtype, block_n=32, block_k=256 if len(x) <= 16 else 128, warps=4, stages=3)


def matmul_many(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """matmul by W decoded once, and cuBLAS; nothing is checked."""
    x, scale = dense(x, weight)
    return multiply_dense(x, write_operand(weight, x.dtype), scale, dtype)


def dense(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """(x in bf16 or fp16, the scale of the product, fp32 [])."""
    if isinstance(x, NVFP4Tensor):
        return write_operand(x, torch.bfloat16), weight.tensor_scale * x.tensor_scale
    return x, weight.tensor_scale


def check_operands(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor) -> None:
    """ValueError for what a kernel would read past the end of, or could not multiply exactly."""
    columns = 2 * weight.codes.shape[1]
    found = list(x.codes.shape) if isinstance(x, NVFP4Tensor) else list(x.shape)
    expected = columns // 2 if isinstance(x, NVFP4Tensor) else columns
    if len(found) != 2 or found[1] != expected:
        raise ValueError(f"x is {found}; expected [M, {expected}] for a weight of {columns} columns")
    if columns % BLOCK:
        raise ValueError(f"weight: {columns} columns do not divide into blocks of {BLOCK}")
    if isinstance(x, Tensor) and x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; expected bfloat16, float16 or NVFP4; soar_prep.qat.gemm.matmul takes any")
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires a gradient, which the kernels have not; soar_prep.qat.gemm.matmul has it")


def multiply_dense(x: Tensor, operand: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of operand [N, K], both bf16 or both fp16, times scale (fp32 []): [M, N] in dtype.

    Sums leave cuBLAS in fp32: as bf16 they would be rounded before the tensor scale comes in, and once more after it.
    """
    y = torch.empty(len(x), len(operand), dtype=dtype, device=x.device)
    for rows, target in zip(x.split(ROWS_AT_ONCE), y.split(ROWS_AT_ONCE), strict=True):
        torch.mul(torch.mm(rows, operand.T, out_dtype=torch.float32), scale, out=target)
    return y


def write_operand(packed: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """`packed.operand(dtype)`, bf16 or fp16 [N, K], in one pass."""
    rows, half = packed.codes.shape
    operand = torch.empty(rows, 2 * half, dtype=dtype, device=packed.codes.device)
    count = operand.numel() // BLOCK
    with torch.cuda.device_of(operand):
        operand_kernel[(triton.cdiv(count, 256),)](
            aligned(packed.codes), aligned(packed.block_scales).view(torch.uint8), operand, count, TILE=256
        )
    return operand


def launch(
    x: Tensor,
    weight: NVFP4Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
) -> Tensor:
    """x [M, K], M <= 64, bf16 or fp16, by the kernel that decodes; `block_n` rows of W a program, `block_k` columns a
    step, both powers of two."""
    rows, columns = x.shape
    outputs = len(weight.codes)
    # Of 16 rows each warp has columns of y to itself and decodes no row of W twice; of 64, on sm_90 alone.
    block_m = 16 if rows <= 16 else 64
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        matmul_kernel[(triton.cdiv(outputs, block_n),)](
            aligned(x).view(torch.int64),
            aligned(weight.codes).view(torch.int32),
            aligned(weight.block_scales).view(torch.uint8),
            scale,
            y,
            rows,
            outputs,
            columns,
            IS_BF16=x.dtype is torch.bfloat16,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            ON_CPU=INTERPRETED,
            num_warps=warps,
            num_stages=stages,
        )
    return y


def aligned(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous and from a multiple of 16 bytes on: what a view in words needs."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@triton.jit
def matmul_kernel(
    x,
    codes,
    block_scales,
    scale,
    y,
    rows,
    outputs,
    columns,
    IS_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ON_CPU: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(n, outputs - 1).to(tl.int64)[:, None]  # past the end the last row once more, which is not stored
    quad, word, block = tl.arange(0, BLOCK_K // 4), tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // 16)
    x_places = x + m.to(tl.int64)[:, None] * (columns // 4) + quad[None, :]
    code_places = codes + own * (columns // 8) + word[None, :]
    scale_places = block_scales + own * (columns // 16) + block[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, columns, BLOCK_K):
        left = columns - k
        quads = tl.load(x_places, mask=(m[:, None] < rows) & (quad[None, :] < left // 4), other=0)
        words = tl.load(code_places, mask=word[None, :] < left // 8, other=0).to(tl.uint32, bitcast=True)
        s = tl.load(scale_places, mask=block[None, :] < left // 16, other=0)
        s = e4m3_value(s) * (2.0**118 if IS_BF16 else 2.0**6)  # 2^-8 is left: see `two_columns`
        s = tl.reshape(tl.broadcast_to(s[:, :, None], (BLOCK_N, BLOCK_K // 16, 2)), (BLOCK_N, BLOCK_K // 8))
        # Short sums, added outside the tensor core: Hopper's keeps fewer bits of a running sum than fp32 has.
        step = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for j in tl.static_range(4):
            w = two_columns(words, s, j, IS_BF16, ON_CPU)
            part = (quads >> (16 * j)).to(tl.int16).to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)
            step = tl.dot(part.to(w.dtype), tl.trans(w), step, input_precision="ieee")
        sums += step
        x_places += BLOCK_K // 4
        code_places += BLOCK_K // 8
        scale_places += BLOCK_K // 16
    result = sums * 2.0**8 * tl.load(scale)
    places = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(places, result.to(y.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outputs))


@triton.jit
def two_columns(words, s, j: tl.constexpr, IS_BF16: tl.constexpr, ON_CPU: tl.constexpr):
    """e s 2^-8 [.., 2 W] of nibbles j and j + 4 of each of the words [.., W].

    A nibble in the lowest bits of the exponent is e 2^-126 in bf16, e 2^-14 in fp16, subnormals included, and s comes
    times 2^118 or 2^6. With all of 2^126 or 2^14 in it, the largest s would be past the end; 2^-8 loses no bit of e s.
    """
    low: tl.constexpr = (6 if IS_BF16 else 9) - 4 * j  # from a magnitude's lowest bit to the mantissa's
    magnitudes = (words << low if low > 0 else words >> -low) & (0x01C001C0 if IS_BF16 else 0x0E000E00)
    pair = ((words << (12 - 4 * j)) & 0x80008000) | magnitudes
    if ON_CPU:
        if IS_BF16:  # by hand: the interpreter's own conversion loses subnormals
            halves = tl.join(pair << 16, pair & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            halves = split_words(pair, IS_BF16).to(tl.float32)
        halves = halves * s[:, :, None]
    else:
        s = s.to(tl.bfloat16 if IS_BF16 else tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        # Two products at once. sm_80 has no bf16 multiplication of its own: -0 is what adds nothing.
        instruction: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if IS_BF16 else "fma.rn.f16x2 $0, $1, $2, $3;"
        minus_zero = tl.full(pair.shape, 0x80008000, tl.uint32)
        pair = tl.inline_asm_elementwise(
            instruction, "=r,r,r,r", [pair, s | (s << 16), minus_zero], dtype=tl.uint32, is_pure=True, pack=1
        )
        halves = split_words(pair, IS_BF16)
    return tl.reshape(halves, (pair.shape[0], 2 * pair.shape[1]))


@triton.jit
def split_words(words, IS_BF16: tl.constexpr):
    """The lower and the upper half of each word [.., W], in bf16 or fp16 [.., W, 2]."""
    halves = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
    return halves.to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)


@triton.jit
def operand_kernel(codes, block_scales, operand, count, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = (block < count)[:, None]
    byte = tl.load(codes + block[:, None] * 8 + tl.arange(0, 8)[None, :], mask=is_there, other=0).to(tl.uint32)
    s = e4m3_value(tl.load(block_scales + block, mask=block < count, other=0))[:, None]
    values = tl.join(e2m1_value(byte) * s, e2m1_value(byte >> 4) * s)
    places = operand + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(places, tl.reshape(values, (TILE, 16)).to(operand.dtype.element_ty), mask=is_there)


@triton.jit
def e2m1_value(nibble):
    """fp32 value of the lowest four bits: fp32's lowest exponents, subnormals included, are E2M1's."""
    return (((nibble & 8) << 28) | ((nibble & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def e4m3_value(code):
    """fp32 value of positive E4M3 codes, uint8."""
    return (code.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 2.0**120


INTERPRETED = not isinstance(matmul_kernel, triton.runtime.JITFunction)
