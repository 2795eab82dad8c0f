"""The Triton InfLLM-V2 attention against the plain-torch truth in fp64: scores, chosen blocks, values and gradients.

The tests of the kernels' results run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter
has to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own. It
multiplies BF16 wrongly, so it gets fp32.
"""

import pytest
import torch
import torch.nn.functional as F
import triton
from interpreter import COMPILED, NEEDS_GPU, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.sala import infllm, triton_infllm
from soar_prep.sala.configuration import SparseAttention

SMALL = SparseAttention(
    kernel_size=8, kernel_stride=4, init_blocks=1, block_size=16, window_size=32, topk=3, dense_len=64
)
# (q heads, kv heads, tokens asked, tokens in all, goes on)
CASES = {
    "prompt": (4, 2, 200, 200, False),
    "short": (4, 2, 50, 50, False),
    "one head": (3, 3, 130, 130, False),
    "groups of three": (6, 2, 100, 100, False),
    "goes on": (4, 2, 15, 200, True),
    "crosses dense_len": (4, 2, 40, 90, True),
    "one token": (16, 1, 1, 130, True),
}


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def drawn(case: tuple, device: str, dtype: torch.dtype = torch.float32, width: int = 16) -> list[Tensor]:
    """q, k, v as projections lay them out, and a gradient of the output."""
    heads, kv_heads, tokens, length, _ = case
    generator = torch.Generator().manual_seed(length)
    shapes = ((tokens, heads), (length, kv_heads), (length, kv_heads), (tokens, heads))
    return [torch.randn(*s, width, generator=generator).to(device, dtype).transpose(0, 1) for s in shapes]


def with_gradients(function, inputs: list[Tensor], *rest, dtype: torch.dtype | None = None) -> list[Tensor]:
    q, k, v, do = (x if dtype is None else x.to(dtype) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, *rest)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, do))]


def choice(q: Tensor, k: Tensor, sparse: SparseAttention, threshold: int = 0) -> Tensor:
    """What `sparse_attention` chooses, bool [Hkv, T, blocks]."""
    pooled, length, piece = infllm.pool_levels(k, sparse), k.shape[1], triton_infllm.PIECE
    first = length - q.shape[1]
    starts = range(0, q.shape[1], piece)
    found = [triton_infllm.choose(q[:, s : s + piece], pooled, first + s, length, sparse, threshold) for s in starts]
    return torch.cat([chosen.mask for chosen in found], dim=1)


