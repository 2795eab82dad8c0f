"""What a run shows and keeps: a progress bar, metrics.jsonl, wandb, and the facts that go into run.json."""

import json
import platform
import resource
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from soar_prep.settings import Wandb, WandbMode

PACKAGES = ("soar-prep", "torch", "transformers", "accelerate", "safetensors", "datasets", "hydra-core")


class Progress:
    """Steps of a long run: on a terminal a bar, elsewhere lines; figures go to metrics.jsonl and wandb.

    done: steps that a resumed run has behind it; of an interrupted one's metrics.jsonl those lines are kept.
    quiet: seconds between two lines, at least; the last step always has one.
    """

    def __init__(
        self,
        directory: Path,
        steps: int,
        unit: str,
        wandb: Wandb,
        settings: dict[str, Any],
        done: int = 0,
        quiet: float = 0.0,
    ):
        self.path = directory / "metrics.jsonl"
        kept = self.path.read_text(encoding="utf-8").splitlines(keepends=True)[:done] if self.path.exists() else []
        self.path.write_text("".join(kept), encoding="utf-8")
        self.started = self.shown_at = time.monotonic()
        self.steps, self.unit, self.done, self.already, self.quiet = steps, unit, done, done, quiet
        self.bar = tqdm(total=steps, initial=done, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self.run = None
        if wandb.mode is not WandbMode.disabled:
            import wandb as client  # slow to import, and most runs do without

            self.run = client.init(project=wandb.project, mode=wandb.mode.value, config=settings, dir=str(directory))

    def step(self, figures: dict[str, Any], shown: str) -> None:
        """One step is done: `figures` are kept, `shown` is what the bar says."""
        self.done += 1
        elapsed = time.monotonic() - self.started
        figures = {self.unit: self.done, **figures, "elapsed_seconds": round(elapsed, 3), "memory_bytes": peak_memory()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        if self.run is not None:
            lists = {f"{k}/{i}": x for k, v in figures.items() if isinstance(v, list) for i, x in enumerate(v)}
            self.run.log(lists | {k: v for k, v in figures.items() if isinstance(v, int | float)})
        shown = f"{shown}, {peak_memory() / 2**30:.1f} GiB"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and (now - self.shown_at >= self.quiet or self.done in (self.already + 1, self.steps)):
            self.shown_at = now
            remaining = elapsed / (self.done - self.already) * (self.steps - self.done)
            print(f"{self.unit} {self.done}/{self.steps}: {shown}, {elapsed:.0f} s, about {remaining:.0f} s to go")

    def close(self, summary: dict[str, Any]) -> None:
        self.bar.close()
        if self.run is not None:
            self.run.summary.update(summary)
            self.run.finish()

    def elapsed(self) -> float:
        return time.monotonic() - self.started


def peak_memory() -> int:
    """Bytes at the highest: of the GPU if there is one in use, else of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(value: Any) -> Any:
    """Settings dataclasses as JSON types."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value.value if isinstance(value, Enum) else value


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, source commit and device of this run."""
    return {
        "python": platform.python_version(),
        # torch tells its build too, 2.13.0+cu130; the package index does not
        "packages": {name: installed_version(name) for name in PACKAGES} | {"torch": str(torch.__version__)},
        "commit": source_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }


def installed_version(package: str) -> str | None:
    """None where it runs from a checkout on the path, without having been installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Commit of the checkout this file lies in, `+` if it was changed since; None for an installed package."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        if not (here.parent / ".git").exists():
            return None
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
