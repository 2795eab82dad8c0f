"""`losses_and_gradient` on a GPU: z is read three times, the teacher's logits twice, the gradient written once.

n rows   V draft vocabulary   z [n, V] draft logits   t [n, V] the teacher's   m = max z   l = log sum_v exp(z - m)
log q = z - m - l     p~ = exp(t - log_z_draft)     p = coverage p~     A = [q <= p]     s = sum of q over A

Truth: loss.losses_and_gradient; loss.py has the table of kinds and all of the mathematics.
Layout: a program a row, which it walks BLOCK tokens at a time; its second reading comes from the L2 cache. Two kernels,
since lambda needs the mean of alpha over all rows, on all ranks: the first gives m, l, alpha, KL and s of each row, the
second, with lambda in device memory, losses and gradient. Nothing here waits for the GPU.
m and l stay apart: of logits near 1e4 their sum, the log-sum-exp, would have lost l's digits.

Limits: z and t fp32, bf16 or fp16, with any stride between rows; log-sum-exps fp32. Sums are fp32, by lanes first. exp
is the GPU's own, of relative error near 1e-6 where it counts; so A may differ from the truth's where q and p agree to
that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from soar_prep.eagle3 import loss as truth
from soar_prep.eagle3.loss import SumOverRanks
from soar_prep.settings import LossKind

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def losses_and_gradient(
    z: Tensor,
    teacher_logits: Tensor,
    log_z: Tensor,
    log_z_draft: Tensor,
    kind: LossKind,
    eta: float,
    sum_over_ranks: SumOverRanks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(losses [n], their gradient to z [n, V] in z's dtype, alpha [n], KL [n], lambda [], rows on all ranks []).

    fp64 gets the truth, and so does the CPU unless TRITON_INTERPRET=1 was set when triton was imported.
    """
    is_compiled = isinstance(statistics_kernel, triton.runtime.JITFunction)
    if (z.device.type == "cpu" and is_compiled) or torch.float64 in (z.dtype, teacher_logits.dtype, log_z.dtype):
        return truth.losses_and_gradient(z, teacher_logits, log_z, log_z_draft, kind, eta, sum_over_ranks)
    check(z, teacher_logits, log_z, log_z_draft)
    rows, vocabulary = z.shape
    z, teacher_logits = last_axis_dense(z), last_axis_dense(teacher_logits)
    log_z, log_z_draft = log_z.contiguous(), log_z_draft.contiguous()
    maximum, log_sum, s, alpha, kl, losses = (torch.empty_like(log_z) for _ in range(6))
    gradient = torch.empty(rows, vocabulary, dtype=z.dtype, device=z.device)
    teacher = (teacher_logits, teacher_logits.stride(0), log_z, log_z_draft)
    # 16 bytes a thread of the narrower tensor; a short row is done by few threads.
    warps = 4 if vocabulary <= 8192 else 8
    shape = {"BLOCK": warps * 32 * 8, "num_warps": warps}
    with torch.cuda.device_of(z):
        if rows:
            statistics_kernel[(rows,)](z, z.stride(0), *teacher, maximum, log_sum, s, alpha, kl, vocabulary, **shape)
        mixing, rows_of_all = truth.mixing_of(alpha, eta, sum_over_ranks)
        if rows:
            figures = (maximum, log_sum, s, alpha, kl, mixing)
            gradient_kernel[(rows,)](
                z, z.stride(0), *teacher, *figures, losses, gradient, vocabulary, KIND=kind.value, **shape
            )
    return losses, gradient, alpha, kl, mixing, rows_of_all


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x [n, V] times factors [n], multiplied in fp32 and rounded once to x's dtype, without an fp32 [n, V] between.

    fp64 and the CPU are left to PyTorch, as above.
    """
    is_compiled = isinstance(scale_kernel, triton.runtime.JITFunction)
    if (x.device.type == "cpu" and is_compiled) or torch.float64 in (x.dtype, factors.dtype):
        return (factors[:, None] * x).to(x.dtype)
    rows, vocabulary = x.shape
    x, scaled = last_axis_dense(x), torch.empty(rows, vocabulary, dtype=x.dtype, device=x.device)
    warps = 4 if vocabulary <= 8192 else 8
    with torch.cuda.device_of(x):
        if rows:
            scale_kernel[(rows,)](
                *(x, x.stride(0), factors, factors.stride(0), scaled, vocabulary),
                BLOCK=warps * 32 * 8,
                num_warps=warps,
            )
    return scaled


def check(z: Tensor, teacher_logits: Tensor, log_z: Tensor, log_z_draft: Tensor) -> None:
    """ValueError for what the kernels would read wrongly or past the end."""
    if z.ndim != 2 or teacher_logits.shape != z.shape:
        raise ValueError(f"z {list(z.shape)}, teacher's logits {list(teacher_logits.shape)}: expected [n, V] of both")
    if z.dtype not in DTYPES or teacher_logits.dtype not in DTYPES:
        raise ValueError(f"z is {z.dtype}, teacher's logits {teacher_logits.dtype}: expected one of {DTYPES}")
    for name, sums in (("log_z", log_z), ("log_z_draft", log_z_draft)):
        if sums.shape != z.shape[:1] or sums.dtype != torch.float32:
            raise ValueError(f"{name} {list(sums.shape)} {sums.dtype}: expected float32 [{len(z)}]")


def last_axis_dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit
def statistics_kernel(
    z,
    z_stride,
    teacher,
    teacher_stride,
    log_z,
    log_z_draft,
    maximum,
    log_sum,
    s,
    alpha,
    kl,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    teacher += row * teacher_stride
    lane_maximum = tl.full([BLOCK], -3.0e38, tl.float32)  # not -inf, whose difference from itself is no number
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = load(z, start, vocabulary, BLOCK)
        smaller = tl.exp(-tl.abs(x - lane_maximum))
        lane_sum = tl.where(x > lane_maximum, lane_sum * smaller + 1.0, lane_sum + smaller)
        lane_maximum = tl.maximum(lane_maximum, x)
    m = tl.max(lane_maximum, axis=0)
    l = tl.log(tl.sum(lane_sum * tl.exp(lane_maximum - m), axis=0))  # noqa: E741

    sum_draft = tl.load(log_z_draft + row)
    coverage = tl.exp(sum_draft - tl.load(log_z + row))
    lane_alpha = tl.zeros([BLOCK], tl.float32)
    lane_kl = tl.zeros([BLOCK], tl.float32)
    lane_s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        log_q = load(z, start, vocabulary, BLOCK) - m - l
        log_p_tilde = load(teacher, start, vocabulary, BLOCK) - sum_draft
        q = tl.exp(log_q)
        p_tilde = tl.exp(log_p_tilde)
        p = p_tilde * coverage
        lane_alpha += tl.minimum(p, q)
        # A head may rule tokens out with -inf, and 0 * -inf is no number.
        lane_kl += tl.where(p_tilde > 0, p_tilde * (log_p_tilde - log_q), 0.0)
        lane_s += tl.where(q <= p, q, 0.0)
    tl.store(maximum + row, m)
    tl.store(log_sum + row, l)
    tl.store(alpha + row, tl.sum(lane_alpha, axis=0))
    tl.store(kl + row, tl.sum(lane_kl, axis=0))
    tl.store(s + row, tl.sum(lane_s, axis=0))


@triton.jit
def gradient_kernel(
    z,
    z_stride,
    teacher,
    teacher_stride,
    log_z,
    log_z_draft,
    maximum,
    log_sum,
    s,
    alpha,
    kl,
    mixing,
    losses,
    gradient,
    vocabulary,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    teacher += row * teacher_stride
    gradient += row * vocabulary
    row_alpha = tl.load(alpha + row)
    row_kl = tl.load(kl + row)
    if KIND == "kl":
        of_kl, of_tv, row_loss = 1.0, 0.0, row_kl
    elif KIND == "tv":
        of_kl, of_tv, row_loss = 0.0, 1.0, 1.0 - row_alpha
    elif KIND == "neg_log_alpha":
        positive_alpha = tl.maximum(row_alpha, TINY)
        of_kl, of_tv, row_loss = 0.0, 1.0 / positive_alpha, -tl.log(positive_alpha)
    else:
        of_kl = tl.load(mixing)
        of_tv = 1.0 - of_kl
        row_loss = of_kl * row_kl + of_tv * (1.0 - row_alpha)
    tl.store(losses + row, row_loss)

    m = tl.load(maximum + row)
    l = tl.load(log_sum + row)  # noqa: E741
    row_s = tl.load(s + row)
    sum_draft = tl.load(log_z_draft + row)
    coverage = tl.exp(sum_draft - tl.load(log_z + row))
    for start in range(0, vocabulary, BLOCK):
        q = tl.exp(load(z, start, vocabulary, BLOCK) - m - l)
        p_tilde = tl.exp(load(teacher, start, vocabulary, BLOCK) - sum_draft)
        accepted = tl.where(q <= p_tilde * coverage, 1.0, 0.0)
        dz = of_kl * (q - p_tilde) + of_tv * (q * (row_s - accepted))
        place = start + tl.arange(0, BLOCK)
        tl.store(gradient + place, dz.to(gradient.dtype.element_ty), mask=place < vocabulary)


@triton.jit
def scale_kernel(x, x_stride, factors, factors_stride, scaled, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row * factors_stride).to(tl.float32)
    x += row * x_stride
    scaled += row * vocabulary
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        product = load(x, start, vocabulary, BLOCK) * factor
        tl.store(scaled + place, product.to(scaled.dtype.element_ty), mask=place < vocabulary)


@triton.jit
def load(row, start, vocabulary, BLOCK: tl.constexpr):
    """A block of a row's logits in fp32; past the end -inf, whose probability is zero."""
    place = start + tl.arange(0, BLOCK)
    return tl.load(row + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32)
