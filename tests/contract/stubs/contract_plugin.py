"""A plugin of SGLang: its plain-torch attention as an attention of speculative chains.

On a CPU without AMX, torch_native is SGLang's only attention, and it knows no speculative decoding: it has neither a
backend of several draft steps nor the lengths of a batch that verifies. Both are a matter of lengths, added here; the
attention itself stays SGLang's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, offer_torch_native, HookType.AROUND)
    extend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"
    HookRegistry.register(extend, extend_by_guesses, HookType.AROUND)


def offer_torch_native(
    original: Callable, factory: Any, name: str, backends: dict, error: str, stamps_children: bool = False
) -> Any:
    def create() -> tuple[str, Any]:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        runner = factory.draft_model_runner
        if stamps_children:  # asked for the backend of the draft's own steps
            return "torch_native", Steps(runner, factory.speculative_num_steps)
        return "torch_native", TorchNativeAttnBackend(runner)

    return original(factory, name, backends | {"torch_native": create}, error, stamps_children)


class Steps:
    """One backend a step: at step k the cache is k + 1 tokens longer than what was accepted."""

    def __init__(self, runner: Any, steps: int):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class Step(TorchNativeAttnBackend):
            grown = 0

            def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
                batch = dataclasses.replace(forward_batch, seq_lens=forward_batch.seq_lens + self.grown)
                return super().forward_decode(q, k, v, layer, batch, save_kv_cache)

        self.attn_backends = [Step(runner) for _ in range(steps - 1)]
        for number, backend in enumerate(self.attn_backends):
            backend.grown = number + 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def extend_by_guesses(
    original: Callable, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *more: Any, **options: Any
) -> Any:
    """A batch that verifies does not say by how much it extends: each request by its guesses and the pending token."""
    if forward_batch.forward_mode.is_target_verify():
        count = forward_batch.spec_info.draft_token_num
        forward_batch = dataclasses.replace(
            forward_batch,
            seq_lens=forward_batch.seq_lens + count,
            extend_prefix_lens=forward_batch.seq_lens,
            extend_seq_lens=torch.full_like(forward_batch.seq_lens, count),
        )
    return original(backend, q, k, v, layer, forward_batch, *more, **options)
