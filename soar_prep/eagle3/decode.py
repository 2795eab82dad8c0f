"""Speculative decoding in plain torch: how many tokens a round a draft really gives, and that it changes none.

n nodes   V target vocabulary   V_draft draft vocabulary   H hidden size   T tokens   D depth

Every round: the draft grows a tree of guesses under the pending token, which the target chose but has not yet read;
the target scores all nodes at once; the longest path that it agrees with stands, and so does its own next token, the
bonus, which is pending in the next round.

Accepted length of a round: tokens that the target confirms in it, the bonus included, so 1 to D + 1; up to an end
token, but counted whole where max_tokens cuts the output. The first token comes from the prompt and is of no round.

The tree is EAGLE-2's: a level is the best `width` children of the best `width` nodes of the level before, by the
product of the draft's probabilities; the best of all levels are the candidates. width = 1 is a chain.
Indices and positions are ttt.py's: where index i is the last accepted one, a node at depth k stands at i + k.
Sources: EAGLE-2 (Li et al., 2024); rejection sampling: Leviathan et al., 2023, arXiv 2211.17192.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from soar_prep.eagle3.draft import Draft, Step
from soar_prep.errors import UserError


class Choice(Enum):
    """How tokens are chosen. greedy: the target's likeliest. draw: the target draws, and a guess that it drew stands.
    rejection: the draft draws its guesses, a chain; each stands with probability min(1, p / q). The last two give
    exactly the target's distribution."""

    greedy = "greedy"
    draw = "draw"
    rejection = "rejection"


@dataclass(frozen=True)
class Speculation:
    """depth: guesses on a path at most. candidates: nodes that the target scores a round, the pending token among
    them, as SGLang counts num_draft_tokens. width: see above. temperature: for draw and rejection."""

    depth: int = 7
    candidates: int = 15
    width: int = 4
    choice: Choice = Choice.greedy
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("candidates", 2), ("width", 1)):
            if getattr(self, name) < least:
                raise UserError(f"speculation: {name}={getattr(self, name)}: expected at least {least}")
        if self.choice is Choice.rejection and self.width != 1:
            raise UserError(f"speculation: width={self.width}: rejection sampling is of a chain; set width=1")
        if not self.temperature > 0:
            raise UserError(
                f"speculation: temperature={self.temperature}: expected above 0; choice=greedy is its limit"
            )


@dataclass(frozen=True)
class Verified:
    """What the target says after each token it read: logits [n, V], aux [n, 3H]. From `start` logits are [1, V]."""

    logits: Tensor
    aux: Tensor


class Target(Protocol):
    """One request's state in the target, a KV cache or a recurrent state."""

    def start(self, token_ids: Sequence[int]) -> Verified:
        """Read a prompt and forget all before: logits [1, V] after its last token, aux [T, 3H] of all."""

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Verified:
        """Score a tree: node i follows the accepted tokens, its ancestors, and nothing else. parents[0] = -1, and
        parents[i] < i. What is accepted does not change."""

    def accept(self, path: Sequence[int]) -> None:
        """Nodes of the last `verify`, from node 0 down, are now accepted; all others are as if never read."""


@dataclass(frozen=True)
class Tree:
    """Node 0 is the pending token, parent -1; parents come before children. scores: log-probability of the path by
    the draft. q: for rejection, the distribution fp64 [V] that the child of node i was drawn from."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    q: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Decoded:
    """tokens: the output without the prompt, its end token included. accepted: see the top, one a round.
    uniform_guesses: rows of draft logits that were NaN, for which any token of the draft's is as good; 0 is healthy."""

    tokens: list[int]
    accepted: list[int]
    uniform_guesses: int

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def accepted_length(self) -> float:
        """Mean over the rounds; NaN if there was none."""
        return sum(self.accepted) / self.rounds if self.rounds else math.nan


