import copy
import math
import time
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from interpreter import NEEDS_GPU
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from soar_prep.checkpoint import Checkpoint
from soar_prep.sala import MiniCPMSALAConfig, MiniCPMSALAForCausalLM
from soar_prep.sala.configuration import LIGHTNING
from soar_prep.sala.modeling import CACHE
from soar_prep.settings import Compute
from soar_prep.streaming import StreamedModel

DENSE_LENGTH = 40


def small(**changes) -> MiniCPMSALAConfig:
    sparse = {"kernel_size": 4, "kernel_stride": 2, "init_blocks": 1, "block_size": 8, "window_size": 16, "topk": 2}
    chosen = {
        "vocab_size": 120,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "lightning_nh": 4,
        "lightning_head_dim": 16,
        "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn", "minicpm4", "minicpm4"],
        "sparse_config": sparse | {"dense_len": DENSE_LENGTH},
        "dim_model_base": 12,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return MiniCPMSALAConfig(**(chosen | changes))


@pytest.fixture(scope="module")
def model() -> MiniCPMSALAForCausalLM:
    torch.manual_seed(3)
    model = MiniCPMSALAForCausalLM(small()).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(120, shape, generator=torch.Generator().manual_seed(sum(shape)))


def logits_by_hand(model: MiniCPMSALAForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """The published mathematics in fp64, a token at a time, contexts read whole; from the weights' names alone."""
    w = {name: weight.double() for name, weight in model.state_dict().items()}
    layers, d, heads = 5, 16, 4
    state = {i: torch.zeros(heads, d, d, dtype=torch.float64) for i in (1, 2)}
    keys: dict[int, list[torch.Tensor]] = {i: [] for i in (0, 3, 4)}
    values: dict[int, list[torch.Tensor]] = {i: [] for i in (0, 3, 4)}

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[weight]

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    rows = []
    for position, token in enumerate(token_ids):
        h = 12 * w["model.embed_tokens.weight"][token]
        for i in range(layers):
            p = f"model.layers.{i}."
            x = norm(h, p + "input_layernorm.weight")
            q, k, v = (w[f"{p}self_attn.{n}_proj.weight"] @ x for n in "qkv")
            mixed = torch.zeros(heads, d, dtype=torch.float64)
            if i in state:
                q = turn(norm(q.view(heads, d), p + "self_attn.q_norm.weight"), position) / math.sqrt(d)
                k = turn(norm(k.view(heads, d), p + "self_attn.k_norm.weight"), position)
                for head in range(heads):
                    decay = math.exp(-(2.0 ** (-8 * (head + 1) / heads)))
                    state[i][head] = decay * state[i][head] + torch.outer(k[head], v.view(heads, d)[head])
                    mixed[head] = q[head] @ state[i][head]
                flat = norm(mixed.flatten(), p + "self_attn.o_norm.weight")
                gate = torch.sigmoid(w[p + "self_attn.z_proj.weight"] @ x)
            else:
                keys[i].append(k.view(2, d))
                values[i].append(v.view(2, d))
                for head in range(heads):
                    past = torch.stack(keys[i])[:, head // 2]
                    weights = torch.softmax(past @ q.view(heads, d)[head] / math.sqrt(d), dim=0)
                    mixed[head] = weights @ torch.stack(values[i])[:, head // 2]
                flat = mixed.flatten()
                gate = torch.sigmoid(w[p + "self_attn.o_gate.weight"] @ x)
            h = h + (w[p + "self_attn.o_proj.weight"] @ (flat * gate)) * 1.4 / math.sqrt(layers)
            x = norm(h, p + "post_attention_layernorm.weight")
            gate, up = (w[f"{p}mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
            h = h + (w[p + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)) * 1.4 / math.sqrt(layers)
        rows.append(w["lm_head.weight"] @ (norm(h, "model.norm.weight") / (48 / 12)))
    return torch.stack(rows)


def test_the_published_mathematics(model: MiniCPMSALAForCausalLM):
    """Catches a scaling, a gate, a norm, a rotation or a decay in the wrong place."""
    token_ids = ids(1, DENSE_LENGTH - 1)
    expected = logits_by_hand(model, token_ids[0].tolist())
    torch.testing.assert_close(model(token_ids).logits[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1  # else all of the above would be lost in the tolerance


def test_the_published_weight_names():
    """Catches a name that the published checkpoint does not have: it would load nothing, or not load."""
    with init_empty_weights():
        model = MiniCPMSALAForCausalLM(MiniCPMSALAConfig())
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    wide, kv, mlp = (4096, 4096), (256, 4096), (16384, 4096)
    expected = {
        "model.embed_tokens.weight": (73448, 4096),
        "model.norm.weight": (4096,),
        "lm_head.weight": (73448, 4096),
    }
    for i in range(32):
        sparse = i in (0, 9, 16, 17, 22, 29, 30, 31)
        mixer = {"q_proj": wide, "k_proj": kv if sparse else wide, "v_proj": kv if sparse else wide, "o_proj": wide}
        norms = {"q_norm": (128,), "k_norm": (128,), "o_norm": (4096,), "z_proj": wide}
        mixer |= {"o_gate": wide} if sparse else norms
        expected |= {f"model.layers.{i}.self_attn.{n}.weight": shape for n, shape in mixer.items()}
        rest = {"mlp.gate_proj": mlp, "mlp.up_proj": mlp, "mlp.down_proj": (4096, 16384)}
        rest |= {"input_layernorm": (4096,), "post_attention_layernorm": (4096,)}
        expected |= {f"model.layers.{i}.{n}.weight": shape for n, shape in rest.items()}
    assert shapes == expected
    assert sum(weight.numel() for weight in model.parameters()) == 9_477_203_968


@pytest.mark.parametrize("chunks", [[30], [20, 10, 1, 1, 7], [1] * 12, [45, 1, 6, 1], [35, 12, 1]])
def test_a_cache_changes_nothing(model: MiniCPMSALAForCausalLM, chunks: list[int]):
    """Catches a state or keys that are not carried on, positions that start anew, and, past dense_len, several tokens
    that read other blocks than one by one."""
    token_ids = ids(2, sum(chunks))
    cache, start = DynamicCache(config=model.config), 0
    for size in chunks:
        found = model(token_ids[:, start : start + size], use_cache=True, **{CACHE: cache}).logits
        start += size
        if start == chunks[0]:
            singles = copy.deepcopy(cache)
            torch.testing.assert_close(found, model(token_ids[:, :start], use_cache=False).logits)
            continue
        for at in range(start - size, start):
            alone = model(token_ids[:, at : at + 1], use_cache=True, **{CACHE: singles}).logits[:, 0]
            torch.testing.assert_close(found[:, at - start], alone, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == sum(chunks)


def test_sparse_layers_do_choose(model: MiniCPMSALAForCausalLM):
    """Catches a dense_len that is never reached: the end of a long context must read fewer keys than all."""
    whole = copy.deepcopy(model)
    whole.config.sparse_config = None
    for layer in whole.model.layers:
        layer.self_attn.sparse = None
    short, long = ids(1, DENSE_LENGTH - 1), ids(1, 3 * DENSE_LENGTH)
    assert torch.equal(whole(short).logits, model(short).logits)
    assert not torch.allclose(whole(long).logits[:, -1], model(long).logits[:, -1], atol=1e-3)


def test_dense_as_sparse(model: MiniCPMSALAForCausalLM):
    """Catches an option that changes nothing: short contexts choose blocks too."""
    forced = MiniCPMSALAForCausalLM(small(dense_as_sparse=True)).eval()
    forced.load_state_dict(model.state_dict())
    few, many = ids(1, 24), ids(1, DENSE_LENGTH - 1)
    torch.testing.assert_close(forced(few).logits, model(few).logits, rtol=1e-4, atol=1e-4)  # three blocks are all
    assert not torch.allclose(forced(many).logits[:, -1], model(many).logits[:, -1], atol=1e-3)


@pytest.mark.parametrize("length", [12, DENSE_LENGTH - 5, DENSE_LENGTH + 21])
def test_left_padding(model: MiniCPMSALAForCausalLM, length: int):
    """Catches padding that enters a state, shifts positions, or shifts the blocks of a sparse layer."""
    token_ids = ids(1, length)
    pads = torch.full((1, 17), 5)
    longer = ids(1, length + 17)
    batch = torch.cat([torch.cat([pads, token_ids], dim=1), longer])
    mask = torch.ones_like(batch)
    mask[0, :17] = 0
    alone = [model.generate(x, max_new_tokens=20, do_sample=False) for x in (token_ids, longer)]
    together = model.generate(batch, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=5)
    assert torch.equal(together[0, 17:], alone[0][0])
    assert torch.equal(together[1], alone[1][0])
    found = model(batch, attention_mask=mask).logits
    torch.testing.assert_close(found[0, 17:], model(token_ids).logits[0], rtol=1e-4, atol=1e-4)
    assert bool(found.isfinite().all())


def test_beams_reorder_states(model: MiniCPMSALAForCausalLM):
    """Catches a recurrent state that stays with its row when beam search moves the rest of the cache."""
    prompt = ids(1, 20)
    found = model.generate(prompt, max_new_tokens=6, num_beams=3, do_sample=False)
    assert found.shape == (1, 26)
    scores = model(found).logits.log_softmax(-1)[0, 19:-1].gather(-1, found[0, 20:, None]).sum()
    greedy = model.generate(prompt, max_new_tokens=6, do_sample=False)
    others = model(greedy).logits.log_softmax(-1)[0, 19:-1].gather(-1, greedy[0, 20:, None]).sum()
    assert scores >= others - 1e-4


def test_nothing_is_lost_through_the_meta_device(model: MiniCPMSALAForCausalLM, tmp_path: Path):
    """Catches the public remote code's trap: buffers that are zeros after loading, which silences lightning layers."""
    assert list(model.buffers()) == []
    model.save_pretrained(tmp_path)
    token_ids = ids(2, 50)
    expected = model(token_ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is MiniCPMSALAForCausalLM
    assert torch.equal(loaded(token_ids).logits, expected)
    streamed = StreamedModel(Checkpoint(tmp_path), Compute(device="cpu", dtype="float32"))
    hidden = streamed.embed(token_ids)
    for index in range(5):
        layer = streamed.load_layer(index)
        before, hidden = hidden, streamed.run_layer(index, layer, hidden)
        mixed = layer.self_attn(layer.input_layernorm(before), **streamed._arguments_for(token_ids.shape)[index])
        assert mixed.abs().mean() > 1e-4, f"layer {index} is silent"
    assert torch.equal(streamed.logits(token_ids, hidden), expected)


def test_missing_weights_are_noticed(model: MiniCPMSALAForCausalLM, tmp_path: Path):
    """Catches names that transformers does not ask for: a gate that is not in the file must be reported."""
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.z_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert list(found["missing_keys"]) == ["model.layers.1.self_attn.z_proj.weight"]


def test_training(model: MiniCPMSALAForCausalLM):
    """Catches a weight that gets no gradient, in the sparse path too, and checkpointing that changes one."""
    token_ids = ids(2, 64)
    gradients = []
    for checkpointing in (False, True):
        trained = copy.deepcopy(model).train().requires_grad_()
        if checkpointing:
            trained.gradient_checkpointing_enable()
        trained(token_ids, labels=token_ids).loss.backward()
        gradients.append({name: weight.grad for name, weight in trained.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient)


def test_bfloat16(model: MiniCPMSALAForCausalLM):
    """Catches a state kept in BF16 or a product of two dtypes; the state stays fp32."""
    half = copy.deepcopy(model).bfloat16()
    token_ids = ids(2, 60)
    output = half(token_ids, use_cache=True)
    assert output.logits.dtype == torch.bfloat16
    lightning = [i for i, mixer in enumerate(model.config.mixer_types) if mixer == LIGHTNING]
    assert {output[CACHE].layers[i].recurrent_states[0].dtype for i in lightning} == {torch.float32}
    difference = (output.logits.float() - model(token_ids).logits).abs().mean() / model(token_ids).logits.std()
    assert difference < 0.1


@pytest.mark.cuda
@NEEDS_GPU
def test_64k_tokens_through_a_whole_model():
    """Catches anything as large as tokens x tokens (4 GiB a head), and a cache that continues another text."""
    torch.manual_seed(5)
    config = MiniCPMSALAConfig(num_hidden_layers=4, vocab_size=1000, eos_token_id=None, sparse_config={})
    assert set(config.mixer_types) == {LIGHTNING, "minicpm4"}
    with torch.device("cuda"):
        model = MiniCPMSALAForCausalLM(config).bfloat16().eval().requires_grad_(False)
    text = torch.randint(1000, (1, 65536), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    held, began = torch.cuda.memory_allocated(), time.perf_counter()
    made = model.generate(
        text, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    torch.cuda.synchronize()
    seconds, memory = time.perf_counter() - began, (torch.cuda.max_memory_allocated() - held) / 2**30
    at_once = model(made.sequences[:, :-1], logits_to_keep=8).logits[0].double()
    difference = (torch.cat(made.logits).double() - at_once).norm() / at_once.norm()
    print(f"65,536 tokens and 8 more: {seconds:.1f} s, {memory:.1f} GiB; logits at once differ by {difference:.1e}")
    assert memory < 16
    assert difference < 0.1  # BF16, and a block chosen otherwise where two scores all but tie
