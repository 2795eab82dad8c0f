"""Does SGLang 0.5.21 load and compute the draft that soar-prep writes? Run by `make contract`; fails by an exception.

SGLang drops a tensor whose name it does not know, leaves one it misses as it was drawn, and takes a default for an
option that it does not find, all without a word. A draft served so still answers, and guesses badly. So each tensor
must set its elements, no parameter may stay unset, and a chain of guesses must be the one that soar-prep trains and
measures. Then the same checks must refuse drafts damaged in the ways that SGLang takes without complaint.

The same for drafts in NVFP4, with lm_head in BF16 and in NVFP4: codes and scales stand in SGLang's parameters bit by
bit, and what its own arithmetic makes of them are the weights that the draft was measured with. The product is that of
stubs/contract_kernels.py, on activations that are not quantized (W4A16): SGLang's kernels need a GPU.
"""

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path

import sglang_runtime  # first: it sets the environment that SGLang reads
import torch
import torch.nn.functional as F
from damages import Config, Damage, Tensors, damaged, double, drop, forget, rename, swap
from nvfp4_draft import rounded
from safetensors.torch import load_file
from sglang_runtime import ContractBrokenError, bits, expect, place
from torch import Tensor, nn

from soar_prep.eagle3.decode import Guesser, Speculation
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import write_draft
from soar_prep.qat.linear import NVFP4Linear, nvfp4_linears

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
# Relative to the largest value: fp32 on both sides, summed in another order, seven passes deep (measured: 1e-6).
TOLERANCE = 5e-6


def drawn(**changes: bool) -> Draft:
    """A draft of random weights, large enough to show in the logits, small enough for attention not to saturate."""
    torch.manual_seed(0)
    draft = Draft(dataclasses.replace(CONFIG, **changes)).requires_grad_(False)
    for parameter in draft.parameters():
        is_norm = parameter.dim() == 1
        nn.init.normal_(parameter, mean=float(is_norm), std=0.3 if is_norm else 0.12)
    for linear in (draft.midlayer.self_attn.v_proj, draft.midlayer.mlp.up_proj):
        linear.weight *= 4  # alone it would have another tensor scale than those that SGLang fuses it with
    draft.set_vocabulary(torch.randperm(CONFIG.vocab_size)[: CONFIG.draft_vocab_size].sort().values)
    return draft


