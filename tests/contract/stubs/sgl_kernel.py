"""Stands in for sgl_kernel, SGLang's compiled kernels: the published ones are for CUDA.

SGLang imports names from it, and on a CPU without AMX kernels computes in plain torch what these tests need. Only the
bookkeeping of speculative decoding has no plain form; it is here, for a chain, after SGLang's Triton kernels of the
same names (kernels/ops/speculative). No arithmetic of a model is among it.

B requests   n draft tokens of each, the pending one first
"""

import torch
from inert import make_inert
from torch import Tensor

make_inert(__name__, "0.0.0")

# SGLang looks these operators up while it imports its linear attentions, of which only lightning attention is run here:
# declared without an implementation, so a call of one fails.
DECLARED = torch.library.Library("sgl_kernel", "DEF")
for operator in (
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_gdn_gating_cpu",
):
    DECLARED.define(f"{operator}() -> ()")


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, slots: Tensor, width: int
) -> None:
    """Write the slots, request after request, to columns start to stop of each request's row of the table."""
    done = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = slots[done : done + stop - start]
        done += stop - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, slots: Tensor, width: int
) -> None:
    """The way back: read them from the table."""
    done = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        slots[done : done + stop - start] = table[row, start:stop]
        done += stop - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, width: int, topk: int, steps: int
) -> None:
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, slots, width)


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Moves accepted tokens of a tree together. Those of a chain lie together: there is nothing to move."""
    assert torch.equal(targets, sources), "only a chain is covered"


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    count: int,
    mask_mode: int,
) -> None:
    """A chain: each token follows the one before it, at the next position, and none has a sibling."""
    assert topk == 1, "only a chain is covered"
    steps = torch.arange(count)
    positions.copy_((lengths[:, None] + steps).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.cat([steps[1:], torch.tensor([-1])]).expand_as(next_token))
    mask.copy_(torch.ones(count, count).tril().bool().flatten().repeat(len(lengths)))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """candidates, target_predict [B, n]: guesses stand up to the first that the target does not choose.

    predicts [B n]: the target's choice after each token that stands; accept_index [B, depth + 1]: where those are;
    accept_token_num [B]: how many guesses stand.
    """
    chosen = target_predict.view_as(candidates)
    for request, guesses in enumerate(candidates.tolist()):
        right = (candidates[request, 1:] == chosen[request, :-1]).long().cumprod(0)
        stands = int(right[: accept_index.shape[1] - 1].sum())
        first = request * len(guesses)
        predicts[first : first + stands + 1] = chosen[request, : stands + 1]
        accept_index[request, : stands + 1] = torch.arange(first, first + stands + 1)
        accept_token_num[request] = stands


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """bonus [B]: the last accepted token of each request."""
    bonus.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def fill_accept_out_cache_loc_cpu(index: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """The slots of the accepted tokens, together at the front."""
    kept = slots[index[index >= 0]]
    accepted[: len(kept)] = kept


def rotate_input_ids_cpu(
    tokens: Tensor, starts: Tensor, lengths: Tensor, following: Tensor, select: Tensor | None = None
) -> None:
    """Each token is replaced by the one after it; the last by `following`, or the one at `select` is."""
    for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        tokens[start : start + length - 1] = tokens[start + 1 : start + length].clone()
        tokens[start + length - 1 if select is None else select[request]] = following[request]
