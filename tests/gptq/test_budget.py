from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.gptq.budget import GIB, Budget, plan_budget
from soar_prep.gptq.layers import plan_layer
from soar_prep.settings import Compute, Quantize
from soar_prep.streaming import StreamedModel
from soar_prep.text import Windows

ROOMY = Budget(
    activations=10 * GIB,
    layer=1 * GIB,
    hessians=2 * GIB,
    rest=3 * GIB,
    forward=4 * GIB,
    output=5 * GIB,
    device_free=50 * GIB,
    host_free=50 * GIB,
    disk_free=6 * GIB,
    on_gpu=True,
    is_low=False,
)


def plan(directory: Path, *keep: str, samples: int = 4, correction: float = 0.5) -> Budget:
    settings = Quantize(model=str(directory), output=str(directory / "out"), correction=correction)
    model = StreamedModel(Checkpoint(directory), Compute(device="cpu"))
    windows = Windows(torch.zeros(samples, 32, dtype=torch.long), torch.ones(samples, 32, dtype=torch.bool))
    layer = plan_layer(model, 0, model.load_layer(0), list(keep))
    return plan_budget(settings, model.checkpoint, model, layer, windows)


@pytest.mark.parametrize("name", ["llama", "qwen3", "odd_width"])
def test_disk_is_what_the_output_takes(
    name: str, model_directory: Callable[[str], Path], quantized: Callable[..., Path]
):
    """Catches an estimate that lets a run begin which cannot end, or refuses one that fits."""
    written = sum(path.stat().st_size for path in quantized(name).glob("*.safetensors"))
    headers = 20_000  # of the tiny files; nothing beside real tensors
    assert 0 < written - plan(model_directory(name)).output < headers


def test_activations_are_counted_exactly(model_directory: Callable[[str], Path]):
    """Catches a budget in the wrong dtype or for one batch only."""
    once = plan(model_directory("mistral"), samples=7, correction=0.0)
    assert once.activations == 7 * 32 * 64 * 4
    assert plan(model_directory("mistral"), samples=7).activations == 4 * once.activations


def test_first_layer_may_be_kept(model_directory: Callable[[str], Path]):
    """Catches a crash where the first layer has nothing to quantize."""
    assert plan(model_directory("mistral"), "*.layers.0.*").hessians == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_free": 9 * GIB}, r"GPU memory: 10\.00 GiB needed .* 9\.00 GiB free; lower compute\.batch_tokens or"),
        ({"device_free": 15 * GIB, "host_free": 9 * GIB}, r"main memory: 10\.00 GiB needed, 9\.00 GiB free; .*samples"),
        (
            {"on_gpu": False, "host_free": 19 * GIB},
            r"main memory: 20\.00 GiB needed, 19\.00 GiB free; activations take",
        ),
        ({"disk_free": 4 * GIB}, r"disk: 5\.00 GiB needed for the output, 4\.00 GiB free; free some"),
    ],
)
def test_what_does_not_fit_is_told_in_numbers(changes: dict, message: str):
    """Catches an out-of-memory kill after an hour, and a message without the option to turn."""
    ROOMY.check()
    with pytest.raises(UserError, match=message):
        replace(ROOMY, **changes).check()


@pytest.mark.parametrize(
    ("changes", "on_gpu"),
    [({}, True), ({"device_free": 15 * GIB}, False), ({"on_gpu": False}, False), ({"is_low": True}, False)],
)
def test_activations_stay_on_the_gpu_where_they_fit(changes: dict, on_gpu: bool):
    """Catches activations copied to and fro for nothing, or a GPU filled to the brim."""
    budget = replace(ROOMY, **changes)
    assert budget.keep_activations_on_gpu is on_gpu
    assert f"activations: 10.00 GiB in the {'GPU' if on_gpu else 'main memory'}" in budget.lines()[1]
