"""A small MiniCPM-SALA, trained here on the text that ships with Python: the published weights need a model hub.

    python benchmarks/small_sala.py OUT [--size small|tiny] [--minutes M | --steps N] [--seed S] [--library DIR]

OUT is an ordinary model directory (BF16), with a byte-level BPE tokenizer of its own and a ChatML template, and also
held_out.txt, text that it never saw; chats.jsonl, conversations that it saw too, to train a draft from; training.json,
the curve of the loss and, on the held-out text, the model against unigrams and bigrams. small wants a GPU, tiny two CPU
cores, and some minutes each. --library takes the text from another Python's library than this one's; what is held out
is what soar-prep's builtin text holds out under it.

Weights, gradients and optimizer are fp32, the computing is BF16 on a GPU and fp32 on a CPU. Initialization and
learning rates follow muP as MiniCPM's do (arXiv 2404.06395, appendix A): matrices between the embedding and the head
start at initializer_range / sqrt(m) and learn at rate / m, m = hidden_size / dim_model_base.
"""

import argparse
import ast
import json
import math
import random
import runpy
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from soar_prep.eagle3.learner import InDtype
from soar_prep.report import environment
from soar_prep.sala import MiniCPMSALAConfig, MiniCPMSALAForCausalLM
from soar_prep.settings import Compute, Text, TextSource
from soar_prep.streaming import pick_device
from soar_prep.text import pack, read_text

