"""Does SGLang 0.5.21 load and compute the draft that soar-prep writes? Run by `make contract`; fails by an exception.

SGLang drops a tensor whose name it does not know, leaves one it misses as it was drawn, and takes a default for an
option that it does not find, all without a word. A draft served so still answers, and guesses badly. So each tensor
must set its elements, no parameter may stay unset, and a chain of guesses must be the one that soar-prep trains and
measures. Then the same checks must refuse drafts damaged in the ways that SGLang takes without complaint.
"""

import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sglang_runtime  # first: it sets the environment that SGLang reads
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from soar_prep.eagle3.decode import Guesser, Speculation
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import write_draft

# Heads do not fill the hidden size, and neither vocabulary is a multiple of 64, to which SGLang pads.
CONFIG = DraftConfig(
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=131,
    draft_vocab_size=37,
    rms_norm_eps=1e-3,
    rope_theta=1e5,
    max_position_embeddings=4096,
    aux_layers=(1, 3, 5),
)
PROMPT, GUESSES = 9, 6
# Relative to the largest value: fp32 on both sides, summed in another order, seven passes deep (measured: 7e-7).
TOLERANCE = 5e-6


class ContractBrokenError(Exception):
    pass


def expect(holds: bool, claim: str) -> None:
    if not holds:
        raise ContractBrokenError(claim)


def drawn(**changes: bool) -> Draft:
    """A draft of random weights, large enough to show in the logits, small enough for attention not to saturate."""
    torch.manual_seed(0)
    draft = Draft(dataclasses.replace(CONFIG, **changes)).requires_grad_(False)
    for parameter in draft.parameters():
        is_norm = parameter.dim() == 1
        nn.init.normal_(parameter, mean=float(is_norm), std=0.3 if is_norm else 0.12)
    draft.set_vocabulary(torch.randperm(CONFIG.vocab_size)[: CONFIG.draft_vocab_size].sort().values)
    return draft


