from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_patch import nvfp4
from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import tensor_scale_for
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_to_nvfp4
from soar_prep.settings import ScaleError, ScaleRule

METHOD = SimpleNamespace(quant_config=SimpleNamespace(is_awq=False), quant_mode="w4a4")


def packed(rows: int, columns: int, tensor_scale: Tensor | None = None) -> NVFP4Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
    rule = ScaleRule.four_over_six
    if tensor_scale is None:
        tensor_scale = tensor_scale_for(weight.abs().max(), rule, power_of_two=False)
    return quantize_to_nvfp4(weight, tensor_scale, rule, ScaleError.mse)


def loaded(*members: NVFP4Tensor) -> SimpleNamespace:
    """A layer of SGLang's after loading: rows of the fused members one below another, one scalar for each."""
    return SimpleNamespace(
        weight=torch.nn.Parameter(torch.cat([m.codes for m in members]), requires_grad=False),
        weight_scale=torch.nn.Parameter(torch.cat([m.block_scales for m in members]), requires_grad=False),
        weight_scale_2=torch.stack([m.tensor_scale for m in members]),
    )


def never(*arguments: Any) -> Any:
    raise AssertionError("SGLang's own was called")


@pytest.mark.parametrize("rows", [1, 15, 17, 48, 49, 130])
@pytest.mark.parametrize("members", [1, 3], ids=["one", "fused"])
@pytest.mark.parametrize("outputs", [32, 37])
def test_equals_the_dequantized_product(rows: int, members: int, outputs: int):
    """Catches a fused group whose members are mixed up, a scale left out, rows lost on either side of the crossover."""
    first = packed(outputs, 48)
    weights = [first, *(packed(outputs + n, 48, first.tensor_scale) for n in range(1, members))]
    layer = loaded(*weights)
    nvfp4.keep_weights(never, METHOD, layer)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ torch.cat([w.dequantize().double() for w in weights]).T
    y = nvfp4.multiply(never, METHOD, layer, x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_bias_batches_and_bf16():
    """Catches a bias left out, or added before the rounding of a product that is not fp32; shapes of a batch."""
    weight = packed(32, 48)
    layer, bias = loaded(weight), torch.randn(32).bfloat16()
    nvfp4.keep_weights(never, METHOD, layer)
    x = torch.randn(2, 5, 48).bfloat16()
    y = nvfp4.multiply(never, METHOD, layer, x, bias)
    expected = (x.float() @ weight.dequantize().T).bfloat16() + bias
    assert y.shape == (2, 5, 32)
    torch.testing.assert_close(y, expected)
    assert nvfp4.multiply(never, METHOD, layer, x[:, :0]).shape == (2, 0, 32)


def test_no_second_copy():
    """Catches weights that are in memory twice once they are loaded."""
    layer = loaded(packed(32, 48))
    nvfp4.keep_weights(never, METHOD, layer)
    assert layer.nvfp4_weight.codes.data_ptr() == layer.weight.data_ptr()
    assert layer.nvfp4_weight.block_scales.data_ptr() == layer.weight_scale.data_ptr()


def test_what_is_left_to_sglang():
    """Catches files that the kernel would read wrong: AWQ's inputs are scaled first, tuples are packed already."""
    called = []
    awq = SimpleNamespace(quant_config=SimpleNamespace(is_awq=True), quant_mode="w4a4")
    layer = loaded(packed(32, 48))
    nvfp4.keep_weights(lambda *arguments: called.append(arguments), awq, layer)
    nvfp4.multiply(lambda *arguments: called.append(arguments), awq, layer, torch.ones(1, 48))
    assert [len(arguments) for arguments in called] == [2, 4]


def test_crossover(monkeypatch: pytest.MonkeyPatch):
    """Catches a crossover that is misread and then silently another one."""
    nvfp4.crossover.cache_clear()
    assert nvfp4.crossover() == 48
    for value, found in (("0", 0), ("96", 96)):
        monkeypatch.setenv("SOAR_CROSSOVER", value)
        nvfp4.crossover.cache_clear()
        assert nvfp4.crossover() == found
    monkeypatch.setenv("SOAR_CROSSOVER", "many")
    nvfp4.crossover.cache_clear()
    with pytest.raises(UserError, match="SOAR_CROSSOVER=many: expected a number of tokens"):
        nvfp4.crossover()
    monkeypatch.undo()
    nvfp4.crossover.cache_clear()
