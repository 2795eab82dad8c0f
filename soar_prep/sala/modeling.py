"""MiniCPM-SALA as an ordinary model of transformers: a decoder of sparse and of linear attention, with muP scalings.

h_0 = scale_emb * embedding; each layer adds residual_scale * mixer(norm(h)), then residual_scale * mlp(norm(h)); the
head sees norm(h) / (hidden_size / dim_model_base). Weight names are those of the published checkpoint.

Nothing is kept in buffers: what depends on positions or heads alone is computed from the config in every call, so there
is nothing that loading through the meta device could leave zero.

Source: the published config.json and weights' names; SGLang 0.5.21's models/minicpm.py for the order of operations.
"""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from soar_prep.sala import infllm, lightning
from soar_prep.sala.configuration import LIGHTNING, MiniCPMSALAConfig, SparseAttention

# transformers 5.22 renamed it
CACHE = "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else "past_key_values"


class SparseMixer(nn.Module):
    """InfLLM-V2 attention without positions, under an output gate."""

    def __init__(self, config: MiniCPMSALAConfig, layer_index: int):
        super().__init__()
        self.layer_index, self.head_dim, self.sparse = layer_index, config.head_dim, config.sparse_attention
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_gate = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], pads: Tensor | None, cache: Cache | None) -> Tensor:
        q, k, v = (split_heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        longest = k.shape[2] - (0 if pads is None else int(pads.min()))
        if self.sparse is None or longest < self.sparse.dense_len:
            mixed = dense_attention(q, k, v, pads)
        else:
            mixed = sparse_attention(q, k, v, pads, self.sparse)
        return self.o_proj(join_heads(mixed) * torch.sigmoid(self.o_gate(x)))


class LightningMixer(nn.Module):
    """Linear attention with a fixed decay, on normed and rotated queries and keys, normed and gated."""

    def __init__(self, config: MiniCPMSALAConfig, layer_index: int):
        super().__init__()
        self.layer_index, self.heads, self.head_dim = layer_index, config.lightning_nh, config.lightning_head_dim
        width = self.heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.z_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], pads: Tensor | None, cache: Cache | None) -> Tensor:
        q, k, v = (split_heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        kept: Any = None if cache is None else cache.layers[self.layer_index]
        state = None if kept is None else kept.recurrent_states[0]
        mix = lightning.one_step if q.shape[2] == 1 else lightning.chunks_for(q)
        mixed, state = mix(q, k, v, lightning.slopes(self.heads, q.device), state)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_index)
        return self.o_proj(self.o_norm(join_heads(mixed)) * torch.sigmoid(self.z_proj(x)))


class MLP(nn.Module):
    def __init__(self, config: MiniCPMSALAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: MiniCPMSALAConfig, layer_index: int):
        super().__init__()
        mixer = LightningMixer if config.mixer_types[layer_index] == LIGHTNING else SparseMixer
        self.self_attn = mixer(config, layer_index)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.scale = config.residual_scale

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], pads: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, pads, cache) * self.scale
        return hidden + self.mlp(self.post_attention_layernorm(hidden)) * self.scale


class MiniCPMSALAPreTrainedModel(PreTrainedModel):
    config_class = MiniCPMSALAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 (so declared in the base class)
    _is_stateful = True  # a recurrent state cannot be cut back to fewer tokens


class MiniCPMSALAModel(MiniCPMSALAPreTrainedModel):
    """Token ids to normed hidden states."""

    def __init__(self, config: MiniCPMSALAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **_kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids int64 [B, T]; attention_mask [B, tokens so far], zeros for padding on the left; a DynamicCache."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden * self.config.scale_emb
        pads = left_padding(attention_mask)
        if pads is not None and attention_mask is not None:
            # There is no bias: padding that enters as zeros stays zero in every layer, and adds nothing to a state.
            hidden = hidden * attention_mask[:, -hidden.shape[1] :, None].to(hidden.dtype)
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
            position_ids = position_ids if pads is None else (position_ids - pads[:, None]).clamp(min=0)
        rotation = rotation_of(position_ids, self.config.lightning_head_dim, self.config.rope_theta)
        for layer in self.layers:
            hidden = layer(hidden, rotation=rotation, pads=pads, cache=cache)
        held: Any = {CACHE: cache}
        return BaseModelOutputWithPast(self.norm(hidden), **held)


class MiniCPMSALAForCausalLM(MiniCPMSALAPreTrainedModel, GenerationMixin):
    """MiniCPM-SALA with its language-model head; `AutoModelForCausalLM` makes it once `soar_prep.sala` is imported."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MiniCPMSALAConfig):
        super().__init__(config)
        self.model = MiniCPMSALAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits in the model's dtype [B, T, V], of the last logits_to_keep tokens unless 0; a loss if given labels."""
        cache = past_key_values if cache is None else cache
        output = self.model(input_ids, attention_mask, position_ids, inputs_embeds, use_cache, cache)
        hidden = output.last_hidden_state
        kept = hidden[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        logits = self.lm_head(kept / (self.config.hidden_size / self.config.dim_model_base))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        held: Any = {CACHE: getattr(output, CACHE)}
        return CausalLMOutputWithPast(loss, logits, **held)


def rotation_of(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) of rotary positions in fp32, [B, 1, T, d / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, H, T, d], halves against each other, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, pads: Tensor | None) -> Tensor:
    """Causal softmax attention of the last T of S tokens, [B, Hq, T, d]."""
    tokens, length = q.shape[2], k.shape[2]
    mask = None
    if pads is not None or 1 < tokens < length:
        keys = torch.arange(length, device=q.device)
        mask = (keys <= keys[length - tokens :, None])[None, None]
        if pads is not None:
            mask = mask & (keys >= pads[:, None, None, None])
            mask[..., 0] |= ~mask.any(-1)  # a padding query reads a padding key, whose value is zero, instead of none
    causal = mask is None and tokens > 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, sparse: SparseAttention) -> Tensor:
    """InfLLM-V2 of each row without its padding, [B, Hq, T, d]; zero for padding."""
    tokens, goes_on = q.shape[2], q.shape[2] < k.shape[2]
    attend = infllm.attention_for(q[0], k[0], sparse)
    mixed = []
    for row, start in enumerate([0] * len(q) if pads is None else pads.tolist()):
        own = min(tokens, k.shape[2] - start)
        read = attend(q[row, :, tokens - own :], k[row, :, start:], v[row, :, start:], sparse, goes_on)
        mixed.append(F.pad(read, (0, 0, tokens - own, 0)))
    return torch.stack(mixed)


def left_padding(mask: Tensor | None) -> Tensor | None:
    """Padding tokens at the start of each row, int64 [B]; None if no row has any."""
    if mask is None or bool(mask[:, 0].all()):
        return None
    return mask.to(torch.int64).argmax(dim=1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
