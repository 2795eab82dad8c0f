"""Which of the three equal products runs where."""

from collections.abc import Callable

import torch
from torch import Tensor

from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.qat import gemm

FP4_CAPABILITIES = (10, 12)  # sm_100 and sm_120, with their variants


def matmul(x: Tensor | NVFP4Tensor, weight: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of weight [N, K]: [M, N], rounded once to dtype, as this device does it best."""
    return matmul_for(x, weight.codes.device)(x, weight, dtype)


def matmul_for(x: Tensor | NVFP4Tensor, device: torch.device) -> Callable[..., Tensor]:
    """The truth on a CPU, on a GPU older than sm_80, for an x in fp32 and for one that needs a gradient.

    Elsewhere FP4 units if both operands are packed and the GPU has them, and exact emulation if not.
    """
    if device.type != "cuda":
        return gemm.matmul
    if isinstance(x, Tensor) and x.dtype not in (torch.bfloat16, torch.float16):
        return gemm.matmul
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return gemm.matmul
    if torch.cuda.get_device_capability(device) < (8, 0):
        return gemm.matmul
    from soar_prep.qat import native, triton_gemm  # triton is not there on every platform

    return native.matmul if isinstance(x, NVFP4Tensor) and has_fp4_units(device) else triton_gemm.matmul


def has_fp4_units(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in FP4_CAPABILITIES
