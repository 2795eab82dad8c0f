import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from soar_prep.eagle3.draft import Draft, DraftConfig, default_aux_layers, rotate, rotation
from soar_prep.errors import UserError

TINY = DraftConfig(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=17,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=2**19,
    aux_layers=(1, 2, 3),
)
SALA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=16384,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=73448,
    num_hidden_layers=32,
    max_position_embeddings=524288,
    rope_theta=1e4,
)


def test_parameters_of_the_sala_draft():
    """Catches a bias, a fourth matrix, stored embeddings or q, k, v of the wrong input width."""
    config = DraftConfig.for_target(SALA)
    assert config.aux_layers == (1, 15, 28)
    with torch.device("meta"):
        draft = Draft(config)
        assert sum(p.numel() for p in draft.parameters()) == 437_272_576
        with_norms = Draft(dataclasses.replace(config, fc_norm=True))
        assert sum(p.numel() for p in with_norms.parameters()) == 437_272_576 + 3 * 4096


def test_names_are_those_that_sglang_loads():
    """Catches a tensor that SGLang would drop without a word, and one that it would leave random."""
    expected = {"fc", "norm", "lm_head", "midlayer.input_layernorm", "midlayer.hidden_norm"}
    expected |= {"midlayer.post_attention_layernorm"}
    expected |= {f"midlayer.self_attn.{name}_proj" for name in "qkvo"}
    expected |= {f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")}
    names = {f"{name}.weight" for name in expected} | {"d2t", "t2d"}
    assert set(Draft(TINY).state_dict()) == names
    with_norms = Draft(dataclasses.replace(TINY, fc_norm=True))
    assert set(with_norms.state_dict()) == names | {f"fc_norm.{i}.weight" for i in range(3)}
    state = Draft(TINY).state_dict()
    assert state["d2t"].dtype == torch.int64
    assert state["t2d"].dtype == torch.bool
    assert state["midlayer.self_attn.k_proj.weight"].shape == (2 * 8, 2 * 24)
    assert state["midlayer.self_attn.o_proj.weight"].shape == (24, 4 * 8)


@pytest.mark.parametrize("layers", range(3, 40))
def test_default_layers_exist_and_differ(layers: int):
    """Catches L - 4 < 0, and a layer named twice, which SGLang captures once: fc would meet the wrong width."""
    chosen = default_aux_layers(layers)
    assert list(chosen) == sorted(set(chosen))
    assert chosen[0] >= 0
    assert chosen[-1] <= (layers - 2 if layers > 3 else 2)  # the last layer's output never arrives in SGLang
    if layers >= 8:
        assert chosen == (1, layers // 2 - 1, layers - 4)


def test_shapes_follow_the_target():
    """Catches a rope_theta, kv head count or length that falls back to a default."""
    target = LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2)
    target.update({"vocab_size": 101, "num_hidden_layers": 5, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    target.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    config = DraftConfig.for_target(target, draft_vocab_size=60, norm_output=True)
    expected = DraftConfig(48, 80, 6, 2, 8, 101, 60, 1e-5, 5e5, 4096, (1, 2, 3), fc_norm=False, norm_output=True)
    assert config == expected
    assert DraftConfig.for_target(target).draft_vocab_size == 101


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"draft_vocab_size": 51}, "draft_vocab_size=51"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"head_dim": 7}, "odd"),
        ({"aux_layers": (1, 2)}, "three different"),
        ({"aux_layers": (1, 1, 2)}, "three different"),
        ({"aux_layers": (2, 1, 3)}, "three different"),
        ({"aux_layers": (-1, 1, 3)}, "three different"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, text: str):
    """Catches a config that would only fail in SGLang."""
    with pytest.raises(UserError, match=text):
        dataclasses.replace(TINY, **changes)


def test_layers_that_the_target_lacks():
    """Catches a list copied from a larger target."""
    with pytest.raises(UserError, match="0 to 31"):
        DraftConfig.for_target(SALA, aux_layers=(1, 15, 32))
    with pytest.raises(UserError, match="2 decoder layers"):
        default_aux_layers(2)


