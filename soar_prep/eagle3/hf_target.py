"""Models of transformers as the target of real speculative decoding."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soar_prep.eagle3.decode import Target, Verified, path_to
from soar_prep.errors import UserError
from soar_prep.streaming import find_decoder_layers


def decoding_target(model: PreTrainedModel, aux_layers: Sequence[int]) -> Target:
    """The model as a target, the fastest kind that is right for it."""
    return RerunTarget(model, aux_layers, exact=False)


class RerunTarget:
    """A `Target` of any causal LM of transformers, with attention or recurrent: all is read anew for every path.

    exact: a forward pass a node, each of the very shape that token-by-token decoding without a cache has, so equal to
    it to the bit, in BF16 too. Else one a leaf: fewer, but near-ties may fall otherwise.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int], exact: bool = True):
        layers = find_decoder_layers(model)[1]
        if max(aux_layers) >= len(layers):
            raise UserError(f"aux_layers={list(aux_layers)}: the target's layers are 0 to {len(layers) - 1}")
        self.model, self.exact = model, exact
        self.aux_layers = [layers[index] for index in aux_layers]
        self.context: list[int] = []
        self.tokens: list[int] = []

    def start(self, token_ids: Sequence[int]) -> Verified:
        self.context = list(token_ids)
        return self._read(self.context, 1)

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Verified:
        self.tokens = list(tokens)
        logits: dict[int, Tensor] = {}
        aux: dict[int, Tensor] = {}
        for node in range(len(tokens) - 1, -1, -1):  # a node's own pass comes last, and overwrites
            if self.exact or node not in parents:
                path = path_to(node, parents)
                read = self._read([*self.context, *(tokens[n] for n in path)], len(path))
                logits.update(zip(path, read.logits, strict=True))
                aux.update(zip(path, read.aux[-len(path) :], strict=True))
        order = range(len(tokens))
        return Verified(torch.stack([logits[n] for n in order]), torch.stack([aux[n] for n in order]))

    def accept(self, path: Sequence[int]) -> None:
        self.context += [self.tokens[node] for node in path]

    @torch.no_grad()
    def _read(self, token_ids: list[int], rows: int) -> Verified:
        """One sequence without a cache: logits of its last rows alone (all are gigabytes), aux of all."""
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            for layer in self.aux_layers:
                hook = layer.register_forward_hook(
                    lambda _module, _input, output: outputs.append(output[0] if isinstance(output, tuple) else output)
                )
                stack.callback(hook.remove)
            ids = torch.tensor([token_ids], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -rows:].to(torch.float32, copy=True)
        return Verified(logits, torch.cat(outputs, dim=-1)[0])
