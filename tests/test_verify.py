"""`soar-prep verify`: sound checkpoints pass, each way to break one is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
GOLDEN = Path(__file__).parent / "golden"
Q, GATE, DOWN = (f"model.layers.1.{name}_proj" for name in ("self_attn.q", "mlp.gate", "mlp.down"))


@pytest.fixture
def broken(quantized: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a good checkpoint as one shard, after `damage` had its tensors and config."""

    def make(damage: Callable[[Tensors, dict[str, Any]], object], *options: str) -> Path:
        source = quantized("llama", *options)
        directory = tmp_path / "broken"
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors: Tensors = {}
        for shard in source.glob("*.safetensors"):
            with safe_open(shard, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        config = json.loads((directory / "config.json").read_text())
        damage(tensors, config)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


def poke(name: str, value: int, kind: torch.dtype = torch.uint8) -> Callable[[Tensors, dict[str, Any]], None]:
    """Damage that overwrites the first element of a tensor, seen as `kind`."""

    def damage(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(kind).view(-1)[0] = value

    return damage


def drop(name: str) -> Callable[[Tensors, dict[str, Any]], object]:
    return lambda tensors, config: tensors.pop(name)


def ignore(*entries: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config["quantization_config"].update(ignore=list(entries))


def make_dense(module: str) -> Callable[[Tensors, dict[str, Any]], None]:
    """Damage that puts a dense weight where an NVFP4 one was, and lists it as ignored."""

    def damage(tensors: Tensors, config: dict[str, Any]) -> None:
        shape = tensors[f"{module}.weight_packed"].shape
        for name in [name for name in tensors if name.startswith(module + ".")]:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.zeros(shape[0], 2 * shape[1], dtype=torch.bfloat16)
        config["quantization_config"]["ignore"].append(module)

    return damage


BROKEN = {
    "NaN block scale": (poke(f"{DOWN}.weight_scale", 0x7F), f"{DOWN}: a block scale is NaN"),
    "negative block scale": (poke(f"{DOWN}.weight_scale", 0x80 | 0x30), f"{DOWN}: a block scale is NaN or negative"),
    "NaN tensor scale": (
        lambda tensors, config: tensors[f"{DOWN}.weight_global_scale"].fill_(float("nan")),
        f"{DOWN}: the weight scale is nan",
    ),
    "infinite input scale": (
        lambda tensors, config: tensors[f"{DOWN}.input_global_scale"].fill_(0.0),
        f"{DOWN}: the input scale is inf",
    ),
    "block scales gone": (drop(f"{DOWN}.weight_scale"), f"{DOWN}: weight_scale is missing"),
    "input scale gone": (drop(f"{DOWN}.input_global_scale"), f"{DOWN}: input_global_scale is missing"),
    "block scales of another shape": (
        lambda tensors, config: tensors.update({f"{DOWN}.weight_scale": tensors[f"{Q}.weight_scale"].clone()}),
        f"{DOWN}: codes",
    ),
    "fused group disagrees": (
        lambda tensors, config: tensors[f"{GATE}.weight_global_scale"].mul_(2),
        "model.layers.1.mlp: gate_proj, up_proj have different weight or input scales",
    ),
    "half of a fused group": (make_dense(GATE), "model.layers.1.mlp: only some of gate_proj, up_proj are quantized"),
    "ignore matches nothing": (ignore("lm_head", "model.layers.7.mlp.up_proj"), "'model.layers.7.mlp.up_proj'"),
    "quantized but ignored": (ignore("lm_head", DOWN), f"{DOWN}: NVFP4, but ignored"),
    "head not ignored": (ignore(), "lm_head: neither quantized nor ignored"),
    "no quantization_config": (lambda tensors, config: config.pop("quantization_config"), "no quantization_config"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoint_is_named(case: str, broken: Callable[..., Path], soar_prep: Callable[..., Any]):
    """Catches a check that passes what a loader reads as garbage, or that does not say which module it is."""
    damage, message = BROKEN[case]
    ran = soar_prep("verify", broken(damage))
    assert ran.code == 3
    assert message in ran.err
    assert ran.out == ""


def test_undamaged_copy_is_sound(broken: Callable[..., Path], soar_prep: Callable[..., Any]):
    """Catches a fixture that breaks checkpoints by itself: then no case above would mean anything."""
    ran = soar_prep("verify", broken(lambda tensors, config: None))
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize(
    "options", [(), ("export=modelopt",), ("weight_only_config=true",), ("export=modelopt", "weight_only_config=true")]
)
def test_own_checkpoints_are_sound(
    options: tuple[str, ...], quantized: Callable[..., Path], soar_prep: Callable[..., Any]
):
    """Catches an exporter and a checker that disagree on a layout."""
    ran = soar_prep("verify", quantized("llama", *options))
    assert (ran.code, ran.err) == (0, "")
    assert "21 NVFP4 linears" in ran.out


@pytest.mark.parametrize("tool", ["llmcompressor", "modelopt"])
def test_other_tools_checkpoints_are_sound(tool: str, soar_prep: Callable[..., Any]):
    """Catches checks that know only our own files: both peers' exports of a tiny Llama are good ones."""
    ran = soar_prep("verify", GOLDEN / tool)
    assert (ran.code, ran.err) == (0, "")
    assert "14 NVFP4 linears" in ran.out


def test_incomplete_index_is_named(quantized: Callable[..., Path], tmp_path: Path, soar_prep: Callable[..., Any]):
    """Catches a tensor that the index promises and no shard has, and one in a shard that the index leaves out."""
    directory = shutil.copytree(quantized("llama"), tmp_path / "copy")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.invented.weight"] = shard
    path.write_text(json.dumps(index))
    ran = soar_prep("verify", directory)
    assert ran.code == 3
    assert "model.invented.weight: in model.safetensors.index.json but in no shard" in ran.err
    assert "model.norm.weight: in a shard but not in model.safetensors.index.json" in ran.err


def test_quality_beside_a_reference(
    quantized: Callable[..., Path], model_directory: Callable[[str], Path], soar_prep: Callable[..., Any]
):
    """Catches figures of another text or scheme than the run's own, and a gate that is not looked at."""
    output = quantized("llama")
    text = ("evaluation.samples=2", "evaluation.length=32", "compute.device=cpu")
    ran = soar_prep("verify", output, f"reference={model_directory('llama')}", *text)
    assert ran.code == 0
    for scheme, q in json.loads((output / "run.json").read_text())["quality"].items():
        (line,) = (line for line in ran.out.splitlines() if line.split()[:1] == [scheme])
        assert line.split()[1:3] == [f"{q['perplexity']:.3f}", f"{q['kl']:.4f}"]
    ran = soar_prep("verify", output, f"reference={model_directory('llama')}", "gate.max_kl=1e-9", *text)
    assert ran.code == 3
    assert "gate.max_kl=1e-09: the mean KL divergence is" in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "directory: required"),
        (("nowhere",), "directory=nowhere: no such directory"),
        (("{weight_only}", "reference={source}", "scheme=w4a4"), "scheme=w4a4: this checkpoint is weight-only"),
        (("{weight_only}", "reference=./nowhere"), "reference=./nowhere: no such directory"),
    ],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...],
    message: str,
    quantized: Callable[..., Path],
    model_directory: Callable[[str], Path],
    soar_prep: Callable[..., Any],
):
    """Catches a traceback, or a wrong exit code, where the user gave the wrong thing."""
    names = {"weight_only": quantized("llama", "weight_only_config=true"), "source": model_directory("llama")}
    ran = soar_prep("verify", *(option.format(**names) for option in options))
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