def check_loading(draft: Draft, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Catches a tensor that SGLang drops, misses or puts elsewhere, and a vocabulary that it reads otherwise."""
    loaded = sglang_runtime.load(directory, dtype)
    expected = {name: tensor.to(dtype) for name, tensor in draft.named_parameters()}
    for name, tensor in expected.items():
        taken = loaded.taken.get(name, 0)
        expect(taken >= tensor.numel(), f"{name} sets {taken} of {tensor.numel()} elements")
        expect(torch.equal(in_sglang(loaded.model, name), tensor), f"{name} has other values in SGLang")
    others = loaded.taken.keys() - expected.keys()
    expect(others == {"d2t", "t2d"}, f"beside the weights the file holds {sorted(others)}, expected d2t and t2d")
    expect(not loaded.unset, f"no tensor of the file sets {loaded.unset}")
    ids = loaded.model.get_hot_token_id()
    expect(ids is not None and torch.equal(ids, draft.target_ids()), "SGLang maps draft ids to other target ids")
    expect(torch.equal(draft.t2d.nonzero().flatten(), ids), "t2d marks other target ids than d2t gives")
    return loaded.model


def in_sglang(model: nn.Module, name: str) -> Tensor:
    """What one of the file's tensors became in SGLang, which fuses q, k, v and gate, up, and pads lm_head."""
    query, key = (heads * CONFIG.head_dim for heads in (CONFIG.num_attention_heads, CONFIG.num_key_value_heads))
    inner = CONFIG.intermediate_size
    parts = {
        "q_proj": ("qkv_proj", 0, query),
        "k_proj": ("qkv_proj", query, key),
        "v_proj": ("qkv_proj", query + key, key),
        "gate_proj": ("gate_up_proj", 0, inner),
        "up_proj": ("gate_up_proj", inner, inner),
    }
    if name == "lm_head.weight":
        return model.lm_head.weight[: CONFIG.draft_vocab_size]
    name = "model." + name.replace("midlayer", "layers.0")
    for part, (whole, first, rows) in parts.items():
        if part in name:
            return model.get_parameter(name.replace(part, whole))[first : first + rows]
    return model.get_parameter(name)


def check_chain(draft: Draft, model: nn.Module) -> float:
    """Catches another formula, residual, scale, RoPE, feedback or token map; returns the largest relative difference.

    A prompt, then guesses, each fed the hidden and the token of the one before; from position 0, and up to the last.
    """
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    aux = torch.randn(PROMPT, 3, CONFIG.hidden_size, generator=generator)
    aux = (aux * torch.tensor([0.5, 1, 3])[:, None]).flatten(1)  # deeper layers' states are larger
    following = torch.randint(CONFIG.vocab_size, (PROMPT,), generator=generator)
    worst = 0.0
    for first in (0, CONFIG.max_position_embeddings - PROMPT - GUESSES):
        request, attend, tokens = sglang_runtime.Request(model, embedding), Cached(), []
        positions = torch.arange(first, first + PROMPT)
        theirs = request.read(aux, following, positions)
        step = draft.step(draft.project(aux[None]), embedding[following][None], positions[None], attend)
        for guess in range(1, GUESSES + 1):
            logits = draft.logits(step.normed[0, -1])
            worst = max(worst, difference(theirs.hidden, step.hidden[0]), difference(theirs.logits, logits))
            expect(worst < TOLERANCE, f"guess {guess} from position {first}: differs by {worst:.1e} of the largest")
            token = model.get_hot_token_id()[theirs.logits.argmax()][None]
            expect(torch.equal(token, draft.to_target_ids(logits.argmax())[None]), f"guess {guess} is another token")
            tokens.append(int(token))
            position = positions[-1:] + guess
            theirs = request.guess(theirs.hidden[-1:], token, position)
            step = draft.step(step.hidden[:, -1:], embedding[token][None], position[None], attend)
        expect(tokens == measured(draft, embedding, aux, following), f"soar-prep's decoding does not guess {tokens}")
    return worst


class Cached:
    """Attention with a KV cache, written out: query i sees itself and all before it."""

    def __init__(self) -> None:
        self.keys = self.values = torch.zeros(1, CONFIG.num_key_value_heads, 0, CONFIG.head_dim)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys, self.values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = q @ keys.mT / CONFIG.head_dim**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(keys.shape[2] - q.shape[2] + 1)
        return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ values


def measured(draft: Draft, embedding: Tensor, aux: Tensor, following: Tensor) -> list[int]:
    """The chain that soar-prep's own speculative decoding, which reports accepted lengths, would guess."""
    guesser = Guesser(draft, lambda tokens: embedding[tokens])
    guesser.read(aux, following.tolist())
    chain = Speculation(depth=GUESSES, candidates=GUESSES + 1, width=1)
    return guesser.grow(int(following[-1]), chain, torch.Generator()).tokens[1:]


def difference(found: Tensor, expected: Tensor) -> float:
    """Infinite where anything is NaN or of another shape."""
    if found.shape != expected.shape or found.isnan().any():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def check(draft: Draft, directory: Path) -> float:
    return check_chain(draft, check_loading(draft, directory, torch.float32))


Tensors, Config = dict[str, Tensor], dict[str, object]


def drop_head(tensors: Tensors, config: Config) -> None:
    del tensors["lm_head.weight"]


def misname_query(tensors: Tensors, config: Config) -> None:
    tensors["midlayer.self_attn.query.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def misname_norm(tensors: Tensors, config: Config) -> None:
    tensors["final_norm.weight"] = tensors.pop("norm.weight")


def swap_gate_and_up(tensors: Tensors, config: Config) -> None:
    gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def target_ids_for_offsets(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def drop_vocabulary(tensors: Tensors, config: Config) -> None:
    del tensors["d2t"]


def forget_fc_norm(tensors: Tensors, config: Config) -> None:
    del config["fc_norm"]


def forget_norm_output(tensors: Tensors, config: Config) -> None:
    del config["norm_output"]


def forget_rope_theta(tensors: Tensors, config: Config) -> None:
    del config["rope_theta"]


def forget_epsilon(tensors: Tensors, config: Config) -> None:
    del config["rms_norm_eps"]


def ask_for_another_norm(tensors: Tensors, config: Config) -> None:
    config["norm_before_fc"] = True


DAMAGES: list[Callable[[Tensors, Config], None]] = [
    drop_head,
    misname_query,
    misname_norm,
    swap_gate_and_up,
    target_ids_for_offsets,
    drop_vocabulary,
    forget_fc_norm,
    forget_norm_output,
    forget_rope_theta,
    forget_epsilon,
    ask_for_another_norm,
]


def damaged(directory: Path, damage: Callable[[Tensors, Config], None], output: Path) -> Path:
    """A copy of a draft's directory with the damage done."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    damage(tensors, config)
    output.mkdir()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config))
    return output


def main(folder: Path) -> None:
    sglang_runtime.start(folder)
    for fc_norm, norm_output in itertools.product((False, True), repeat=2):
        name = f"fc_norm={fc_norm} norm_output={norm_output}"
        draft = drawn(fc_norm=fc_norm, norm_output=norm_output)
        for dtype in (torch.bfloat16, torch.float32):
            directory = folder / f"{name} {dtype}"
            write_draft(draft, directory, dtype)
            model = check_loading(draft, directory, dtype)
        print(f"{name}: {len(draft.state_dict())} tensors; chain differs by {check_chain(draft, model):.1e}")
    for damage in DAMAGES:  # of the last draft, which has both options
        broken = damaged(directory, damage, folder / damage.__name__)
        try:
            check(draft, broken)
        except ContractBrokenError as refusal:
            print(f"{damage.__name__}: refused, {refusal}")
        else:
            raise AssertionError(f"{damage.__name__}: the checks above do not notice it")


if __name__ == "__main__":
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
    print(
        f"contract: SGLang 0.5.21 loads and computes the draft as soar-prep does ({time.perf_counter() - begin:.0f} s)"
    )
