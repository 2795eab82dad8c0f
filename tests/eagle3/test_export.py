import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from soar_prep.eagle3 import export
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import read_draft, write_draft
from soar_prep.errors import UserError

CONFIG = DraftConfig(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=17,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_position_embeddings=524288,
    aux_layers=(1, 10, 22),
)


def drawn(**changes: Any) -> Draft:
    torch.manual_seed(0)
    draft = Draft(dataclasses.replace(CONFIG, **changes))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter)
    draft.set_vocabulary(torch.randperm(50)[:17].sort().values)
    return draft


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_draft(drawn(), tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"norm_output": True}, {"rope_theta": 1e4}], ids=str)
def test_there_and_back(tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype):
    """Catches an option that the file does not hold, a tensor that is rounded twice, a vocabulary that moves."""
    draft = drawn(**changes)
    write_draft(draft, tmp_path / "draft", dtype)
    back = read_draft(tmp_path / "draft")
    assert back.config == draft.config
    expected = draft.to(dtype).state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_draft_keeps_its_dtype(tmp_path: Path):
    """Catches an export in the middle of training that rounds the weights in training."""
    draft = drawn()
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    write_draft(draft, tmp_path / "draft", torch.bfloat16)
    for name, tensor in draft.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_config_by_hand(written: Path):
    """Catches a name that SGLang does not read: it would take its default without a word."""
    assert json.loads((written / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": 50,
        "draft_vocab_size": 17,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 524288,
        "torch_dtype": "bfloat16",
        "fc_norm": False,
        "norm_output": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 10, 22]},
    }


def test_tensors_by_hand(written: Path):
    """Catches d2t as absolute ids, t2d as numbers, weights in another dtype than config.json says."""
    tensors = load_file(written / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(17)  # what SGLang does with it
    assert torch.equal(ids, drawn().t2d.nonzero()[:, 0])
    assert not torch.equal(tensors["d2t"], ids)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {t.dtype for name, t in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 48)
    assert not [name for name in tensors if "embed" in name]


def test_transformers_reads_the_same_llama(written: Path):
    """Catches an option that transformers renames or overrides on the way to SGLang."""
    config = AutoConfig.from_pretrained(written)
    assert config.model_type == "llama"
    assert config.rope_parameters == {"rope_theta": 1e6, "rope_type": "default"}
    assert config.torch_dtype == torch.bfloat16
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (8, 2, 1e-5)
    assert (config.draft_vocab_size, config.tie_word_embeddings, config.hidden_act) == (17, False, "silu")
    assert (config.fc_norm, config.norm_output) == (False, False)
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 10, 22]
    config.save_pretrained(written)
    assert read_draft(written).config == CONFIG


def change_config(written: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((written / "config.json").read_text())
    change(config)
    (written / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
        (lambda c: c.pop("architectures"), "architectures"),
        (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda c: c.update(attention_bias=True), "attention_bias"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c.update(norm_before_fc=True), "norm_before_fc"),
        (lambda c: c["eagle_config"].update(norm_before_fc=True), "norm_before_fc"),
        (lambda c: c.update(quantization_config={"quant_method": "modelopt"}), "quantization_config"),
        (lambda c: c.pop("eagle_config"), "eagle_config"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "eagle_config"),
        (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2]), "three different layers"),
        (lambda c: c.pop("max_position_embeddings"), "max_position_embeddings missing"),
        (lambda c: c.pop("rope_theta"), "rope_theta missing"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (lambda c: c.update(draft_vocab_size=16), r"d2t is \[17\], config.json makes it \[16\]"),
        (lambda c: c.update(num_key_value_heads=1), r"k_proj.weight is \[16, 48\], config.json makes it \[8, 48\]"),
        (lambda c: c.update(fc_norm=True), "fc_norm.0.weight is missing"),
    ],
)
def test_a_directory_of_another_kind(written: Path, change: Callable, text: str):
    """Catches a draft of another network that is read as if it were this one."""
    change_config(written, change)
    with pytest.raises(UserError, match=text):
        read_draft(written)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(50, 24)}), "embed_tokens.weight is none of"),
        (lambda t: t.update({"midlayer.mlp.bias": torch.zeros(24)}), "midlayer.mlp.bias is none of"),
        (lambda t: t.update({"fc.weight": torch.zeros(24, 48)}), r"fc.weight is \[24, 48\]"),
        (lambda t: t.update({"d2t": t["d2t"] + torch.arange(17)}), "t2d marks other|ascending"),
        (lambda t: t.update({"d2t": t["d2t"].int()}), "int32"),
        (lambda t: t.update({"d2t": t["d2t"].flip(0) * 3}), "ascending"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d marks other"),
    ],
)
def test_damaged_tensors(written: Path, change: Callable, text: str):
    """Catches what SGLang would load without a word: without lm_head a draft answers, and no guess is accepted."""
    tensors = load_file(written / "model.safetensors")
    change(tensors)
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(UserError, match=text):
        read_draft(written)


def test_nothing_is_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a directory that looks complete after a kill, and one that a second attempt cannot write."""
    output = tmp_path / "draft"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(export, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            write_draft(drawn(), output)
    assert not output.exists()
    (tmp_path / "draft.partial" / "config.json.tmp").touch()
    write_draft(drawn(), output)
    assert read_draft(output).config == CONFIG
    assert not (tmp_path / "draft.partial").exists()


def test_what_is_there_stays(tmp_path: Path):
    """Catches an export over another draft, or over files that are none of ours."""
    (tmp_path / "draft").mkdir()
    with pytest.raises(UserError, match="exists already"):
        write_draft(drawn(), tmp_path / "draft")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds notes\.txt"):
        write_draft(drawn(), tmp_path / "other")
    assert (tmp_path / "other.partial" / "notes.txt").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_diverged_weights_are_not_written(tmp_path: Path, value: float):
    """Catches a NaN that is only noticed when the server's output is empty."""
    draft = drawn()
    with torch.no_grad():
        draft.midlayer.mlp.up_proj.weight[3, 5] = value
    with pytest.raises(UserError, match=r"midlayer\.mlp\.up_proj\.weight"):
        write_draft(draft, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
