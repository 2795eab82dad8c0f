"""The Triton quantizer against the plain-torch truth, bit for bit.

The tests of the kernel's result run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter has
to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own.
"""

import re

import pytest
import torch
import triton
import triton.language as tl
from interpreter import COMPILED, NEEDS_GPU, ON_CPU, ON_GPU, in_a_child, run_interpreted
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.fouroversix import tensor as truth
from soar_prep.fouroversix import triton_quantize
from soar_prep.fouroversix.blocks import E4M3_LARGEST, E4M3_SMALLEST, tensor_scale_for
from soar_prep.settings import ScaleError, ScaleRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIES = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def assert_same(weight, tensor_scale, rule, error, device, column_weights=None) -> None:
    """Kernel on `device` against the truth on the CPU. Large tiles for the interpreter, whose time goes into calls."""
    expected = truth.quantize_to_nvfp4(weight, tensor_scale, rule, error, column_weights)
    arguments = weight.to(device), tensor_scale.to(device), rule, error, column_weights
    if device == "cuda":
        found = triton_quantize.quantize_to_nvfp4(*arguments).to("cpu")
    else:
        found = triton_quantize.launch(*arguments, tile=256, warps=1)
    wrong_scales = found.block_scales.view(torch.uint8) != expected.block_scales.view(torch.uint8)
    wrong_codes = found.codes != expected.codes
    message = f"{rule.name} {error.name} {weight.dtype} t={tensor_scale.item()}"
    assert not wrong_scales.any(), f"{message}: {wrong_scales.sum()} scales differ, at {wrong_scales.nonzero()[0]}"
    assert not wrong_codes.any(), f"{message}: {wrong_codes.sum()} code bytes differ, at {wrong_codes.nonzero()[0]}"


def gaussian(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))).to(dtype)


def hard_weight(rows: int, columns: int, dtype: torch.dtype, rule: ScaleRule, power_of_two: bool):
    """Weight and its tensor scale: heavy tails, and between them every kind of block that has its own arithmetic."""
    weight = gaussian(rows, columns)
    weight /= torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).abs().clamp(min=1e-3)
    tensor_scale = tensor_scale_for(weight.to(dtype).abs().max(), rule, power_of_two)
    blocks = weight.view(-1, 16)
    blocks[1::9] = 0.0
    blocks[2::9] = -0.0
    blocks[3::9] *= 2.0**-14  # block scales among the subnormals of E4M3
    blocks[4::9] *= 1e-30  # below the smallest block scale
    blocks[5::9] = 1e-40  # fp32 and bf16 subnormals
    blocks[6::9] = TIES * 16 * tensor_scale
    return weight.to(dtype), tensor_scale


@pytest.mark.parametrize("error", ScaleError)
@pytest.mark.parametrize("rule", ScaleRule)
def test_same_bits_as_the_truth(rule, error, device):
    """Any difference in candidates, their order, rounding, order of the sum, ties, packing or unpacking."""
    for rows, columns in ((17, 48), (130, 16)):
        column_weights = torch.rand(columns, generator=torch.Generator().manual_seed(1)) ** 4
        for dtype in DTYPES:
            for power_of_two in (True, False):
                weight, tensor_scale = hard_weight(rows, columns, dtype, rule, power_of_two)
                assert_same(weight, tensor_scale, rule, error, device, column_weights)


@pytest.mark.parametrize("error", ScaleError)
def test_same_bits_on_the_short_paths(error, device):
    """A short path that is not exact: tiles without a saturated or subnormal scale, which hard weights never give."""
    for tensor_scale in (2.0**-13, 1.1 * 2.0**-14):
        for dtype in DTYPES:
            weight = gaussian(15, 1536, dtype)
            weight.view(-1, 16)[::5] = (TIES * 16 * tensor_scale).to(dtype)
            column_weights = torch.linspace(0, 2, 1536)
            scale = torch.tensor(tensor_scale)
            assert_same(weight, scale, ScaleRule.four_over_six, error, device, column_weights)


