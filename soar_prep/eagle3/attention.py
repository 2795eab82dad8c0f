"""Attention of the training-time test: step k sees step 0 causally, and of steps 1 to k only its own keys.

B rows   T tokens   nh query heads   nkv key-value heads, nh a multiple of nkv   hd head_dim   k the step
q [B, nh, T, hd] queries of step k            keys, values [B, nkv, T, hd] of step 0
own_keys, own_values: k tensors [B, nkv, T, hd], of steps 1 to k
documents int64 [B, T]: index i sees j <= i only where documents[i] = documents[j]

A mask for that is (k + 1) T wide, but nearly all of it beyond step 0 is empty. So: causal attention over step 0 and its
log-sum-exp lse0, then one score s_m = q . own_key_m / sqrt(hd) an own key:

    lse = log(exp(lse0) + sum_m exp(s_m))     output = exp(lse0 - lse) output0 + sum_m exp(s_m - lse) own_value_m

Backward, `causal_backward` is given the MERGED output and lse. A flash kernel's backward recomputes exp(score - lse)
and subtracts grad . output: with the merged ones that is exactly step 0's share, so a kernel that returns lse can stand
in for the two causal functions, unchanged. All sums are in fp32 at least. `ttt_attention_truth` has the mask.
On a GPU in bf16 or fp16 that kernel is torch's FlashAttention: the documents of all rows laid end to end, each a
sequence of its own. It rounds output0 and the gradients of its part to the dtype, and sums dq in no fixed order unless
torch.use_deterministic_algorithms is on.

Padding is a document of its own (a negative id): it sees itself, nobody else sees it, and no row is without keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soar_prep.eagle3.draft import at_least_fp32

QUERY_BLOCK = 256  # queries a block of scores


@dataclass(frozen=True)
class Sequences:
    """Documents of all rows laid end to end: bounds int32 [documents + 1], where each begins among the B T indices and
    the last ends; longest: tokens, at least two."""

    bounds: Tensor
    longest: int


def ttt_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    documents: Tensor,
    sequences: Sequences | None = None,
) -> Tensor:
    """Output [B, nh, T, hd] in q's dtype, with gradients to q, keys and values. Saves no scores: O(T) memory.

    sequences: of the documents, where `has_flash(q)`; then step 0 is the GPU's kernel.
    """
    return _TTTAttention.apply(q, keys, values, documents, sequences, *own_keys, *own_values)


def ttt_attention_truth(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor], documents: Tensor
) -> Tensor:
    """The same with an explicit mask over all keys of all steps."""
    wide = at_least_fp32(q.dtype)
    tokens, group = q.shape[2], q.shape[1] // keys.shape[1]
    index = torch.arange(tokens, device=q.device)
    same_document = documents[:, None, :, None] == documents[:, None, None, :]
    seen = same_document & (index <= index[:, None])
    own = (index == index[:, None]).expand_as(seen)
    seen = torch.cat([seen] + [own] * len(own_keys), dim=-1)
    every_key = torch.cat([keys, *own_keys], dim=2).to(wide).repeat_interleave(group, dim=1)
    every_value = torch.cat([values, *own_values], dim=2).to(wide).repeat_interleave(group, dim=1)
    scores = q.to(wide) @ every_key.mT * q.shape[-1] ** -0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ every_value).to(q.dtype)


class StepAttention:
    """`Attend` for the steps of one training sequence, to be called once a step: it remembers the keys."""

    def __init__(self, documents: Tensor):
        self.documents = documents
        self.sequences: Sequences | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.keys and has_flash(q):
            self.sequences = sequences_of(self.documents)
        self.keys.append(k)
        self.values.append(v)
        own_keys, own_values = self.keys[1:], self.values[1:]
        return ttt_attention(q, self.keys[0], self.values[0], own_keys, own_values, self.documents, self.sequences)


def has_flash(q: Tensor) -> bool:
    """torch's FlashAttention has a forward and a backward pass for such queries."""
    head_dim = q.shape[-1]
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.numel() == 0:
        return False
    # Between 192 and 256 the backward pass exists for data-centre GPUs alone.
    is_size_served = head_dim % 8 == 0 and (head_dim <= 192 or head_dim == 256)
    return is_size_served and torch.cuda.get_device_capability(q.device) >= (8, 0)


