"""What a draft is worth on held-out samples: simulated figures (metrics.py) and real speculative decoding (decode.py).

All processes share the work; each gets the same answer.

By position: the same samples once more, but with the draft's positions spread over the first n, as positions.py's aoi
with GAPS gaps does: how far a draft can be trusted in a context of n tokens, as far as its RoPE is concerned. The
target keeps its own positions, and its states stay what they are.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from soar_prep.eagle3 import decode
from soar_prep.eagle3.data import Batch, Batching, Samples, make_batch, plan_epoch
from soar_prep.eagle3.decode import Choice, Speculation
from soar_prep.eagle3.draft import Draft
from soar_prep.eagle3.metrics import Acceptance
from soar_prep.eagle3.positions import draw_positions
from soar_prep.eagle3.target import States
from soar_prep.eagle3.ttt import ask_teacher, ttt_loss
from soar_prep.settings import Decoding, Loss, PositionRule

FIRST_BUCKET = 4096
GAPS = 3
LONGEST_PROMPT = 256  # of a text, which has no prompt of its own


class TargetStates(Protocol):
    """Where a target's states come from: target.py's Target, or capture.py's files."""

    def states(self, batch: Batch) -> States: ...
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def head(self, rows: Tensor) -> Tensor: ...


@torch.no_grad()
def acceptance(
    draft: Draft, target: TargetStates, samples: Samples, batching: Batching, loss: Loss, buckets: Sequence[int] = ()
) -> dict[str, dict[str, Any]]:
    """Acceptance.figures() at `natural` positions and, by its name, at each bucket's. batching: tokens and packing."""
    processes, device = PartialState(), draft.fc.weight.device
    seen = {name: Acceptance() for name in ("natural", *map(str, buckets))}
    planned = plan_epoch(samples, replace(batching, rank=0, world_size=1), epoch=0)
    for rows in planned[processes.process_index :: processes.num_processes]:
        batch = make_batch(samples, rows, batching.row_tokens).to(device)
        states = target.states(batch)
        taught = ask_teacher(states.last, target.head, draft.target_ids(), batch.loss_mask, batch.document_ids)
        for name, sums in seen.items():
            if name != "natural":
                room = int(name) + loss.steps - 1
                spread = draw_positions(batch.document_ids, PositionRule.aoi, room, loss.steps, GAPS)
                batch = replace(batch, positions=spread)
            aux = states.aux.to(draft.fc.weight.dtype)
            sums.add(ttt_loss(draft, target.embed, aux, batch, taught, steps=loss.steps))
    for other in gather_object([seen]):
        if other is not seen:
            for name, sums in other.items():
                seen[name].merge(sums)
    return {name: sums.figures() for name, sums in seen.items()}


def position_buckets(draft: Draft, longest: int) -> list[int]:
    """4096, 8192, ... up to what the draft is made for; those that hold the longest sample."""
    most = draft.config.max_position_embeddings
    sizes = [FIRST_BUCKET << n for n in range(max(most // FIRST_BUCKET, 1).bit_length())]
    return [size for size in sizes if longest < size <= most]


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    domain: str = ""


def prompts_of(samples: Samples, count: int, longest: int) -> list[Prompt]:
    """Up to the first answer; of text, where every token is supervised, a first half. `longest`: tokens at most."""
    prompts: list[Prompt] = []
    for number in range(len(samples)):
        tokens = slice(int(samples.borders[number]), int(samples.borders[number + 1]))
        ids, supervised = samples.token_ids[tokens].tolist(), samples.loss_mask[tokens]
        start = int(supervised.nonzero()[0])
        if start <= 1:
            start = min(max(len(ids) // 2, 1), LONGEST_PROMPT)
        if start <= longest and len(prompts) < count:
            prompts.append(Prompt(ids[:start], samples.domains[number] if samples.domains else ""))
    return prompts


def decode_prompts(
    draft: Draft,
    target: decode.Target,
    embed: Callable[[Tensor], Tensor],
    prompts: Sequence[Prompt],
    how: Decoding,
    ends: Sequence[int],
    plain: dict[int, list[int]],
) -> dict[str, dict[str, Any]]:
    """Greedy decoding with a chain and with a tree; figures of each, all processes together.

    plain: the target's own output by the prompt's number, kept here between calls: it is what outputs are compared to.
    """
    processes = PartialState()
    mine = range(processes.process_index, len(prompts), processes.num_processes)
    for number in mine:
        if number not in plain:
            plain[number] = greedy(target, prompts[number].token_ids, how.tokens, ends)
    shapes = {"chain": Speculation(how.depth, how.depth + 1, width=1)}
    shapes["tree"] = Speculation(how.depth, how.candidates, how.width, Choice.greedy)
    figures = {}
    for shape, speculation in shapes.items():
        outcomes = []
        for number in mine:
            prompt = prompts[number]
            decoded = decode.decode(target, draft, embed, prompt.token_ids, speculation, how.tokens, ends)
            outcomes.append(
                Outcome(prompt.domain, decoded.accepted, len(decoded.tokens), decoded.tokens == plain[number])
            )
        outcomes = gather_object(outcomes)
        domains = sorted({outcome.domain for outcome in outcomes})
        lengths = Counter(length for outcome in outcomes for length in outcome.accepted)
        figures[shape] = {
            "accepted": mean_accepted(outcomes),
            "rounds": sum(lengths.values()),
            "tokens": sum(outcome.tokens for outcome in outcomes),
            "prompts": len(outcomes),
            "equal": sum(outcome.is_equal for outcome in outcomes),
            "lengths": [lengths[length] for length in range(1, how.depth + 2)],
            "by_domain": {d: mean_accepted([o for o in outcomes if o.domain == d]) for d in domains if d},
        }
    return figures


@dataclass(frozen=True)
class Outcome:
    """Of one prompt: tokens confirmed in each round, tokens of the output, and whether it is the target's own."""

    domain: str
    accepted: list[int]
    tokens: int
    is_equal: bool


def mean_accepted(outcomes: Sequence[Outcome]) -> float:
    """Tokens a round; 0 if there was none, where every output was its first token."""
    rounds = [length for outcome in outcomes for length in outcome.accepted]
    return sum(rounds) / len(rounds) if rounds else 0.0


def greedy(target: decode.Target, prompt: Sequence[int], count: int, ends: Sequence[int]) -> list[int]:
    """The target's own output, token by token: `count` tokens at most, up to the first of `ends`."""
    tokens = [int(target.start(prompt).logits[-1].argmax())]
    while len(tokens) < count and tokens[-1] not in ends:
        verified = target.verify(tokens[-1:], [-1])
        target.accept([0])
        tokens.append(int(verified.logits[-1].argmax()))
    return tokens
