"""The product on FP4 units: that the instruction is in the code, and on a GPU that has it, the result."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.fouroversix.tensor import quantize_activations, quantize_to_nvfp4
from soar_prep.qat import native
from soar_prep.qat.product import FP4_CAPABILITIES
from soar_prep.settings import ScaleError, ScaleRule

COMPILED = pytest.mark.skipif(not isinstance(native.native_kernel, triton.runtime.JITFunction), reason="interpreted")
HAS_FP4 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in FP4_CAPABILITIES
INSTRUCTIONS = {
    120: "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 ",
    100: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X ",
}


@COMPILED
@pytest.mark.parametrize("divisible", [True, False])
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_compiles_to_the_fp4_instruction(capability: int, divisible: bool):
    """Catches a silent fall back to bf16 products, scales taken as powers of two (MXFP4) or for blocks of 32."""
    signature = {
        **{"x": "*u8", "x_scales": "*fp8e4nv", "codes": "*u8", "block_scales": "*fp8e4nv", "scale": "*fp32"},
        **{"y": "*bf16", "rows": "i32", "outputs": "i32", "half": "i32"},
        **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), "constexpr"),
    }
    constants = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
    places = [*range(6), *([8] if divisible else [])]  # K a multiple of 32, or of 16 alone
    source = ASTSource(native.native_kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in places})
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": 8, "num_stages": 3}
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    assert INSTRUCTIONS[capability] in ptx
    assert "bf16.bf16" not in ptx
    assert "kind::f16" not in ptx
    assert compiled.metadata.shared <= 99 * 1024


def test_an_unpacked_input_is_refused():
    """Catches a bf16 x whose bytes are read as codes."""
    weight = quantize_to_nvfp4(torch.ones(2, 32), torch.tensor(1.0), ScaleRule.six, ScaleError.mse)
    with pytest.raises(ValueError, match=r"x is a tensor of torch.bfloat16; expected NVFP4"):
        native.matmul(torch.ones(2, 32).bfloat16(), weight, torch.float32)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_FP4, reason="needs a GPU with FP4 units, sm_100 or sm_120")
@pytest.mark.parametrize("rows", [1, 17, 64, 130, 300])
def test_agrees_with_float64(rows: int):
    """Catches operands whose K is packed the other way, scales of other rows, tails, N odd, and a lost tensor scale."""
    generator = torch.Generator().manual_seed(rows)
    for outputs, columns in ((129, 144), (33, 16), (257, 1040)):
        weight = quantize_to_nvfp4(
            torch.randn(outputs, columns, generator=generator) * 0.02,
            torch.tensor(1.7e-4),
            ScaleRule.four_over_six,
            ScaleError.mse,
        )
        x = quantize_activations(torch.randn(rows, columns, generator=generator), torch.tensor(0.0017))
        expected = x.operand().double() @ weight.operand().double().T * weight.tensor_scale.double()
        expected *= x.tensor_scale.double()
        found = native.matmul(x.to("cuda"), weight.to("cuda"), torch.float32).cpu()
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