def reading(mask: Tensor, block_size: int, inputs: list[Tensor], piece: int, gradients: bool = True) -> list[Tensor]:
    """Plain torch on the blocks of a mask: o, and gradients if asked for, of pieces of queries summed in fp64."""
    q, k, v, do = inputs
    keys = torch.arange(k.shape[1], device=k.device)
    outputs, parts = [], []
    for start in range(0, q.shape[1], piece):
        part = slice(start, start + piece)
        reads = mask[:, part].repeat_interleave(block_size, dim=-1)[..., : len(keys)]
        reads = reads & (keys <= keys[len(keys) - q.shape[1] :][part, None])
        reads = reads.repeat_interleave(len(q) // len(k), dim=0)[None]
        leaves = [x.detach().requires_grad_(gradients) for x in (q[:, part], k, v)]
        out = F.scaled_dot_product_attention(*(x[None] for x in leaves), reads, enable_gqa=True)[0]
        outputs.append(out.detach().double())
        if gradients:
            parts.append([x.double() for x in torch.autograd.grad(out, leaves, do[:, part])])
    if not gradients:
        return [torch.cat(outputs, dim=1)]
    dq, dk, dv = zip(*parts, strict=True)
    return [torch.cat(outputs, dim=1), torch.cat(dq, dim=1), sum(dk), sum(dv)]


def assert_twice_at_most(found: list[Tensor], plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    """The rule: the error against fp64 is at most twice that of plain torch in the same dtype."""
    for name, ours, theirs, truth in zip(("o", "dq", "dk", "dv"), found, plain, exact, strict=False):
        error, allowed = relative(ours, truth), relative(theirs, truth)
        print(f"{dtype}, {name}: {error:.2e}, plain torch {allowed:.2e}")
        assert error <= 2 * allowed, name


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """Catches blocks of another query, head or piece; a causal mask off by one; a softmax over what is not read."""
    monkeypatch.setattr(triton_infllm, "PIECE", 96)
    inputs, goes_on = drawn(CASES[case], device), CASES[case][-1]
    found = with_gradients(triton_infllm.sparse_attention, inputs, SMALL, goes_on)
    plain = with_gradients(infllm.sparse_attention, inputs, SMALL, goes_on)
    exact = with_gradients(infllm.sparse_attention, inputs, SMALL, goes_on, dtype=torch.float64)
    for name, ours, theirs, truth in zip(("o", "dq", "dk", "dv"), found, plain, exact, strict=True):
        print(f"fp32, {name}: {relative(ours, truth):.1e}, plain torch {relative(theirs, truth):.1e}")
        assert relative(ours, truth) < 5e-6, f"{name}: {relative(ours, truth)}"  # three products of tf32, on a GPU


@pytest.mark.parametrize("case", ["prompt", "goes on", "crosses dense_len"])
def test_the_same_blocks(case: str, device: str):
    """Catches other scores, forced blocks or order of ties, and a list that lacks what a neighbour reads."""
    (q, k, _, _), (_, _, tokens, length, goes_on) = drawn(CASES[case], device), CASES[case]
    pooled, first = infllm.pool_levels(k, SMALL), length - tokens
    positions = torch.arange(first, length, device=device)
    scores = infllm.block_scores(q, pooled, positions, length, SMALL)
    found = infllm.pool_scores(triton_infllm.window_scores(q, pooled, first, SMALL), scores.shape[-1], SMALL)
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-7)
    threshold = SMALL.dense_len if goes_on else 0
    chosen = triton_infllm.choose(q, pooled, first, length, SMALL, threshold)
    expected = infllm.blocks_mask(infllm.choose_blocks(q, pooled, positions, length, SMALL), length, SMALL)
    own = (positions // SMALL.block_size)[:, None]
    expected |= (positions + 1 < threshold)[:, None] & (torch.arange(expected.shape[-1], device=device) <= own)
    assert torch.equal(chosen.mask, expected)
    queries = triton_infllm.FP32_ROWS // 2
    for head, program in ((0, 0), (1, chosen.counts.shape[1] - 1)):
        either = expected[head, program * queries : (program + 1) * queries].any(0).nonzero().flatten().tolist()
        assert chosen.lists[head, program, : chosen.counts[head, program]].tolist() == either


def test_ties_go_to_the_earlier_block(device: str):
    """Catches a choice among equals that is the sorting's own: keys that are all alike score alike."""
    q, k, _, _ = drawn(CASES["prompt"], device)
    k = k[:, :1].expand(k.shape)
    pooled = infllm.pool_levels(k, SMALL)
    chosen = triton_infllm.choose(q, pooled, 0, 200, SMALL, 0)
    reads = chosen.mask[0, 199].nonzero().flatten().tolist()
    assert reads == [0, 1, 10, 11, 12]  # the first, the first of those that tie, the window of two, the own one


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding(dtype: torch.dtype, width: int, device: str, monkeypatch: pytest.MonkeyPatch):
    """Catches rounding beyond plain torch's, dk and dv that are rounded once a piece, at the small models' shapes.

    All three read the same blocks: another choice is an error ten times that of rounding, and would hide it.
    """
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies BF16 wrongly")
    inputs = drawn((4, 2, 200, 200, False), device, dtype, width)
    monkeypatch.setattr(triton_infllm, "PIECE", 32)
    found = with_gradients(triton_infllm.sparse_attention, inputs, SMALL, False)
    mask = choice(*inputs[:2], SMALL)
    plain, exact = (reading(mask, SMALL.block_size, [x.to(t) for x in inputs], 200) for t in (dtype, torch.float64))
    assert_twice_at_most(found, plain, exact, dtype)
    monkeypatch.setattr(triton_infllm, "PIECE", 4096)
    whole = with_gradients(triton_infllm.sparse_attention, inputs, SMALL, False)
    for name, pieces, once in zip(("o", "dq", "dk", "dv"), found, whole, strict=True):
        # Atomics add in any order, so that a few sums fall to the other side of a midpoint.
        assert relative(pieces, once) < torch.finfo(dtype).eps / 10, name


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [16384, 5, 1])
def test_real_shapes(tokens: int, dtype: torch.dtype):
    """Catches rounding beyond plain torch's at the real shapes, and a call from a cache that reads other tokens."""
    sparse, length = SparseAttention(), 16384
    inputs = drawn((32, 2, tokens, length, None), "cuda", dtype, width=128)
    with torch.no_grad():
        found = [triton_infllm.sparse_attention(*inputs[:3], sparse, tokens < length).double()]
    mask = choice(*inputs[:2], sparse)
    plain, exact = (
        reading(mask, sparse.block_size, [x.to(t) for x in inputs], 256, gradients=False)
        for t in (dtype, torch.float64)
    )
    assert_twice_at_most(found, plain, exact, dtype)


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_at_real_shapes(dtype: torch.dtype):
    """Catches rounding beyond plain torch's over 96 blocks of 64, for a kv head and its 16 heads, in three pieces."""
    sparse = SparseAttention()
    inputs = drawn((16, 1, 9000, 9000, False), "cuda", dtype, width=128)
    found = with_gradients(triton_infllm.sparse_attention, inputs, sparse, False)
    mask = choice(*inputs[:2], sparse)
    plain = reading(mask, sparse.block_size, inputs, 9000)  # at once: pieces would round its dk and dv more often
    exact = reading(mask, sparse.block_size, [x.double() for x in inputs], 1000)
    assert_twice_at_most(found, plain, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_blocks_at_real_shapes(dtype: torch.dtype, device: str):
    """Catches scores that lose bits: where a block differs from the truth's, its score must tie within rounding.

    Queries four times as long spread the scores, as trained ones do; those of plain noise lie so densely that one
    query in a hundred differs.
    """
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies BF16 wrongly")
    sparse, length, tokens = SparseAttention(), 16384, 2048 if device == "cuda" else 8
    q, k, _, _ = drawn((32, 2, tokens, length, True), device, dtype, width=128)
    q, first = 4 * q, length - tokens
    positions, pooled = torch.arange(first, length, device=device), infllm.pool_levels(k, sparse)
    scores = infllm.block_scores(q, pooled, positions, length, sparse)
    expected = infllm.blocks_mask(infllm.choose_blocks(q, pooled, positions, length, sparse), length, sparse)
    differs = choice(q, k, sparse) ^ expected
    lowest = scores.masked_fill(~differs, torch.inf).amin(-1)
    highest = scores.masked_fill(~differs, 0).amax(-1)
    is_same = ~differs.any(-1)
    print(f"{dtype}: {is_same.float().mean():.5f} of the queries choose as the truth does")
    assert (is_same | (highest - lowest <= 2e-5 * highest)).all()  # each score within 1e-5, as in test_the_same_blocks
    assert is_same.float().mean() >= 0.998


@pytest.mark.cuda
@NEEDS_GPU
def test_a_long_context():
    """Catches memory that grows with the square of the context: at 64K tokens, L x L would take 128 GiB."""
    q, k, v, _ = drawn((32, 2, 65536, 65536, False), "cuda", torch.bfloat16, width=128)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        mixed = triton_infllm.sparse_attention(q, k, v, SparseAttention(), False)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"64K tokens: {peak:.2f} GiB beside q, k and v")
    assert peak < 3
    tail = infllm.sparse_attention(q[:, -64:], k, v, SparseAttention(), True)
    assert relative(mixed[:, -64:].double(), tail.double()) < 0.02


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("kernel", ["score_kernel", "attend_kernel", "backward_kernel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("heads", "width", "block"), [(32, 128, 64), (4, 32, 16)], ids=["published", "small"])
def test_compiles(heads: int, width: int, block: int, dtype: str, kernel: str, capability: int):
    """Catches products that leave the tensor cores, and more shared memory than sm_120 has: 99 KiB."""
    function = getattr(triton_infllm, kernel)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    constants = triton_infllm.shape_of(torch.empty(heads, 1, width, dtype=kind), 2)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    constants |= {"COARSE": 4, "WINDOWS": 64} if kernel == "score_kernel" else {"BLOCK": block}
    kinds = dict.fromkeys(("q", "k", "v", "fine", "coarse", "out", "do", "dq"), f"*{dtype}")
    kinds |= dict.fromkeys(("scores", "lse", "dk", "dv"), "*fp32")
    kinds |= {"mask": "*i1", "lists": "*i32", "counts": "*i32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "mma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
