import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from soar_prep.eagle3 import decode as decoding
from soar_prep.eagle3.decode import Choice, Guesser, Speculation, Target, Verified, decode, path_to, prune
from soar_prep.eagle3.draft import Draft, DraftConfig, Step
from soar_prep.eagle3.hf_target import RerunTarget, decoding_target
from soar_prep.eagle3.ttt import unroll
from soar_prep.errors import UserError

CHAIN = Speculation(depth=7, candidates=8, width=1)
D7 = Speculation(depth=7, candidates=15)
D5 = Speculation(depth=5, candidates=11)
WIDE = Speculation(depth=1, candidates=4, width=3)
SHAPES = [CHAIN, D7, D5, WIDE, Speculation(depth=1, candidates=2), Speculation(depth=3, candidates=100, width=50)]
WIDTH = 6  # hidden size of the recurrent target


class Recurrent:
    """A `Target` whose only memory is a matrix: S <- 0.9 S turn + write(token), read by the token itself."""

    def __init__(self, vocabulary: int, seed: int = 3, sharpness: float = 4.0):
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.embedding, self.head = weights(vocabulary, WIDTH), weights(vocabulary, WIDTH) * sharpness
        self.key, self.value, self.query = weights(vocabulary, 5), weights(vocabulary, 5), weights(vocabulary, 5)
        self.out, self.turn = weights(3 * WIDTH, 5), torch.linalg.qr(weights(5, 5)).Q
        self.state, self.nodes = torch.zeros(5, 5, dtype=torch.float64), [torch.zeros(0)]

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    def read(self, state: Tensor, token: int) -> tuple[Tensor, Tensor, Tensor]:
        """(new state, logits, aux)"""
        state = 0.9 * state @ self.turn + torch.outer(self.value[token], self.key[token])
        aux = torch.tanh(self.out @ (state @ self.query[token]) / 3)
        return state, self.head @ aux[:WIDTH], aux

    def start(self, token_ids: Sequence[int]) -> Verified:
        self.state, aux = torch.zeros(5, 5, dtype=torch.float64), []
        for token in token_ids:
            self.state, logits, states = self.read(self.state, token)
            aux.append(states)
        return Verified(logits[None], torch.stack(aux))

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Verified:
        self.nodes, rows = [], []
        for token, parent in zip(tokens, parents, strict=True):
            before = self.state if parent < 0 else self.nodes[parent]
            state, *row = self.read(before, token)
            self.nodes.append(state)
            rows.append(row)
        return Verified(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))

    def accept(self, path: Sequence[int]) -> None:
        self.state = self.nodes[path[-1]]


def make_draft(vocabulary: int, hidden: int, target_ids: Sequence[int], kind: type[Draft] = Draft) -> Draft:
    torch.manual_seed(1)
    config = DraftConfig(
        hidden_size=hidden,
        intermediate_size=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=vocabulary,
        draft_vocab_size=len(target_ids),
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        aux_layers=(0, 1, 2),
    )
    draft = kind(config).double()
    for p in draft.parameters():
        torch.nn.init.normal_(p, std=0.4)
    draft.set_vocabulary(torch.tensor(target_ids))
    return draft


class Told(Draft):
    """A stand-in that is told the whole text, and guesses it by position alone."""

    text: Sequence[int] = ()

    def step(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend) -> Step:
        step = super().step(hidden, embeddings, positions, attend)
        step.normed[..., 0] = positions.to(step.normed)  # index i guesses token i + 2
        return step

    def logits(self, normed: Tensor) -> Tensor:
        logits = torch.zeros(*normed.shape[:-1], len(self.d2t), dtype=normed.dtype)
        known = self.target_ids().tolist()
        for row, i in enumerate(normed[:, 0].round().long().tolist()):
            if i + 2 < len(self.text) and self.text[i + 2] in known:
                logits[row, known.index(self.text[i + 2])] = 50.0
        return logits