UNKNOWN, BOS, EOS, TURN_END, TURN_START = SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>", "<|im_start|>")
CHAT_TEMPLATE = (
    f"{{% for m in messages %}}{TURN_START}{{{{ m['role'] }}}}\n{{{{ m['content'] }}}}{TURN_END}\n{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)
# Python's own code only; pydoc_data repeats what is held out, encodings are tables of numbers
NO_TEXT = {"site-packages", "dist-packages", "pydoc_data", "encodings"}


@dataclass(frozen=True)
class Recipe:
    """A size. Training is over after `steps` updates of `batch` windows of `length` tokens, or after `minutes`."""

    config: dict[str, Any]
    length: int
    batch: int
    rate: float  # learning rate of embedding, head and norms
    steps: int
    minutes: float
    packages: bool  # train on the library's packages too, not only on its single-file modules
    held_out: int  # characters


COMMON = {
    "bos_token_id": SPECIAL.index(BOS),
    "eos_token_id": [SPECIAL.index(EOS), SPECIAL.index(TURN_END)],
    "pad_token_id": SPECIAL.index(EOS),
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "lightning_nh": 4,
}
RECIPES = {
    "small": Recipe(
        config=COMMON
        | {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 9,
            "dim_model_base": 64,
            "max_position_embeddings": 4096,
            "sparse_config": {
                "kernel_size": 8,
                "kernel_stride": 4,
                "init_blocks": 1,
                "block_size": 16,
                "window_size": 64,
                "topk": 8,
                "use_nope": False,
                "dense_len": 256,
            },
        },
        length=1024,
        batch=64,
        rate=1e-2,
        steps=190,  # three times over the text; seven times over, it has learnt it by heart and nothing else
        minutes=7,
        packages=True,
        held_out=400_000,
    ),
    "tiny": Recipe(
        config=COMMON
        | {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "lightning_nh": 2,  # heads stay 128 wide: SGLang's decoding kernel takes no other
            "dim_model_base": 32,
            "max_position_embeddings": 1024,
            "sparse_config": {
                "kernel_size": 8,
                "kernel_stride": 4,
                "init_blocks": 1,
                "block_size": 16,
                "window_size": 32,
                "topk": 4,
                "use_nope": False,
                "dense_len": 128,
            },
        },
        length=256,
        batch=8,
        rate=2e-2,
        steps=1200,
        minutes=60,
        packages=False,
        held_out=40_000,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=RECIPES, default="small")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="of training, however many updates that makes")
    budget.add_argument("--steps", type=int, help="updates, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.size]
    steps, minutes = recipe.steps, recipe.minutes
    if arguments.steps or arguments.minutes:
        steps, minutes = arguments.steps or 10**9, arguments.minutes or 10**9
    begun = time.monotonic()
    device: Any = pick_device(Compute())
    documents, held_out = corpus(arguments.library, recipe.packages)
    tokenizer = train_tokenizer(documents, recipe)
    chats = [turns for text in documents for turns in conversations(text)]
    documents += [tokenizer.apply_chat_template(turns, tokenize=False) for turns in chats]
    random.Random(arguments.seed).shuffle(documents)
    stream = token_stream(documents, tokenizer)
    held_out = held_out[: recipe.held_out]
    measured = pack([held_out], Text(TextSource.builtin, samples=10**9, length=recipe.length), tokenizer).token_ids
    print(f"{len(documents)} documents, {len(stream)} tokens; ready after {time.monotonic() - begun:.0f} s", flush=True)

    torch.manual_seed(arguments.seed)
    model = new_model(recipe).to(device)
    curve = train(model, stream, recipe, steps, minutes * 60)
    model.bfloat16()
    losses = held_out_losses(model, measured)
    figures = {"model": losses.mean().item(), **baselines(stream, measured, model.config.vocab_size)}

    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    (arguments.out / "held_out.txt").write_text(held_out, encoding="utf-8")
    rows = [json.dumps({"messages": turns}) + "\n" for turns in chats]
    (arguments.out / "chats.jsonl").write_text("".join(rows), encoding="utf-8")
    facts = {
        "size": arguments.size,
        "seed": arguments.seed,
        "parameters": model.num_parameters(),
        "documents": len(documents),
        "tokens": len(stream),
        "updates": curve[-1]["update"],
        "seconds": round(time.monotonic() - begun, 1),
        "held_out_tokens": measured[:, 1:].numel(),
        "held_out_loss": {name: round(loss, 4) for name, loss in figures.items()},
        "held_out_loss_by_position": by_position(losses),
        "sample": sample(model, tokenizer),
        "environment": environment(device),
        "curve": curve,
    }
    (arguments.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print_table(facts)


def corpus(library: Path, packages: bool) -> tuple[list[str], str]:
    """(documents to train on, held-out text), split as soar_prep.text.builtin_documents does: every fifth held out.

    The held-out text comes without the paragraphs that any document to train on holds too.
    """
    topics = [text for _, text in sorted(runpy.run_path(str(library / "pydoc_data/topics.py"))["topics"].items())]
    modules = sorted(library.glob("*.py"))
    files = {modules[i] for i in range(len(modules)) if i % 5}
    if packages:
        nested = (path for path in library.glob("*/**/*.py"))
        files |= {path for path in nested if not NO_TEXT & set(path.relative_to(library).parts)}
    documents = [text for i, text in enumerate(topics) if i % 5] + [read_text(path) for path in sorted(files)]
    seen = {part for document in documents for part in document.split("\n\n")}
    kept = []
    for pair in zip(topics[::5], (read_text(path)[:20_000] for path in modules[::5]), strict=False):
        kept += [part for document in pair for part in document.split("\n\n") if part not in seen]
    return documents, "\n\n".join(kept)


def train_tokenizer(documents: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE: whatever the text, nothing is unknown. A text begins with <s>, a conversation does not."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.config["vocab_size"],
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN_END, TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.config["max_position_embeddings"],
    )


def conversations(source: str) -> Iterator[list[dict[str, str]]]:
    """Two turns each: asked for by its docstring's first line, a function of `source` is answered."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # prose, or a file that is wrong on purpose
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            question = f"Write {node.name}: {docstring.splitlines()[0]}"
            answer = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def token_stream(documents: list[str], tokenizer: Any) -> Tensor:
    """int64 [n]: the documents one after another, as soar_prep.text.pack writes them."""
    between = tokenizer("\n\n", add_special_tokens=False).input_ids
    rows = tokenizer(documents, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([token for row in rows for token in row + between])


def new_model(recipe: Recipe) -> MiniCPMSALAForCausalLM:
    config = MiniCPMSALAConfig(**recipe.config)
    model = MiniCPMSALAForCausalLM(config).float()
    with torch.no_grad():
        for weight in matrices(model):
            weight *= (config.dim_model_base / config.hidden_size) ** 0.5
    return model


def matrices(model: MiniCPMSALAForCausalLM) -> list[Tensor]:
    return [weight for weight in model.model.layers.parameters() if weight.ndim == 2]


def train(
    model: MiniCPMSALAForCausalLM, stream: Tensor, recipe: Recipe, steps: int, seconds: float
) -> list[dict[str, float]]:
    """A fiftieth of the updates as rows of loss, learning rate, norm of the gradient and seconds since the start."""
    config, device = model.config, model.device
    inner = matrices(model)
    outer = [model.model.embed_tokens.weight, model.lm_head.weight]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    scale = config.dim_model_base / config.hidden_size
    groups: list[dict[str, Any]] = [
        {"params": inner, "scale": scale, "weight_decay": 0.1},
        {"params": outer, "scale": 1.0, "weight_decay": 0.0},
        {"params": norms, "scale": 1.0, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    computing = InDtype(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    curve: list[dict[str, float]] = []
    update, begun, spent = 0, time.monotonic(), 0.0
    while (done := max(update / steps, spent / seconds)) < 1:
        ids = draw(stream, recipe).to(device)
        loss = loss_of(computing, ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = recipe.rate * schedule(done)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if done >= len(curve) / 50 or update == 1:
            row = {"update": update, "loss": float(loss), "rate": rate, "norm": float(norm), "seconds": spent}
            curve.append({name: round(value, 5) for name, value in row.items()})
            print(curve[-1], flush=True)
        spent = time.monotonic() - begun
    return curve


def schedule(done: float) -> float:
    """Factor of the learning rate when `done` of 1 is over: a straight rise, then a cosine down to a hundredth."""
    first, rise = 0.005, 0.05
    if done < rise - first:
        return (done + first) / rise
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))


def draw(stream: Tensor, recipe: Recipe) -> Tensor:
    """int64 [batch, length], windows from anywhere; every other one begins with <s>, as texts but not chats do."""
    starts = torch.randint(len(stream) - recipe.length, (recipe.batch, 1))
    ids = stream[starts + torch.arange(recipe.length)]
    ids[::2, 0] = SPECIAL.index(BOS)
    return ids


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of all tokens but the first, nats, computed in fp32 from the model's logits."""
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(model: MiniCPMSALAForCausalLM, windows: Tensor) -> Tensor:
    """Nats of every token but the first, fp32 [n, length - 1], of the weights as they are, computed in fp32."""
    computing, rows = InDtype(model, torch.float32), []
    for ids in windows.split(8):
        logits = computing(ids.to(model.device)).logits[:, :-1].float()
        rows.append(F.cross_entropy(logits.mT, ids[:, 1:].to(model.device), reduction="none").cpu())
    return torch.cat(rows)


def by_position(losses: Tensor) -> dict[str, float]:
    """Mean of each quarter of a window: where blocks are chosen, a longer context must still help."""
    quarters = losses.split(-(-losses.shape[1] // 4), dim=1)
    ends = torch.tensor([q.shape[1] for q in quarters]).cumsum(0).tolist()
    return {f"up to {end + 1}": round(q.mean().item(), 4) for end, q in zip(ends, quarters, strict=True)}


@torch.no_grad()
def sample(model: MiniCPMSALAForCausalLM, tokenizer: Any) -> str:
    """What it answers to a chat, greedily."""
    turns = [{"role": "user", "content": "Write close: Close the file."}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
    answer = model.eval().generate(ids, max_new_tokens=48, do_sample=False)
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)


def baselines(stream: Tensor, windows: Tensor, vocabulary: int) -> dict[str, float]:
    """Nats a token of windows[:, 1:] under counts of the training text.

    unigram: p(b) = (n_b + 1) / (n + V). bigram: p(b | a) = (n_ab + k p(b)) / (n_a + k), with the k that does best.
    """
    counts = torch.bincount(stream, minlength=vocabulary).double()
    unigram = (counts + 1) / (counts.sum() + vocabulary)
    before, after = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    pairs, found = torch.unique(stream[:-1] * vocabulary + stream[1:], return_counts=True)
    wanted = before * vocabulary + after
    at = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    together = torch.where(pairs[at] == wanted, found[at], 0).double()
    bigram = min(
        -((together + k * unigram[after]) / (counts[before] + k)).log().mean().item() for k in (1, 4, 16, 64, 256, 1024)
    )
    return {"unigram": -unigram[after].log().mean().item(), "bigram": bigram}


def print_table(facts: dict[str, Any]) -> None:
    print(f"\n{facts['parameters']:,} parameters, {facts['updates']} updates, {facts['seconds']} s")
    print(f"{'held out, ' + str(facts['held_out_tokens']) + ' tokens':<28}{'nats':>8}{'perplexity':>12}")
    for name, loss in facts["held_out_loss"].items():
        print(f"{name:<28}{loss:>8.4f}{math.exp(loss):>12.1f}")
    print("by position:", ", ".join(f"{name} {loss:.3f}" for name, loss in facts["held_out_loss_by_position"].items()))
    print(f"\na sample:\n{facts['sample']}")


if __name__ == "__main__":
    main()
