"""Coordinate descent after GPTQ, in plain torch and by its Triton kernel, bit for bit.

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

from soar_prep.fouroversix.blocks import candidate_scales, tensor_scale_for
from soar_prep.fouroversix.e2m1 import E2M1_VALUES
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_to_nvfp4
from soar_prep.gptq import refine, triton_refine
from soar_prep.gptq.hessian import factorize
from soar_prep.gptq.solve import solve
from soar_prep.settings import ScaleError, ScaleRule


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def hessian_of(columns: int) -> Tensor:
    """Second moment of correlated inputs of different size, damped."""
    x = gaussian(4 * columns, columns, 1) * torch.logspace(-0.5, 0.5, columns)
    x += 0.7 * x.roll(1, dims=1) + 0.5 * x[:, :1]
    h = x.T @ x / len(x)
    return h + 0.01 * h.diagonal().mean() * torch.eye(columns)


def gptq(weight: Tensor, hessian: Tensor, rule: ScaleRule) -> NVFP4Tensor:
    tensor_scale = tensor_scale_for(weight.abs().max(), rule, power_of_two=True)
    scales = quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse).block_scales
    return solve(weight, scales, tensor_scale, factorize(hessian, 1e-6))


def losses(weight: Tensor, quantized: NVFP4Tensor, hessian: Tensor) -> Tensor:
    """D H D^T of each row, fp64 [N]."""
    d = (weight - quantized.dequantize()).double()
    return ((d @ hessian.double()) * d).sum(dim=1)


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (15, 48), (130, 144)])
def test_every_pass_lowers_the_loss(rows: int, columns: int, rule: ScaleRule):
    """Catches a target, gradient or order that is not the objective's: no row may lose more than before, most less."""
    weight, hessian = gaussian(rows, columns, rows), hessian_of(columns)
    before = gptq(weight, hessian, rule)
    for passes in (1, 2):
        after = refine.refine(weight, before, hessian, rule, passes)
        old, new = losses(weight, before, hessian), losses(weight, after, hessian)
        assert bool((new <= old * (1 + 1e-5)).all())
        if columns > 16:
            assert new.sum() < 0.97 * old.sum()
        before = after


def test_nothing_is_left_to_gain():
    """Catches a search that overlooks codes: after many passes no single code of any row could be better."""
    weight, hessian = gaussian(17, 48, 3), hessian_of(48)
    quantized = refine.refine(weight, gptq(weight, hessian, ScaleRule.sweep), hessian, ScaleRule.sweep, 12)
    best = losses(weight, quantized, hessian)
    values, improved = quantized.dequantize(), 0
    step = quantized.block_scales.float().repeat_interleave(16, dim=1) * quantized.tensor_scale
    for column in range(48):
        for value in (*E2M1_VALUES, *(-v for v in E2M1_VALUES)):
            other = values.clone()
            other[:, column] = value * step[:, column]
            d = (weight - other).double()
            improved += int((((d @ hessian.double()) * d).sum(1) < best * (1 - 1e-6)).sum())
    assert improved <= 17 * 48 // 20  # a block is solved greedily, so a few are left


def test_no_passes_and_dead_columns():
    """Catches columns that nothing was seen of and that are changed by others."""
    weight, hessian = gaussian(15, 48, 4), hessian_of(48)
    dead = torch.tensor([0, 17, 47])
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(48)
    before = gptq(weight, hessian, ScaleRule.sweep)
    assert torch.equal(refine.refine(weight, before, hessian, ScaleRule.sweep, 0).codes, before.codes)
    after = refine.refine(weight, before, hessian, ScaleRule.sweep, 2)
    step = after.block_scales.float().repeat_interleave(16, dim=1) * after.tensor_scale
    assert bool(((after.dequantize() - weight).abs() <= step)[:, dead].all())


def problem(rows: int, rule: ScaleRule, power_of_two: bool = True) -> tuple[Tensor, ...]:
    """x, values, scales, U and tensor scale; with zeros of both signs, rows of zeros and subnormal scales."""
    x = gaussian(16, rows, rows) * 0.02
    x[:, 0], x[3] = 0.0, -0.0
    if rows > 10:
        x[:, 5] *= 2.0**-14
        x[:, 7] *= 1e-30
    tensor_scale = tensor_scale_for(x.abs().max(), rule, power_of_two)
    given = quantize_to_nvfp4((x + 0.003 * gaussian(16, rows, 9)).T.contiguous(), tensor_scale, rule, ScaleError.mse)
    values = given.dequantize().T / (given.block_scales.float().T * tensor_scale)
    upper = refine.inverse_of_blocks(hessian_of(16))[1][0]
    return x, values.contiguous(), given.block_scales[:, 0].contiguous(), upper, tensor_scale


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("rows", [1, 15, 17, 130])
def test_same_bits_as_the_truth(rows: int, rule: ScaleRule, power_of_two: bool, device: str):
    """Catches another candidate, order, rounding or sum; a fused product; a value or scale of another row."""
    given = problem(rows, rule, power_of_two)
    found = triton_refine.solve_block(*(x.to(device) for x in given), rule)
    expected = refine.solve_block(*given, rule)
    assert torch.equal(found[1].cpu().view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(found[0].cpu().view(torch.int32), expected[0].view(torch.int32))


def test_what_stands_stays():
    """Catches a candidate that is taken though it is no better: what was found once is found again, unchanged."""
    x, values, scales, upper, tensor_scale = problem(130, ScaleRule.sweep)
    first = refine.solve_block(x, values, scales, upper, tensor_scale, ScaleRule.sweep)
    again = refine.solve_block(x, *first, upper, tensor_scale, ScaleRule.sweep)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1].view(torch.uint8), again[1].view(torch.uint8))
    assert len(candidate_scales(x.T, tensor_scale, ScaleRule.sweep)) == 12
    assert not torch.equal(first[0], values)


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_unfused_arithmetic(capability: int):
    """Catches contracted sums, approximate division, and numbers that are read across threads."""
    names = ("x", "values", "scales", "upper", "tensor_scale", "found", "chosen")
    signature = {name: "*u8" if name in ("scales", "chosen") else "*fp32" for name in names}
    signature |= {"rows": "i32", "RULE": "constexpr", "ROWS": "constexpr"}
    source = ASTSource(triton_refine.solve_kernel, signature, {"RULE": "sweep", "ROWS": 32})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert not re.search(r"\b(add|sub|mul)\.f32", ptx), "without .rn the assembler may contract to fma"
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx)
    assert "shfl" not in ptx, "a thread no longer holds its row"


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__, "-k", "same_bits")
