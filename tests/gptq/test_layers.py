from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.gptq.layers import check_layers, plan_layer
from soar_prep.settings import Compute
from soar_prep.streaming import StreamedModel

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED: list[tuple[str, ...]] = [QKV, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
GROUPS: dict[str, list[tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen2_window", "qwen3", "mistral", "smollm3", "gemma2", "gemma3"), GATED),
    **dict.fromkeys(("granite", "remote_code"), GATED),
    "odd_width": GATED[:3],
    "phi3": [("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)],
    "cohere2": [(*QKV, "mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj",), ("mlp.down_proj",)],
    "lfm2": [("conv.in_proj",), ("conv.out_proj",), ("feed_forward.w1", "feed_forward.w3"), ("feed_forward.w2",)],
    "opt": [QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",)],
}
Models = Callable[[str], Path]


def open_model(directory: Path) -> StreamedModel:
    return StreamedModel(Checkpoint(directory), Compute(device="cpu"), trust_remote_code=True)


@pytest.mark.parametrize("name", GROUPS)
def test_linears_with_a_common_input_form_a_group(name: str, model_directory: Models):
    """Catches q, k, v or gate, up in different groups: fused by a server, all but one would get a wrong scale."""
    model = open_model(model_directory(name))
    check_layers(model, [])
    plan = plan_layer(model, 0, model.load_layer(0), [])
    assert plan.groups == GROUPS[name]
    kept = {"mlp.down_proj": "72 input columns do not divide into blocks of 16"} if name == "odd_width" else {}
    assert plan.kept == kept


@pytest.mark.parametrize(
    ("pattern", "layer", "kept"),
    [
        ("model.layers.1.mlp.down_proj", 1, ["mlp.down_proj"]),
        ("model.layers.1.mlp.down_proj", 0, []),
        ("*.o_proj", 0, ["self_attn.o_proj"]),
        ("*.self_attn.[qkv]_proj", 0, sorted(QKV)),
        ("*.layers.0.*", 0, sorted(name for group in GATED for name in group)),
        ("*.layers.0.*", 1, []),
        ("lm_head", 0, []),
    ],
)
def test_keep_patterns(pattern: str, layer: int, kept: list[str], model_directory: Models):
    """Catches patterns matched against short names, in another layer, or as substrings."""
    model = open_model(model_directory("mistral"))
    check_layers(model, [pattern])
    plan = plan_layer(model, layer, model.load_layer(layer), [pattern])
    assert sorted(plan.kept) == kept
    assert set(plan.kept.values()) <= {"keep_unquantized"}
    assert sorted([*kept, *(name for group in plan.groups for name in group)]) == sorted(
        name for group in GATED for name in group
    )


@pytest.mark.parametrize(
    ("name", "patterns", "message"),
    [
        ("mistral", ["*.down_prj"], r"keep_unquantized: '\*\.down_prj' matches no linear.*model\.layers\.0\.self_attn"),
        ("mistral", ["*.0.*", "down_proj"], "keep_unquantized: 'down_proj' matches no linear"),
        (
            "mistral",
            ["*.q_proj"],
            r"keeps model\.layers\.0\.self_attn\.q_proj but not self_attn\.k_proj, self_attn\.v_",
        ),
        ("mistral", ["*.1.mlp.up_proj"], r"keeps model\.layers\.1\.mlp\.up_proj but not mlp\.gate_proj, .*all of them"),
        ("mistral", ["*"], r"MistralForCausalLM: no linear in its layers is left to quantize"),
        ("gpt2", [], "GPT2LMHeadModel: no linear in its layers is left to quantize"),
        ("mixtral", [], r"model\.layers\.0\.mlp\.experts\.\w+: shape \[4, .*mixture-of-experts models are not"),
    ],
)
def test_what_cannot_be_quantized_is_told_first(name: str, patterns: list[str], message: str, model_directory: Models):
    """Catches a misspelt pattern without effect, a fused group that is split, experts silently left out."""
    model = open_model(model_directory(name))
    with pytest.raises(UserError, match=message):
        check_layers(model, patterns)


class Routed(nn.Module):
    """A layer with an expert that sees one token of two, a linear nobody calls, and one fed a flattened input."""

    def __init__(self, is_routed: bool):
        super().__init__()
        self.expert, self.unused, self.flat = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.is_routed = is_routed

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        flat = hidden_states.flatten(0, 1)
        return self.expert(hidden_states[:, :1] if self.is_routed else hidden_states) + self.flat(flat)[None]


def test_linears_off_the_common_road(model_directory: Models):
    """Catches a linear left dense without a word, and a routed expert calibrated on the wrong tokens."""
    model = open_model(model_directory("mistral"))
    plan = plan_layer(model, 0, Routed(is_routed=False), [])
    assert plan.groups == [("expert",), ("flat",)]
    assert plan.kept == {"unused": "the layer does not call it"}
    with pytest.raises(UserError, match=r"model\.layers\.0\.expert: given 1 of 2 tokens; mixture-of-experts"):
        plan_layer(model, 0, Routed(is_routed=True), [])
