"""What a draft is trained on: KL divergence at first, the probability of being accepted in the end.

n rows, the supervised positions of one step   V draft vocabulary
z [n, V] draft logits       q = softmax(z)
p [n, V] the target's probabilities of the draft's tokens: softmax over its FULL vocabulary, not renormalised
coverage = sum_v p_v        p~ = p / coverage
alpha = sum_v min(p_v, q_v), the probability that a token drawn from q is accepted; at most the coverage
A = [q <= p]                s = sum of q over A

| kind          | loss of a row                                | gradient to z                            |
|---------------|----------------------------------------------|------------------------------------------|
| kl            | KL(p~ || q) = sum_v p~ (log p~ - log q)      | q - p~                                   |
| tv            | 1 - alpha                                    | q (s - A)                                |
| neg_log_alpha | -log alpha                                   | q (s - A) / alpha                        |
| hybrid        | lambda KL(p~ || q) + (1 - lambda)(1 - alpha) | lambda (q - p~) + (1 - lambda) q (s - A) |

lambda = exp(-eta mean(alpha)), a constant: one for a step, from the mean over all its rows on all ranks. A new draft
has q near 1 / V, so the gradient of tv is about 1 / V and alone would stall: KL leads. KL also spends a small draft on
tails that it cannot fit; as alpha grows, what counts in serving takes over (lambda .55, .22, .09 at alpha .2, .5, .8).
Only the gradient [n, V] is kept for the backward pass, in z's dtype; all sums are in fp32 at least.
`losses_and_gradient` is the truth; on a GPU its twin in triton_loss.py runs.
Source: LK losses (Samarin et al., arXiv 2602.23881).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soar_prep.eagle3.draft import at_least_fp32
from soar_prep.settings import LossKind

ETA = 3.0  # the authors' for EAGLE-3
SumOverRanks = Callable[[Tensor], Tensor]  # a small tensor -> its sum over all ranks, on each


@dataclass(frozen=True)
class Teacher:
    """What the target says at n positions.

    logits [n, V]: of the draft's tokens, in the target's dtype. log_z, log_z_draft [n], at least fp32: log-sum-exp of
    the logits over the full vocabulary and over the draft's. best int64 [n]: the most likely token's draft id, -1 if
    the draft lacks it.
    """

    logits: Tensor
    log_z: Tensor
    log_z_draft: Tensor
    best: Tensor

    def rows(self, index: Tensor) -> "Teacher":
        return Teacher(self.logits[index], self.log_z[index], self.log_z_draft[index], self.best[index])

    def coverage(self) -> Tensor:
        """The target's probability of all the draft's tokens together, [n]: no draft's alpha can be higher."""
        return (self.log_z_draft - self.log_z).exp()


@dataclass(frozen=True)
class StepLoss:
    """loss []: the mean over rows, with a gradient. The rest without: alpha, kl [n]; correct bool [n], the draft's
    first choice is the target's; mixing [], lambda."""

    loss: Tensor
    alpha: Tensor
    kl: Tensor
    correct: Tensor
    mixing: Tensor


def this_rank_alone(total: Tensor) -> Tensor:
    return total


def step_loss(
    z: Tensor,
    teacher: Teacher,
    kind: LossKind = LossKind.hybrid,
    eta: float = ETA,
    sum_over_ranks: SumOverRanks = this_rank_alone,
) -> StepLoss:
    """Loss of one step; z [n, V] and the n rows of the teacher. No row at all is a loss of zero.

    With a sum over ranks the loss is this rank's share of the mean over all ranks' rows: losses and gradients are to
    be SUMMED over ranks, not averaged.
    """
    losses, alpha, kl, mixing, rows = _RowLosses.apply(
        z, teacher.logits, teacher.log_z, teacher.log_z_draft, kind, eta, sum_over_ranks
    )
    return StepLoss(losses.sum() / rows, alpha, kl, z.detach().argmax(dim=-1) == teacher.best, mixing)


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *teacher_and_options: Any) -> tuple[Tensor, ...]:
        compute = losses_and_gradient
        if z.is_cuda:
            from soar_prep.eagle3 import triton_loss  # triton is not there on every platform

            compute = triton_loss.losses_and_gradient
        losses, gradient, *figures = compute(z, *teacher_and_options)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(*figures)
        return losses, *figures

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient.is_cuda:
            from soar_prep.eagle3 import triton_loss

            return triton_loss.scale_rows(gradient, gradients[0]), *[None] * 6
        return (gradients[0][:, None] * gradient).to(gradient.dtype), *[None] * 6


def losses_and_gradient(
    z: Tensor,
    teacher_logits: Tensor,
    log_z: Tensor,
    log_z_draft: Tensor,
    kind: LossKind,
    eta: float,
    sum_over_ranks: SumOverRanks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(losses [n], their gradient to z [n, V] in z's dtype, alpha [n], KL [n], lambda [], rows on all ranks [])."""
    wide = at_least_fp32(z.dtype)
    log_q = z.to(wide).log_softmax(dim=-1)
    teacher_logits = teacher_logits.to(wide)
    q, p = log_q.exp(), (teacher_logits - log_z[:, None]).exp()
    log_p_tilde = teacher_logits - log_z_draft[:, None]
    p_tilde = log_p_tilde.exp()
    alpha = torch.minimum(p, q).sum(dim=-1)
    # A head may rule tokens out with -inf, and 0 * -inf is no number.
    kl = torch.where(p_tilde > 0, p_tilde * (log_p_tilde - log_q), 0.0).sum(dim=-1)
    mixing, rows = mixing_of(alpha, eta, sum_over_ranks)

    # alpha is zero where all of the target's mass lies outside the draft's tokens; so is then its gradient.
    positive_alpha = alpha.clamp(min=torch.finfo(wide).tiny)
    of_kl: float | Tensor
    of_tv: float | Tensor
    if kind is LossKind.kl:
        losses, of_kl, of_tv = kl.clone(), 1.0, 0.0  # autograd tells the loss from the figure by the tensor
    elif kind is LossKind.tv:
        losses, of_kl, of_tv = 1 - alpha, 0.0, 1.0
    elif kind is LossKind.neg_log_alpha:
        losses, of_kl, of_tv = -positive_alpha.log(), 0.0, 1 / positive_alpha[:, None]
    else:
        losses, of_kl, of_tv = mixing * kl + (1 - mixing) * (1 - alpha), mixing, 1 - mixing
    accepted = (q <= p).to(wide)
    s = (q * accepted).sum(dim=-1, keepdim=True)
    gradient = of_kl * (q - p_tilde) + of_tv * (q * (s - accepted))
    return losses, gradient.to(z.dtype), alpha, kl, mixing, rows


def mixing_of(alpha: Tensor, eta: float, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
    """(lambda [], rows on all ranks [], at least 1) from alpha [n] of this rank. Nothing is copied to or from a GPU."""
    sums = alpha.new_full((2,), len(alpha))
    torch.sum(alpha, dim=0, out=sums[0])
    total, rows = sum_over_ranks(sums)
    rows = rows.clamp(min=1)
    return torch.exp(-eta * total / rows), rows
