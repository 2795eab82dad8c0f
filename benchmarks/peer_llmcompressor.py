"""Quantize a Hugging Face model directory with llm-compressor, as the peer to compare against.

    python benchmarks/peer_llmcompressor.py MODEL WINDOWS OUTPUT --recipe gptq --scheme NVFP4 --dtype float32

WINDOWS holds calibration tokens [n, T]: an .npz with the array "calib", or an .npy. They are fed one window at a time,
in order. OUTPUT gets an ordinary compressed-tensors checkpoint. The last line on stdout is a JSON record; "seconds" is
the wall time of oneshot() alone, with the model already loaded into CPU memory (the flow llm-compressor documents).

Recipes, by weight observer (all leave lm_head alone):
    rtn                    round to nearest, min-max block scales
    rtn_expanded_mse       round to nearest, block scales by a wide MSE search (its "fouroversix" observer)
    gptq                   GPTQModifier as published: static activation order, min-max block scales
    gptq_expanded_mse      the same with the MSE search
    gptq_expanded_imatrix  the same with the search weighted by the inputs' second moments

Needs llmcompressor 0.14.0.1 and compressed-tensors 0.19.0. compressed-tensors decompresses NVFP4 to bf16 whatever dtype
is asked for, so load OUTPUT with dtype=torch.bfloat16 even where --dtype was float32.
"""

import argparse
import json
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

WEIGHT_OBSERVERS = {
    "rtn": None,
    "rtn_expanded_mse": "nvfp4_expanded_mse",
    "gptq": None,
    "gptq_expanded_mse": "nvfp4_expanded_mse",
    "gptq_expanded_imatrix": "nvfp4_expanded_imatrix",
}


def load_windows(path: Path) -> torch.Tensor:
    """Token ids, int64 [n, T]."""
    content = np.load(path)
    windows = content["calib"] if path.suffix == ".npz" else content
    if windows.ndim != 2:
        raise ValueError(f"{path}: calibration windows have shape {windows.shape}; expected [n, T]")
    return torch.from_numpy(windows.astype(np.int64))


def make_modifier(recipe: str, scheme: str):
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    modifier = GPTQModifier if recipe.startswith("gptq") else QuantizationModifier
    return modifier(targets="Linear", scheme=scheme, ignore=["lm_head"], weight_observer=WEIGHT_OBSERVERS[recipe])


def copy_missing_files(source: Path, output: Path) -> None:
    """Tokenizer, chat template and the like; never weights, and nothing that llm-compressor wrote itself."""
    for file in source.iterdir():
        is_weights = file.suffix in {".safetensors", ".bin", ".gguf"} or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not (output / file.name).exists():
            shutil.copy(file, output)


def quantize(model_path: Path, windows: torch.Tensor, output: Path, recipe: str, scheme: str, dtype: str) -> dict:
    """Quantize and save; returns seconds of each part and the peak GPU memory in GiB (None without a GPU)."""
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    modifier = make_modifier(recipe, scheme)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    loaded = time.perf_counter()
    batches = DataLoader([{"input_ids": window} for window in windows], batch_size=1)
    # any processor object will do: it is required beside a dataset, yet unused where that is a DataLoader
    oneshot(model=model, processor=object(), dataset=batches, recipe=modifier)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    quantized = time.perf_counter()
    model.save_pretrained(output)
    copy_missing_files(model_path, output)
    saved = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "load_seconds": round(loaded - start, 2),
        "seconds": round(quantized - loaded, 2),
        "save_seconds": round(saved - quantized, 2),
        "peak_gpu_gib": peak and round(peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--recipe", choices=WEIGHT_OBSERVERS, default="gptq")
    parser.add_argument("--scheme", choices=("NVFP4", "NVFP4A16"), default="NVFP4")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()

    windows = load_windows(args.windows)
    record = {
        "peer": f"llmcompressor {version('llmcompressor')}",
        "recipe": args.recipe,
        "scheme": args.scheme,
        "dtype": args.dtype,
        "windows": list(windows.shape),
    }
    record |= quantize(args.model, windows, args.output, args.recipe, args.scheme, args.dtype)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
