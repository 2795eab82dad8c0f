"""The draft's vocabulary: the tokens the assistant writes most, so that the draft's head is small.

V target vocabulary   D draft vocabulary

d2t int64 [D] holds offsets, as SGLang reads it: target_id = draft_id + d2t[draft_id]. t2d bool [V] marks the target
ids that the draft has. Draft ids follow the order of target ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from soar_prep.errors import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """d2t int64 [D], t2d bool [V]; coverage: share of the supervised tokens that the draft has, a limit of alpha."""

    d2t: Tensor
    t2d: Tensor
    coverage: float

    @property
    def target_ids(self) -> Tensor:
        """int64 [D]: the target id of each draft id, ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def count_supervised(token_ids: Tensor, loss_mask: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: how often each target id is supervised. token_ids and loss_mask of one shape."""
    supervised = token_ids[loss_mask].long()
    if len(supervised) and (supervised.min() < 0 or supervised.max() >= vocab_size):
        raise UserError(
            f"token ids {int(supervised.min())} to {int(supervised.max())}: expected 0 to {vocab_size - 1}, the "
            "target's vocabulary; are tokenizer and target of the same model?"
        )
    return torch.bincount(supervised, minlength=vocab_size)


def choose_vocabulary(counts: Tensor, draft_vocab_size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The most frequent ids of counts int64 [V]; of equal ones the lower. Unused ids, the lowest, fill up.

    always: ids that are in however rare, if they occur at all: the control tokens, without which no draft would ever
    guess the end of an answer.
    """
    vocab_size = len(counts)
    if not 1 <= draft_vocab_size <= vocab_size:
        raise UserError(f"draft_vocab_size={draft_vocab_size}: expected 1 to {vocab_size}, the target's vocabulary")
    if not counts.sum():
        raise UserError("no token is supervised, so none is frequent; expected samples with answers")
    rank = counts.clone()
    forced = torch.tensor(sorted(i for i in always if i < vocab_size and counts[i]), dtype=torch.int64)
    if len(forced) > draft_vocab_size:
        raise UserError(
            f"draft_vocab_size={draft_vocab_size}: {len(forced)} control tokens occur and must be in; raise it"
        )
    rank[forced] = counts.max() + 1
    target_ids = torch.sort(rank, descending=True, stable=True).indices[:draft_vocab_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    coverage = int(counts[t2d].sum()) / int(counts.sum())
    return DraftVocabulary(target_ids - torch.arange(draft_vocab_size), t2d, coverage)


def check_mapping(d2t: Tensor, t2d: Tensor, where: str) -> None:
    """UserError for the first id on which d2t int64 [D] and t2d bool [V] disagree. where: file or step, for it."""
    types = (d2t.dtype, d2t.ndim, t2d.dtype, t2d.ndim)
    if types != (torch.int64, 1, torch.bool, 1) or not 1 <= len(d2t) <= len(t2d):
        raise UserError(
            f"{where}: d2t {d2t.dtype} {list(d2t.shape)}, t2d {t2d.dtype} {list(t2d.shape)}; expected int64 [D] and "
            "bool [V], D of 1 to V; write the draft anew"
        )
    target_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    inside = (target_ids >= 0) & (target_ids < len(t2d))
    rising = torch.ones_like(inside)
    rising[1:] = target_ids[1:] > target_ids[:-1]
    marked = t2d[target_ids.clamp(0, len(t2d) - 1)]
    wrong = ~(inside & rising & marked)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        expected = "one that t2d marks"
        if not inside[first]:
            expected = f"one of 0 to {len(t2d) - 1}"
        elif not rising[first]:
            expected = f"one above {int(target_ids[first - 1])}, that of the draft token before"
        raise UserError(
            f"{where}: d2t maps draft token {first} to target token {int(target_ids[first])}; expected {expected}; "
            "the file is damaged, or d2t holds ids where offsets belong"
        )
    unmapped = t2d.clone()
    unmapped[target_ids] = False
    if unmapped.any():
        raise UserError(
            f"{where}: t2d marks target token {int(unmapped.nonzero()[0])}, but d2t maps no draft token to it; "
            "the file is damaged"
        )
