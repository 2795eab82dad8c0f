"""Positions for RoPE, stretched so that a draft trained on short samples serves long contexts.

natural: 0, 1, 2, ... in each document.
aoi: a few first tokens, the sinks, keep their positions; all others move by one offset, drawn so that the document
ends anywhere up to the last position there is. RoPE knows distances only, so this alone teaches sinks seen from afar.
aoi with gaps: n further jumps at random places, so that ordinary keys are seen from afar too. The n + 1 segments
after the sinks move by n + 1 uniform draws in ascending order: positions still rise, and the sum never overflows.

    0 1 2 | 3 4 5 6 7 8 9          sinks 3, length 10
    0 1 2 | 803 804 .. 809         one offset of 800
    0 1 2 | 303 304 | 755 .. 759   gaps=1: shifts 300 and 750

Step k of the training-time test stands k positions further on, so the last steps - 1 positions are left free.
The target is not moved: its states are what they are at natural positions.
Source: LongSpec (arXiv 2502.17421) for the anchor offset; PoSE (Zhu et al., 2023) for gaps between segments.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.settings import PositionRule

MOST_SINKS = 4


def natural_positions(documents: Tensor) -> Tensor:
    """0, 1, ... in each run of equal documents; int64 [B, T] in and out."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def draw_positions(
    documents: Tensor,
    rule: PositionRule,
    max_position_embeddings: int,
    steps: int,
    gaps: int = 0,
    seed: int = 0,
    epoch: int = 0,
) -> Tensor:
    """Positions int64 [B, T] of documents int64 [B, T], each document by itself, padding (negative) naturally.

    A document's draw depends on seed, epoch and its id alone: neither on its place nor on the batch it is in.
    UserError for one that is longer than the positions that there are.
    """
    positions = natural_positions(documents)
    room = max_position_embeddings - (steps - 1)
    longest = int(positions.max()) + 1
    if longest > room:
        raise UserError(
            f"a sample of {longest} tokens, {steps} steps: expected at most {room}, since max_position_embeddings is "
            f"{max_position_embeddings}; cut the samples shorter"
        )
    if rule is PositionRule.natural:
        return positions
    for row, document in enumerate(documents.cpu().numpy()):
        borders = np.flatnonzero(np.diff(document, prepend=document[:1] - 1, append=document[-1:] - 1))
        for start, stop in pairwise(borders):
            if document[start] >= 0:
                random = np.random.default_rng([seed, epoch, int(document[start])])
                shifts = draw_shifts(int(stop - start), room, gaps, random)
                positions[row, start:stop] += torch.from_numpy(shifts).to(positions.device)
    return positions


def draw_shifts(length: int, room: int, gaps: int, random: np.random.Generator) -> np.ndarray:
    """How far each of `length` tokens moves: int64 [length], never falling, at most room - length."""
    sinks = min(int(random.integers(MOST_SINKS + 1)), length)
    gaps = min(gaps, max(length - sinks - 1, 0))
    cuts = sinks + 1 + np.sort(random.choice(max(length - sinks - 1, 0), gaps, replace=False))
    amounts = np.sort(random.integers(room - length + 1, size=gaps + 1))
    shifts = np.zeros(length, dtype=np.int64)
    for start, stop, amount in zip([sinks, *cuts], [*cuts, length], amounts, strict=True):
        shifts[start:stop] = amount
    return shifts
