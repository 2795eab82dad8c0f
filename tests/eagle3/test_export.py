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
from soar_prep.eagle3.nvfp4 import hold_rounded, prepare
from soar_prep.errors import UserError
from soar_prep.qat.linear import nvfp4_linears
from soar_prep.settings import Activations, DraftFormat, Qat

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


ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
# A power of two for each linear; those that a server fuses share one.
INPUT_SCALES = {f"{ATTENTION}.{name}": 2.0**-7 for name in ("q_proj", "k_proj", "v_proj")} | {
    f"{ATTENTION}.o_proj": 2.0**-8,
    f"{MLP}.gate_proj": 2.0**-5,
    f"{MLP}.up_proj": 2.0**-5,
    f"{MLP}.down_proj": 2.0**-6,
    "lm_head": 2.0**-4,
}


def rounded(lm_head: bool = False, activations: Activations = Activations.none) -> Draft:
    """A draft in NVFP4: block scales and tensor scales of random weights, input scales from the table."""
    draft = drawn(hidden_size=32, intermediate_size=48)
    masters = {name: weight.detach().clone() for name, weight in draft.named_parameters()}
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        masters[f"midlayer.{name}.weight"] *= 4  # alone it would have another tensor scale than its group
    qat = Qat(DraftFormat.nvfp4, lm_head=lm_head, activations=activations)
    prepare(draft, qat)
    hold_rounded(draft, masters, {name: torch.tensor(scale) for name, scale in INPUT_SCALES.items()}, qat)
    return draft


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_draft(drawn(), tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def written_nvfp4(tmp_path: Path) -> Path:
    write_draft(rounded(), tmp_path / "draft")
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


@pytest.mark.parametrize("activations", list(Activations), ids=str)
@pytest.mark.parametrize("lm_head", [False, True], ids=["head in BF16", "head in NVFP4"])
def test_nvfp4_there_and_back(tmp_path: Path, lm_head: bool, activations: Activations):
    """Catches weights that are rounded anew on the way, a scale of another linear, and activations that are forgotten.

    Written once more, what was read gives the same two files, byte for byte.
    """
    draft = rounded(lm_head, activations)
    write_draft(draft, tmp_path / "draft")
    back = read_draft(tmp_path / "draft")
    ours, theirs = nvfp4_linears(draft), nvfp4_linears(back)
    assert theirs.keys() == INPUT_SCALES.keys() - (set() if lm_head else {"lm_head"})
    for name, linear in theirs.items():
        stored, expected = linear.stored, ours[name].stored
        assert stored is not None
        assert expected is not None
        assert torch.equal(stored.codes, expected.codes), name
        assert torch.equal(stored.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8)), name
        assert torch.equal(stored.tensor_scale, expected.tensor_scale), name
        assert linear.input_scale == INPUT_SCALES[name], name
        assert (linear.activations, linear.is_rounded) == (activations, True), name
    expected_state = draft.bfloat16().state_dict()  # which is exact: e2m1 * e4m3 * a power of two
    assert back.state_dict().keys() == expected_state.keys()
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == expected_state[name].dtype, name
        assert torch.equal(tensor, expected_state[name]), name
    write_draft(back, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()


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


@pytest.mark.parametrize(("lm_head", "ignored"), [(False, ["fc", "lm_head"]), (True, ["fc"])])
def test_nvfp4_config_by_hand(tmp_path: Path, lm_head: bool, ignored: list[str]):
    """Catches a linear that SGLang would take for NVFP4 though it is not, or the other way round."""
    write_draft(drawn(hidden_size=32, intermediate_size=48), tmp_path / "bf16")
    write_draft(rounded(lm_head, Activations.static), tmp_path / "nvfp4")
    plain, found = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("bf16", "nvfp4"))
    assert "quantization_config" not in plain
    assert found == plain | {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
                    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
                    "targets": ["Linear"],
                }
            },
            "ignore": ignored,
            "producer": {"name": "soar-prep", "activations": "static"},
        }
    }


