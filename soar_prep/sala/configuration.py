"""MiniCPM-SALA's config.json as a configuration class of transformers."""

import math
from dataclasses import dataclass, fields
from typing import Any

from transformers import PretrainedConfig

SPARSE, LIGHTNING = "minicpm4", "lightning-attn"
# What the published model is; the modeling code has no other branch, so a config that says otherwise is refused.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "lightning_use_rope": True,
    "qk_norm": True,
    "use_output_norm": True,
    "use_output_gate": True,
    "lightning_scale": "1/sqrt(d)",
}


@dataclass(frozen=True)
class SparseAttention:
    """config.json's sparse_config: how a sparse layer chooses what it reads. All but topk and init_blocks in tokens.

    Source: the published config.json; InfLLM-V2, https://arxiv.org/abs/2509.24663.
    """

    kernel_size: int = 32  # keys averaged into one of the fine level; the coarse level takes four times as many
    kernel_stride: int = 16
    init_blocks: int = 1  # first blocks, always read
    block_size: int = 64
    window_size: int = 2048  # tokens before a query's own block that are always read
    topk: int = 64  # blocks read beside the window
    dense_len: int = 8192  # shorter contexts are read whole

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that do not fit into each other."""
        for large, small in (
            ("kernel_size", "kernel_stride"),
            ("block_size", "kernel_stride"),
            ("window_size", "block_size"),
        ):
            if getattr(self, small) < 1 or getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"sparse_config: {large}={getattr(self, large)} is no multiple of {small}={getattr(self, small)}"
                )
        if self.topk <= self.init_blocks:
            raise ValueError(f"sparse_config: topk={self.topk} leaves no room beside init_blocks={self.init_blocks}")

    @property
    def local_blocks(self) -> int:
        return self.window_size // self.block_size

    @property
    def selected_blocks(self) -> int:
        """Blocks that a query reads at most, those always read among them."""
        return self.topk + self.local_blocks


class MiniCPMSALAConfig(PretrainedConfig):
    """Shapes and scalings of MiniCPM-SALA, under the names of the published config.json, with its values as defaults.

    mixer_types names each layer's mixer, "minicpm4" (sparse attention) or "lightning-attn" (linear attention).
    dense_as_sparse lets sparse layers choose blocks for short contexts too, as SGLang's option of that name does.
    Raises ValueError for another architecture under the same name.
    """

    model_type = "minicpm_sala"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    def __init__(
        self,
        vocab_size: int = 73448,
        hidden_size: int = 4096,
        intermediate_size: int = 16384,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 2,
        head_dim: int = 128,
        lightning_nh: int = 32,
        lightning_nkv: int | None = None,
        lightning_head_dim: int = 128,
        mixer_types: list[str] | None = None,
        sparse_config: dict[str, Any] | None = None,
        dense_as_sparse: bool = False,
        max_position_embeddings: int = 524288,
        rope_theta: float = 10000.0,
        rope_parameters: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-6,
        scale_emb: float = 12,
        scale_depth: float = 1.4,
        dim_model_base: int = 256,
        mup_denominator: int | None = None,
        initializer_range: float = 0.1,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        pad_token_id: int | None = 2,
        **kwargs: Any,
    ):
        for name, value in FIXED.items():
            if kwargs.pop(name, value) != value:
                raise ValueError(f"{name} of a MiniCPM-SALA is {value!r}; another value is another architecture")
        rope = kwargs.pop("rope_scaling", None) or rope_parameters or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type={rope['rope_type']!r}: a MiniCPM-SALA has plain RoPE")
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim = head_dim
        self.lightning_nh, self.lightning_nkv = lightning_nh, lightning_nkv or lightning_nh
        self.lightning_head_dim = lightning_head_dim
        self.mixer_types = mixer_types or published_mixers(num_hidden_layers)
        self.sparse_config, self.dense_as_sparse = sparse_config, dense_as_sparse
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = float(rope.get("rope_theta", rope_theta))
        self.rms_norm_eps = rms_norm_eps
        self.scale_emb, self.scale_depth, self.dim_model_base = scale_emb, scale_depth, dim_model_base
        self.mup_denominator = mup_denominator or num_hidden_layers
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        for name, value in FIXED.items():  # written out: SGLang's defaults are another model's
            setattr(self, name, value)
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        self._check()
        super().__init__(**(kwargs | {"tie_word_embeddings": tie_word_embeddings}))

    def _check(self) -> None:
        unknown = sorted(set(self.mixer_types) - {SPARSE, LIGHTNING})
        if unknown or len(self.mixer_types) != self.num_hidden_layers:
            raise ValueError(
                f"mixer_types: {self.num_hidden_layers} of {SPARSE!r} and {LIGHTNING!r} expected, one a layer; found "
                f"{len(self.mixer_types)}" + (f" with {unknown[0]!r}" if unknown else "")
            )
        if self.lightning_nkv != self.lightning_nh:
            raise ValueError(f"lightning_nkv={self.lightning_nkv}: expected lightning_nh={self.lightning_nh}")
        if self.mup_denominator != self.num_hidden_layers:
            raise ValueError(
                f"mup_denominator={self.mup_denominator}: servers scale residual branches by num_hidden_layers="
                f"{self.num_hidden_layers}; both must agree"
            )
        if self.sparse_config is not None and self.sparse_config.get("use_nope"):
            raise ValueError("sparse_config.use_nope=true is not what the published model has")
        _ = self.sparse_attention

    @property
    def sparse_attention(self) -> SparseAttention | None:
        """What sparse layers choose by; None if they read everything."""
        if self.sparse_config is None:
            return None
        known = {f.name: self.sparse_config[f.name] for f in fields(SparseAttention) if f.name in self.sparse_config}
        return SparseAttention(**(known | ({"dense_len": 0} if self.dense_as_sparse else {})))

    @property
    def layer_types(self) -> list[str]:
        """The mixers by the names that transformers' caches know."""
        return ["full_attention" if mixer == SPARSE else "linear_attention" for mixer in self.mixer_types]

    @property
    def residual_scale(self) -> float:
        return self.scale_depth / math.sqrt(self.num_hidden_layers)


def published_mixers(layers: int) -> list[str]:
    """The published pattern, 8 sparse layers of 32; at another depth each layer is the nearest published one."""
    sparse = (0, 9, 16, 17, 22, 29, 30, 31)
    nearest = [round(index * 31 / max(layers - 1, 1)) for index in range(layers)]
    return [SPARSE if index in sparse else LIGHTNING for index in nearest]