@torch.no_grad()
def decode(
    target: Target,
    draft: Draft,
    embed: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    how: Speculation,
    max_tokens: int,
    end_tokens: Collection[int] = (),
    seed: int = 0,
) -> Decoded:
    """At most max_tokens tokens after the prompt, up to the first of end_tokens.

    embed: token ids [1, T] -> the target's embeddings as stored [1, T, H]. The target reads up to how.depth tokens
    beyond max_tokens. With Choice.greedy the output is the target's own greedy one, whatever the draft guesses.
    """
    if not prompt or max_tokens < 1:
        raise UserError(
            f"decode: a prompt of {len(prompt)} tokens, max_tokens={max_tokens}: expected at least 1 of each"
        )
    generator = torch.Generator().manual_seed(seed)
    guesser = Guesser(draft, embed)
    verified = target.start(prompt)
    tokens, accepted = [choose(verified.logits[-1], how, generator)], []
    aux, following = verified.aux, [*prompt[1:], tokens[0]]
    while len(tokens) < max_tokens and tokens[-1] not in end_tokens:
        guesser.read(aux, following)
        tree = guesser.grow(tokens[-1], how, generator)
        verified = target.verify(tree.tokens, tree.parents)
        path, bonus = judge(tree, verified.logits, how, generator)
        target.accept(path)
        following = [*(tree.tokens[node] for node in path[1:]), bonus]
        aux = verified.aux[path]
        ends = [n for n, token in enumerate(following, 1) if token in end_tokens]
        accepted.append(ends[0] if ends else len(following))
        tokens += following[: accepted[-1]]
    return Decoded(tokens[:max_tokens], accepted, guesser.uniform_guesses)


def judge(tree: Tree, logits: Tensor, how: Speculation, generator: torch.Generator) -> tuple[list[int], int]:
    """(accepted nodes from 0 down, the bonus token) by the target's logits [n, V]."""
    if how.choice is Choice.rejection:
        return judge_drawn(tree, logits, how.temperature, generator)
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path = [0]
    while True:
        token = choose(logits[path[-1]], how, generator)
        if (path[-1], token) not in children:
            return path, token
        path.append(children[path[-1], token])


