"""The exact emulation against the plain-torch truth and against float64.

As the quantizer's tests: on a GPU, or on the CPU under Triton's interpreter in a process of its own.
"""

import pytest
import torch
import triton
from interpreter import COMPILED, NEEDS_GPU, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.fouroversix.e2m1 import pack_codes
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_activations, quantize_to_nvfp4
from soar_prep.qat import gemm, product, triton_gemm
from soar_prep.settings import ScaleError, ScaleRule

SCALES = (2.0**-13, 1.7e-4)
OF_LARGEST = 2e-6  # of the largest |y|: what the order of fp32 sums may change, see triton_gemm.py


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request, monkeypatch) -> str:
    if request.param == "cpu":  # which has no bf16 product with an fp32 result
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    return request.param


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantized(rows: int, columns: int, tensor_scale: float) -> NVFP4Tensor:
    """A weight with both four-blocks and six-blocks, zeros and subnormal block scales."""
    weight = 0.02 * gaussian(rows, columns, rows)
    weight.view(-1, 16)[::7] *= 2.0**-9
    weight.view(-1, 16)[3::11] = 0
    return quantize_to_nvfp4(weight, torch.tensor(tensor_scale), ScaleRule.four_over_six, ScaleError.mse)


def exact(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor) -> Tensor:
    """The product in float64."""
    # not `dequantize`, which rounds under a tensor scale that is no power of two
    dense = x.operand().double() * x.tensor_scale.double() if isinstance(x, NVFP4Tensor) else x.double()
    return dense @ (weight.operand().double() * weight.tensor_scale.double()).T


def assert_rounded_once(found: Tensor, expected: Tensor, message: str) -> None:
    """`found` is `expected` (float64) within OF_LARGEST, then rounded to found's dtype."""
    slack = OF_LARGEST * expected.abs().max()
    low, high = ((expected + side * slack).to(found.dtype) for side in (-1, 1))
    outside = (found < low) | (found > high) | found.isnan()
    assert not outside.any(), f"{message}: {outside.sum()} of {found.numel()}, first at {outside.nonzero()[0].tolist()}"


# Every tile of x and the road above it; N odd, K with a tail of one block, and more than one step.
SHAPES = [(1, 33, 144), (16, 31, 528), (17, 5, 272), (48, 35, 16), (64, 64, 144), (65, 17, 48), (130, 33, 144)]


@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_agrees_with_float64(rows, outputs, columns, device):
    """A column multiplied with the wrong one, a block scale of the neighbour, a tail, a second rounding to bf16."""
    for tensor_scale in SCALES:
        weight = quantized(outputs, columns, tensor_scale)
        x = gaussian(rows, columns, 3)
        for operand in (x.bfloat16(), x.half(), quantize_activations(x, torch.tensor(0.0017))):
            # The interpreter truncates to bf16.
            for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])):
                found = triton_gemm.matmul(operand.to(device), weight.to(device), dtype).cpu()
                assert (found.dtype, found.shape) == (dtype, (rows, outputs))
                kind = operand.dtype if isinstance(operand, Tensor) else "NVFP4"
                assert_rounded_once(found, exact(operand, weight), f"x {kind}, t {tensor_scale}, y {dtype}")


