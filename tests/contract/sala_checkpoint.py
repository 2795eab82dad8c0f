"""A small MiniCPM-SALA of random weights as soar-prep writes it, BF16 and NVFP4. A program: FOLDER/bf16, FOLDER/nvfp4.

In a process of its own: SGLang has a configuration of the same model type, and must find it without ours registered.
No value that SGLang could take from a default of its own is that default here.
"""

import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

VOCABULARY = 331  # no multiple of 64, to which SGLang pads; neither is the published 73448
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,  # by the published pattern: sparse, lightning, lightning, sparse
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "lightning_nh": 4,
    "lightning_head_dim": 128,  # SGLang's decoding kernel knows no smaller one
    "max_position_embeddings": 16384,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "scale_emb": 10,
    "scale_depth": 1.2,
    "dim_model_base": 64,
    "initializer_range": 0.1,
    "eos_token_id": [2, 330],
    # Longer than any text here: SGLang's way of choosing blocks needs a GPU, and is not what is tested.
    "sparse_config": {
        "kernel_size": 32,
        "kernel_stride": 16,
        "init_blocks": 1,
        "block_size": 64,
        "window_size": 2048,
        "topk": 64,
        "use_nope": False,
        "dense_len": 8192,
    },
}


def write_model(folder: Path) -> None:
    from soar_prep.sala import MiniCPMSALAConfig, MiniCPMSALAForCausalLM

    torch.manual_seed(0)
    config = MiniCPMSALAConfig(**SIZES, dtype="bfloat16")
    model = MiniCPMSALAForCausalLM(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1, std=0.2)
        else:
            nn.init.normal_(parameter, std=scale_of(name, config) / parameter.shape[-1] ** 0.5)
    model.bfloat16().save_pretrained(folder)


def scale_of(name: str, config) -> float:  # type: ignore[no-untyped-def]
    """Standard deviation of what a linear answers to a normed input: attention has structure, logits are not flat."""
    if name == "model.embed_tokens.weight":
        return config.hidden_size**0.5 / config.scale_emb
    return 3 * config.hidden_size / config.dim_model_base if name == "lm_head.weight" else 1.3


def write_tokenizer(folder: Path) -> None:
    """One token a byte, after three special ones; for the calibration text."""
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def quantize(folder: Path) -> None:
    options = ["calibration.samples=8", "calibration.length=128", "evaluation.samples=2", "evaluation.length=128"]
    command = [sys.executable, "-m", "soar_prep.cli", "quantize", "export=modelopt", "compute.device=cpu", *options]
    subprocess.run([*command, f"model={folder / 'bf16'}", f"output={folder / 'nvfp4'}"], check=True, stdout=sys.stderr)


def make(folder: Path) -> None:
    """Both checkpoints, made by this program."""
    subprocess.run([sys.executable, __file__, str(folder)], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]) / "bf16")
    write_tokenizer(Path(sys.argv[1]) / "bf16")
    quantize(Path(sys.argv[1]))
