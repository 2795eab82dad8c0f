"""Second moments of layer inputs and the factor that GPTQ solves with.

X [n, K] inputs, one row a token    H [K, K] = X^T X / n    U [K, K] upper triangular with H^-1 = U^T U
Y [n, K] the same inputs in the source model, before anything was rounded    D [K, K] = (Y - X)^T X / n, the drift

The factor needs one Cholesky and one triangular inverse. With P the reversal of the columns, P H P = L L^T; then
A = P L P is upper triangular, H = A A^T, and U = A^-1. That is half the work of Cholesky, inverse, Cholesky, and
never forms H^-1, which is where precision goes.
Source: GPTQ (Frantar et al., 2022) for the use of U; the reversal is standard linear algebra.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.processes import all_sum, in_turn

PANELS = 8  # products for the lower triangle of a Hessian: more of them compute less that is not meant, but slower
DIRECT = 512  # columns of a triangle that is inverted by substitution
TILE = 64  # columns of a panel are a multiple of it


class InputStatistics:
    """Running H of one shared input, its drift if asked for, and the largest magnitude of each calibration sample."""

    def __init__(self, columns: int, device: torch.device, with_drift: bool = False):
        self.sum = torch.zeros(columns, columns, device=device)
        self.drift_sum = torch.zeros_like(self.sum) if with_drift else None
        self.tokens = 0
        self._largest: list[Tensor] = []

    def add(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> None:
        """x [B, T, K] or [B * T, K] in the layer's dtype; mask bool [B, T] on x's device, True on real tokens.

        source: the same input in the source model, like x; for the drift.
        """
        x = x.reshape(*mask.shape, x.shape[-1])
        self._largest.append(x.abs().amax(dim=-1).masked_fill(~mask, 0).amax(dim=-1).float())
        rows = x[mask]
        self.tokens += len(rows)
        add_product(self.sum, rows, rows, lower_only=True)
        if self.drift_sum is not None and source is not None:
            add_product(self.drift_sum, source.reshape(x.shape)[mask] - rows, rows)

    def gather(self) -> None:
        """With several processes: what all of them have seen, each its turn of the batches."""
        all_sum(self.sum)
        if self.drift_sum is not None:
            all_sum(self.drift_sum)
        self.tokens = int(all_sum(torch.tensor(self.tokens, device=self.sum.device)))
        self._largest = [x.to(self.sum.device) for x in in_turn([x.cpu() for x in self._largest])]

    def largest_by_sample(self) -> Tensor:
        """Largest |x| of each sample, fp32 [n]; not finite where a sample's activations are not."""
        return torch.cat(self._largest)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """(H, D), fp32 [K, K], H symmetric, D None where it was not asked for. They take the sums' place in memory.

        UserError if no token was seen.
        """
        if self.tokens == 0:
            raise UserError("calibration: not one real token reached this layer; expected some")
        hessian, drift = self.sum, self.drift_sum
        del self.sum, self.drift_sum
        hessian.tril_()
        hessian += hessian.tril(-1).T
        return hessian.div_(self.tokens), None if drift is None else drift.div_(self.tokens)


def add_product(total: Tensor, left: Tensor, right: Tensor, lower_only: bool = False) -> None:
    """total += left^T right in fp32; left and right [n, K] bf16, fp16 or fp32. lower_only: the rest is not meant.

    On a GPU low-precision inputs go through the tensor cores: their products are exact in the fp32 accumulator.
    """
    columns = left.shape[1]
    in_tensor_cores = left.is_cuda and left.dtype != torch.float32
    if not in_tensor_cores:
        left, right = left.float(), right.float()
    width = -(-columns // (PANELS * TILE)) * TILE
    for start in range(0, columns, width):
        stop = min(start + width, columns)
        end = stop if lower_only else columns
        rows, target = left[:, start:stop].T, total[start:stop, :end]
        if in_tensor_cores:
            target += torch.mm(rows, right[:, :end], out_dtype=torch.float32)
        else:
            target.addmm_(rows, right[:, :end])


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, fp32, where three digits will do: on a GPU by tensor cores, in TF32."""
    if not a.is_cuda:
        return a @ b
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        return a @ b
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class Factor:
    """upper: U, fp32 [K, K], of the damped H, its columns in `order`. damping: the share of mean diag(H) it took."""

    upper: Tensor
    damping: float
    order: Tensor

    def times_inverse(self, x: Tensor) -> Tensor:
        """x (H + damping)^-1, fp32 [N, K], the columns of x and of the result where the weight has them."""
        result = torch.empty_like(x)
        result[:, self.order] = product(product(x[:, self.order], self.upper.T), self.upper)
        return result


def factorize(hessian: Tensor, damping: float, order: Tensor | None = None) -> Factor:
    """U of H + damping * mean(diag H) * I; tenfold damping on every failure, at most 1. UserError beyond that.

    hessian: fp32 [K, K], left as it is. A column never seen (diag H = 0) couples to nothing: its weights are rounded.
    order: int64 [K], the columns in the order of solving; None keeps them as they are.
    """
    if order is None:
        order = torch.arange(len(hessian), device=hessian.device)
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    backwards = order.flip(0)
    flipped = hessian[backwards][:, backwards]
    diagonal = flipped.diagonal().clone()
    attempt = damping
    while True:
        torch.add(diagonal, attempt * mean, out=flipped.diagonal())
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed.item() and bool(torch.isfinite(lower.diagonal()).all()):
            break
        if attempt >= 1:
            raise UserError(
                f"Hessian [{len(hessian)}, {len(hessian)}]: not positive definite even with damping {attempt:g}; "
                "are the calibration samples all alike? Give more and different ones"
            )
        attempt = min(attempt * 10, 1.0)
    del flipped  # of the largest inputs every matrix takes a gigabyte
    upper = lower.flip(0, 1)
    del lower
    invert_upper_(upper)
    return Factor(upper, attempt, order)


def invert_upper_(a: Tensor) -> None:
    """The inverse of an upper triangular matrix in its place: halves by themselves, then -A^-1 B C^-1 between them.

    All but the last few columns is products, on a GPU in TF32: U is then good to 1e-4, far below the damping.
    """
    size = len(a)
    if size <= DIRECT:
        identity = torch.eye(size, device=a.device)
        a.copy_(torch.linalg.solve_triangular(a, identity, upper=True))
        return
    half = size // 2
    first, corner, last = a[:half, :half], a[:half, half:], a[half:, half:]
    invert_upper_(first)
    invert_upper_(last)
    corner.copy_(product(product(first, corner), last)).neg_()


def damped_diagonal(hessian: Tensor, damping: float) -> Tensor:
    """diag(H) + damping * mean, fp32 [K]: positive also for columns that calibration never saw."""
    diagonal = hessian.diagonal()
    return diagonal + damping * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
