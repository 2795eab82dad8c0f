from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.settings import Compute
from soar_prep.streaming import StreamedModel, pick_device, pick_dtype, quantized_inputs, watching_inputs

SUPPORTED = [
    *("llama", "qwen2", "qwen2_window", "qwen3", "mistral", "smollm3", "gemma2", "gemma3", "odd_width"),
    *("granite", "phi3", "cohere2", "lfm2", "opt", "remote_code"),
]
FP32 = Compute(device="cpu", dtype="float32")
Models = Callable[[str], Path]


def open_model(directory: Path) -> StreamedModel:
    return StreamedModel(Checkpoint(directory), FP32, trust_remote_code=True)


def streamed_logits(model: StreamedModel, token_ids: torch.Tensor) -> torch.Tensor:
    hidden = model.embed(token_ids)
    for index in range(len(model.layers)):
        hidden = model.run_layer(index, model.load_layer(index), hidden)
    return model.logits(token_ids, hidden)


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("name", SUPPORTED)
def test_streamed_logits_are_those_of_transformers(name: str, model_directory: Models):
    """Catches anything lost on the way: masks, windows, positions, scalings, softcaps, biases, tied heads. Bitwise."""
    directory = model_directory(name)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()
    model = open_model(directory)
    for rows, length in ((1, 1), (2, 24), (1, 24), (3, 17)):
        ids = some_ids(rows, length)
        with torch.no_grad():
            expected = whole(input_ids=ids, use_cache=False).logits
        assert expected.std() > 0.05
        assert torch.equal(streamed_logits(model, ids), expected)


def test_nothing_but_one_layer_is_in_memory(model_directory: Models):
    """Catches layers that stay loaded: the point of streaming is a model larger than the machine's memory."""
    model = open_model(model_directory("llama"))
    hidden = model.embed(some_ids(1, 8))
    for index in range(len(model.layers)):
        layer = model.load_layer(index)
        assert all(not p.is_meta for p in layer.parameters())
        model.run_layer(index, layer, hidden)
    assert all(p.is_meta for p in model.layers.parameters())


def test_whole_model_once_all_layers_are_loaded(model_directory: Models):
    """Catches layers that are loaded beside the model: it could not decode, or would hold the weights twice."""
    model = open_model(model_directory("llama"))
    ids = some_ids(2, 9)
    streamed = streamed_logits(model, ids)
    model.load_all_layers()
    assert model.model.device == model.device
    assert list(model.model.model.layers) == list(model.layers)
    with torch.no_grad():
        assert torch.equal(model.model(input_ids=ids, use_cache=False).logits, streamed)
    hidden = model.embed(ids)
    for index, layer in enumerate(model.layers):
        hidden = model.run_layer(index, layer, hidden)
    assert torch.equal(model.logits(ids, hidden), streamed)


def test_few_shapes_are_remembered(model_directory: Models):
    """Catches memory that grows with every new length of a batch, and arguments of a shape that was let go."""
    model = open_model(model_directory("mistral"))
    layer = model.load_layer(0)
    long = model.embed(some_ids(1, 40))
    before = model.run_layer(0, layer, long)
    for length in range(1, 36):
        model.run_layer(0, layer, long[:, :length])
    assert len(model._arguments) == 16
    assert torch.equal(model.run_layer(0, layer, long), before)


def test_hooks_are_gone_afterwards(model_directory: Models):
    """Catches a pass-through or a watcher that outlives its `with`, also after an error, and answers for a layer."""
    model = open_model(model_directory("llama"))
    layer = model.load_layer(0)
    hidden = model.embed(some_ids(1, 8))
    before = model.run_layer(0, layer, hidden)
    with quantized_inputs(layer, {"mlp.up_proj": torch.tensor(0.01)}):
        assert not torch.equal(model.run_layer(0, layer, hidden), before)

    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("watched")

    with pytest.raises(RuntimeError, match="watched"), watching_inputs(layer, {"mlp.up_proj": fail}):
        model.run_layer(0, layer, hidden)
    assert torch.equal(model.run_layer(0, layer, hidden), before)
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_arguments_made_from_tokens_are_refused(model_directory: Models):
    """Catches a model whose layers also see the token ids (per-layer embeddings): it would run on those of token 0."""
    model = open_model(model_directory("gemma4"))
    with pytest.raises(UserError, match="per_layer_input, which depends on the token ids"):
        model.embed(some_ids(1, 8))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(name: str, model_copy: Callable[..., Path]):
    """Catches a layer or norm left with random weights because the file lacks them."""
    directory = model_copy("mistral")
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=rf"tensor {name} is missing, which MistralForCausalLM needs; .*complete"):
        open_model(directory).load_layer(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_model"}, "not a causal LM that transformers can build: .*no_such_model"),
        ({"model_type": "vit"}, "not a causal LM that transformers can build: .*ViTConfig"),
        ({"num_hidden_layers": 5}, r"model\.layers\.2\.\S+ is missing, which MistralForCausalLM needs"),
    ],
)
def test_unfit_config_is_an_error(changes: dict[str, Any], message: str, model_copy: Callable[..., Path]):
    """Catches a traceback out of transformers for a model it does not know, and layers that no file holds."""
    with pytest.raises(UserError, match=message):
        open_model(model_copy("mistral", **changes)).load_layer(2)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (Compute(device="tpu9"), "compute.device=tpu9: not usable here .*try compute.device=auto"),
        (Compute(device="cuda:99"), "compute.device=cuda:99: not usable here"),
        (Compute(device="cpu", dtype="int8"), "compute.dtype=int8: expected auto, float32, bfloat16 or float16"),
        (Compute(device="cpu", dtype="nonsense"), "compute.dtype=nonsense: expected auto"),
    ],
)
def test_unusable_device_or_dtype_is_an_error(compute: Compute, message: str):
    """Catches a torch traceback in the middle of the run for a misspelt device."""
    with pytest.raises(UserError, match=message):
        pick_dtype(compute, pick_device(compute))


def test_automatic_dtype_of_a_cpu_is_fp32():
    """Catches bf16 arithmetic on a CPU, which is slow and less exact for nothing."""
    assert pick_dtype(Compute(), torch.device("cpu")) is torch.float32
    assert pick_dtype(Compute(dtype="bfloat16"), torch.device("cpu")) is torch.bfloat16


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 0, 1), (1, 1, 2, 0)], ids=str)
def test_layers_read_ahead_are_the_right_ones(order: tuple[int, ...], model_directory: Callable[[str], Path]):
    """Catches a layer that was read for another call: in any order each has the weights of the file."""
    checkpoint = Checkpoint(model_directory("llama"))
    model = StreamedModel(checkpoint, Compute(device="cpu", dtype="float32"))
    for index in order:
        for name, weight in model.load_layer(index).state_dict().items():
            assert torch.equal(weight, checkpoint[model.layer_prefix(index) + name].float())
