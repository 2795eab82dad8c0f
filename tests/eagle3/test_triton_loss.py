"""The Triton loss against the plain-torch truth in fp64.

The tests of the kernels' results run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter
has to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own.
"""

import pytest
import torch
import triton
from interpreter import COMPILED, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.eagle3 import loss as truth
from soar_prep.eagle3 import triton_loss
from soar_prep.eagle3.loss import Teacher, step_loss, this_rank_alone
from soar_prep.settings import LossKind

KINDS = list(LossKind)
NAMES = ("losses", "gradient", "alpha", "kl", "mixing", "rows")
SIZES = [(1, 17), (15, 1000), (17, 4099), (130, 17)]


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def drawn(rows: int, vocabulary: int, dtype=torch.float32, outside: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, teacher's logits in `dtype`, log_z and log_z_draft: every row of another kind.

    No token has q and p so close that a rounding decides which is larger: a token counts or does not, and its whole q
    would be the difference.
    """
    generator = torch.Generator().manual_seed(rows * vocabulary)
    z = 3 * torch.randn(rows, vocabulary, generator=generator)
    full = z[:, :1] + 3 * torch.randn(rows, vocabulary + outside, generator=generator)
    full[:, :vocabulary] += 0.5 * z
    full[2::8, : vocabulary // 2] = -torch.inf  # a head that rules tokens out
    full[3::8, vocabulary:] += 300  # the target's mass lies outside the draft's vocabulary
    z[4::8] += 1e4
    full[4::8] -= 1e4
    z[5::8, 0], full[5::8, 1] = 1e4, 1e4  # one-hot, and not the same one
    z[6::8] -= 9e3
    full[7::8] += 88  # probabilities ordinary, exponentials infinite
    z, full = z.to(dtype), full.to(dtype)
    log_z = full.double().logsumexp(dim=-1).float()
    log_z_draft = full[:, :vocabulary].double().logsumexp(dim=-1).float()
    while True:
        log_q = z.double().log_softmax(dim=-1)
        log_p = full[:, :vocabulary].double() - log_z[:, None]
        is_close = ((log_q - log_p).abs() < 1e-4 * log_p.abs().clamp(1, 100)) & (log_p > -80)
        if not is_close.any():
            return z, full[:, :vocabulary], log_z, log_z_draft
        z[is_close] += 2.0**-6 * z[is_close].abs().clamp(min=1)


def run(function, inputs, kind: LossKind) -> dict[str, Tensor]:
    return dict(zip(NAMES, function(*inputs, kind, 3.0, this_rank_alone), strict=True))


def exact(inputs, kind: LossKind) -> dict[str, Tensor]:
    """The truth in fp64; where fp32 has no such small alpha, and thus another -log alpha, in fp32."""
    results = run(truth.losses_and_gradient, [x.double() for x in inputs], kind)
    has_none = results["alpha"] < 1e-30
    for name, in_fp32 in run(truth.losses_and_gradient, [x.float() for x in inputs], kind).items():
        if in_fp32.ndim:
            results[name][has_none] = in_fp32[has_none].double()
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocabulary"), SIZES)
def test_values_and_gradients(rows: int, vocabulary: int, kind: LossKind, device: str):
    """Catches a term of another kind, tokens past the end of a row, a lost row, -inf times zero, an overflow."""
    inputs = drawn(rows, vocabulary)
    expected = exact(inputs, kind)
    got = run(triton_loss.losses_and_gradient, [x.to(device) for x in inputs], kind)
    for name in NAMES:
        assert got[name].dtype == torch.float32
        # fp32 logits of 1e4 minus a log-sum-exp: 2^-11 of an exponent; the sums and exp add 1e-5
        error = (got[name].cpu().double() - expected[name]).abs()
        assert bool((error <= 1e-5 + 1e-4 * expected[name].abs()).all()), f"{name}: {error.max()}"
    assert float(expected["gradient"].abs().max()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits(dtype: torch.dtype, kind: LossKind, device: str):
    """Catches sums in the logits' dtype, and a gradient that is rounded twice."""
    inputs = drawn(15, 1000, dtype)
    expected = exact(inputs, kind)
    plain = run(truth.losses_and_gradient, inputs, kind)
    got = run(triton_loss.losses_and_gradient, [x.to(device) for x in inputs], kind)
    assert got["gradient"].dtype == dtype
    for name in NAMES:
        error, allowed = ((x[name].cpu().double() - expected[name]).abs().max() for x in (got, plain))
        largest = float(expected[name].abs().max())
        # Sums have another order. The interpreter cuts what it stores as bf16: one unit in the last place, not half.
        others = 1e-5 * (1 + largest) + (2**-8 * largest if device == "cpu" else 0)
        assert error <= 2 * allowed + others, f"{name}: {error}, plain PyTorch {allowed}"


def test_equal_probabilities_give_no_gradient(device: str):
    """Catches probabilities that differ by how they are computed: where q = p exactly, s - A is zero."""
    z = torch.zeros(3, 4, device=device)
    log_z = torch.full((3,), 4.0, device=device).log()
    for kind in KINDS:
        got = run(triton_loss.losses_and_gradient, (z, z.clone(), log_z, log_z.clone()), kind)
        assert float(got["gradient"].abs().max()) < 1e-7
        assert got["alpha"].tolist() == pytest.approx([1, 1, 1], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_row(kind: LossKind, device: str):
    """Catches an empty grid, and 0 / 0."""
    z, sums = torch.zeros(0, 17, device=device), torch.zeros(0, device=device)
    got = run(triton_loss.losses_and_gradient, (z, z.clone(), sums, sums.clone()), kind)
    assert got["gradient"].shape == (0, 17)
    assert (float(got["mixing"]), float(got["rows"])) == (1, 1)


def test_views(device: str):
    """Catches strides ignored: rows of wider tensors, and columns that are not neighbours."""
    z, teacher, *sums = (x.to(device) for x in drawn(15, 1000))
    wide_z, wide_teacher = torch.zeros(15, 1024, device=device), torch.zeros(1000, 15, device=device)
    wide_z[:, 3:1003], wide_teacher[:] = z, teacher.T
    expected = run(triton_loss.losses_and_gradient, (z, teacher, *sums), LossKind.hybrid)
    got = run(triton_loss.losses_and_gradient, (wide_z[:, 3:1003], wide_teacher.T, *sums), LossKind.hybrid)
    for name in NAMES:
        assert torch.equal(got[name], expected[name])
    assert got["gradient"].is_contiguous()


def test_scale_rows(device: str):
    """Catches another row's factor, an expanded one read past its one element, a product in the narrow dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocabulary in ((0, 17), *SIZES):
            x = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
            for factors in (torch.linspace(-2, 3, rows), torch.tensor(2**-3).expand(rows)):
                got = triton_loss.scale_rows(x.to(device), factors.to(device)).cpu()
                expected = (factors[:, None] * x).to(dtype)
                # The interpreter cuts what it stores as bf16.
                tolerance = 2**-7 if dtype is torch.bfloat16 and device == "cpu" else 0
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=0)


def test_lambda_is_the_ranks(device: str):
    """Catches a lambda from this rank's rows alone."""
    inputs = [x.to(device) for x in drawn(15, 17)]
    seen = []

    def two_ranks(total: Tensor) -> Tensor:
        seen.append(total.tolist())
        return total + torch.tensor([5.0, 5.0], device=device)

    results = triton_loss.losses_and_gradient(*inputs, LossKind.hybrid, 3.0, two_ranks)
    got = dict(zip(NAMES, results, strict=True))
    total, rows = seen[0]
    assert rows == 15
    mixing = float(torch.tensor(-3 * (total + 5) / (rows + 5)).exp())
    assert float(got["mixing"]) == pytest.approx(mixing, rel=1e-5)
    expected = mixing * got["kl"] + (1 - mixing) * (1 - got["alpha"])
    torch.testing.assert_close(got["losses"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_step_loss(kind: LossKind, device: str, monkeypatch: pytest.MonkeyPatch):
    """Catches a wrong order of results on the road from the kernels to z.grad."""
    z, *of_teacher = drawn(17, 1000)
    best = torch.full((17,), -1)
    ours, theirs = z.clone().to(device).requires_grad_(), z.clone().requires_grad_()
    with monkeypatch.context() as patch:
        if device == "cpu":
            patch.setattr(truth, "losses_and_gradient", triton_loss.losses_and_gradient)
        got = step_loss(ours, Teacher(*(x.to(device) for x in (*of_teacher, best))), kind)
    expected = step_loss(theirs, Teacher(*of_teacher, best), kind)
    (got.loss * 3).backward()
    (expected.loss * 3).backward()
    pairs = ((got.loss, expected.loss), (got.alpha, expected.alpha), (got.kl, expected.kl), (ours.grad, theirs.grad))
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def test_inputs_that_would_be_misread_are_named(device: str):
    """Catches other shapes and dtypes that reach the kernels and are read past the end."""
    z, sums = torch.zeros(3, 17, device=device), torch.zeros(3, device=device)

    def compute(*inputs: Tensor) -> None:
        triton_loss.losses_and_gradient(*inputs, LossKind.kl, 3.0, this_rank_alone)

    with pytest.raises(ValueError, match=r"teacher's logits \[3, 16\]"):
        compute(z, z[:, :16], sums, sums)
    with pytest.raises(ValueError, match=r"log_z_draft \[2\]"):
        compute(z, z, sums, sums[:2])
    with pytest.raises(ValueError, match="z is torch"):
        compute(z.long(), z, sums, sums)


def test_fp64_gets_the_truth():
    """Catches fp64 cut to fp32."""
    inputs = [x.double() for x in drawn(15, 17)]
    got = run(triton_loss.losses_and_gradient, inputs, LossKind.hybrid)
    expected = run(truth.losses_and_gradient, inputs, LossKind.hybrid)
    for name in NAMES:
        assert torch.equal(got[name], expected[name])


@COMPILED
def test_cpu_tensors_get_the_truth():
    """Catches a compiled kernel launched on CPU memory."""
    inputs = drawn(15, 17)
    got = run(triton_loss.losses_and_gradient, inputs, LossKind.hybrid)
    expected = run(truth.losses_and_gradient, inputs, LossKind.hybrid)
    for name in NAMES:
        assert torch.equal(got[name], expected[name])


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel", "scale_kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kernel: str, kind: LossKind, capability: int):
    """Catches code that one architecture cannot build, and loads of two bytes where sixteen are in a row."""
    function = getattr(triton_loss, kernel)
    signature = dict.fromkeys(function.arg_names, "*fp32")
    signature |= {name: "*bf16" for name in ("z", "teacher", "gradient", "x", "scaled") if name in signature}
    signature |= {name: "i32" for name in signature if name.endswith("_stride") or name == "vocabulary"}
    constants = {name: value for name, value in {"KIND": kind.value, "BLOCK": 2048}.items() if name in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, kind_ in enumerate(signature.values()) if kind_.startswith("*") or kind_ == "i32"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert "ld.global.v4" in compiled.asm["ptx"]


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
