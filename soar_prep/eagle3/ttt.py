"""Training-time test: the draft is trained on its own hidden states, several steps deep, as it will be used.

B rows   T tokens   H hidden size   k the step, from 0   i an index of the row   loss_mask, documents: see data.py

At index i, step k:  is given   hidden: the target's three states of token i (k = 0), or its own of step k - 1
                                the embedding of token i + 1 + k, from the data whatever the draft would have said
                     stands at  positions[i] + k
                     sees       step 0 up to i, and its own keys of steps 1 to k
                     guesses    token i + 2 + k, as the target does at index i + 1 + k: the teacher's row
                     counts     where token i + 2 + k is supervised and of the same document as i

So ids, teacher and mask move one to the left a step, all by the same. The first guess that serving needs, the second
token of an answer, is made at the prompt's last index: a mask that is not moved leaves it out.
Total loss: sum over k of 0.8^k times the mean of step k.
Source: EAGLE-3 (Li et al., 2025).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from soar_prep.eagle3.attention import StepAttention
from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.draft import Draft, at_least_fp32
from soar_prep.eagle3.loss import ETA, StepLoss, SumOverRanks, Teacher, step_loss, this_rank_alone
from soar_prep.settings import LossKind

STEPS = 7
DECAY = 0.8  # weight of a step's loss against the one before
CHUNK = 1024  # rows of full-vocabulary logits that exist at a time


@dataclass(frozen=True)
class SupervisedTeacher:
    """The target's words where they are needed: number int64 [B, T] is the row in `teacher`, -1 where there is none."""

    teacher: Teacher
    number: Tensor


@dataclass(frozen=True)
class StepResult:
    """place bool [B, T]: the indices i that counted; StepLoss and coverage [n] have a row for each, in this order."""

    place: Tensor
    figures: StepLoss
    coverage: Tensor


@dataclass(frozen=True)
class Result:
    loss: Tensor
    steps: list[StepResult]


def ttt_loss(
    draft: Draft,
    embed: Callable[[Tensor], Tensor],
    aux: Tensor,
    batch: Batch,
    taught: SupervisedTeacher,
    kind: LossKind = LossKind.hybrid,
    eta: float = ETA,
    steps: int = STEPS,
    decay: float = DECAY,
    sum_over_ranks: SumOverRanks = this_rank_alone,
) -> Result:
    """The total loss and every step's figures.

    embed: token ids [B, T] -> the target's embeddings as stored [B, T, H]. aux [B, T, 3H]: the target's states.
    taught: from `ask_teacher`. With a sum over ranks, losses and gradients are to be summed over ranks.
    """
    total = aux.new_zeros((), dtype=at_least_fp32(aux.dtype))
    results = []
    unrolled = unroll(draft, embed, aux, batch.token_ids, batch.positions, batch.document_ids, steps)
    for k, normed in enumerate(unrolled):
        place, rows = rows_of_step(taught.number, batch.document_ids, k)
        teacher = taught.teacher.rows(rows)
        compare = partial(compare_guesses, draft, teacher, kind, eta, sum_over_ranks)
        weights = dict(draft.lm_head.named_parameters())  # handed over: see DraftLayer
        if draft.checkpointing:
            figures = checkpoint(compare, weights, normed[place], use_reentrant=False)
        else:
            figures = compare(weights, normed[place])
        total = total + decay**k * figures.loss
        results.append(StepResult(place, figures, teacher.coverage()))
    return Result(total, results)


def compare_guesses(
    draft: Draft,
    teacher: Teacher,
    kind: LossKind,
    eta: float,
    sum_over_ranks: SumOverRanks,
    head: Mapping[str, Tensor],
    rows: Tensor,
) -> StepLoss:
    """Loss of the guesses from Step.normed rows [n, H]; head: lm_head's weights by name."""
    return step_loss(functional_call(draft.lm_head, dict(head), (rows,)), teacher, kind, eta, sum_over_ranks)


def unroll(
    draft: Draft,
    embed: Callable[[Tensor], Tensor],
    aux: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    documents: Tensor,
    steps: int = STEPS,
) -> Iterator[Tensor]:
    """Step.normed [B, T, H] of each step in turn, for `draft.logits`."""
    attend = StepAttention(documents)
    hidden = draft.project(aux)
    for k in range(steps):
        embeddings = embed(move_left(token_ids, k + 1, fill=0))
        step = draft.step(hidden, embeddings, positions + k, attend)
        hidden = step.hidden
        yield step.normed


def rows_of_step(number: Tensor, documents: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices that count in step k, bool [B, T], and the number of each one's teacher row, int64 [n]."""
    ahead = move_left(number, k + 1, fill=-1)
    place = (ahead >= 0) & (move_left(documents, k + 1, fill=-1) == documents)
    return place, ahead[place]


def supervised_rows(loss_mask: Tensor, documents: Tensor) -> Tensor:
    """Where the target's guess is of a supervised token, the next one of the same document; bool [B, T]."""
    same_document = (move_left(documents, 1, fill=-1) == documents) & (documents >= 0)
    return move_left(loss_mask, 1, fill=False) & same_document


@torch.no_grad()
def ask_teacher(
    last: Tensor, head: Callable[[Tensor], Tensor], target_ids: Tensor, loss_mask: Tensor, documents: Tensor
) -> SupervisedTeacher:
    """The target's words at supervised rows alone, and never more than CHUNK rows of all its logits at once.

    last [B, T, H]: the target's last hidden states. head: rows of them [n, H] -> logits [n, V_target], with all that
    the target does on the way; MiniCPM divides by 16 first: lambda rows: F.linear(rows / 16, weight).
    target_ids int64 [V_draft]: Draft.target_ids().
    """
    supervised = supervised_rows(loss_mask, documents)
    number = torch.where(supervised, supervised.flatten().cumsum(0).view_as(documents) - 1, -1)
    chunks = [teacher_of_logits(head(rows), target_ids) for rows in last[supervised].split(CHUNK)]
    teacher = Teacher(
        torch.cat([chunk.logits for chunk in chunks]),
        torch.cat([chunk.log_z for chunk in chunks]),
        torch.cat([chunk.log_z_draft for chunk in chunks]),
        torch.cat([chunk.best for chunk in chunks]),
    )
    return SupervisedTeacher(teacher, number)


def teacher_of_logits(logits: Tensor, target_ids: Tensor) -> Teacher:
    """The teacher's rows from logits [n, V_target] over its full vocabulary."""
    wide = at_least_fp32(logits.dtype)
    kept = logits[:, target_ids]
    best = logits.argmax(dim=-1)
    draft_id = torch.searchsorted(target_ids, best).clamp(max=len(target_ids) - 1)
    best = torch.where(target_ids[draft_id] == best, draft_id, -1)
    return Teacher(kept, logits.to(wide).logsumexp(dim=-1), kept.to(wide).logsumexp(dim=-1), best)


def move_left(x: Tensor, by: int, fill: int | bool) -> Tensor:
    """x[:, i + by] at index i, `fill` where the row has ended; [B, T] in and out."""
    moved = torch.full_like(x, fill)
    moved[:, : max(x.shape[1] - by, 0)] = x[:, by:]
    return moved
