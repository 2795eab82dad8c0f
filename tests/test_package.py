import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory into which a wheel of this checkout is installed, without its dependencies."""
    scratch = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, scratch)
    for name in ("soar_prep", "configs", "runtime_patch"):
        shutil.copytree(ROOT / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    (scratch / "dist").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=scratch, check=True, capture_output=True)
    (wheel,) = (scratch / "dist").glob("soar_prep-*.whl")
    target = scratch / "site"
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(pip, check=True)
    return target


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command: list[str | Path] = [sys.executable, installed / "bin" / "soar-prep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=installed, check=False)


def test_wheel_holds_the_whole_program(installed: Path):
    """Catches a package or a YAML file that only an editable install sees."""
    trees = {"soar_prep": "soar_prep", "configs": "soar_prep/configs", "runtime_patch": "runtime_patch"}
    for tree, copy in ((tree, installed / place) for tree, place in trees.items()):
        for path in (ROOT / tree).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                packed = copy / path.relative_to(ROOT / tree)
                assert packed.read_bytes() == path.read_bytes()
    (metadata,) = installed.glob("soar_prep-*.dist-info")
    assert any(metadata.rglob("LICENSE"))
    entries = (metadata / "entry_points.txt").read_text()
    assert "[sglang.srt.plugins]\nsoar_prep = runtime_patch:register" in entries


def test_installed_command_finds_its_configs(installed: Path):
    """Catches a command that needs the checkout, and one that reads another package's configs/ beside its own."""
    decoy = installed / "configs"
    decoy.mkdir(exist_ok=True)
    (decoy / "quantize.yaml").write_text("defaults: [no_such_schema]\n")
    ran = run_installed(installed, "quantize", "model=m", "output=o", "evaluation=chat", "--cfg", "job")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "source: chat" in ran.stdout
    where = [sys.executable, "-c", "import soar_prep.cli; print(soar_prep.cli.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    found = subprocess.run(where, capture_output=True, text=True, env=environment, cwd=installed, check=True).stdout
    assert Path(found.strip()).is_relative_to(installed)
