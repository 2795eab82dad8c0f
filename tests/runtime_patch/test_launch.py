import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from runtime_patch import doctor, launch
from runtime_patch.features import TESTED, Machine
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import write_draft

CPU = Machine(TESTED[0], "2.13.0", None, None, None)
H200 = replace(CPU, gpu="NVIDIA H200", capability=(9, 0))
V100 = replace(CPU, gpu="Tesla V100", capability=(7, 0))
RTX_PRO = replace(CPU, gpu="NVIDIA RTX PRO 6000D", capability=(12, 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(machine: Machine, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(launch, "this_machine", lambda: machine)
        code = launch.main([*map(str, words), "--dry-run"])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def modelopt(quantized: Callable[..., Path], tmp_path: Path) -> Path:
    """NVFP4 in ModelOpt's layout; its config says three layers, for a draft reads three."""
    directory = tmp_path / "model"
    shutil.copytree(quantized("llama", "export=modelopt"), directory)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 3}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def draft(model_directory: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "draft", **changes: int) -> Path:
        config = AutoConfig.from_pretrained(model_directory("llama"))
        shape = replace(DraftConfig.for_target(config, draft_vocab_size=20, aux_layers=(0, 1, 2)), **changes)
        torch.manual_seed(0)
        made = Draft(shape)
        made.set_vocabulary(torch.arange(20))
        write_draft(made, tmp_path / name)
        return tmp_path / name

    return write


def test_the_command(asked: Callable, modelopt: Path, draft: Callable[..., Path]):
    """Catches a flag without which SGLang reads the files as something else, or takes the draft for quantized."""
    code, out, _ = asked(H200, "--model", modelopt, "--draft", draft(), "--port", 3000)
    assert code == 0
    assert "SOAR_PATCH=nvfp4 " in out
    command = out.splitlines()[-1]
    for words in (
        "--quantization modelopt_fp4",
        "--speculative-algorithm EAGLE3",
        "--speculative-draft-model-quantization unquant",
        "--speculative-num-steps 7 --speculative-eagle-topk 4 --speculative-num-draft-tokens 15",
        "--port 3000",
    ):
        assert words in command
    assert "--device" not in command


def test_on_a_cpu(asked: Callable, modelopt: Path):
    """Catches a server for a GPU where there is none."""
    code, out, _ = asked(CPU, "--model", modelopt)
    assert code == 0
    assert "SGLANG_USE_CPU_ENGINE=1" in out
    assert "--device cpu --attention-backend torch_native" in out


def test_what_is_given_stays(asked: Callable, modelopt: Path):
    """Catches a flag of the user's that is given twice, the second time with another value."""
    _, out, _ = asked(CPU, "--model", modelopt, "--attention-backend=intel_amx", "--device", "cpu")
    assert out.count("--attention-backend") == out.count("--device") == 1


def test_a_dense_model(asked: Callable, model_directory: Callable[[str], Path]):
    """Catches a BF16 model that is refused or told as quantized."""
    code, out, _ = asked(H200, "--model", model_directory("llama"))
    assert code == 0
    assert "dense weights" in out
    assert "SOAR_PATCH" not in out
    assert "--quantization" not in out


def test_compressed_tensors(asked: Callable, quantized: Callable[..., Path]):
    """Catches a feature told as on that does not touch these files, and a CPU that cannot serve them."""
    directory = quantized("llama")
    code, out, _ = asked(H200, "--model", directory)
    assert code == 0
    assert "SOAR_PATCH" not in out
    assert "note        nvfp4 leaves compressed-tensors files to SGLang" in out
    code, _, err = asked(CPU, "--model", directory)
    assert code == 2
    assert "export=modelopt" in err


def test_features(asked: Callable, modelopt: Path):
    """Catches features that are switched on though they were declined."""
    code, out, _ = asked(H200, "--model", modelopt, "--features", 0)
    assert code == 0
    assert "SOAR_PATCH" not in out
    assert asked(CPU, "--model", modelopt, "--features", 0)[0] == 2
    assert asked(H200, "--model", modelopt, "--features", "speed")[0] == 2


def test_another_sglang(asked: Callable, modelopt: Path):
    """Catches an untested SGLang that is started without a word, and an override that does not reach the server."""
    newer = replace(H200, sglang="0.9.9")
    code, _, err = asked(newer, "--model", modelopt)
    assert code == 2
    assert "tested with" in err
    code, out, _ = asked(newer, "--model", modelopt, "--any-sglang")
    assert code == 0
    assert "SOAR_PATCH_ANY_SGLANG=1" in out
    assert asked(replace(H200, sglang=None), "--model", modelopt, "--any-sglang")[0] == 2


def test_an_old_gpu(asked: Callable, modelopt: Path):
    """Catches a server that dies in its first kernel."""
    code, _, err = asked(V100, "--model", modelopt)
    assert code == 2
    assert "sm_70; NVFP4 is served from sm_80 on" in err


def test_half_a_checkpoint(asked: Callable, modelopt: Path, tmp_path: Path):
    """Catches a run that was killed, or a copy that stopped, served all the same."""
    broken = tmp_path / "broken"
    shutil.copytree(modelopt, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in index if name.endswith("weight_scale_2"))
    shard = broken / index[name]
    tensors = load_file(shard)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shard)
    code, _, err = asked(H200, "--model", broken)
    assert code == 2
    assert err.startswith(f"runtime_patch: --model {broken}: {name}: in ")
    assert err.count("\n") == 1
    shard.unlink()
    code, _, err = asked(H200, "--model", broken)
    assert code == 2
    assert "missing" in err
    assert asked(H200, "--model", tmp_path / "none")[0] == 2


def test_a_draft_for_another_model(
    asked: Callable, modelopt: Path, draft: Callable[..., Path], model_directory: Callable[[str], Path]
):
    """Catches a draft that loads and never guesses right."""
    for name, changes, words in (
        ("hidden", {"hidden_size": 32}, "hidden_size 32, the model has 64"),
        ("words", {"vocab_size": 299}, "vocab_size 299, the model has 300"),
        ("layers", {"aux_layers": (0, 1, 3)}, "reads layers [0, 1, 3], the model has 3"),
    ):
        code, _, err = asked(H200, "--model", modelopt, "--draft", draft(name, **changes))
        assert code == 2, name
        assert words in err
    code, _, err = asked(H200, "--model", modelopt, "--draft", model_directory("llama"))
    assert code == 2
    assert "expected a draft" in err
    assert asked(H200, "--model", modelopt, "--draft", "/nowhere")[0] == 2


def test_minicpm_sala(asked: Callable, draft: Callable[..., Path]):
    """Catches contexts in which dense attention silently stands for sparse, and a draft where none can be served."""
    tiny = Path(__file__).parent.parent / "sala" / "tiny"
    code, out, _ = asked(H200, "--model", tiny)
    assert code == 0
    assert "a context above 128 tokens gives other outputs" in out
    assert "SGLANG_MINICPM_FORCE_DENSE=1" in out
    code, _, err = asked(H200, "--model", tiny, "--draft", draft())
    assert code == 2
    assert "cannot speculate on MiniCPM-SALA" in err


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Catches a doctor that is well where nothing would start."""
    for asked, machine, code, words in (
        ("1", RTX_PRO, 0, "on          nvfp4"),
        ("0", RTX_PRO, 0, "Nothing is patched"),
        ("nvfp4", V100, 2, "nvfp4 is impossible here"),
        ("1", replace(CPU, sglang=None), 2, "SGLang is not installed"),
        ("1", replace(CPU, sglang="0.9.9"), 2, "tested with"),
    ):
        monkeypatch.setenv("SOAR_PATCH", asked)
        monkeypatch.setattr(doctor, "this_machine", lambda machine=machine: machine)
        assert doctor.main() == code
        out = capsys.readouterr().out
        assert words in out
        assert "sm_120" in out or machine is not RTX_PRO
