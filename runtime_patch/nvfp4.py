"""NVFP4 linears by the number of tokens M: few by a W4A16 kernel, more by W4A4 where the GPU has FP4 units.

    M <= crossover   weights decoded in the kernel as they are read, activations as they are
    above            SGLang's own W4A4 on sm_100 and sm_120; elsewhere weights decoded to BF16 once, then cuBLAS
    on a CPU         plain torch

The kernel reads codes and block scales as the ModelOpt file has them, so no second copy of the codes is made. sm_100
and sm_120 hold the block scales twice, plain and swizzled for W4A4: 0.5 bits a weight beside 4.5. M is fixed within a
CUDA graph, and so is the choice.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.qat import gemm
from soar_prep.qat.product import has_fp4_units

CROSSOVER = 48  # tokens: above, W4A4 was the faster one on RTX PRO 6000D
ALIGNMENT = 32  # to which SGLang pads rows and columns


def keep_weights(original: Callable[..., None], method: Any, layer: Any) -> None:
    """After loading: the weight as the file has it, under `layer.nvfp4_weight`; nothing is repacked without need.

    SGLang fuses q, k, v and gate, up with the largest of their tensor scales and leaves block scales alone; so do we.
    """
    native = layer.weight.is_cuda and has_fp4_units(layer.weight.device)
    if method.quant_config.is_awq or (native and not keeps_codes(method, layer)):
        original(method, layer)
        return
    scales = layer.weight_scale.data
    weight = NVFP4Tensor(layer.weight.data, scales.clone() if native else scales, layer.weight_scale_2.max().float())
    if native:
        original(method, layer)
    layer.nvfp4_weight, layer.nvfp4_is_native = weight, native


def keeps_codes(method: Any, layer: Any) -> bool:
    """Whether SGLang's FP4 backend leaves the weight's codes as they are, so that both products can read them."""
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend as backend

    rows, half = layer.weight.shape
    is_padded = rows % ALIGNMENT or 2 * half % ALIGNMENT
    is_shuffled = backend().is_marlin() or backend().is_flashinfer_trtllm() or method.quant_mode != "w4a4"
    return not (is_padded or is_shuffled or getattr(layer, "_interleave_for_swiglu_fusion", False))


def multiply(original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times the layer's weight [N, K] transposed, plus bias: [.., N] in x's dtype."""
    weight: NVFP4Tensor | None = getattr(layer, "nvfp4_weight", None)
    if weight is None or isinstance(x, tuple):  # quantized already, by a kernel of SGLang's
        return original(method, layer, x, bias)
    rows = x.reshape(-1, x.shape[-1])
    if layer.nvfp4_is_native and len(rows) > crossover():
        return original(method, layer, x, bias)
    y = product(rows, weight)
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], y.shape[-1])


def product(x: Tensor, weight: NVFP4Tensor) -> Tensor:
    """W4A16: x [M, K] times weight [N, K] transposed, [M, N] in x's dtype."""
    if not x.is_cuda or x.dtype is torch.float32:
        return gemm.matmul(x, weight, x.dtype)
    from soar_prep.qat import triton_gemm  # triton is not there on every platform

    few = len(x) <= min(crossover(), triton_gemm.MOST_ROWS)
    return (triton_gemm.matmul_few if few else triton_gemm.matmul_many)(x, weight, x.dtype)


@cache
def crossover() -> int:
    """The most tokens that go without quantized activations: SOAR_CROSSOVER, or the default."""
    asked = os.environ.get("SOAR_CROSSOVER", str(CROSSOVER))
    if not asked.isdecimal():
        raise UserError(f"SOAR_CROSSOVER={asked}: expected a number of tokens, 0 or more")
    return int(asked)
