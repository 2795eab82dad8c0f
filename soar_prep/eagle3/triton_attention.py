"""`merge_own` and `own_backward` on a GPU: each query's few own keys in one pass over memory, or two backward.

B rows   T tokens   nh query heads   nkv key-value heads   hd head_dim   M own keys an index
s_m = q . own_key_m / sqrt(hd)      w_m = exp(s_m - lse)

lse = log(exp(lse0) + sum_m exp(s_m))                    output = exp(lse0 - lse) output0 + sum_m w_m own_value_m
ds_m = w_m grad . (own_value_m - output) / sqrt(hd)      dq = sum_m ds_m own_key_m
d own_key_m = sum over the group of ds_m q               d own_value_m = sum over the group of w_m grad

Truth: attention.py, the functions of the same names.
Layout: a program is TILE indices of a head; of a key-value head and one m for the gradients of keys and values, which
it sums over the group. Own keys are stacked first, [M, B, nkv, T, hd], and read once. q, output, lse and grad have any
strides but along hd; what is returned in their place has the same. All arithmetic is fp32, rounded once when stored.

Limits: fp32, bf16 or fp16; at least one own key.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of a tile


def merge_own(
    output: Tensor, lse: Tensor, q: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(output, lse) of step 0 -> those over step 0 and each query's own keys; output in q's dtype, lse fp32."""
    keys, values = torch.stack(tuple(own_keys)), torch.stack(tuple(own_values))
    merged, merged_lse = torch.empty_like(output, dtype=q.dtype), torch.empty_like(lse)
    grid, shape = grid_and_shape(q, keys, heads=q.shape[1])
    with torch.cuda.device_of(q):
        merge_kernel[grid](
            *(output, *strides(output), lse, *strides(lse), q, *strides(q), keys, values),
            *(merged, *strides(merged), merged_lse, *strides(merged_lse)),
            **shape,
        )
    return merged, merged_lse


