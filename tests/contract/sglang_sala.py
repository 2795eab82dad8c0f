"""Does SGLang 0.5.21 load the MiniCPM-SALA that soar-prep writes? Run by `make contract`; fails by an exception.

SGLang leaves a tensor that a checkpoint lacks as it was drawn, and takes a default for an option that config.json
lacks, all without a word. So everything in its model is overwritten before it loads: then each tensor must stand in
its place bit by bit, and together they must leave no element unset. Its configuration must hold each value of
config.json, and what SGLang's own arithmetic makes of the NVFP4 tensors must be what soar-prep's makes of them. Then
the same checks must refuse checkpoints damaged in ways that SGLang takes without complaint.
"""

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import sala_checkpoint
import sglang_runtime  # first: it sets the environment that SGLang reads
import torch
from damages import Config, Damage, Tensors, damaged, double, drop, forget, rename, swap
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.minicpm import MiniCPMHybridConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod
from sglang.srt.model_loader import get_model
from sglang.srt.models.minicpm import MiniCPMSALAForCausalLM
from sglang_runtime import OF_THE_CACHE, ContractBrokenError, bits, expect, place
from torch import nn

from soar_prep.layouts import from_tensors

QUANTIZED = {"q_proj", "k_proj", "v_proj", "o_proj", "o_gate", "z_proj", "gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class Checkpoint:
    tensors: Tensors
    config: Config


def read(directory: Path) -> Checkpoint:
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return Checkpoint(tensors, json.loads((directory / "config.json").read_text()))


def check(expected: Checkpoint, directory: Path) -> nn.Module:
    """Load `directory` in SGLang: it must hold what is expected, in its model and its configuration."""
    original = MiniCPMSALAForCausalLM.load_weights

    def load_and_check(model: MiniCPMSALAForCausalLM, weights: object) -> None:
        sglang_runtime.overwrite(model)
        original(model, weights)
        check_places(expected.tensors, dict(model.named_parameters()))

    config = ModelConfig(str(directory), dtype="bfloat16")
    check_config(expected.config, config)
    MiniCPMSALAForCausalLM.load_weights = load_and_check
    try:
        model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    finally:
        MiniCPMSALAForCausalLM.load_weights = original
    check_quantized(expected.tensors, model)
    return model


def check_config(expected: Config, config: ModelConfig) -> None:
    """Catches an option that SGLang does not find, and takes a default for; and remote code asked for."""
    expect(type(config.hf_config) is MiniCPMHybridConfig, f"SGLang reads the config as {type(config.hf_config)}")
    for name, value in expected.items():
        if name not in ("quantization_config", "transformers_version", "dtype"):
            found = getattr(config.hf_config, name, None)
            expect(found == value, f"{name} is {found} in SGLang, expected {value}")


def check_places(tensors: Tensors, parameters: dict[str, nn.Parameter]) -> None:
    """Catches a tensor that SGLang drops, misses or puts elsewhere, in any of its bits."""
    is_set = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in parameters.items()}
    for name, tensor in tensors.items():
        target, rows = place(tensors, name)
        expect(target in parameters, f"{name}: SGLang has no {target}")
        found = parameters[target].data[rows]
        expect(found.dtype == tensor.dtype, f"{name} is {found.dtype} in SGLang, {tensor.dtype} in the file")
        expect(torch.equal(bits(found), bits(tensor).reshape(bits(found).shape)), f"{name} has other bits in SGLang")
        is_set[target][rows] = True
        if target in ("model.embed_tokens.weight", "lm_head.weight"):
            expect(not bool(parameters[target].data[rows.stop :].any()), f"{target}: the rows of padding are not zero")
            is_set[target][rows.stop :] = True
    unset = [name for name, all_set in is_set.items() if not all_set.all() and not name.endswith(OF_THE_CACHE)]
    expect(not unset, f"no tensor of the file sets {unset}")


