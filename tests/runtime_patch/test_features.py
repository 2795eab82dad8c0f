import subprocess
import sys

import pytest

from runtime_patch.features import FEATURES, TESTED, Machine, check_version, chosen, state_lines
from soar_prep.errors import UserError

CPU = Machine(TESTED[0], "2.13.0", None, None, None)
H200 = Machine(TESTED[0], "2.13.0", "0.6.18", "NVIDIA H200", (9, 0))
RTX_PRO = Machine(TESTED[0], "2.13.0", "0.6.18", "NVIDIA RTX PRO 6000D", (12, 0))
V100 = Machine(TESTED[0], "2.13.0", None, "Tesla V100", (7, 0))
AMD = Machine(TESTED[0], "2.13.0", None, "AMD Instinct MI300X", None)


def test_names_choose_features():
    """Catches a name that is passed over without a word, and a feature that is on without being asked for."""
    assert [feature.name for feature in chosen("nvfp4", H200)] == ["nvfp4"]
    for wrong in ("speed", "nvfp4,speed"):
        with pytest.raises(UserError, match="no feature speed; expected 1, or of nvfp4"):
            chosen(wrong, H200)


@pytest.mark.parametrize("machine", [V100, AMD], ids=lambda machine: machine.gpu)
def test_a_gpu_without_kernels(machine: Machine):
    """Catches kernels that are started where they were never compiled for, and a name that is ignored there."""
    assert chosen("1", machine) == []
    with pytest.raises(UserError, match=f"--features nvfp4: nvfp4 is impossible here: {machine.gpu} is"):
        chosen("nvfp4", machine, "--features")


def test_a_line_for_each_feature():
    """Catches a feature that the doctor leaves out, and one told as on that is not."""
    lines = state_lines(CPU, ["nvfp4"])
    assert len(lines) == len(FEATURES)
    assert next(line.split()[:2] for line in lines) == ["on", "nvfp4"]
    assert all(line.startswith("off ") for line in state_lines(RTX_PRO, []))
    assert all(line.startswith("impossible") and "sm_70" in line for line in state_lines(V100, []))


def test_versions():
    """Catches hooks put into an SGLang that nobody tried."""
    check_version(CPU, any_version=False)
    newer = Machine("0.9.9", *list(vars(CPU).values())[1:])
    check_version(newer, any_version=True)
    with pytest.raises(UserError, match=rf"SGLang 0\.9\.9: the patch was tested with {TESTED[0]}"):
        check_version(newer, any_version=False)
    with pytest.raises(UserError, match="not installed"):
        check_version(Machine(None, *list(vars(CPU).values())[1:]), any_version=True)


@pytest.mark.parametrize("asked", [None, "", "0"])
def test_the_plugin_costs_nothing_unasked(asked: str | None):
    """Catches a plugin that slows down or changes every SGLang on a machine where it happens to be installed."""
    code = (
        "import os, sys, time; os.environ.pop('SOAR_PATCH', None)\n"
        f"if {asked!r} is not None: os.environ['SOAR_PATCH'] = {asked!r}\n"
        "import runtime_patch; before = set(sys.modules); began = time.perf_counter(); runtime_patch.register()\n"
        "print(time.perf_counter() - began < 1e-3, sorted(set(sys.modules) - before),\n"
        "      [m for m in ('torch', 'transformers', 'hydra', 'wandb') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True [] []\n"
