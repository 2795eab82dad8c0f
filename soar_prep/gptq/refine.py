"""After GPTQ: one block at a time is solved again, codes and scale, with all others as they stand.

All column-major: w [K, N] weight   D = w - q [K, N]   H [K, K]   G = H D   b the 16 columns of a block, H_b their H

The loss of a row is D^T H D. With the other blocks fixed it is, up to a constant, (x - q_b)^T H_b (x - q_b) with

    x = w_b + H_b^-1 (G_b - H_b D_b),

so the block is GPTQ on 16 columns with x for a weight: for every candidate scale round column by column under the
factor U_b of H_b^-1, and take what loses least, sum_j |e_j|^2; what stands stays unless another is strictly better, so
the loss never rises. GPTQ could not do that: it chose scales before it knew what its columns would have to make up for.

A pass costs about as much as GPTQ. The update of G waits for LAZY_COLUMNS columns, and is then one product.
Source: GPTQ (Frantar et al., 2022) within a block; block coordinate descent is standard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK, candidate_scales
from soar_prep.fouroversix.e2m1 import decode_e2m1, encode_e2m1, pack_codes, round_to_e2m1, unpack_codes
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.settings import ScaleRule

LAZY_COLUMNS = 128


def refine(weight: Tensor, quantized: NVFP4Tensor, hessian: Tensor, rule: ScaleRule, passes: int) -> NVFP4Tensor:
    """`quantized` after `passes` passes over its blocks: its loss under hessian is never larger.

    weight fp32 [N, K]; hessian fp32 [K, K], damped: each block of its diagonal must have an inverse.
    """
    columns, tensor_scale = weight.shape[1], quantized.tensor_scale
    order = order_in_blocks(hessian.diagonal())
    w, h = weight.T[order].contiguous(), hessian[order][:, order]
    values = decode_e2m1(unpack_codes(quantized.codes)).T[order].contiguous()
    scales = quantized.block_scales.T.contiguous()  # [K/16, N]
    difference = w - values * scales.float().repeat_interleave(BLOCK, dim=0) * tensor_scale
    gradient = h @ difference
    inverses, factors = inverse_of_blocks(h)
    solve = block_solver_for(w.device)
    for _ in range(passes):
        for start in range(0, columns, LAZY_COLUMNS):
            lazy = slice(start, min(start + LAZY_COLUMNS, columns))
            inside, before = gradient[lazy].clone(), difference[lazy].clone()
            for first in range(lazy.start, lazy.stop, BLOCK):
                block, b = slice(first, first + BLOCK), first // BLOCK
                own = difference[block]
                x = w[block] + inverses[b] @ (inside[first - start : first - start + BLOCK] - h[block, block] @ own)
                values[block], scales[b] = solve(x, values[block], scales[b], factors[b], tensor_scale, rule)
                now = w[block] - values[block] * scales[b].float() * tensor_scale
                inside += h[lazy, block] @ (now - own)
                difference[block] = now
            gradient += h[:, lazy] @ (difference[lazy] - before)
    codes = torch.empty(columns, len(weight), dtype=torch.uint8, device=weight.device)
    codes[order] = encode_e2m1(values)
    return NVFP4Tensor(pack_codes(codes.T.contiguous()), scales.T.contiguous(), tensor_scale)


def order_in_blocks(diagonal: Tensor) -> Tensor:
    """int64 [K]: in each block the columns by falling diag(H), as GPTQ takes them."""
    within = diagonal.view(-1, BLOCK).argsort(dim=-1, descending=True, stable=True)
    starts = torch.arange(0, len(diagonal), BLOCK, device=diagonal.device)
    return (within + starts[:, None]).flatten()


def inverse_of_blocks(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """(H_b^-1, U_b with H_b^-1 = U_b^T U_b) of each block, fp32 [K/16, 16, 16], computed in fp64."""
    blocks = hessian.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
    inverses = torch.linalg.inv(blocks)
    inverses = (inverses + inverses.mT) / 2
    return inverses.float(), torch.linalg.cholesky(inverses, upper=True).float().contiguous()


def block_solver_for(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """`solve_block`, or its Triton twin where that runs."""
    if device.type != "cuda":
        return solve_block
    from soar_prep.gptq import triton_refine

    return triton_refine.solve_block


def solve_block(
    x: Tensor, values: Tensor, scales: Tensor, upper: Tensor, tensor_scale: Tensor, rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """(E2M1 values fp32 [16, N], block scales e4m3 [N]) of the candidate that loses least, or what was given.

    x fp32 [16, N] what to round, in solving order; upper fp32 [16, 16].
    """
    candidates = torch.stack(candidate_scales(x.T, tensor_scale, rule))  # [C, N]
    found, losses = round_block(x, candidates, upper, tensor_scale)
    best, choice = loss_of(x, values, scales, upper, tensor_scale), torch.full_like(scales, -1, dtype=torch.int64)
    for number, loss in enumerate(losses):  # the first of equals, which `min` does not promise
        is_better = loss < best
        best = torch.where(is_better, loss, best)
        choice = choice.masked_fill(is_better, number)
    taken = choice.clamp(min=0)
    new_values = found.gather(0, taken.expand(1, BLOCK, -1))[0]
    new_scales = candidates.view(torch.uint8).gather(0, taken[None])[0]
    is_new = choice >= 0
    chosen = torch.where(is_new, new_scales, scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    return torch.where(is_new, new_values, values), chosen


def round_block(x: Tensor, scales: Tensor, upper: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(E2M1 values [C, 16, N], losses [C, N]) of x under each of the block scales e4m3 [C, N]: GPTQ on the columns."""
    x = x.expand(len(scales), *x.shape).clone()
    values, losses = torch.empty_like(x), torch.zeros_like(x[:, 0])
    reciprocal, step = 1 / (tensor_scale * scales.float()), scales.float() * tensor_scale
    for j in range(BLOCK):
        values[:, j] = round_to_e2m1(x[:, j] * reciprocal)
        error = (x[:, j] - values[:, j] * step) / upper[j, j]
        losses += error * error
        x[:, j + 1 :] -= upper[j, j + 1 :, None] * error[:, None]
    return values, losses


def loss_of(x: Tensor, values: Tensor, scales: Tensor, upper: Tensor, tensor_scale: Tensor) -> Tensor:
    """The same loss [N] of given values."""
    x, step, loss = x.clone(), scales.float() * tensor_scale, torch.zeros_like(x[0])
    for j in range(BLOCK):
        error = (x[j] - values[j] * step) / upper[j, j]
        loss += error * error
        x[j + 1 :] -= upper[j, j + 1 :, None] * error
    return loss
