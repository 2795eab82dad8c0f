import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from soar_prep.errors import CheckFailed, UserError
from soar_prep.settings import Quantize, Selftest, Verify, manual

SoarPrep = Callable[..., Any]
GOOD = ("model=m", "output=o")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings that commands were called with; the commands themselves do nothing."""
    calls: list[Any] = []

    def note(settings: Quantize) -> Path:
        calls.append(settings)
        return Path("o")

    monkeypatch.setattr("soar_prep.gptq.quantize.quantize", note)
    monkeypatch.setattr("soar_prep.verify.verify", calls.append)
    return calls


@pytest.mark.parametrize(("command", "settings"), [("quantize", Quantize), ("verify", Verify), ("selftest", Selftest)])
def test_help_is_the_whole_manual(command: str, settings: type, soar_prep: SoarPrep):
    """Catches a help page of Hydra's in place of ours, or one that a `$` or brace in a text mangles."""
    ran = soar_prep(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert manual(settings) in ran.out
    assert f"soar-prep {command} " in ran.out
    assert "Exit codes: 0 done, 2 bad input, 3 " in ran.out


def test_overview_names_every_command(soar_prep: SoarPrep):
    """Catches a command that nobody can find; without arguments the exit code says that nothing was done."""
    for arguments, code in (((), 2), (("-h",), 0), (("--help",), 0)):
        ran = soar_prep(*arguments)
        assert (ran.code, ran.err) == (code, "")
        assert "quantize " in ran.out
        assert "verify " in ran.out
        assert "selftest " in ran.out


REFUSED = {
    "command": (
        ["quantise", *GOOD],
        "quantise: no such command, did you mean quantize; there are quantize, train-draft",
    ),
    "nothing": (["quantize"], "model: required; for example soar-prep quantize model="),
    "no_output": (["quantize", "model=m"], "output: required; for example soar-prep quantize model="),
    "no_directory": (["verify"], "directory: required; for example soar-prep verify "),
    "misspelt": (["quantize", *GOOD, "dampin=0.1"], "dampin: no such option, did you mean damping; see --help"),
    "misspelt_group": (
        ["quantize", *GOOD, "calibraton.samples=3"],
        "calibraton.samples: no such option, did you mean calibration.samples; see --help",
    ),
    "misspelt_in_group": (
        ["quantize", *GOOD, "compute.devise=cpu"],
        "compute.devise: no such option, did you mean compute.device; see --help",
    ),
    "extra": (["quantize", *GOOD, "+extra=1"], "extra: no such option; see --help"),
    "extra_in_group": (["quantize", *GOOD, "+gate.min_kl=1"], "gate.min_kl: no such option, did you mean gate.max_kl"),
    "enum": (
        ["quantize", *GOOD, "scale_rule=seven"],
        "scale_rule=seven: Invalid value 'seven', expected one of [six, ",
    ),
    "range": (["quantize", *GOOD, "damping=2"], "damping=2.0: expected 1e-06 to 1.0; see --help"),
    "range_in_group": (
        ["quantize", *GOOD, "evaluation.samples=0"],
        "evaluation.samples=0: expected 1 or more; see --help",
    ),
    "number": (["quantize", *GOOD, "damping=much"], "damping=much: Value 'much' of type 'str' could not be converted"),
    "whole": (["quantize", *GOOD, "calibration.samples=1.5"], "calibration.samples=1.5: Value '1.5' "),
    "boolean": (["quantize", *GOOD, "act_order=maybe"], "act_order=maybe: Value 'maybe' is not a valid bool"),
    "list": (["quantize", *GOOD, "keep_unquantized=lm_head"], "keep_unquantized=lm_head: Invalid value assigned: str"),
    "null": (["quantize", *GOOD, "damping=null"], "damping=null: field 'damping' is not Optional"),
    "group": (["quantize", *GOOD, "calibration=novel"], "calibration=novel: expected one of builtin chat text tokens"),
    "not_a_group": (["quantize", *GOOD, "compute=cpu"], "compute=cpu: Invalid type assigned"),
    "dashes": (["quantize", "--model", "m"], "--model: options have no dashes; write model=value"),
    "dashes_equal": (["quantize", *GOOD, "--gate.max_kl=1"], "--gate.max_kl=1: options have no dashes; write gate."),
    "no_equal": (["quantize", *GOOD, "w4a4"], "w4a4: not of the form option=value; quote values with special"),
    "syntax": (["quantize", "model=m", "output=["], "output=[: not of the form option=value"),
    "sweep": (["quantize", "model=m,n", "output=o"], "Ambiguous value for argument 'model=m,n'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused_in_one_line(
    case: str, soar_prep: SoarPrep, received: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches a misspelt option that is ignored, a traceback, and a run that begins before its options are right."""
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    ran = soar_prep(*arguments)
    assert ran.code == 2
    assert ran.err.startswith(f"soar-prep: {message}")
    assert ran.err.count("\n") == 1
    assert received == []
    assert list(tmp_path.iterdir()) == []


def test_options_reach_the_command(soar_prep: SoarPrep, received: list[Any]):
    """Catches an override that is parsed and dropped, and a group file that changes more than its source."""
    ran = soar_prep(
        *("quantize", "model=a/b", "output=out dir", "scale_rule=six", "keep_unquantized=[*.layers.0.*,lm_head]"),
        *("calibration=chat", "calibration.path=x.jsonl", "evaluation=tokens", "compute.threads=1", "gate.max_kl=0.5"),
    )
    assert (ran.code, ran.err) == (0, "")
    expected = Quantize(model="a/b", output="out dir", keep_unquantized=["*.layers.0.*", "lm_head"])
    expected.scale_rule = type(expected.scale_rule).six
    expected.calibration.source = type(expected.calibration.source).chat
    expected.calibration.path = "x.jsonl"
    expected.evaluation.source = type(expected.evaluation.source).tokens
    expected.compute.threads, expected.gate.max_kl = 1, 0.5
    assert received == [expected]


def test_directory_may_stand_without_its_name(soar_prep: SoarPrep, received: list[Any]):
    """Catches `soar-prep verify DIRECTORY`, as every message recommends it, being refused."""
    assert soar_prep("verify", "some/dir", "scheme=w4a4").code == 0
    assert (received[0].directory, received[0].scheme.value) == ("some/dir", "w4a4")


def test_composed_settings_can_be_printed(soar_prep: SoarPrep, received: list[Any]):
    """Catches --cfg job running the command, or printing Hydra's own settings among ours."""
    ran = soar_prep("quantize", *GOOD, "damping=0.5", "--cfg", "job")
    assert (ran.code, ran.err, received) == (0, "", [])
    printed = yaml.safe_load(ran.out)
    assert printed["damping"] == 0.5
    assert printed["calibration"]["source"] == "builtin"
    assert set(printed) == set(Quantize.__dataclass_fields__)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("thing=1: expected 2"), 2, "soar-prep: thing=1: expected 2\n"),
        (CheckFailed("gate.max_kl=1: too much"), 3, "soar-prep: gate.max_kl=1: too much\n"),
        (
            OSError(28, "No space left on device", "/x/y"),
            2,
            "soar-prep: /x/y: No space left on device; finished layers",
        ),
        (KeyboardInterrupt(), 130, "\nsoar-prep: interrupted; the same command resumes\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, soar_prep: SoarPrep, monkeypatch: pytest.MonkeyPatch
):
    """Catches a failure that scripts take for success, and a traceback for what the user can mend."""

    def fail(_: Quantize) -> None:
        raise error

    monkeypatch.setattr("soar_prep.gptq.quantize.quantize", fail)
    ran = soar_prep("quantize", *GOOD)
    assert ran.code == code
    assert ran.err.startswith(message)


def test_programming_errors_keep_their_traceback(soar_prep: SoarPrep, monkeypatch: pytest.MonkeyPatch):
    """Catches a bug of ours dressed up as the user's mistake."""
    monkeypatch.setattr("soar_prep.gptq.quantize.quantize", lambda _: int("bug"))
    with pytest.raises(ValueError, match="bug"):
        soar_prep("quantize", *GOOD)


def test_multirun_quantizes_once_for_each_value(
    soar_prep: SoarPrep, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches runs that share state, a sweep that stops after one, and an output that is not named as written.

    The two rules must give different scales, and nothing else is left behind.
    """
    monkeypatch.chdir(tmp_path)
    ran = soar_prep(
        *("quantize", "--multirun", "scale_rule=six,sweep", f"model={model_directory('mistral')}"),
        *("output='out-${scale_rule}'", "calibration.samples=2", "calibration.length=16", "evaluation.samples=1"),
        *("evaluation.length=16", "compute.device=cpu"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-six", "out-sweep"]
    scales = []
    for name in ("out-six", "out-sweep"):
        with safe_open(tmp_path / name / "model-00002-of-00003.safetensors", framework="pt") as shard:
            scales.append(shard.get_tensor("model.layers.0.mlp.up_proj.weight_scale").float())
    assert not scales[0].equal(scales[1])


def test_script_is_installed_and_answers(tmp_path: Path):
    """Catches an entry point that does not start, and an exit code that does not reach the shell."""
    script = Path(sys.executable).with_name("soar-prep")
    ran = subprocess.run(
        [script, "quantize", "model=m"], capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("soar-prep: output: required")
    assert ran.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