def test_every_code_under_every_scale(device):
    """A code or a block scale, subnormals among them, that decodes wrong in bf16 or fp16: all 16 times 126, bitwise."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    codes = pack_codes(torch.arange(16, dtype=torch.uint8).expand(126, 16))
    weight = NVFP4Tensor(codes, scales, torch.tensor(1.0))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(triton_gemm.write_operand(weight.to(device), dtype).cpu(), weight.operand(dtype))
        found = triton_gemm.matmul(torch.eye(16, dtype=dtype, device=device), weight.to(device), torch.float32)
        assert torch.equal(found.cpu(), weight.operand().T)


def test_views_and_empty_inputs(device):
    """Strides ignored, 64-bit loads from an address that is no multiple of eight, and M = 0."""
    weight = quantized(33, 48, 0.5)
    base = gaussian(48, 64, 5).bfloat16().to(device)
    unaligned = torch.zeros(17 * 48 + 1, dtype=torch.bfloat16, device=device)[1:].view(17, 48)
    unaligned.copy_(base[:17, :48])
    part = NVFP4Tensor(weight.codes.to(device)[1:, :16], weight.block_scales.to(device)[1:, :2], weight.tensor_scale)
    part = NVFP4Tensor(part.codes, part.block_scales, part.tensor_scale.to(device))
    for x, w in ((base.t()[:, :48], weight), (base[::3, 16:], weight), (unaligned, weight), (base[:5, :32], part)):
        found = triton_gemm.matmul(x, w.to(device), torch.float32).cpu()
        assert_rounded_once(found, exact(x.cpu(), w.to("cpu")), f"{list(x.shape)}")
    assert triton_gemm.matmul(base[:0, :48], weight.to(device), torch.float16).shape == (0, 33)


def test_inputs_that_cannot_be_multiplied_are_named(device):
    """A shape that reads past the end; an x that bf16 would round without a word; a gradient lost."""
    weight = quantized(3, 32, 1.0).to(device)
    x = torch.ones(2, 32, device=device)
    with pytest.raises(ValueError, match=r"x is torch.float32; expected bfloat16, float16 or NVFP4"):
        triton_gemm.matmul(x, weight, torch.float32)
    with pytest.raises(ValueError, match=r"x is \[2, 16\]; expected \[M, 32\]"):
        triton_gemm.matmul(x[:, :16].bfloat16(), weight, torch.float32)
    with pytest.raises(ValueError, match=r"x is \[1, 8\]; expected \[M, 16\]"):
        triton_gemm.matmul(quantized(1, 16, 1.0).to(device), weight, torch.float32)
    with pytest.raises(ValueError, match="requires a gradient"):
        triton_gemm.matmul(x.bfloat16().requires_grad_(), weight, torch.float32)


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("rows", [1, 48, 300])
def test_same_bf16_bits_as_the_truth_on_a_gpu(rows):
    """Sums that lose bits in the tensor cores, or bf16 partial sums, at K = 4096."""
    weight, x = quantized(1025, 4096, 1.7e-4).to("cuda"), gaussian(rows, 4096, 6).cuda()
    for operand in (x.bfloat16(), quantize_activations(x, torch.tensor(0.0017, device="cuda"))):
        found = triton_gemm.matmul(operand, weight, torch.bfloat16)
        different = (found != gemm.matmul(operand, weight, torch.bfloat16)).sum().item()
        assert different <= found.numel() // 1000, different
        assert_rounded_once(found, exact(operand, weight), f"M {rows}")


@COMPILED
def test_the_product_by_device(monkeypatch):
    """FP4 units taken for a bf16 x, or on a GPU without them; a kernel for fp32, for a gradient or on the CPU."""
    from soar_prep.qat import native

    weight, x = quantized(3, 32, 1.0), gaussian(2, 32, 1)
    packed, cuda = quantize_activations(x, torch.tensor(0.01)), torch.device("cuda")
    assert product.matmul_for(packed, torch.device("cpu")) is gemm.matmul
    for major, w4a16, w4a4 in (
        (7, gemm, gemm),
        (8, triton_gemm, triton_gemm),
        (9, triton_gemm, triton_gemm),
        (10, triton_gemm, native),
        (12, triton_gemm, native),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert product.matmul_for(x.half(), cuda) is w4a16.matmul
        assert product.matmul_for(packed, cuda) is w4a4.matmul
        assert product.matmul_for(x, cuda) is gemm.matmul
        assert product.matmul_for(x.bfloat16().requires_grad_(), cuda) is gemm.matmul
    expected = gemm.matmul(x, weight, torch.float16)
    assert torch.equal(product.matmul(x, weight, torch.float16), expected)
    assert torch.equal(triton_gemm.matmul(packed, weight, torch.float16), gemm.matmul(packed, weight, torch.float16))


@COMPILED
@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_packed_decoding(capability, is_bf16):
    """Code that one architecture cannot build, flushed subnormals, W decoded twice, shared memory above sm_120's."""
    kind = "bf16" if is_bf16 else "f16"
    for block_m, block_k in {16: 256, 64: 128}.items():
        signature = {
            **{"x": "*i64", "codes": "*i32", "block_scales": "*u8", "scale": "*fp32", "y": "*bf16"},
            **dict.fromkeys(("rows", "outputs", "columns"), "i32"),
            **dict.fromkeys(("IS_BF16", "BLOCK_M", "BLOCK_N", "BLOCK_K", "ON_CPU"), "constexpr"),
        }
        constants = {"IS_BF16": is_bf16, "BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": block_k, "ON_CPU": False}
        divisible = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 4, 7)}
        source = ASTSource(triton_gemm.matmul_kernel, signature, constants, divisible)
        options = {"num_warps": 4, "num_stages": 3}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx = compiled.asm["ptx"]
        assert ".ftz" not in ptx
        assert compiled.metadata.shared <= 99 * 1024
        if block_m == 16 or capability == 90:
            assert ptx.count(f"fma.rn.{kind}x2") == 32 * block_k // (
                128 * 2
            )  # pairs of W's tile, for each of 128 threads
        assert f".f32.{kind}.{kind}" in ptx, "products are not of 16-bit operands, summed in fp32"


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
