import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from soar_prep.fouroversix.e2m1 import unpack_codes
from soar_prep.fouroversix.tensor import NVFP4Tensor, round_to_nvfp4
from soar_prep.layouts import (
    QuantizedWeight,
    from_tensors,
    is_weight_only,
    layout_of,
    quantization_config,
    side_configs,
    to_tensors,
)
from soar_prep.settings import Layout

GOLDEN = Path(__file__).parent / "golden"
# golden file -> the names in it of the weight that was quantized and of what its own tool decodes from the result
PACKED = {
    "compressed_tensors": (Layout.compressed_tensors, "weight", "decompressed"),
    "modelopt": (Layout.modelopt, "original_weight", "dequantized"),
}


def read_golden(tool: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(weight, what the tool decodes, the tool's tensors under the module name `m`)."""
    _, original, decoded = PACKED[tool]
    tensors = load_file(GOLDEN / f"{tool}.safetensors")
    weight, expected = tensors.pop(original), tensors.pop(decoded)
    return weight, expected, {f"m.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("tool", PACKED)
def test_reads_what_other_tools_write(tool: str):
    """Catches swapped nibbles, transposed scales and inverted scalars: our values are those the tool itself decodes."""
    _, expected, tensors = read_golden(tool)
    assert layout_of("m", tensors) is PACKED[tool][0]
    quantized = from_tensors("m", tensors)
    assert quantized is not None
    assert quantized.input_scale is None
    # ModelOpt multiplies the two scales first: one more rounding to fp32
    rtol = 2**-22 if tool == "modelopt" else 0
    torch.testing.assert_close(quantized.weight.dequantize(expected.dtype), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("tool", PACKED)
def test_packs_as_other_tools_do(tool: str):
    """Catches another rounding or packing: under the tool's scales our codes are its own, all but the sign of -0."""
    weight, _, tensors = read_golden(tool)
    theirs = from_tensors("m", tensors)
    assert theirs is not None
    ours = round_to_nvfp4(weight, theirs.weight.block_scales, theirs.weight.tensor_scale)
    is_negative_zero = (weight == 0) & torch.signbit(weight)
    codes, their_codes = unpack_codes(ours.codes), unpack_codes(theirs.weight.codes)
    assert torch.equal(codes[~is_negative_zero], their_codes[~is_negative_zero])
    assert set(their_codes[is_negative_zero].tolist()) <= {0, 8}


@pytest.mark.parametrize("input_scale", [None, 0.0123])
@pytest.mark.parametrize("layout", list(Layout))
def test_reading_undoes_writing(layout: Layout, input_scale: float | None):
    """Catches a scalar that is inverted on one way only, and an input scale that is lost or invented."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (17, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 127, (17, 2), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scalar = None if input_scale is None else torch.tensor(input_scale)
    tensors = to_tensors("a.b", QuantizedWeight(NVFP4Tensor(codes, scales, torch.tensor(0.125)), scalar), layout)
    got = from_tensors("a.b", tensors)
    assert got is not None
    assert torch.equal(got.weight.codes, codes)
    assert torch.equal(got.weight.block_scales.view(torch.uint8), scales.view(torch.uint8))
    assert (got.weight.tensor_scale.shape, got.weight.tensor_scale.item()) == ((), 0.125)
    # one fp32 division each way for compressed-tensors
    assert (got.input_scale is None) == (input_scale is None)
    assert got.input_scale is None or got.input_scale.item() == pytest.approx(input_scale, rel=2**-22)


def test_names_types_and_shapes_are_those_of_the_tools():
    """Catches a misnamed tensor, a scalar of the wrong shape, and a scalar where its reciprocal belongs."""
    weight = NVFP4Tensor(
        torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(torch.float8_e4m3fn), torch.tensor(0.25)
    )
    for layout, tool, input_name, factor in (
        (Layout.compressed_tensors, "compressed_tensors", "m.input_global_scale", 4.0),
        (Layout.modelopt, "modelopt", "m.input_scale", 0.25),
    ):
        ours = to_tensors("m", QuantizedWeight(weight, torch.tensor(0.25)), layout)
        assert ours.pop(input_name).flatten().tolist() == [factor]
        theirs = read_golden(tool)[2]
        assert {n: (t.dtype, t.dim()) for n, t in ours.items()} == {n: (t.dtype, t.dim()) for n, t in theirs.items()}
        assert [t.item() for t in ours.values() if t.numel() == 1] == [factor]


def test_dense_module_has_no_layout():
    """Catches a plain weight read as packed codes; and a missing companion must not pass as dense."""
    assert from_tensors("m", {"m.weight": torch.zeros(2, 2)}) is None
    with pytest.raises(KeyError, match="weight_scale"):
        from_tensors("m", {"m.weight_packed": torch.zeros(2, 8, dtype=torch.uint8)})


def differing(ours: Any, theirs: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves of `theirs` that `ours` lacks or has otherwise, and leaves that only `ours` has."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in ours.keys() | theirs.keys():
            found |= differing(ours.get(key, "absent"), theirs.get(key, "absent"), f"{path}.{key}")
        return found
    return {} if ours == theirs else {path: (ours, theirs)}


@pytest.mark.parametrize(("weight_only", "scheme"), [(False, "NVFP4"), (True, "NVFP4A16")])
def test_compressed_tensors_config_is_what_llm_compressor_writes(weight_only: bool, scheme: str):
    """Catches a config that loaders read otherwise: only fields with a default of their own may be left out."""
    theirs = json.loads((GOLDEN / "config_compressed_tensors.json").read_text())[scheme]
    ours = quantization_config(Layout.compressed_tensors, ["lm_head"], weight_only)
    assert is_weight_only({"quantization_config": ours}) is weight_only
    assert all(ours_ == "absent" for ours_, _ in differing(ours, theirs).values())
    left_out = {path.rpartition(".")[2] for path in differing(ours, theirs)}
    assert left_out <= {
        *("actorder", "block_structure", "observer", "observer_kwargs", "zp_dtype"),
        *("global_compression_ratio", "sparsity_config", "transform_config", "version"),
    }


@pytest.mark.parametrize(("weight_only", "scheme"), [(False, "NVFP4"), (True, "W4A16_NVFP4")])
def test_modelopt_configs_are_what_modelopt_writes(weight_only: bool, scheme: str):
    """Catches a config that loaders read otherwise: all but the producer must be ModelOpt's own."""
    theirs = json.loads((GOLDEN / "config_modelopt.json").read_text())[scheme]
    ignore = ["lm_head", "model.embed_tokens"]
    ours = {"quantization_config": quantization_config(Layout.modelopt, ignore, weight_only)}
    (ours["hf_quant_config"],) = side_configs(Layout.modelopt, ignore, weight_only).values()
    assert is_weight_only(ours) is weight_only
    assert {path.rpartition("producer")[2] for path in differing(ours, theirs)} == {".name", ".version"}


def test_only_modelopt_has_a_second_config():
    """Catches a stray hf_quant_config.json, which makes loaders take the directory for ModelOpt's."""
    assert side_configs(Layout.compressed_tensors, [], False) == {}
    assert list(side_configs(Layout.modelopt, [], False)) == ["hf_quant_config.json"]
    assert not is_weight_only({})
