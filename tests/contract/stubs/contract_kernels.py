"""Two plugins of SGLang: its NVFP4 linears on a CPU, for which it has no kernel, and those in fp32.

The weight is dequantized once it is loaded, by SGLang's own `dequantize_nvfp4`, under the scalar that its kernels take
for a fused linear: the largest of its members'. Activations are left alone, as SGLang does on GPUs without FP4 units.
The second one lets them be fp32, so that another model can be compared with more than BF16's three digits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    method = "sglang.srt.layers.quantization.modelopt_quant.ModelOptFp4LinearMethod."
    HookRegistry.register(method + "process_weights_after_loading", dequantize, HookType.REPLACE)
    HookRegistry.register(method + "apply", apply, HookType.REPLACE)


def register_float32() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    config = "sglang.srt.layers.quantization.modelopt_quant.ModelOptFp4Config."
    HookRegistry.register(config + "get_supported_act_dtypes", offer_float32, HookType.AROUND)


def dequantize(method: Any, layer: Any) -> None:
    from sglang.srt.layers.quantization.dequantization import dequantize_nvfp4

    scale = layer.weight_scale_2.max()
    weight = dequantize_nvfp4(layer.weight.data, layer.weight_scale.data, scale, layer.params_dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, layer.weight, bias)


def offer_float32(original: Callable, config: Any) -> list[torch.dtype]:
    return [*original(config), torch.float32]
