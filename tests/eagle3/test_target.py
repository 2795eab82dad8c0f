from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from soar_prep.checkpoint import Checkpoint
from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.target import Target, document_spans
from soar_prep.errors import UserError
from soar_prep.settings import Compute, Scheme
from soar_prep.streaming import StreamedModel

FP32 = Compute(device="cpu", dtype="float32")
AUX = (0, 1, 2)


def batch_of(*rows: list[tuple[int, int]], width: int = 20) -> Batch:
    """Rows of (document id, length), padded to `width`, random tokens."""
    documents = torch.full((len(rows), width), -1)
    for row, spans in enumerate(rows):
        start = 0
        for document, length in spans:
            documents[row, start : start + length] = document
            start += length
    token_ids = torch.randint(2, 300, documents.shape, generator=torch.Generator().manual_seed(5))
    token_ids[documents < 0] = 0
    return Batch(token_ids, documents >= 0, torch.zeros_like(documents), documents)


@pytest.fixture(scope="module")
def target(model_directory: Callable[[str], Path]) -> Target:
    return Target(StreamedModel(Checkpoint(model_directory("llama")), FP32), AUX)


def test_states_are_transformers_hidden_states(target: Target, model_directory: Callable[[str], Path]):
    """Catches an aux layer off by one, a last state after the norm, documents that see each other or the padding.

    The reference runs each document alone. fp32; batches of another shape sum in another order.
    """
    batch = batch_of([(3, 7), (1, 5), (2, 1)], [(0, 20)], [(4, 15)])
    states = target.states(batch)
    reference = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32).eval()
    outputs: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out if torch.is_tensor(out) else out[0]))
    for row, start, stop in document_spans(batch.document_ids):
        outputs.clear()
        with torch.no_grad():
            logits = reference(batch.token_ids[row : row + 1, start:stop], use_cache=False).logits[0]
        assert torch.allclose(states.aux[row, start:stop], torch.cat(outputs, dim=-1)[0], atol=1e-5)
        assert torch.allclose(states.last[row, start:stop], outputs[-1][0], atol=1e-5)
        assert torch.allclose(target.head(states.last[row, start:stop]), logits, atol=1e-4)
    assert not states.aux[batch.document_ids < 0].any()


def test_packed_and_padded_give_the_same(target: Target):
    """Catches states that depend on what else is in the row: packing would change what the draft learns."""
    packed = batch_of([(0, 9), (1, 11)])
    padded = batch_of([(0, 9)], [(1, 11)], width=11)
    padded.token_ids[0, :9], padded.token_ids[1] = packed.token_ids[0, :9], packed.token_ids[0, 9:]
    a, b = target.states(packed), target.states(padded)
    assert torch.allclose(a.aux[0, :9], b.aux[0, :9], atol=1e-6)
    assert torch.allclose(a.last[0, 9:], b.last[1], atol=1e-6)


def test_embeddings_are_the_stored_ones(model_directory: Callable[[str], Path]):
    """Catches a model's embedding multiplier in what the draft is given: SGLang hands the draft the raw table."""
    checkpoint = Checkpoint(model_directory("granite"))  # multiplies by 3
    target = Target(StreamedModel(checkpoint, FP32), (0, 1))
    token_ids = torch.tensor([[5, 7]])
    stored = checkpoint["model.embed_tokens.weight"].float()
    assert torch.equal(target.embed(token_ids), stored[token_ids])
    assert torch.allclose(target.model.embed(token_ids), 3 * stored[token_ids])


def test_quantized_target(quantized: Callable[..., Path], target: Target):
    """Catches a draft that is trained on BF16 states while NVFP4 ones will be served, weights and activations alike."""
    checkpoint = Checkpoint(quantized("llama"))
    batch = batch_of([(0, 16)])
    states = {s: Target(StreamedModel(checkpoint, FP32), AUX, s).states(batch).last for s in Scheme}
    source = target.states(batch).last
    distance = {s: ((x - source).norm() / source.norm()).item() for s, x in states.items()}
    assert 0.01 < distance[Scheme.w4a16] < distance[Scheme.w4a4] < 1


def test_decoder_is_the_serving_model(quantized: Callable[..., Path]):
    """Catches decoding without the rounding that `states` has, a rounding that stays, and weights held twice."""
    checkpoint, batch = Checkpoint(quantized("llama")), batch_of([(0, 16)])
    last: dict[Scheme, torch.Tensor] = {}
    for scheme in Scheme:
        target = Target(StreamedModel(checkpoint, FP32), AUX, scheme)
        states = target.states(batch)
        prompt = batch.token_ids[0, :16].tolist()
        for _ in range(2):
            with target.decoder() as decoder:
                read = decoder.start(prompt[:12])
                assert torch.allclose(read.aux, states.aux[0, :12], atol=1e-5)
                read = decoder.verify(prompt[12:], [-1, 0, 1, 2])
                assert torch.allclose(read.aux, states.aux[0, 12:16], atol=1e-5)
                assert torch.allclose(read.logits, target.head(states.last[0, 12:16]), atol=1e-4)
        last[scheme] = read.aux
        assert not any(module._forward_pre_hooks for module in target.model.model.modules())
        assert list(target.model.model.model.layers) == list(target.model.layers)
    assert not torch.allclose(last[Scheme.w4a16], last[Scheme.w4a4], atol=1e-2)


def test_aux_layers_must_exist(model_directory: Callable[[str], Path]):
    """Catches an index error deep inside the first batch."""
    with pytest.raises(UserError, match=r"aux_layers=\[0, 1, 3\]: the target's 3 layers are 0 to 2"):
        Target(StreamedModel(Checkpoint(model_directory("llama")), FP32), (0, 1, 3))


def test_document_spans():
    """Catches padding taken for a document, and a border missed between two documents or at a row's end."""
    ids = torch.tensor([[4, 4, 7, -1], [5, 5, 5, 5], [-1, -1, -1, -1]])
    assert document_spans(ids) == [(0, 0, 2), (0, 2, 3), (1, 0, 4)]
