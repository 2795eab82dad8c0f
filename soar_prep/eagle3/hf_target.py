"""Models of transformers as targets of `decode`: one forward pass a tree where the model only attends.

n nodes   T tokens   C accepted tokens in the cache   H hidden size   V vocabulary

TreeTarget   attention only: a tree is read at once, each node under a mask that shows the context and its ancestors.
PathTarget   any cache, recurrent and convolution states too: each path from a copy of the accepted state.
RerunTarget  no cache: everything anew for every path. Slow, and the truth that the others are tested against.
`decoding_target` chooses: by what the model's cache holds, and by trying the choice against RerunTarget.
"""

import copy
import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from soar_prep.eagle3.decode import Target, Verified, path_to
from soar_prep.errors import UserError
from soar_prep.streaming import find_decoder_layers

ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)


def decoding_target(model: PreTrainedModel, aux_layers: Sequence[int]) -> Target:
    """The fastest kind that is right for the model. Reads a dozen tokens to find out."""
    read = Reader(model, aux_layers)
    truth = RerunTarget(model, aux_layers, exact=False)
    _, cache = read([0], 1, use_cache=True)
    kinds: list[TreeTarget | PathTarget] = []
    if cache is not None:
        windows = attention_windows(read, cache)
        kinds = [PathTarget(read)] if windows is None else [TreeTarget(read, windows), PathTarget(read)]
    return next((kind for kind in kinds if agree(kind, truth, model.config.get_text_config().vocab_size)), truth)


def attention_windows(read: "Reader", cache: Any) -> list[int | None] | None:
    """What each layer sees: the last so many tokens, or all (None). No list if a mask cannot say all that it sees."""
    model, config = read.model, read.model.config.get_text_config()
    takes_masks = model._supports_attention_backend and config._attn_implementation in ("sdpa", "eager")
    layers = getattr(cache, "layers", [])
    if not takes_masks or "position_ids" not in read.parameters or len(layers) != config.num_hidden_layers:
        return None
    if any(type(layer) not in ATTENTION for layer in layers):
        return None
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if not set(windows) <= {None, getattr(config, "sliding_window", None)}:
        return None  # chunks, not a window
    names = ["full_attention" if window is None else "sliding_attention" for window in windows]
    types = getattr(config, "layer_types", None)
    told = len(set(names)) == 1 if types is None else list(types) == names
    return windows if told else None


def agree(target: Target, truth: Target, vocabulary: int) -> bool:
    """Whether both read a branching tree alike, before and after one branch is accepted.

    Five per cent: wrong masks, positions or states are off by more, BF16 in another order of summation by less.
    """
    tokens = [(37 * n + 11) % vocabulary for n in range(9)]
    reads: list[list[Tensor]] = []
    for kind in (target, truth):
        verified = [kind.start(tokens[:4]), kind.verify(tokens[4:], [-1, 0, 0, 1, 2])]
        kind.accept([0, 2])
        verified.append(kind.verify(tokens[6:], [-1, 0, 0]))
        reads.append([x.float() for v in verified for x in (v.logits - v.logits.mean(-1, keepdim=True), v.aux)])
    return all(bool(((x - y).norm(dim=-1) <= 0.05 * y.norm(dim=-1)).all()) for x, y in zip(*reads, strict=True))


class Reader:
    """A model and the layers whose outputs are wanted."""

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int]):
        layers = find_decoder_layers(model)[1]
        if max(aux_layers) >= len(layers):
            raise UserError(f"aux_layers={list(aux_layers)}: the target's layers are 0 to {len(layers) - 1}")
        self.model = model
        self.aux_layers = [layers[index] for index in aux_layers]
        self.parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in self.parameters else "past_key_values"  # before transformers 5.22

    @torch.no_grad()
    def __call__(
        self, token_ids: Sequence[int], rows: int, cache: Any = None, use_cache: bool = True, **arguments: Any
    ) -> tuple[Verified, Any]:
        """One sequence: logits fp32 of its last rows, aux of all; and the cache that now holds it."""
        outputs: list[Tensor] = []
        if cache is not None:
            arguments[self.cache_name] = cache
        if use_cache and "logits_to_keep" in self.parameters:  # without a cache, the very shape of plain decoding
            arguments["logits_to_keep"] = rows
        with ExitStack() as stack:
            for layer in self.aux_layers:
                hook = layer.register_forward_hook(
                    lambda _module, _input, output: outputs.append(output[0] if isinstance(output, tuple) else output)
                )
                stack.callback(hook.remove)
            ids = torch.tensor([list(token_ids)], device=self.model.device)
            output = self.model(input_ids=ids, use_cache=use_cache, **arguments)
        logits = output.logits[0, -rows:].to(torch.float32, copy=True)  # all rows of a prompt would be gigabytes
        return Verified(logits, torch.cat(outputs, dim=-1)[0]), getattr(output, self.cache_name, None)


