from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from torch import Tensor

from soar_prep.fouroversix.blocks import candidate_scales, tensor_scale_for
from soar_prep.fouroversix.e2m1 import E2M1_VALUES, pack_codes, unpack_codes
from soar_prep.fouroversix.tensor import (
    NVFP4Tensor,
    input_scale_for,
    quantize_activations,
    quantize_to_nvfp4,
    round_activations,
    round_to_nvfp4,
)
from soar_prep.settings import ScaleError, ScaleRule

GOLDEN = load_file(Path(__file__).parent.parent / "golden" / "fouroversix.safetensors")
CASES = sorted({name.split(".")[0] for name in GOLDEN})
RULES = {
    "static_6": (ScaleRule.six, ScaleError.mse),
    "mse": (ScaleRule.four_over_six, ScaleError.mse),
    "mae": (ScaleRule.four_over_six, ScaleError.mae),
    "abs_max": (ScaleRule.four_over_six, ScaleError.abs_max),
}
# Blocks whose two candidates tie so closely that the order of fp32 additions decides; all others agree bitwise.
TIES = {("gaussian_bf16", "mae"): 1, ("gaussian_bf16", "abs_max"): 1, ("zeros_bf16", "mae"): 2}


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def exact_error(blocks: Tensor, scales: Tensor, tensor_scale: Tensor, rule: str) -> Tensor:
    """Error of blocks [n, 16] under scales [n], all in float64."""
    grid = torch.tensor(E2M1_VALUES).double()
    step = (scales.double() * tensor_scale.double())[:, None]
    magnitude = blocks.double().abs()
    d = (grid[(magnitude[..., None] / step[..., None] - grid).abs().argmin(-1)] * step - magnitude).abs()
    return {"mse": (d * d).sum(-1), "mae": d.sum(-1), "abs_max": d.amax(-1)}[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_the_authors(case: str, rule: str):
    """Catches any deviation from the FourOverSix authors' package, down to the bit.

    Two differences are meant: a block scale is never zero, and a tie (proved here in float64) may fall either way.
    """
    weight = GOLDEN[f"{case}.input"]
    theirs = GOLDEN[f"{case}.{rule}.block_scales"]
    tensor_scale = tensor_scale_for(GOLDEN[f"{case}.amax"], RULES[rule][0], power_of_two=False)
    ours = quantize_to_nvfp4(weight, tensor_scale, *RULES[rule])

    is_zero = theirs.float() == 0
    assert (ours.block_scales[is_zero].float() == 2.0**-9).all()
    is_tie = (ours.block_scales.view(torch.uint8) != theirs.view(torch.uint8)) & ~is_zero
    assert is_tie.sum() == TIES.get((case, rule), 0)
    if is_tie.any():
        blocks = weight.float().unflatten(-1, (-1, 16))[is_tie]
        errors = [exact_error(blocks, s[is_tie], tensor_scale, rule) for s in (ours.block_scales, theirs)]
        # 16 terms, each rounded to fp32 a few times: 2^-20 of the sum
        torch.testing.assert_close(errors[0], errors[1], rtol=2**-20, atol=0)

    same = ~is_tie & ~is_zero
    codes, their_codes = (unpack_codes(c).unflatten(-1, (-1, 16)) for c in (ours.codes, GOLDEN[f"{case}.{rule}.codes"]))
    assert torch.equal(codes[same], their_codes[same])


def test_dequantize_by_hand():
    """Catches a scale applied to the wrong block, and the reciprocal of the tensor scale."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, [0, 15, 16, 31]] = torch.tensor([7, 9, 7, 15], dtype=torch.uint8)  # 6, -0.5, 6, -6
    scales = torch.tensor([[2.0, 448.0]]).to(torch.float8_e4m3fn)
    weight = NVFP4Tensor(pack_codes(codes), scales, torch.tensor(0.25)).dequantize()
    assert weight.dtype is torch.float32
    assert {i: v for i, v in enumerate(weight[0].tolist()) if v} == {0: 3.0, 15: -0.25, 16: 672.0, 31: -672.0}


def test_bf16_holds_every_product_under_a_power_of_two():
    """Catches an inexact decode: all 16 codes under all 126 block scales, in bf16 and fp32."""
    codes = pack_codes(torch.arange(16, dtype=torch.uint8).repeat(126, 1))
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = NVFP4Tensor(codes, scales, torch.tensor(2.0**-10))
    assert torch.equal(weight.dequantize(torch.bfloat16).float(), weight.dequantize())
    expected = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)]).double() * scales.double() * 2.0**-10
    assert torch.equal(weight.dequantize().double(), expected)


@pytest.mark.parametrize("rule", [ScaleRule.six, ScaleRule.four_over_six])
@pytest.mark.parametrize("rows", [1, 15, 17, 130])
def test_quantizing_twice_is_quantizing_once(rows: int, rule: ScaleRule):
    """Catches a grid that does not contain its own values. (The sweep may take scales outside its second window.)"""
    weight = gaussian(rows, 64, seed=rows)
    tensor_scale = tensor_scale_for(weight.abs().max(), rule, power_of_two=True)
    once = quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse).dequantize()
    twice = quantize_to_nvfp4(once, tensor_scale, rule, ScaleError.mse).dequantize()
    assert torch.equal(once, twice)


@pytest.mark.parametrize("rule", list(ScaleRule))
def test_rounding_under_given_scales_keeps_codes(rule: ScaleRule):
    """Catches codes that change when a written weight is rounded again under its own scales."""
    weight = gaussian(17, 64, seed=5).bfloat16()
    tensor_scale = tensor_scale_for(weight.abs().max(), rule, power_of_two=True)
    once = quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse)
    again = round_to_nvfp4(once.dequantize(), once.block_scales, tensor_scale)
    assert torch.equal(once.codes, again.codes)


def test_error_falls_from_six_to_four_over_six_to_sweep():
    """Catches a search that does not search: each wider candidate set must lower the mean squared error."""
    weight = gaussian(130, 256, seed=6)
    errors = []
    for rule in (ScaleRule.six, ScaleRule.four_over_six, ScaleRule.sweep):
        # one tensor scale for all, so that the candidate sets contain each other
        tensor_scale = tensor_scale_for(weight.abs().max(), ScaleRule.sweep, power_of_two=True)
        errors.append(
            (quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse).dequantize() - weight).square().mean()
        )
    assert errors[0] > 1.1 * errors[1] > 1.1 * errors[2]


@pytest.mark.parametrize("shape", [(16,), (1, 32), (2, 17, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_weights_under_six(shape: tuple[int, ...], dtype: torch.dtype):
    """Catches an activation quantizer of another grid, or one that loses shape or dtype."""
    x = gaussian(1, torch.Size(shape).numel(), seed=8).view(shape).to(dtype)
    input_scale = input_scale_for(x.abs().max())
    got = round_activations(x, input_scale)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    flat = x.reshape(-1, shape[-1])
    expected = quantize_to_nvfp4(flat, input_scale, ScaleRule.six, ScaleError.mse).dequantize(dtype)
    assert torch.equal(got.reshape(flat.shape), expected)


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
def test_activations_are_those_of_compressed_tensors(spread: float):
    """Catches another activation grid than servers use, within and beyond the calibrated range.

    In fp32, because compressed-tensors computes scales in the dtype of x, and bf16 moves one in forty by a code.
    """
    x = spread * gaussian(130, 64, seed=9)
    input_scale = input_scale_for(torch.tensor(3.0))
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    blocks, global_scale = x.unflatten(-1, (-1, 16)), 1 / input_scale.reshape(1)
    scales, zero_points = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
    expected = fake_quantize(x, scales, zero_points, args, global_scale=global_scale)
    # the factors are multiplied in another order
    torch.testing.assert_close(round_activations(x, input_scale), expected, rtol=2**-22, atol=0)


def test_activations_beyond_the_calibrated_range():
    """Catches an overflow to NaN above 6 * 448 * input_scale, and a division by a scale that rounded to zero."""
    x = torch.zeros(1, 48)
    x[0, :16], x[0, 16:32] = 1e6, 1e-4
    got = round_activations(x, torch.tensor(1.0))
    assert got[0, ::16].tolist() == [6 * 448.0, 0.0, 0.0]


@pytest.mark.parametrize(("largest", "expected"), [(2688.0, 1.0), (0.0, torch.finfo(torch.float32).tiny)])
def test_input_scale_by_hand(largest: float, expected: float):
    """Catches another denominator than 6 * 448, and a zero scale for an input that was always zero."""
    assert input_scale_for(torch.tensor(largest, dtype=torch.bfloat16)).item() == pytest.approx(expected, rel=1e-6)


def test_candidates_of_a_zero_tensor_are_finite():
    """Catches NaN or infinite scales for a linear whose weights are all zero."""
    tensor_scale = tensor_scale_for(torch.tensor(0.0), ScaleRule.sweep, power_of_two=False)
    for scales in candidate_scales(torch.zeros(1, 1, 16), tensor_scale, ScaleRule.sweep):
        assert torch.isfinite(scales.float()).all()
    zero = quantize_to_nvfp4(torch.zeros(3, 16), tensor_scale, ScaleRule.sweep, ScaleError.mse)
    assert torch.equal(zero.dequantize(), torch.zeros(3, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_codes_are_what_rounding_gives(dtype: torch.dtype):
    """Catches codes and rounded floats that drift apart: one trains, the other serves."""
    x = gaussian(17, 48, 1) * torch.logspace(-6, 2, 48)
    x[3] = 0
    for scale in (0.01, 0.03, 1e-6):
        input_scale = torch.tensor(scale)
        found = quantize_activations(x.to(dtype), input_scale)
        assert torch.equal(found.dequantize(dtype), round_activations(x.to(dtype), input_scale))


def test_operand_is_the_weight_over_its_tensor_scale():
    """Catches a tensor scale left in, which no product of a server has; exact in every dtype that holds it."""
    weight = gaussian(5, 32, 2)
    quantized = quantize_to_nvfp4(weight, torch.tensor(0.0007), ScaleRule.six, ScaleError.mse)
    assert torch.equal(quantized.operand() * quantized.tensor_scale, quantized.dequantize())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(quantized.operand(dtype).float(), quantized.operand())
