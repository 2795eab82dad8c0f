"""One decoder layer over all calibration batches, several times, without computing twice what no longer changes.

Linears are solved in the order in which the layer calls them, each on what the rounded ones before it give, so a layer
is run once for each group of them. Once all linears of a child (the attention, say) have their final weights, its
output is kept for each batch and not computed again.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from soar_prep.streaming import StreamedModel, linears_of


class LayerPasses:
    """A decoder layer and what it is given, hidden [B, T, D] of each batch; `advance` makes it what it gives."""

    def __init__(self, model: StreamedModel, index: int, layer: nn.Module, hidden: list[Tensor]):
        self.model, self.index, self.layer, self.hidden = model, index, layer, hidden
        self._kept: dict[str, dict[int, Any]] = {}  # output by child and batch

    def settle(self, final: Collection[str]) -> None:
        """These linears, by their names in the layer, keep their weights from now on."""
        for name, child in self.layer.named_children():
            own = {f"{name}.{inner}" for inner in linears_of(child)}
            if own and own <= set(final):
                self._kept.setdefault(name, {})

    def linear_inputs(self, batch: int, names: list[str]) -> dict[str, Tensor]:
        """What the named linears are given: runs the layer as far as the last of them."""
        with self._recalling(batch, is_last=False):
            return self.model.linear_inputs(self.index, self.layer, self._input(batch), names)

    def advance(self) -> None:
        """Run the whole layer: `hidden`, the list itself, then holds what the next layer is given."""
        for batch, hidden in enumerate(self.hidden):
            with self._recalling(batch, is_last=True):
                output = self.model.run_layer(self.index, self.layer, self._input(batch))
            self.hidden[batch] = output.to(hidden.device)

    def _input(self, batch: int) -> Tensor:
        return self.hidden[batch].to(self.model.device)

    @contextmanager
    def _recalling(self, batch: int, is_last: bool) -> Iterator[None]:
        """For one pass final children answer what they have answered before; after the last that is forgotten."""
        children = {name: self.layer.get_submodule(name) for name in self._kept}
        called: set[str] = set()
        try:
            for name, child in children.items():
                child.forward = partial(self._answer, name, child.forward, batch, is_last, called)
            yield
        finally:
            for child in children.values():
                child.__dict__.pop("forward", None)
            if is_last:
                for outputs in self._kept.values():
                    outputs.pop(batch, None)

    def _answer(
        self,
        name: str,
        forward: Callable[..., Any],
        batch: int,
        is_last: bool,
        called: set[str],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        if name in called:  # twice in a pass, on two inputs: not to be kept
            self._kept.pop(name, None)
        called.add(name)
        outputs = self._kept.get(name)
        if outputs is not None and batch in outputs:
            return moved(outputs[batch], self.model.device)
        output = forward(*arguments, **options)
        if outputs is not None and not is_last and is_small(output):
            outputs[batch] = moved(output, self.hidden[batch].device)
        return output


def is_small(output: Any) -> bool:
    """A tensor, or a tuple of one: not attention weights as well, nor a cache."""
    return isinstance(output, Tensor) or (
        isinstance(output, tuple) and isinstance(output[0], Tensor) and all(x is None for x in output[1:])
    )


def moved(output: Any, device: torch.device) -> Any:
    return output.to(device) if isinstance(output, Tensor) else (output[0].to(device), *output[1:])
