import itertools
import math

import pytest
import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import (
    SMALLEST_TENSOR_SCALE,
    candidate_scales,
    choose_block_scales,
    share_of_fours,
    tensor_scale_for,
    to_e4m3,
    tree_sum,
)
from soar_prep.fouroversix.e2m1 import E2M1_VALUES
from soar_prep.settings import ScaleError, ScaleRule

ONE = torch.tensor(1.0)
RULES, ERRORS = list(ScaleRule), list(ScaleError)


def block(*values: float) -> Tensor:
    """One row of one block: `values`, then zeros."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("largest", "rule", "power_of_two", "expected"),
    [
        (6 * 448, ScaleRule.six, False, 1.0),
        (6 * 256, ScaleRule.four_over_six, False, 1.0),
        (6 * 256, ScaleRule.sweep, False, 1.0),
        (3 * 256, ScaleRule.sweep, True, 0.5),  # a power of two already
        (3.001 * 256, ScaleRule.sweep, True, 1.0),  # rounded up
        (5.9 * 256, ScaleRule.sweep, True, 1.0),
        (0, ScaleRule.sweep, True, SMALLEST_TENSOR_SCALE),
        (1e-44, ScaleRule.six, False, SMALLEST_TENSOR_SCALE),
    ],
)
def test_tensor_scale_by_hand(largest: float, rule: ScaleRule, power_of_two: bool, expected: float):
    """Catches 448 in place of 256, a power of two rounded down (the largest block overflows), a zero scale (NaN)."""
    scale = tensor_scale_for(torch.tensor(largest, dtype=torch.float32), rule, power_of_two)
    assert (scale.shape, scale.dtype, scale.item()) == ((), torch.float32, expected)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_largest_block_is_not_clipped(rule: ScaleRule, power_of_two: bool):
    """Catches a tensor scale under which the largest weight's block scale would have to exceed 448."""
    for exponent in torch.linspace(-30, 30, 200):
        largest = (2**exponent).float()
        scale = tensor_scale_for(largest, rule, power_of_two)
        wanted = largest / 6 / scale * (1.0 if rule is ScaleRule.six else 1.5)
        assert wanted <= 448 * (1 + 2**-20)
        assert not power_of_two or math.frexp(scale.item())[0] == 0.5


def test_every_number_goes_to_its_nearest_positive_e4m3_code():
    """Catches a zero or NaN scale byte and wrong rounding: all positive bf16 numbers, distances in float64."""
    codes = torch.arange(1, 127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    x = torch.arange(0, 2**15).short().view(torch.bfloat16)
    x = x[~x.isnan()]
    distance = (x.double().clamp(max=448)[:, None] - values).abs()
    is_nearest = distance == distance.amin(dim=1, keepdim=True)
    is_even = codes % 2 == 0
    expected = codes[(is_nearest * (1 + is_even.int())).argmax(dim=1)]
    assert torch.equal(to_e4m3(x.float()).view(torch.uint8), expected)


@pytest.mark.parametrize("error", [ScaleError.mse, ScaleError.mae, ScaleError.abs_max])
@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((10, 20, 30, 40), 10.0),  # 1, 2, 3, 4 under a scale of 10, which 40 / 6 cannot do
        ((12, -6, 1), 2.0),  # 6, -3, 0.5
        ((12,), 2.0),  # 12 is 6 * 2 and 4 * 3: a tie, which six wins
        ((0,), 2.0**-9),  # nothing there: the smallest code, never zero
    ],
)
def test_four_over_six_by_hand(values: tuple[float, ...], scale: float, error: ScaleError):
    """Catches a choice by the wrong error, a tie that goes to 4, and a zero scale for an all-zero block."""
    chosen = choose_block_scales(block(*values), ONE, ScaleRule.four_over_six, error)
    assert chosen.float().tolist() == [[scale]]


