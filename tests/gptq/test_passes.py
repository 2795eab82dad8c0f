from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soar_prep.checkpoint import Checkpoint
from soar_prep.gptq.passes import LayerPasses
from soar_prep.settings import Compute
from soar_prep.streaming import StreamedModel, linears_of

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]


@pytest.fixture
def passes(model_directory: Callable[[str], Path]) -> LayerPasses:
    model = StreamedModel(Checkpoint(model_directory("llama")), Compute(device="cpu"))
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(2, 24, model.hidden_size, generator=generator) for _ in range(3)]
    return LayerPasses(model, 1, model.load_layer(1), hidden)


@contextmanager
def counting(module: nn.Module) -> Iterator[list[int]]:
    """How often a linear inside is really computed."""
    calls: list[int] = []
    linear = next(iter(linears_of(module).values()))
    hook = linear.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


def expected_inputs(passes: LayerPasses, batch: int, name: str) -> Tensor:
    inputs: list[Tensor] = []
    hook = passes.layer.get_submodule(name).register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    passes.model.run_layer(passes.index, passes.layer, passes.hidden[batch])
    hook.remove()
    return inputs[0]


def test_final_children_are_computed_once(passes: LayerPasses):
    """Catches an output that is never kept, kept for another batch, or kept while its weights still change."""
    with counting(passes.layer.self_attn) as calls:  # type: ignore[arg-type]
        for batch in range(3):
            passes.linear_inputs(batch, ["self_attn.o_proj"])
        assert len(calls) == 3
        passes.settle(ATTENTION[:3])
        for batch in range(3):
            passes.linear_inputs(batch, ["mlp.gate_proj"])
        assert len(calls) == 6  # o_proj may still change: nothing is kept
        for linear in linears_of(passes.layer.self_attn).values():  # type: ignore[arg-type]
            linear.weight.data *= 1.5
        passes.settle(ATTENTION)
        for batch in range(3):
            passes.linear_inputs(batch, ["mlp.gate_proj"])
        assert len(calls) == 9
        for batch in (2, 0, 1):
            found = passes.linear_inputs(batch, ["mlp.gate_proj", "mlp.down_proj"])
            assert len(calls) == 9
            for name, x in found.items():
                assert torch.equal(x, expected_inputs(passes, batch, name))
                calls.pop()
    assert "forward" not in passes.layer.self_attn.__dict__


def test_advance_runs_what_is_left_and_forgets(passes: LayerPasses):
    """Catches a stale output used for the next layer's call, and hidden states that stay."""
    passes.settle(linears_of(passes.layer))
    before = list(passes.hidden)
    expected = [passes.model.run_layer(1, passes.layer, h) for h in before]
    with counting(passes.layer.self_attn) as attention, counting(passes.layer.mlp) as mlp:  # type: ignore[arg-type]
        for batch in range(3):
            passes.linear_inputs(batch, ["mlp.down_proj"])
        hidden = passes.hidden
        passes.advance()
        assert (len(attention), len(mlp)) == (3, 6)
    assert hidden is passes.hidden
    assert all(torch.equal(got, want) for got, want in zip(hidden, expected, strict=True))
    second = [passes.model.run_layer(1, passes.layer, h) for h in hidden]
    passes.advance()
    assert all(torch.equal(got, want) for got, want in zip(hidden, second, strict=True))


class Twice(nn.Module):
    """A layer that calls one child on two inputs, and one whose answer has more to it."""

    def __init__(self, width: int):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(width, width))
        self.talkative = Talkative(width)
        self.last = nn.Linear(width, width)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        hidden = self.shared(self.shared(hidden)) + self.talkative(hidden)[0]
        return self.last(hidden)


class Talkative(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(hidden), torch.ones(1000)


def test_what_cannot_be_kept_is_computed_again(passes: LayerPasses):
    """Catches a child called twice that answers its second call with its first, and attention weights held for all."""
    passes.layer = Twice(passes.model.hidden_size).requires_grad_(False)
    passes.settle(["shared.0", "talkative.inner"])
    for _ in range(3):
        found = passes.linear_inputs(0, ["last"])["last"]
        assert torch.equal(found, expected_inputs(passes, 0, "last"))
    assert passes._kept == {"talkative": {}}
