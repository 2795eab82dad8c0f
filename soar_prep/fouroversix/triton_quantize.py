"""`quantize_to_nvfp4` on a GPU: one pass over the weight; codes and block scales equal the truth's bit for bit.

W [N, K] weight   t tensor scale   s block scale   m = max |w| of a block   r = 1/(t s)   e = e2m1(w r)   d = e s t - w

Truth: tensor.py; blocks.py has the candidates for s and the errors made of d.
Layout: W is contiguous, so its blocks of sixteen columns follow one another and rows do not matter. A thread holds
whole blocks. A program of four_over_six is one warp: no barrier before the test that picks the path of its 32 blocks.
Bits stay equal because products and sums are not fused (`enable_fp_fusion=False`) but in an explicit `tl.fma`, which
stands only where the product is exact or the result is proven, and because divisions are IEEE. The shorter paths leave
out what cannot change a bit: the clamp where max |w r| < 7, since nothing then rounds to 8, and the rounding of e s t
where t is a power of two.

Limits: finite weights, fewer than 2^35 of them; t at least 2^-100 (`SMALLEST_TENSOR_SCALE`). Instructions an element on
sm_90 (SASS, bf16, mse): four_over_six 27.5 where t is a power of two, 31.3 elsewhere, 33 in a tile that needs the
clamp; six 17.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.fouroversix import tensor as truth
from soar_prep.fouroversix.blocks import BLOCK, SWEEP_OFFSETS
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.settings import ScaleError, ScaleRule

PROGRAMS = 16384  # at the most; large weights give each several tiles, which share the reciprocal of t
SWEEP_FIRST, SWEEP_LAST = tl.constexpr(min(SWEEP_OFFSETS)), tl.constexpr(max(SWEEP_OFFSETS))


def quantize_to_nvfp4(
    weight: Tensor, tensor_scale: Tensor, rule: ScaleRule, error: ScaleError, column_weights: Tensor | None = None
) -> NVFP4Tensor:
    """Choose the block scales of weight [N, K] and round it to the nearest value under them.

    weight: fp32, bf16 or fp16. On the CPU the truth runs, unless TRITON_INTERPRET=1 was set when triton was imported.
    tensor_scale: fp32 []. column_weights: fp32 [K], diag(H); needed by ScaleError.hessian_diag alone.
    """
    if weight.device.type == "cpu" and isinstance(quantize_kernel, triton.runtime.JITFunction):
        return truth.quantize_to_nvfp4(weight, tensor_scale, rule, error, column_weights)
    # Six is bound by memory and has no path to pick: more warps.
    tile, warps = (128, 4) if rule is ScaleRule.six else (32, 1)
    return launch(weight, tensor_scale, rule, error, column_weights, tile, warps)


def launch(
    weight: Tensor,
    tensor_scale: Tensor,
    rule: ScaleRule,
    error: ScaleError,
    column_weights: Tensor | None,
    tile: int,
    warps: int,
) -> NVFP4Tensor:
    """Run the kernel with `tile` blocks (a power of two) at a time and `warps` warps a program."""
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"weight {[rows, columns]}: {columns} columns do not divide into blocks of {BLOCK}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weight is {weight.dtype}; expected float32, bfloat16 or float16")
    if error is not ScaleError.hessian_diag or rule is ScaleRule.six:
        column_weights = None
    elif column_weights is None or column_weights.shape != (columns,):
        found = None if column_weights is None else list(column_weights.shape)
        raise ValueError(f"column_weights: {found}; hessian_diag needs [{columns}], the diagonal of H")
    else:
        column_weights = column_weights.to(weight.device, torch.float32).contiguous()
    weight = weight.contiguous()
    if weight.data_ptr() % 16:  # a view that starts between words
        weight = weight.clone()
    count = rows * columns // BLOCK
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    block_scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    with torch.cuda.device_of(weight):
        quantize_kernel[(min(triton.cdiv(count, tile), PROGRAMS),)](
            weight,
            column_weights,
            tensor_scale.to(weight.device, torch.float32),
            codes.view(torch.int32),
            block_scales.view(torch.uint8),
            count,
            columns // BLOCK,
            RULE=rule.value,
            ERROR=error.value,
            TILE=tile,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return NVFP4Tensor(codes, block_scales, tensor_scale)


@triton.jit
def quantize_kernel(
    weight,
    column_weights,
    tensor_scale,
    codes,
    block_scales,
    count,
    blocks_per_row,
    RULE: tl.constexpr,
    ERROR: tl.constexpr,
    TILE: tl.constexpr,
):
    t = tl.load(tensor_scale)
    inverse_t = tl.div_rn(1.0, t)
    # Far from overflow: a fused step would subtract from a product that the truth has as infinity.
    is_power_of_two = ((t.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0) & (t < 2.0**100)
    for first in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
        # Past the end the last block is done again: it stores the same bytes once more, and nothing needs a mask.
        block = tl.minimum(first + tl.arange(0, TILE), count - 1)
        w = load_blocks(weight, block)
        h = w
        if ERROR == "hessian_diag" and RULE != "six":
            h = load_blocks(column_weights, block % blocks_per_row)
        m = tl.max(tl.abs(w), axis=1)
        ideal = sixth(m) * inverse_t
        s = to_e4m3(ideal)
        r = tl.div_rn(1.0, t * s)
        if RULE == "six":
            e = to_e2m1(tl.abs(w), r, True)
        elif RULE == "sweep":
            if is_power_of_two:
                s, e = sweep(tl.abs(w), s, r, t, h, ERROR, True)
            else:
                s, e = sweep(tl.abs(w), s, r, t, h, ERROR, False)
        else:
            four = to_e4m3(ideal * 1.5)
            # 7 takes a scale that saturated or is subnormal; `four` is never smaller than six, so its r needs no test.
            if tl.max((m * r >= 7.0).to(tl.int32), axis=0) > 0:
                s, e = six_or_four(tl.abs(w), s, r, four, t, h, ERROR, True, False)
            elif is_power_of_two:
                s, e = six_or_four(w, s, r, four, t, h, ERROR, False, True)
            else:
                s, e = six_or_four(w, s, r, four, t, h, ERROR, False, False)
        tl.store(codes + block.to(tl.int64)[:, None] * 2 + tl.arange(0, 2)[None, :], pack_codes(e, w))
        tl.store(block_scales + block, e4m3_code(s).to(tl.uint8))


@triton.jit
def six_or_four(w, six, r, four, t, h, ERROR: tl.constexpr, CLAMP: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    e, error = candidate(w, six, r, t, h, ERROR, CLAMP, POWER_OF_TWO)
    e_four, error_four = candidate(w, four, tl.div_rn(1.0, t * four), t, h, ERROR, CLAMP, POWER_OF_TWO)
    is_better = error_four < error
    return tl.where(is_better, four, six), tl.where(is_better[:, None], e_four, e)


@triton.jit
def sweep(w, six, r, t, h, ERROR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    s = six
    _, error = candidate(w, six, r, t, h, ERROR, True, POWER_OF_TWO)
    for step in range(SWEEP_FIRST, SWEEP_LAST):
        offset = tl.where(step < 0, step, step + 1)  # the truth's offsets without 0, which is six
        code = tl.minimum(tl.maximum(e4m3_code(six) + offset, 0x01), 0x7E)
        other = (code << 20).to(tl.float32, bitcast=True) * 2.0**120
        _, error_other = candidate(w, other, tl.div_rn(1.0, t * other), t, h, ERROR, True, POWER_OF_TWO)
        s = tl.where(error_other < error, other, s)
        error = tl.minimum(error_other, error)
    return s, to_e2m1(w, tl.div_rn(1.0, t * s), True)


@triton.jit
def candidate(w, s, r, t, h, ERROR: tl.constexpr, CLAMP: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """E2M1 values [TILE, 16] (a zero loses its sign) and error [TILE] under block scales s; w is |w| if CLAMP."""
    e = to_e2m1(w, r, CLAMP)
    # The product of the fused step is exact. It gives -d, and every error is even in d.
    d = tl.fma(e, -(t * s)[:, None], w) if POWER_OF_TWO else e * s[:, None] * t - w
    if ERROR == "abs_max":
        return e, tl.max(tl.abs(d), axis=1)
    elif ERROR == "mae":
        return e, tree_sum(tl.abs(d))
    elif ERROR == "mse":
        return e, tree_sum(d * d)
    else:
        return e, tree_sum(d * d * h)


@triton.jit
def to_e2m1(w, r, CLAMP: tl.constexpr):
    v = w * r[:, None]
    if CLAMP:
        v = tl.minimum(v, 6.0)
    return round_to_step(v, 1.0, 1.5 * 2.0**22)  # two significant bits from 1 up, steps of 0.5 below


@triton.jit
def to_e4m3(x):
    """Nearest positive E4M3 value: saturates at 448, never zero."""
    return tl.maximum(round_to_step(tl.minimum(x, 448.0), 2.0**-6, 1.5 * 2.0**20), 2.0**-9)


@triton.jit
def round_to_step(x, smallest_binade, MAGIC: tl.constexpr):
    """To nearest even: the last bit of binade * MAGIC + x is the step that the format has in x's binade."""
    binade = tl.maximum(tl.abs(x), smallest_binade).to(tl.int32, bitcast=True) & 0x7F800000
    scale = binade.to(tl.float32, bitcast=True)
    return tl.fma(scale, -MAGIC, tl.fma(scale, MAGIC, x))


