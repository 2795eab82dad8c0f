"""The Triton InfLLM-V2 attention against the plain-torch truth in fp64: scores, chosen blocks, values and gradients.

The tests of the kernels' results run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter
has to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own. It
multiplies BF16 wrongly, so it gets fp32.
"""

import os
import subprocess
import sys

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.sala import infllm, triton_infllm
from soar_prep.sala.configuration import SparseAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
ON_CPU = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of test_under_the_interpreter")
ON_GPU = (pytest.mark.cuda, pytest.mark.skipif(not HAS_GPU, reason="no GPU"))
COMPILED = pytest.mark.skipif(INTERPRETED, reason="needs the compiler, which the interpreter replaces")
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


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """Catches blocks of another query, head or piece; a causal mask off by one; a softmax over what is not read."""
    monkeypatch.setattr(triton_infllm, "PIECE", 96)
    inputs, goes_on = drawn(CASES[case], device), CASES[case][-1]
    found = with_gradients(triton_infllm.sparse_attention, inputs, SMALL, goes_on)
    exact = with_gradients(infllm.sparse_attention, inputs, SMALL, goes_on, dtype=torch.float64)
    for name, ours, truth in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
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


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_cores(dtype: torch.dtype):
    """Catches rounding beyond that of plain torch in the same dtype: at most twice its error, at the real shapes."""
    sparse = SparseAttention()
    case = (32, 2, 9000, 9000, False)
    inputs = drawn(case, "cuda", dtype, width=128)
    found = with_gradients(triton_infllm.sparse_attention, inputs, sparse, False)
    plain = with_gradients(infllm.sparse_attention, inputs, sparse, False)
    exact = with_gradients(infllm.sparse_attention, inputs, sparse, False, dtype=torch.float32)
    for name, ours, theirs, truth in zip(("o", "dq", "dk", "dv"), found, plain, exact, strict=True):
        error, allowed = relative(ours, truth), relative(theirs, truth)
        print(f"{dtype}, {name}: {error:.2e}, plain torch {allowed:.2e}")
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 4, name


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
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
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_compiles(dtype: str, kernel: str, capability: int):
    """Catches products that leave the tensor cores, and more shared memory than sm_120 has: 99 KiB."""
    function = getattr(triton_infllm, kernel)
    q = torch.empty(32, 1, 128, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    constants = triton_infllm.shape_of(q, 2)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    constants |= {"COARSE": 4, "WINDOWS": 64} if kernel == "score_kernel" else {"BLOCK": 64}
    kinds = dict.fromkeys(("q", "k", "v", "fine", "coarse", "out", "do", "dq"), f"*{dtype}")
    kinds |= dict.fromkeys(("scores", "lse", "dk", "dv"), "*fp32")
    kinds |= {"mask": "*i1", "lists": "*i32", "counts": "*i32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "mma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024


@COMPILED
@pytest.mark.skipif(HAS_GPU, reason="the same tests run on the GPU")
@pytest.mark.skipif(triton.__version__ < "3.7", reason="numpy 2.4 breaks run-time loop bounds in this interpreter")
@pytest.mark.slow
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not cuda", __file__]
    child = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
