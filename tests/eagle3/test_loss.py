import math

import pytest
import torch
from torch import Tensor

from soar_prep.eagle3.loss import LossKind, StepLoss, Teacher, step_loss

KINDS = list(LossKind)


def teacher_of(full_logits: Tensor, target_ids: Tensor) -> Teacher:
    """The teacher's rows from logits [n, V_target] and the target id of each draft id."""
    logits = full_logits[:, target_ids]
    best = (full_logits.argmax(dim=-1)[:, None] == target_ids).int()
    best = torch.where(best.any(dim=-1), best.argmax(dim=-1), -1)
    return Teacher(logits, full_logits.logsumexp(dim=-1), logits.logsumexp(dim=-1), best)


def drawn(rows: int, vocabulary: int, seed: int = 0, outside: int = 4) -> tuple[Tensor, Teacher]:
    """Draft logits, and a teacher with `outside` tokens that the draft lacks; fp64."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 2
    full = torch.randn(rows, vocabulary + outside, generator=generator, dtype=torch.float64) * 2
    ids = torch.randperm(vocabulary + outside, generator=generator)[:vocabulary].sort().values
    return z, teacher_of(full, ids)


def formula(z: Tensor, teacher: Teacher, kind: LossKind, eta: float) -> Tensor:
    """The mean loss, written for autograd."""
    q = z.softmax(-1)
    p = teacher.logits.exp() / teacher.log_z.exp()[:, None]
    alpha = torch.minimum(p, q).sum(-1)
    p_tilde = p / p.sum(-1, keepdim=True)
    kl = (p_tilde * (p_tilde / q).log()).sum(-1)
    mixing = torch.exp(-eta * alpha.mean()).detach()
    rows = {
        LossKind.kl: kl,
        LossKind.tv: 1 - alpha,
        LossKind.neg_log_alpha: -alpha.log(),
        LossKind.hybrid: mixing * kl + (1 - mixing) * (1 - alpha),
    }
    return rows[kind].mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outside", [0, 4])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (15, 17), (17, 130)])
def test_gradients_are_autograds(rows: int, vocabulary: int, outside: int, kind: LossKind):
    """Catches a wrong term of the table, a gradient through lambda, a mean over other rows."""
    z, teacher = drawn(rows, vocabulary, outside=outside)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    got, expected = step_loss(ours, teacher, kind, 3.0).loss, formula(theirs, teacher, kind, 3.0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (got * 5).backward()
    (expected * 5).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert float(ours.grad.abs().max()) > 1e-4


def by_hand() -> tuple[Tensor, Teacher]:
    """q = (.5, .5); p = (.4, .3) and .3 on a token that the draft lacks."""
    full = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64).log() + 2
    return torch.zeros(1, 2, dtype=torch.float64), teacher_of(full, torch.tensor([0, 1]))


def test_values_by_hand():
    """Catches p renormalised before alpha, which would give .93, and a KL of p instead of p~."""
    z, teacher = by_hand()
    kl = 4 / 7 * math.log(8 / 7) + 3 / 7 * math.log(6 / 7)
    mixing = math.exp(-3 * 0.7)
    values = {
        LossKind.kl: kl,
        LossKind.tv: 0.3,
        LossKind.neg_log_alpha: -math.log(0.7),
        LossKind.hybrid: mixing * kl + (1 - mixing) * 0.3,
    }
    for kind, value in values.items():
        got = step_loss(z, teacher, kind, 3.0)
        assert got.loss.item() == pytest.approx(value, rel=1e-12)
        assert got.alpha.tolist() == pytest.approx([0.7], rel=1e-12)
        assert got.kl.tolist() == pytest.approx([kl], rel=1e-12)
        assert float(got.mixing) == pytest.approx(mixing, rel=1e-12)
    assert teacher.coverage().tolist() == pytest.approx([0.7], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_when_draft_is_target(kind: LossKind, dtype: torch.dtype):
    """Catches a loss that a perfect draft would still pay: logits may differ by a constant a row."""
    full = (torch.randn(15, 17, dtype=torch.float64) * 3).to(dtype)
    z = (full + torch.arange(15)[:, None].to(dtype)).requires_grad_()
    got = step_loss(z, teacher_of(full, torch.arange(17)), kind)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert abs(got.loss.item()) < tolerance
    assert bool(got.correct.all())
    torch.testing.assert_close(got.alpha, torch.ones(15, dtype=dtype), rtol=0, atol=tolerance)
    if kind is LossKind.kl:  # the others are kinked there: A is decided by rounding
        got.loss.backward()
        assert float(z.grad.abs().max()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_equal_probabilities_give_no_gradient(kind: LossKind):
    """Catches a push away from a perfect draft: where q = p exactly, s - A is zero and nothing may move."""
    full = torch.zeros(1, 4, dtype=torch.float64)
    z = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    step_loss(z, teacher_of(full, torch.arange(4)), kind).loss.backward()
    assert z.grad.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_alpha_and_coverage(seed: int):
    """Catches an alpha above what the draft's vocabulary allows, and one that is not 1 - TV over the whole."""
    z, teacher = drawn(15, 17, seed)
    alpha, coverage = step_loss(z, teacher).alpha, teacher.coverage()
    p = (teacher.logits - teacher.log_z[:, None]).exp()
    total_variation = ((p - z.softmax(-1)).abs().sum(-1) + 1 - coverage) / 2
    torch.testing.assert_close(alpha, 1 - total_variation)
    assert bool((alpha < coverage).all())
    assert bool((coverage < 1).all())
    best_draft = step_loss(teacher.logits, teacher).alpha
    torch.testing.assert_close(best_draft, coverage)


