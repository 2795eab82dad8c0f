"""E2M1, the four-bit float of NVFP4: one sign bit, two exponent bits, one mantissa bit.

    index      0    1    2    3    4    5    6    7
    magnitude  0   0.5   1   1.5   2    3    4    6        code = sign << 3 | index

Source: OCP Microscaling Formats v1.0, section 5.3.3.
"""

import torch
from torch import Tensor

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of each element: ties go to the even index, |x| > 6 saturates.

    x: any shape, already divided by its scale. Same shape and dtype out; the sign of a zero is kept.
    Exact in fp32 and bf16: every E2M1 value has at most two significant bits. NaN stays NaN.
    """
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # The grid step is 0.5 below 2, 1 below 4, 2 above. torch.round rounds halves to even, and on each of
    # the three pieces an even multiple of the step is an even index.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign(torch.round(magnitude / step) * step, x)


def encode_e2m1(values: Tensor) -> Tensor:
    """Codes 0..15, uint8, of E2M1 values (as `round_to_e2m1` returns them); any shape."""
    magnitude = values.abs()
    index = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of codes 0..15, any shape."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.long()]


def pack_codes(codes: Tensor) -> Tensor:
    """Two codes a byte along the last axis, the even column in the low nibble: uint8 [..., K] -> [..., K/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: uint8 [..., K/2] -> [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
