"""A small decoder as model authors ship them beside their weights: layers return tuples, three scalings of its own.

scale_emb multiplies the embeddings, scale_depth / sqrt(layers) every residual branch, and the head sees its input
divided by hidden_size / dim_model_base. Positions are learned, attention is causal.
"""

import math

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class TinyConfig(PretrainedConfig):
    model_type = "tiny_scaled"

    def __init__(
        self,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        scale_emb=12.0,
        scale_depth=1.4,
        dim_model_base=16,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.scale_emb = scale_emb
        self.scale_depth = scale_depth
        self.dim_model_base = dim_model_base
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x, mask):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Feedforward(config)
        self.input_norm, self.post_norm = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        self.scale = config.scale_depth / math.sqrt(config.num_hidden_layers)

    def forward(self, hidden_states, attention_mask, use_cache=False):
        hidden_states = hidden_states + self.self_attn(self.input_norm(hidden_states), attention_mask) * self.scale
        hidden_states = hidden_states + self.mlp(self.post_norm(hidden_states)) * self.scale
        return (hidden_states, None)


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, use_cache=False, **kwargs):
        length = input_ids.shape[1]
        hidden = self.embed_tokens(input_ids) * self.config.scale_emb
        hidden = hidden + self.embed_positions(torch.arange(length, device=input_ids.device))
        mask = torch.full((length, length), float("-inf"), dtype=hidden.dtype, device=hidden.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, mask, use_cache=use_cache)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class TinyForCausalLM(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=False, **kwargs):
        hidden = self.model(input_ids, use_cache=use_cache)[0]
        divisor = self.config.hidden_size / self.config.dim_model_base
        return CausalLMOutputWithPast(logits=self.lm_head(hidden / divisor))