@pytest.mark.parametrize(("alpha", "mixing"), [(0.0, 1.0), (0.2, 0.55), (0.5, 0.22), (0.8, 0.09), (0.9, 0.07)])
def test_mixing_by_alpha(alpha: float, mixing: float):
    """Catches another exponent: the published values of lambda at eta 3."""
    full = torch.tensor([[max(alpha, 1e-12), 1.0]], dtype=torch.float64).log()  # the draft has the first token alone
    full[0, 1] = math.log1p(-alpha)
    got = step_loss(torch.zeros(1, 1, dtype=torch.float64), teacher_of(full, torch.tensor([0])))
    assert float(got.mixing) == pytest.approx(mixing, abs=0.006)


def test_kl_leads_where_tv_stalls():
    """Catches the two terms mixed the wrong way round: a new draft must learn from KL."""
    full = torch.full((1, 1000), -9.0, dtype=torch.float64)
    full[0, 3] = 5

    def gradient(kind: LossKind) -> float:
        z = torch.zeros(1, 1000, dtype=torch.float64, requires_grad=True)
        step_loss(z, teacher_of(full, torch.arange(1000)), kind).loss.backward()
        return -float(z.grad[0, 3])

    assert gradient(LossKind.tv) == pytest.approx(1e-3, rel=0.01)
    assert gradient(LossKind.kl) == pytest.approx(1, rel=0.01)
    assert gradient(LossKind.hybrid) > 0.98


def test_lambda_is_the_steps():
    """Catches a lambda a row, and one from a single rank: two ranks together must be one rank with all rows."""
    z, teacher = drawn(17, 15, seed=3)
    whole = z.clone().requires_grad_()
    together = step_loss(whole, teacher)
    together.loss.backward()
    assert together.mixing.shape == ()
    torch.testing.assert_close(together.mixing, torch.exp(-3 * together.alpha.mean()))

    halves = [torch.arange(5), torch.arange(5, 17)]
    sums = torch.stack([torch.stack([together.alpha[i].sum(), torch.tensor(float(len(i))).double()]) for i in halves])
    losses = []
    for index in halves:
        part = z[index].clone().requires_grad_()
        got = step_loss(part, teacher.rows(index), sum_over_ranks=lambda own: own * 0 + sums.sum(dim=0))
        got.loss.backward()
        torch.testing.assert_close(part.grad, whole.grad[index])
        losses.append(got.loss)
    torch.testing.assert_close(sum(losses), together.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_no_row(kind: LossKind):
    """Catches 0 / 0 at the last steps of short samples: no supervised row may not make the total NaN."""
    z = torch.zeros(0, 17, requires_grad=True)
    nothing = Teacher(torch.zeros(0, 17), torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    got = step_loss(z, nothing, kind)
    got.loss.backward()
    assert got.loss.item() == 0
    assert z.grad.shape == (0, 17)
    assert got.correct.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_are_finite(kind: LossKind):
    """Catches 0 * log 0 where a head rules tokens out, 0 / 0 where the draft has nothing that the target would say,
    and logits whose exponential overflows."""
    full = torch.tensor([[-torch.inf, 1.0, 2.0, 0.0], [-200.0, -201.0, -202.0, 300.0], [900.0, -900.0, 0.0, 0.0]])
    z = torch.tensor([[5.0, 1.0, 2.0], [0.0, 1.0, 2.0], [-900.0, 900.0, 0.0]], requires_grad=True)
    got = step_loss(z, teacher_of(full, torch.arange(3)), kind)
    got.loss.backward()
    assert bool(torch.isfinite(z.grad).all())
    assert math.isfinite(got.loss.item())
    assert got.alpha[1:].tolist() == [0, 0]


def test_first_choice():
    """Catches draft ids compared with target ids, and an unknown token that counts as guessed."""
    full = torch.tensor([[0.0, 9.0, 1.0, 2.0], [0.0, 1.0, 9.0, 2.0], [0.0, 1.0, 2.0, 9.0]])
    teacher = teacher_of(full, torch.tensor([0, 2, 3]))
    z = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 9.0, 0.0]])
    assert step_loss(z, teacher).correct.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits(kind: LossKind):
    """Catches softmax in bf16: the result must be that of the rounded logits, to fp32."""
    z, teacher = drawn(15, 130)
    teacher = Teacher(teacher.logits.bfloat16(), teacher.log_z.float(), teacher.log_z_draft.float(), teacher.best)
    low = z.bfloat16().requires_grad_()
    high = z.bfloat16().double().requires_grad_()
    got: StepLoss = step_loss(low, teacher, kind)
    exact = step_loss(high, teacher, kind)
    got.loss.backward()
    exact.loss.backward()
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=1e-5, atol=1e-6)
    assert low.grad.dtype == torch.bfloat16
    # two roundings to bf16, of dz and of dz / n
    torch.testing.assert_close(low.grad.double(), high.grad, rtol=2**-7, atol=1e-6)
