"""SpecForge's EAGLE-3 training, an update at a time in this process, as the peer to compare train-draft with.

    peer = SpecForgeDraft(config, target_ids, target.embeddings, head.weight, "cuda", loss="kl")
    optimizer = peer.optimizer(learning_rate=3e-4, updates=1000, warmup=0.03)
    for batch, aux, last in ...:                                     # one sample a row: SpecForge packs none
        peer.step(batch, aux, head_inputs(target, last)).backward()  # head_inputs once, at capture: it is stored there
        optimizer.step()                                             # clips, updates, rounds to BF16, clears gradients
    draft = peer.to_draft()                                          # ours, for metrics.py, decode.py and export.py

All that computes is SpecForge 0.2.0's own: Eagle3TrainStrategy, OnlineEagle3Model, LlamaForCausalLMEagle3, TargetHead,
BF16Optimizer. Left out are its launcher, SGLang, and the FSDP wrapper that a single GPU gains nothing from. The modules
used import neither SGLang, yunchang nor flash-attn: the wheel alone (`pip install --no-deps specforge==0.2.0`) will do.

Where it does otherwise than soar-prep; it is left as it is (file:line in the wheel):

  which guesses count   loss_mask does not move with ids and teacher (modeling/target/target_head.py:103-108): index i
                        counts in step k if token i + k is supervised, ours if token i + k + 2 is. So an answer's first
                        two tokens are never trained on, and the two guesses past its end are.
                        Indices whose best target token the draft lacks do not count (algorithms/eagle3/model.py:493).
  KL                    a mean over ALL indices, prompt and padding too (core/loss.py:201), though alpha's mean is over
                        those that count: the share of supervised tokens weakens KL against 1 - alpha in "lk". It is
                        cross-entropy, KL plus the teacher's entropy: the same gradient without, another lambda never.
  LK                    lambda = exp(-kl_decay * alpha), kl_decay 1 by default (config/schema.py:543); ours eta = 3.
  target's distribution p~ renormalised for KL, p of the full vocabulary for alpha (model.py:495-497): as ours.
  norm_output           says whether lm_head's input is normed, default yes (modeling/draft/llama3_eagle.py:1690, 1773);
                        in ours and SGLang what feeds the next step, which is here always the hidden before its norm.
  precision             rotates in BF16 with a BF16 table (llama3_eagle.py:310), rounds a norm before its weight
                        (llama3_eagle.py:1567); gradients of logits overwrite the logits, in BF16 (core/loss.py:215).
  optimizer             AdamW betas .9, .999, gradient norm cut at .5 (optimizer.py:42, config/schema.py:526); ours .95
                        and 1. Linears start normal with deviation .02 (transformers' default), ours uniform.
  attention             flex_attention by default, compiled anew for the first few widths (flex_attention.py:36): let
                        them pass before timing. Batches of many widths reach torch's limit of 64 compilations (line 10
                        there), after which it runs uncompiled. "sdpa" writes out all T x T scores
                        (llama3_eagle.py:749).
  memory                logits, p and p~ of all indices exist at once, and every update returns the allocator's cached
                        blocks to CUDA (model.py:307): that costs time, and it is part of its speed.

    TRITON_INTERPRET=1 python benchmarks/peer_specforge.py                     # proof on the CPU, tiny random target
    TRITON_INTERPRET=1 python benchmarks/peer_specforge.py --target MODEL      # with a Hugging Face Llama

The proof prints a JSON record: its logits against those of `to_draft()`, its losses and gradients against `own_words`
below, and losses and acceptance before and after some updates.
"""

import argparse
import json
import os
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.metrics import Acceptance
from soar_prep.eagle3.target import Target
from soar_prep.eagle3.ttt import (
    CHUNK,
    DECAY,
    STEPS,
    ask_teacher,
    move_left,
    rows_of_step,
    supervised_rows,
    ttt_loss,
    unroll,
)

LossName = Literal["kl", "lk", "lk_alpha"]
LK_TYPES = {"kl": None, "lk": "lambda", "lk_alpha": "alpha"}  # of SpecForge's training.lk_loss_type


