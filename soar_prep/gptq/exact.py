"""GPTQ that chooses a block's scale when its turn comes, by what it will itself lose.

All column-major: w [K, N] weight as the columns before have left it    b a block's 16 columns    U_b their block of U

For every candidate scale the block is rounded column by column under U_b, which loses sum_j |e_j|^2, e_j as in
solve.py; the candidate that loses least is kept, and its errors move on. A block is solved in one go, so columns are
not free to go by diag(H) alone: whole blocks go by falling mean of it, in a block its columns ("group-aware" order).

Source: GPTQ (Frantar et al., 2022); the order as GPTQModel has it.
"""

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK, candidate_scales
from soar_prep.fouroversix.e2m1 import encode_e2m1, pack_codes
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.gptq.hessian import Factor
from soar_prep.gptq.refine import block_solver_for, order_in_blocks
from soar_prep.settings import ScaleRule

LAZY_COLUMNS = 128


def group_aware_order(diagonal: Tensor) -> Tensor:
    """int64 [K]: blocks by falling mean of the diagonal, the columns of each by the diagonal."""
    blocks = diagonal.view(-1, BLOCK).mean(dim=-1).argsort(descending=True, stable=True)
    return order_in_blocks(diagonal).view(-1, BLOCK)[blocks].flatten()


def solve_exactly(weight: Tensor, tensor_scale: Tensor, rule: ScaleRule, factor: Factor) -> NVFP4Tensor:
    """GPTQ of weight fp32 [N, K] with block scales of its own choice; the factor's order keeps blocks together."""
    order, upper = factor.order, factor.upper
    w = weight.T[order].contiguous()
    values, errors = torch.empty_like(w), torch.empty_like(w)
    scales = torch.empty(len(w) // BLOCK, w.shape[1], dtype=torch.float8_e4m3fn, device=w.device)
    solve_block = block_solver_for(w.device)
    for start in range(0, len(w), LAZY_COLUMNS):
        stop = min(start + LAZY_COLUMNS, len(w))
        for first in range(start, stop, BLOCK):
            block = slice(first, first + BLOCK)
            x, own = w[block].contiguous(), upper[block, block].contiguous()
            six, *_ = candidate_scales(x.T, tensor_scale, rule)
            found, scale = solve_block(x, torch.zeros_like(x), six, own, tensor_scale, rule)
            # x - q = U_b^T e: what the columns of the block have taken from each other is in x, not yet in w
            rest = x - found * (scale.float() * tensor_scale)
            errors[block] = torch.linalg.solve_triangular(own.T, rest, upper=False)
            w[block.stop : stop].addmm_(upper[block, block.stop : stop].T, errors[block], alpha=-1)
            values[block], scales[first // BLOCK] = found, scale
        w[stop:].addmm_(upper[start:stop, stop:].T, errors[start:stop], alpha=-1)
    codes = torch.empty(len(order), len(weight), dtype=torch.uint8, device=weight.device)
    codes[order] = encode_e2m1(values)
    block_scales = torch.empty_like(scales)
    block_scales.view(torch.uint8)[order[::BLOCK] // BLOCK] = scales.view(torch.uint8)
    return NVFP4Tensor(pack_codes(codes.T.contiguous()), block_scales.T.contiguous(), tensor_scale)
