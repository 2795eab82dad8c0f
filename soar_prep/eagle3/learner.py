"""One update of a draft after another: weights, gradients, optimizer; on one device, or spread over many.

Weights, their gradients across batches, and AdamW's state are fp32. A forward pass computes in the compute dtype, with
weights rounded to it once, or to NVFP4 from the update `turn` on. No autocast. With several processes:

ddp    every process has all of it; gradients are averaged
fsdp   every process has a part of weights, gradients and optimizer state; a forward pass gathers the weights

The loss is already this process's share of a mean over all of them (loss.py), to be summed, while both wrappers
average: hence the factor of the number of processes.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.draft import Draft
from soar_prep.eagle3.nvfp4 import measuring_input_scales, prepare, start_rounding
from soar_prep.eagle3.ttt import Result, SupervisedTeacher, ttt_loss
from soar_prep.qat.linear import rounded_weights
from soar_prep.settings import DraftFormat, Loss, Optimizer, Parallel, Qat

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Lesson:
    """A batch with what the target says of it: aux [B, T, 3H], embeddings' function and the teacher's rows."""

    batch: Batch
    aux: Tensor
    taught: SupervisedTeacher


@dataclass(frozen=True)
class Update:
    """What an update did, over all processes: loss, learning rate, norm of the gradient; per step of the training-time
    test lambda, mean alpha and accuracy."""

    loss: float
    learning_rate: float
    gradient_norm: float
    mixing: list[float]
    alpha: list[float]
    accuracy: list[float]


class Lessons(nn.Module):
    """The draft and its loss as one module, which is what the wrappers want."""

    def __init__(self, draft: Draft, loss: Loss, embed: Any):
        super().__init__()
        self.draft, self.loss, self.embed = draft, loss, embed

    def forward(self, lesson: Lesson) -> tuple[Tensor, Result]:
        loss = self.loss
        result = ttt_loss(
            self.draft,
            self.embed,
            lesson.aux,
            lesson.batch,
            lesson.taught,
            loss.kind,
            loss.eta,
            loss.steps,
            loss.decay,
            sum_over_ranks=lambda total: reduce(total, "sum"),
        )
        return result.loss, result  # the wrappers look for a tensor to hang their hooks on


class InDtype(nn.Module):
    """A module run with its weights rounded to a dtype, or to NVFP4 as `qat` says where an NVFP4Linear is to be so;
    their gradients arrive in the weights' own dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, qat: Qat | None = None):
        super().__init__()
        self.inner, self.dtype, self.qat = inner, dtype, qat or Qat()

    def forward(self, *arguments: Any) -> Any:
        weights = rounded_weights(self.inner, self.dtype, self.qat.scale_rule, self.qat.scale_error)
        return functional_call(self.inner, weights, arguments)


