"""The draft in NVFP4: which of its linears, their input scales, and its weights as they will be written.

`fc` stays in BF16: SGLang's class has no quantized one. lm_head, which has, is rounded if asked for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from soar_prep.eagle3.draft import Draft
from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import BLOCK
from soar_prep.layouts import QuantizedWeight
from soar_prep.processes import all_max
from soar_prep.qat.linear import fused_groups, input_scale_of, nvfp4_linears, quantize_weights, to_nvfp4_linears
from soar_prep.settings import DraftFormat, Qat, ScaleError
from soar_prep.streaming import watching_inputs

LAYER = tuple(f"midlayer.self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")
)
FC, HEAD = "fc", "lm_head"


def names_to_round(draft: Draft, qat: Qat) -> tuple[str, ...]:
    """The linears that `qat` wants in NVFP4; UserError for what cannot be."""
    if qat.format is DraftFormat.none:
        return ()
    if qat.scale_error is ScaleError.hessian_diag:
        raise UserError(
            "qat.scale_error=hessian_diag: a draft in training has no Hessian; expected mse, mae or abs_max"
        )
    names = (*LAYER, HEAD) if qat.lm_head else LAYER
    for name in names:
        width = draft.get_submodule(name).in_features
        if not isinstance(width, int) or width % BLOCK:
            raise UserError(
                f"qat.format=nvfp4: {name} has {width} inputs, which do not divide into blocks of {BLOCK}; "
                "change the draft's shape"
            )
    return names


def prepare(draft: Draft, qat: Qat) -> None:
    """Make NVFP4Linears of the linears that `qat` names; none is rounded yet. UserError for what cannot be."""
    to_nvfp4_linears(draft, names_to_round(draft, qat), qat.activations)


def start_rounding(draft: Draft, input_scales: Mapping[str, Tensor]) -> None:
    """From now on the draft runs under NVFP4 numbers. input_scales: fp32 [], by the linear's name."""
    for name, linear in nvfp4_linears(draft).items():
        linear.input_scale = input_scales[name].to(linear.weight.device)
        linear.is_rounded = True


@contextmanager
def measuring_input_scales(draft: Draft) -> Iterator[dict[str, Tensor]]:
    """While this lasts the largest inputs are noted; at its end the dictionary holds the scales, by linear.

    Over all processes; linears that a server fuses have one scale.
    """
    largest: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        seen = x.abs().amax().float()
        largest[name] = torch.maximum(largest.get(name, seen), seen)

    scales: dict[str, Tensor] = {}
    with watching_inputs(draft, {name: partial(note, name) for name in nvfp4_linears(draft)}):
        yield scales
    for group in fused_groups(largest):
        scale = input_scale_of(all_max(torch.stack([largest[name] for name in group]).amax()))
        scales |= dict.fromkeys(group, scale)


def hold_rounded(draft: Draft, masters: Mapping[str, Tensor], input_scales: Mapping[str, Tensor], qat: Qat) -> None:
    """Give the draft's NVFP4Linears the numbers of these weights (by parameter name, fp32) and these scales."""
    weights = {name: masters[f"{name}.weight"] for name in nvfp4_linears(draft)}
    stored = quantize_weights(weights, qat.scale_rule, qat.scale_error)
    hold_stored(draft, {name: QuantizedWeight(weight, input_scales[name]) for name, weight in stored.items()})


def hold_stored(draft: Draft, quantized: Mapping[str, QuantizedWeight]) -> None:
    """Give the draft's NVFP4Linears these numbers, by the linear's name."""
    for name, linear in nvfp4_linears(draft).items():
        weight, device = quantized[name].weight, linear.weight.device
        linear.weight.data = weight.dequantize(linear.weight.dtype).to(device)
        linear.stored, linear.input_scale, linear.is_rounded = weight, quantized[name].input_scale, True
