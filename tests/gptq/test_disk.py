import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    *("calibration.samples=2", "calibration.length=16", "evaluation.samples=1", "evaluation.length=16"),
    "compute.device=cpu",
)
Models = Callable[[str], Path]
SoarPrep = Callable[..., Any]


def files_of(directory: Path) -> dict[str, bytes]:
    timed = ("report.html", "metrics.jsonl")
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name not in timed}


@pytest.mark.parametrize(
    ("limit", "file", "finished"),
    [
        (500, "identity.json", 0),  # not even the run's own notes
        (20_000, "model-00001-of-00003.safetensors", 0),
        (60_000, "model-00003-of-00003.safetensors", 2),  # the layer that stays BF16
    ],
)
def test_full_disk_ends_in_one_line_and_resumes(
    limit: int, file: str, finished: int, model_directory: Models, soar_prep: SoarPrep, tmp_path: Path
):
    """Catches a half shard that is taken for whole, and a traceback: the system really refuses the bytes here."""
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    arguments = [
        *("quantize", f"model={model_directory('qwen3')}", f"output={output}", "keep_unquantized=[*.layers.1.*]"),
        *SMALL,
    ]
    command = [sys.executable, "-m", "soar_prep.cli", *arguments]

    def cap() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    ran = subprocess.run(command, preexec_fn=cap, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    message = f"soar-prep: {partial / file}: File too large; finished layers are kept, the same command resumes\n"
    assert ran.stderr == message
    assert not output.exists()
    assert len(list(partial.glob("part-*.json"))) == len(list(partial.glob("*.safetensors"))) == finished
    assert not list(partial.glob("*.tmp"))

    resumed = soar_prep(*arguments)
    assert (resumed.code, resumed.err) == (0, "")
    again = files_of(output)
    output.rename(tmp_path / "resumed")
    assert soar_prep(*arguments).code == 0
    assert files_of(output) == again


def test_full_disk_is_foreseen(
    model_directory: Models, soar_prep: SoarPrep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches a run of an hour whose last shard was never going to fit."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("soar_prep.gptq.budget.shutil.disk_usage", lambda _: usage)
    ran = soar_prep("quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL)
    assert ran.code == 2
    assert "disk: 0.00 GiB needed for the output, 0.00 GiB free; free some or write the output elsewhere" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written(model_directory: Models, soar_prep: SoarPrep, tmp_path: Path):
    """Catches a traceback, and an hour of work before it."""
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "out"
    ran = soar_prep("quantize", f"model={model_directory('mistral')}", f"output={output}", *SMALL)
    assert ran.code == 2
    assert ran.err == f"soar-prep: output={output}: cannot be written (Not a directory); choose another directory\n"
    assert "layer 1/2" not in ran.out
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_foreign_directory_is_left_alone(name: str, model_directory: Models, soar_prep: SoarPrep, tmp_path: Path):
    """Catches somebody's files overwritten or deleted because they stood where the output goes."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("mine")
    ran = soar_prep("quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL)
    assert ran.code == 2
    assert ("exists already" if name == "out" else "holds config.json, which no run of this program") in ran.err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name: path.read_text() for path in (tmp_path / name).iterdir()} == {"config.json": "mine"}


def test_file_in_the_place_of_the_output(model_directory: Models, soar_prep: SoarPrep, tmp_path: Path):
    """Catches a file replaced by a directory."""
    (tmp_path / "out").write_text("mine")
    ran = soar_prep("quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL)
    assert ran.code == 2
    assert "exists already; choose another directory or remove it" in ran.err
    assert (tmp_path / "out").read_text() == "mine"


def test_missing_parents_are_made(model_directory: Models, soar_prep: SoarPrep, tmp_path: Path):
    """Catches a run refused, or lost at the end, because a directory above the output is not there yet."""
    output = tmp_path / "a" / "b" / "out"
    assert soar_prep("quantize", f"model={model_directory('mistral')}", f"output={output}", *SMALL).code == 0
    assert (output / "config.json").exists()
