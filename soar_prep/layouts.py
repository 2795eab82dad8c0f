"""NVFP4 tensors in files: the names and configs of compressed-tensors and of ModelOpt.

Both layouts hold the same numbers; only names differ, and the two scalars are reciprocals of each other:

    compressed-tensors                          ModelOpt                        dtype, shape
    weight_packed                               weight                          uint8 [N, K/2]
    weight_scale                                weight_scale                    float8_e4m3fn [N, K/16]
    weight_global_scale = 1 / tensor_scale [1]  weight_scale_2 = tensor_scale   fp32 []
    input_global_scale = 1 / input_scale [1]    input_scale                     fp32 [], absent for weight-only configs

Sources: compressed-tensors 0.20 `nvfp4-pack-quantized`; ModelOpt 0.47 `hf_quant_config.json`, as SGLang reads it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.fouroversix.tensor import NVFP4Tensor
from soar_prep.settings import Layout

# Servers fuse these linears at load and keep ONE scalar of each kind for the group: members must agree on both.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

WEIGHT_TENSORS = {
    Layout.compressed_tensors: ("weight_packed", "weight_scale", "weight_global_scale"),
    Layout.modelopt: ("weight", "weight_scale", "weight_scale_2"),
}
INPUT_TENSOR = {Layout.compressed_tensors: "input_global_scale", Layout.modelopt: "input_scale"}


@dataclass(frozen=True)
class QuantizedWeight:
    """One linear of a checkpoint: its NVFP4 weight, and the static activation scale (fp32 []) if there is one."""

    weight: NVFP4Tensor
    input_scale: Tensor | None


def to_tensors(module: str, quantized: QuantizedWeight, layout: Layout) -> dict[str, Tensor]:
    """The tensors that stand for `module` in a file; its scalars are copies, since safetensors refuses shared ones."""
    codes, block_scales, tensor_scale = WEIGHT_TENSORS[layout]
    scalars = {tensor_scale: quantized.weight.tensor_scale}
    if quantized.input_scale is not None:
        scalars[INPUT_TENSOR[layout]] = quantized.input_scale
    if layout is Layout.compressed_tensors:
        scalars = {name: torch.reciprocal(scalar).reshape(1) for name, scalar in scalars.items()}
    else:
        scalars = {name: scalar.clone() for name, scalar in scalars.items()}
    tensors = {codes: quantized.weight.codes, block_scales: quantized.weight.block_scales, **scalars}
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def from_tensors(module: str, tensors: Any) -> QuantizedWeight | None:
    """Inverse of `to_tensors` for either layout; None if `module` is not NVFP4 in there.

    tensors: a Checkpoint, or a dict from name to tensor. KeyError if a companion is missing.
    """
    layout = layout_of(module, tensors)
    if layout is None:
        return None
    codes, scales, scalar = (tensors[f"{module}.{name}"] for name in WEIGHT_TENSORS[layout])
    input_name = f"{module}.{INPUT_TENSOR[layout]}"
    input_scalar = tensors[input_name] if input_name in tensors else None
    if layout is Layout.compressed_tensors:
        scalar = 1 / scalar
        input_scalar = None if input_scalar is None else 1 / input_scalar
    weight = NVFP4Tensor(codes, scales, scalar.float().reshape(()))
    return QuantizedWeight(weight, None if input_scalar is None else input_scalar.float().reshape(()))


def layout_of(module: str, names: Any) -> Layout | None:
    """Which layout `module` is stored in, judged by names alone; None if it is not NVFP4."""
    if f"{module}.weight_packed" in names:
        return Layout.compressed_tensors
    return Layout.modelopt if f"{module}.weight_scale_2" in names else None


def quantization_config(layout: Layout, ignore: list[str], weight_only: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json; `ignore` lists every Linear that stays as it was, by full name."""
    number = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    if layout is Layout.modelopt:
        group = {"weights": {**number, "dynamic": False}, "targets": ["Linear"]}
        if not weight_only:
            group["input_activations"] = {**number, "dynamic": False}
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4" if weight_only else "NVFP4",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "producer": {"name": "soar-prep"},
        }
    number |= {"strategy": "tensor_group", "symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "dynamic": False},
                "input_activations": None if weight_only else {**number, "dynamic": "local"},
                "output_activations": None,
                "format": "nvfp4-pack-quantized",
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def side_configs(layout: Layout, ignore: list[str], weight_only: bool) -> dict[str, dict[str, Any]]:
    """JSON files beside config.json that loaders of this layout look for, by file name."""
    if layout is Layout.compressed_tensors:
        return {}
    quantization = {
        "quant_algo": "W4A16_NVFP4" if weight_only else "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": ignore,
    }
    return {"hf_quant_config.json": {"producer": {"name": "soar-prep"}, "quantization": quantization}}


def is_weight_only(config: dict[str, Any]) -> bool:
    """Whether a checkpoint's config.json asks for unquantized activations."""
    quantization = config.get("quantization_config", {})
    groups = quantization.get("config_groups", {}).values()
    return quantization.get("quant_algo") == "W4A16_NVFP4" or (
        bool(groups) and all(group.get("input_activations") is None for group in groups)
    )
