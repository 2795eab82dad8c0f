"""NVFP4Tensor: codes, block scales and tensor scale of one weight, and the way there and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from soar_prep.fouroversix.blocks import BLOCK, E4M3_MAX, choose_block_scales, over_six
from soar_prep.fouroversix.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_codes, round_to_e2m1, unpack_codes
from soar_prep.settings import ScaleError, ScaleRule


@dataclass(frozen=True)
class NVFP4Tensor:
    """weight[n, k] = e2m1(codes[n, k]) * block_scales[n, k // 16] * tensor_scale

    codes: uint8 [N, K/2], two a byte, the even column in the low nibble.
    block_scales: float8_e4m3fn [N, K/16], positive and finite.
    tensor_scale: fp32 [].
    """

    codes: Tensor
    block_scales: Tensor
    tensor_scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dense weight [N, K]. In bf16 it is exact when tensor_scale is a power of two."""
        return (self.operand() * self.tensor_scale).to(dtype)

    def operand(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What an NVFP4 product multiplies [N, K]: the weight over tensor_scale, exact in fp32, bf16 and fp16."""
        values = decode_e2m1(unpack_codes(self.codes)).unflatten(-1, (-1, BLOCK))
        return (values * self.block_scales.float().unsqueeze(-1)).flatten(-2).to(dtype)

    def to(self, device: torch.device | str) -> "NVFP4Tensor":
        return NVFP4Tensor(self.codes.to(device), self.block_scales.to(device), self.tensor_scale.to(device))


def quantize_to_nvfp4(
    weight: Tensor,
    tensor_scale: Tensor,
    rule: ScaleRule,
    error: ScaleError,
    column_weights: Tensor | None = None,
) -> NVFP4Tensor:
    """Choose the block scales of weight [N, K] and round it to the nearest value under them.

    tensor_scale: fp32 []. column_weights: fp32 [K], diag(H); needed by ScaleError.hessian_diag alone.
    """
    block_scales = choose_block_scales(weight, tensor_scale, rule, error, column_weights)
    return round_to_nvfp4(weight, block_scales, tensor_scale)


def round_to_nvfp4(weight: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> NVFP4Tensor:
    """Round weight [N, K] to the nearest value under given scales (e4m3 [N, K/16], fp32 [])."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    reciprocal = 1 / (tensor_scale * block_scales.float().unsqueeze(-1))
    codes = encode_e2m1(round_to_e2m1(blocks * reciprocal)).flatten(-2)
    return NVFP4Tensor(pack_codes(codes), block_scales, tensor_scale)


def quantize_activations(x: Tensor, input_scale: Tensor) -> NVFP4Tensor:
    """What an NVFP4 activation quantizer makes of x [..., K]: block scales of the day under a fixed input_scale.

    input_scale: fp32 []. Block scales are e4m3(m / 6 / input_scale), saturating at 448; a block so small that its scale
    rounds to zero becomes zero, as in the serving kernels.
    """
    blocks, scales, reciprocal = activation_blocks(x, input_scale)
    codes = encode_e2m1(round_to_e2m1(blocks * reciprocal)).flatten(-2)
    return NVFP4Tensor(pack_codes(codes), scales.to(torch.float8_e4m3fn).squeeze(-1), input_scale)


def round_activations(x: Tensor, input_scale: Tensor) -> Tensor:
    """x [..., K] as `quantize_activations` would have it, in x's dtype; its codes are never made."""
    blocks, scales, reciprocal = activation_blocks(x, input_scale)
    return (round_to_e2m1(blocks * reciprocal) * scales * input_scale).flatten(-2).to(x.dtype)


def activation_blocks(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of x, fp32 [..., K/16, 16], their scales as E4M3 has them, and what takes a block to E2M1's range."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    ideal = over_six(blocks.abs().amax(dim=-1, keepdim=True)) * (1 / input_scale)
    scales = ideal.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return blocks, scales, torch.where(scales > 0, 1 / (input_scale * scales), 0.0)


def input_scale_for(largest: Tensor) -> Tensor:
    """Calibrated activation scale, fp32 [], from the largest activation magnitude seen: largest / (6 * 448)."""
    return (largest.float() / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
