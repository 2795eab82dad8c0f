"""How far a quantized model is from its source, on held-out text, both streamed layer by layer.

perplexity  exp of the mean negative log-likelihood of the next token
kl          mean over tokens of KL(source || quantized), nats, whole vocabulary
top1        share of tokens whose most likely next token is the source's
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import CheckFailed
from soar_prep.layouts import is_weight_only
from soar_prep.settings import Compute, Gate, Scheme
from soar_prep.streaming import StreamedModel, quantized_inputs
from soar_prep.text import Windows

LOGIT_TOKENS = 512  # tokens whose [V] logits are held at once


@dataclass(frozen=True)
class Quality:
    """Figures of one model on `tokens` predicted tokens; kl_error is the standard error over windows, nats."""

    source_perplexity: float
    perplexity: float
    kl: float
    kl_error: float
    top1: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def last_hidden(model: StreamedModel, windows: Windows, scheme: Scheme, batch_tokens: int) -> Tensor:
    """Output of the last decoder layer [n, T, D] on the CPU; under w4a4 the linears' inputs are rounded to NVFP4."""
    batches = list(windows.batches(batch_tokens))
    hidden = [model.embed(windows.token_ids[batch]).cpu() for batch in batches]
    for index in range(len(model.layers)):
        layer = model.load_layer(index)
        rounding = quantized_inputs(layer, model.input_scales(index)) if scheme is Scheme.w4a4 else nullcontext()
        with rounding:
            hidden = [model.run_layer(index, layer, h.to(model.device)).cpu() for h in hidden]
    return torch.cat(hidden)


@torch.no_grad()
def compare(
    windows: Windows, source: StreamedModel, h_source: Tensor, quantized: StreamedModel, h_quantized: Tensor
) -> Quality:
    """Quality from the last hidden states [n, T, D] of both models, each through its own norm and head."""
    windows_figures = []
    for ids, mask, h_p, h_q in zip(windows.token_ids, windows.mask, h_source, h_quantized, strict=True):
        is_predicted = mask[1:].to(source.device)
        parts = []
        for start in range(0, len(ids) - 1, LOGIT_TOKENS):
            span = slice(start, min(start + LOGIT_TOKENS, len(ids) - 1))
            targets = ids[span.start + 1 : span.stop + 1].to(source.device)
            p = source.logits(ids[None, span], h_p[None, span])[0].log_softmax(dim=-1)
            q = quantized.logits(ids[None, span], h_q[None, span])[0].log_softmax(dim=-1)
            divergences = kl_div(q, p, log_target=True, reduction="none").sum(dim=-1)
            agrees = (p.argmax(-1) == q.argmax(-1)).float()
            nll_p, nll_q = (-x.gather(-1, targets[:, None])[:, 0] for x in (p, q))
            parts.append(torch.stack((nll_p, nll_q, divergences, agrees)))
        windows_figures.append(torch.cat(parts, dim=1)[:, is_predicted].double().cpu())
    kl_of_window = torch.stack([figures[2].mean() for figures in windows_figures])
    nll_source, nll, kl, top1 = torch.cat(windows_figures, dim=1).mean(dim=1)
    return Quality(
        source_perplexity=nll_source.exp().item(),
        perplexity=nll.exp().item(),
        kl=kl.item(),
        kl_error=(kl_of_window.std() / len(kl_of_window) ** 0.5).item() if len(kl_of_window) > 1 else 0.0,
        top1=top1.item(),
        tokens=sum(figures.shape[1] for figures in windows_figures),
    )


def measure(source: StreamedModel, quantized: Checkpoint, windows: Windows, settings: Compute) -> dict[str, Quality]:
    """Quality by scheme of a checkpoint read from disk: w4a16 always, w4a4 where activations may be quantized."""
    expected = last_hidden(source, windows, Scheme.w4a16, settings.batch_tokens)
    model = StreamedModel(quantized, settings, source.trust_remote_code)
    quality = {}
    for scheme in [Scheme.w4a16] if is_weight_only(quantized.config) else [Scheme.w4a16, Scheme.w4a4]:
        got = last_hidden(model, windows, scheme, settings.batch_tokens)
        quality[scheme.value] = compare(windows, source, expected, model, got)
    return quality


def quality_lines(quality: dict[str, Quality]) -> list[str]:
    """A table for the terminal: one line for the source, one a scheme."""
    first = next(iter(quality.values()))
    lines = [f"held-out text, {first.tokens} tokens   perplexity   KL to source      top-1"]
    lines.append(f"  {'source':24}{first.source_perplexity:17.3f}")
    for scheme, q in quality.items():
        lines.append(f"  {scheme:24}{q.perplexity:17.3f}   {q.kl:.4f} +- {q.kl_error:.4f}  {q.top1:6.1%}")
    return lines


def check_gate(quality: Quality, gate: Gate, directory: Path) -> None:
    """CheckFailed if the mean KL divergence exceeds gate.max_kl."""
    if gate.max_kl is not None and not quality.kl <= gate.max_kl:
        raise CheckFailed(
            f"gate.max_kl={gate.max_kl}: the mean KL divergence is {quality.kl:.4f} nats a token; {directory} is kept. "
            "Calibrate on more or fitting text, keep the worst linears unquantized, or raise the gate"
        )
