"""The Triton merge of own keys against the plain-torch truth in fp64.

The tests of the kernels' results run on a GPU, or without one on the CPU under Triton's interpreter. The interpreter
has to be chosen before triton is imported, so `test_under_the_interpreter` runs this file in a process of its own.
"""

import pytest
import torch
import triton
from interpreter import COMPILED, ON_CPU, ON_GPU, in_a_child, run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from soar_prep.eagle3 import attention, triton_attention

# Unit roundoff; the interpreter cuts what it stores as bf16, which costs twice that.
UNIT = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def drawn(tokens: int, own: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, output0, grad laid out as the road has them, lse0 in the flash kernel's order, then own keys and values."""
    generator = torch.Generator().manual_seed(tokens * 100 + own)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = normal(2, heads, tokens, head_dim)
    output, grad = (normal(2, tokens, heads, head_dim).transpose(1, 2) for _ in range(2))
    lse = torch.randn(heads, 2, tokens, generator=generator).transpose(0, 1)
    return [q, output, grad, lse] + [normal(2, kv_heads, tokens, head_dim) for _ in range(2 * own)]


def forward_and_backward(module, q, output, grad, lse, *rest) -> list[Tensor]:
    """Merged output and lse, and from them, rounded to q's dtype, gradients of q, own keys and own values."""
    own_keys, own_values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    merged, merged_lse = module.merge_own(output, lse, q, own_keys, own_values)
    dq, dk, dv = module.own_backward(grad, q, own_keys, own_values, merged.to(q.dtype), merged_lse)
    return [merged, merged_lse, dq, *dk, *dv]


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize(
    ("tokens", "own", "heads", "kv_heads", "head_dim"),
    [(1, 1, 2, 2, 8), (15, 6, 9, 3, 64), (17, 2, 4, 1, 80), (130, 3, 6, 2, 128)],
)
def test_merge_and_gradients(
    tokens: int, own: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
):
    """Catches a wrong stride, head of a group, own key of another index, lanes beyond tokens or head_dim."""
    inputs = drawn(tokens, own, heads, kv_heads, head_dim, dtype)
    expected = forward_and_backward(attention, *(x.double() for x in inputs))
    got = forward_and_backward(triton_attention, *(x.to(device) for x in inputs))
    for number, (ours, truth) in enumerate(zip(got, expected, strict=True)):
        assert ours.dtype == (torch.float32 if number in (1, 2) else dtype)
        error = (ours.cpu().double() - truth).abs().max() / truth.abs().max()
        assert error < 4 * UNIT[dtype], f"{number}: {error}"  # the merged output is rounded before the backward pass


def test_scores_beyond_exp(device: str):
    """Catches exp(score) without its maximum, on either side."""
    inputs = drawn(15, 3, 4, 2, 64, torch.float32)
    inputs[0] *= 1000
    inputs[3] *= 500
    expected = forward_and_backward(attention, *(x.double() for x in inputs))
    got = forward_and_backward(triton_attention, *(x.to(device) for x in inputs))
    for ours, truth in zip(got, expected, strict=True):
        error = (ours.cpu().double() - truth).abs().max() / truth.abs().max()
        assert error < 1e-3  # a score of thousands has 2^-12 of an exponent in fp32


def test_layouts_are_kept(device: str):
    """Catches copies on the road: o_proj and the flash kernel want tokens before heads."""
    q, output, _, lse, *rest = (x.to(device) for x in drawn(17, 2, 4, 2, 64, torch.float32))
    merged, merged_lse = triton_attention.merge_own(output, lse, q, rest[:2], rest[2:])
    assert merged.stride() == output.stride()
    assert merged_lse.stride() == lse.stride()
    assert merged.transpose(1, 2).is_contiguous()


@COMPILED
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("kernel", ["merge_kernel", "query_kernel", "key_kernel"])
def test_compiles(kernel: str, capability: int):
    """Catches code that one architecture cannot build, and loads of two bytes where sixteen are in a row."""
    function = getattr(triton_attention, kernel)
    constants = {"HEADS": 9, "KV_HEADS": 3, "GROUP": 3, "HEAD_DIM": 64, "WIDTH": 64, "TILE": 32}
    tensors = {"lse": "*fp32", "merged_lse": "*fp32", "dq": "*fp32"}
    tensors |= dict.fromkeys(("grad", "q", "keys", "values", "output", "merged", "dk", "dv"), "*bf16")
    kinds = tensors | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("_stride") or name.split("_")[-1] in ("row", "head", "token")
    }
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert "ld.global.v4" in compiled.asm["ptx"]


@in_a_child
def test_under_the_interpreter():
    """Everything above that needs no compiler, on a machine without a GPU."""
    run_interpreted(__file__)
