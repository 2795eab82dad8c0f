"""What the processes of one run (torchrun) hand each other. With a single process everything comes back as it is."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed


def my_rows(rows: int) -> slice:
    """This process's share of `rows` rows, the same number for each but the last ones."""
    size = share_of(rows)
    return slice(PartialState().process_index * size, (PartialState().process_index + 1) * size)


def share_of(rows: int) -> int:
    return -(-rows // PartialState().num_processes)


def all_rows(mine: Tensor, rows: int) -> Tensor:
    """`rows` rows put together from every process's `my_rows` of them, on every process."""
    if PartialState().num_processes == 1:
        return mine
    padded = mine.new_zeros(share_of(rows), *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(PartialState().num_processes)]
    distributed.all_gather(parts, padded)
    return torch.cat(parts)[:rows]


def all_sum(x: Tensor) -> Tensor:
    """x, which now holds the sum over all processes."""
    if PartialState().num_processes > 1:
        distributed.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """x, which now holds the largest of all processes."""
    if PartialState().num_processes > 1:
        distributed.all_reduce(x, distributed.ReduceOp.MAX)
    return x


def in_turn(mine: list[Any]) -> list[Any]:
    """One list out of every process's, whose items were dealt out in turn: item i to process i modulo their number.

    Items are pickled: Python numbers, or tensors on the CPU.
    """
    world = PartialState().num_processes
    if world == 1:
        return mine
    everyone = gather_object([mine])
    return [everyone[i % world][i // world] for i in range(sum(map(len, everyone)))]


def from_main(value: Any) -> Any:
    """The main process's value, on all of them."""
    return broadcast_object_list([value])[0] if PartialState().num_processes > 1 else value
