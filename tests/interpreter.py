"""Where a kernel's tests run: on a GPU, or without one on the CPU under Triton's interpreter.

The interpreter has to be chosen before triton is imported, so such a file runs itself again in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: run `pytest -m cuda` on a machine with one")
ON_CPU = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of test_under_the_interpreter")
ON_GPU = (pytest.mark.cuda, NEEDS_GPU)
COMPILED = pytest.mark.skipif(INTERPRETED, reason="needs the compiler, which the interpreter replaces")


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """The marks of a test that calls `run_interpreted`."""
    old = pytest.mark.skipif(
        version("triton") < "3.7", reason="numpy 2.4 breaks run-time loop bounds in this interpreter"
    )
    for mark in (pytest.mark.slow, old, pytest.mark.skipif(HAS_GPU, reason="the same tests run on the GPU"), COMPILED):
        test = mark(test)
    return test


def run_interpreted(file: str, *options: str) -> None:
    """Run a file's tests under the interpreter, but those for a GPU; AssertionError with what they printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not cuda", *options, file]
    child = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