def test_diagonal_of_the_hessian_moves_the_choice():
    """Catches column weights that are ignored or belong to another block: each column alone is stored exactly."""
    weight = torch.cat([block(12, 11), block(12, 11)], dim=1)
    for heavy, scale in ((0, 2.0), (1, 2.75)):  # 12 = 6 * 2, 11 = 4 * 2.75
        h = torch.full((32,), 1e-6)
        h[[heavy, 16 + heavy]] = 1.0
        chosen = choose_block_scales(weight, ONE, ScaleRule.sweep, ScaleError.hessian_diag, h)
        assert chosen.float().tolist() == [[scale, scale]]


def test_hessian_diag_needs_the_diagonal():
    """Catches a silent fall back to the plain squared error."""
    with pytest.raises(ValueError, match="column_weights"):
        choose_block_scales(block(12), ONE, ScaleRule.sweep, ScaleError.hessian_diag)


@pytest.mark.parametrize(
    ("six", "codes"),
    [
        (2.0, [64, 60, 61, 62, 63, 65, 66, 67, 68, 69, 70, 71]),
        (2.0**-9, [1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
        (448.0, [126, 122, 123, 124, 125, 126, 126, 126, 126, 126, 126, 126]),
    ],
)
def test_sweep_candidates_stay_codes(six: float, codes: list[int]):
    """Catches a sweep that leaves the positive codes (0x00 zero, 0x7F NaN) or starts elsewhere than at six."""
    candidates = candidate_scales(block(6 * six).unflatten(-1, (-1, 16)), ONE, ScaleRule.sweep)
    assert [c.view(torch.uint8).item() for c in candidates] == codes


@pytest.mark.parametrize(("rule", "error"), list(itertools.product(RULES, ERRORS)))
@pytest.mark.parametrize("rows", [1, 15, 17, 130])
def test_chosen_scale_is_the_best_candidate(rows: int, rule: ScaleRule, error: ScaleError):
    """Catches any mistake in the vectorised search: every candidate of every block tried one by one in float64."""
    weight, h = gaussian(rows, 48, seed=rows), gaussian(1, 48, seed=1)[0] ** 2
    t = tensor_scale_for(weight.abs().max(), rule, power_of_two=False)
    chosen = choose_block_scales(weight, t, rule, error, h)
    blocks = weight.unflatten(-1, (-1, 16))
    grid = torch.tensor(E2M1_VALUES).double()

    def exact_error(scales: Tensor) -> Tensor:
        step = (scales.double() * t.double())[..., None]
        magnitude = grid[(blocks.double().abs()[..., None] / step[..., None] - grid).abs().argmin(dim=-1)]
        d = (magnitude * step - blocks.double().abs()).abs()
        return {
            ScaleError.mse: (d * d).sum(-1),
            ScaleError.mae: d.sum(-1),
            ScaleError.abs_max: d.amax(-1),
            ScaleError.hessian_diag: (d * d * h.double().view(-1, 16)).sum(-1),
        }[error]

    best = torch.stack([exact_error(c) for c in candidate_scales(blocks, t, rule)]).amin(dim=0)
    # The fp32 sums of 16 rounded terms are off by at most 2^-20 of themselves.
    assert (exact_error(chosen) <= best * (1 + 2**-19)).all()


def test_sum_runs_over_neighbours_first():
    """Catches another order of addition, in which a kernel's bits would differ: 2^-24 vanishes beside 1, a pair not."""
    x = torch.tensor([1.0, 0.0, 2.0**-24, 2.0**-24])
    assert tree_sum(x) == 1 + 2.0**-23
    assert tree_sum(x[[0, 2, 1, 3]]) == 1.0


def test_share_of_fours_counts_the_blocks_that_took_the_four():
    """Catches a threshold that miscounts: under four_over_six the share must be exact."""
    weight = gaussian(130, 64, seed=3)
    t = tensor_scale_for(weight.abs().max(), ScaleRule.four_over_six, power_of_two=True)
    chosen = choose_block_scales(weight, t, ScaleRule.four_over_six, ScaleError.mse)
    six, four = candidate_scales(weight.unflatten(-1, (-1, 16)), t, ScaleRule.four_over_six)
    took_four = chosen.float() == four.float()
    assert (took_four | (chosen.float() == six.float())).all()
    assert 0.2 < took_four.float().mean() < 0.6
    assert torch.equal(share_of_fours(weight, chosen, t), took_four.float().mean(dim=-1))
