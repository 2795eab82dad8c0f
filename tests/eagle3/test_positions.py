import numpy as np
import pytest
import torch
from torch import Tensor

from soar_prep.eagle3.positions import MOST_SINKS, PositionRule, draw_positions, draw_shifts, natural_positions
from soar_prep.errors import UserError

AOI = PositionRule.aoi
LIMIT = 2**19


def document(tokens: int, number: int = 0) -> Tensor:
    return torch.full((1, tokens), number)


def test_natural_restarts_at_each_document():
    """Catches positions that run on through a packed row, and a first document that starts elsewhere than at 0."""
    documents = torch.tensor([[4, 4, 4, 9, 9, 2, -1, -1], [7, 7, 7, 7, 7, 7, 7, 7], [5, 6, 7, 8, 9, 9, -1, -1]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1, 0, 1]]
    assert natural_positions(documents).tolist() == expected
    assert draw_positions(documents, PositionRule.natural, 8, 1).tolist() == expected


@pytest.mark.parametrize("gaps", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5, 15, 17])
def test_no_room_is_natural(tokens: int, gaps: int):
    """Catches an offset that is added where none fits: the last position would not exist."""
    steps = 7
    got = draw_positions(document(tokens), AOI, tokens + steps - 1, steps, gaps, seed=3)
    assert torch.equal(got, natural_positions(document(tokens)))


@pytest.mark.parametrize("gaps", [0, 1, 3, 100])
@pytest.mark.parametrize("tokens", [1, 2, 5, 15, 17, 130])
def test_positions_rise_and_end_in_time(tokens: int, gaps: int):
    """Catches gaps whose sum overflows, tokens that trade places, sinks that move, gaps more or fewer than asked."""
    jumps_seen = 0
    for seed in range(100):
        positions = draw_positions(document(tokens), AOI, LIMIT, 7, gaps, seed)[0]
        shifts = positions - torch.arange(tokens)
        assert int(positions[-1]) + 6 < LIMIT
        assert bool((shifts.diff() >= 0).all())
        assert int(positions[0]) >= 0
        jumps = int((shifts.diff() > 0).sum()) + int(shifts[0] > 0)
        assert jumps <= 1 + min(gaps, max(tokens - 1, 0))
        jumps_seen = max(jumps_seen, jumps)
    if tokens > MOST_SINKS + gaps + 1:
        assert jumps_seen == 1 + gaps


def test_sinks_keep_their_positions():
    """Catches a number of sinks that is always the same, or one token too many: all of 0 to 4 must occur."""
    found = set()
    for seed in range(200):
        shifts = draw_positions(document(17), AOI, LIMIT, 7, seed=seed)[0] - torch.arange(17)
        sinks = int((shifts == 0).sum())
        assert bool((shifts[sinks:] == shifts[-1]).all())
        found.add(sinks)
    assert found == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("gaps", [0, 2])
def test_the_whole_range_is_drawn(gaps: int):
    """Catches an offset that never reaches the end: far positions would be met in serving alone."""
    ends = [int(draw_positions(document(15), AOI, LIMIT, 7, gaps, seed)[0, -1]) for seed in range(300)]
    assert max(ends) > 0.95 * LIMIT
    if gaps == 0:  # uniform: a mean of half the room, within four of its standard errors
        assert abs(np.mean(ends) / LIMIT - 0.5) < 4 * 12**-0.5 / 300**0.5
    # The very last position can be drawn, and none beyond it.
    assert {int(draw_shifts(3, 5, 0, np.random.default_rng(seed))[-1]) for seed in range(100)} == {0, 1, 2}


def test_a_gap_lies_anywhere():
    """Catches cuts that are always in the middle, or next to the sinks."""
    places = set()
    for seed in range(400):
        shifts = draw_positions(document(10), AOI, LIMIT, 7, 1, seed)[0] - torch.arange(10)
        places |= set((shifts.diff() > 0).nonzero()[:, 0].tolist())
    assert places == set(range(9))


def test_documents_draw_for_themselves():
    """Catches a draw that depends on the row, the batch or the neighbours: a resumed run would see other positions."""
    documents = torch.tensor([[3] * 15 + [8] * 17 + [-1] * 3, [8] * 17 + [5] * 16 + [-1] * 2])
    together = draw_positions(documents, AOI, LIMIT, 7, 2, seed=1, epoch=4)
    for number, place in ((3, (0, slice(0, 15))), (8, (0, slice(15, 32))), (8, (1, slice(0, 17)))):
        tokens = place[1].stop - place[1].start
        alone = draw_positions(document(tokens, number), AOI, LIMIT, 7, 2, seed=1, epoch=4)
        assert torch.equal(together[place], alone[0])
    assert together[0, 32:].tolist() == [0, 1, 2]
    assert not torch.equal(together[0, :15] - torch.arange(15), together[1, 17:32] - torch.arange(15))


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 5}])
def test_seed_and_epoch_count(change: dict[str, int]):
    """Catches a seed that is ignored, and the same offsets in every epoch."""
    first = draw_positions(document(15), AOI, LIMIT, 7, 1, **({"seed": 1, "epoch": 4}))
    again = draw_positions(document(15), AOI, LIMIT, 7, 1, **({"seed": 1, "epoch": 4}))
    other = draw_positions(document(15), AOI, LIMIT, 7, 1, **({"seed": 1, "epoch": 4} | change))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("rule", list(PositionRule))
def test_too_long_a_sample(rule: PositionRule):
    """Catches a sample whose last steps stand where SGLang's rotation table has no row."""
    draw_positions(document(10), rule, 16, 7)
    with pytest.raises(UserError, match="11 tokens, 7 steps: expected at most 10"):
        draw_positions(document(11), rule, 16, 7)
