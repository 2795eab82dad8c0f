"""`by_chunks` on a GPU, with gradients: the states between chunks one after another, then all chunks at once.

q, k, v [B, H, T, d]   chunk of n <= 64 tokens, i and j in it   S state before it   G gradient of the state after it
M_ij = exp(-s (i - j)) for j <= i, else 0               c = 1 / sqrt(d)

                                                        states, one kernel:
    o  = c ((q k^T * M) v + exp(-s (i + 1)) q S)          S' = exp(-s n) S + sum_j exp(-s (n - 1 - j)) k_j^T v_j
    dq = c ((do v^T * M) k + exp(-s (i + 1)) do S^T)
    dk = c (v do^T * M^T) q + exp(-s (n - 1 - i)) v G^T   G' = exp(-s n) G + c sum_i exp(-s (i + 1)) q_i^T do_i
    dv = c (k q^T * M^T) do + exp(-s (n - 1 - i)) k G                     (from the last chunk to the first)

So one kernel makes both states and another all four outputs: backward they run in reverse, with M transposed.
No exponent is positive. Decay and running states are fp32; products have the inputs' dtype on both sides (fp32 as IEEE
has it) and fp32 sums.

Truth: lightning.py. The order of work is Lightning Attention-2's, arXiv 2401.04658.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
WIDTHS = (16, 32, 64, 128)
WARPS = 4  # at 8, chains of products race on Blackwell before Triton 3.8: fla-org/flash-linear-attention#1228
STATE_TILE = (64, 32)  # keys and values of a program's state: 256 programs at 32 heads of 128
# Keys at once and values of a program's outputs: of 16-bit inputs, and of fp32, whose IEEE products are no work for
# tensor cores and would need more shared memory than sm_120 has
MIX_TILES = ((128, 64), (16, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(o in q's dtype [B, H, T, d], the state after the last token, fp32 [B, H, d, d]); both have gradients.

    q, k, v fp32, bf16 or fp16 of any strides but along d; slopes fp32 [H]; state fp32 [B, H, d, d], zeros if not given.
    ValueError for other head dimensions than 16, 32, 64 and 128, other dtypes, or q, k and v that are not alike. On CPU
    tensors it runs in Triton's interpreter alone.
    """
    if q.shape[-1] not in WIDTHS:
        raise ValueError(f"head_dim={q.shape[-1]}: expected one of {', '.join(map(str, WIDTHS))}")
    if q.dtype not in DTYPES or any((x.shape, x.dtype) != (q.shape, q.dtype) for x in (k, v)):
        shown = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{shown}: expected one shape, and one dtype of fp32, bf16 and fp16")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return Chunks.apply(q, k, v, slopes, state)


def serves(q: Tensor) -> bool:
    return q.shape[-1] in WIDTHS and q.dtype in DTYPES


class Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None) -> Any:
        states, after = states_of(k, v, slopes, state, reverse=False)
        ctx.save_for_backward(q, k, v, slopes, state)
        return mix(q, k, v, slopes, states, reverse=False), after

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> Any:
        q, k, v, slopes, state = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        states, _ = states_of(k, v, slopes, state, reverse=False)  # anew: kept, they would be larger than q, k and v
        dq = mix(do, v, k, slopes, states.mT, reverse=False)
        states, before = states_of(q, do, slopes, dstate, reverse=True)
        dk = mix(v, do, q, slopes, states.mT, reverse=True)
        dv = mix(k, q, do, slopes, states, reverse=True)
        return dq, dk, dv, None, None if state is None else before


