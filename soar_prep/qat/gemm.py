"""y = x W^T on NVFP4 operands, as a server computes it: what QAT trains through.

x [M, K] activations   W [N, K] weight   e [.., K] E2M1 values   s [.., K/16] E4M3 block scales   t, u tensor scales

    W4A4    y = t u  sum_k (e_x s_x)(e_w s_w)     x an NVFP4Tensor
    W4A16   y = t    sum_k x (e_w s_w)            x in bf16, fp16 or fp32

Every e s is exact in bf16, and so is its product with another one, or with a bf16, in fp32; sums are in fp32; the
tensor scales come in once, at the end, in fp32. Ordinary fake quantization multiplies bf16 roundings of e s t instead:
nearly every product is then another one. Where t is a power of two the two agree, bit for bit.
Source: OCP Microscaling Formats v1.0; tensor scales as in NVIDIA's NVFP4.
"""

import torch
from torch import Tensor

from soar_prep.fouroversix.tensor import NVFP4Tensor


def matmul(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of weight [N, K]: [M, N], rounded once to dtype. The truth, on any device."""
    operand, scale = x, weight.tensor_scale
    if isinstance(x, NVFP4Tensor):
        operand, scale = x.operand(), scale * x.tensor_scale
    assert isinstance(operand, Tensor)
    return (operand.float() @ weight.operand().T * scale).to(dtype)
