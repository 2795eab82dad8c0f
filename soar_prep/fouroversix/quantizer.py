"""Which of the two equal quantizers runs where."""

from collections.abc import Callable

import torch

from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_to_nvfp4


def quantizer_for(device: torch.device) -> Callable[..., NVFP4Tensor]:
    """The truth; on a GPU its Triton twin, which gives the same bits in one pass instead of fifty."""
    if device.type != "cuda":
        return quantize_to_nvfp4
    from soar_prep.fouroversix import triton_quantize  # triton is not there on every platform

    return triton_quantize.quantize_to_nvfp4
