"""Accuracy of quantization recipes on the same windows, ours and peers', as one table.

    python benchmarks/smollm2.py out/smollm2
    python benchmarks/windows.py out/smollm2 out/windows.npz
    python benchmarks/bench_accuracy.py out/smollm2 out/windows.npz SCRATCH [--peer NAME=DIRECTORY ...] [recipes ...]

A recipe runs the quantize road itself into SCRATCH/<recipe> (kept, so a second call only measures). A peer is a
checkpoint directory that its own program wrote from the same calibration windows (peer_llmcompressor.py). All of
them are measured from their files by one function, in one dtype (--dtype, float32), against the same source.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soar_prep.checkpoint import Checkpoint
from soar_prep.gptq.quantize import quantize
from soar_prep.quality import compare, last_hidden
from soar_prep.report import environment
from soar_prep.settings import Compute, Evaluation, Method, Quantize, ScaleError, ScaleRule, Scheme, Text, TextSource
from soar_prep.streaming import StreamedModel, pick_device
from soar_prep.text import Windows

RTN = {"method": Method.round_to_nearest}
SIX = {"scale_rule": ScaleRule.six, "scale_error": ScaleError.mse}
FOUR_OVER_SIX = {"scale_rule": ScaleRule.four_over_six, "scale_error": ScaleError.mse}
AS_IT_IS = {"correction": 0.0}
# recipe -> options that differ from the defaults
RECIPES: dict[str, dict[str, Any]] = {
    "rtn-six": RTN | SIX,
    "rtn-4/6": RTN | FOUR_OVER_SIX,
    "gptq-six": SIX | AS_IT_IS,
    "gptq-4/6-mse": FOUR_OVER_SIX | AS_IT_IS,
    "gptq-4/6-hessian": {"scale_rule": ScaleRule.four_over_six} | AS_IT_IS,
    "gptq-sweep-hessian": AS_IT_IS,
    "corrected-0.25": {"correction": 0.25},
    "corrected-0.5": {},  # the default
    "corrected-0.75": {"correction": 0.75},
    "corrected-1": {"correction": 1.0},
    "corrected-0.5-4/6-mse": FOUR_OVER_SIX,
    "corrected-0.5-refined": {"refine_passes": 2},
    "corrected-0.5-exact": {"exact_loss": True},
    "corrected-0.5-w4a4": {"scheme": Scheme.w4a4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("windows")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=None, help="draw half of the calibration windows by this seed")
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    compute = Compute(dtype=arguments.dtype, batch_tokens=8192)
    windows = dict(np.load(arguments.windows))
    calibration = calibration_file(windows.pop("calib"), arguments.scratch, arguments.seed)

    checkpoints: dict[str, tuple[Path, float | None]] = {}
    for recipe in arguments.recipes:
        checkpoints[recipe] = run_recipe(recipe, arguments, calibration, compute)
    for peer in arguments.peer:
        name, _, directory = peer.partition("=")
        checkpoints[name] = (Path(directory), peer_seconds(Path(directory)))

    facts = environment(pick_device(compute))
    print(f"\n{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}, {facts['commit']}\n")
    print_table(arguments.model, checkpoints, windows, compute)


def calibration_file(ids: np.ndarray, scratch: Path, seed: int | None) -> Path:
    if seed is not None:
        ids = ids[np.random.default_rng(seed).permutation(len(ids))[: len(ids) // 2]]
    path = scratch / f"calibration-{'all' if seed is None else seed}.npy"
    np.save(path, ids)
    return path


def run_recipe(recipe: str, arguments: argparse.Namespace, calibration: Path, compute: Compute) -> tuple[Path, float]:
    name = recipe.replace("/", "-") + ("" if arguments.seed is None else f"-seed{arguments.seed}")
    output, timing = arguments.scratch / name, arguments.scratch / f"{name}.json"
    if not output.exists():
        samples, length = np.load(calibration).shape
        started = time.monotonic()
        quantize(
            Quantize(
                model=arguments.model,
                output=str(output),
                calibration=Text(TextSource.tokens, str(calibration), samples, length),
                evaluation=Evaluation(TextSource.tokens, str(calibration), 1, 16),  # measured below
                compute=compute,
                **RECIPES[recipe],
            )
        )
        timing.write_text(json.dumps({"seconds": time.monotonic() - started}))
    return output, json.loads(timing.read_text())["seconds"]


def peer_seconds(directory: Path) -> float | None:
    timing = directory.with_suffix(".json")
    return json.loads(timing.read_text())["seconds"] if timing.exists() else None


def print_table(
    model: str, checkpoints: dict[str, tuple[Path, float | None]], windows: dict[str, np.ndarray], compute: Compute
) -> None:
    sets = {name: as_windows(ids) for name, ids in windows.items()}
    source = StreamedModel(Checkpoint(Path(model)), compute)
    expected = {name: last_hidden(source, w, Scheme.w4a16, compute.batch_tokens) for name, w in sets.items()}
    columns = " | ".join(f"{name} perplexity | KL | top-1" for name in sets)
    print(f"| recipe | scheme | {columns} | 4-blocks | seconds |")
    print("|---" * (4 + 3 * len(sets)) + "|")
    perplexities = [compare(w, source, expected[name], source, expected[name]).perplexity for name, w in sets.items()]
    print("| source | | " + " | ".join(f"{p:.3f} | |" for p in perplexities) + " | |")
    for recipe, (directory, seconds) in checkpoints.items():
        quantized = StreamedModel(Checkpoint(directory), compute)
        for scheme in Scheme:
            cells = []
            for name, w in sets.items():
                got = last_hidden(quantized, w, scheme, compute.batch_tokens)
                q = compare(w, source, expected[name], quantized, got)
                cells.append(f"{q.perplexity:.3f} | {q.kl:.4f} +- {q.kl_error:.4f} | {q.top1:.1%}")
            fours, took = share_of_fours(directory), "" if seconds is None else f"{seconds:.1f}"
            print(f"| {recipe} | {scheme.value} | {' | '.join(cells)} | {fours} | {took} |", flush=True)


def as_windows(ids: np.ndarray) -> Windows:
    token_ids = torch.from_numpy(ids.astype(np.int64))
    return Windows(token_ids, torch.ones_like(token_ids, dtype=torch.bool))


def share_of_fours(directory: Path) -> str:
    run = directory / "run.json"
    if not run.exists():
        return ""
    linears = json.loads(run.read_text())["linears"].values()
    return f"{sum(linear['share_of_fours'] for linear in linears) / len(linears):.0%}"


if __name__ == "__main__":
    main()
