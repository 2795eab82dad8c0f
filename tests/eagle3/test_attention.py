from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from soar_prep.eagle3 import attention
from soar_prep.eagle3.attention import StepAttention, ttt_attention, ttt_attention_truth

# The sum of T products of unit size; a block's order of summation is another than the mask's.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def packed(rows: int, tokens: int) -> Tensor:
    """Documents [rows, tokens]: the first row whole, the others cut in two or three, the last ending in padding."""
    documents = torch.zeros(rows, tokens, dtype=torch.long)
    for row in range(1, rows):
        documents[row, tokens // 3 :] = 1
        documents[row, tokens // 3 + row :] = 2
    documents[-1, tokens - tokens // 4 :] = -1
    return documents


def drawn(tokens: int, own: int, heads: int, kv_heads: int, dtype: torch.dtype, rows: int = 3) -> list[Tensor]:
    """q, keys, values, then `own` own keys and `own` own values; scores of a few units, so that softmax is uneven."""
    generator = torch.Generator().manual_seed(tokens * 100 + own)
    shapes = [(rows, heads, tokens, 8)] + [(rows, kv_heads, tokens, 8)] * (2 + 2 * own)
    return [(torch.randn(s, generator=generator, dtype=torch.float64) * 1.5).to(dtype) for s in shapes]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], documents: Tensor) -> list[Tensor]:
    """Output and the gradient of each tensor."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    own = (len(leaves) - 3) // 2
    output = function(*leaves[:3], leaves[3 : 3 + own], leaves[3 + own :], documents)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return [output.detach()] + [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("own", [0, 1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 15, 17])
def test_merged_is_the_mask(
    tokens: int, own: int, heads: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Catches a lost gradient through the log-sum-exp, an own key of another index or step, a key of another document,
    a wrong head of a group, a block that is skipped."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    tensors, documents = drawn(tokens, own, heads, kv_heads, dtype), packed(3, tokens)
    got = with_gradients(ttt_attention, tensors, documents)
    expected = with_gradients(ttt_attention_truth, tensors, documents)
    for ours, truth in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_truth_by_hand():
    """Catches a mask that is wrong in the truth too: scores are chosen, so that the softmax is known."""
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    keys = torch.tensor([0.0, 2.0, 4.0]).log1p().double().view(1, 1, 3, 1)  # weights 1, 3, 5
    values = torch.tensor([1.0, 10.0, 100.0]).double().view(1, 1, 3, 1)
    own_keys = [torch.tensor([1.0, 3.0, 1.0]).log().double().view(1, 1, 3, 1)]
    own_values = [torch.tensor([1000.0, 2000.0, 3000.0]).double().view(1, 1, 3, 1)]
    expected = torch.tensor(
        [(1 + 1000) / 2, (1 + 3 * 10 + 3 * 2000) / 7, (5 * 100 + 3000) / 6],  # the third is a document of its own
        dtype=torch.float64,
    ).view(1, 1, 3, 1)
    documents = torch.tensor([[0, 0, 1]])
    for function in (ttt_attention, ttt_attention_truth):
        torch.testing.assert_close(function(q, keys, values, own_keys, own_values, documents), expected)


@pytest.mark.parametrize("own", [0, 3])
def test_gradients_are_derivatives(own: int):
    """Catches an analytic gradient that agrees with the truth's only on the inputs of the other test."""
    tensors = [t.requires_grad_() for t in drawn(5, own, 4, 2, torch.float64, rows=2)]
    documents = torch.tensor([[0, 0, 0, 1, 1], [3, 3, -1, -1, -1]])

    def function(*t: Tensor) -> Tensor:
        return ttt_attention(*t[:3], t[3 : 3 + own], t[3 + own :], documents)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("tokens", [15, 130])
def test_bf16_is_rounded_once(tokens: int):
    """Catches scores or sums in bf16: only the inputs and the results may be rounded."""
    tensors, documents = drawn(tokens, 2, 4, 2, torch.bfloat16), packed(3, tokens)
    got = with_gradients(ttt_attention, tensors, documents)
    exact = with_gradients(ttt_attention_truth, [t.double() for t in tensors], documents)
    for ours, truth in zip(got, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        # half a unit in the last of 8 bits; gradients also see the rounded output, and cancel
        error = (ours.double() - truth).abs().max() / truth.abs().max()
        assert error < 2**-7


def test_documents_and_padding_are_islands():
    """Catches attention across documents: a change in one must not reach another, forward or backward."""
    documents = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 4])
    tensors = drawn(15, 2, 4, 2, torch.float64, rows=1)
    changed = [t.clone() for t in tensors]
    for t in changed:
        t[:, :, :6] += 1
        t[:, :, 11:] *= 100
    before, after = (with_gradients(ttt_attention, t, documents) for t in (tensors, changed))
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one[:, :, 6:11], two[:, :, 6:11])
        assert not torch.equal(one[:, :, :6], two[:, :, :6])
        assert bool(torch.isfinite(two).all())


def test_scores_beyond_exp():
    """Catches exp(score) without its maximum: scores of thousands overflow, even in fp64."""
    tensors, documents = drawn(17, 2, 4, 2, torch.float64), packed(3, 17)
    tensors[0] *= 300
    got = with_gradients(ttt_attention, tensors, documents)
    expected = with_gradients(ttt_attention_truth, tensors, documents)
    for ours, truth in zip(got, expected, strict=True):
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9 * float(truth.abs().max()))


def test_steps_remember_their_keys():
    """Catches a step that sees the keys of a later one, or takes step 0's for its own."""
    documents = packed(2, 15)
    attend = StepAttention(documents)
    seen: list[tuple[Tensor, Tensor]] = []
    for step in range(4):
        q, k, v = drawn(15, 0, 4, 2, torch.float64, rows=2)
        q, k, v = q + step, k * (step + 1), v - step
        seen.append((k, v))
        own_keys, own_values = [k for k, _ in seen[1:]], [v for _, v in seen[1:]]
        expected = ttt_attention_truth(q, *seen[0], own_keys, own_values, documents)
        torch.testing.assert_close(attend(q, k, v), expected)