def test_nvfp4_tensors_by_hand(written_nvfp4: Path):
    """Catches nibbles in another order, a scale under another's name, groups that a server fuses with scales apart.

    weight[n, k] = e2m1(code) * weight_scale[n, k // 16] * weight_scale_2, the even column in the low nibble.
    """
    tensors, draft = load_file(written_nvfp4 / "model.safetensors"), rounded()
    quantized = {f"{name}.{kind}" for name in INPUT_SCALES if name != "lm_head" for kind in KINDS}
    assert {name for name, tensor in tensors.items() if tensor.dtype not in (torch.bfloat16, torch.bool)} == (
        quantized | {"d2t"}
    )
    query = [tensors[f"{ATTENTION}.q_proj.{kind}"] for kind in KINDS]
    assert [(tensor.dtype, tensor.shape) for tensor in query] == [
        (torch.uint8, (32, 32)),
        (torch.float8_e4m3fn, (32, 4)),
        (torch.float32, ()),
        (torch.float32, ()),
    ]
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, linear in nvfp4_linears(draft).items():
        codes, block_scales, tensor_scale, input_scale = (tensors[f"{name}.{kind}"] for kind in KINDS)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
        values = torch.where(nibbles < 8, 1.0, -1.0) * magnitudes[nibbles % 8]
        weight = values * block_scales.float().repeat_interleave(16, dim=1) * tensor_scale
        assert torch.equal(weight, linear.weight), name
        assert input_scale == INPUT_SCALES[name], name
    for group in ([f"{ATTENTION}.{part}_proj" for part in "qkv"], [f"{MLP}.gate_proj", f"{MLP}.up_proj"]):
        assert len({float(tensors[f"{name}.weight_scale_2"]) for name in group}) == 1


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


def quantization(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            quantization(quant_method="compressed-tensors"),
            "is of compressed-tensors NVFP4; expected modelopt NVFP4",
        ),
        (quantization(quant_algo="W4A16_NVFP4"), "is of modelopt W4A16_NVFP4; expected modelopt NVFP4"),
        (quantization(quant_algo=None), "is of modelopt None; expected modelopt NVFP4"),
        (quantization(ignore=["lm_head"]), "ignores ['lm_head']; expected fc"),
        (quantization(ignore=None), "ignores []; expected fc"),
        (quantization(ignore=["fc", "down_proj"]), "ignores ['fc', 'down_proj']; expected fc"),
        (quantization(ignore=["fc"]), "tensor lm_head.input_scale is missing"),
        (quantization(producer={"activations": "fp8"}), "activations is 'fp8'; expected one of none, static, dynamic"),
        (lambda c: c.pop("quantization_config"), "down_proj.input_scale is none of an EAGLE-3 draft's"),
    ],
)
def test_a_quantization_of_another_kind(written_nvfp4: Path, change: Callable, text: str):
    """Catches codes that are read as another format's, or as weights, and a draft measured as it was not trained."""
    change_config(written_nvfp4, change)
    with pytest.raises(UserError) as caught:
        read_draft(written_nvfp4)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(
            (lambda t, name=name: t.pop(name), f"tensor {name} is missing")
            for name in (
                f"{MLP}.up_proj.{kind}" for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale")
            )
        ),
        (
            lambda t: t.update({"lm_head.weight_scale": t[f"{MLP}.up_proj.weight_scale"].clone()}),
            "tensor lm_head.weight_scale is none of an EAGLE-3 draft's",
        ),
        (
            lambda t: t.update({f"{MLP}.down_proj.weight": torch.zeros(32, 48)}),
            f"{MLP}.down_proj.weight is [32, 48], config.json makes it [32, 24]",
        ),
        (
            lambda t: t.update({f"{MLP}.down_proj.weight_scale_2": torch.ones(1)}),
            f"{MLP}.down_proj.weight_scale_2 is [1], config.json makes it []",
        ),
    ],
)
def test_damaged_nvfp4_tensors(written_nvfp4: Path, change: Callable, text: str):
    """Catches a draft that lacks a scale and is read anyway: SGLang leaves what it misses as it was drawn."""
    tensors = load_file(written_nvfp4 / "model.safetensors")
    change(tensors)
    save_file(tensors, written_nvfp4 / "model.safetensors")
    with pytest.raises(UserError) as caught:
        read_draft(written_nvfp4)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


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