def own_position_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What attention answers where a token sees itself alone."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_step_by_hand(fc_norm: bool, norm_output: bool):
    """Catches a normed residual, embedding and hidden in the wrong order, a wrong hidden handed on, a missing norm."""
    torch.manual_seed(0)
    draft = Draft(dataclasses.replace(TINY, fc_norm=fc_norm, norm_output=norm_output)).double()
    for p in draft.parameters():
        torch.nn.init.normal_(p, std=0.5)
    weights = dict(draft.named_parameters())
    aux, embeddings = torch.randn(1, 15, 72).double(), torch.randn(1, 15, 24).double()

    parts = list(aux.split(24, dim=-1))
    if fc_norm:
        parts = [llama_norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    hidden = torch.cat(parts, dim=-1) @ weights["fc.weight"].T
    torch.testing.assert_close(draft.project(aux), hidden)
    embedded = llama_norm(embeddings, weights["midlayer.input_layernorm.weight"])
    x = torch.cat([embedded, llama_norm(hidden, weights["midlayer.hidden_norm.weight"])], -1)
    v = (x @ weights["midlayer.self_attn.v_proj.weight"].T).view(1, 15, 2, 8)
    attended = v[:, :, [0, 0, 1, 1]].reshape(1, 15, 32)
    after = hidden + attended @ weights["midlayer.self_attn.o_proj.weight"].T
    y = llama_norm(after, weights["midlayer.post_attention_layernorm.weight"])
    gate, up = y @ weights["midlayer.mlp.gate_proj.weight"].T, y @ weights["midlayer.mlp.up_proj.weight"].T
    after = after + (gate * gate.sigmoid() * up) @ weights["midlayer.mlp.down_proj.weight"].T
    normed = llama_norm(after, weights["norm.weight"])

    step = draft.step(draft.project(aux), embeddings, torch.arange(15)[None], own_position_only)
    torch.testing.assert_close(step.hidden, normed if norm_output else after)
    torch.testing.assert_close(step.normed, normed)
    torch.testing.assert_close(draft.logits(step.normed), normed @ weights["lm_head.weight"].T)


def test_rotation_is_llamas():
    """Catches interleaved pairs, a wrong sign, and a frequency off by one."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    llama = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_theta=1e4, max_position_embeddings=2**19)
    positions = torch.tensor([[0, 1, 5, 4095, 2**19 - 1]])
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    cos, sin = LlamaRotaryEmbedding(llama)(q, positions)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    turn = rotation(positions, TINY)
    torch.testing.assert_close(rotate(q, turn), expected_q)
    torch.testing.assert_close(rotate(k, turn), expected_k)


def test_rotation_of_far_positions_in_bf16():
    """Catches positions or angles in bf16: it holds 8 bits, so that 524,287 and 524,288 would be one place."""
    q = torch.randn(1, 1, 1, 8).bfloat16()
    near, far = (rotate(q, rotation(torch.tensor([[p]]), TINY)) for p in (2**19 - 1, 2**19 - 2))
    assert near.dtype == torch.bfloat16
    assert not torch.equal(near, far)
    exact = rotate(q.float(), rotation(torch.tensor([[2**19 - 1]]), TINY))
    torch.testing.assert_close(near, exact.bfloat16(), rtol=0, atol=0)


def test_only_distances_count():
    """Catches a rotation that depends on the absolute position: scores must not change under one common offset."""
    q, k = torch.randn(1, 1, 15, 8), torch.randn(1, 1, 15, 8)

    def scores(positions: Tensor) -> Tensor:
        turn = rotation(positions, TINY)
        return rotate(q, turn) @ rotate(k, turn).mT

    # fp32 angles of 4,096 radians are off by up to 2e-4
    positions = torch.arange(15)[None]
    torch.testing.assert_close(scores(positions), scores(positions + 4096), rtol=0, atol=1e-2)
    assert not torch.allclose(scores(positions), scores(positions * 2), atol=1e-1)


def test_vocabulary():
    """Catches d2t as absolute ids: SGLang adds the draft id to what is stored."""
    draft = Draft(TINY)
    assert torch.equal(draft.to_target_ids(torch.arange(17)), torch.arange(17))
    ids = torch.tensor([0, 1, 2, 5, 7, 8, 9, 20, 21, 22, 30, 31, 32, 33, 40, 48, 49])
    draft.set_vocabulary(ids)
    assert draft.d2t[:5].tolist() == [0, 0, 0, 2, 3]
    assert torch.equal(draft.to_target_ids(torch.arange(17)), ids)
    assert torch.equal(draft.target_ids(), ids)
    assert torch.equal(draft.t2d.nonzero()[:, 0], ids)
    for wrong in (ids.flip(0), ids[:-1], torch.cat([ids[:-1], ids[-2:-1]]), ids + 1, ids - 1):
        with pytest.raises(ValueError, match="target_ids"):
            draft.set_vocabulary(wrong)


def test_bf16_keeps_its_dtype_and_nearly_its_value():
    """Catches a promotion to fp32 inside the layer, and a norm computed in bf16."""
    torch.manual_seed(1)
    draft = Draft(dataclasses.replace(TINY, fc_norm=True))
    aux, embeddings, positions = torch.randn(2, 17, 72), torch.randn(2, 17, 24), torch.arange(17).expand(2, 17)
    exact = draft.step(draft.project(aux), embeddings, positions, own_position_only)
    draft.bfloat16()
    step = draft.step(draft.project(aux.bfloat16()), embeddings.bfloat16(), positions, own_position_only)
    assert step.hidden.dtype == step.normed.dtype == torch.bfloat16
    assert draft.d2t.dtype == torch.int64
    # bf16 has 8 bits; a dozen roundings between input and output
    torch.testing.assert_close(step.normed.float(), exact.normed, rtol=0, atol=0.1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 15), (1, 17)])
def test_every_parameter_learns(shape: tuple[int, int]):
    """Catches a weight that is not part of the computation: it would be saved as it was drawn."""
    torch.manual_seed(2)
    draft = Draft(dataclasses.replace(TINY, fc_norm=True))
    aux, embeddings = torch.randn(*shape, 72), torch.randn(*shape, 24)
    positions = torch.arange(shape[1]).expand(shape)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return torch.softmax(torch.cat([q @ k.mT, q @ k.mT * 0], -1), -1) @ torch.cat([v, v * 0.5], -2)

    step = draft.step(draft.project(aux), embeddings, positions, attend)
    draft.logits(step.normed).square().sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name
