import pytest
import torch

from soar_prep.eagle3.loss import StepLoss
from soar_prep.eagle3.metrics import Acceptance
from soar_prep.eagle3.ttt import Result, StepResult


def step(place: list[int], correct: list[int], alpha: list[float]) -> StepResult:
    """One step of a batch of one row; a value of `correct` and `alpha` for each index where place is 1."""
    nothing = torch.tensor(0.0)
    figures = StepLoss(nothing, torch.tensor(alpha), torch.zeros(len(alpha)), torch.tensor(correct).bool(), nothing)
    return StepResult(torch.tensor([place]).bool(), figures, torch.full((len(alpha),), 0.9))


def result(*steps: StepResult) -> Result:
    return Result(torch.tensor(0.0), list(steps))


BY_HAND = result(
    step([1, 1, 1, 1, 0], [1, 1, 0, 1], [0.8, 0.6, 0.2, 1.0]),
    step([1, 1, 1, 0, 0], [1, 0, 1], [0.5, 0.5, 0.5]),
)


def test_by_hand():
    """Catches a step counted where it guesses nothing, a joint figure made of marginal ones, a bonus left out."""
    acceptance = Acceptance()
    acceptance.add(BY_HAND)
    figures = acceptance.figures()
    assert figures["alpha"] == pytest.approx([2.6 / 4, 0.5])
    assert figures["accuracy"] == pytest.approx([3 / 4, 2 / 3])
    # index 2 is right at step 1 but was wrong before: it is not met; index 3 has no step 1
    assert figures["conditional"] == pytest.approx([3 / 4, 1 / 2])
    assert figures["tau_greedy"] == pytest.approx(1 + 3 / 4 + 1 / 3)
    assert figures["tau_sampled"] == pytest.approx(1 + 2.6 / 4 + (0.4 + 0.3 + 0.1) / 3)
    assert figures["coverage"] == pytest.approx([0.9, 0.9])


def test_batches_add_up():
    """Catches a mean of means: batches of different size must weigh by their indices."""
    single = result(step([1, 0, 0, 0, 0], [0], [0.0]), step([0, 0, 0, 0, 0], [], []))
    acceptance = Acceptance()
    acceptance.add(BY_HAND)
    acceptance.add(single)
    figures = acceptance.figures()
    assert figures["alpha"][0] == pytest.approx(2.6 / 5)
    assert figures["tau_greedy"] == pytest.approx(1 + 3 / 5 + 1 / 3)


@pytest.mark.parametrize(("alpha", "tau"), [(0.7, 3.14), (0.8, 4.16), (0.85, 4.85)])
def test_constant_alpha(alpha: float, tau: float):
    """Catches a product or a sum off by one step: seven steps of constant alpha have these known lengths."""
    acceptance = Acceptance()
    acceptance.add(result(*(step([1, 1], [1, 0], [alpha, alpha]) for _ in range(7))))
    assert acceptance.figures()["tau_sampled"] == pytest.approx(tau, abs=0.005)


def test_nothing_counted():
    """Catches a division by zero where no index is supervised: a round then yields the bonus token alone."""
    acceptance = Acceptance()
    acceptance.add(result(step([0, 0], [], []), step([0, 0], [], [])))
    figures = acceptance.figures()
    assert (figures["alpha"], figures["tau_greedy"], figures["tau_sampled"]) == ([], 1, 1)
