"""A causal LM run one decoder layer at a time, so that a model larger than the machine's memory can be prepared.

The model is built without weights; embeddings, last norm and head are loaded once, a decoder layer when it is asked
for. To learn what a model passes to its layers, its own forward runs with the layers passing their input through, so
nothing here knows how a model scales its embeddings, builds its masks or caps its logits.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.fouroversix.tensor import round_activations
from soar_prep.layouts import from_tensors
from soar_prep.sala import MiniCPMSALAConfig
from soar_prep.settings import Compute


class StreamedModel:
    """The decoder of a checkpoint, BF16 or NVFP4, layer by layer. Batches start at position 0 and attend causally."""

    def __init__(self, checkpoint: Checkpoint, compute: Compute, trust_remote_code: bool = False):
        self.checkpoint, self.trust_remote_code = checkpoint, trust_remote_code
        self.device = pick_device(compute)
        self.dtype = pick_dtype(compute, self.device)
        self.model = build_without_weights(checkpoint, trust_remote_code)
        self.layers_name, self.layers = find_decoder_layers(self.model)
        text_config = self.model.config.get_text_config()
        self.hidden_size: int = text_config.hidden_size
        self.context: int = text_config.max_position_embeddings
        self.vocab_size: int = text_config.vocab_size
        self._load_all_but_layers()
        self._arguments: dict[torch.Size, list[dict[str, Any]]] = {}
        self._layer_returns_tuple = False
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._ahead: dict[int, Future[dict[str, Tensor]]] = {}

    def _load_all_but_layers(self) -> None:
        names = [name for name in self.model.state_dict() if not name.startswith(self.layers_name + ".")]
        tied = self.tied_names()
        own = [name for name in names if name not in tied]
        self.model.load_state_dict(self._dense(own, "", self.checkpoint), strict=False, assign=True)
        self.model.tie_weights()
        for name, module in self.model.named_modules():
            if not name.startswith(self.layers_name + "."):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    tensor.data = tensor.data.to(self.device)

    def _dense(self, names: list[str], prefix: str, stored: Checkpoint | dict[str, Tensor]) -> dict[str, Tensor]:
        """Dense tensors under `prefix`; names are relative to it. UserError for one that is not stored."""
        tensors = {}
        for name in names:
            quantized = from_tensors((prefix + name).removesuffix(".weight"), stored)
            if quantized is not None:
                tensors[name] = quantized.weight.to(self.device).dequantize(self.dtype)
            elif prefix + name in stored:
                tensor = stored[prefix + name].to(self.device)
                tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            else:
                raise UserError(
                    f"{self.checkpoint.directory}: tensor {prefix + name} is missing, which "
                    f"{type(self.model).__name__} needs; is the download complete?"
                )
        return tensors

    def tied_names(self) -> set[str]:
        """Parameters that are another one under a second name, such as a head tied to the embeddings."""
        return set(self.model.all_tied_weights_keys)

    def layer_prefix(self, index: int) -> str:
        return f"{self.layers_name}.{index}."

    def load_layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, its weights on the device; drop it to free them. The next one is read meanwhile."""
        ahead = self._ahead.pop(index, None)
        stored = self._stored(index) if ahead is None else ahead.result()
        self._ahead.clear()
        if index + 1 < len(self.layers):
            self._ahead[index + 1] = self._reader.submit(self._stored, index + 1)
        layer = copy.deepcopy(self.layers[index])
        layer.load_state_dict(self._dense(list(layer.state_dict()), self.layer_prefix(index), stored), assign=True)
        return layer.to(self.device).eval().requires_grad_(False)

    def _stored(self, index: int) -> dict[str, Tensor]:
        """A layer's tensors as the checkpoint has them; for a GPU in memory that it copies from by itself."""
        stored = {name: self.checkpoint[name] for name in self.checkpoint.names(self.layer_prefix(index))}
        if self.device.type == "cuda":
            stored = {name: tensor.pin_memory() for name, tensor in stored.items()}
        return stored

    def load_all_layers(self) -> None:
        """Put every decoder layer in its place: `model` is then whole, an ordinary model of transformers."""
        for index in range(len(self.layers)):
            self.layers[index] = self.load_layer(index)

    def input_scales(self, index: int) -> dict[str, Tensor]:
        """Static activation scales of a quantized checkpoint's layer, by linear."""
        prefix = self.layer_prefix(index)
        scales = {}
        for name in linears_of(self.layers[index]):
            quantized = from_tensors(prefix + name, self.checkpoint)
            if quantized is not None and quantized.input_scale is not None:
                scales[name] = quantized.input_scale.to(self.device)
        return scales

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first decoder layer is given: token_ids int64 [B, T] -> hidden [B, T, D].

        UserError if the layers are given anything else that depends on the tokens: it could not be streamed.
        """
        calls = self._layer_calls(token_ids)
        for (_, given), assumed in zip(calls, self._arguments_for(token_ids.shape), strict=True):
            for name, value in given.items():
                if isinstance(value, Tensor) and not torch.equal(value, assumed[name]):
                    raise UserError(
                        f"{type(self.model).__name__}: its layers are given {name}, which depends on the token ids; "
                        "only models whose layers pass on nothing but hidden states are supported"
                    )
        return calls[0][0]

    @torch.no_grad()
    def run_layer(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """One decoder layer: hidden [B, T, D] in and out, on the device."""
        output = layer(hidden, **self._arguments_for(hidden.shape[:2])[index])
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def linear_inputs(self, index: int, layer: nn.Module, hidden: Tensor, names: list[str]) -> dict[str, Tensor]:
        """What the named linears of a decoder layer are given for hidden [B, T, D]: runs it as far as the last."""
        inputs: dict[str, Tensor] = {}

        def note(x: Tensor, name: str) -> None:
            inputs[name] = x
            if len(inputs) == len(names):
                raise _Enough

        with suppress(_Enough), watching_inputs(layer, {name: partial(note, name=name) for name in names}):
            self.run_layer(index, layer, hidden)
        return inputs

    def _arguments_for(self, shape: torch.Size) -> list[dict[str, Any]]:
        """What each layer is given besides hidden states, for token ids of this shape [B, T]."""
        if shape not in self._arguments:
            if len(self._arguments) == 16:  # masks may be large, and batches by length have hundreds of shapes
                del self._arguments[next(iter(self._arguments))]
            calls = self._layer_calls(torch.zeros(shape, dtype=torch.long))
            self._arguments[shape] = [arguments for _, arguments in calls]
        return self._arguments[shape]

    @torch.no_grad()
    def logits(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """fp32 logits [B, T, V] from the last layer's output hidden [B, T, D], by the model's own norm and head."""
        with self._passing_through([], answer=hidden.to(self.device, self.dtype)):
            return self.model(input_ids=token_ids.to(self.device), use_cache=False).logits.float()

    def _layer_calls(self, token_ids: Tensor) -> list[tuple[Tensor, dict[str, Any]]]:
        """(hidden, other arguments) with which the model calls each of its layers."""
        calls: list[tuple[Tensor, dict[str, Any]]] = []
        with self._passing_through(calls):
            output = self.model.base_model(input_ids=token_ids.to(self.device), use_cache=False)
        if output[0].ndim != 3 and not self._layer_returns_tuple:
            # The model indexed what its layer answered: it expects a tuple, and took the batch axis off a tensor.
            self._layer_returns_tuple = True
            return self._layer_calls(token_ids)
        return calls

    @contextmanager
    def _passing_through(
        self, calls: list[tuple[Tensor, dict[str, Any]]], answer: Tensor | None = None
    ) -> Iterator[None]:
        """While this lasts every decoder layer notes its call and returns its input, or `answer` if given."""

        def forward(parameters: list[str], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((hidden, dict(zip(parameters, args, strict=False)) | kwargs))
            output = hidden if answer is None else answer
            return (output,) if self._layer_returns_tuple else output

        try:
            for layer in self.layers:
                _, *parameters = inspect.signature(type(layer).forward).parameters
                layer.forward = partial(forward, parameters[1:])
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)


class _Enough(Exception):
    """Leaves a layer's forward pass from within."""


