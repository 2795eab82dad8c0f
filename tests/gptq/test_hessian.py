import pytest
import torch
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.gptq import hessian as hessian_module
from soar_prep.gptq.hessian import InputStatistics, damped_diagonal, factorize

CPU = torch.device("cpu")


def correlated(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs [tokens, columns] whose columns depend on each other and differ a hundredfold in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    size = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return (torch.randn(tokens, columns, generator=generator) @ mixing) * size


def statistics_of(x: Tensor, mask: Tensor | None = None) -> InputStatistics:
    """Statistics of x [B, T, K], given window by window."""
    statistics = InputStatistics(x.shape[-1], CPU)
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    for window, real in zip(x, mask, strict=True):
        statistics.add(window[None], real[None])
    return statistics


@pytest.mark.parametrize("tokens", [1, 15, 17, 130])
@pytest.mark.parametrize("columns", [16, 32, 48, 80])
def test_panels_make_up_the_whole_product(tokens: int, columns: int, monkeypatch: pytest.MonkeyPatch):
    """Catches a panel that is skipped, doubled or transposed, and a forgotten division by the tokens."""
    monkeypatch.setattr(hessian_module, "TILE", 2)
    x = correlated(3 * tokens, columns).view(3, tokens, columns)
    statistics = statistics_of(x)
    got = statistics.finish()[0]
    flat = x.flatten(0, 1).double()
    expected = flat.T @ flat / len(flat)
    assert statistics.tokens == len(flat)
    assert torch.equal(got, got.T)
    # a sum of 390 fp32 products
    size = expected.diagonal().sqrt()
    torch.testing.assert_close(got.double() / size / size[:, None], expected / size / size[:, None], rtol=0, atol=2e-6)


def test_bf16_inputs_lose_nothing():
    """Catches a Hessian accumulated in the layer's dtype: bf16 holds 8 bits, and 2,000 tokens need more."""
    x = correlated(2000, 32).bfloat16().view(2, 1000, 32)
    assert torch.equal(statistics_of(x).finish()[0], statistics_of(x.float()).finish()[0])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_leaves_no_trace(garbage: float):
    """Catches padding that is counted: it would teach the solver the model's answer to token 0."""
    x, mask = correlated(60, 16).view(3, 20, 16), torch.ones(3, 20, dtype=torch.bool)
    mask[0, 7:], mask[2, 1:] = False, False
    clean = [statistics_of(x[i : i + 1, : mask[i].sum()]) for i in range(3)]
    got = statistics_of(x.masked_fill(~mask[..., None], garbage), mask)
    assert got.tokens == 7 + 20 + 1
    assert torch.equal(got.sum.tril(), (clean[0].sum + clean[1].sum + clean[2].sum).tril())
    assert torch.equal(got.largest_by_sample(), torch.cat([c.largest_by_sample() for c in clean]))


def test_largest_magnitude_belongs_to_its_sample():
    """Catches a NaN that cannot be traced to its window, and a maximum without the absolute value."""
    x = torch.zeros(3, 4, 16)
    x[0, 1, 2], x[1, 3, 3], x[2, 0, 0] = -5.0, 2.0, float("nan")
    largest = statistics_of(x).largest_by_sample()
    assert largest[:2].tolist() == [5.0, 2.0]
    assert largest[2].isnan()


def test_flattened_inputs_are_the_same_inputs():
    """Catches a layer that hands its linears [B * T, K]: the mask must find the same tokens there."""
    x, mask = correlated(60, 16).view(3, 20, 16), torch.arange(60).view(3, 20) % 7 > 0
    whole, flat = InputStatistics(16, CPU), InputStatistics(16, CPU)
    whole.add(x, mask)
    flat.add(x.flatten(0, 1), mask)
    assert torch.equal(whole.finish()[0], flat.finish()[0])
    assert torch.equal(whole.largest_by_sample(), flat.largest_by_sample())


def test_no_token_is_an_error():
    """Catches a division by zero that would fill the Hessian with NaN."""
    with pytest.raises(UserError, match="not one real token"):
        InputStatistics(16, CPU).finish()


@pytest.mark.parametrize("columns", [1, 16, 17, 130])
def test_factor_is_that_of_the_inverse(columns: int):
    """Catches a wrong reversal: against inverse and Cholesky in float64; and U^T U H = I."""
    x = correlated(4 * columns, columns)
    h = x.T @ x / len(x)
    before = h.clone()
    factor = factorize(h, damping=0.01)
    damped = h.double() + 0.01 * h.diagonal().double().mean() * torch.eye(columns)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    upper = factor.upper.double()
    assert torch.equal(h, before)
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() > 0).all()
    # fp32 on a matrix of condition at most 1e4
    torch.testing.assert_close(upper, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(columns).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("smallest_eigenvalue", "damping"),
    [(0.0, 0.01), (-0.005, 0.01), (-0.05, 0.1), (-0.5, 1.0)],
)
def test_damping_is_raised_tenfold_and_told(smallest_eigenvalue: float, damping: float):
    """Catches a factor of another matrix than recorded, a loop without end, a silent other algorithm."""
    # eigenvalues in units of the mean of the diagonal, which the others keep at 1
    eigenvalues = torch.full((16,), (16 - smallest_eigenvalue) / 15)
    eigenvalues[3] = smallest_eigenvalue
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    h = (rotation * eigenvalues) @ rotation.T
    factor = factorize((h + h.T) / 2, damping=0.01)
    assert factor.damping == pytest.approx(damping)
    inverse = factor.upper.T @ factor.upper
    expected = torch.linalg.inv(h.double() + damping * torch.eye(16))
    torch.testing.assert_close(inverse.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("broken", [-torch.eye(16), torch.full((16, 16), float("nan"))])
def test_hopeless_hessian_is_an_error(broken: Tensor):
    """Catches a run that "succeeds" by rounding: beyond damping 1 the user must hear of it."""
    with pytest.raises(UserError, match=r"not positive definite even with damping 1; .*Give more and different ones"):
        factorize(broken, damping=0.01)


def test_dead_columns_still_weigh_something():
    """Catches a zero weight, under which every candidate scale of a block would tie."""
    h = torch.diag(torch.tensor([4.0, 0.0, 0.0, 0.0]))
    assert damped_diagonal(h, 0.5).tolist() == [4.5, 0.5, 0.5, 0.5]
    assert (damped_diagonal(torch.zeros(4, 4), 0.01) > 0).all()


def test_drift_is_that_of_real_tokens():
    """Catches the wrong order of the product or sign, padding that counts, and panels that miss the upper triangle."""
    y, x = correlated(600, 1040, 8).view(3, 200, 1040), correlated(600, 1040, 9).view(3, 200, 1040)
    mask = torch.rand(3, 200, generator=torch.Generator().manual_seed(1)) < 0.8
    statistics = InputStatistics(1040, CPU, with_drift=True)
    for sample in range(3):
        statistics.add(x[sample : sample + 1], mask[sample : sample + 1], y[sample : sample + 1])
    a, b = y[mask].double(), x[mask].double()
    torch.testing.assert_close(statistics.finish()[1], ((a - b).T @ b / len(a)).float(), rtol=1e-4, atol=1e-5)
    assert statistics_of(x[:1]).finish()[1] is None


def test_times_inverse_keeps_the_columns_where_they_are():
    """Catches a product in the order of solving."""
    x = correlated(300, 48, 10)
    h = x.T @ x / 300
    order = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    rows = correlated(5, 48, 11)
    damped = h.double() + 0.05 * h.double().diagonal().mean() * torch.eye(48)
    for factor in (factorize(h, 0.05), factorize(h, 0.05, order)):
        torch.testing.assert_close(
            factor.times_inverse(rows), (rows.double() @ torch.linalg.inv(damped)).float(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("size", [1, 16, 31, 100])
def test_triangle_is_inverted_in_its_place(size: int, monkeypatch: pytest.MonkeyPatch):
    """Catches halves in the wrong place, a missing sign, and sizes that do not halve."""
    monkeypatch.setattr(hessian_module, "DIRECT", 8)
    triangle = correlated(size, size, 12).triu() + 10 * torch.eye(size)
    found = triangle.clone()
    hessian_module.invert_upper_(found)
    assert torch.equal(found, found.triu())
    expected = torch.linalg.inv(triangle.double())
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