def told(target_ids: Sequence[int], text: Sequence[int]) -> Draft:
    draft = make_draft(13, WIDTH, target_ids, Told)
    assert isinstance(draft, Told)
    draft.text = text
    return draft


class Broken(Draft):
    def logits(self, normed: Tensor) -> Tensor:
        return super().logits(normed) * torch.nan


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Token by token, each after reading everything from the start."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(target.start(text).logits[-1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def llama(model_directory: Callable[[str], Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32).eval()


@pytest.mark.parametrize("how", SHAPES, ids=str)
@pytest.mark.parametrize("prompt", [[4], [3, 0, 11, 7, 5]], ids=len)
def test_greedy_is_the_recurrent_targets_own(how: Speculation, prompt: list[int]):
    """Catches a state that keeps rejected tokens or loses accepted ones, and siblings that see each other."""
    target = Recurrent(13)
    expected = greedy(target, prompt, 40)
    assert len(set(expected)) > 3
    partly_wrong = [*prompt, *(token if n * n % 11 < 9 else (token + 1) % 13 for n, token in enumerate(expected))]
    for draft in (make_draft(13, WIDTH, [0, 2, 3, 4, 6, 7, 9, 11]), told(range(13), partly_wrong)):
        done = decode(target, draft, target.embed, prompt, how, 40)
        assert done.tokens == expected
        assert done.rounds == len(done.accepted)
        assert done.accepted_length == pytest.approx(sum(done.accepted) / done.rounds)
        assert 1 + sum(done.accepted[:-1]) < 40 <= 1 + sum(done.accepted)
        assert set(done.accepted) <= set(range(1, how.depth + 2))
        assert done.uniform_guesses == 0
    if how.candidates < 100:  # so many hold every path that errs once
        assert max(done.accepted) > min(done.accepted)


@pytest.mark.parametrize("how", [CHAIN, D7, D5], ids=str)
@pytest.mark.parametrize("prompt", [[4], [3, 0, 250, 7, 5, 99]], ids=len)
def test_greedy_is_the_language_models_own(how: Speculation, prompt: list[int], llama: PreTrainedModel):
    """Catches a path read with the wrong prefix; every way of reading."""
    target = RerunTarget(llama, (0, 1, 2))
    expected = greedy(target, prompt, 14)
    draft = make_draft(300, 64, sorted({*expected[::2], *range(0, 300, 7)}))
    embed = llama.get_input_embeddings()
    assert decode(target, draft, embed, prompt, how, 14).tokens == expected
    for other in (RerunTarget(llama, (0, 1, 2), exact=False), decoding_target(llama, (0, 1, 2))):
        assert decode(other, draft, embed, prompt, how, 14).tokens == expected


@pytest.mark.parametrize("how", [CHAIN, D7, D5, WIDE], ids=str)
@pytest.mark.parametrize("offset", [False, True])
def test_a_perfect_draft_is_always_accepted(how: Speculation, offset: bool):
    """Catches a guess that is one index off, d2t left out (offset), a bonus not counted, a round cut too short."""
    target, prompt = Recurrent(13), [3, 1, 7]
    text = prompt + greedy(target, prompt, 60)
    known = sorted({*text[4:], 12})
    draft = told(known if offset else range(13), text)
    assert bool(draft.d2t.any()) is offset
    done = decode(target, draft, target.embed, prompt, how, 41)
    assert done.tokens == text[3:44]
    assert set(done.accepted) == {how.depth + 1}


@pytest.mark.parametrize("how", [CHAIN, D7], ids=str)
def test_a_draft_that_misses(how: Speculation):
    """Catches guesses that are believed: NaN, or tokens that the target never says; one token a round is left."""
    target, prompt = Recurrent(13), [3, 1]
    expected = greedy(target, prompt, 20)
    never = sorted(set(range(13)) - set(expected))
    assert never
    done = decode(target, make_draft(13, WIDTH, never), target.embed, prompt, how, 20)
    assert done.tokens == expected
    assert done.accepted == [1] * 19
    broken = decode(target, make_draft(13, WIDTH, range(13), Broken), target.embed, prompt, how, 20)
    assert broken.tokens == expected
    assert broken.uniform_guesses > 0


