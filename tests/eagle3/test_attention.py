from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from interpreter import NEEDS_GPU
from torch import Tensor

from soar_prep.eagle3 import attention
from soar_prep.eagle3.attention import StepAttention, sequences_of, ttt_attention, ttt_attention_truth

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
    output.backward(weights.to(output))
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


def flash_by_hand(q, k, v, bounds, _, longest, __, dropout, is_causal, return_debug_mask):
    """What torch's kernel says of itself: [B T, heads, hd] in and out, log-sum-exp [heads, B T]."""
    assert (dropout, is_causal, return_debug_mask) == (0.0, True, False)
    assert longest >= 2
    assert bounds.dtype == torch.int32
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    output, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for start, stop in pairs(bounds):
        scores = scores_by_hand(q[start:stop], k[start:stop])
        output[start:stop] = (scores.softmax(-1) @ v[start:stop].transpose(0, 1)).transpose(0, 1)
        lse[:, start:stop] = scores.logsumexp(-1)
    return output, lse, None, None, None


def flash_backward_by_hand(grad, q, k, v, output, lse, bounds, _, longest, *options):
    """FlashAttention's backward pass, from whatever output and log-sum-exp it is given."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for start, stop in pairs(bounds):
        one, two, three, outward, out = (x[start:stop].transpose(0, 1) for x in (q, k, v, grad, output))
        weights = (scores_by_hand(q[start:stop], k[start:stop]) - lse[:, start:stop, None]).exp()
        d_scores = weights * (outward @ three.mT - (outward * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq[start:stop] = (d_scores @ two).transpose(0, 1)
        dk[start:stop] = (d_scores.mT @ one).transpose(0, 1)
        dv[start:stop] = (weights.mT @ outward).transpose(0, 1)
    return dq, dk.unflatten(1, (heads, group)).sum(2), dv.unflatten(1, (heads, group)).sum(2)


def pairs(bounds: Tensor) -> Iterator[tuple[int, int]]:
    return zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True)


def scores_by_hand(q: Tensor, k: Tensor) -> Tensor:
    scores = q.transpose(0, 1) @ k.transpose(0, 1).mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


@contextmanager
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_hand)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward_by_hand)
        patch.setattr(attention, "has_flash", lambda q: True)
        yield


def by_flash(*tensors_and_documents) -> Tensor:
    return ttt_attention(*tensors_and_documents, sequences_of(tensors_and_documents[-1]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("tokens", [1, 15, 17])
def test_road_to_the_kernel(tokens: int, own: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch):
    """Catches a wrong layout or bound, and merged sums that a flash backward pass does not take for step 0's share."""
    tensors, documents = drawn(tokens, own, heads, kv_heads, torch.float64), packed(3, tokens)
    with as_if_on_a_gpu(monkeypatch):
        got = with_gradients(by_flash, tensors, documents)
    expected = with_gradients(ttt_attention_truth, tensors, documents)
    for ours, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own", [1, 3])
def test_a_real_kernel_takes_merged_sums(own: int):
    """Catches a flash backward pass, torch's for the CPU, that needs its own output and log-sum-exp back."""
    q, keys, values, *rest = drawn(17, own, 4, 4, torch.float32)
    documents = torch.zeros(3, 17, dtype=torch.long)
    aten = torch.ops.aten
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, True)
    merged, merged_lse = attention.merge_own(output, lse, q, rest[:own], rest[own:])
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    got = backward(grad, q, keys, values, merged, merged_lse, 0.0, True)
    expected = attention.causal_backward(grad, q, keys, values, documents, merged, merged_lse)
    for ours, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


def test_sequences():
    """Catches documents that are joined across rows, padding that joins one, and the kernel's road for one token."""
    sequences = sequences_of(torch.tensor([[7, 7, 8, -1], [-1, -1, -1, -1], [7, 7, 7, 7]]))
    assert sequences is not None
    assert sequences.bounds.tolist() == [0, 2, 3, 4, 8, 12]
    assert sequences.longest == 4
    alone = sequences_of(torch.tensor([[3]]))
    assert alone is not None
    assert (alone.bounds.tolist(), alone.longest) == ([0, 1], 2)
    assert sequences_of(torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])) is None


def test_the_decision_is_made_once(monkeypatch: pytest.MonkeyPatch):
    """Catches a wait for the GPU at every step; a kernel for what it does not serve, or on a document in pieces."""
    calls = []
    decide = attention.sequences_of
    monkeypatch.setattr(attention, "sequences_of", lambda documents: calls.append(1) or decide(documents))
    tensors = drawn(15, 0, 4, 2, torch.float64)
    attend = StepAttention(packed(3, 15))
    attend(*tensors)
    assert attend.sequences is None
    assert not calls
    with as_if_on_a_gpu(monkeypatch):
        attend = StepAttention(packed(3, 15))
        for _ in range(3):
            attend(*tensors)
        assert attend.sequences is not None
        assert len(calls) == 1
        in_pieces = torch.tensor([[0, 1, 0] * 5]).expand(3, -1)
        attend = StepAttention(in_pieces)
        torch.testing.assert_close(attend(*tensors), ttt_attention_truth(*tensors, [], [], in_pieces))


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [0, 6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [1, 15, 130, 1024])
def test_flash_on_a_gpu(tokens: int, head_dim: int, own: int, dtype: torch.dtype):
    """Catches a kernel of this torch that lays out heads, documents or sums otherwise than flash_by_hand."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    shapes = [(3, 9, tokens, head_dim)] + [(3, 3, tokens, head_dim)] * (2 + 2 * own)
    tensors = [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]
    documents = packed(3, tokens).cuda()
    assert attention.has_flash(tensors[0])
    got = with_gradients(by_flash, tensors, documents)
    exact = with_gradients(ttt_attention_truth, [t.double() for t in tensors], documents)
    plain = with_gradients(plain_attention, tensors, documents)
    for name, (ours, theirs, truth) in enumerate(zip(got, plain, exact, strict=True)):
        assert ours.dtype == dtype
        error, allowed = ((x.double() - truth).abs().max() for x in (ours, theirs))
        # One rounding of the result is in any kernel, also where plain PyTorch happens to hit. A token that sees itself
        # alone has a gradient of zero, which a flash kernel makes as the difference of two fp32 sums over head_dim.
        allowed = 2 * allowed + torch.finfo(dtype).eps * truth.abs().max() + torch.finfo(torch.float32).eps * head_dim
        assert error <= allowed, f"{name}: {error} against {allowed}"


def plain_attention(q, keys, values, own_keys, own_values, documents) -> Tensor:
    """ttt_attention_truth with every operation in the inputs' dtype."""
    tokens, group = q.shape[2], q.shape[1] // keys.shape[1]
    index = torch.arange(tokens, device=q.device)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & (index <= index[:, None])
    own = (index == index[:, None]).expand_as(seen)
    seen = torch.cat([seen] + [own] * len(own_keys), dim=-1)
    every_key = torch.cat([keys, *own_keys], dim=2).repeat_interleave(group, dim=1)
    every_value = torch.cat([values, *own_values], dim=2).repeat_interleave(group, dim=1)
    scores = (q @ every_key.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(dim=-1) @ every_value
