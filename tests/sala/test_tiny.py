"""The tiny MiniCPM-SALA of tests/sala/tiny: its weights were trained by benchmarks/small_sala.py, not drawn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from soar_prep.sala import MiniCPMSALAForCausalLM
from soar_prep.text import builtin_documents

TINY = Path(__file__).with_name("tiny")
UNIGRAM = 5.36  # nats a token on its held-out text, as training.json has it


@pytest.fixture(scope="module")
def model() -> MiniCPMSALAForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    """int64 [40, 256], text that was not trained on."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = "\n\n".join(document for document, _ in zip(builtin_documents(held_out=True), range(8), strict=False))
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, : 40 * 256].view(40, 256)


def loss_of(model: MiniCPMSALAForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")


def test_it_models_text(model: MiniCPMSALAForCausalLM, held_out: torch.Tensor):
    """Catches weights that do not fit the code: scalings, order of heads, decay and blocks were learned."""
    loss = loss_of(model, held_out)
    assert loss.mean() < UNIGRAM - 1.5
    late = held_out.shape[1] // 2  # from dense_len on queries choose what they read
    assert loss[:, late:].mean() < loss[:, :late].mean() + 0.1


def test_each_part_counts(model: MiniCPMSALAForCausalLM, held_out: torch.Tensor):
    """Catches a mixer that adds nothing: without any one of them, text is modeled clearly worse."""
    held_out = held_out[::10]
    whole = loss_of(model, held_out).mean()
    for layer in model.model.layers:
        hook = layer.self_attn.register_forward_hook(lambda _module, _input, output: torch.zeros_like(output))
        assert loss_of(model, held_out).mean() > whole + 0.02
        hook.remove()


def test_generation_goes_on_past_dense_len(model: MiniCPMSALAForCausalLM, held_out: torch.Tensor):
    """Catches a cache that is read otherwise than it was written where dense attention ends."""
    prompt = held_out[:1, :110]
    answer = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    for at in (111, 126, 127):  # a whole prompt as long as dense_len would choose blocks for all its queries
        logits = model(answer[:, :at], use_cache=False).logits[0, -1]
        assert logits.argmax() == answer[0, at]
    assert answer.shape[1] == 150