def sequences_of(documents: Tensor) -> Sequences | None:
    """None where a row has a document in several pieces. The one wait for the GPU of a training sequence."""
    rows = documents.cpu()
    is_start = torch.ones_like(rows, dtype=torch.bool)
    is_start[:, 1:] = rows[:, 1:] != rows[:, :-1]
    row, index = is_start.nonzero(as_tuple=True)
    names = torch.stack([row, rows[row, index]])
    if names.unique(dim=1).shape[1] < names.shape[1]:
        return None
    bounds = torch.cat([is_start.flatten().nonzero()[:, 0], torch.tensor([rows.numel()])]).int()
    # torch's kernel takes another road for sequences of one token, which returns its log-sum-exp in another order.
    return Sequences(bounds.to(documents.device), max(int(bounds.diff().max()), 2))


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        documents: Tensor,
        sequences: Sequences | None,
        *own: Tensor,
    ) -> Tensor:
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        if sequences is None:
            output, lse = causal_forward(q, keys, values, documents)
        else:
            output, lse = flash_forward(q, keys, values, sequences)
        merge, _ = own_functions(q, own_keys)
        output, lse = merge(output, lse, q, own_keys, own_values)
        output = output.to(q.dtype)
        ctx.sequences = sequences
        ctx.save_for_backward(q, keys, values, documents, output, lse, *own)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, documents, output, lse, *own = ctx.saved_tensors
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        (grad,) = gradients
        if ctx.sequences is None:
            dq, dk, dv = causal_backward(grad, q, keys, values, documents, output, lse)
        else:
            dq, dk, dv = flash_backward(grad, q, keys, values, ctx.sequences, output, lse)
        if own:
            _, backward = own_functions(q, own_keys)
            dq_own, dk_own, dv_own = backward(grad, q, own_keys, own_values, output, lse)
            dq = dq + dq_own
        else:
            dk_own = dv_own = []
        return dq.to(q.dtype), dk.to(keys.dtype), dv.to(values.dtype), None, None, *dk_own, *dv_own