@pytest.mark.parametrize("rule", ScaleRule)
def test_same_bits_beside_every_block_scale(rule, device):
    """E4M3 rounding wrong near a tie, a carry, a subnormal or the saturation; m / 6 off by one unit."""
    codes = torch.arange(E4M3_SMALLEST, E4M3_LARGEST + 1, dtype=torch.uint8)
    scales = codes.view(torch.float8_e4m3fn).float()
    middles = (scales[1:] + scales[:-1]) / 2
    bits = (6 * torch.cat((scales, middles, torch.tensor([2.0**-11, 460.0, 464.0, 500.0])))).view(torch.int32)
    maxima = torch.cat([(bits + ulps).view(torch.float32) for ulps in range(-2, 3)])
    weight = torch.linspace(-1, 0.9, 16) * maxima[:, None]
    for tensor_scale in (1.0, 0.7):
        assert_same(weight * tensor_scale, torch.tensor(tensor_scale), rule, ScaleError.mse, device)


def test_same_bits_where_scales_saturate(device):
    """A clamp that is missing on either side: tensor scales far too small and far too large for the weight."""
    weight = gaussian(17, 48)
    for exponent in (-24, -18, -2, 20):
        for factor in (1.0, 1.3):
            for rule in ScaleRule:
                tensor_scale = torch.tensor(factor * 2.0**exponent)
                assert_same(weight, tensor_scale, rule, ScaleError.mse, device)


def test_same_bits_with_huge_outliers(device):
    """Overflow in a scaled intermediate: weights at the end of fp32's range beside ordinary ones."""
    weight = gaussian(15, 48)
    weight[3, 5], weight[7] = -3.0e38, 3.389e38
    for dtype in (torch.float32, torch.bfloat16):
        for rule in ScaleRule:
            for power_of_two in (True, False):
                tensor_scale = tensor_scale_for(weight.to(dtype).abs().max(), rule, power_of_two)
                assert_same(weight.to(dtype), tensor_scale, rule, ScaleError.mae, device)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (1, 1536), (15, 576), (17, 16), (130, 48)])
def test_every_block_of_odd_sizes(rows, columns, device, monkeypatch):
    """Blocks skipped, done by the wrong program or stored past the end: few programs, so that each loops over tiles."""
    monkeypatch.setattr(triton_quantize, "PROGRAMS", 3)
    rule, error, column_weights = ScaleRule.four_over_six, ScaleError.hessian_diag, torch.linspace(0.1, 3, columns)
    weight, tensor_scale = hard_weight(rows, columns, torch.bfloat16, rule, True)
    expected = truth.quantize_to_nvfp4(weight, tensor_scale, rule, error, column_weights)
    for tile, warps in ((32, 1), (64, 1), (128, 4)):
        arguments = weight.to(device), tensor_scale.to(device), rule, error, column_weights
        found = triton_quantize.launch(*arguments, tile, warps).to("cpu")
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8))


def test_views(device):
    """Strides ignored, or a view that starts between two words read with aligned loads."""
    weight = gaussian(48, 64, torch.bfloat16)
    tensor_scale = tensor_scale_for(weight.float().abs().max(), ScaleRule.six, True)
    unaligned = torch.zeros(48 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(48, 64)
    unaligned.copy_(weight)
    base = weight.to(device)
    for view in (base.t(), base[:, 16:48], base[::3], unaligned):
        found = triton_quantize.quantize_to_nvfp4(view, tensor_scale.to(device), ScaleRule.six, ScaleError.mse).to(
            "cpu"
        )
        expected = truth.quantize_to_nvfp4(view.cpu(), tensor_scale, ScaleRule.six, ScaleError.mse)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8))