def own_backward(
    grad: Tensor, q: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor], output: Tensor, lse: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of q (own keys' share, fp32), of own_keys and of own_values."""
    keys, values = torch.stack(tuple(own_keys)), torch.stack(tuple(own_values))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dq, dk, dv = torch.empty_like(q, dtype=torch.float32), torch.empty_like(keys), torch.empty_like(values)
    given = (grad, *strides(grad), q, *strides(q), keys, values, output, *strides(output), lse, *strides(lse))
    with torch.cuda.device_of(q):
        grid, shape = grid_and_shape(q, keys, heads=q.shape[1])
        query_kernel[grid](*given, dq, *strides(dq), **shape)
        grid, shape = grid_and_shape(q, keys, heads=keys.shape[2])
        key_kernel[(*grid, len(keys))](*given, dk, dv, **shape)
    return dq, list(dk.unbind()), list(dv.unbind())


def strides(x: Tensor) -> tuple[int, ...]:
    """Of rows, heads and tokens; ValueError if the elements of a head are not neighbours."""
    if x.ndim == 4 and x.stride(3) != 1:
        raise ValueError(f"strides {x.stride()} of {list(x.shape)}: expected head_dim's to be 1")
    return x.stride()[:3]


def grid_and_shape(q: Tensor, keys: Tensor, heads: int) -> tuple[tuple[int, int], dict[str, int]]:
    rows, _, tokens, head_dim = q.shape
    count, _, kv_heads = keys.shape[:3]
    width = triton.next_power_of_2(head_dim)
    tile = max(ELEMENTS // width, 1)
    shape = {
        "tokens": tokens,
        "own": count,
        "own_stride": keys.stride(0),
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUP": q.shape[1] // kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "TILE": tile,
    }
    return (triton.cdiv(tokens, tile), rows * heads), shape


@triton.jit
def merge_kernel(
    output,
    output_row,
    output_head,
    output_token,
    lse,
    lse_row,
    lse_head,
    lse_token,
    q,
    q_row,
    q_head,
    q_token,
    keys,
    values,
    merged,
    merged_row,
    merged_head,
    merged_token,
    merged_lse,
    merged_lse_row,
    merged_lse_head,
    merged_lse_token,
    tokens,
    own,
    own_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, WIDTH)
    is_inside = token < tokens
    mask = is_inside[:, None] & (element < HEAD_DIM)[None, :]
    query = load(q + row * q_row + head * q_head, q_token, token, element, mask)
    total = load(output + row * output_row + head * output_head, output_token, token, element, mask)
    maximum = tl.load(lse + row * lse_row + head * lse_head + token * lse_token, mask=is_inside, other=0.0)
    weight_sum = tl.full([TILE], 1.0, tl.float32)
    keys += (row * KV_HEADS + head // GROUP) * tokens * HEAD_DIM
    values += (row * KV_HEADS + head // GROUP) * tokens * HEAD_DIM
    for _ in range(own):
        score = tl.sum(query * load(keys, HEAD_DIM, token, element, mask), axis=1) * HEAD_DIM**-0.5
        higher = tl.maximum(maximum, score)
        decay, weight = tl.exp(maximum - higher), tl.exp(score - higher)
        value = load(values, HEAD_DIM, token, element, mask)
        total = total * decay[:, None] + weight[:, None] * value
        weight_sum = weight_sum * decay + weight
        maximum = higher
        keys += own_stride
        values += own_stride
    total = total / weight_sum[:, None]
    place = merged + row * merged_row + head * merged_head
    place += token.to(tl.int64)[:, None] * merged_token + element[None, :]
    tl.store(place, total.to(merged.dtype.element_ty), mask=mask)
    place = merged_lse + row * merged_lse_row + head * merged_lse_head + token * merged_lse_token
    tl.store(place, maximum + tl.log(weight_sum), mask=is_inside)


@triton.jit
def query_kernel(
    grad,
    grad_row,
    grad_head,
    grad_token,
    q,
    q_row,
    q_head,
    q_token,
    keys,
    values,
    output,
    output_row,
    output_head,
    output_token,
    lse,
    lse_row,
    lse_head,
    lse_token,
    dq,
    dq_row,
    dq_head,
    dq_token,
    tokens,
    own,
    own_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, WIDTH)
    mask = (token < tokens)[:, None] & (element < HEAD_DIM)[None, :]
    query = load(q + row * q_row + head * q_head, q_token, token, element, mask)
    outward = load(grad + row * grad_row + head * grad_head, grad_token, token, element, mask)
    result = load(output + row * output_row + head * output_head, output_token, token, element, mask)
    sums = tl.load(lse + row * lse_row + head * lse_head + token * lse_token, mask=token < tokens, other=0.0)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    keys += (row * KV_HEADS + head // GROUP) * tokens * HEAD_DIM
    values += (row * KV_HEADS + head // GROUP) * tokens * HEAD_DIM
    for _ in range(own):
        key = load(keys, HEAD_DIM, token, element, mask)
        value = load(values, HEAD_DIM, token, element, mask)
        weight = tl.exp(tl.sum(query * key, axis=1) * HEAD_DIM**-0.5 - sums)
        d_score = weight * tl.sum(outward * (value - result), axis=1) * HEAD_DIM**-0.5
        total += d_score[:, None] * key
        keys += own_stride
        values += own_stride
    place = dq + row * dq_row + head * dq_head + token.to(tl.int64)[:, None] * dq_token + element[None, :]
    tl.store(place, total, mask=mask)


@triton.jit
def key_kernel(
    grad,
    grad_row,
    grad_head,
    grad_token,
    q,
    q_row,
    q_head,
    q_token,
    keys,
    values,
    output,
    output_row,
    output_head,
    output_token,
    lse,
    lse_row,
    lse_head,
    lse_token,
    dk,
    dv,
    tokens,
    own,
    own_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, kv_head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, WIDTH)
    mask = (token < tokens)[:, None] & (element < HEAD_DIM)[None, :]
    first = tl.program_id(2).to(tl.int64) * own_stride + (row * KV_HEADS + kv_head) * tokens * HEAD_DIM
    key = load(keys + first, HEAD_DIM, token, element, mask)
    value = load(values + first, HEAD_DIM, token, element, mask)
    key_total = tl.zeros([TILE, WIDTH], tl.float32)
    value_total = tl.zeros([TILE, WIDTH], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        query = load(q + row * q_row + head * q_head, q_token, token, element, mask)
        outward = load(grad + row * grad_row + head * grad_head, grad_token, token, element, mask)
        result = load(output + row * output_row + head * output_head, output_token, token, element, mask)
        sums = tl.load(lse + row * lse_row + head * lse_head + token * lse_token, mask=token < tokens, other=0.0)
        weight = tl.exp(tl.sum(query * key, axis=1) * HEAD_DIM**-0.5 - sums)
        d_score = weight * tl.sum(outward * (value - result), axis=1) * HEAD_DIM**-0.5
        key_total += d_score[:, None] * query
        value_total += weight[:, None] * outward
    place = first + token.to(tl.int64)[:, None] * HEAD_DIM + element[None, :]
    tl.store(dk + place, key_total.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, value_total.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def load(head, token_stride, token, element, mask):
    """[TILE, WIDTH] of a head in fp32, zero beyond its end."""
    return tl.load(head + token.to(tl.int64)[:, None] * token_stride + element[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
