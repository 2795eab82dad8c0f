"""Block scales: which E4M3 code serves a block of sixteen columns best.

W [N, K] weight, rows are outputs; a block is 16 consecutive columns of a row; t = tensor scale; m = max |w| of a block.
A value is stored as e2m1 * s * t, s an E4M3 code. Candidates for s, in the order they are tried (a later one must
be strictly better):

    six             e4m3(m / 6 / t)                                     the block's maximum becomes 6
    four_over_six   six, then e4m3(1.5 * m / 6 / t)                     ... or 4, where the grid is finer
    sweep           six, then every E4M3 code from 4 below it to 7 above (0.75 .. 1.75 of m / 6)

and the error that decides, with d the difference of a block's stored and true values:

    mse  sum d^2      mae  sum |d|      abs_max  max |d|      hessian_diag  sum h d^2, h = diag(H)

The rounding steps are those of the FourOverSix authors' package: multiply by the reciprocal 1 / (t * s), compare
(e2m1 * s) * t with w in fp32. Sums run over a fixed binary tree, so that a kernel can add in the same order.
Source: "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling" (Cook et al., 2025).
"""

import torch
from torch import Tensor

from soar_prep.fouroversix.e2m1 import E2M1_MAX, round_to_e2m1
from soar_prep.settings import ScaleError, ScaleRule

BLOCK = 16
E4M3_MAX = 448.0
# The adaptive rules keep the largest block's scale at 256, because 256 and 1.5 * 256 = 384 are both E4M3 codes.
E4M3_HEADROOM_MAX = 256.0
E4M3_SMALLEST, E4M3_LARGEST = 0x01, 0x7E  # bytes of 2^-9 and 448; 0x00 is zero and 0x7F is NaN
SWEEP_OFFSETS = (0, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)
SMALLEST_TENSOR_SCALE = 2.0**-100  # keeps the reciprocal of an all-zero tensor's scale finite


def tensor_scale_for(largest: Tensor, rule: ScaleRule, power_of_two: bool) -> Tensor:
    """Tensor scale, fp32 [], for weights whose largest magnitude is `largest` (fp32 []).

    power_of_two rounds it up to a power of two: kernels that keep the tensor scale in bf16 then lose nothing, and
    e2m1 * s * t is exact in bf16. Rounded up, because rounded down the largest block scale would overflow.
    """
    top = E4M3_MAX if rule is ScaleRule.six else E4M3_HEADROOM_MAX
    # A division of tensors: `number / tensor` in torch multiplies by a rounded reciprocal.
    scale = 1 / (torch.full_like(largest, E2M1_MAX * top, dtype=torch.float32) / largest)
    scale = scale.clamp(min=SMALLEST_TENSOR_SCALE)
    return power_of_two_from(scale) if power_of_two else scale


def power_of_two_from(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below `scale`, fp32, positive."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest positive E4M3 code of each element as float8_e4m3fn: never zero, never NaN, saturates at 448.

    An all-zero block keeps the smallest code, because a zero or NaN scale breaks loaders.
    """
    code = x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.clamp(min=E4M3_SMALLEST).view(torch.float8_e4m3fn)


def choose_block_scales(
    weight: Tensor,
    tensor_scale: Tensor,
    rule: ScaleRule,
    error: ScaleError,
    column_weights: Tensor | None = None,
) -> Tensor:
    """Block scales, float8_e4m3fn [N, K/16], of weight [N, K] under a given tensor scale (fp32 []).

    column_weights: fp32 [K], diag(H); needed by ScaleError.hessian_diag alone.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    best_scales, *others = candidate_scales(blocks, tensor_scale, rule)
    if not others:
        return best_scales
    h = None
    if error is ScaleError.hessian_diag:
        if column_weights is None:
            raise ValueError("hessian_diag needs column_weights, the diagonal of the Hessian")
        h = column_weights.float().view(-1, BLOCK)
    best_error = block_error(blocks, best_scales, tensor_scale, error, h)
    best = best_scales.view(torch.uint8)
    for scales in others:
        candidate_error = block_error(blocks, scales, tensor_scale, error, h)
        is_better = candidate_error < best_error
        best_error = torch.where(is_better, candidate_error, best_error)
        best = torch.where(is_better, scales.view(torch.uint8), best)
    return best.view(torch.float8_e4m3fn)


def candidate_scales(blocks: Tensor, tensor_scale: Tensor, rule: ScaleRule) -> list[Tensor]:
    """The E4M3 candidates of each block, first choice first: blocks fp32 [N, K/16, 16] -> list of e4m3 [N, K/16]."""
    ideal = over_six(blocks.abs().amax(dim=-1)) * (1 / tensor_scale)
    six = to_e4m3(ideal)
    if rule is ScaleRule.six:
        return [six]
    if rule is ScaleRule.four_over_six:
        return [six, to_e4m3(ideal * 1.5)]
    code = six.view(torch.uint8).short()  # positive E4M3 codes are ordered as their bytes are
    shifted = ((code + offset).clamp(E4M3_SMALLEST, E4M3_LARGEST) for offset in SWEEP_OFFSETS)
    return [scales.to(torch.uint8).view(torch.float8_e4m3fn) for scales in shifted]


def over_six(maxima: Tensor) -> Tensor:
    """maxima / 6, rounded as IEEE has it on every device: on CUDA `tensor / number` multiplies by a rounded 1/6."""
    return maxima / torch.full_like(maxima, E2M1_MAX)


def block_error(
    blocks: Tensor, block_scales: Tensor, tensor_scale: Tensor, error: ScaleError, h: Tensor | None
) -> Tensor:
    """Error of each block under `block_scales`, fp32 [N, K/16]; blocks fp32 [N, K/16, 16], h fp32 [K/16, 16]."""
    scales = block_scales.float().unsqueeze(-1)
    stored = round_to_e2m1(blocks * (1 / (tensor_scale * scales))) * scales * tensor_scale
    difference = stored - blocks
    if error is ScaleError.abs_max:
        return difference.abs().amax(dim=-1)
    if error is ScaleError.mae:
        return tree_sum(difference.abs())
    squares = difference * difference
    return tree_sum(squares if h is None else squares * h)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis (a power of two long): neighbours first, so the order is the same everywhere."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def share_of_fours(weight: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Each row's share of blocks whose maximum is stored nearer to 4 than to 6, fp32 [N]: s > sqrt(1.5) * m / 6 / t.

    Under four_over_six these are exactly the blocks that took the 4.
    """
    ideal = over_six(weight.float().unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1)) / tensor_scale
    return (block_scales.float() > 1.5**0.5 * ideal).float().mean(dim=-1)
