import pytest
import torch
from torch import Tensor

from soar_prep.fouroversix.e2m1 import pack_codes
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_activations, quantize_to_nvfp4
from soar_prep.qat.gemm import matmul
from soar_prep.settings import ScaleError, ScaleRule


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantized(rows: int, columns: int, tensor_scale: float) -> NVFP4Tensor:
    """A weight with both four-blocks and six-blocks."""
    weight = 0.02 * gaussian(rows, columns, rows)
    return quantize_to_nvfp4(weight, torch.tensor(tensor_scale), ScaleRule.four_over_six, ScaleError.mse)


def test_by_hand():
    """Catches a scale forgotten, used twice or taken as a divisor, and operands that are not transposed."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, :3] = torch.tensor([2, 12, 7])  # 1, -2, 6
    scales = torch.tensor([[3.0]]).to(torch.float8_e4m3fn)
    weight = NVFP4Tensor(pack_codes(codes), scales, torch.tensor(0.5))
    x = torch.zeros(2, 16)
    x[0, :4], x[1, 0] = torch.tensor([10.0, 1, 0.5, 99]), -4
    assert matmul(x, weight, torch.float32).tolist() == [[(10 - 2 + 3) * 1.5], [-6]]
    packed = NVFP4Tensor(weight.codes, weight.block_scales, torch.tensor(0.25))
    assert matmul(packed, weight, torch.float32).tolist() == [[(1 + 4 + 36) * 9 * 0.125]]


@pytest.mark.parametrize("rows", [1, 15, 17, 130])
@pytest.mark.parametrize("tensor_scale", [2.0**-13, 1.7e-4])
def test_it_is_the_product_of_what_was_stored(rows: int, tensor_scale: float):
    """Catches a rounding in between: float64 on the dequantized operands is the reference."""
    x, weight = gaussian(rows, 144, 3).bfloat16(), quantized(17, 144, tensor_scale)
    packed = quantize_activations(x, torch.tensor(0.0017))
    for operand, dense in ((x, x.double()), (packed, packed.operand().double() * packed.tensor_scale.double())):
        expected = dense @ (weight.operand().double() * weight.tensor_scale.double()).T
        found = matmul(operand, weight, torch.float32)
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_folded_power_of_two_is_the_same_product():
    """Catches the belief that training through dequantized weights equals the server's product for any tensor scale.

    It does, bit for bit, under a power of two; under another scale it does not.
    """
    x = gaussian(130, 256, 4).bfloat16().float()

    def agrees(tensor_scale: float) -> bool:
        weight = quantized(64, 256, tensor_scale)
        folded = weight.dequantize(torch.bfloat16).float()
        return torch.equal(matmul(x, weight, torch.bfloat16), (x @ folded.T).bfloat16())

    assert agrees(2.0**-13)
    assert not agrees(1.7e-4)
