"""The quantize road in two processes: gloo here, as it is NCCL on GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from soar_prep.checkpoint import Checkpoint
from soar_prep.layouts import from_tensors

# five batches, so that the processes have three and two
OPTIONS = ("calibration.samples=5", "calibration.length=32", "evaluation.samples=2", "evaluation.length=32")
OPTIONS += ("compute.device=cpu", "compute.batch_tokens=32", "keep_unquantized=[*.1.mlp.down_proj]")
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "soar_prep.cli"]


def run_in_two(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TWO, "quantize", *arguments], capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {k: tensor for path in sorted(directory.glob("*.safetensors")) for k, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("correction=0", "scheme=w4a4"), ("refine_passes=1",)], ids=str)
def test_two_processes_do_what_one_does(
    options: tuple[str, ...], model_directory: Callable[[str], Path], soar_prep: Callable[..., Any], tmp_path: Path
):
    """Catches a batch that is dropped or counted twice, rows in the wrong place, a process with scales of its own.

    Sums are of another order, so a number on a rounding border may fall the other way.
    """
    model = f"model={model_directory('mistral')}"
    assert soar_prep("quantize", model, f"output={tmp_path / 'one'}", *OPTIONS, *options).code == 0
    ran = run_in_two(model, f"output={tmp_path / 'two'}", *OPTIONS, *options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("layer 2/2") == 1  # one of them speaks
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    facts = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "two")]
    assert facts[0]["linears"].keys() == facts[1]["linears"].keys()
    checkpoints = [Checkpoint(tmp_path / name) for name in ("one", "two")]
    for name, linear in facts[0]["linears"].items():
        a, b = (from_tensors(name, checkpoint) for checkpoint in checkpoints)
        assert a is not None
        assert b is not None
        assert (a.weight.dequantize() == b.weight.dequantize()).float().mean() > 0.98, name
        assert a.weight.tensor_scale == b.weight.tensor_scale
        other = facts[1]["linears"][name]
        assert other["relative_error"] == pytest.approx(linear["relative_error"], rel=0.03)
        assert other["share_of_fours"] == pytest.approx(linear["share_of_fours"], abs=0.02)
        assert other["input_scale"] == pytest.approx(linear["input_scale"], rel=1e-3)
    assert facts[1]["quality"]["w4a16"]["kl"] == pytest.approx(facts[0]["quality"]["w4a16"]["kl"], rel=0.05)
    assert not (tmp_path / "two.partial").exists()


@pytest.mark.slow
def test_two_processes_resume(model_directory: Callable[[str], Path], tmp_path: Path):
    """Catches a second process that solves what the first takes from disk: they would wait for each other for ever."""
    arguments = (f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *OPTIONS)
    ran = run_in_two(*arguments, "gate.max_kl=1e-9")
    assert ran.returncode != 0
    assert "gate.max_kl" in ran.stderr
    partial = tmp_path / "out.partial"
    shards = {path.name: path.read_bytes() for path in partial.glob("*.safetensors")}
    (partial / "part-00002.json").unlink()
    ran = run_in_two(*arguments)
    assert ran.returncode == 0, ran.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")} == shards
