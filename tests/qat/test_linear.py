import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from soar_prep.fouroversix.tensor import quantize_activations
from soar_prep.qat.gemm import matmul
from soar_prep.qat.linear import (
    NVFP4Linear,
    fused_groups,
    input_scale_of,
    nvfp4_linears,
    quantize_weights,
    rounded_weights,
    to_nvfp4_linears,
)
from soar_prep.settings import Activations, ScaleError, ScaleRule

RULE, ERROR = ScaleRule.four_over_six, ScaleError.mse
NAMES = ("q_proj", "k_proj", "o_proj")


class Block(nn.Module):
    """k's weights are 64 times q's: with a tensor scale of its own q would have another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(48, 48, bias=False) for _ in NAMES)
        with torch.no_grad():
            self.k_proj.weight *= 64

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) + self.k_proj(x))


def block(activations: Activations = Activations.none, is_rounded: bool = True) -> Block:
    model = Block()
    to_nvfp4_linears(model, NAMES, activations)
    for linear in nvfp4_linears(model).values():
        linear.is_rounded, linear.input_scale = is_rounded, torch.tensor(2.0**-9)
    return model


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_the_product_of_the_packed_operands(activations: Activations, dtype: torch.dtype):
    """Catches training under other numbers than those served: a scale applied in another place, a rounding left out."""
    weight = nn.Parameter(torch.randn(33, 48, generator=torch.Generator().manual_seed(2)) / 50)
    stored = quantize_weights({"up_proj": weight}, RULE, ERROR)["up_proj"]
    linear = NVFP4Linear(nn.Parameter(stored.dequantize(dtype)), activations)
    linear.is_rounded, linear.input_scale = True, torch.tensor(2.0**-9)
    x = inputs(dtype)
    served: Tensor | object = x
    if activations is Activations.static:
        served = quantize_activations(x, linear.input_scale)
    elif activations is Activations.dynamic:
        served = quantize_activations(x, input_scale_of(x.abs().amax().float()))
    expected = matmul(served, stored, dtype)
    if dtype is torch.float32:
        assert torch.equal(linear(x), expected)
    else:  # sums of another order before the one rounding
        torch.testing.assert_close(linear(x), expected, rtol=2**-7, atol=1e-3)


def test_the_gradient_goes_straight_through():
    """Catches a gradient that is lost in a rounding, masked at it, or taken at the master weights."""
    model, x = block(Activations.static), inputs(torch.float32).requires_grad_()
    functional_call(model, rounded_weights(model, torch.float32, RULE, ERROR), (x,)).square().sum().backward()

    plain, y = Block(), inputs(torch.float32).requires_grad_()
    masters = {name: linear.weight for name, linear in nvfp4_linears(model).items()}
    with torch.no_grad():
        for name, stored in quantize_weights(dict(masters), RULE, ERROR).items():
            getattr(plain, name).weight.copy_(stored.dequantize(torch.float32))

    def through(t: Tensor) -> Tensor:
        return t + (quantize_activations(t.detach(), torch.tensor(2.0**-9)).operand() * 2.0**-9 - t).detach()

    hidden = plain.q_proj(through(y)) + plain.k_proj(through(y))
    plain.o_proj(through(hidden)).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, master in masters.items():
        assert master.grad is not None
        torch.testing.assert_close(master.grad, getattr(plain, name).weight.grad)


def test_gradients_reach_fp32_masters_from_bf16():
    """Catches masters that are rounded, or gradients in another dtype than the optimizer's."""
    model = block()
    functional_call(model, rounded_weights(model, torch.bfloat16, RULE, ERROR), (inputs(),)).float().sum().backward()
    for linear in nvfp4_linears(model).values():
        assert linear.weight.dtype == torch.float32
        assert linear.weight.grad is not None
        assert linear.weight.grad.dtype == torch.float32


def test_what_a_server_fuses_shares_a_tensor_scale():
    """Catches q and k rounded each by its own scale: the server has one for both, and takes the largest."""
    model = block()
    stored = quantize_weights({name: getattr(model, name).weight for name in NAMES}, RULE, ERROR)
    scales = {name: float(weight.tensor_scale) for name, weight in stored.items()}
    assert scales["q_proj"] == scales["k_proj"] > scales["o_proj"]
    assert all(torch.frexp(torch.tensor(scale)).mantissa == 0.5 for scale in scales.values())  # a power of two
    groups = fused_groups(["a.q_proj", "a.k_proj", "b.q_proj", "b.gate_proj", "b.up_proj", "lm_head"])
    assert groups == [["a.q_proj", "a.k_proj"], ["b.q_proj"], ["b.gate_proj", "b.up_proj"], ["lm_head"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_changes_before_the_turn(dtype: torch.dtype):
    """Catches a BF16 phase that is rounded already, and inputs that are."""
    model, plain = block(Activations.static, is_rounded=False), Block()
    assert model.state_dict().keys() == plain.state_dict().keys()
    found = functional_call(model, rounded_weights(model, dtype, RULE, ERROR), (inputs(dtype),))
    assert torch.equal(found, plain.to(dtype)(inputs(dtype)))


def test_torch_compile_sees_one_graph():
    """Catches a layer that torch.compile breaks in two, or whose gradient it loses."""
    model = block(Activations.static)
    grads = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(inputs(torch.float32)).square().sum().backward()
        grads.append([linear.weight.grad for linear in nvfp4_linears(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "layer", [nn.Linear(48, 48), nn.Linear(40, 48, bias=False), nn.LayerNorm(48)], ids=["bias", "width", "norm"]
)
def test_layers_that_cannot_be(layer: nn.Module):
    """Catches a bias dropped without a word, and a last block that is cut."""
    with pytest.raises(ValueError, match=r"^inner: expected a linear layer without bias"):
        to_nvfp4_linears(nn.ModuleDict({"inner": layer}), ["inner"], Activations.none)
