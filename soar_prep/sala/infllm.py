"""InfLLM-V2: a query of a sparse layer chooses the blocks of keys that it reads.

q [Hq, T, d]   k, v [Hkv, S, d]   one sequence; its last T of S tokens ask   p = 0 .. S-1 position   G = Hq / Hkv heads

1. Keys are averaged in windows at two levels: fine (kernel_size at each kernel_stride), coarse (four times both).
   A query sees a window once all of it is in the past: window j of size z at stride r if j r + z <= p + 1.
2. score(p, j) = sum over the G heads of a kv head of exp(q.fine_j / sqrt(d) - z_h), where z_h is the log-sum-exp of
   q.coarse / sqrt(d): an estimate, from a quarter of the keys, of what would make it a softmax.
   A query that sees no coarse window yet scores 0 everywhere.
3. A block's score is the largest of the fine windows that overlap it.
4. Read are: the first init_blocks, the own block and the local_blocks before it, and of the rest those of the highest
   score, topk + local_blocks in all. Ties go to the earlier block. Heads of one kv head read the same.

A prompt as long as dense_len chooses for all its queries. A call that goes on from a cached context decides by each
query's own length, so that reading several tokens at once is the same as reading them one by one.

Source: InfLLM-V2, https://arxiv.org/abs/2509.24663, and its kernels, OpenBMB/infllmv2_cuda_impl. They see one window
less when a prompt's length leaves 15 modulo 16, an off-by-one that is not repeated here, and round scores to BF16.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from soar_prep.sala.configuration import SparseAttention

COARSE = 4  # how many times longer the windows of the coarse level are
ELEMENTS = 1 << 26  # scores held at once, 256 MB of fp32; queries are taken in pieces


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, sparse: SparseAttention, goes_on: bool) -> Tensor:
    """What the T queries read, [Hq, T, d] in q's dtype: softmax attention over their chosen blocks, causal.

    goes_on: the first S - T tokens were read by earlier calls.
    """
    tokens, length = q.shape[1], k.shape[1]
    threshold = sparse.dense_len if goes_on or length < sparse.dense_len else 0
    pooled = pool_levels(k, sparse)
    piece = max(1, ELEMENTS // (q.shape[0] * length))
    outputs = []
    for start in range(0, tokens, piece):
        part = q[:, start : start + piece]
        positions = torch.arange(start, start + part.shape[1], device=q.device) + (length - tokens)
        chosen = blocks_mask(choose_blocks(part, pooled, positions, length, sparse), length, sparse)
        chosen |= (positions + 1 < threshold)[:, None]
        reads = chosen.repeat_interleave(sparse.block_size, dim=-1)[..., :length]
        reads &= torch.arange(length, device=q.device) <= positions[:, None]
        reads = reads.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        outputs.append(F.scaled_dot_product_attention(part[None], k[None], v[None], reads[None], enable_gqa=True)[0])
    return torch.cat(outputs, dim=1)


def pool_levels(k: Tensor, sparse: SparseAttention) -> tuple[Tensor, Tensor]:
    """(fine, coarse) averages of the keys, [Hkv, W, d] in k's dtype; W is 0 for a level without a full window."""
    size, stride = sparse.kernel_size, sparse.kernel_stride
    return pool_keys(k, size, stride), pool_keys(k, COARSE * size, COARSE * stride)


def pool_keys(k: Tensor, size: int, stride: int) -> Tensor:
    """Averages over `size` keys at every `stride`, [Hkv, W, d] in k's dtype, summed in fp32."""
    if k.shape[1] < size:
        return k[:, :0]
    return k.unfold(1, size, stride).mean(-1, dtype=torch.float32).to(k.dtype)


@torch.no_grad()
def choose_blocks(
    q: Tensor, pooled: tuple[Tensor, Tensor], positions: Tensor, length: int, sparse: SparseAttention
) -> Tensor:
    """Blocks that each query reads, int64 [Hkv, T, K], ascending, filled up with -1; K = selected_blocks at most.

    positions int64 [T]: where the queries stand in their sequence of `length` tokens.
    """
    scores = block_scores(q, pooled, positions, length, sparse)
    blocks = torch.arange(scores.shape[-1], device=q.device)
    own = (positions // sparse.block_size)[:, None]
    always = (blocks < sparse.init_blocks) | (blocks >= own - sparse.local_blocks)
    scores = scores.masked_fill(always, torch.inf).masked_fill(blocks > own, -torch.inf)
    count = min(sparse.selected_blocks, scores.shape[-1])
    best = scores.sort(dim=-1, descending=True, stable=True)  # stable: ties to the earlier block
    found = best.indices[..., :count].masked_fill(best.values[..., :count] == -torch.inf, length)
    found = found.sort(dim=-1).values
    return found.masked_fill(found == length, -1)


def block_scores(
    q: Tensor, pooled: tuple[Tensor, Tensor], positions: Tensor, length: int, sparse: SparseAttention
) -> Tensor:
    """Step 3 above before anything is forced, fp32 [Hkv, T, blocks]."""
    fine, coarse = pooled
    kv_heads, size, stride = fine.shape[0], sparse.kernel_size, sparse.kernel_stride
    grouped = q.reshape(kv_heads, -1, *q.shape[1:]).float() * q.shape[-1] ** -0.5  # [Hkv, G, T, d]
    normalizer = masked_scores(grouped, coarse, positions, COARSE * size, COARSE * stride).logsumexp(-1, keepdim=True)
    scores = masked_scores(grouped, fine, positions, size, stride)
    scores = torch.exp(scores - normalizer).masked_fill(normalizer == -torch.inf, 0).sum(dim=1)
    return pool_scores(scores, -(-length // sparse.block_size), sparse)


def masked_scores(grouped: Tensor, keys: Tensor, positions: Tensor, size: int, stride: int) -> Tensor:
    """q.key, -inf for windows that a query does not see yet, fp32 [Hkv, G, T, W + 1]; the last, -inf, is no window."""
    scores = F.pad(grouped @ keys.float().mT[:, None], (0, 1))
    ends = torch.arange(scores.shape[-1], device=keys.device) * stride + size
    ends[-1] = torch.iinfo(torch.int64).max
    return scores.masked_fill(ends > positions[:, None] + 1, -torch.inf)


def pool_scores(scores: Tensor, blocks: int, sparse: SparseAttention) -> Tensor:
    """The largest score of the windows that overlap each block, [Hkv, T, blocks] from [Hkv, T, W + 1]."""
    before = sparse.kernel_size // sparse.kernel_stride - 1  # windows that begin before a block and reach into it
    each = sparse.block_size // sparse.kernel_stride
    padded = F.pad(scores, (before, max(0, blocks * each - scores.shape[-1])))  # scores are sums of exp: 0 is lowest
    return padded[..., : before + blocks * each].unfold(-1, before + each, each).amax(-1)


def blocks_mask(chosen: Tensor, length: int, sparse: SparseAttention) -> Tensor:
    """bool [Hkv, T, blocks] from block numbers [Hkv, T, K]."""
    blocks = -(-length // sparse.block_size)
    mask = torch.zeros(*chosen.shape[:2], blocks + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(-1, chosen.masked_fill(chosen < 0, blocks), True)[..., :blocks]


def attention_for(q: Tensor, k: Tensor, sparse: SparseAttention) -> Callable[..., Tensor]:
    """`sparse_attention`, or its Triton twin where that runs."""
    if q.device.type != "cuda":
        return sparse_attention
    from soar_prep.sala import triton_infllm

    return triton_infllm.sparse_attention if triton_infllm.serves(q, k, sparse) else sparse_attention
