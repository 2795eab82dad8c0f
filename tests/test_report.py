import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from soar_prep import report
from soar_prep.report import Progress, environment, plain, source_commit
from soar_prep.settings import Quantize, ScaleRule, Wandb, WandbMode


def test_every_step_is_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches an hour of silence in a log file, and figures that are shown and not kept."""
    progress = Progress(tmp_path, 2, "layer", Wandb(), {})
    progress.step({"error": 0.5}, "error 0.5")
    progress.step({"error": 0.25}, "error 0.25")
    progress.close({})
    pattern = r"layer {}/2: error {}, \d+\.\d GiB, \d+ s, about \d+ s to go"
    for line, step, error in zip(capsys.readouterr().out.splitlines(), (1, 2), ("0.5", "0.25"), strict=True):
        assert re.fullmatch(pattern.format(step, re.escape(error)), line)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["layer"], row["error"]) for row in rows] == [(1, 0.5), (2, 0.25)]
    assert all(row["memory_bytes"] > 2**20 and row["elapsed_seconds"] >= 0 for row in rows)


class FakeRun:
    """Stands for a wandb run: keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.is_finished = False

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


@pytest.mark.parametrize("mode", list(WandbMode))
def test_wandb_gets_numbers_and_the_settings(mode: WandbMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches tracking that starts unasked, or that loses the settings, the figures or the end of a run."""
    run, started = FakeRun(), []

    def init(**options: Any) -> FakeRun:
        started.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    progress = Progress(tmp_path, 1, "layer", Wandb(mode=mode, project="p"), {"seed": 3})
    progress.step({"error": 0.5, "linears": {"a": 1}}, "")
    progress.close({"kl": 0.1})
    if mode is WandbMode.disabled:
        assert started == []
        return
    assert started == [{"project": "p", "mode": mode.value, "config": {"seed": 3}, "dir": str(tmp_path)}]
    (row,) = run.rows
    assert (row["error"], row["layer"]) == (0.5, 1)
    assert "linears" not in row
    assert (run.summary, run.is_finished) == ({"kl": 0.1}, True)


def test_settings_become_json():
    """Catches an enum or a nested group that json refuses, or that loses its value."""
    settings = plain(Quantize(model="m", output="o", scale_rule=ScaleRule.six))
    assert json.loads(json.dumps(settings)) == settings
    assert settings["scale_rule"] == "six"
    assert settings["calibration"]["source"] == "builtin"
    assert settings["gate"] == {"max_kl": None}


def test_environment_is_that_of_this_process():
    """Catches versions of something else than what runs."""
    facts = environment(torch.device("cpu"))
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["python"] == sys.version.split()[0]
    json.dumps(facts)


def test_commit_is_of_the_checkout_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches the commit of whatever repository an installed package happens to lie in."""
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}\+?", commit)
    monkeypatch.setattr(report, "__file__", str(tmp_path / "site-packages" / "soar_prep" / "report.py"))
    assert source_commit() is None