@pytest.mark.parametrize("how", [CHAIN, D7, WIDE], ids=str)
def test_ends(how: Speculation):
    """Catches tokens after the end token or beyond max_tokens, and accepted lengths that count what comes after;
    a division by no rounds."""
    target, prompt = Recurrent(13), [3, 1, 7]
    text = prompt + greedy(target, prompt, 30)
    draft = told(range(13), text)
    first = {token: text[3:].index(token) for token in text[3:]}
    for end, place in first.items():
        done = decode(target, draft, target.embed, prompt, how, 30, [end])
        assert done.tokens == text[3 : 4 + place]
        assert 1 + sum(done.accepted) == len(done.tokens)
    for most in range(1, 11):
        done = decode(target, draft, target.embed, prompt, how, most)
        assert done.tokens == text[3 : 3 + most]
        assert done.rounds == -(-(most - 1) // (how.depth + 1))
        assert math.isnan(done.accepted_length) is (most == 1)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("how", [CHAIN, D7, Speculation(depth=4, candidates=40, width=3)], ids=str)
def test_guesses_are_those_that_are_trained(how: Speculation, changes: dict):
    """Catches a hidden, embedding, position or key other than training's, and a cache that keeps an old tree."""
    target = Recurrent(13)
    base = make_draft(13, WIDTH, [0, 2, 3, 4, 6, 7, 9, 11])
    draft = Draft(dataclasses.replace(base.config, **changes)).double()
    draft.load_state_dict(base.state_dict(), strict=False)
    text = [3, 1, 7, 12, 5, 0, 2, 2, 9]
    aux = target.start(text).aux
    guesser, generator = Guesser(draft, target.embed), torch.Generator()
    known = draft.target_ids().tolist()
    for start, stop in ((0, 1), (1, 5), (5, 8)):
        with torch.no_grad():
            guesser.read(aux[start:stop], text[start + 1 : stop + 1])
            tree = guesser.grow(text[stop], how, generator)
        assert len(tree.tokens) <= how.candidates
        for node in range(1, len(tree.tokens)):
            path = [tree.tokens[n] for n in path_to(node, tree.parents)]
            ids = torch.tensor([text[:stop] + path])
            states = F.pad(aux[:stop], (0, 0, 0, len(path)))[None]
            steps = unroll(draft, target.embed, states, ids, torch.arange(ids.shape[1])[None], ids * 0, len(path) - 1)
            score = 0.0
            for k, normed in enumerate(steps):
                log_q = draft.logits(normed[0, stop - 1]).log_softmax(-1)
                score += log_q[known.index(path[k + 1])].item()
            assert tree.scores[node] == pytest.approx(score, abs=1e-9)


def test_the_tree_holds_the_best():
    """Catches a tree that keeps the first nodes instead of the likeliest, or a child without its parent.

    With 3 tokens and width 3 nothing is left out of a level of depth 2, so the best of all paths are known."""
    target, draft = Recurrent(13), make_draft(13, WIDTH, [2, 5, 9])
    guesser, generator = Guesser(draft, target.embed), torch.Generator()
    with torch.no_grad():
        guesser.read(target.start([4, 6]).aux, [6, 8])
        whole = guesser.grow(8, Speculation(depth=2, candidates=100, width=3), generator)
        tree = guesser.grow(8, Speculation(depth=2, candidates=6, width=3), generator)
    assert len(whole.tokens) == 1 + 3 + 9
    paths = sorted(whole.scores, reverse=True)
    assert sorted(tree.scores, reverse=True) == pytest.approx(paths[:6])
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)


