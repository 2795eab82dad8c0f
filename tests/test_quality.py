from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from soar_prep import quality as quality_module
from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import CheckFailed
from soar_prep.layouts import from_tensors
from soar_prep.quality import Quality, check_gate, compare, last_hidden, measure, quality_lines
from soar_prep.settings import Compute, Gate, Scheme
from soar_prep.streaming import StreamedModel
from soar_prep.text import Windows, pad

FP32 = Compute(device="cpu", dtype="float32")
Models = Callable[[str], Path]


def windows_of(*lengths: int) -> Windows:
    generator = torch.Generator().manual_seed(0)
    return pad([torch.randint(2, 300, (n,), generator=generator).tolist() for n in lengths])


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_figures_are_those_of_whole_models(
    name: str, chunk: int, model_directory: Models, quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Catches targets shifted by one, padding that is scored, a chunk lost at a border, KL the wrong way round.

    The reference is transformers, once with the written weights put in; in float64 from the logits on.
    """
    monkeypatch.setattr(quality_module, "LOGIT_TOKENS", chunk)
    windows = windows_of(24, 5, 2, 17)
    source, written = Checkpoint(model_directory(name)), Checkpoint(quantized(name))
    got = measure(StreamedModel(source, FP32), written, windows, FP32)["w4a16"]

    loaded = [AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32).eval() for _ in range(2)]
    for linear, module in loaded[1].named_modules():
        weight = from_tensors(linear, written)
        if weight is not None:
            module.weight.data = weight.weight.dequantize()
    figures: list[list[float]] = []
    for ids, mask in zip(windows.token_ids, windows.mask, strict=True):
        real = ids[mask][None]
        with torch.no_grad():  # compared per window: no padding at all
            p, q = (model(real, use_cache=False).logits[0, :-1].double().log_softmax(-1) for model in loaded)
        targets = real[0, 1:]
        kl = (p.exp() * (p - q)).sum(-1)
        nll = [cross_entropy(logits, targets, reduction="none") for logits in (p, q)]
        figures += torch.stack([*nll, kl, (p.argmax(-1) == q.argmax(-1)).double()], dim=1).tolist()
    nll_source, nll_quantized, kl_mean, top1 = torch.tensor(figures).mean(dim=0)
    assert got.tokens == len(figures) == 23 + 4 + 1 + 16
    # fp32 log-softmax against float64
    assert got.source_perplexity == pytest.approx(nll_source.exp().item(), rel=1e-5)
    assert got.perplexity == pytest.approx(nll_quantized.exp().item(), rel=1e-5)
    assert got.kl == pytest.approx(kl_mean.item(), rel=1e-4)
    assert got.top1 == pytest.approx(top1.item())
    assert got.kl > 0


def test_a_model_is_no_distance_from_itself(model_directory: Models):
    """Catches noise in the measure: KL must be zero and top-1 whole when both sides are the same states."""
    model = StreamedModel(Checkpoint(model_directory("mistral")), FP32)
    windows = windows_of(16, 9)
    hidden = last_hidden(model, windows, Scheme.w4a16, batch_tokens=8192)
    same = compare(windows, model, hidden, model, hidden)
    assert (same.kl, same.kl_error, same.top1) == (0, 0, 1)
    assert same.perplexity == same.source_perplexity > 1


def test_standard_error_is_over_windows(model_directory: Models):
    """Catches an error bar made of tokens, which depend on each other; one window has none."""
    model = StreamedModel(Checkpoint(model_directory("mistral")), FP32)
    windows = windows_of(16, 16, 16)
    hidden = last_hidden(model, windows, Scheme.w4a16, batch_tokens=8192)
    noisy = hidden + 0.1 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))

    def part(rows: slice) -> Quality:
        some = Windows(windows.token_ids[rows], windows.mask[rows])
        return compare(some, model, hidden[rows], model, noisy[rows])

    singles = torch.tensor([part(slice(i, i + 1)).kl for i in range(3)])
    assert part(slice(0, 1)).kl_error == 0
    assert part(slice(0, 3)).kl_error == pytest.approx((singles.std() / 3**0.5).item(), rel=1e-5)
    assert part(slice(0, 3)).kl == pytest.approx(singles.mean().item(), rel=1e-5)


def test_batches_do_not_change_the_figures(model_directory: Models):
    """Catches windows that end up in another's place when they are run apart."""
    model = StreamedModel(Checkpoint(model_directory("mistral")), FP32)
    windows = windows_of(16, 9, 12)
    together, apart = (last_hidden(model, windows, Scheme.w4a16, batch_tokens=n) for n in (8192, 1))
    torch.testing.assert_close(together, apart)


def test_quantized_activations_need_their_scales(quantized: Callable[..., Path]):
    """Catches a W4A4 figure that is the W4A16 one: with scales in the file the states must differ, without not."""
    windows = windows_of(16)
    for options, differs in (((), True), (("weight_only_config=true",), False)):
        model = StreamedModel(Checkpoint(quantized("mistral", *options)), FP32)
        w4a16, w4a4 = (last_hidden(model, windows, scheme, batch_tokens=8192) for scheme in Scheme)
        assert torch.equal(w4a16, w4a4) is not differs


def quality(kl: float) -> Quality:
    return Quality(source_perplexity=10, perplexity=11, kl=kl, kl_error=0.01, top1=0.9, tokens=100)


@pytest.mark.parametrize(
    ("kl", "max_kl", "passes"),
    [(0.1, None, True), (0.1, 0.1, True), (0.1, 0.09, False), (float("nan"), 100.0, False), (float("inf"), 1.0, False)],
)
def test_gate(kl: float, max_kl: float | None, passes: bool):
    """Catches a gate that a NaN passes, and one that fails at its very bound."""
    if passes:
        check_gate(quality(kl), Gate(max_kl=max_kl), Path("out"))
    else:
        with pytest.raises(
            CheckFailed, match=rf"gate\.max_kl={max_kl}: .* is {kl:.4f} nats a token; out is kept\. Cal"
        ):
            check_gate(quality(kl), Gate(max_kl=max_kl), Path("out"))


def test_table_for_the_terminal():
    """Catches columns that no longer stand under their headings."""
    assert quality_lines({"w4a16": quality(0.1234)}) == [
        "held-out text, 100 tokens   perplexity   KL to source      top-1",
        "  source                             10.000",
        "  w4a16                              11.000   0.1234 +- 0.0100   90.0%",
    ]
