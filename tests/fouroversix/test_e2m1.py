import pytest
import torch

from soar_prep.fouroversix.e2m1 import (
    E2M1_VALUES,
    decode_e2m1,
    encode_e2m1,
    pack_codes,
    round_to_e2m1,
    unpack_codes,
)

CODES = torch.arange(16, dtype=torch.uint8)


def test_codes_are_the_sixteen_values_of_the_standard():
    """Catches a wrong table, a swapped sign bit, and an encoder that disagrees with the decoder."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert decode_e2m1(CODES).tolist() == values
    assert torch.signbit(decode_e2m1(CODES)).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(encode_e2m1(torch.tensor(values)), CODES)


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6), (1e30, 6), (float("inf"), 6)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_even_index(x: float, expected: float, dtype: torch.dtype):
    """Catches rounding half up or half away from zero, which biases every weight, and a missing saturation."""
    assert round_to_e2m1(torch.tensor([x, -x], dtype=dtype)).tolist() == [expected, -expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bf16_number_goes_to_its_nearest_value(dtype: torch.dtype):
    """Catches any wrong step or boundary: all 65,280 numbers of bf16, against distances taken in float64."""
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    x = x[torch.isfinite(x)]
    distance = (x.double().abs().clamp(max=8)[:, None] - torch.tensor(E2M1_VALUES).double()).abs()
    is_nearest = distance == distance.amin(dim=1, keepdim=True)
    # of two nearest ones the even index
    index = (is_nearest.int() * torch.tensor([2, 1] * 4)).argmax(dim=1)
    expected = torch.copysign(torch.tensor(E2M1_VALUES)[index], x.float())
    got = round_to_e2m1(x.to(dtype))
    assert got.dtype is dtype
    assert torch.equal(got.float(), expected)
    assert torch.equal(torch.signbit(got), torch.signbit(x))


def test_nan_stays_nan():
    """Catches a NaN that turns into a harmless looking number and hides where it came from."""
    assert round_to_e2m1(torch.tensor([float("nan")])).isnan().all()


def test_even_column_is_in_the_low_nibble():
    """Catches swapped nibbles, which exchange neighbouring weights in every loader."""
    assert pack_codes(torch.tensor([[0x1, 0x2, 0xF, 0x8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


@pytest.mark.parametrize("rows", [1, 15, 17, 130])
def test_unpacking_undoes_packing(rows: int):
    """Catches a lost sign bit or mixed-up columns, at sizes that divide by nothing."""
    codes = torch.randint(0, 16, (rows, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)