def check_loading(draft: Draft, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Catches a tensor that SGLang drops, misses or puts elsewhere, and a vocabulary that it reads otherwise."""
    quantized = nvfp4_linears(draft)
    loaded = sglang_runtime.load(directory, dtype, "modelopt_fp4" if quantized else None)
    expected = file_tensors(draft, dtype)
    renamed = {in_sglang(name): tensor for name, tensor in expected.items()}
    for name, tensor in expected.items():
        taken = loaded.taken.get(name, 0)
        expect(taken == tensor.numel(), f"{name} sets {taken} of {tensor.numel()} elements")
        target, rows = place(renamed, in_sglang(name))
        found = loaded.parameters[target][rows]
        expect(found.dtype == tensor.dtype, f"{name} is {found.dtype} in SGLang, {tensor.dtype} in the draft")
        expect(torch.equal(bits(found.view(tensor.shape)), bits(tensor)), f"{name} has other values in SGLang")
    others = loaded.taken.keys() - expected.keys()
    expect(others == {"d2t", "t2d"}, f"beside the weights the file holds {sorted(others)}, expected d2t and t2d")
    expect(not loaded.unset, f"no tensor of the file sets {loaded.unset}")
    for name, linear in quantized.items():
        target, rows = place(renamed, in_sglang(f"{name}.weight"))
        weight = loaded.model.get_parameter(target)[rows]
        expect(torch.equal(weight, linear.weight.to(dtype)), f"{name} is another matrix in SGLang")
        scale = loaded.parameters[target.removesuffix("weight") + "input_scale"]
        expect(bool((scale == linear.input_scale).all()), f"{name} is fused with linears of other input scales")
    ids = loaded.model.get_hot_token_id()
    expect(ids is not None and torch.equal(ids, draft.target_ids()), "SGLang maps draft ids to other target ids")
    expect(torch.equal(draft.t2d.nonzero().flatten(), ids), "t2d marks other target ids than d2t gives")
    return loaded.model


def file_tensors(draft: Draft, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the file must hold beside the vocabulary."""
    tensors = {name: tensor.to(dtype) for name, tensor in draft.named_parameters()}
    for name, linear in nvfp4_linears(draft).items():
        tensors[f"{name}.weight"] = linear.stored.codes
        tensors[f"{name}.weight_scale"] = linear.stored.block_scales
        tensors[f"{name}.weight_scale_2"] = linear.stored.tensor_scale
        tensors[f"{name}.input_scale"] = linear.input_scale
    return tensors


def in_sglang(name: str) -> str:
    """SGLang's name of one of the file's tensors, before it fuses q, k, v and gate, up."""
    return name if name.startswith("lm_head.") else "model." + name.replace("midlayer", "layers.0")


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


ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


def target_ids_for_offsets(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def ask_for_another_norm(tensors: Tensors, config: Config) -> None:
    config["norm_before_fc"] = True


def swap_nibbles(tensors: Tensors, config: Config) -> None:
    codes = tensors[f"{MLP}.down_proj.weight"]
    tensors[f"{MLP}.down_proj.weight"] = codes >> 4 | codes << 4


def ignore(name: str) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        config["quantization_config"]["ignore"].append(name)

    return damage


DAMAGES: dict[str, Damage] = {
    "the head dropped": drop("lm_head.weight"),
    "the query misnamed": rename(f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.query.weight"),
    "a norm misnamed": rename("norm.weight", "final_norm.weight"),
    "gate and up swapped": swap((f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight")),
    "target ids for offsets": target_ids_for_offsets,
    "the vocabulary dropped": drop("d2t"),
    "fc_norm forgotten": forget("fc_norm"),
    "norm_output forgotten": forget("norm_output"),
    "rope_theta forgotten": forget("rope_theta"),
    "epsilon forgotten": forget("rms_norm_eps"),
    "another norm asked for": ask_for_another_norm,
}
NVFP4_DAMAGES: dict[str, Damage] = {
    "codes dropped": drop(f"{ATTENTION}.o_proj.weight"),
    "block scales dropped": drop(f"{MLP}.down_proj.weight_scale"),
    "a tensor scale dropped": drop(f"{ATTENTION}.o_proj.weight_scale_2"),
    "a fused member's tensor scale dropped": drop(f"{ATTENTION}.k_proj.weight_scale_2"),
    "an input scale dropped": drop(f"{MLP}.down_proj.input_scale"),
    "the head's tensor scale dropped": drop("lm_head.weight_scale_2"),
    "gate's and up's block scales swapped": swap((f"{MLP}.gate_proj.weight_scale", f"{MLP}.up_proj.weight_scale")),
    "tensor scale and input scale swapped": swap((f"{MLP}.down_proj.weight_scale_2", f"{MLP}.down_proj.input_scale")),
    "another tensor scale for one fused member": double(f"{ATTENTION}.k_proj.weight_scale_2"),
    "another input scale for one fused member": double(f"{MLP}.up_proj.input_scale"),
    "nibbles swapped": swap_nibbles,
    "norm_output forgotten, in NVFP4": forget("norm_output"),
    "quantization forgotten": forget("quantization_config"),
    "a linear ignored that is NVFP4": ignore("down_proj"),
    "the head ignored that is NVFP4": ignore("lm_head"),
}


# Faults of a draft in NVFP4 that its file has too.
def scale_a_member_apart(key: NVFP4Linear) -> None:
    key.stored = dataclasses.replace(key.stored, tensor_scale=2 * key.stored.tensor_scale)
    key.weight.data *= 2


def scale_a_members_input_apart(key: NVFP4Linear) -> None:
    key.input_scale = 2 * key.input_scale


def measure_other_weights(key: NVFP4Linear) -> None:
    key.weight.data *= 1.01


FAULTS = [scale_a_member_apart, scale_a_members_input_apart, measure_other_weights]


def accept(name: str, draft: Draft, folder: Path) -> Path:
    """The draft's directory, in fp32, once it has passed the checks in BF16 and in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        directory = folder / f"{name} {dtype}"
        write_draft(draft, directory, dtype)
        model = check_loading(draft, directory, dtype)
    tensors = len(load_file(directory / "model.safetensors"))
    print(f"{name}: {tensors} tensors; chain differs by {check_chain(draft, model):.1e}")
    return directory


def refuse(name: str, draft: Draft, directory: Path) -> None:
    try:
        check_chain(draft, check_loading(draft, directory, torch.float32))
    except ContractBrokenError as refusal:
        print(f"{name}: refused, {refusal}")
    else:
        raise AssertionError(f"{name}: the checks above do not notice it")


def main(folder: Path) -> None:
    sglang_runtime.start(folder)
    for fc_norm, norm_output in itertools.product((False, True), repeat=2):
        draft = drawn(fc_norm=fc_norm, norm_output=norm_output)
        directory = accept(f"fc_norm={fc_norm} norm_output={norm_output}", draft, folder)
    for name, damage in DAMAGES.items():  # of the last draft, which has both options
        refuse(name, draft, damaged(directory, damage, folder / name))
    for lm_head in (False, True):
        draft = rounded(drawn(fc_norm=True, norm_output=True), lm_head)
        directory = accept(f"NVFP4, lm_head={lm_head}", draft, folder)
    for name, damage in NVFP4_DAMAGES.items():  # of the last draft, whose head is NVFP4 too
        refuse(name, draft, damaged(directory, damage, folder / name))
    for fault in FAULTS:
        draft = rounded(drawn(), lm_head=False)
        fault(nvfp4_linears(draft)[f"{ATTENTION}.k_proj"])
        write_draft(draft, folder / fault.__name__, torch.float32)
        refuse(fault.__name__, draft, folder / fault.__name__)


if __name__ == "__main__":
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
    print(
        f"contract: SGLang 0.5.21 loads and computes the draft as soar-prep does ({time.perf_counter() - begin:.0f} s)"
    )
