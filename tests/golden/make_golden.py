"""Write the golden files: what other quantizers make of the same small weights, on a CPU.

    python tests/golden/make_golden.py DIRECTORY

`make contract` runs it in an environment of its own (versions: requirements.txt and the Makefile) and compares the
result with the files beside this script, byte for byte. The other tests only read those.

Outputs (versions are in the safetensors metadata and the JSON files, under "versions"; a rerun gives the same bytes):
    fouroversix.safetensors         <case>.input, <case>.amax, <case>.<rule>.codes, <case>.<rule>.block_scales
    compressed_tensors.safetensors  its NVFP4 compressor on one weight, and its own decompressed result
    modelopt.safetensors            its NVFP4 packing of the same weight
    config_compressed_tensors.json  {scheme: quantization_config} as saved by llm-compressor
    config_modelopt.json            {scheme: {quantization_config, hf_quant_config}} as exported by ModelOpt
    llmcompressor/, modelopt/       a tiny Llama that each quantized and exported: config.json, model.safetensors

Codes are packed two to a byte, the even column in the low nibble; block scales are plain [rows, columns / 16].
"""

import copy
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

OUTPUT = Path(sys.argv[1])
RULES = ("static_6", "mse", "mae", "abs_max")
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in ("torch", *packages)}


def save_tensors(name: str, tensors: dict[str, Tensor], *packages: str) -> None:
    from safetensors.torch import save_file

    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    # one entry, since safetensors writes several in random order
    save_file(tensors, OUTPUT / name, metadata={"versions": json.dumps(versions(*packages))})
    (OUTPUT / name).chmod(0o644)


def save_json(name: str, content: dict, *packages: str) -> None:
    text = json.dumps({"versions": versions(*packages), **content}, indent=2, sort_keys=True)
    (OUTPUT / name).write_text(text + "\n")


def keep_checkpoint(name: str, written: Path) -> None:
    (OUTPUT / name).mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(written / file, OUTPUT / name / file)


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(rows: int, columns: int, seed: int) -> Tensor:
    """Student-t with 3 degrees of freedom: normal / sqrt(chi-square_3 / 3)."""
    chi_square = sum(gaussian(rows, columns, seed + i) ** 2 for i in (1, 2, 3))
    return gaussian(rows, columns, seed) / (chi_square / 3).sqrt()


def with_zeros(rows: int, columns: int, seed: int) -> Tensor:
    """Zero rows, zero blocks, a block of negative zeros, and blocks so small that their scale is subnormal or 0."""
    x = gaussian(rows, columns, seed)
    x[[0, rows // 2]] = 0
    x[3, 16:32] = 0
    x[4, :16] = -0.0
    for row, factor in enumerate((1e-3, 1e-4, 3e-6, 1e-6, 1e-7), start=5):
        x[row, 32:48] *= factor
    return x


def with_ties(rows: int, columns: int, seed: int) -> Tensor:
    """amax 1.5, so that amax / 1536 = 2^-10; the first rows hold E2M1 midpoints under power-of-two block scales."""
    x = (0.4 * gaussian(rows, columns, seed)).clamp(-1.5, 1.5)
    midpoints = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])
    for row in range(8):
        x[row, :16] = midpoints * 2.0 ** (-2 - row)
    return x


def fouroversix_inputs() -> dict[str, Tensor]:
    ties = with_ties(24, 64, seed=50)
    other_amax = ties.clone()
    other_amax[0, 0] = 1.7  # amax / 1536 is no power of two; all else as in "ties"
    return {
        "gaussian_bf16": 0.02 * gaussian(128, 256, seed=10).bfloat16(),
        "gaussian_fp32": 0.02 * gaussian(128, 64, seed=20),
        "heavy_tailed_bf16": heavy_tailed(128, 64, seed=30).bfloat16(),
        "zeros_bf16": with_zeros(24, 64, seed=40).bfloat16(),
        "zeros_fp32": with_zeros(24, 64, seed=40),
        "power_of_two_fp32": ties,
        "no_power_of_two_fp32": other_amax,
        "ragged_bf16": gaussian(17, 48, seed=60).bfloat16(),  # padded by fouroversix, cut again below
        "all_zero_fp32": torch.zeros(3, 32),
    }


