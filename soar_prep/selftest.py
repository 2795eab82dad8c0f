"""`soar-prep selftest`: do the kernels give this device's user the numbers that the plain-torch truth gives?

One row for each implementation and kind of input. Products are held against float64: in fp32 within LARGEST_ERROR of
the largest |y|, in bf16 that value rounded once. The quantizer is held against the truth on the CPU, bit for bit.
"""

import itertools
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from soar_prep.errors import CheckFailed, UserError
from soar_prep.fouroversix.blocks import tensor_scale_for
from soar_prep.fouroversix.quantizer import quantizer_for
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_activations, quantize_to_nvfp4
from soar_prep.qat import gemm
from soar_prep.qat.product import FP4_CAPABILITIES
from soar_prep.settings import ScaleError, ScaleRule, Selftest

ROWS = (1, 17, 48, 64, 300)  # M: every tile of x, and the road for large M
WEIGHTS = ((129, 272), (257, 4096))  # N, K: N odd, K with a tail and K long
TENSOR_SCALES = {"2^-13": 2.0**-13, "1.7e-4": 1.7e-4}
INPUT_SCALE = 0.0017
LARGEST_ERROR = 2e-6  # in fp32, of the largest |y|: what the order of the sums may change
OPERANDS = ("W4A16 bf16", "W4A16 fp16", "W4A4")
Product = Callable[..., Tensor]  # with the truth's signature


@dataclass(frozen=True)
class Row:
    """What became of one implementation under one kind of input. error: fp32, of the largest |y|, of the worst case.
    other_bits: bf16 outputs that are not the truth's, with how many there were."""

    implementation: str
    inputs: str
    result: str
    error: float | None = None
    other_bits: str = ""

    @property
    def failed(self) -> bool:
        return self.result.startswith("FAILED")


