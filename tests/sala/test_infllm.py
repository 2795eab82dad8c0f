import math

import pytest
import torch

from soar_prep.sala import infllm
from soar_prep.sala.configuration import SparseAttention
from soar_prep.sala.infllm import choose_blocks, pool_keys, pool_levels, sparse_attention

SPARSE = SparseAttention(
    kernel_size=4, kernel_stride=2, init_blocks=1, block_size=8, window_size=16, topk=2, dense_len=40
)


def drawn(length: int, tokens: int | None = None, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, tokens or length, 8), (kv_heads, length, 8), (kv_heads, length, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def blocks_by_hand(q: torch.Tensor, k: torch.Tensor, position: int, sparse: SparseAttention) -> list[int]:
    """The definition, one query [G, d] and one kv head's keys [S, d] at a time, in plain Python."""
    past = k[: position + 1].double()

    def windows(size: int, stride: int) -> list[tuple[int, torch.Tensor]]:
        return [(at, past[at : at + size].mean(0)) for at in range(0, len(past) - size + 1, stride)]

    fine = windows(sparse.kernel_size, sparse.kernel_stride)
    coarse = windows(4 * sparse.kernel_size, 4 * sparse.kernel_stride)
    queries = q.double() / math.sqrt(q.shape[-1])
    scores = []
    for _, key in fine:
        score = 0.0
        for query in queries:
            if coarse:
                score += math.exp(query @ key) / sum(math.exp(query @ other) for _, other in coarse)
        scores.append(score)
    own = position // sparse.block_size
    ranked = []
    for block in range(own + 1):
        if block < sparse.init_blocks or block >= own - sparse.window_size // sparse.block_size:
            ranked.append((-math.inf, block))
            continue
        first, last = block * sparse.block_size, (block + 1) * sparse.block_size
        inside = [s for (at, _), s in zip(fine, scores, strict=True) if at < last and at + sparse.kernel_size > first]
        ranked.append((-max(inside, default=0.0), block))
    return sorted(block for _, block in sorted(ranked)[: sparse.topk + sparse.window_size // sparse.block_size])


@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 130])
def test_blocks_are_those_of_the_definition(length: int):
    """Catches a window seen too early, a block pooled over its neighbour's windows, a local window one block short."""
    q, k, _ = drawn(length)
    found = choose_blocks(q, pool_levels(k, SPARSE), torch.arange(length), length, SPARSE)
    for head in range(2):
        for position in range(length):
            chosen = [b for b in found[head, position].tolist() if b >= 0]
            assert chosen == blocks_by_hand(q[2 * head : 2 * head + 2, position], k[head], position, SPARSE)
            assert found[head, position].tolist() == chosen + [-1] * (found.shape[-1] - len(chosen))


@pytest.mark.parametrize("published", [True, False])
def test_the_published_sizes(published: bool):
    """Catches sizes in tokens where blocks are meant: 96 blocks of 64 tokens, 33 of them and the first always."""
    sparse = SparseAttention() if published else SPARSE
    assert (SparseAttention().selected_blocks, SparseAttention().local_blocks) == (96, 32)
    length = 12000 if published else 200
    q, k, _ = drawn(length, tokens=1)
    found = choose_blocks(q, pool_levels(k, sparse), torch.tensor([length - 1]), length, sparse)
    own = (length - 1) // sparse.block_size
    assert found.shape[-1] == sparse.selected_blocks
    for row in found[:, 0].tolist():
        assert set(row) >= {0} | set(range(own - sparse.local_blocks, own + 1))
        assert len(set(row)) == len(row)


def test_ties_go_to_the_earlier_block():
    """Catches an order that depends on the sort: keys all alike score all blocks alike."""
    length = 160
    q, _, _ = drawn(length)
    k = torch.ones(2, length, 8)
    found = choose_blocks(q, pool_levels(k, SPARSE), torch.arange(length), length, SPARSE)
    assert found[0, -1].tolist() == [0, 17, 18, 19]
    wider = SparseAttention(4, 2, 1, 8, 16, 4, 40)
    assert choose_blocks(q, pool_levels(k, wider), torch.arange(length), length, wider)[0, -1].tolist() == [
        0,
        1,
        2,
        17,
        18,
        19,
    ]


def test_pooled_keys():
    """Catches a window that is cut at the end, or summed in BF16."""
    k = torch.arange(11.0).repeat(2, 1)[..., None]
    assert pool_keys(k, 4, 2)[0, :, 0].tolist() == [1.5, 3.5, 5.5, 7.5]
    assert pool_keys(k[:, :3], 4, 2).shape == (2, 0, 1)
    many = torch.full((1, 512, 1), 1 + 2**-7, dtype=torch.bfloat16)
    assert pool_keys(many, 512, 64).item() == 1 + 2**-7


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense_until: int) -> torch.Tensor:
    """Softmax over the tokens of the definition's blocks; queries with fewer than dense_until tokens read all."""
    first = k.shape[1] - q.shape[1]
    group = q.shape[0] // k.shape[0]
    mixed = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        kv = head // group
        for t in range(q.shape[1]):
            position = first + t
            reads = list(range(position + 1))
            if position + 1 >= dense_until:
                heads = slice(kv * group, (kv + 1) * group)
                blocks = blocks_by_hand(q[heads, t], k[kv], position, SPARSE)
                reads = [p for p in reads if p // SPARSE.block_size in blocks]
            weights = torch.softmax(k[kv, reads].double() @ q[head, t].double() / math.sqrt(q.shape[-1]), dim=0)
            mixed[head, t] = weights @ v[kv, reads].double()
    return mixed


@pytest.mark.parametrize(("length", "dense_until"), [(39, 40), (40, 0), (130, 0)])
def test_a_prompt_is_sparse_as_a_whole(length: int, dense_until: int):
    """Catches a prompt whose first tokens are read otherwise than in training: from dense_len on all queries choose."""
    q, k, v = drawn(length)
    mixed = sparse_attention(q, k, v, SPARSE, goes_on=False)
    torch.testing.assert_close(mixed.double(), attention_by_hand(q, k, v, dense_until), rtol=1e-5, atol=1e-6)


def test_what_goes_on_is_read_token_by_token():
    """Catches a verification pass over several tokens that reads other blocks than decoding them one by one."""
    q, k, v = drawn(45, tokens=12)
    together = sparse_attention(q, k, v, SPARSE, goes_on=True)
    torch.testing.assert_close(together.double(), attention_by_hand(q, k, v, 40), rtol=1e-5, atol=1e-6)
    for t in range(12):
        length = 34 + t
        alone = sparse_attention(q[:, t : t + 1], k[:, :length], v[:, :length], SPARSE, goes_on=True)
        torch.testing.assert_close(alone, together[:, t : t + 1], rtol=1e-5, atol=1e-6)


def test_pieces_of_queries(monkeypatch: pytest.MonkeyPatch):
    """Catches positions that start at zero in every piece."""
    q, k, v = drawn(130)
    whole = sparse_attention(q, k, v, SPARSE, goes_on=False)
    monkeypatch.setattr(infllm, "ELEMENTS", 4 * 130 * 17)
    torch.testing.assert_close(sparse_attention(q, k, v, SPARSE, goes_on=False), whole, rtol=1e-6, atol=1e-6)


def test_gradients_flow_through_what_is_read():
    """Catches a selection that detaches the attention: keys that are read get a gradient, others none."""
    q, k, v = (x.requires_grad_() for x in drawn(130))
    sparse_attention(q, k, v, SPARSE, goes_on=False)[:, -1].sum().backward()
    chosen = choose_blocks(q, pool_levels(k, SPARSE), torch.arange(130), 130, SPARSE)[0, -1]
    read = torch.zeros(17, dtype=torch.bool).index_fill(0, chosen[chosen >= 0], True).repeat_interleave(8)[:130]
    assert k.grad is not None
    assert torch.equal(k.grad[0].abs().sum(-1) > 0, read)
