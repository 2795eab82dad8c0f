"""SGLang's own EAGLE-3 draft on the CPU, outside a server: its loader, model, KV cache and attention, one request.

T tokens   H hidden size   V_draft draft vocabulary   V target vocabulary

What a server adds, batches and CUDA graphs, is not here. The attention is SGLang's torch_native backend: its fast ones
need a GPU. Everything SGLang would draw or leave empty is NaN before it loads, so that nothing can pass by luck.
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
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor, nn

SLOTS = 128  # tokens that the KV cache holds


def start(folder: Path) -> None:
    """What a server sets up once in each process: its options, and process groups, here of one process."""
    options = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
    publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(options)


@dataclass(frozen=True)
class Loaded:
    """model: after SGLang's loader. taken: for each tensor of the file, how many elements of the model it set.
    unset: the model's parameters that are NaN still, embed_tokens apart, which a server takes from the target."""

    model: LlamaForCausalLMEagle3
    taken: dict[str, int]
    unset: list[str]


def load(directory: Path, dtype: torch.dtype) -> Loaded:
    taken: dict[str, int] = {}
    original = LlamaForCausalLMEagle3.load_weights

    def one_by_one(model: LlamaForCausalLMEagle3, weights: Iterable[tuple[str, Tensor]]) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        for name, tensor in weights:
            before = count_nan(model)
            original(model, [(name, tensor)])
            taken[name] = before - count_nan(model)

    LlamaForCausalLMEagle3.load_weights = one_by_one
    try:
        config = ModelConfig(str(directory), dtype=str(dtype).removeprefix("torch."), is_draft_model=True)
        model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    finally:
        LlamaForCausalLMEagle3.load_weights = original
    unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    return Loaded(model, taken, [name for name in unset if name != "model.embed_tokens.weight"])


def count_nan(model: nn.Module) -> int:
    return sum(int(parameter.isnan().sum()) for parameter in model.parameters())


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