class TreeTarget:
    """A `Target` whose cache is keys and values alone: rows of rejected nodes are cut out of it."""

    def __init__(self, read: Reader, windows: Sequence[int | None]):
        self.read, self.windows = read, windows
        self.context = 0

    def start(self, token_ids: Sequence[int]) -> Verified:
        self.cache = DynamicCache()  # not the model's own, which drops what has left a window
        self.context = len(token_ids)
        return self.read(token_ids, 1, self.cache)[0]

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Verified:
        self._keep([])
        paths = [path_to(node, parents) for node in range(len(tokens))]
        sees = torch.zeros(len(tokens), self.context + len(tokens), dtype=torch.bool)
        sees[:, : self.context] = True
        for node, path in enumerate(paths):
            sees[node, [self.context + n for n in path]] = True
        positions = torch.tensor([self.context + len(path) - 1 for path in paths])
        masks = self._masks(sees, positions[:, None] - torch.cat([torch.arange(self.context), positions]))
        position_ids = positions[None].to(self.read.model.device)
        return self.read(tokens, len(tokens), self.cache, attention_mask=masks, position_ids=position_ids)[0]

    def _masks(self, sees: Tensor, distance: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive [1, 1, n, C + n], which sdpa and eager both take; by type of layer where there are two."""
        model = self.read.model
        lowest = torch.finfo(model.dtype).min
        masks = {}
        for window in set(self.windows):
            hidden = ~sees if window is None else ~(sees & (distance < window))
            mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill_(hidden, lowest)[None, None]
            masks["full_attention" if window is None else "sliding_attention"] = mask.to(model.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def accept(self, path: Sequence[int]) -> None:
        self._keep(path)
        self.context += len(path)

    def _keep(self, path: Sequence[int]) -> None:
        """Of the rows after the context, those of this path alone."""
        rows = [self.context + node for node in path]
        stop = self.context + len(rows)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states: Tensor = getattr(layer, name)
                if rows != list(range(self.context, stop)):
                    states[:, :, self.context : stop] = states[:, :, rows]
                setattr(layer, name, states[:, :, :stop])


class PathTarget:
    """A `Target` with any cache that the model makes: the accepted state is copied before a path is read from it."""

    def __init__(self, read: Reader):
        self.read = read
        self.tokens: list[int] = []
        self.read_path: list[int] = []

    def start(self, token_ids: Sequence[int]) -> Verified:
        verified, self.cache = self.read(token_ids, 1)
        return verified

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Verified:
        self.tokens = list(tokens)
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for leaf in set(range(len(tokens))) - set(parents):
            path = path_to(leaf, parents)
            read, cache = self.read([tokens[n] for n in path], len(path), fork(self.cache))
            rows.update(zip(path, zip(read.logits, read.aux, strict=True), strict=True))
            self.read_path, self.read_cache = path, cache
        return Verified(*(torch.stack(x) for x in zip(*(rows[n] for n in range(len(tokens))), strict=True)))

    def accept(self, path: Sequence[int]) -> None:
        if list(path) == self.read_path:
            self.cache = self.read_cache
        else:
            _, self.cache = self.read([self.tokens[n] for n in path], 1, self.cache)


def fork(cache: Any) -> Any:
    """A copy to read on from while the first stays as it is.

    Recurrent states change in place and are copied; keys and values grow into new tensors, so they are shared.
    """
    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    twin.layers = [(copy.copy if type(layer) in ATTENTION else copy.deepcopy)(layer) for layer in cache.layers]
    return twin


class RerunTarget:
    """A `Target` of any causal LM of transformers, with attention or recurrent: all is read anew for every path.

    exact: a forward pass a node, each of the very shape that token-by-token decoding without a cache has, so equal to
    it to the bit, in BF16 too. Else one a leaf: fewer, but near-ties may fall otherwise.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int], exact: bool = True):
        self.read, self.exact = Reader(model, aux_layers), exact
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

    def _read(self, token_ids: list[int], rows: int) -> Verified:
        return self.read(token_ids, rows, use_cache=False)[0]
