"""A MiniCPM-SALA of full size and random weights, quantized end to end: where time and memory go.

    python benchmarks/bench_full_size.py DIR                       # 32 layers, 9.48B parameters; 128 x 2048 tokens
    python benchmarks/bench_full_size.py DIR --layers 2 --hidden 512 --samples 4 --length 256     # a small trial

DIR/source is written layer by layer, if it is not there; DIR/nvfp4 is the result, written anew. The published weights'
shapes, names and options; random tokens. Times of the parts exclude each other and were taken with the GPU idle before
and after each part, which costs the whole run little: the parts are long.
"""

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from soar_prep.checkpoint import Checkpoint, PartialOutput
from soar_prep.gptq import quantize as road
from soar_prep.gptq import solve
from soar_prep.gptq.hessian import Factor, InputStatistics
from soar_prep.gptq.passes import LayerPasses
from soar_prep.report import environment
from soar_prep.sala import MiniCPMSALAConfig, MiniCPMSALAForCausalLM
from soar_prep.settings import Quantize, TextSource
from soar_prep.streaming import StreamedModel, pick_device

PARTS = (
    (Checkpoint, "check_and_hash", "source read and hashed"),
    (StreamedModel, "load_layer", "layers read"),
    (LayerPasses, "linear_inputs", "forward passes for the statistics"),
    (InputStatistics, "add", "Hessians and drifts"),
    (solve, "factorize", "factors"),
    (Factor, "times_inverse", "targets corrected"),
    (solve, "quantizer_for", "block scales"),
    (solve, "round_columns", "columns"),
    (road, "solve_group", "solver's rest"),
    (LayerPasses, "advance", "forward passes to the next layer"),
    (PartialOutput, "write_behind", "waiting for shards to be written"),
    (road, "replace_weights", "weights dequantized"),
    (road, "measure", "quality measured"),
)


class Clock:
    """Seconds of each part without the parts inside it."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.stack = device, dict.fromkeys((part[2] for part in PARTS), 0.0), [0.0]

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self.wait()
            began = time.perf_counter()
            self.stack.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                self.wait()
                whole = time.perf_counter() - began
                self.seconds[name] += whole - self.stack.pop()
                self.stack[-1] += whole

        return run

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def watching(self) -> Any:
        originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in PARTS]
        for owner, attribute, name in PARTS:
            own = getattr(owner, attribute)
            if attribute == "quantizer_for":  # what it returns is what takes the time
                watched = lambda device, own=own, name=name: self.timed(own(device), name)  # noqa: E731
            else:
                watched = self.timed(own, name)
            setattr(owner, attribute, watched)
        try:
            yield
        finally:
            for owner, attribute, own in originals:
                setattr(owner, attribute, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size; heads and MLP in the published ratio")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--correction", type=float, default=Quantize.correction)
    arguments = parser.parse_args()
    source, output = arguments.directory / "source", arguments.directory / "nvfp4"
    began = time.perf_counter()
    if not source.exists():
        write_source(source, arguments)
    print(f"source: {folder_size(source) / 1e9:.1f} GB, written in {time.perf_counter() - began:.0f} s", flush=True)
    for left in (output, output.with_name("nvfp4.partial")):
        shutil.rmtree(left, ignore_errors=True)

    settings = Quantize(model=str(source), output=str(output))
    for text, samples in ((settings.calibration, arguments.samples), (settings.evaluation, 2)):
        text.source, text.path = TextSource.tokens, str(source / "tokens.npy")
        text.samples, text.length = samples, arguments.length
    settings.compute.batch_tokens = arguments.batch_tokens
    settings.correction = arguments.correction
    device = pick_device(settings.compute)
    clock = Clock(device)
    began = time.perf_counter()
    with clock.watching():
        road.quantize(settings)
    whole = time.perf_counter() - began
    report(clock, whole, source, output, device, arguments)


def write_source(directory: Path, arguments: argparse.Namespace) -> None:
    """Every tensor normal with deviation 1 / sqrt(inputs) in BF16, norms of one; a shard a layer."""
    heads = max(arguments.hidden // 128, 2)
    config = MiniCPMSALAConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        lightning_nh=heads,
        dim_model_base=max(arguments.hidden // 16, 1),
        architectures=["MiniCPMSALAForCausalLM"],
        dtype="bfloat16",
        sparse_config={"dense_len": 8192},
    )
    with init_empty_weights():
        model = MiniCPMSALAForCausalLM(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(part, {})[name] = weight
    partial = directory.with_name("source.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    index = {}
    for part, weights in shards.items():
        tensors = {}
        for name, weight in weights.items():
            if weight.ndim == 1:
                tensors[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
                continue
            drawn = torch.randn(weight.shape, generator=generator, device=device) * weight.shape[1] ** -0.5
            tensors[name] = drawn.bfloat16().cpu()
        file = f"model-{part}.safetensors"
        save_file(tensors, partial / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    total = sum(weight.numel() for weight in model.parameters())
    (partial / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 2 * total}, "weight_map": index})
    )
    config.save_pretrained(partial)
    words = {f"w{n}": n for n in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), unk_token="w0")
    tokenizer.save_pretrained(partial)
    shape = (max(arguments.samples, 2), arguments.length)
    np.save(partial / "tokens.npy", np.random.default_rng(0).integers(0, config.vocab_size, shape))
    partial.rename(directory)
    print(f"{total:,} parameters", flush=True)


def folder_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*"))


def report(
    clock: Clock, whole: float, source: Path, output: Path, device: torch.device, arguments: argparse.Namespace
) -> None:
    facts = environment(device)
    print(f"\n{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}, {facts['commit']}")
    tokens = arguments.samples * arguments.length
    print(
        f"{arguments.layers} layers of hidden size {arguments.hidden}, {tokens:,} calibration tokens, "
        f"correction={arguments.correction}\n"
    )
    print("| part | seconds | share |\n|---|---|---|")
    rest = whole - sum(clock.seconds.values())
    for name, seconds in sorted((clock.seconds | {"everything else": rest}).items(), key=lambda x: -x[1]):
        print(f"| {name} | {seconds:.1f} | {seconds / whole:.0%} |")
    print(f"| **all** | **{whole:.1f}** | |")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak main memory {host:.1f} GiB", end="")
    if device.type == "cuda":
        peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
        print(f"; GPU memory {peaks[0] / 2**30:.1f} GiB allocated, {peaks[1] / 2**30:.1f} GiB reserved", end="")
    print(f"; source {folder_size(source) / 1e9:.2f} GB, NVFP4 {folder_size(output) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
