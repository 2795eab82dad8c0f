import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from soar_prep.sala import MiniCPMSALAConfig
from soar_prep.sala.configuration import LIGHTNING, SPARSE, SparseAttention, published_mixers

PUBLISHED = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "auto_map": {
        "AutoConfig": "configuration_minicpm_sala.MiniCPMSALAConfig",
        "AutoModelForCausalLM": "modeling_minicpm_sala.MiniCPMSALAForCausalLM",
    },
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 73448,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "mup_denominator": 32,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "pad_token_id": 2,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "lightning_use_rope": True,
    "lightning_nh": 32,
    "lightning_nkv": 32,
    "lightning_head_dim": 128,
    "lightning_scale": "1/sqrt(d)",
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "attention_bias": False,
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
    "mixer_types": [SPARSE if i in (0, 9, 16, 17, 22, 29, 30, 31) else LIGHTNING for i in range(32)],
}


def test_the_published_config(tmp_path: Path):
    """Catches a config.json that needs remote code, or comes back with other values than it had."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is MiniCPMSALAConfig
    again = json.loads(config.to_json_string(use_diff=False))
    assert {k: again[k] for k in PUBLISHED if k not in ("rope_scaling", "architectures")} == {
        k: v for k, v in PUBLISHED.items() if k not in ("rope_scaling", "architectures")
    }
    assert config.sparse_attention == SparseAttention()
    assert config.residual_scale == pytest.approx(1.4 / 32**0.5)
    assert config.layer_types.count("full_attention") == 8


def test_defaults_are_the_published_values():
    """Catches a default that makes another model of a config.json that leaves a value out."""
    config = MiniCPMSALAConfig()
    for name in PUBLISHED.keys() - {"architectures", "auto_map", "rope_scaling", "eos_token_id", "sparse_config"}:
        assert getattr(config, name) == PUBLISHED[name], name


def test_a_saved_config(tmp_path: Path):
    """Catches a value that save_pretrained writes where from_pretrained does not look, rope_theta above all."""
    config = MiniCPMSALAConfig(num_hidden_layers=4, rope_theta=5e5, sparse_config={"topk": 8}, lightning_nh=8)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.rope_theta, again.lightning_nkv) == (5e5, 8)
    assert again.sparse_attention == SparseAttention(topk=8)
    assert again.mixer_types == published_mixers(4) == [SPARSE, LIGHTNING, LIGHTNING, SPARSE]
    assert AutoConfig.from_pretrained(tmp_path, dense_as_sparse=True).sparse_attention.dense_len == 0


def test_without_sparse_config():
    """Catches a crash on a model whose sparse layers always read everything."""
    assert MiniCPMSALAConfig().sparse_attention is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_use_rope": True}, "attn_use_rope of a MiniCPM-SALA is False"),
        ({"qk_norm": False}, "qk_norm"),
        ({"lightning_scale": "1/d"}, "lightning_scale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"mixer_types": ["minicpm4"] * 31}, "found 31"),
        ({"mixer_types": ["minicpm4"] * 31 + ["mamba"]}, "'mamba'"),
        ({"lightning_nkv": 8}, "lightning_nkv=8"),
        ({"mup_denominator": 24}, "mup_denominator=24"),
        ({"sparse_config": {"use_nope": True}}, "use_nope"),
        ({"sparse_config": {"kernel_size": 24}}, "kernel_size=24 is no multiple of kernel_stride=16"),
        ({"sparse_config": {"block_size": 40}}, "block_size=40"),
        ({"sparse_config": {"window_size": 100}}, "window_size=100"),
        ({"sparse_config": {"topk": 1}}, "topk=1 leaves no room"),
    ],
)
def test_another_architecture_is_refused(change: dict, says: str):
    """Catches a config that would silently be run as what it is not."""
    with pytest.raises(ValueError, match=says):
        MiniCPMSALAConfig(**change)