@contextmanager
def watching_inputs(layer: nn.Module, watchers: Mapping[str, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """While this lasts each named linear's input goes to its watcher, which may answer another tensor to use."""
    with ExitStack() as stack:
        for name, watch in watchers.items():
            hook = partial(_watch, watch)
            stack.callback(layer.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield


def _watch(watch: Callable[[Tensor], Tensor | None], _module: nn.Module, arguments: tuple[Tensor]) -> Tensor | None:
    return watch(arguments[0])


def quantized_inputs(layer: nn.Module, input_scales: dict[str, Tensor]) -> AbstractContextManager[None]:
    """While this lasts the named linears see their inputs rounded to NVFP4 (W4A4); scales fp32 []."""
    return watching_inputs(
        layer, {name: partial(round_activations, input_scale=scale) for name, scale in input_scales.items()}
    )


def build_without_weights(checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a directory's config.json: parameters on the meta device, computed buffers real.

    MiniCPM-SALA is always our own class, which needs no remote code: that of the published checkpoint does not load
    with transformers 5, and computes its buffers where they are lost.
    """
    trust_remote_code = trust_remote_code and checkpoint.config.get("model_type") != MiniCPMSALAConfig.model_type
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{checkpoint.directory}: not a causal LM that transformers can build: {reason}") from None
    return model.eval().requires_grad_(False)


def find_decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and modules of the decoder layers: the one ModuleList as long as config.num_hidden_layers."""
    count = model.config.get_text_config().num_hidden_layers
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise UserError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, found {names}; "
            "only decoders with a single stack of layers are supported"
        )
    return found[0]


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def pick_device(compute: Compute) -> torch.device:
    if compute.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(compute.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"compute.device={compute.device}: not usable here ({reason}); try compute.device=auto"
        ) from None
    return device


def pick_dtype(compute: Compute, device: torch.device) -> torch.dtype:
    if compute.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, compute.dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"compute.dtype={compute.dtype}: expected auto, float32, bfloat16 or float16")
    return dtype
