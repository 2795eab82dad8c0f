import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

SMALL = (
    *("calibration.samples=2", "calibration.length=16", "evaluation.samples=1", "evaluation.length=16"),
    "compute.device=cpu",
)
# These hold times; all other files must not tell whether a run was interrupted.
TIMED = {"report.html", "metrics.jsonl"}
Models = Callable[[str], Path]
SoarPrep = Callable[..., Any]

# Runs the command in one child after another (imports are shared): whole; then for n = 1, 2, ... killed just before its
# n-th rename, which is how every file and in the end the directory gets its name, and once more to the end.
KILLER = """
import json, os, shutil, signal, sys
from soar_prep.cli import main
import soar_prep.gptq.quantize
output, results, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]

def run(renames):
    pid = os.fork()
    if pid == 0:
        rename = os.rename
        def rename_or_die(source, target):
            nonlocal renames
            if renames == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            renames -= 1
            rename(source, target)
        os.rename = rename_or_die
        sys.argv = ["soar-prep", *arguments]
        os._exit(main())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

deaths = 0
while (code := run(deaths)) == -signal.SIGKILL:
    finished = sorted(name for name in os.listdir(output + ".partial") if name.startswith("part-"))
    assert not os.path.exists(output)
    assert run(-1) == 0
    os.rename(output, f"{results}/{deaths}")
    deaths += 1
    print(json.dumps(finished), flush=True)
assert code == 0
os.rename(output, f"{results}/whole")
"""


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name not in TIMED}


@pytest.mark.slow
def test_killed_anywhere_it_resumes_to_the_same_bytes(model_directory: Models, tmp_path: Path):
    """Catches anything that a kill can break: at every single file of the run, SIGKILL, then the same command again.

    All but the timed files must be those of a run that was left alone; and before its end there is no output.
    """
    (tmp_path / "results").mkdir()
    arguments = ["quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL]
    command = [sys.executable, "-c", KILLER, str(tmp_path / "out"), str(tmp_path / "results"), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    expected = files_of(tmp_path / "results" / "whole")
    assert {"config.json", "run.json", "model.safetensors.index.json", "model-00003-of-00003.safetensors"} < set(
        expected
    )
    finished = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    # identity, three shards with a record each, index, config, run.json, the directory
    assert len(finished) == 11
    assert finished[0] == []
    assert finished[-1] == [f"part-0000{i}.json" for i in range(3)]
    for death in range(len(finished)):
        assert files_of(tmp_path / "results" / str(death)) == expected


@pytest.fixture
def interrupted(model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path) -> tuple[str, ...]:
    """Arguments of a run that has solved every layer of `model` and then stopped; its output is `out`."""
    arguments = ("quantize", f"model={model_copy('mistral')}", f"output={tmp_path / 'out'}", *SMALL)
    assert soar_prep(*arguments, "gate.max_kl=1e-9").code == 3
    return arguments


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone", "record_gone"])
def test_damaged_shard_is_done_again(damage: str, interrupted: tuple[str, ...], soar_prep: SoarPrep, tmp_path: Path):
    """Catches a resume that trusts what a dying disk left: only that layer is solved again, to the same bytes."""
    partial = tmp_path / "out.partial"
    shards = {path: path.read_bytes() for path in sorted(partial.glob("*.safetensors"))}
    times = {path.name: path.stat().st_mtime_ns for path in shards}
    _, victim, _ = shards
    if damage == "flipped":
        flipped = bytearray(shards[victim])
        flipped[len(flipped) // 2] ^= 1
        victim.write_bytes(flipped)
    elif damage == "truncated":
        victim.write_bytes(shards[victim][:-7])
    else:
        (victim if damage == "gone" else partial / "part-00001.json").unlink()
    assert soar_prep(*interrupted).code == 0
    for path, content in shards.items():
        written = tmp_path / "out" / path.name
        assert written.read_bytes() == content
        assert (written.stat().st_mtime_ns == times[path.name]) is (path != victim)


def test_second_run_is_refused_while_the_first_lives(interrupted: tuple[str, ...], soar_prep: SoarPrep, tmp_path: Path):
    """Catches two runs that write the same shards."""
    with open(tmp_path / "out.partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran = soar_prep(*interrupted)
    assert ran.code == 2
    assert f"another run is writing {tmp_path / 'out.partial'}; wait for it or stop it" in ran.err
    assert not (tmp_path / "out").exists()
    assert soar_prep(*interrupted).code == 0


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("damping=0.1", "damping"),
        ("scheme=w4a4", "scheme"),
        ("scale_rule=six", "scale_rule"),
        ("act_order=false", "act_order"),
        ("export=modelopt", "export"),
        ("weight_only_config=true", "weight_only_config"),
        ("keep_unquantized=[*.o_proj]", "keep_unquantized"),
        ("compute.dtype=bfloat16", "compute"),
        ("calibration.samples=3", "calibration"),
        ("calibration.length=17", "calibration"),
    ],
)
def test_other_settings_do_not_resume(
    option: str, changed: str, interrupted: tuple[str, ...], soar_prep: SoarPrep, tmp_path: Path
):
    """Catches layers of two different recipes in one checkpoint: what differs is named, and nothing is touched."""
    before = files_of(tmp_path / "out.partial")
    ran = soar_prep(*interrupted, option)
    assert ran.code == 2
    assert f"an interrupted run with another {changed}; give the same options to resume it" in ran.err
    assert files_of(tmp_path / "out.partial") == before
    assert not (tmp_path / "out").exists()


def test_other_weights_do_not_resume(interrupted: tuple[str, ...], soar_prep: SoarPrep, tmp_path: Path):
    """Catches layers of two different models in one checkpoint: one weight of the source has changed since."""
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    ran = soar_prep(*interrupted)
    assert ran.code == 2
    assert "an interrupted run with another model;" in ran.err


@pytest.mark.parametrize("option", ["evaluation.samples=2", "gate.max_kl=50", "wandb.project=other"])
def test_what_does_not_change_weights_may_change(option: str, interrupted: tuple[str, ...], soar_prep: SoarPrep):
    """Catches an hour of work thrown away for another gate or another evaluation."""
    ran = soar_prep(*interrupted, option)
    assert (ran.code, ran.err) == (0, "")


def test_finished_output_is_not_begun_again(interrupted: tuple[str, ...], soar_prep: SoarPrep, tmp_path: Path):
    """Catches a good checkpoint overwritten by a command out of the shell's history."""
    assert soar_prep(*interrupted).code == 0
    before = {path.name: os.stat(path).st_mtime_ns for path in (tmp_path / "out").iterdir()}
    ran = soar_prep(*interrupted)
    assert ran.code == 2
    assert f"output={tmp_path / 'out'}: exists already; choose another directory or remove it" in ran.err
    assert {path.name: os.stat(path).st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