def selftest(settings: Selftest) -> None:
    """Print a row for each check. CheckFailed with one line for each that did not hold."""
    device = pick_device(settings.device)
    print(*heading(device), sep="\n")
    rows = []
    for row in itertools.chain(check_products(device), check_quantizer(device)):
        print(format_row(row), flush=True)
        rows.append(row)
    failed = [f"{row.implementation}, {row.inputs}: {row.result}" for row in rows if row.failed]
    if failed:
        raise CheckFailed(
            "\n  ".join([f"{len(failed)} of {len(rows)} checks failed on {device_name(device)}", *failed])
        )
    skipped = sum(row.result.startswith("not run") for row in rows)
    print(
        f"{len(rows) - skipped} checks hold"
        + (f"; {skipped} kernels NOT RUN: nothing is known of these" if skipped else "")
    )


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={name}: not usable here ({reason}); try device=auto") from None
    return device


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {platform.machine()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def heading(device: torch.device) -> list[str]:
    triton = "none"
    if find_spec("triton"):
        import triton as installed

        triton = installed.__version__
    return [
        f"device     {device_name(device)}",
        f"versions   torch {torch.__version__}, triton {triton}, CUDA {torch.version.cuda or 'none'}",
        "",
        format_cells("implementation", "inputs, tensor scale", "error", "other bf16 bits", "result"),
    ]


def format_row(row: Row) -> str:
    error = "" if row.error is None else f"{row.error:.1e}"
    return format_cells(row.implementation, row.inputs, error, row.other_bits, row.result)


def format_cells(implementation: str, inputs: str, error: str, other_bits: str, result: str) -> str:
    return f"{implementation:15} {inputs:28} {error:>8}  {other_bits:>15}  {result}"


def products(device: torch.device) -> dict[str, tuple[Product | None, str]]:
    """Each implementation of the product, or why it cannot run on this device."""
    found: dict[str, tuple[Product | None, str]] = {"truth": (gemm.matmul, "")}
    if device.type != "cuda" or not find_spec("triton"):
        reason = "no GPU" if device.type != "cuda" else "triton is not installed"
        return found | {"emulation": (None, reason), "native FP4": (None, reason)}
    from soar_prep.qat import native, triton_gemm  # triton is not there on every platform

    major, _ = torch.cuda.get_device_capability(device)
    has_fp4 = major in FP4_CAPABILITIES
    found["emulation"] = (triton_gemm.matmul, "") if major >= 8 else (None, "needs sm_80 or later")
    found["native FP4"] = (native.matmul, "") if has_fp4 else (None, "needs FP4 units: sm_100 or sm_120")
    return found


def check_products(device: torch.device) -> Iterator[Row]:
    """Rows of all products, one for each kind of x and tensor scale."""
    for name, (product, reason) in products(device).items():
        if product is None:
            yield Row(name, "all", f"not run: {reason}")
            continue
        for operands, scale in itertools.product(OPERANDS, TENSOR_SCALES):
            if name == "native FP4" and operands != "W4A4":
                continue
            try:
                yield check_product(name, product, operands, scale, device)
            except Exception as error:  # one kernel that does not compile must not hide what the others do
                yield Row(name, f"{operands}, {scale}", f"FAILED: {type(error).__name__}: {first_line(error)}")


def check_product(name: str, product: Product, operands: str, scale: str, device: torch.device) -> Row:
    """One product under one kind of x and one tensor scale, at all sizes."""
    worst, other_bits, outputs, wrong = 0.0, 0, 0, []
    for outputs_n, columns in WEIGHTS:
        weight = make_weight(outputs_n, columns, TENSOR_SCALES[scale]).to(device)
        for rows in ROWS:
            x = make_input(rows, columns, operands, device)
            expected = exact_product(x, weight)
            largest = expected.abs().max()
            found, rounded = product(x, weight, torch.float32), product(x, weight, torch.bfloat16)
            error = ((found - expected).abs().max() / largest).item()
            low, high = ((expected + side * LARGEST_ERROR * largest).bfloat16() for side in (-1, 1))
            is_right = error <= LARGEST_ERROR and bool(((low <= rounded) & (rounded <= high)).all())
            if not is_right:
                wrong.append(f"M={rows} N={outputs_n} K={columns} error {error:.1e}")
            worst = max(worst, error) if error == error else float("nan")
            other_bits += int((rounded != gemm.matmul(x, weight, torch.bfloat16)).sum())
            outputs += rounded.numel()
    result = f"FAILED: {len(wrong)} sizes, first {wrong[0]}" if wrong else "holds"
    return Row(name, f"{operands}, {scale}", result, worst, f"{other_bits} of {outputs}")


def make_weight(outputs: int, columns: int, tensor_scale: float) -> NVFP4Tensor:
    weight = 0.02 * gaussian(outputs, columns, outputs)
    weight.view(-1, 16)[::7] *= 2.0**-9  # block scales among the subnormals of E4M3
    return quantize_to_nvfp4(weight, torch.tensor(tensor_scale), ScaleRule.four_over_six, ScaleError.mse)


def make_input(rows: int, columns: int, operands: str, device: torch.device) -> Tensor | NVFP4Tensor:
    x = gaussian(rows, columns, rows)
    if operands == "W4A4":
        return quantize_activations(x, torch.tensor(INPUT_SCALE)).to(device)
    return x.to(device, torch.bfloat16 if operands == "W4A16 bf16" else torch.float16)


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def exact_product(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor) -> Tensor:
    """float64 [M, N]."""
    dense = x.operand().double() * x.tensor_scale.double() if isinstance(x, NVFP4Tensor) else x.double()
    return dense @ (weight.operand().double() * weight.tensor_scale.double()).T


def check_quantizer(device: torch.device) -> Iterator[Row]:
    """Rows of the quantizer's kernel, one for each rule and error."""
    if device.type != "cuda":
        yield Row("quantizer", "all", "not run: no GPU")
        return
    for rule, error in itertools.product(ScaleRule, ScaleError):
        inputs = f"{rule}, {error}"
        if rule is ScaleRule.six and error is not ScaleError.mse:
            continue  # six has no error to choose by
        try:
            yield Row("quantizer", inputs, quantizer_result(rule, error, device))
        except Exception as failure:  # as above
            yield Row("quantizer", inputs, f"FAILED: {type(failure).__name__}: {first_line(failure)}")


def quantizer_result(rule: ScaleRule, error: ScaleError, device: torch.device) -> str:
    """`holds` if codes and block scales are the truth's on the CPU, for all dtypes and both kinds of tensor scale."""
    quantize, wrong = quantizer_for(device), []
    column_weights = torch.linspace(0.1, 3, 272)
    for dtype, power_of_two in itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False)):
        weight = 0.02 * gaussian(129, 272, 1)
        weight.view(-1, 16)[::7] *= 2.0**-14
        weight.view(-1, 16)[3::11] = 0
        weight = weight.to(dtype)
        tensor_scale = tensor_scale_for(weight.abs().max().float(), rule, power_of_two)
        expected = quantize_to_nvfp4(weight, tensor_scale, rule, error, column_weights)
        found = quantize(weight.to(device), tensor_scale.to(device), rule, error, column_weights.to(device)).to("cpu")
        same = torch.equal(found.codes, expected.codes)
        if not same or not torch.equal(found.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8)):
            wrong.append(f"{dtype}, power_of_two={power_of_two}")
    return f"FAILED: bits differ for {'; '.join(wrong)}" if wrong else "holds, bit for bit"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