def test_the_best_nodes_are_expanded():
    """Catches a level that grows from the first nodes instead of the likeliest."""
    target, draft = Recurrent(13), make_draft(13, WIDTH, range(13))
    guesser, several = Guesser(draft, target.embed), 0
    with torch.no_grad():
        for last in range(13):
            guesser.read(target.start([last]).aux, [6])
            tree = guesser.grow(6, Speculation(depth=3, candidates=100, width=2), torch.Generator())
            level = [node for node in range(len(tree.tokens)) if len(path_to(node, tree.parents)) == 3]
            best = sorted(level, key=lambda node: -tree.scores[node])[:2]
            assert set(best) == set(tree.parents) & set(level)
            several += len({tree.parents[node] for node in best}) == 2
    assert several


def test_the_draft_reads_the_accepted_states(monkeypatch: pytest.MonkeyPatch):
    """Catches states of rejected nodes, or of others than the tokens read: silent, for only acceptance suffers."""
    target, given = Recurrent(13), []
    read = Guesser.read

    def spy(self: Guesser, aux: Tensor, following: Sequence[int]) -> None:
        given.append((aux, list(following)))
        read(self, aux, following)

    monkeypatch.setattr(Guesser, "read", spy)
    done = decode(target, make_draft(13, WIDTH, range(13)), target.embed, [3, 1, 7], D7, 30)
    assert max(done.accepted[:-1]) > 1
    following = [token for _, tokens in given for token in tokens]
    text = [3, *following]
    assert text[3:] == done.tokens[: len(text) - 3]
    torch.testing.assert_close(torch.cat([aux for aux, _ in given]), target.start(text[:-1]).aux)


def test_the_draft_draws_at_the_temperature():
    """Catches a draft that is hotter or colder than its target: still exact, but less is accepted."""
    target, draft = Recurrent(13), make_draft(13, WIDTH, range(13))
    qs = []
    for temperature in (1.0, 2.0):
        guesser = Guesser(draft, target.embed)
        how = Speculation(depth=1, candidates=2, width=1, choice=Choice.rejection, temperature=temperature)
        with torch.no_grad():
            guesser.read(target.start([4]).aux, [6])
            qs.append(guesser.grow(6, how, torch.Generator()).q[0])
    torch.testing.assert_close(qs[1], qs[0].sqrt() / qs[0].sqrt().sum())


def test_prune_keeps_parents_where_scores_tie():
    """Catches an orphan: a certain child scores exactly as its parent does."""
    tree = prune(decoding.Tree([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0.0, -1.0, -0.5, -1.0, -0.5]), 3)
    assert (tree.tokens, tree.parents) == ([9, 2, 4], [-1, 0, 1])


def distance(how: Speculation, draft: Draft, seeds: int) -> tuple[float, float]:
    """(chi-square, its degrees of freedom) of tokens 2 and 3 of the output, jointly with the first, over all seeds."""
    size, prompt = 4, [1, 3]
    target = Recurrent(size, sharpness=0.4)
    expected = torch.zeros(size, size, size, dtype=torch.float64)
    for a in range(size):
        for b in range(size):
            ps = [target.start(text).logits[-1] / how.temperature for text in (prompt, [*prompt, a], [*prompt, a, b])]
            first, second, third = (p.softmax(-1) for p in ps)
            expected[a, b] = first[a] * second[b] * third
    counts = torch.zeros_like(expected)
    for seed in range(seeds):
        counts[tuple(decode(target, draft, target.embed, prompt, how, 3, seed=seed).tokens)] += 1
    expected = expected * seeds
    rare = expected < 5  # too few for the chi-square: together one cell
    cells = (
        torch.cat([expected[~rare], expected[rare].sum()[None]]),
        torch.cat([counts[~rare], counts[rare].sum()[None]]),
    )
    return float(((cells[1] - cells[0]).square() / cells[0].clamp(min=1e-9)).sum()), len(cells[0]) - 1