@triton.jit
def sixth(m):
    """m / 6 as IEEE has it: the remainder m - 6 q is exact in two steps. Proven by trying every mantissa."""
    q = m * (1 / 6)
    return tl.fma(tl.fma(q, -2.0, tl.fma(q, -4.0, m)), 1 / 6, q)


@triton.jit
def tree_sum(x):
    for _ in tl.static_range(4):
        even, odd = even_odd(x)
        x = even + odd
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def even_odd(x):
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def e4m3_code(s):
    # E4M3's exponents, subnormals included, fall on the lowest of fp32.
    return (s * 2.0**-120).to(tl.int32, bitcast=True) >> 20


@triton.jit
def pack_codes(e, w):
    """Eight codes a word [TILE, 2]. The signs are w's."""
    even, odd = even_odd((tl.abs(e) * 2.0**-126).to(tl.uint32, bitcast=True))  # index << 22, as in e4m3_code
    even, odd = even_odd(even + (odd << 4))
    even, odd = even_odd((even >> 22) + (odd >> 14))
    magnitudes = even + (odd << 16)
    even, odd = even_odd(w.to(tl.uint32, bitcast=True))
    even, odd = even_odd((even >> 28) | ((odd >> 28) << 4))
    even, odd = even_odd(even | (odd << 8))
    return (magnitudes | ((even | (odd << 16)) & 0x88888888)).to(tl.int32, bitcast=True)


@triton.jit
def load_blocks(pointer, block):
    """Blocks as fp32 [TILE, 16]. Pieces of 16 bytes are what one thread loads: joined here, it has the whole block."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    block_words: tl.constexpr = dtype.primitive_bitwidth // 2
    words = pointer.to(tl.pointer_type(tl.uint32)) + block.to(tl.int64)[:, None] * block_words
    piece = words + tl.arange(0, 4)[None, :]
    x = beside(tl.load(piece), tl.load(piece + 4))
    if dtype == tl.float32:
        return beside(x, beside(tl.load(piece + 8), tl.load(piece + 12))).to(tl.float32, bitcast=True)
    else:
        if dtype == tl.bfloat16:
            even, odd = (x << 16).to(tl.float32, bitcast=True), (x & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            even = x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(even, odd), [x.shape[0], 16])


@triton.jit
def beside(left, right):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])
