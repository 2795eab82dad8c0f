"""The Triton solver against the plain-torch truth, bit for bit.

The tests of the kernel's result run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter has
to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own.
"""

import re

import pytest
import torch
import triton
from interpreter import COMPILED, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.fouroversix.blocks import tensor_scale_for
from soar_prep.fouroversix.e2m1 import round_to_e2m1
from soar_prep.fouroversix.tensor import quantize_to_nvfp4
from soar_prep.gptq import solve, triton_solve
from soar_prep.gptq.hessian import factorize
from soar_prep.settings import ScaleError, ScaleRule


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def problem(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [C, N], scales [C, N], tensor scale and factor of correlated inputs; with zeros of both signs."""
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, max(-(-columns // 16) * 16, 16), generator=generator)
    weight[0], weight[-1, ::3] = 0.0, -0.0
    tensor_scale = tensor_scale_for(weight.abs().max(), ScaleRule.sweep, power_of_two=False)
    scales = quantize_to_nvfp4(weight, tensor_scale, ScaleRule.sweep, ScaleError.mse).block_scales
    scales = scales.float().repeat_interleave(16, dim=1)[:, :columns]
    x = torch.randn(4 * columns, columns, generator=generator)
    x += x.roll(1, dims=1)
    upper = factorize(x.T @ x / len(x), 0.01).upper
    return weight[:, :columns].T.contiguous(), scales.T.contiguous(), tensor_scale, upper


def unfused(w: Tensor, scales: Tensor, tensor_scale: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """solve.round_block with every product rounded: there, the BLAS of a machine decides, one fuses and another not."""
    w, values, errors = w.clone(), torch.empty_like(w), torch.empty_like(w)
    for j in range(len(w)):
        values[j] = round_to_e2m1(w[j] * (1 / (tensor_scale * scales[j])))
        errors[j] = (w[j] - values[j] * (scales[j] * tensor_scale)) / upper[j, j]
        w[j + 1 :] -= upper[j, j + 1 :, None] * errors[j]
    return values, errors


@pytest.mark.parametrize("columns", [1, 16, 48, 128])
@pytest.mark.parametrize("rows", [1, 15, 17, 130])
def test_same_bits_as_the_truth(rows: int, columns: int, device: str):
    """Catches a column that is read before all errors reached it, a fused product, another rounding or a lost sign."""
    w, scales, tensor_scale, upper = problem(rows, columns)
    found = triton_solve.round_block(*(x.to(device) for x in (w, scales, tensor_scale, upper)))
    expected = unfused(w, scales, tensor_scale, upper)
    for name, ours, truth in zip(("values", "errors"), found, expected, strict=True):
        wrong = ours.cpu().view(torch.int32) != truth.view(torch.int32)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"
    # A number within a rounding of a midpoint may fall the other way, and changes its row from there on.
    is_same = (solve.round_block(w, scales, tensor_scale, upper)[0] == expected[0]).all(dim=0)
    assert is_same.float().mean() >= 0.98


def test_views(device: str):
    """Catches strides that are ignored: the solver gives a block of U, and may give rows of a wider weight."""
    w, scales, tensor_scale, upper = problem(17, 48)
    wide, large = torch.full((48, 40), torch.nan), torch.full((60, 90), torch.nan)
    wide[:, 5:22], large[3:51, 7:55] = w, upper
    wide_scales = torch.full((48, 30), torch.nan)
    wide_scales[:, 2:19] = scales
    views = (wide.to(device)[:, 5:22], wide_scales.to(device)[:, 2:19], tensor_scale.to(device))
    values, errors = triton_solve.round_block(*views, large.to(device)[3:51, 7:55])
    expected = unfused(w, scales, tensor_scale, upper)
    assert torch.equal(values.cpu(), expected[0])
    assert torch.equal(errors.cpu(), expected[1])


def test_too_many_columns_are_refused(device: str):
    """Catches a block that does not fit the registers, and would be cut."""
    w = torch.ones(129, 4, device=device)
    with pytest.raises(ValueError, match="at most 128 columns"):
        triton_solve.round_block(w, w, torch.ones((), device=device), torch.eye(129, device=device))


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_unfused_arithmetic(capability: int):
    """Catches contracted sums, approximate division, and columns that are read across threads."""
    signature = dict.fromkeys(("w", "scales", "tensor_scale", "upper", "values", "errors"), "*fp32")
    signature |= dict.fromkeys(("columns", "rows", "w_stride"), "i32")
    signature |= dict.fromkeys(("COLUMNS", "ROWS"), "constexpr")
    source = ASTSource(triton_solve.round_kernel, signature, {"COLUMNS": 128, "ROWS": 32})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\b(add|sub|mul)\.f32", ptx), "without .rn the assembler may contract to fma"
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx)
    assert "shfl" not in ptx, "a thread no longer holds its row"


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
