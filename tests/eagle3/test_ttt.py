import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from soar_prep.eagle3 import ttt
from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.loss import LossKind
from soar_prep.eagle3.positions import PositionRule, draw_positions
from soar_prep.eagle3.ttt import ask_teacher, rows_of_step, supervised_rows, ttt_loss, unroll

CONFIG = DraftConfig(
    hidden_size=12,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    draft_vocab_size=15,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=2**19,
    aux_layers=(0, 1, 2),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    draft: Draft
    batch: Batch
    aux: Tensor
    last: Tensor
    embedding: Tensor
    head_weight: Tensor

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    def head(self, rows: Tensor) -> Tensor:
        return F.linear(rows / 16, self.head_weight)


def setting(tokens: int, rule: PositionRule = PositionRule.natural, dtype=torch.float64, **changes: bool) -> Setting:
    """Row 0 one document, row 1 two of them and padding; some tokens supervised."""
    torch.manual_seed(tokens)
    draft = Draft(dataclasses.replace(CONFIG, **changes))
    for p in draft.parameters():
        torch.nn.init.normal_(p, std=0.4)
    draft.set_vocabulary(torch.randperm(40)[:15].sort().values)
    documents = torch.full((2, tokens), 3)
    documents[1, : tokens // 2] = 5
    documents[1, tokens // 2 :] = 6
    documents[1, tokens - tokens // 5 :] = -1
    loss_mask = (torch.rand(2, tokens) < 0.6) & (documents >= 0)
    positions = draw_positions(documents, rule, 2**19, 7, gaps=2, seed=1)
    batch = Batch(torch.randint(40, (2, tokens)), loss_mask, positions, documents)
    aux, last = torch.randn(2, tokens, 36, dtype=dtype), torch.randn(2, tokens, 12, dtype=dtype) * 40
    embedding, head = torch.randn(40, 12, dtype=dtype), torch.randn(40, 12, dtype=dtype) * 0.5
    return Setting(draft.to(dtype), batch, aux, last, embedding, head)


Unroll = Callable[[Setting, Tensor, int], Iterator[Tensor]]


def ours(s: Setting, aux: Tensor, steps: int) -> Iterator[Tensor]:
    return unroll(s.draft, s.embed, aux, s.batch.token_ids, s.batch.positions, s.batch.document_ids, steps)


def token_ahead(s: Setting, row: int, index: int) -> int:
    """The token at an index; 0 beyond the row's end."""
    return int(s.batch.token_ids[row, index]) if index < s.batch.token_ids.shape[1] else 0


def explicit_mask(s: Setting, aux: Tensor, steps: int) -> Iterator[Tensor]:
    """All steps side by side in one long sequence, each step computed anew with all before it."""
    rows, tokens = s.batch.token_ids.shape
    documents = s.batch.document_ids
    hidden, embedded, positions = [s.draft.project(aux)], [], []
    for k in range(steps):
        ids = torch.tensor([[token_ahead(s, b, i + 1 + k) for i in range(tokens)] for b in range(rows)])
        embedded.append(s.embed(ids))
        positions.append(s.batch.positions + k)
        sees = torch.zeros(rows, 1, (k + 1) * tokens, (k + 1) * tokens, dtype=torch.bool)
        for step in range(k + 1):
            for i in range(tokens):
                for j in range(i + 1):
                    sees[:, 0, step * tokens + i, j] = documents[:, i] == documents[:, j]
                for earlier in range(1, step + 1):
                    sees[:, 0, step * tokens + i, earlier * tokens + i] = True

        def attend(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor = sees) -> Tensor:
            keys, values = keys[:, [0, 0, 1, 1]], values[:, [0, 0, 1, 1]]
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=sees)

        step = s.draft.step(torch.cat(hidden, 1), torch.cat(embedded, 1), torch.cat(positions, 1), attend)
        hidden.append(step.hidden[:, -tokens:])
        yield step.normed[:, -tokens:]


def decode(s: Setting, aux: Tensor, steps: int) -> Iterator[Tensor]:
    """Token by token with a KV cache, as in serving: the document up to i, then a chain of steps - 1 tokens."""
    rows, tokens = s.batch.token_ids.shape
    projected = s.draft.project(aux)
    chains = [[[] for _ in range(steps)] for _ in range(rows)]
    for b in range(rows):
        prefix: list[tuple[Tensor, Tensor]] = []
        for i in range(tokens):
            if i and s.batch.document_ids[b, i] != s.batch.document_ids[b, i - 1]:
                prefix = []
            hidden, cache = projected[b, i], prefix
            for k in range(steps):

                def attend(q: Tensor, key: Tensor, value: Tensor, cache: list = cache) -> Tensor:
                    cache.append((key, value))
                    keys, values = (torch.cat(x, dim=2)[:, [0, 0, 1, 1]] for x in zip(*cache, strict=True))
                    return F.scaled_dot_product_attention(q, keys, values)

                embedded = s.embed(torch.tensor([[token_ahead(s, b, i + 1 + k)]]))
                step = s.draft.step(hidden.view(1, 1, -1), embedded, s.batch.positions[b, i].view(1, 1) + k, attend)
                chains[b][k].append(step.normed[0, 0])
                hidden = step.hidden
                if k == 0:
                    cache = list(prefix)
    for k in range(steps):
        yield torch.stack([torch.stack(chains[b][k]) for b in range(rows)])


def values_and_gradients(s: Setting, way: Unroll, steps: int, step: int) -> list[Tensor]:
    """Step `step`'s hidden, normed, and what it sends back to each parameter and to aux."""
    aux = s.aux.clone().requires_grad_()
    s.draft.zero_grad()
    normed = list(way(s, aux, steps))[step]
    weights = torch.linspace(-1, 1, normed.numel(), dtype=normed.dtype).view_as(normed)
    (normed * weights).sum().backward()
    return [normed.detach(), aux.grad] + [p.grad for p in s.draft.parameters() if p.grad is not None]


@pytest.mark.parametrize("brute_force", [explicit_mask, decode])
@pytest.mark.parametrize("rule", list(PositionRule))
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_step_is_what_decoding_does(brute_force: Unroll, rule: PositionRule, changes: dict, tokens: int):
    """Catches a step that sees another's keys, ids or positions that do not move on, documents that touch, the wrong
    hidden handed on: what is trained would not be what is served."""
    s = setting(tokens, rule, **changes)
    for step in range(7) if tokens == 9 else (0, 6):
        got = values_and_gradients(s, ours, step + 1, step)
        expected = values_and_gradients(s, brute_force, step + 1, step)
        assert len(got) == len(expected)
        assert len(got) >= 2 + 12
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [15, 17])
def test_longer_rows_in_fp32(tokens: int):
    """Catches what only shows with longer documents, in the precision of training."""
    s = setting(tokens, PositionRule.aoi, torch.float32)
    for one, two in zip(ours(s, s.aux, 7), decode(s, s.aux, 7), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def formula(s: Setting, aux: Tensor, kind: LossKind, eta: float, steps: int) -> Tensor:
    """The total loss, written for autograd, one guess after the other."""
    ids, mask, documents = s.batch.token_ids, s.batch.loss_mask, s.batch.document_ids
    keep = s.draft.target_ids()
    total = torch.zeros((), dtype=aux.dtype)
    for k, normed in enumerate(decode(s, aux, steps)):
        rows, alphas = [], []
        for b in range(ids.shape[0]):
            for i in range(ids.shape[1] - 2 - k):
                guessed = i + 2 + k
                if not mask[b, guessed] or documents[b, i] != documents[b, guessed] or documents[b, i] < 0:
                    continue
                p = (s.last[b, guessed - 1] / 16 @ s.head_weight.T).softmax(-1)[keep]
                q = s.draft.logits(normed[b, i]).softmax(-1)
                alpha, p_tilde = torch.minimum(p, q).sum(), p / p.sum()
                rows.append(((p_tilde * (p_tilde / q).log()).sum(), alpha))
                alphas.append(alpha.detach())
        if rows:
            mixing = (
                torch.exp(-eta * torch.stack(alphas).mean()) if kind is LossKind.hybrid else float(kind is LossKind.kl)
            )
            losses = [mixing * kl + (1 - mixing) * (1 - alpha) for kl, alpha in rows]
            total = total + 0.8**k * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("kind", [LossKind.hybrid, LossKind.kl, LossKind.tv])
def test_total_loss(kind: LossKind):
    """Catches a teacher's row, id or mask that is one off, a prediction across documents, a step's wrong weight."""
    s = setting(11, PositionRule.aoi)
    assert int(s.batch.loss_mask.sum()) > 8
    results = []
    for total in ("ours", "formula"):
        aux = s.aux.clone().requires_grad_()
        s.draft.zero_grad()
        if total == "ours":
            taught = ask_teacher(s.last, s.head, s.draft.target_ids(), s.batch.loss_mask, s.batch.document_ids)
            loss = ttt_loss(s.draft, s.embed, aux, s.batch, taught, kind, eta=2.0).loss
        else:
            loss = formula(s, aux, kind, 2.0, 7)
        loss.backward()
        results.append([loss.detach(), aux.grad, *[p.grad for p in s.draft.parameters()]])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)
    assert float(results[0][0]) > 0.1


def test_the_first_useful_guess_is_trained():
    """Catches a loss mask that stays where it is while ids and teacher move: SpecForge#885."""
    tokens, prompt = 15, 6  # the target itself says token 6; the draft's first guess, at index 5, is token 7
    documents = torch.zeros(1, tokens, dtype=torch.long)
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, prompt:] = True
    number = torch.where(supervised_rows(mask, documents), torch.arange(tokens), -1)
    for k in range(7):
        place, rows = rows_of_step(number, documents, k)
        indices = place[0].nonzero()[:, 0].tolist()
        guessed = [i + 2 + k for i in indices]
        assert guessed == [t for t in range(prompt, tokens) if t - 2 - k >= 0]
        assert rows.tolist() == [i + 1 + k for i in indices]
        if k == 0:
            assert prompt - 1 in indices


def test_no_guess_across_documents():
    """Catches a document that learns to guess the next one's first tokens, and padding that is guessed."""
    documents = torch.tensor([[4, 4, 4, 4, 9, 9, 9, -1, -1]])
    mask = torch.ones_like(documents, dtype=torch.bool)
    supervised = supervised_rows(mask, documents)
    assert supervised.nonzero()[:, 1].tolist() == [0, 1, 2, 4, 5]
    number = torch.where(supervised, torch.arange(9), -1)
    found = [rows_of_step(number, documents, k)[0].nonzero()[:, 1].tolist() for k in range(4)]
    assert found == [[0, 1, 4], [0], [], []]


def test_teacher_is_asked_for_supervised_rows_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """Catches logits of all positions at once: at 4,096 tokens and a vocabulary of 73,448 they are a gigabyte a row."""
    monkeypatch.setattr(ttt, "CHUNK", 4)
    s = setting(17)
    asked: list[int] = []

    def head(rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return s.head(rows)

    documents, mask = s.batch.document_ids, s.batch.loss_mask
    taught = ask_teacher(s.last, head, s.draft.target_ids(), mask, documents)
    supervised = supervised_rows(mask, documents)
    assert max(asked) == 4
    assert sum(asked) == int(supervised.sum()) == int((taught.number >= 0).sum())
    every = (s.last / 16) @ s.head_weight.T
    probabilities = every.softmax(-1)[..., s.draft.target_ids()]
    for b, i in supervised.nonzero().tolist():
        row = int(taught.number[b, i])
        teacher = taught.teacher.rows(torch.tensor([row]))
        p = (teacher.logits - teacher.log_z[:, None]).exp()[0]
        torch.testing.assert_close(p, probabilities[b, i])
        torch.testing.assert_close(teacher.coverage()[0], probabilities[b, i].sum())
        best = int(every[b, i].argmax())
        known = s.draft.t2d[best]
        assert int(teacher.best) == (s.draft.target_ids().tolist().index(best) if known else -1)
    assert {int(b) < 0 for b in taught.teacher.best} == {True, False}


@pytest.mark.parametrize("tokens", [1, 2, 15])
def test_nothing_supervised(tokens: int):
    """Catches NaN, or a missing gradient, for a batch without a supervised token: other ranks wait for this one's."""
    s = setting(tokens)
    batch = dataclasses.replace(s.batch, loss_mask=torch.zeros_like(s.batch.loss_mask))
    taught = ask_teacher(s.last, s.head, s.draft.target_ids(), batch.loss_mask, batch.document_ids)
    result = ttt_loss(s.draft, s.embed, s.aux, batch, taught)
    result.loss.backward()
    assert result.loss.item() == 0
    for name, p in s.draft.named_parameters():
        assert p.grad is not None, name
        assert not bool(p.grad.any())


def test_figures_belong_to_their_places():
    """Catches figures in another order than place: accepted lengths are made from several steps' figures."""
    s = setting(17)
    taught = ask_teacher(s.last, s.head, s.draft.target_ids(), s.batch.loss_mask, s.batch.document_ids)
    result = ttt_loss(s.draft, s.embed, s.aux, s.batch, taught)
    assert len(result.steps) == 7
    for k, (step, normed) in enumerate(zip(result.steps, ours(s, s.aux, 7), strict=True)):
        places = step.place.nonzero().tolist()
        assert len(places) == len(step.figures.alpha) == len(step.coverage) == len(step.figures.correct)
        for n, (b, i) in enumerate(places):
            p = (s.last[b, i + 1 + k] / 16 @ s.head_weight.T).softmax(-1)
            q = s.draft.logits(normed[b, i]).softmax(-1)
            torch.testing.assert_close(step.figures.alpha[n], torch.minimum(p[s.draft.target_ids()], q).sum().detach())
            torch.testing.assert_close(step.coverage[n], p[s.draft.target_ids()].sum())
            guess = int(s.draft.to_target_ids(q.argmax()))
            assert bool(step.figures.correct[n]) == (guess == int(p.argmax()))


def test_bf16_trains():
    """Catches an operation that bf16 lacks on a CPU, a loss in bf16, and a gradient far from fp32's."""
    low, high = setting(17, dtype=torch.bfloat16), setting(17, dtype=torch.float32)
    high.draft.load_state_dict(low.draft.state_dict())
    high = dataclasses.replace(
        high,
        aux=low.aux.float(),
        last=low.last.float(),
        embedding=low.embedding.float(),
        head_weight=low.head_weight.float(),
    )
    gradients = []
    for s in (low, high):
        taught = ask_teacher(s.last, s.head, s.draft.target_ids(), s.batch.loss_mask, s.batch.document_ids)
        loss = ttt_loss(s.draft, s.embed, s.aux, s.batch, taught, LossKind.kl).loss
        assert loss.dtype == torch.float32
        loss.backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in s.draft.parameters()]))
    assert float(F.cosine_similarity(*gradients, dim=0)) > 0.99
