"""SGLang's own EAGLE-3 draft on the CPU, outside a server: its loader, model, KV cache and attention, one request.

T tokens   H hidden size   V_draft draft vocabulary   V target vocabulary

What a server adds, batches and CUDA graphs, is not here. The attention is SGLang's torch_native backend: its fast ones
need a GPU; so do its NVFP4 kernels, for which stubs/contract_kernels.py stands in. Everything SGLang would draw or
leave empty is NaN before it loads, so that nothing can pass by luck.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

# Read while SGLang and transformers are imported.
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader import get_model
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor, nn

SLOTS = 128  # tokens that the KV cache holds
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The KV cache stays as it is under NVFP4 linears; our files have no scales for it, and SGLang then means 1.
OF_THE_CACHE = ("attn.k_scale", "attn.v_scale")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ContractBrokenError(Exception):
    pass


def expect(holds: bool, claim: str) -> None:
    if not holds:
        raise ContractBrokenError(claim)


def start(folder: Path) -> None:
    """What a server sets up once in each process: plugins, its options, and process groups, here of one process."""
    load_plugins()
    options = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
    publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(options)


@dataclass(frozen=True)
class Loaded:
    """model: after SGLang's loader. parameters: by name, as they were loaded, before a kernel wants them otherwise.
    taken: for each tensor of the file, how many elements of the model take their value from it. unset: the model's
    parameters that were not set in full, embed_tokens apart, which a server takes from the target."""

    model: LlamaForCausalLMEagle3
    parameters: dict[str, Tensor]
    taken: dict[str, int]
    unset: list[str]


def load(directory: Path, dtype: torch.dtype, quantization: str | None = None) -> Loaded:
    """quantization: that of --speculative-draft-model-quantization. ContractBrokenError if SGLang refuses the files."""
    parameters: dict[str, Tensor] = {}
    is_set: dict[str, Tensor] = {}
    taken: dict[str, int] = {}
    original = LlamaForCausalLMEagle3.load_weights

    def one_by_one(model: LlamaForCausalLMEagle3, weights: Iterable[tuple[str, Tensor]]) -> None:
        overwrite(model)
        is_set.update({name: torch.zeros_like(each, dtype=torch.bool) for name, each in copies(model).items()})
        for name, tensor in weights:
            before = copies(model)
            original(model, [(name, flipped(tensor))])  # whatever the tensor sets is then another value, codes too
            between = copies(model)
            original(model, [(name, tensor)])
            after = copies(model)
            taken[name] = sum(int(differs(after[each], between[each]).sum()) for each in after)
            for each in after:
                is_set[each] |= differs(after[each], between[each]) | differs(between[each], before[each])
        parameters.update(copies(model))

    LlamaForCausalLMEagle3.load_weights = one_by_one
    try:
        config = ModelConfig(
            str(directory), dtype=str(dtype).removeprefix("torch."), quantization=quantization, is_draft_model=True
        )
        model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    except (AssertionError, RuntimeError) as refusal:  # of a shape
        raise ContractBrokenError(f"SGLang does not load it: {refusal}") from refusal
    finally:
        LlamaForCausalLMEagle3.load_weights = original
    unset = [name for name, mask in is_set.items() if not mask.all() and not name.endswith(OF_THE_CACHE)]
    return Loaded(model, parameters, taken, [name for name in unset if name != "model.embed_tokens.weight"])


def overwrite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not name.endswith(OF_THE_CACHE):
            bits(parameter.data).fill_(-1)  # NaN, except as codes


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differs(a: Tensor, b: Tensor) -> Tensor:
    return bits(a) != bits(b)


def flipped(tensor: Tensor) -> Tensor:
    """Every bit is the other one."""
    return (~bits(tensor)).view(tensor.dtype)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN is equal to itself, -0 is not 0."""
    return tensor.view(INTEGERS[tensor.element_size()])


def place(tensors: dict[str, Tensor], name: str) -> tuple[str, slice]:
    """Where one of these tensors belongs in SGLang: the parameter, which may be fused, and its rows there."""
    module, _, kind = name.rpartition(".")
    parent, _, linear = module.rpartition(".")
    for whole, parts in FUSED.items():
        if linear in parts:
            members = [f"{parent}.{part}.{kind}" for part in parts]
            expect(all(member in tensors for member in members), f"of {members} the file lacks one")
            rows = [row_count(tensors[member]) for member in members]
            first = sum(rows[: parts.index(linear)])
            return f"{parent}.{whole}.{kind}", slice(first, first + rows[parts.index(linear)])
    return name, slice(0, row_count(tensors[name]))


def row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


@dataclass(frozen=True)
class Output:
    """hidden [T, H] feeds the next step; logits [V_draft] are of the last token; as a server's worker gets them."""

    hidden: Tensor
    logits: Tensor


class Request:
    """One request and its KV cache: `read` the prompt, then `guess`, as SGLang's draft worker does."""

    def __init__(self, model: LlamaForCausalLMEagle3, embedding: Tensor):
        """embedding [V, H]: the target's, in its dtype."""
        self.model = model
        model.set_embed(nn.Parameter(embedding.clone(), requires_grad=False))
        attention = model.model.layers[0].self_attn
        requests = ReqToTokenPool(1, SLOTS, "cpu", False)
        requests.req_to_token[1] = torch.arange(1, SLOTS + 1)  # row 0 and slot 0 are padding
        heads, dim = attention.num_kv_heads, attention.head_dim
        cache = MHATokenToKVPool(SLOTS, 1, embedding.dtype, heads, dim, 1, "cpu", False)
        for buffer in (cache.k_buffer[0], cache.v_buffer[0]):
            buffer.fill_(float("nan"))
        runner = SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=cache)
        self.backend = TorchNativeAttnBackend(runner)
        self.length = 0

    def read(self, aux: Tensor, following: Tensor, positions: Tensor) -> Output:
        """aux [T, 3H]: the target's states of the prompt; following int64 [T]: the token after each."""
        return self._forward(ForwardMode.EXTEND, aux, following, positions)

    def guess(self, hidden: Tensor, token: Tensor, position: Tensor) -> Output:
        """hidden [1, H] from the step before, token int64 [1] guessed there."""
        return self._forward(ForwardMode.DECODE, hidden, token, position)

    @torch.no_grad()
    def _forward(self, mode: ForwardMode, hidden: Tensor, tokens: Tensor, positions: Tensor) -> Output:
        count, before = len(tokens), self.length
        self.length += count
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=tokens,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([self.length]),
            out_cache_loc=torch.arange(before + 1, self.length + 1),
            seq_lens_sum=self.length,
            positions=positions,
            extend_num_tokens=count,
            extend_seq_lens=torch.tensor([count]),
            extend_prefix_lens=torch.tensor([before]),
            extend_start_loc=torch.tensor([0]),
            extend_seq_lens_cpu=[count],
            spec_info=EagleDraftInput(hidden_states=hidden),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        self.backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            output = self.model(tokens, positions, batch)
        return Output(output.hidden_states, output.next_token_logits[0])