def own_functions(q: Tensor, own_keys: Sequence[Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`merge_own` and `own_backward`, or on a GPU their Triton twins."""
    if not own_keys or not q.is_cuda or q.dtype == torch.float64:
        return merge_own, own_backward
    from soar_prep.eagle3 import triton_attention  # triton is not there on every platform

    return triton_attention.merge_own, triton_attention.own_backward


def causal_forward(q: Tensor, keys: Tensor, values: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: output [B, nh, T, hd] and log-sum-exp [B, nh, T], both at least fp32."""
    wide, scale = at_least_fp32(q.dtype), q.shape[-1] ** -0.5
    keys, values, grouped = keys.to(wide)[:, :, None], values.to(wide)[:, :, None], group_heads(q, keys)
    outputs, sums = [], []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[2])
        scores = grouped[..., start:stop, :].to(wide) @ keys[..., :stop, :].mT * scale
        scores.masked_fill_(~visible(documents, start, stop), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        outputs.append(scores.sub_(lse[..., None]).exp_() @ values[..., :stop, :])
        sums.append(lse)
    return torch.cat(outputs, dim=-2).flatten(1, 2), torch.cat(sums, dim=-1).flatten(1, 2)


def causal_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, documents: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and values, at least fp32, through step 0's part of (output, lse), whatever else is in it.

    grad, output [B, nh, T, hd]; lse [B, nh, T].
    """
    wide, scale = at_least_fp32(q.dtype), q.shape[-1] ** -0.5
    wide_keys, wide_values = keys.to(wide)[:, :, None], values.to(wide)[:, :, None]
    queries, outward, sums = group_heads(q, keys), group_heads(grad, keys), group_heads(lse, keys)
    inner = group_heads((grad.to(wide) * output.to(wide)).sum(dim=-1), keys)
    dq = torch.empty_like(queries, dtype=wide)
    dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    for start in range(0, q.shape[2], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[2])
        block = slice(start, stop)
        q_block, grad_block = queries[..., block, :].to(wide), outward[..., block, :].to(wide)
        scores = q_block @ wide_keys[..., :stop, :].mT * scale
        scores.masked_fill_(~visible(documents, start, stop), -torch.inf)
        weights = scores.sub_(sums[..., block, None]).exp_()
        dv[:, :, :stop] += (weights.mT @ grad_block).sum(dim=2)
        d_scores = grad_block @ wide_values[..., :stop, :].mT
        d_scores.sub_(inner[..., block, None]).mul_(weights).mul_(scale)
        dq[..., block, :] = d_scores @ wide_keys[..., :stop, :]
        dk[:, :, :stop] += (d_scores.mT @ q_block).sum(dim=2)
    return dq.flatten(1, 2), dk, dv


def flash_forward(q: Tensor, keys: Tensor, values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """As `causal_forward`, by torch's kernel: output in q's dtype, log-sum-exp fp32."""
    bounds, longest = sequences.bounds, sequences.longest
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(end_to_end(x) for x in (q, keys, values)), bounds, bounds, longest, longest, 0.0, True, False
    )
    rows = q.shape[0]
    return output.unflatten(0, (rows, -1)).transpose(1, 2), lse.unflatten(1, (rows, -1)).transpose(0, 1)


def flash_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `causal_backward`, by torch's kernel: gradients in q's dtype."""
    bounds, longest = sequences.bounds, sequences.longest
    laid = [end_to_end(x) for x in (grad.contiguous(), q, keys, values, output)]
    sums = lse.transpose(0, 1).flatten(1).contiguous()
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # nor seed
    gradients = torch.ops.aten._flash_attention_backward(
        *laid, sums, bounds, bounds, longest, longest, 0.0, True, *no_dropout
    )
    dq, dk, dv = (x.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for x in gradients)
    return dq, dk, dv


def end_to_end(x: Tensor) -> Tensor:
    """[B, heads, T, hd] -> [B T, heads, hd], as the kernel wants it."""
    return x.transpose(1, 2).flatten(0, 1)


def merge_own(
    output: Tensor, lse: Tensor, q: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(output, lse) of step 0 -> those over step 0 and each query's own keys; dtypes as they come."""
    if not own_keys:
        return output, lse
    scores = [own_scores(q, key) for key in own_keys]
    merged = torch.stack([lse, *scores]).logsumexp(dim=0)
    grouped = group_heads(output * (lse - merged).exp()[..., None], own_keys[0])
    for score, value in zip(scores, own_values, strict=True):
        grouped = grouped + group_heads((score - merged).exp(), value)[..., None] * value[:, :, None]
    return grouped.flatten(1, 2), merged


def own_backward(
    grad: Tensor, q: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor], output: Tensor, lse: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of q (own keys' share, at least fp32), of own_keys and of own_values."""
    wide, scale = at_least_fp32(q.dtype), q.shape[-1] ** -0.5
    grad = grad.to(wide)
    inner = (grad * output.to(wide)).sum(dim=-1)
    dq = torch.zeros_like(q, dtype=wide)
    dk, dv = [], []
    for key, value in zip(own_keys, own_values, strict=True):
        weight = (own_scores(q, key) - lse).exp()
        d_weight = (group_heads(grad, value) * value[:, :, None]).sum(dim=-1).flatten(1, 2)
        d_score = (weight * (d_weight - inner) * scale)[..., None]
        dq += (group_heads(d_score, key) * key[:, :, None]).flatten(1, 2)
        dk.append(group_heads(d_score * q, key).sum(dim=2).to(key.dtype))
        dv.append(group_heads(weight[..., None] * grad, value).sum(dim=2).to(value.dtype))
    return dq, dk, dv


def own_scores(q: Tensor, key: Tensor) -> Tensor:
    """q . key / sqrt(hd) at each index, [B, nh, T], at least fp32."""
    wide = at_least_fp32(q.dtype)
    products = group_heads(q.to(wide), key) * key.to(wide)[:, :, None]
    return products.sum(dim=-1).flatten(1, 2) * q.shape[-1] ** -0.5


def group_heads(x: Tensor, keys: Tensor) -> Tensor:
    """x [B, nh, ...] -> [B, nkv, nh / nkv, ...]: query heads beside the key-value head they share."""
    return x.unflatten(1, (keys.shape[1], -1))


def visible(documents: Tensor, start: int, stop: int) -> Tensor:
    """Which of the keys 0 to stop - 1 each query start to stop - 1 sees: bool [B, 1, 1, stop - start, stop]."""
    index = torch.arange(stop, device=documents.device)
    same_document = documents[:, start:stop, None] == documents[:, None, :stop]
    return (same_document & (index <= index[start:, None]))[:, None, None]