def check_quantized(tensors: Tensors, model: nn.Module) -> None:
    """Catches a scalar that a fused linear's members do not share, and codes or scales that SGLang reads otherwise."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for scale in (getattr(module, kind, torch.zeros(1)) for kind in ("weight_scale_2", "input_scale")):
            expect(bool((scale == scale.max()).all()), f"{name}: its members' scalars are {scale.tolist()}")
    for name in tensors:
        module = name.removesuffix(".weight_scale")
        if module != name:
            target, rows = place(tensors, f"{module}.weight")
            ours = from_tensors(module, tensors).weight.dequantize(torch.bfloat16)
            theirs = modules[target.removesuffix(".weight")].weight[rows]
            expect(torch.equal(theirs, ours), f"{module} is another matrix in SGLang")


def count_quantized(tensors: Tensors, model: nn.Module) -> int:
    """How many linears of the file are NVFP4; SGLang must take all linears of its layers as such, and no other."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    expect(all(type(m.quant_method) is ModelOptFp4LinearMethod for m in layers.values()), "SGLang keeps one in BF16")
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    linears = {name.rpartition(".")[0] for name in tensors if name.split(".")[-2] in QUANTIZED}
    expect(modules == linears, f"in the file are not NVFP4 {sorted(linears - modules)}")
    others = {str(tensor.dtype) for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    expect(others == {"torch.bfloat16"}, f"embeddings, norms and head are {others}")
    return len(modules)


SPARSE, LIGHTNING = "model.layers.0.self_attn", "model.layers.1.self_attn"


GATE, UP = (f"model.layers.2.mlp.{part}_proj" for part in ("gate", "up"))
# Noticed by the damaged checkpoint alone.
DAMAGES: dict[str, Damage] = {
    "codes dropped": drop(f"{LIGHTNING}.o_proj.weight"),
    "a gate's block scales dropped": drop(f"{LIGHTNING}.z_proj.weight_scale"),
    "a fused member's scalar dropped": drop(f"{SPARSE}.k_proj.weight_scale_2"),
    "an input scale dropped": drop(f"{SPARSE}.o_gate.input_scale"),
    "a norm dropped": drop(f"{LIGHTNING}.q_norm.weight"),
    "the head dropped": drop("lm_head.weight"),
    "a gate misnamed": rename(f"{LIGHTNING}.z_proj.weight", f"{LIGHTNING}.gate.weight"),
    "another scalar for one fused member": double(f"{SPARSE}.k_proj.weight_scale_2"),
    "another input scale for one fused member": double("model.layers.2.mlp.up_proj.input_scale"),
}
# Noticed beside the one that it was made of: each could be a checkpoint of another model.
GATES = ("attn_use_rope", "attn_use_output_gate", "use_output_gate", "use_output_norm")
OPTIONS = (*sala_checkpoint.SIZES, "lightning_nkv", "mixer_types", *GATES, "quantization_config")
CHANGES: dict[str, Damage] = {
    "gate and up swapped": swap(*((f"{GATE}.{kind}", f"{UP}.{kind}") for kind in ("weight", "weight_scale")))
} | {f"{name} forgotten": forget(name) for name in OPTIONS}


def main(folder: Path) -> None:
    sala_checkpoint.make(folder)
    sglang_runtime.start(folder)
    for name in ("bf16", "nvfp4"):
        expected = read(folder / name)
        model = check(expected, folder / name)
        elements = sum(tensor.numel() for tensor in expected.tensors.values())
        print(f"{name}: {len(expected.tensors)} tensors, {elements} elements, each in its place; no other is unset")
    print(f"nvfp4: {count_quantized(expected.tensors, model)} linears, all that the layers have; the same in SGLang")
    for name, damage in (DAMAGES | CHANGES).items():
        broken = damaged(folder / "nvfp4", damage, folder / name)  # SGLang remembers configs by their path
        try:
            check(expected if name in CHANGES else read(broken), broken)
        except (ContractBrokenError, KeyError, ValueError) as refusal:  # the latter two are SGLang's own
            print(f"{name}: refused, {type(refusal).__name__}: {refusal}")
        else:
            raise AssertionError(f"{name}: the checks above do not notice it")
        shutil.rmtree(broken)


if __name__ == "__main__":
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
    seconds = time.perf_counter() - begin
    print(f"contract: SGLang 0.5.21 loads the MiniCPM-SALA that soar-prep writes, bit by bit ({seconds:.0f} s)")