class Learner:
    """A draft in training. The draft handed in is taken over: its weights become fp32, under fsdp sharded."""

    def __init__(
        self,
        draft: Draft,
        embed: Any,
        loss: Loss,
        optimizer: Optimizer,
        updates: int,
        dtype: torch.dtype,
        parallel: Parallel = Parallel.ddp,
        checkpointing: bool = False,
        qat: Qat | None = None,
    ):
        """updates: the length of the schedule. dtype: of the forward pass. The draft is on its device already."""
        self.processes, self.settings, self.updates, self.done = PartialState(), optimizer, updates, 0
        self.qat, self.input_scales = qat or Qat(), dict[str, Tensor]()
        self.turn = self.qat.turn(updates)
        self.draft = draft.float()
        draft.checkpointing = checkpointing
        prepare(draft, self.qat)
        device = draft.fc.weight.device
        lessons = Lessons(draft, loss, embed)
        self.module: nn.Module = InDtype(lessons, dtype, self.qat)
        if self.processes.num_processes > 1 and parallel is Parallel.fsdp:
            # gathered as they are, or what NVFP4 is rounded from would have been rounded before
            gathered = dtype if self.qat.format is DraftFormat.none else None
            policy = MixedPrecisionPolicy(gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(self.module, mp_policy=policy, reshard_after_forward=False)
        elif self.processes.num_processes > 1:
            devices = [device] if device.type == "cuda" else None
            self.module = DistributedDataParallel(self.module, device_ids=devices)
        self.parameters = dict(draft.named_parameters())
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()} if optimizer.ema else {}

    def update(self, lessons: Iterable[Lesson]) -> Update | None:
        """One update from `settings.accumulate` lessons; None, and nothing changed, if the gradient is not finite."""
        count, processes = self.settings.accumulate, self.processes.num_processes
        sums = torch.zeros((), dtype=torch.float64)
        for number, lesson in enumerate(lessons, 1):
            with nullcontext() if number == count else self._without_reducing():
                loss, result = self.module(lesson)
                (loss * (processes / count)).backward()
            sums = sums.to(loss.device) + figures_of(result)
        norm = whole(nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip))
        loss_sum, *figures, gradient_norm = torch.cat([reduce(sums, "sum"), norm.double()[None]]).tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(gradient_norm)):
            self.optimizer.zero_grad()
            return None
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        if self.ema:
            weights = [weight.detach() for weight in self.parameters.values()]
            torch._foreach_lerp_(list(self.ema.values()), weights, 1 - self.settings.ema)
        steps = len(figures) // 4
        rows, mixing, alpha, correct = (figures[at : at + steps] for at in range(0, 4 * steps, steps))
        return Update(
            loss_sum / count,
            rate,
            gradient_norm,
            [x / (count * processes) for x in mixing],  # the same on all
            [x / max(n, 1) for x, n in zip(alpha, rows, strict=True)],
            [x / max(n, 1) for x, n in zip(correct, rows, strict=True)],
        )

    def learning_rate(self) -> float:
        """Of the next update. Rounding that goes on with the run's schedule costs none of its updates their effect."""
        top, warmup, own = self.settings.learning_rate, self.settings.warmup, self.qat.learning_rate
        if own is None and self.qat.start_from:
            return learning_rate(top / 10, warmup, self.done, self.updates)
        if own is None:
            return learning_rate(top, warmup, self.done, self.updates)
        if self.done < self.turn:
            return learning_rate(top, warmup, self.done, self.turn)
        return learning_rate(own, warmup, self.done - self.turn, self.updates - self.turn)

    @property
    def is_rounding(self) -> bool:
        return bool(self.input_scales)

    @torch.no_grad()
    def start_rounding(self, lessons: Iterable[Lesson]) -> None:
        """From now on run under NVFP4 numbers, with input scales that fit these lessons."""
        with measuring_input_scales(self.draft) as scales:
            for lesson in lessons:
                self.module(lesson)
        self._take_scales(scales)

    def _take_scales(self, scales: dict[str, Tensor]) -> None:
        self.input_scales = scales
        if scales:
            start_rounding(self.draft, scales)

    def _without_reducing(self) -> AbstractContextManager[None]:
        """Gradients of all but the last batch of an update stay where they are."""
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()  # fsdp reduces each: the parts of the others have no room here

    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate and write, fp32 and whole, on every process: the average's if there is one."""
        return {name: whole(weight.detach()) for name, weight in (self.ema or self.parameters).items()}

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on bit for bit, whole, on the CPU. Every process must call it."""
        held: dict[str, dict[str, Tensor]] = {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}, "ema": dict(self.ema)}
        for name, weight in self.parameters.items():
            held["weight"][name] = weight.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                if self.done:
                    held[key][name] = self.optimizer.state[weight][key]
        tensors = {
            kind: {name: whole(t).to("cpu", copy=True) for name, t in values.items()} for kind, values in held.items()
        }
        scales = {name: scale.cpu() for name, scale in self.input_scales.items()}
        return {"done": self.done, "input_scales": scales, **tensors}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take up where `state()` was taken, by this or another number of processes."""
        self.done = state["done"]
        self._take_scales(state["input_scales"])
        for name, weight in self.parameters.items():
            weight.copy_(part_like(state["weight"][name], weight))
            if name in self.ema:
                self.ema[name].copy_(part_like(state["ema"][name], weight))
            if self.done:
                count = torch.tensor(float(self.done), device=weight.device)
                moments = {key: part_like(state[key][name].clone(), weight) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[weight] = {"step": count, **moments}


def learning_rate(top: float, warmup_share: float, done: int, updates: int) -> float:
    """Of the update after `done`: a straight rise over the warm-up, then a cosine to zero after the last."""
    warmup = round(warmup_share * updates)
    if done < warmup:
        return top * (done + 1) / warmup
    through = (done - warmup) / max(updates - warmup, 1)
    return top * 0.5 * (1 + math.cos(math.pi * min(through, 1.0)))


def figures_of(result: Result) -> Tensor:
    """fp64 [1 + 4 K]: the loss, then of the K steps rows, lambda, sum of alpha, sum of correct; for one transfer."""
    steps = [step.figures for step in result.steps]
    columns = [
        [alpha.new_tensor(len(alpha)) for alpha in (step.alpha for step in steps)],
        [step.mixing for step in steps],
        [step.alpha.sum() for step in steps],
        [step.correct.sum() for step in steps],
    ]
    return torch.stack([x.double() for x in (result.loss.detach(), *(x for column in columns for x in column))])


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all processes; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` on the device of `like`, and sharded as it is: this process's part."""
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
