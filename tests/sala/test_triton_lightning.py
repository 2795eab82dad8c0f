"""The Triton lightning attention against the plain-torch recurrence in fp64, gradients too.

The tests of the kernels' results run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter
has to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own. It
multiplies BF16 wrongly, so it gets fp32.
"""

import pytest
import torch
import triton
from interpreter import COMPILED, NEEDS_GPU, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.sala import lightning, triton_lightning
from soar_prep.sala.lightning import by_recurrence

NAMES = ("o", "state", "dq", "dk", "dv", "d start")


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def drawn(tokens: int, heads: int, width: int, device: str, dtype: torch.dtype, batch: int = 2) -> list[Tensor]:
    """q, k, v, a start state, and the gradients that come back for o and for the last state."""
    generator = torch.Generator().manual_seed(tokens + width)
    shape = (batch, tokens, heads, width)  # as projections lay them out
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(4))
    start, dlast = (torch.randn(batch, heads, width, width, generator=generator).to(device) for _ in range(2))
    return [q, k, v, start, do, dlast]


def with_gradients(function, inputs: list[Tensor], slopes: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    q, k, v, start, do, dlast = (x if dtype is None else x.to(dtype) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, start)]
    o, last = function(*leaves[:3], slopes, leaves[3])
    gradients = torch.autograd.grad((o, last), leaves, (do.to(o.dtype), dlast.to(last.dtype)))
    return [x.detach().double() for x in (o, last, *gradients)]


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (15, 32), (64, 16), (65, 64), (130, 16), (200, 128)])
def test_values_and_gradients(tokens: int, width: int, device: str):
    """Catches a decay off by one in a chunk, at its edges or for the state; a mask or state not transposed."""
    inputs = drawn(tokens, 2, width, device, torch.float32, batch=1 if width == 128 else 2)
    slopes = torch.tensor([0.9, 0.004], device=device)
    found = with_gradients(triton_lightning.by_chunks, inputs, slopes)
    exact = with_gradients(by_recurrence, inputs, slopes, torch.float64)
    for name, ours, truth in zip(NAMES, found, exact, strict=True):
        assert relative(ours, truth) < 2e-6, f"{name}: {relative(ours, truth)}"


def test_calls_that_go_on(device: str):
    """Catches a state that is not what the next call needs, and one that is read though none is given."""
    q, k, v, *_ = drawn(150, 2, 16, device, torch.float32)
    slopes = torch.tensor([0.5, 0.05], device=device)
    whole, last = triton_lightning.by_chunks(q, k, v, slopes)
    state, parts = None, []
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        part, state = triton_lightning.by_chunks(*(x[:, :, start:stop] for x in (q, k, v)), slopes, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_any_strides(device: str):
    """Catches strides that are taken for a contiguous tensor's: q, k and v as parts of one, heads before tokens."""
    whole = torch.randn(2, 70, 3, 2, 16, device=device)
    q, k, v = (whole[:, :, part].transpose(1, 2) for part in range(3))
    slopes = torch.tensor([0.5, 0.05], device=device)
    found, _ = triton_lightning.by_chunks(q, k, v, slopes)
    expected, _ = triton_lightning.by_chunks(q.contiguous(), k.contiguous(), v.contiguous(), slopes)
    assert torch.equal(found, expected)
    apart = torch.empty(2, 2, 16, 70, device=device).mT.copy_(q)
    assert torch.equal(triton_lightning.by_chunks(apart, k, v, slopes)[0], expected)


def test_other_widths_are_refused(device: str):
    """Catches a head that is read past its end."""
    with pytest.raises(ValueError, match="head_dim=24"):
        triton_lightning.by_chunks(*(torch.ones(1, 1, 3, 24, device=device) for _ in range(3)), torch.ones(1))


def test_inputs_that_are_not_alike(device: str):
    """Catches keys that are read past their end, and products of two dtypes."""
    q, short = (torch.ones(1, 2, n, 16, device=device) for n in (5, 4))
    with pytest.raises(ValueError, match="expected one shape"):
        triton_lightning.by_chunks(q, short, q, torch.ones(2, device=device))
    with pytest.raises(ValueError, match="expected one shape"):
        triton_lightning.by_chunks(q, q.bfloat16(), q, torch.ones(2, device=device))
    with pytest.raises(ValueError, match="one dtype of"):
        triton_lightning.by_chunks(q.double(), q.double(), q.double(), torch.ones(2, device=device))


def test_one_gradient_alone(device: str):
    """Catches a missing gradient of the output or of the state that is not taken for zero."""
    q, k, v, start, *_ = drawn(70, 2, 16, device, torch.float32)
    slopes = torch.tensor([0.5, 0.05], device=device)
    for index in range(2):
        found, exact = [], []
        for gradients, function, dtype in (
            (found, triton_lightning.by_chunks, torch.float32),
            (exact, by_recurrence, torch.float64),
        ):
            leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v, start)]
            result = function(*leaves[:3], slopes, leaves[3])[index]
            gradients += torch.autograd.grad(result.sum(), leaves, materialize_grads=True)
        for ours, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_cores(dtype: torch.dtype):
    """Catches rounding beyond that of plain torch in the same dtype: at most twice its error, at the real width."""
    inputs = drawn(1000, 32, 128, "cuda", dtype, batch=1)
    slopes = lightning.slopes(32, "cuda")
    found = with_gradients(triton_lightning.by_chunks, inputs, slopes)
    plain = with_gradients(plain_chunks, inputs, slopes)
    exact = with_gradients(by_recurrence, inputs, slopes, torch.float64)
    for name, ours, theirs, truth in zip(NAMES, found, plain, exact, strict=True):
        error, allowed = relative(ours, truth), relative(theirs, truth)
        print(f"{dtype}, {name}: {error:.2e}, plain torch {allowed:.2e}")
        assert error <= 2 * allowed, name


