"""`sparse_attention` on a GPU, with gradients, and never a matrix of all queries and all keys.

Queries are taken PIECE at a time. One kernel makes their scores of the fine windows, which torch turns into the blocks
that each query reads, as the truth does. Another is attention: a program takes the queries of ROWS / G neighbours, all
G heads of a kv head, and goes through the blocks that any of them reads; what a query did not choose is masked. So
neighbours, which choose nearly alike, share what is loaded, and products have ROWS rows.

    p = exp(q k^T / sqrt(d) - lse)    o = p v    delta = sum(do * o)    dp = do v^T    ds = p (dp - delta) / sqrt(d)
    dq = ds k                         dk += ds^T q                      dv += p^T do       (sums by atomics, fp32)

Products have the inputs' dtype on both sides (fp32 as three of tf32) and fp32 sums; those of dk and dv go over all
pieces and are rounded once. The choice has no gradient.

Truth: infllm.py, which has the letters and the rules.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.sala import infllm
from soar_prep.sala.configuration import SparseAttention

PIECE = 4096  # queries whose scores are held at once
ROWS, FP32_ROWS = 64, 16  # queries times heads, of a program; fp32 must fit into sm_120's 99 KiB of shared memory
WINDOWS = 64  # at a time


def serves(q: Tensor, k: Tensor, sparse: SparseAttention) -> bool:
    """Whether the kernels have these dtypes and shapes: powers of two from 16 on, a kv head's group within ROWS."""
    sizes = (q.shape[-1], sparse.block_size)
    fits = all(size >= 16 and size & (size - 1) == 0 for size in sizes) and q.shape[0] <= rows(q) * k.shape[0]
    return fits and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def rows(q: Tensor) -> int:
    return FP32_ROWS if q.dtype == torch.float32 else ROWS


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, sparse: SparseAttention, goes_on: bool) -> Tensor:
    """What the T queries read, [Hq, T, d] in q's dtype, as infllm.sparse_attention has it.

    q, k, v fp32, bf16 or fp16 of any strides but along d, of shapes that it `serves`. On CPU tensors it runs in
    Triton's interpreter alone.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    threshold = sparse.dense_len if goes_on or k.shape[1] < sparse.dense_len else 0
    return Attend.apply(q, k, v, sparse, threshold)


def pieces(q: Tensor, k: Tensor) -> list[tuple[slice, int]]:
    """(queries, position of the first of them) of each piece."""
    tokens = q.shape[1]
    return [(slice(start, start + PIECE), k.shape[1] - tokens + start) for start in range(0, tokens, PIECE)]


class Chosen(NamedTuple):
    """Blocks of a piece: which a query reads, bool [Hkv, T, blocks]; those that any query of a program reads, int32
    [Hkv, programs, blocks], and how many those are, int32 [Hkv, programs]."""

    mask: Tensor
    lists: Tensor
    counts: Tensor


@torch.no_grad()
def choose(
    q: Tensor, pooled: tuple[Tensor, Tensor], first: int, length: int, sparse: SparseAttention, threshold: int
) -> Chosen:
    """first: position of the first query; the others follow. threshold: queries of shorter contexts read all."""
    count = -(-length // sparse.block_size)
    scores = infllm.pool_scores(window_scores(q, pooled, first, sparse), count, sparse)
    positions = first + torch.arange(q.shape[1], device=q.device)
    blocks = torch.arange(count, device=q.device)
    own = (positions // sparse.block_size)[:, None]
    always = (blocks < sparse.init_blocks) | (blocks >= own - sparse.local_blocks)
    # Scores are not negative, so their bits are in their order; below them, the earlier block is the larger number.
    keys = scores.masked_fill(always, torch.inf).contiguous().view(torch.int32).long() << 32
    keys = (keys + (count - blocks)).masked_fill(blocks > own, -1)
    last = keys.topk(min(sparse.selected_blocks, count), sorted=False).values.amin(-1, keepdim=True)
    mask = (keys >= last) & (keys >= 0)
    mask |= ((positions + 1 < threshold)[:, None] & (blocks <= own))[None]
    return Chosen(mask, *union(mask, shape_of(q, len(scores))["QUERIES"]))


def union(mask: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """(block numbers, how many): of every `queries` queries those that one of them reads, ascending."""
    tokens, blocks = mask.shape[1:]
    padded = torch.nn.functional.pad(mask, (0, 0, 0, -tokens % queries))
    either = padded.unflatten(1, (-1, queries)).any(dim=2)
    places = torch.where(either, either.cumsum(-1) - 1, blocks)
    lists = mask.new_zeros(*either.shape[:2], blocks + 1, dtype=torch.int32)
    numbers = torch.arange(blocks, dtype=torch.int32, device=mask.device)
    lists.scatter_(-1, places, numbers.expand(places.shape))
    return lists[..., :blocks].contiguous(), either.sum(-1, dtype=torch.int32)


def window_scores(q: Tensor, pooled: tuple[Tensor, Tensor], first: int, sparse: SparseAttention) -> Tensor:
    """Steps 1 and 2 of infllm.py: scores of the fine windows, fp32 [Hkv, T, W]."""
    fine, coarse = (level.contiguous() for level in pooled)
    kv_heads, windows, width = fine.shape
    scores = q.new_zeros(kv_heads, q.shape[1], windows, dtype=torch.float32)
    if windows == 0:
        return scores
    shape = shape_of(q, kv_heads)
    with torch.cuda.device_of(q):
        score_kernel[(triton.cdiv(q.shape[1], shape["QUERIES"]), kv_heads)](
            *(q, *q.stride()[:2], fine, windows, coarse, coarse.shape[1], scores),
            *(first, q.shape[1], sparse.kernel_size, sparse.kernel_stride, width**-0.5),
            COARSE=infllm.COARSE,
            WINDOWS=WINDOWS,
            **shape,
        )
    return scores


def shape_of(q: Tensor, kv_heads: int) -> dict[str, Any]:
    group = q.shape[0] // kv_heads
    padded = triton.next_power_of_2(group)
    sizes = {"GROUP": group, "PADDED": padded, "QUERIES": rows(q) // padded, "WIDTH": q.shape[-1], "num_warps": 4}
    return sizes | ({"PRECISION": "tf32x3", "num_stages": 1} if q.dtype == torch.float32 else {"PRECISION": None})


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sparse: SparseAttention, threshold: int) -> Tensor:
        heads, tokens, width = q.shape
        out = q.new_empty(tokens, heads, width).transpose(0, 1)
        pooled = infllm.pool_levels(k, sparse)
        kept: list[Tensor] = []
        for part, first in pieces(q, k):
            chosen = choose(q[:, part], pooled, first, k.shape[1], sparse, threshold)
            lse = attend(q[:, part], k, v, chosen, first, sparse.block_size, out[:, part])
            if any(ctx.needs_input_grad):
                kept += [*chosen, lse]
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.block_size, ctx.pieces = sparse.block_size, pieces(q, k)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, out, *kept = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        for number, (part, first) in enumerate(ctx.pieces):
            mask, lists, counts, lse = kept[4 * number : 4 * number + 4]
            x, o, g, dx = (whole[:, part] for whole in (q, out, do, dq))
            with torch.cuda.device_of(q):
                backward_kernel[counts.shape[::-1]](
                    *(x, *x.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], mask, lists, counts),
                    *(o, *o.stride()[:2], g, *g.stride()[:2], lse, dx, *dx.stride()[:2], dk, dv),
                    *(first, x.shape[1], k.shape[1], mask.shape[-1], x.shape[-1] ** -0.5),
                    BLOCK=ctx.block_size,
                    **shape_of(x, len(k)),
                )
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, first: int, block_size: int, out: Tensor) -> Tensor:
    """Attention of one piece, into out; returns its log-sum-exp, fp32 [Hq, T]."""
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with torch.cuda.device_of(q):
        attend_kernel[chosen.counts.shape[::-1]](
            *(q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], *chosen),
            *(out, *out.stride()[:2], lse, first, q.shape[1], chosen.mask.shape[-1], q.shape[-1] ** -0.5),
            BLOCK=block_size,
            **shape_of(q, len(k)),
        )
    return lse


@triton.jit
def rows_of(tokens, GROUP: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr):
    """Of a program's rows: query, head and whether they exist; queries of one kv head's group lie side by side."""
    row = tl.arange(0, QUERIES * PADDED)
    query, head = tl.program_id(0) * QUERIES + row // PADDED, row % PADDED
    return query, tl.program_id(1) * GROUP + head, (query < tokens) & (head < GROUP)


@triton.jit
def score_kernel(
    q,
    q_head,
    q_token,
    fine,
    fine_count,
    coarse,
    coarse_count,
    scores,
    first,
    tokens,
    kernel_size,
    kernel_stride,
    scale,
    COARSE: tl.constexpr,
    WINDOWS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query, head, is_row = rows_of(tokens, GROUP, PADDED, QUERIES)
    column, window = tl.arange(0, WIDTH), tl.arange(0, WINDOWS)
    place = head.to(tl.int64) * q_head + query.to(tl.int64) * q_token
    x = tl.load(q + place[:, None] + column, mask=is_row[:, None], other=0.0)
    # Windows whose end lies in the past, of the last query; each query masks its own.
    seen = first + tl.minimum((tl.program_id(0) + 1) * QUERIES, tokens)
    kv = tl.program_id(1).to(tl.int64)
    largest = tl.full([QUERIES * PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES * PADDED], dtype=tl.float32)
    for begin in range(0, tl.maximum(seen // COARSE - kernel_size + kernel_stride, 0) // kernel_stride, WINDOWS):
        number = begin + window
        source = coarse + (kv * coarse_count + number)[:, None] * WIDTH + column
        keys = tl.load(source, mask=(number < coarse_count)[:, None], other=0.0)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale
        is_past = (COARSE * (number * kernel_stride + kernel_size))[None, :] <= (first + query + 1)[:, None]
        s = tl.where(is_past, s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, axis=1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(s - safe[:, None]), axis=1)
        largest = now
    has_any = total > 0
    normalizer = tl.where(has_any, largest + tl.log(tl.where(has_any, total, 1.0)), 0.0)
    asked = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    for begin in range(0, tl.maximum(seen - kernel_size + kernel_stride, 0) // kernel_stride, WINDOWS):
        number = begin + window
        is_window = number < fine_count
        source = fine + (kv * fine_count + number)[:, None] * WIDTH + column
        keys = tl.load(source, mask=is_window[:, None], other=0.0)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale - normalizer[:, None]
        is_past = (number * kernel_stride + kernel_size)[None, :] <= (first + query + 1)[:, None]
        e = tl.where(is_past & (is_row & has_any)[:, None], tl.exp(s), 0.0)
        e = tl.sum(tl.reshape(e, [QUERIES, PADDED, WINDOWS]), axis=1)
        out = scores + (kv * tokens + asked)[:, None] * fine_count + number
        tl.store(out, e, mask=(asked < tokens)[:, None] & is_window[None, :])


@triton.jit
def attend_kernel(
    q,
    q_head,
    q_token,
    k,
    k_head,
    k_token,
    v,
    v_head,
    v_token,
    mask,
    lists,
    counts,
    out,
    out_head,
    out_token,
    lse,
    first,
    tokens,
    blocks,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query, head, is_row = rows_of(tokens, GROUP, PADDED, QUERIES)
    column = tl.arange(0, WIDTH)
    x = tl.load(
        q + (head.to(tl.int64) * q_head + query.to(tl.int64) * q_token)[:, None] + column,
        mask=is_row[:, None],
        other=0.0,
    )
    kv = tl.program_id(1).to(tl.int64)
    program = kv * tl.num_programs(0) + tl.program_id(0)
    choice = mask + (kv * tokens + query) * blocks
    largest = tl.full([QUERIES * PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES * PADDED], dtype=tl.float32)
    mixed = tl.zeros([QUERIES * PADDED, WIDTH], dtype=tl.float32)
    for n in range(0, tl.load(counts + program)):
        block = tl.load(lists + program * blocks + n)
        key = block * BLOCK + tl.arange(0, BLOCK)
        exists = (key < first + tokens)[:, None]
        place = key.to(tl.int64)[:, None]
        keys = tl.load(k + kv * k_head + place * k_token + column, mask=exists, other=0.0)
        values = tl.load(v + kv * v_head + place * v_token + column, mask=exists, other=0.0)
        is_chosen = tl.load(choice + block, mask=is_row, other=0).to(tl.int1)
        reads = is_chosen[:, None] & (key[None, :] <= (first + query)[:, None])
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale
        s = tl.where(reads, s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, axis=1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        p, decay = tl.exp(s - safe[:, None]), tl.exp(largest - safe)
        total = total * decay + tl.sum(p, axis=1)
        mixed = mixed * decay[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        largest = now
    total = tl.where(is_row, total, 1.0)
    place = (head.to(tl.int64) * out_head + query.to(tl.int64) * out_token)[:, None] + column
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + query, largest + tl.log(total), mask=is_row)


@triton.jit
def backward_kernel(
    q,
    q_head,
    q_token,
    k,
    k_head,
    k_token,
    v,
    v_head,
    v_token,
    mask,
    lists,
    counts,
    out,
    out_head,
    out_token,
    do,
    do_head,
    do_token,
    lse,
    dq,
    dq_head,
    dq_token,
    dk,
    dv,
    first,
    tokens,
    length,
    blocks,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query, head, is_row = rows_of(tokens, GROUP, PADDED, QUERIES)
    column = tl.arange(0, WIDTH)
    head, wide = head.to(tl.int64), query.to(tl.int64)
    real = is_row[:, None]
    x = tl.load(q + (head * q_head + wide * q_token)[:, None] + column, mask=real, other=0.0)
    o = tl.load(out + (head * out_head + wide * out_token)[:, None] + column, mask=real, other=0.0)
    g = tl.load(do + (head * do_head + wide * do_token)[:, None] + column, mask=real, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1)
    z = tl.load(lse + head * tokens + query, mask=is_row, other=0.0)
    kv = tl.program_id(1).to(tl.int64)
    program = kv * tl.num_programs(0) + tl.program_id(0)
    choice = mask + (kv * tokens + query) * blocks
    dx = tl.zeros([QUERIES * PADDED, WIDTH], dtype=tl.float32)
    for n in range(0, tl.load(counts + program)):
        block = tl.load(lists + program * blocks + n)
        key = block * BLOCK + tl.arange(0, BLOCK)
        exists = (key < first + tokens)[:, None]
        place = key.to(tl.int64)[:, None]
        keys = tl.load(k + kv * k_head + place * k_token + column, mask=exists, other=0.0)
        values = tl.load(v + kv * v_head + place * v_token + column, mask=exists, other=0.0)
        is_chosen = tl.load(choice + block, mask=is_row, other=0).to(tl.int1)
        reads = is_chosen[:, None] & (key[None, :] <= (first + query)[:, None])
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale
        p = tl.where(reads, tl.exp(s - z[:, None]), 0.0)
        dp = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None]) * scale).to(keys.dtype)
        dx += tl.dot(ds, keys, input_precision=PRECISION)
        rows = (kv * length + place) * WIDTH + column
        tl.atomic_add(dk + rows, tl.dot(tl.trans(ds), x, input_precision=PRECISION), mask=exists)
        tl.atomic_add(dv + rows, tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION), mask=exists)
    tl.store(dq + (head * dq_head + wide * dq_token)[:, None] + column, dx.to(dq.dtype.element_ty), mask=real)