SAMPLED = {
    "rejection": Speculation(depth=2, candidates=3, width=1, choice=Choice.rejection, temperature=1.3),
    "draw_chain": Speculation(depth=2, candidates=3, width=1, choice=Choice.draw, temperature=0.7),
    "draw_tree": Speculation(depth=2, candidates=6, width=2, choice=Choice.draw),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_has_the_targets_distribution(name: str):
    """Catches a rejected guess that is drawn again from p, temperatures that differ, a biased tree.

    Chi-square over the joint distribution of three tokens; five standard deviations above its mean; seeds are fixed."""
    found, freedom = distance(SAMPLED[name], make_draft(4, WIDTH, [0, 1, 3]), 800)
    assert freedom > 20
    assert found < freedom + 5 * (2 * freedom) ** 0.5


def test_wrong_sampling_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Catches a statistical test that would pass anything: here the token after a rejection is drawn from p itself."""
    monkeypatch.setattr(decoding, "residual", lambda p, q: p)
    found, freedom = distance(SAMPLED["rejection"], make_draft(4, WIDTH, [0, 1, 3]), 800)
    assert found > freedom + 10 * (2 * freedom) ** 0.5


def test_rejection_accepts_as_often_as_alpha_says():
    """Catches guesses that are judged by another distribution than they were drawn from: alpha = sum min(p, q)."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.4, 0.3, 0.3, 0.0]).double()
    generator, accepted, counts = torch.Generator().manual_seed(2), 0, torch.zeros(4)
    how = Speculation(depth=1, candidates=2, width=1, choice=Choice.rejection)
    for _ in range(4000):
        tree = decoding.Tree([0, decoding.draw(q, generator)], [-1, 0], [0.0, 0.0], [q])
        path, bonus = decoding.judge(tree, torch.stack([p.log(), p.log()]), how, generator)
        accepted += len(path) - 1
        counts[tree.tokens[1] if len(path) == 2 else bonus] += 1
    assert accepted / 4000 == pytest.approx(0.6, abs=0.04)  # five standard deviations
    torch.testing.assert_close(counts / 4000, p.float(), rtol=0, atol=0.04)


@pytest.mark.parametrize("choice", [Choice.draw, Choice.rejection])
def test_seeds_decide(choice: Choice):
    """Catches a draw from the global generator: a measurement could not be repeated. A broken draft may sample too."""
    target, how = Recurrent(13, sharpness=1.0), Speculation(depth=3, candidates=4, width=1, choice=choice)
    draft = make_draft(13, WIDTH, range(13))
    one, two, three = (decode(target, draft, target.embed, [1], how, 30, seed=s) for s in (5, 5, 6))
    assert one == two
    assert one.tokens != three.tokens
    broken = decode(target, make_draft(13, WIDTH, [2, 5], Broken), target.embed, [1], how, 30, seed=5)
    assert len(broken.tokens) == 30
    assert broken.uniform_guesses > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth=0"),
        ({"candidates": 1}, "candidates=1"),
        ({"width": 0}, "width=0"),
        ({"temperature": 0.0}, "choice=greedy"),
        ({"choice": Choice.rejection}, "width=1"),
    ],
)
def test_refused(changes: dict, message: str):
    """Catches a shape that cannot be, found out only in the middle of a run."""
    with pytest.raises(UserError, match=message):
        Speculation(**changes)


def test_no_prompt_and_no_number():
    """Catches an index error for an empty prompt, and NaN logits that argmax would take for a token."""
    target, draft = Recurrent(13), make_draft(13, WIDTH, range(13))
    with pytest.raises(UserError, match="at least 1"):
        decode(target, draft, target.embed, [], D7, 5)
    with pytest.raises(UserError, match="max_tokens=0"):
        decode(target, draft, target.embed, [1], D7, 0)
    target.head[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        decode(target, draft, target.embed, [1], D7, 5)
