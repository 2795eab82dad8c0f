"""The frozen target of a draft: its states, its embeddings and its words, for whole batches of documents.

B rows   T tokens   H hidden size   aux [B, T, 3H]: outputs of three decoder layers side by side, low to high
last [B, T, H]: output of the last decoder layer, before the norm

Any checkpoint that `soar-prep quantize` reads or writes will do. Quantized ones are dequantized to exactly the weights
that serve, so that the draft learns the states that it will be given. All layers stay on the device.
The same weights decode: `with target.decoder() as decoder: decode(decoder, draft, target.embed, ...)`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soar_prep.eagle3 import decode
from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.hf_target import decoding_target
from soar_prep.errors import UserError
from soar_prep.settings import Scheme
from soar_prep.streaming import StreamedModel, quantized_inputs


@dataclass(frozen=True)
class States:
    """aux [B, T, 3H] and last [B, T, H] of a batch, zero on padding."""

    aux: Tensor
    last: Tensor


class Target:
    """No gradients. Under Scheme.w4a4 the linears' inputs are rounded as a server with FP4 units rounds them."""

    def __init__(self, model: StreamedModel, aux_layers: tuple[int, ...], scheme: Scheme = Scheme.w4a16):
        self.model, self.aux_layers = model, aux_layers
        if max(aux_layers) >= len(model.layers):
            raise UserError(
                f"aux_layers={list(aux_layers)}: the target's {len(model.layers)} layers are 0 to "
                f"{len(model.layers) - 1}"
            )
        self.embeddings: Tensor = model.model.get_input_embeddings().get_parameter("weight")
        model.load_all_layers()
        self.input_scales = [model.input_scales(i) if scheme is Scheme.w4a4 else {} for i in range(len(model.layers))]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings as stored [..., H], without a model's own multiplier: the draft shares the raw table."""
        return F.embedding(token_ids, self.embeddings)

    @torch.no_grad()
    def head(self, rows: Tensor) -> Tensor:
        """Rows of `last` [n, H] -> fp32 logits [n, V], with all that the model does on the way."""
        token_ids = torch.zeros(1, len(rows), dtype=torch.long)
        return self.model.logits(token_ids, rows[None])[0]

    @torch.no_grad()
    def states(self, batch: Batch) -> States:
        """States of a batch. Each document is run by itself, so packed ones never see one another."""
        spans = document_spans(batch.document_ids)
        longest = max(stop - start for _, start, stop in spans)
        token_ids = batch.token_ids.new_zeros(len(spans), longest)
        for i, (row, start, stop) in enumerate(spans):
            token_ids[i, : stop - start] = batch.token_ids[row, start:stop]
        hidden = self.model.embed(token_ids)
        kept = []
        with self._rounding():
            for index, layer in enumerate(self.model.layers):
                hidden = self.model.run_layer(index, layer, hidden)
                if index in self.aux_layers:
                    kept.append(hidden)
        states = torch.cat([*kept, hidden], dim=-1)
        result = states.new_zeros(*batch.token_ids.shape, states.shape[-1])
        for i, (row, start, stop) in enumerate(spans):
            result[row, start:stop] = states[i, : stop - start]
        return States(*result.split([states.shape[-1] - hidden.shape[-1], hidden.shape[-1]], dim=-1))

    @contextmanager
    def decoder(self) -> Iterator[decode.Target]:
        """The model as the target of `decode`, its inputs rounded as in `states`; for use inside the `with` alone."""
        chosen = decoding_target(self.model.model, self.aux_layers)  # rounding to FP4 would blur the comparison in it
        with self._rounding():
            yield chosen

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """While this lasts the linears' inputs are rounded as the scheme says."""
        with ExitStack() as stack:
            for layer, scales in zip(self.model.layers, self.input_scales, strict=True):
                stack.enter_context(quantized_inputs(layer, scales))
            yield


def document_spans(document_ids: Tensor) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each run of equal ids; padding, a negative id, is left out. int64 [B, T]."""
    spans = []
    for row, ids in enumerate(document_ids.cpu()):
        values, lengths = ids.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0)
        for value, start, stop in zip(values.tolist(), (stops - lengths).tolist(), stops.tolist(), strict=True):
            if value >= 0:
                spans.append((row, start, stop))
    return spans