@triton.jit
def sixth_kernel(m, quotient, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(quotient + place, triton_quantize.sixth(tl.load(m + place)))


def test_sixth_is_an_ieee_division(device):
    """m / 6 off by one unit for some mantissa: all 2^23 of them, in [1, 2) and near 2^-110."""
    for exponent in (0, -110):
        bits = torch.arange(2**23, dtype=torch.int32) + ((127 + exponent) << 23)
        m = bits.view(torch.float32)
        quotient = torch.empty_like(m, device=device)
        tile = 2**20 if device == "cpu" else 1024
        sixth_kernel[(2**23 // tile,)](m.to(device), quotient, TILE=tile, enable_fp_fusion=False)
        assert torch.equal(quotient.cpu(), m / 6)


def test_inputs_that_cannot_be_quantized_are_named(device):
    """A wrong shape, dtype or missing diag(H) that would reach the kernel and read past the end."""
    scale, rule = torch.tensor(1.0, device=device), ScaleRule.four_over_six
    quantize = triton_quantize.quantize_to_nvfp4
    with pytest.raises(ValueError, match="24 columns"):
        quantize(torch.ones(2, 24, device=device), scale, rule, ScaleError.mse)
    with pytest.raises(ValueError, match="float64"):
        quantize(torch.ones(2, 32, device=device, dtype=torch.float64), scale, rule, ScaleError.mse)
    for column_weights in (None, torch.ones(16, device=device)):
        with pytest.raises(ValueError, match=r"hessian_diag needs \[32\]"):
            quantize(torch.ones(2, 32, device=device), scale, rule, ScaleError.hessian_diag, column_weights)


@pytest.mark.cuda
@NEEDS_GPU
def test_the_truth_has_the_same_bits_on_a_gpu():
    """torch on CUDA turns `x / 6.0` into x * (1 / 6.0): m = 56.999996 then gets block scale 10 and not 9."""
    weight = gaussian(17, 48)
    weight[0] = torch.linspace(-56.999996, 50, 48)
    for tensor_scale in (torch.tensor(1.0), torch.tensor(1.1 * 2.0**-14)):
        for rule in ScaleRule:
            expected = truth.quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse)
            found = truth.quantize_to_nvfp4(weight.cuda(), tensor_scale.cuda(), rule, ScaleError.mse).to("cpu")
            assert torch.equal(found.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8))
            assert torch.equal(found.codes, expected.codes)


@COMPILED
def test_cpu_tensors_get_the_truth():
    """A compiled kernel launched on CPU memory."""
    weight, tensor_scale = hard_weight(15, 48, torch.bfloat16, ScaleRule.sweep, True)
    arguments = weight, tensor_scale, ScaleRule.sweep, ScaleError.mse
    found, expected = triton_quantize.quantize_to_nvfp4(*arguments), truth.quantize_to_nvfp4(*arguments)
    assert torch.equal(found.codes, expected.codes)


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(("rule", "error"), [("six", "mse"), ("four_over_six", "mse"), ("sweep", "hessian_diag")])
def test_compiles_to_unfused_arithmetic(rule, error, capability):
    """Code that one architecture cannot build; contracted sums, flushed subnormals and approximate division."""
    signature = {
        "weight": "*bf16",
        "column_weights": "*fp32" if error == "hessian_diag" else "constexpr",
        "tensor_scale": "*fp32",
        "codes": "*i32",
        "block_scales": "*u8",
        "count": "i32",
        "blocks_per_row": "i32",
        **dict.fromkeys(("RULE", "ERROR", "TILE"), "constexpr"),
    }
    constants = {"column_weights": None, "RULE": rule, "ERROR": error, "TILE": 32}
    constants = {name: value for name, value in constants.items() if signature[name] == "constexpr"}
    pointers = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(triton_quantize.quantize_kernel, signature, constants, pointers)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\b(add|sub|mul)\.f32", ptx), "without .rn the assembler may contract to fma"
    assert ".ftz" not in ptx
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx)
    assert compiled.metadata.shared == 0, "a thread no longer holds whole blocks"


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