def states_of(a: Tensor, b: Tensor, slopes: Tensor, start: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """(S before every chunk, or G after it, [B, H, chunks, d, d] in a's dtype, as products take it; the last, fp32)."""
    batch, heads, tokens, width = a.shape
    chunks = triton.cdiv(tokens, CHUNK)
    states = a.new_empty(batch, heads, chunks, width, width)
    last = a.new_empty(batch, heads, width, width, dtype=torch.float32)
    rows, tile = (min(width, n) for n in STATE_TILE)
    start = None if start is None else start.float().contiguous()
    with torch.cuda.device_of(a):
        states_kernel[(batch * heads, width // rows, width // tile)](
            *(a, *a.stride()[:3], b, *b.stride()[:3], slopes, start, states, last, heads, tokens, width**-0.5),
            **constants(a, REVERSE=reverse, ROWS=rows, TILE=tile),
        )
    return states, last


def mix(a: Tensor, b: Tensor, c: Tensor, slopes: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """c (a b^T * M) c + decay a S, of every chunk, in a's dtype [B, H, T, d]; laid out as [B, T, H, d]."""
    batch, heads, tokens, width = a.shape
    out = a.new_empty(batch, tokens, heads, width).transpose(1, 2)
    depth, tile = (min(width, n) for n in MIX_TILES[a.dtype == torch.float32])
    with torch.cuda.device_of(a):
        mix_kernel[(triton.cdiv(tokens, CHUNK), batch * heads, width // tile)](
            *(a, *a.stride()[:3], b, *b.stride()[:3], c, *c.stride()[:3], slopes, states, *states.stride()[3:]),
            *(out, *out.stride()[:3], heads, tokens, width**-0.5),
            **constants(a, REVERSE=reverse, TILE=tile, DEPTH=depth),
        )
    return out


def constants(a: Tensor, **more: Any) -> dict[str, Any]:
    precision = "ieee" if a.dtype == torch.float32 else None
    return {"WIDTH": a.shape[-1], "CHUNK": CHUNK, "PRECISION": precision, "num_warps": WARPS, **more}


@triton.jit
def states_kernel(
    a,
    a_batch,
    a_head,
    a_token,
    b,
    b_batch,
    b_head,
    b_token,
    slopes,
    start,
    states,
    last,
    heads,
    tokens,
    scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slope = tl.load(slopes + row % heads)
    a += row // heads * a_batch + row % heads * a_head
    b += row // heads * b_batch + row % heads * b_head
    i, key = tl.arange(0, CHUNK), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2) * TILE + tl.arange(0, TILE)
    place = key[:, None] * WIDTH + part
    chunks = tl.cdiv(tokens, CHUNK)
    state = tl.zeros([ROWS, TILE], dtype=tl.float32) if start is None else tl.load(start + row * WIDTH * WIDTH + place)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        tl.store(states + (row * chunks + chunk) * WIDTH * WIDTH + place, state.to(states.dtype.element_ty))
        count = tl.minimum(tokens - chunk * CHUNK, CHUNK)
        is_token = i < count
        token = (chunk * CHUNK + i).to(tl.int64)[:, None]
        x = tl.load(a + token * a_token + key, mask=is_token[:, None], other=0.0)
        y = tl.load(b + token * b_token + part, mask=is_token[:, None], other=0.0)
        weight = scale * tl.exp(-slope * (i + 1)) if REVERSE else tl.exp(-slope * tl.maximum(count - 1 - i, 0))
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        product = tl.dot(tl.trans(weighted), y, input_precision=PRECISION)
        state = tl.exp(-slope * count) * state + product
    tl.store(last + row * WIDTH * WIDTH + place, state)


@triton.jit
def mix_kernel(
    a,
    a_batch,
    a_head,
    a_token,
    b,
    b_batch,
    b_head,
    b_token,
    c,
    c_batch,
    c_head,
    c_token,
    slopes,
    states,
    state_row,
    state_column,
    out,
    out_batch,
    out_head,
    out_token,
    heads,
    tokens,
    scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    slope = tl.load(slopes + head)
    i = tl.arange(0, CHUNK)
    part = tl.program_id(2) * TILE + tl.arange(0, TILE)
    count = tl.minimum(tokens - chunk * CHUNK, CHUNK)
    is_token = (i < count)[:, None]
    token = (chunk * CHUNK + i).to(tl.int64)[:, None]
    a += batch * a_batch + head * a_head
    b += batch * b_batch + head * b_head
    z = tl.load(c + batch * c_batch + head * c_head + token * c_token + part, mask=is_token, other=0.0)
    states += (row * tl.num_programs(0) + chunk) * WIDTH * WIDTH
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    before = tl.zeros([CHUNK, TILE], dtype=tl.float32)
    for first in range(0, WIDTH, DEPTH):
        column = first + tl.arange(0, DEPTH)
        x = tl.load(a + token * a_token + column, mask=is_token, other=0.0)
        y = tl.load(b + token * b_token + column, mask=is_token, other=0.0)
        s = tl.load(states + column[:, None] * state_row + part * state_column)
        scores = tl.dot(x, tl.trans(y), scores, input_precision=PRECISION)
        before = tl.dot(x, s, before, input_precision=PRECISION)

    distance = i[None, :] - i[:, None] if REVERSE else i[:, None] - i[None, :]
    seen = tl.where(distance >= 0, tl.exp(-slope * tl.maximum(distance, 0)), 0.0)
    mixed = tl.dot((scores * seen * scale).to(z.dtype), z, input_precision=PRECISION)
    weight = tl.exp(-slope * tl.maximum(count - 1 - i, 0)) if REVERSE else scale * tl.exp(-slope * (i + 1))
    mixed += weight[:, None] * before
    place = out + batch * out_batch + head * out_head + token * out_token + part
    tl.store(place, mixed.to(out.dtype.element_ty), mask=is_token)
