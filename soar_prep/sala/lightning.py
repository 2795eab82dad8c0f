"""Lightning attention: linear attention whose state decays at a fixed rate a head.

q, k, v [B, H, T, d]   S [B, H, d, d] state, rows by key, fp32   s_h slope of head h

    S_t = exp(-s_h) S_{t-1} + k_t^T v_t        o_t = (q_t / sqrt(d)) S_t

Three forms of one function: `by_recurrence` is the definition, `by_chunks` reads many tokens, `one_step` a single one.
Source: the published MiniCPM-SALA model and SGLang 0.5.21, which agree; Lightning Attention-2, arXiv 2401.04658.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 128  # tokens that meet each other in one matrix product


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """s_h = 2^(-8 (h + 1) / heads), fp32 [H]: 2^(-(h + 1) / 4) at 32 heads. The same in every layer.

    Raises ValueError unless `heads` is a power of two: for other numbers ALiBi's slopes, whose rule this is, differ.
    """
    if heads < 1 or heads & (heads - 1):
        raise ValueError(f"lightning_nh={heads}: expected a power of two")
    exponents = torch.arange(1, heads + 1, dtype=torch.float64) * (-8 / heads)
    return (2**exponents).float().to(device)


def new_state(k: Tensor, v: Tensor) -> Tensor:
    """Zeros, fp32 [B, H, d, d]."""
    return torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32, device=k.device)


def by_recurrence(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o in q's dtype [B, H, T, d], the state after the last token), token by token in the state's dtype."""
    state = new_state(k, v) if state is None else state
    decay = torch.exp(-slopes.to(state.dtype))[:, None, None]
    outputs = []
    for t in range(q.shape[2]):
        q_t, k_t, v_t = (x[:, :, t].to(state.dtype) for x in (q, k, v))
        state = decay * state + k_t[..., :, None] * v_t[..., None, :]
        outputs.append((q_t[..., None, :] @ state).squeeze(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=2).to(q.dtype), state


def by_chunks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`by_recurrence`, a chunk of tokens at a time, in fp32.

    In a chunk token i sees token j <= i under exp(-s (i - j)), and the state before it under exp(-s (i + 1)). No
    exponent is positive, so nothing can overflow at any slope.
    """
    state = new_state(k, v) if state is None else state
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        q_c, k_c, v_c = (x[:, :, start : start + CHUNK].float() for x in (q, k, v))
        size = q_c.shape[2]
        steps = torch.arange(size, device=q.device, dtype=torch.float32)
        distance = steps[:, None] - steps
        seen = torch.exp(-slopes[:, None, None] * distance.clamp(min=0)).tril()
        after = torch.exp(-slopes[:, None] * (steps + 1))[..., None]  # decay of the state before the chunk
        until = torch.exp(-slopes[:, None] * (size - 1 - steps))[..., None]  # decay of a token up to the chunk's end
        within = (q_c @ k_c.mT * seen) @ v_c
        outputs.append(((within + after * (q_c @ state)) * q.shape[-1] ** -0.5).to(q.dtype))
        state = torch.exp(-slopes * size)[:, None, None] * state + (k_c * until).mT @ v_c
    return torch.cat(outputs, dim=2), state


def one_step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`by_recurrence` of a single token."""
    return by_recurrence(q, k, v, slopes, state)


def chunks_for(q: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """`by_chunks`, or its Triton twin where that runs."""
    if q.device.type != "cuda":
        return by_chunks
    from soar_prep.sala import triton_lightning

    return triton_lightning.by_chunks if triton_lightning.serves(q) else by_chunks
