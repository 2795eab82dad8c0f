import pytest
import torch

from soar_prep.sala.lightning import CHUNK, by_chunks, by_recurrence, one_step, slopes


def drawn(tokens: int, heads: int = 4, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, heads, tokens, head_dim, generator=generator, dtype=dtype) for _ in range(3)]


def test_the_published_slopes():
    """Catches another rule for the decay: at 32 heads exp(-s) runs from 0.4313 to 0.9961."""
    decay = torch.exp(-slopes(32))
    torch.testing.assert_close(slopes(32), 2.0 ** (-torch.arange(1, 33) / 4))
    assert decay[0].item() == pytest.approx(0.4313, abs=1e-4)
    assert decay[-1].item() == pytest.approx(0.9961, abs=1e-4)


@pytest.mark.parametrize("heads", [0, 3, 12])
def test_heads_that_the_rule_does_not_cover(heads: int):
    """Catches a rule for powers of two that is used for any number of heads."""
    with pytest.raises(ValueError, match=f"lightning_nh={heads}"):
        slopes(heads)


def test_three_tokens_by_hand():
    """Catches decay applied after the token instead of before, a missing 1/sqrt(d), keys and values swapped."""
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    q = torch.stack([one, one, one + two])[None, None]
    k = torch.stack([one, two, one])[None, None]
    v = torch.stack([3 * one, 5 * two, 7 * two])[None, None]
    decay = 0.5
    slope = -torch.tensor([decay]).log()
    mixed, state = by_recurrence(q, k, v, slope)
    expected = torch.tensor([[3.0, 0], [3 * decay, 0], [3 * decay**2, 5 * decay + 7]]) * 2**-0.5
    torch.testing.assert_close(mixed[0, 0], expected)
    torch.testing.assert_close(state[0, 0], torch.tensor([[3 * decay**2, 7.0], [0, 5 * decay]]))


@pytest.mark.parametrize("tokens", [1, 15, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
@pytest.mark.parametrize("continued", [False, True])
def test_chunks_are_the_recurrence(tokens: int, continued: bool):
    """Catches a decay that is off by one inside a chunk, at its edges, or for the state that enters it."""
    q, k, v = drawn(tokens)
    state = torch.randn(2, 4, 8, 8, dtype=torch.float64) if continued else torch.zeros(2, 4, 8, 8, dtype=torch.float64)
    exact, after = by_recurrence(q, k, v, slopes(4), state)
    mixed, found = by_chunks(q.float(), k.float(), v.float(), slopes(4), state.float() if continued else None)
    assert mixed.dtype == found.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), exact, rtol=1e-5, atol=2e-6 * tokens**0.5)
    torch.testing.assert_close(found.double(), after, rtol=1e-5, atol=1e-5)


def test_gradients_of_chunks():
    """Catches a state that is cut from the graph between chunks."""
    q, k, v = (x.requires_grad_() for x in drawn(2 * CHUNK + 3, heads=2))
    weights = torch.randn_like(q)
    exact = torch.autograd.grad(
        (by_recurrence(q, k, v, slopes(2), torch.zeros(2, 2, 8, 8, dtype=q.dtype))[0] * weights).sum(), (q, k, v)
    )
    found = torch.autograd.grad((by_chunks(q, k, v, slopes(2))[0] * weights).sum(), (q, k, v))
    for mine, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4)


def test_steps_are_the_recurrence():
    """Catches a decoding step that does not carry the state on."""
    q, k, v = drawn(9)
    exact, after = by_recurrence(q, k, v, slopes(4), torch.zeros(2, 4, 8, 8, dtype=torch.float64))
    state, outputs = torch.zeros_like(after), []
    for t in range(9):
        mixed, state = one_step(*(x[:, :, t : t + 1] for x in (q, k, v)), slopes(4), state)
        outputs.append(mixed)
    torch.testing.assert_close(torch.cat(outputs, dim=2), exact)
    torch.testing.assert_close(state, after)


def test_long_and_steep():
    """Catches exp of a positive number: with a slope of 1/2 the factored form overflows after 180 tokens."""
    q, k, v = (x.float() for x in drawn(700))
    mixed, state = by_chunks(q, k, v, torch.full((4,), 0.9))
    assert bool(mixed.isfinite().all())
    assert bool(state.isfinite().all())


def test_the_dtype_of_the_queries_comes_back():
    """Catches BF16 states, which lose a token's part within a few hundred."""
    q, k, v = (x.bfloat16() for x in drawn(20))
    mixed, state = by_chunks(q, k, v, slopes(4))
    assert mixed.dtype == torch.bfloat16
    assert state.dtype == torch.float32
