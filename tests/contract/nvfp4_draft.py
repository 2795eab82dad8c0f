"""A draft of ours in NVFP4, rounded as it stands."""

import torch

from soar_prep.eagle3.draft import Draft
from soar_prep.eagle3.nvfp4 import hold_rounded, prepare
from soar_prep.qat.linear import fused_groups, nvfp4_linears
from soar_prep.settings import DraftFormat, Qat


def rounded(draft: Draft, lm_head: bool) -> Draft:
    """The draft, its weights now those of NVFP4; each linear, or group that SGLang fuses, has its own input scale."""
    masters = {name: weight.detach().clone() for name, weight in draft.named_parameters()}
    qat = Qat(DraftFormat.nvfp4, lm_head=lm_head)
    prepare(draft, qat)
    groups = enumerate(fused_groups(nvfp4_linears(draft)), 3)
    scales = {name: torch.tensor(2.0**-number) for number, group in groups for name in group}
    hold_rounded(draft, masters, scales, qat)
    return draft.requires_grad_(False)
