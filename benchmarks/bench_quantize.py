"""Seconds that one decoder layer takes to quantize, beside llm-compressor, in one run on one GPU.

    python benchmarks/bench_quantize.py SCRATCH [--peer] [--samples 64] [--length 2048] [--hidden 4096]

A synthetic Llama: hidden 4096, intermediate 16384, 32 heads on 2 of keys and values, 64 x 2048 random tokens. A model
of one layer and one of three are quantized by the same whole call, warm, and half of the difference is what a layer
takes: reading, calibration, solving, writing (ours; the peer's oneshot() does not write). The peer needs llmcompressor
0.14.0.1 with compressed-tensors 0.19.0. Medians of --repeat pairs.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from soar_prep.gptq.quantize import quantize
from soar_prep.report import environment
from soar_prep.settings import Quantize, ScaleError, ScaleRule, TextSource

VOCABULARY = 1024
FEW, MANY = 1, 3
OURS = {
    "soar-prep, default": {},
    "soar-prep, correction=0": {"correction": 0.0},
    "soar-prep, correction=0, FourOverSix": {
        "correction": 0.0,
        "scale_rule": ScaleRule.four_over_six,
        "scale_error": ScaleError.mse,
    },
}
PEERS = {"llm-compressor, its default": "gptq", "llm-compressor, its strongest": "gptq_expanded_imatrix"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    sources = {layers: make_source(arguments, layers) for layers in (FEW, MANY)}
    contenders: dict[str, Callable[[Path], float]] = {
        name: lambda source, options=options: run_ours(source, arguments, options) for name, options in OURS.items()
    }
    if arguments.peer:
        contenders |= {
            name: lambda source, recipe=recipe: run_peer(source, arguments, recipe) for name, recipe in PEERS.items()
        }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device)
    print(f"{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}, {facts['commit']}")
    if arguments.peer:
        print(f"llmcompressor {version('llmcompressor')}, compressed-tensors {version('compressed-tensors')}")
    tokens = arguments.samples * arguments.length
    print(
        f"hidden {arguments.hidden}, {tokens:,} tokens\n\n| | s a layer | peak GPU memory |\n|---|---|---|", flush=True
    )
    for name, run in contenders.items():
        run(sources[FEW])  # compiles
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        layers = MANY - FEW
        seconds = median((run(sources[MANY]) - run(sources[FEW])) / layers for _ in range(arguments.repeat))
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0
        print(f"| {name} | {seconds:.2f} | {memory:.1f} GiB |", flush=True)


def make_source(arguments: argparse.Namespace, layers: int) -> Path:
    directory = arguments.scratch / f"source-{layers}"
    if (directory / "config.json").exists():
        return directory
    heads = arguments.hidden // 128
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 16, 1),
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=arguments.length,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (arguments.samples, arguments.length))
    np.save(directory / "tokens.npy", drawn)
    return directory


def run_ours(source: Path, arguments: argparse.Namespace, options: dict) -> float:
    output = arguments.scratch / "ours"
    shutil.rmtree(output, ignore_errors=True)
    settings = Quantize(model=str(source), output=str(output), **options)
    for text, samples, length in (
        (settings.calibration, arguments.samples, arguments.length),
        (settings.evaluation, 1, 16),  # speed alone is asked for
    ):
        text.source, text.path, text.samples, text.length = (
            TextSource.tokens,
            str(source / "tokens.npy"),
            samples,
            length,
        )
    began = time.perf_counter()
    quietly(lambda: quantize(settings))
    return time.perf_counter() - began


def run_peer(source: Path, arguments: argparse.Namespace, recipe: str) -> float:
    from peer_llmcompressor import load_windows
    from peer_llmcompressor import quantize as quantize_by_peer

    output = arguments.scratch / "peer"
    shutil.rmtree(output, ignore_errors=True)
    windows = load_windows(source / "tokens.npy")
    return quietly(lambda: quantize_by_peer(source, windows, output, recipe, "NVFP4", "bfloat16"))["seconds"]


def quietly(function: Callable):
    """What it returns; what it prints goes nowhere, for it is the table that counts."""
    standard = sys.stdout
    try:
        with open("/dev/null", "w") as sys.stdout:
            return function()
    finally:
        sys.stdout = standard


if __name__ == "__main__":
    main()
