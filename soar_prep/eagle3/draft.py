"""The EAGLE-3 draft: one decoder layer that reads the target's hidden states and guesses its next tokens.

B rows   T tokens   H hidden size   aux [B, T, 3H]: outputs of three target layers, low, middle, high
hidden [B, T, H]    hd head_dim     V_draft: the target's most frequent tokens, the draft's whole vocabulary

At index i the draft is given the target's states of token i and the embedding of token i + 1, and guesses token i + 2.
Each further guess is fed the draft's own hidden in place of the target's. The weights bear the names that SGLang's
LlamaForCausalLMEagle3 loads. Embeddings are the target's, as stored (no embedding multiplier): they are passed in.
Source: EAGLE-3 (Li et al., 2025); fc_norm and norm_output as in SGLang 0.5.21, models/llama_eagle3.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from soar_prep.errors import UserError

# q [B, heads, T, hd], k and v [B, kv_heads, T, hd] of this step, rotated -> output [B, heads, T, hd]. What else is
# seen (step 0 in training, a KV cache in decoding) is the callee's business.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftConfig:
    """Shapes and options of a draft. UserError for shapes that cannot be.

    aux_layers: the three target layers, from 0, whose OUTPUTS the draft reads. fc_norm: an RMSNorm on each of the
    three before fc. norm_output: the next step is fed the hidden after `norm`, not before it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    aux_layers: tuple[int, ...]
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft: {self.num_attention_heads} attention heads do not divide among "
                f"{self.num_key_value_heads} key-value heads; change num_key_value_heads"
            )
        if self.head_dim % 2:
            raise UserError(f"draft: head_dim={self.head_dim} is odd; RoPE rotates pairs")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"draft: draft_vocab_size={self.draft_vocab_size}: expected 1 to {self.vocab_size}, the target's"
            )
        # SGLang collects each captured layer once, in the order of the layers.
        if len(self.aux_layers) != 3 or list(self.aux_layers) != sorted({abs(layer) for layer in self.aux_layers}):
            raise UserError(f"draft: aux_layers={list(self.aux_layers)}: expected three different layers, ascending")

    @classmethod
    def for_target(cls, hf_config: Any, **changes: Any) -> "DraftConfig":
        """The draft that fits a target's transformers config, with `changes` to single fields.

        RoPE scaling is not inherited: the draft is trained on every position it will meet. UserError for aux_layers
        that the target does not have.
        """
        text = hf_config.get_text_config()
        heads = text.num_attention_heads
        fields = {
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "vocab_size": text.vocab_size,
            "draft_vocab_size": min(32000, text.vocab_size),
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_theta": rope_theta_of(text),
            "max_position_embeddings": text.max_position_embeddings,
            "aux_layers": default_aux_layers(text.num_hidden_layers),
        }
        config = cls(**(fields | changes))
        if config.aux_layers[-1] >= text.num_hidden_layers:
            raise UserError(
                f"draft: aux_layers={list(config.aux_layers)}: the target's {text.num_hidden_layers} layers are "
                f"0 to {text.num_hidden_layers - 1}"
            )
        return config


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Layers 1, L/2 - 1 and L - 4 where L is large enough for them to differ, else three different ones.

    The output of the last layer is avoided as long as there are four: SGLang reads a state where the next layer
    begins, so that one never arrives.
    """
    if layers < 3:
        raise UserError(f"draft: a target of {layers} decoder layers; EAGLE-3 reads three different layers' outputs")
    highest = max(layers - 2, 2)
    low = min(1, highest - 2)
    middle = min(max(layers // 2 - 1, low + 1), highest - 1)
    return low, middle, max(layers - 4, middle + 1)


def rope_theta_of(config: Any) -> float:
    """rope_theta of a transformers config, old style or new; 10000 if it has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


@dataclass(frozen=True)
class Step:
    """What one step of the draft gives, each [B, T, H]: `hidden` feeds the next step, `normed` is lm_head's input."""

    hidden: Tensor
    normed: Tensor


class Draft(nn.Module):
    """The draft's weights and its steps; state_dict() is what SGLang loads.

    d2t int64 [V_draft] and t2d bool [vocab_size] are the vocabulary: draft id d is target id d + d2t[d], and t2d marks
    the target ids that have a draft id. Until `set_vocabulary` they are the target's first V_draft ids.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in range(3)) if config.fc_norm else None
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def checkpointing(self) -> bool:
        """Keep neither the MLP's activations nor gradients of logits for the backward pass: it computes them anew."""
        return self.midlayer.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.midlayer.checkpointing = on

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """target_ids int64 [V_draft], strictly ascending: the target id of each draft id."""
        size, vocabulary = self.config.draft_vocab_size, self.config.vocab_size
        if target_ids.shape != (size,) or bool((target_ids.diff() <= 0).any()):
            raise ValueError(f"target_ids {list(target_ids.shape)}: expected {size} strictly ascending ids")
        if int(target_ids[0]) < 0 or int(target_ids[-1]) >= vocabulary:
            raise ValueError(
                f"target_ids: {int(target_ids[0])} to {int(target_ids[-1])}, expected 0 to {vocabulary - 1}"
            )
        self.d2t.copy_(target_ids.to(self.d2t.device) - torch.arange(size, device=self.d2t.device))
        self.t2d.zero_()
        self.t2d[target_ids.to(self.t2d.device)] = True

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def target_ids(self) -> Tensor:
        """The target id of each draft id, int64 [V_draft], ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def project(self, aux: Tensor) -> Tensor:
        """The target's states aux [B, T, 3H] -> hidden [B, T, H] for the first step."""
        if self.fc_norm is not None:
            chunks = aux.chunk(3, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def step(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend) -> Step:
        """One pass through the layer.

        hidden [B, T, H] from `project` or the step before; embeddings [B, T, H] of the tokens that follow;
        positions int64 [B, T], any below max_position_embeddings; attend: see `Attend`.
        """
        hidden = self.midlayer(hidden, embeddings, rotation(positions, self.config), attend)
        normed = self.norm(hidden)
        return Step(normed if self.config.norm_output else hidden, normed)

    def logits(self, normed: Tensor) -> Tensor:
        """Step.normed [..., H] -> [..., V_draft]."""
        return self.lm_head(normed)


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpointing = False  # see Draft

    def forward(self, hidden: Tensor, embeddings: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, turn, attend)  # the residual is the hidden before its norm
        normed = self.post_attention_layernorm(hidden)
        if not self.checkpointing:
            return hidden + self.mlp(normed)
        # Backward runs the MLP again, with the weights handed over: they may be rounded copies of the module's own.
        weights = dict(self.mlp.named_parameters())
        return hidden + checkpoint(partial(functional_call, self.mlp), weights, (normed,), use_reentrant=False)


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output = attend(rotate(q, turn), rotate(k, turn), v)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in at least fp32, rounded once to x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotation(positions: Tensor, config: DraftConfig) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin, fp32 [B, 1, T, hd/2], of positions int64 [B, T].

    From the positions themselves, in fp32 as SGLang does: no table, so no length that must be known, and no buffer
    that loading through the meta device could leave empty.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE as in Llama: element j of a head pairs with element j + hd/2. x [B, heads, T, hd] in and out."""
    cos, sin = turn
    low, high = x.to(at_least_fp32(x.dtype)).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
