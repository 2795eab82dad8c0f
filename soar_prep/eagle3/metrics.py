"""What a draft is worth, from the training-time test alone: acceptance by step, and the length it promises.

For the steps k = 0, 1, ... of every supervised index i (ttt.py says which ones count):

alpha_k        mean of sum_v min(p_v, q_v): the chance that a token drawn from the draft is accepted at step k
accuracy_k     share of draft first choices that are the target's; one outside the draft's vocabulary is wrong
conditional_k  the same among the indices whose steps before k were all right, as greedy decoding meets them
coverage_k     the target's probability of all the draft's tokens together, the highest alpha there can be
tau_greedy     1 + sum_k P(steps 0 to k all right)             tokens a round of greedy decoding, the bonus included
tau_sampled    1 + sum_k mean of prod_{m <= k} alpha_m         the same for sampling at temperature 1

A joint figure of steps 0 to k is over the indices where all of them count, so that the end of an answer, where the last
steps have nothing to guess, does not pass for a rejection. Both taus are of a chain as deep as there are steps, fed
the data's tokens; real decoding is fed the draft's own, which decode.py measures.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from soar_prep.eagle3.ttt import Result


@dataclass
class StepSums:
    """Sums of one step, fp64, over the indices seen so far."""

    count: float = 0.0
    alpha: float = 0.0
    correct: float = 0.0
    coverage: float = 0.0
    joint_count: float = 0.0
    reached: float = 0.0
    joint_correct: float = 0.0
    joint_alpha: float = 0.0


@dataclass
class Acceptance:
    """Running figures over batches."""

    steps: list[StepSums] = field(default_factory=list)

    @torch.no_grad()
    def add(self, result: Result) -> None:
        """Take in one batch's steps, all of the same rows [B, T]."""
        shape = result.steps[0].place.shape
        device = result.steps[0].place.device
        counted = torch.ones(shape, dtype=torch.bool, device=device)
        all_right = torch.ones(shape, dtype=torch.bool, device=device)
        product = torch.ones(shape, dtype=torch.float64, device=device)
        while len(self.steps) < len(result.steps):
            self.steps.append(StepSums())
        for sums, step in zip(self.steps, result.steps, strict=True):
            counted = counted & step.place
            sums.reached += (all_right & counted).sum().item()
            all_right = all_right & spread(step.figures.correct, step.place)
            product = product * spread(step.figures.alpha.double(), step.place)
            sums.count += step.place.sum().item()
            sums.alpha += step.figures.alpha.double().sum().item()
            sums.correct += step.figures.correct.sum().item()
            sums.coverage += step.coverage.double().sum().item()
            sums.joint_count += counted.sum().item()
            sums.joint_correct += (all_right & counted).sum().item()
            sums.joint_alpha += product[counted].sum().item()

    def merge(self, other: "Acceptance") -> None:
        """Take in what another process has seen."""
        self.steps += [StepSums() for _ in other.steps[len(self.steps) :]]
        for own, seen in zip(self.steps, other.steps, strict=False):
            for f in fields(StepSums):
                setattr(own, f.name, getattr(own, f.name) + getattr(seen, f.name))

    def figures(self) -> dict[str, Any]:
        """alpha, accuracy, conditional and coverage, a list of steps each; tau_greedy, tau_sampled; steps that never
        counted are left out."""
        steps = [sums for sums in self.steps if sums.count]
        joint = [sums for sums in steps if sums.joint_count]
        return {
            "alpha": [sums.alpha / sums.count for sums in steps],
            "accuracy": [sums.correct / sums.count for sums in steps],
            "conditional": [sums.joint_correct / sums.reached if sums.reached else 0.0 for sums in joint],
            "coverage": [sums.coverage / sums.count for sums in steps],
            "tau_greedy": 1 + sum(sums.joint_correct / sums.joint_count for sums in joint),
            "tau_sampled": 1 + sum(sums.joint_alpha / sums.joint_count for sums in joint),
        }


def spread(values: Tensor, place: Tensor) -> Tensor:
    """Values [n] of the places that are True, in [B, T]; zero (False) elsewhere."""
    result = torch.zeros(place.shape, dtype=values.dtype, device=values.device)
    result[place] = values
    return result
