"""`soar-prep selftest`: that it tells a wrong kernel from a right one, and what it did not run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import NEEDS_GPU

from soar_prep import selftest
from soar_prep.fouroversix.tensor import quantize_to_nvfp4
from soar_prep.qat import gemm

SoarPrep = Callable[..., Any]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "WEIGHTS", ((33, 144),))
    monkeypatch.setattr(selftest, "ROWS", (1, 17))


def test_on_a_cpu_it_says_what_was_not_run(soar_prep: SoarPrep):
    """Catches a machine without a GPU that reports its kernels as good."""
    ran = soar_prep("selftest", "device=cpu")
    assert (ran.code, ran.err) == (0, "")
    for name in ("emulation", "native FP4", "quantizer"):
        (line,) = (line for line in ran.out.splitlines() if line.startswith(name))
        assert line.endswith("not run: no GPU")
    assert sum(line.startswith("truth ") and line.endswith("holds") for line in ran.out.splitlines()) == 6
    assert ran.out.endswith("6 checks hold; 3 kernels NOT RUN: nothing is known of these\n")
    assert f"torch {torch.__version__}" in ran.out


def rounded_twice(x, weight, dtype):
    return gemm.matmul(x, weight, torch.bfloat16).to(dtype)


def transposed_blocks(x, weight, dtype):
    return gemm.matmul(x, type(weight)(weight.codes, weight.block_scales.flip(0), weight.tensor_scale), dtype)


def not_a_number(x, weight, dtype):
    return gemm.matmul(x, weight, dtype).fill_(float("nan"))


def rounded_in_bf16_alone(x, weight, dtype):
    y = gemm.matmul(x, weight, dtype)
    return y if dtype is torch.float32 else y * (1 + 2**-7)


def crashes(x, weight, dtype):
    raise RuntimeError("ptxas exited with 255\nand more")


WRONG = [rounded_twice, transposed_blocks, not_a_number, rounded_in_bf16_alone, crashes]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_fails(wrong: Callable[..., Any], soar_prep: SoarPrep, monkeypatch: pytest.MonkeyPatch):
    """Catches an error lost among others, in NaN or in bf16 alone, a traceback, and the exit code of success."""
    kernels = {"truth": (gemm.matmul, ""), "emulation": (wrong, "")}
    monkeypatch.setattr(selftest, "products", lambda _: kernels)
    ran = soar_prep("selftest", "device=cpu")
    assert ran.code == 3
    assert ran.err.startswith("soar-prep: 6 of 13 checks failed on cpu")
    assert ran.err.count("emulation, W4A") == 6
    assert ran.out.count("FAILED") == 6
    assert ran.out.count("holds") == 6
    if wrong is crashes:
        assert ran.err.count("FAILED: RuntimeError: ptxas exited with 255\n") == 6


def test_a_wrong_quantizer_fails(monkeypatch: pytest.MonkeyPatch):
    """Catches a comparison of codes alone, or of one dtype."""
    rule, error = selftest.ScaleRule.six, selftest.ScaleError.mse
    assert selftest.quantizer_result(rule, error, torch.device("cpu")) == "holds, bit for bit"

    def one_scale_off(weight, tensor_scale, rule, error, column_weights):
        found = quantize_to_nvfp4(weight, tensor_scale, rule, error, column_weights)
        if weight.dtype is torch.float16:
            found.block_scales.view(torch.uint8)[7, 3] += 1
        return found

    monkeypatch.setattr(selftest, "quantizer_for", lambda _: one_scale_off)
    expected = "FAILED: bits differ for torch.float16, power_of_two=True; torch.float16, power_of_two=False"
    assert selftest.quantizer_result(rule, error, torch.device("cpu")) == expected


def test_an_unusable_device_is_refused(soar_prep: SoarPrep):
    """Catches a fall back to another device than the one asked for."""
    ran = soar_prep("selftest", "device=cuda:99")
    assert ran.code == 2
    assert ran.err.startswith("soar-prep: device=cuda:99: not usable here (")


@pytest.mark.cuda
@NEEDS_GPU
def test_on_a_gpu(soar_prep: SoarPrep, monkeypatch: pytest.MonkeyPatch):
    """Catches a kernel that differs on this very GPU."""
    monkeypatch.undo()
    ran = soar_prep("selftest")
    print(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert "emulation" in ran.out
    assert "bit for bit" in ran.out
