"""Second moments of layer inputs and the factor that GPTQ solves with.

X [n, K] inputs, one row a token   H [K, K] = X^T X / n   U [K, K] upper triangular with H^-1 = U^T U

The factor needs one Cholesky and one triangular inverse. With P the reversal of the columns, P H P = L L^T; then
A = P L P is upper triangular, H = A A^T, and U = A^-1. That is half the work of Cholesky, inverse, Cholesky, and
never forms H^-1, which is where precision goes.
Source: GPTQ (Frantar et al., 2022) for the use of U; the reversal is standard linear algebra.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from soar_prep.errors import UserError

PANEL = 512  # columns a product; only the lower triangle's panels are formed


class InputStatistics:
    """Running H of one shared input, and the largest magnitude of each calibration sample."""

    def __init__(self, columns: int, device: torch.device):
        self.sum = torch.zeros(columns, columns, device=device)
        self.tokens = 0
        self._largest: list[Tensor] = []

    def add(self, x: Tensor, mask: Tensor) -> None:
        """x [B, T, K] or [B * T, K] in the layer's dtype; mask bool [B, T] on x's device, True on real tokens."""
        x = x.reshape(*mask.shape, x.shape[-1])
        self._largest.append(x.abs().amax(dim=-1).masked_fill(~mask, 0).amax(dim=-1).float())
        rows = x[mask]
        self.tokens += len(rows)
        add_lower_triangle(self.sum, rows)

    def largest_by_sample(self) -> Tensor:
        """Largest |x| of each sample, fp32 [n]; not finite where a sample's activations are not."""
        return torch.cat(self._largest)

    def hessian(self) -> Tensor:
        """H, fp32 [K, K], symmetric. UserError if no token was seen."""
        if self.tokens == 0:
            raise UserError("calibration: not one real token reached this layer; expected some")
        lower = self.sum.tril()
        return (lower + lower.tril(-1).T) / self.tokens


def add_lower_triangle(total: Tensor, x: Tensor) -> None:
    """total += X^T X in fp32, of which only the lower triangle is meant; x [n, K] bf16, fp16 or fp32.

    On a GPU low-precision inputs go through the tensor cores: their products are exact in the fp32 accumulator.
    """
    columns = x.shape[1]
    in_tensor_cores = x.is_cuda and x.dtype != torch.float32
    x = x if in_tensor_cores else x.float()
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        rows = x[:, start:stop].T
        target = total[start:stop, :stop]
        if in_tensor_cores:
            target += torch.mm(rows, x[:, :stop], out_dtype=torch.float32)
        else:
            target.addmm_(rows, x[:, :stop])


@dataclass(frozen=True)
class Factor:
    """upper: U, fp32 [K, K], of the damped H. damping: the share of mean diag(H) that it took."""

    upper: Tensor
    damping: float


def factorize(hessian: Tensor, damping: float) -> Factor:
    """U of H + damping * mean(diag H) * I; tenfold damping on every failure, at most 1. UserError beyond that.

    hessian: fp32 [K, K], left as it is. A column never seen (diag H = 0) couples to nothing: its weights are rounded.
    """
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    attempt = damping
    while True:
        damped = hessian + attempt * mean * torch.eye(len(hessian), device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed.item() and bool(torch.isfinite(lower).all()):
            break
        if attempt >= 1:
            raise UserError(
                f"Hessian [{len(hessian)}, {len(hessian)}]: not positive definite even with damping {attempt:g}; "
                "are the calibration samples all alike? Give more and different ones"
            )
        attempt = min(attempt * 10, 1.0)
    identity = torch.eye(len(hessian), device=hessian.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return Factor(upper, attempt)


def damped_diagonal(hessian: Tensor, damping: float) -> Tensor:
    """diag(H) + damping * mean, fp32 [K]: positive also for columns that calibration never saw."""
    diagonal = hessian.diagonal()
    return diagonal + damping * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