class SpecForgeDraft:
    """SpecForge's draft, its losses and its teacher.

    target_ids int64 [V_draft], ascending. embeddings, head [V_target, H]: the target's weights; no bias, no scaling of
    logits. dtype: of weights and states; its own is BF16, with FP32 masters in its optimizer. attention: SpecForge's
    training.attention_backend; None is its default on a GPU, flex_attention, which a CPU cannot train. compact_teacher:
    its option to compute the teacher's logits by chunks, off by default.
    """

    def __init__(
        self,
        config: DraftConfig,
        target_ids: Tensor,
        embeddings: Tensor,
        head: Tensor,
        device: torch.device | str,
        loss: LossName = "kl",
        kl_decay: float = 1.0,
        steps: int = STEPS,
        dtype: torch.dtype = torch.bfloat16,
        attention: str | None = None,
        compact_teacher: bool = False,
    ):
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.auto import AutoDraftModel
        from specforge.training.strategies.base import Eagle3TrainStrategy

        if config.norm_output:
            raise ValueError("norm_output: SpecForge always feeds a step the hidden before its norm; compare without")
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        attention = attention or ("flex_attention" if self.device.type == "cuda" else "sdpa")
        draft = AutoDraftModel.from_config(llama_config(config), attention_backend=attention, torch_dtype=dtype)
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(embeddings)
            draft.t2d.zero_()[target_ids.to(draft.t2d.device)] = True
            draft.d2t.copy_(target_ids.to(draft.d2t.device) - torch.arange(len(target_ids)))
        draft.freeze_embedding()
        self.model = OnlineEagle3Model(draft, steps, attention, LK_TYPES[loss], kl_decay=kl_decay)
        self.model.to(device=self.device, dtype=dtype)
        self.strategy = Eagle3TrainStrategy(
            self.model,
            target_head=frozen_head(head.to(self.device, dtype)),
            ploss_decay=DECAY,
            compact_teacher=compact_teacher,
        )

    def step(self, batch: Batch, aux: Tensor, head_input: Tensor) -> Tensor:
        """The loss of a batch, a scalar with a gradient; its own figures of each step are then in `figures`.

        aux [B, T, 3H]: the target's three states. head_input [B, T, H]: from `head_inputs`, not the last layer's.
        ValueError for packed rows.
        """
        from specforge.runtime.contracts import TrainBatch

        batch = batch.to(self.device)
        valid = batch.document_ids >= 0
        if bool((valid & (batch.document_ids != batch.document_ids[:, :1])).any()):
            raise ValueError("a row of several samples: SpecForge would attend across them; batch without row_tokens")
        ends = valid & ~move_left(valid, 1, fill=False)  # never a sample's last token: algorithms/eagle3/data.py:20
        tensors = {
            "input_ids": batch.token_ids,
            "attention_mask": valid.long(),
            "loss_mask": (batch.loss_mask & ~ends).long(),
            "hidden_state": aux.to(self.device, self.dtype),
            "target": head_input.to(self.device, self.dtype),
        }
        output = self.strategy.forward_loss(TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"}))
        self.figures = output.metrics  # plosses, acces, acceptance_rates: lists of scalars, one a step
        return output.loss

    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in `dtype`: BF16 weights need masters, which `optimizer` has."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def optimizer(self, learning_rate: float, updates: int, warmup: float = 0.015, clip: float = 0.5) -> Any:
        """SpecForge's BF16Optimizer: `step()` does it all. A straight rise in `warmup` of them, then a cosine."""
        from specforge.optimizer import BF16Optimizer

        return BF16Optimizer(self.model, learning_rate, 0.0, clip, updates, warmup)

    @torch.no_grad()
    def load_draft(self, draft: Draft) -> None:
        """Start from the weights of one of ours; before `optimizer`, which copies them."""
        own = self.model.draft_model.state_dict()
        for name, tensor in draft.state_dict().items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def to_draft(self) -> Draft:
        """A copy as one of ours, in the same dtype on the same device."""
        state = self.model.draft_model.state_dict()
        draft = Draft(self.config).to(self.device, self.dtype)
        draft.load_state_dict({name: tensor for name, tensor in state.items() if name != "embed_tokens.weight"})
        return draft


def llama_config(config: DraftConfig) -> Any:
    """The draft's config.json as SpecForge reads it. norm_output stays at its default: the word means another thing."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        fc_norm=config.fc_norm,
        hidden_act="silu",
        pretraining_tp=1,
        tie_word_embeddings=False,
        pad_token_id=None,
    )


def frozen_head(weight: Tensor) -> nn.Module:
    """SpecForge's TargetHead around a weight; its own constructor and loader want a checkpoint with an index."""
    from specforge.modeling.target.target_head import TargetHead

    head = TargetHead.__new__(TargetHead)
    nn.Module.__init__(head)
    vocabulary, width = weight.shape
    head.fc = nn.Linear(width, vocabulary, bias=False, device="meta")
    head.fc.weight = nn.Parameter(weight, requires_grad=False)
    return head.eval()


@torch.no_grad()
def head_inputs(target: Target, last: Tensor) -> Tensor:
    """What SpecForge stores of the target besides aux: the input of its head, after its final norm; [B, T, H].

    last [B, T, H]: States.last. ValueError if the target's logits are not simply that input times the head's weight.
    """
    head = target.model.model.get_output_embeddings()
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    try:
        for rows in last.flatten(0, 1).split(CHUNK):
            logits = target.head(rows)
    finally:
        hook.remove()
    plain = F.linear(seen[-1][0], head.weight).float()
    if not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise ValueError("the target scales, caps or shifts its logits after the head; SpecForge's TargetHead does not")
    return torch.cat([rows[0] for rows in seen]).view_as(last)


def own_words(
    peer: SpecForgeDraft, draft: Draft, batch: Batch, aux: Tensor, head_input: Tensor, loss: LossName, kl_decay: float
) -> Tensor:
    """The loss of `peer.step` in our words, of our draft: what the docstring of this file says of masks and means."""
    embeddings, head = peer.model.draft_model.embed_tokens, peer.strategy.target_head.fc
    teacher = head(move_left_rows(head_input)).float()
    kept = teacher[..., draft.target_ids()]
    valid = batch.document_ids >= 0
    counts = batch.loss_mask & move_left(valid, 1, fill=False) & draft.t2d[teacher.argmax(dim=-1)]
    p, p_tilde = (kept - teacher.logsumexp(-1, keepdim=True)).exp(), kept.softmax(-1)
    total = torch.zeros((), device=aux.device)
    unrolled = unroll(draft, embeddings, aux, batch.token_ids, batch.positions, batch.document_ids, peer.model.length)
    for k, normed in enumerate(unrolled):
        log_q = draft.logits(normed).float().log_softmax(-1)
        kl = -(p_tilde * log_q).sum(-1)[counts].sum() / counts.numel()
        alpha = torch.minimum(p, log_q.exp()).sum(-1)[counts]
        mixing = (-kl_decay * alpha.mean().detach()).exp()
        step = {"kl": kl, "lk": mixing * kl + (1 - mixing) * (1 - alpha.mean()), "lk_alpha": -alpha.log().mean()}
        total = total + DECAY**k * step[loss]
        p, p_tilde, counts = move_left_rows(p), move_left_rows(p_tilde), move_left(counts, 1, fill=False)
    return total


def move_left_rows(x: Tensor) -> Tensor:
    """x[:, i + 1] at index i, zero at the end; [B, T, ...] in and out."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


# --- proof ------------------------------------------------------------------------------------------------------------


def load_target(directory: str | None) -> nn.Module:
    """A Llama in fp32: the one of the directory, or a tiny random one."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.15)).eval()


def make_batch(vocabulary: int, lengths: tuple[int, ...], prompt: int) -> Batch:
    """Random tokens, a sample a row; those from `prompt` on are the assistant's."""
    rows, width = len(lengths), max(lengths)
    index = torch.arange(width).expand(rows, width)
    valid = index < torch.tensor(lengths)[:, None]
    token_ids = torch.randint(vocabulary, (rows, width), generator=torch.Generator().manual_seed(3))
    documents = torch.arange(rows)[:, None].expand(rows, width)
    return Batch(
        torch.where(valid, token_ids, 0),
        valid & (index >= prompt),
        torch.where(valid, index, 0),
        torch.where(valid, documents, -1),
    )


@torch.no_grad()
def run_target(target: Any, batch: Batch, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """aux and head_input, as SpecForge captures them; padding stands on the right, where causal attention hides it."""
    states = target.base_model(input_ids=batch.token_ids, output_hidden_states=True, use_cache=False)
    return torch.cat([states.hidden_states[layer + 1] for layer in aux_layers], dim=-1), states.last_hidden_state


def largest_difference(x: Tensor, y: Tensor) -> float:
    """Relative to the largest number of the two."""
    return float((x - y).abs().max() / torch.maximum(x.abs().max(), y.abs().max()).clamp(min=1e-30))


def prove_logits(peer: SpecForgeDraft, batch: Batch, aux: Tensor, head_input: Tensor) -> list[float]:
    """Largest relative difference of each step's logits, SpecForge's forward pass against that of `to_draft()`."""
    theirs: list[Tensor] = []
    hook = peer.model.draft_model.lm_head.register_forward_hook(lambda _m, _a, output: theirs.append(output.detach()))
    peer.step(batch, aux, head_input)  # and no backward pass, which would overwrite the logits
    hook.remove()
    draft, embeddings = peer.to_draft(), peer.model.draft_model.embed_tokens
    valid = batch.document_ids >= 0
    unrolled = unroll(draft, embeddings, aux, batch.token_ids, batch.positions, batch.document_ids, len(theirs))
    with torch.no_grad():
        ours = [draft.logits(normed) for normed in unrolled]
    return [largest_difference(x[valid], y[valid]) for x, y in zip(theirs, ours, strict=True)]


def prove_loss(
    peer: SpecForgeDraft, batch: Batch, aux: Tensor, head_input: Tensor, loss: LossName, kl_decay: float
) -> dict[str, float]:
    """Relative difference of loss and of gradients, SpecForge's against `own_words`."""
    draft = peer.to_draft()
    theirs, ours = peer.step(batch, aux, head_input), own_words(peer, draft, batch, aux, head_input, loss, kl_decay)
    theirs.backward()
    ours.backward()
    gradients = {name: p.grad for name, p in draft.named_parameters()}
    pairs = [(p.grad, gradients[name]) for name, p in peer.model.draft_model.named_parameters() if p.requires_grad]
    peer.model.zero_grad()
    return {
        "loss": theirs.item(),
        "difference": largest_difference(theirs.detach(), ours.detach()),
        "gradient_difference": max(largest_difference(x, y) for x, y in pairs if x is not None and y is not None),
    }


def judge(peer: SpecForgeDraft, batch: Batch, aux: Tensor, head_input: Tensor) -> dict[str, Any]:
    """Our own figures of its draft on a batch."""
    draft, head = peer.to_draft(), peer.strategy.target_head.fc
    taught = ask_teacher(head_input, head, draft.target_ids(), batch.loss_mask, batch.document_ids)
    seen = Acceptance()
    with torch.no_grad():
        seen.add(ttt_loss(draft, peer.model.draft_model.embed_tokens, aux, batch, taught, steps=peer.model.length))
    figures = seen.figures()
    return {"alpha": figures["alpha"][0], "tau_greedy": figures["tau_greedy"], "tau_sampled": figures["tau_sampled"]}


def compare_masks(peer: SpecForgeDraft, batch: Batch) -> dict[str, int]:
    """How many indices count in step 0: theirs before its vocabulary mask, ours, both."""
    valid = batch.document_ids >= 0
    theirs = batch.loss_mask & move_left(valid, 1, fill=False)
    supervised = supervised_rows(batch.loss_mask, batch.document_ids)
    ours, _ = rows_of_step(torch.where(supervised, 0, -1), batch.document_ids, 0)
    return {"theirs": int(theirs.sum()), "ours": int(ours.sum()), "both": int((theirs & ours).sum())}


def prove(directory: str | None, updates: int, draft_vocabulary: int) -> dict[str, Any]:
    target = load_target(directory)
    weights = (target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach())
    size = min(draft_vocabulary, target.config.vocab_size - 1)
    record: dict[str, Any] = {"target": directory or "tiny random llama"}
    for fc_norm in (False, True):
        config = DraftConfig.for_target(target.config, draft_vocab_size=size, fc_norm=fc_norm)
        picked = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))[:size].sort().values
        batch = make_batch(config.vocab_size, (23, 17, 9), prompt=5)
        aux, head_input = run_target(target, batch, config.aux_layers)
        for loss, kl_decay in (("kl", 1.0), ("lk", 3.0), ("lk_alpha", 1.0)):
            torch.manual_seed(0)
            make = {"loss": loss, "kl_decay": kl_decay, "dtype": torch.float32}
            peer = SpecForgeDraft(config, picked, *weights, "cpu", **make)
            figures: dict[str, Any] = {"logits": prove_logits(peer, batch, aux, head_input)}
            figures |= prove_loss(peer, batch, aux, head_input, loss, kl_decay)
            figures["before"] = judge(peer, batch, aux, head_input)
            optimizer = peer.optimizer(3e-3, updates, warmup=0.1)
            losses = []
            for _ in range(updates):
                value = peer.step(batch, aux, head_input)
                value.backward()
                optimizer.step()
                losses.append(value.item())
            figures |= {"first": losses[0], "last": losses[-1], "after": judge(peer, batch, aux, head_input)}
            figures["logits_after"] = prove_logits(peer, batch, aux, head_input)
            record[f"{loss}{', fc_norm' if fc_norm else ''}"] = figures
        record["indices"] = compare_masks(peer, batch)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove on the CPU that SpecForge's draft and ours are one network.")
    parser.add_argument("--target", help="a Hugging Face Llama's directory; else a tiny random one")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--draft-vocabulary", type=int, default=200)
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("set TRITON_INTERPRET=1: SpecForge's KL is a Triton kernel, which a CPU can only interpret")
    torch.compiler.set_stance("force_eager")
    versions = {name: version(name) for name in ("specforge", "torch", "triton", "transformers")}
    print(json.dumps(versions | prove(arguments.target, arguments.updates, arguments.draft_vocabulary)))


if __name__ == "__main__":
    main()