def write_fouroversix() -> None:
    """fouroversix' PyTorch backend: 1x16 blocks, nearest rounding. No case here makes it fail."""
    from fouroversix import QuantizationConfig, quantize_to_fp4
    from fouroversix.quantize import from_blocked

    tensors = {}
    for case, x in fouroversix_inputs().items():
        rows, columns = x.shape
        tensors[f"{case}.input"] = x
        for rule in RULES:
            result = quantize_to_fp4(x.clone(), QuantizationConfig(backend="pytorch", scale_rule=rule))
            padded_rows, padded_columns = result.padded_shape
            scales = from_blocked(result.scale_factors, (padded_rows, padded_columns // 16))
            tensors[f"{case}.amax"] = result.amax
            tensors[f"{case}.{rule}.codes"] = result.values[:rows, : columns // 2]
            tensors[f"{case}.{rule}.block_scales"] = scales[:rows, : columns // 16]
    save_tensors("fouroversix.safetensors", tensors, "fouroversix")


def layout_weight() -> Tensor:
    """bf16 [48, 64]: Gaussian with zero rows, zero blocks and very small blocks."""
    return (0.07 * with_zeros(48, 64, seed=70)).bfloat16()


def write_compressed_tensors() -> None:
    """min-max scales and the nvfp4-pack-quantized compressor of compressed-tensors."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = layout_weight()
    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    blocks = weight.unflatten(-1, (-1, 16))
    global_scale = generate_gparam(weight.min(), weight.max())  # computed in bf16, as llm-compressor does
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": global_scale}
    compressed = NVFP4PackedCompressor.compress(state, scheme)
    decompressed = NVFP4PackedCompressor.decompress(compressed, scheme)["weight"]
    tensors = {"weight": weight, **compressed, "decompressed": decompressed}
    save_tensors("compressed_tensors.safetensors", tensors, "compressed-tensors")


def write_modelopt() -> None:
    """ModelOpt's NVFP4 packing with its default (min-max) scales, and its own dequantized result."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = layout_weight()
    packed, weight_scale, weight_scale_2 = NVFP4QTensor.quantize(weight.clone(), block_size=16)
    dequantized = packed.dequantize(
        torch.float32, scale=weight_scale, double_scale=weight_scale_2, block_sizes={-1: 16}
    )
    tensors = {
        "original_weight": weight,
        "weight": packed._quantized_data,
        "weight_scale": weight_scale,
        "weight_scale_2": weight_scale_2,
        "dequantized": dequantized,
    }
    save_tensors("modelopt.safetensors", tensors, "nvidia-modelopt")


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(80)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).bfloat16()


def write_llmcompressor_configs() -> None:
    """The quantization_config that llm-compressor saves for a really calibrated tiny Llama."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerFast

    configs = {}
    tokens = DataLoader([{"input_ids": torch.arange(32)}])
    # oneshot wants a tokenizer even for windows that are tokens already
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    for scheme in ("NVFP4", "NVFP4A16"):
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as output:
            tiny_llama().save_pretrained(source)  # it reads the source directory again when it saves
            oneshot(model=source, processor=tokenizer, dataset=tokens, recipe=recipe, output_dir=output)
            config = json.loads((Path(output) / "config.json").read_text())
            if scheme == "NVFP4":
                keep_checkpoint("llmcompressor", Path(output))
        configs[scheme] = config["quantization_config"]
    save_json("config_compressed_tensors.json", configs, "compressed-tensors", "llmcompressor", "transformers")


def write_modelopt_configs() -> None:
    """Both configurations that ModelOpt's exporter writes for a really calibrated tiny Llama (max calibration)."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    configs = {}
    for scheme, recipe in (("NVFP4", mtq.NVFP4_DEFAULT_CFG), ("W4A16_NVFP4", mtq.W4A16_NVFP4_CFG)):
        model = mtq.quantize(tiny_llama(), copy.deepcopy(recipe), lambda model: model(torch.arange(32)[None]))
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, export_dir=folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            hf_quant_config = json.loads((Path(folder) / "hf_quant_config.json").read_text())
            if scheme == "NVFP4":
                keep_checkpoint("modelopt", Path(folder))
        configs[scheme] = {"quantization_config": config["quantization_config"], "hf_quant_config": hf_quant_config}
    save_json("config_modelopt.json", configs, "nvidia-modelopt", "transformers")


if __name__ == "__main__":
    write_fouroversix()
    write_compressed_tensors()
    write_modelopt()
    write_llmcompressor_configs()
    write_modelopt_configs()