def judge_drawn(tree: Tree, logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[list[int], int]:
    """Rejection sampling down a chain: a token's probability is q min(1, p / q) + (1 - alpha) residual = p."""
    for node, q in enumerate(tree.q[: len(tree.tokens) - 1]):
        p, guess = probabilities(logits[node], temperature), tree.tokens[node + 1]
        if float(torch.rand((), dtype=torch.float64, generator=generator)) * q[guess] >= p[guess]:
            return list(range(node + 1)), draw(residual(p, q), generator)
    return list(range(len(tree.tokens))), draw(probabilities(logits[-1], temperature), generator)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What of p is still owed where a guess drawn from q was rejected, fp64 [V], up to a factor."""
    owed = (p - q).clamp(min=0)
    return owed if owed.sum() > 0 else p  # p = q up to rounding


def choose(logits: Tensor, how: Speculation, generator: torch.Generator) -> int:
    """The target's own next token, from its logits [V]."""
    if how.choice is Choice.greedy:
        return int(checked(logits).argmax())
    return draw(probabilities(logits, how.temperature), generator)


def checked(logits: Tensor) -> Tensor:
    if bool(logits.isnan().any()):
        raise ValueError("the target's logits hold NaN: there is no next token; is the checkpoint sound?")
    return logits


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """fp64 on the CPU, where the generator is."""
    return (checked(logits).double().cpu() / temperature).softmax(dim=-1)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


class Guesser:
    """The draft and its KV cache of one request: `read` what was accepted, then `grow` a tree on it; in turn.

    The cache holds the `context` accepted indices first, then the nodes of the tree that grows; `read` drops those.
    """

    def __init__(self, draft: Draft, embed: Callable[[Tensor], Tensor]):
        self.draft, self.embed = draft, embed
        weight, config = draft.fc.weight, draft.config
        self.keys = weight.new_zeros(1, config.num_key_value_heads, 0, config.head_dim)
        self.values = self.keys
        self.context = 0
        self.uniform_guesses = 0
        self.target_ids: list[int] = draft.target_ids().tolist()

    def read(self, aux: Tensor, following: Sequence[int]) -> None:
        """aux [T, 3H]: the target's states of the next T accepted tokens; following: the token after each."""
        start, stop = self.context, self.context + len(following)
        self.keys, self.values = self.keys[:, :, :start], self.values[:, :, :start]
        sees = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
        hidden = self.draft.project(aux[None].to(self.keys))
        step = self._step(hidden, following, range(start, stop), sees)
        self.context = stop
        self.last = Step(step.hidden[:, -1:], step.normed[:, -1:])

    def _step(self, hidden: Tensor, tokens: Sequence[int], positions: Sequence[int], sees: Tensor) -> Step:
        """hidden [1, T, H]; sees bool [T, cached + T]. Keys and values are cached."""
        device = self.keys.device

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys, self.values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=sees.to(device))

        embeddings = self.embed(torch.tensor([list(tokens)], device=device)).to(self.keys)
        return self.draft.step(hidden, embeddings, torch.tensor([list(positions)], device=device), attend)

    def grow(self, pending: int, how: Speculation, generator: torch.Generator) -> Tree:
        """The best how.candidates nodes of how.depth levels under the pending token."""
        tokens, parents, scores, q = [pending], [-1], [0.0], []
        frontier, step = [0], self.last
        columns: dict[int, list[int]] = {0: []}  # where a node and its ancestors stand in the cache
        for depth in range(1, how.depth + 1):
            log_q = self._log_q(step.normed[0], how)
            level = len(tokens)
            for row, parent in enumerate(frontier):
                for guess in pick(log_q[row], how, generator):
                    tokens.append(self.target_ids[guess])
                    parents.append(parent)
                    scores.append(scores[parent] + float(log_q[row, guess]))
            if how.choice is Choice.rejection:
                q.append(log_q.new_zeros(self.draft.config.vocab_size))
                q[-1][self.target_ids] = log_q[0].exp()
            if depth == how.depth:
                break
            best = sorted(range(level, len(tokens)), key=lambda node: -scores[node])[: how.width]
            rows = [frontier.index(parents[node]) for node in best]
            sees = torch.zeros(len(best), self.keys.shape[2] + len(best), dtype=torch.bool)
            sees[:, : self.context] = True
            for row, node in enumerate(best):
                columns[node] = [*columns[parents[node]], self.keys.shape[2] + row]
                sees[row, columns[node]] = True
            position = self.context - 1 + depth
            step = self._step(step.hidden[:, rows], [tokens[n] for n in best], [position] * len(best), sees)
            frontier = best
        return prune(Tree(tokens, parents, scores, q), how.candidates)

    def _log_q(self, normed: Tensor, how: Speculation) -> Tensor:
        """normed [T, H] -> log-probabilities of the draft's tokens, fp64 [T, V_draft], on the CPU."""
        temperature = how.temperature if how.choice is Choice.rejection else 1.0
        log_q = (self.draft.logits(normed).double().cpu() / temperature).log_softmax(dim=-1)
        broken = log_q.isnan().any(dim=-1)
        self.uniform_guesses += int(broken.sum())
        log_q[broken] = log_q.new_zeros(log_q.shape[1]).log_softmax(dim=-1)
        return log_q


def pick(log_q: Tensor, how: Speculation, generator: torch.Generator) -> list[int]:
    """Draft ids of a node's children: the likeliest, or one that is drawn. None that the draft rules out."""
    if how.choice is Choice.rejection:
        return [draw(log_q.exp(), generator)]
    best = log_q.topk(min(how.width, len(log_q)))
    return best.indices[best.values > -torch.inf].tolist()


def prune(tree: Tree, candidates: int) -> Tree:
    """The nodes of the highest scores. A child never scores higher than its parent, and of equals the earlier stays."""
    ranked = sorted(range(len(tree.tokens)), key=lambda node: -tree.scores[node])
    kept = sorted(ranked[:candidates])
    number = {-1: -1} | {node: n for n, node in enumerate(kept)}
    parents = [number[tree.parents[node]] for node in kept]
    return Tree([tree.tokens[n] for n in kept], parents, [tree.scores[n] for n in kept], tree.q)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from 0 down to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
