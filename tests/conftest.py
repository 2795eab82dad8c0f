"""Tiny random models with real tokenizers, built once a session, and the command line run in this process."""

import contextlib
import gc
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing here may look at, or write to, the user's cache or the network.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="soar-prep-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
# Matrices this small are slower on two threads than on one, tenfold when the machine is busy.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from soar_prep.cli import main

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# name -> (model_type, what differs from SIZES). Between them: tied and untied heads, biases, sliding windows, layers
# without rotary embeddings, softcaps, scaled residuals, fused and parallel linears, convolutions beside attention.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}),
    "odd_width": ("llama", {"intermediate_size": 72}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "phi3": ("phi3", {}),
    "cohere2": ("cohere2", {"sliding_window": 8}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "remote_code": ("", {}),
    # not supported, and must be told
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    "gemma4": ("gemma4_text", {"head_dim": 16, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16}),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
)
SENTENCES = [
    "The layer keeps its weights, and the weights keep their scales.",
    "def round_to_even(value: float) -> int:\n    return int(value)\n",
    "A sequence is indexed from zero; a negative index counts from its end.",
]
SMALL = (
    "calibration.samples=4",
    "calibration.length=32",
    "evaluation.samples=2",
    "evaluation.length=32",
    "compute.device=cpu",
)


@dataclass(frozen=True)
class Ran:
    """What a command did: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def save_tokenizer(directory: Path, adds_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A byte-level BPE tokenizer of 300 tokens; <s> is 0, </s> is 1."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(directory)


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that every part shows in the logits: norms near one, biases far from zero."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = 1 + 0.1 * noise if is_norm else 0.15 * noise


def build_model(name: str, directory: Path) -> None:
    """The model's directory as a hub would serve it: BF16 weights, tokenizer, template, licence."""
    model_type, changes = ARCHITECTURES[name]
    if name == "remote_code":
        code = Path(__file__).parent / "remote_code" / "modeling_tiny.py"
        shutil.copy(code, directory)
        auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
        config = {"model_type": "tiny_scaled", "architectures": ["TinyForCausalLM"], "auto_map": auto_map}
        (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory, trust_remote_code=True), trust_remote_code=True
        )
        randomize(model)
        save_file(model.bfloat16().state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | changes))
        randomize(model)
        model.bfloat16().save_pretrained(directory, max_shard_size="200KB" if name == "llama" else "1GB")
    save_tokenizer(directory, adds_bos=name != "qwen2")
    (directory / "LICENSE").write_bytes(b"Do as you like.\r\n")


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of one of ARCHITECTURES, built when first asked for. Tests must not change it."""

    @cache
    def build(name: str) -> Path:
        directory = tmp_path_factory.mktemp("models") / name
        directory.mkdir()
        build_model(name, directory)
        return directory

    return build


@pytest.fixture
def model_copy(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[..., Path]:
    """A copy of a model's directory that a test may spoil, with changes to its config.json."""

    def copy(name: str, **changes: Any) -> Path:
        directory = shutil.copytree(model_directory(name), tmp_path / "model")
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))
        return directory

    return copy


@pytest.fixture(scope="session")
def soar_prep() -> Callable[..., Ran]:
    """The command line, run in this process."""

    def run(*arguments: object) -> Ran:
        out, err, argv = io.StringIO(), io.StringIO(), sys.argv
        try:
            sys.argv = ["soar-prep", *map(str, arguments)]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main()
                gc.collect()  # a failed run's traceback holds its lock
        except SystemExit as end:  # Hydra ends --help and wrong flags like this
            code = int(end.code or 0)
        finally:
            sys.argv = argv
        return Ran(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, model_directory: Callable[[str], Path], soar_prep: Callable[..., Ran]
) -> Callable[..., Path]:
    """Output of `soar-prep quantize` on a tiny model with the given options. Tests must not change it."""

    @cache
    def run(name: str, *options: str) -> Path:
        output = tmp_path_factory.mktemp("quantized") / name
        trust = f"trust_remote_code={name == 'remote_code'}"
        ran = soar_prep("quantize", f"model={model_directory(name)}", f"output={output}", trust, *SMALL, *options)
        assert (ran.code, ran.err) == (0, "")
        return output

    return run