def plain_chunks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """lightning.by_chunks with its products in the inputs' dtype."""
    outputs = []
    for start in range(0, q.shape[2], 64):
        q_c, k_c, v_c = (x[:, :, start : start + 64] for x in (q, k, v))
        steps = torch.arange(q_c.shape[2], device=q.device)
        distance = steps[:, None] - steps
        seen = torch.exp(-slopes[:, None, None] * distance.clamp(min=0)).tril().to(q.dtype)
        after = torch.exp(-slopes[:, None] * (steps + 1))[..., None].to(q.dtype)
        until = torch.exp(-slopes[:, None] * (len(steps) - 1 - steps))[..., None].to(q.dtype)
        mixed = (q_c @ k_c.mT * seen) @ v_c + after * (q_c @ state.to(q.dtype))
        outputs.append(mixed * q.shape[-1] ** -0.5)
        state = torch.exp(-slopes * len(steps))[:, None, None] * state + ((k_c * until).mT @ v_c).float()
    return torch.cat(outputs, dim=2), state


@pytest.mark.cuda
@NEEDS_GPU
def test_a_long_context():
    """Catches offsets that overflow, and memory that grows faster than the context: 64K tokens at the real shapes."""
    q, k, v = (torch.randn(1, 65536, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    slopes = lightning.slopes(32, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mixed, _ = triton_lightning.by_chunks(q, k, v, slopes)
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30  # states before 1024 chunks, 1 GiB, and the output
    tail = [x[:, :, -4096:] for x in (q, k, v)]  # what was before them has decayed below exp(-15)
    expected, _ = lightning.by_chunks(*tail, slopes)
    torch.testing.assert_close(mixed[:, :, -64:], expected[:, :, -64:], rtol=2e-2, atol=2e-2 * expected.std().item())


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kernel", ["states_kernel", "mix_kernel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_compiles(dtype: str, kernel: str, reverse: bool, capability: int):
    """Catches products of bf16 that leave the tensor cores, and more shared memory than sm_120 has: 99 KiB."""
    strides = lambda name: {f"{name}_{of}": "i64" for of in ("batch", "head", "token")}  # noqa: E731
    names = ("a", "b") if kernel == "states_kernel" else ("a", "b", "c")
    signature = {key: kind for n in names for key, kind in ({n: f"*{dtype}"} | strides(n)).items()} | {
        "slopes": "*fp32"
    }
    if kernel == "states_kernel":
        signature |= {"start": "*fp32", "states": f"*{dtype}", "last": "*fp32"}
    else:
        signature |= {"states": f"*{dtype}", "state_row": "i32", "state_column": "i32"}
        signature |= {"out": f"*{dtype}"} | strides("out")
    signature |= {"heads": "i32", "tokens": "i32", "scale": "fp32"}
    tile = triton_lightning.STATE_TILE if kernel == "states_kernel" else triton_lightning.MIX_TILES[dtype == "fp32"]
    constants = {"WIDTH": 128, "CHUNK": 64, "PRECISION": "ieee" if dtype == "fp32" else None, "REVERSE": reverse}
    constants |= {"ROWS" if kernel == "states_kernel" else "DEPTH": tile[0], "TILE": tile[1]}
    source = ASTSource(getattr(triton_lightning, kernel), signature | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert ("mma" in compiled.asm["ptx"]) == (dtype == "bf16")
    assert compiled.metadata.shared <= 99 * 1024


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
