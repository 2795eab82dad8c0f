"""Conversations to batches: the samples of a run, and the order in which every rank sees them.

    held_out, samples = load_parts(data, evaluation, tokenizer, context)    # in memory, five bytes a token
    for batch, place in batches(samples, batching, place):          # without end; `place` resumes exactly there
        ...

A batch is a row a sample, padded, or packed rows of several samples each. Either way document_ids tells samples
apart: attention must not cross from one into another, and neither must a prediction.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soar_prep.eagle3.supervision import Row, chat_rows, make_row, text_rows
from soar_prep.errors import UserError
from soar_prep.settings import Data, HeldOut, Text, TextSource
from soar_prep.text import builtin_documents, check_source, load_windows, read_rows, row_text

BUCKET = 4096  # samples sorted by length at a time: enough for little padding, few enough for another mix each epoch


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens. token_ids, positions, document_ids int64 [B, T]; loss_mask bool [B, T].

    loss_mask: the token is the assistant's, so it is worth predicting; never a document's first token.
    positions: 0, 1, ... within each document. document_ids: the sample's number in the data, -1 on padding.
    Padding stands on the right: token 0, position 0, loss_mask False.
    """

    token_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_ids: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.token_ids.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.document_ids.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Statistics:
    """What became of the rows that were read. rows, tokens, supervised: what is trained on.

    truncated: rows cut at the length, and cut_tokens what that took. dropped: rows without a supervised token (after
    the cut), and dropped_tokens. longest: tokens of the longest row before the cut.
    """

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    cut_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    longest: int = 0


@dataclass(frozen=True)
class Samples:
    """All samples end to end: token_ids int32 [N], loss_mask bool [N]; sample i is borders[i] to borders[i + 1].

    first: the number of sample 0 in the whole data, of which these may be a part; document_ids count from it.
    domains: of each sample, "" where its row names none; empty for states from disk.
    """

    token_ids: Tensor
    loss_mask: Tensor
    borders: np.ndarray  # int64 [n + 1]
    statistics: Statistics
    first: int = 0
    domains: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.borders) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.borders)

    def part(self, start: int, stop: int) -> "Samples":
        """Samples start to stop - 1, which keep their numbers."""
        tokens = slice(int(self.borders[start]), int(self.borders[stop]))
        loss_mask, borders = self.loss_mask[tokens], self.borders[start : stop + 1] - self.borders[start]
        counts = {"rows": stop - start, "tokens": len(loss_mask), "supervised": int(loss_mask.sum())}
        statistics = replace(self.statistics, **counts)
        domains = self.domains[start:stop]
        return Samples(self.token_ids[tokens], loss_mask, borders, statistics, self.first + start, domains)

    def facts(self) -> dict[str, Any]:
        """What a run keeps of its data: two runs with the same sha256 see the same samples in the same order."""
        digest = hashlib.sha256()
        for part in (self.token_ids.numpy(), self.loss_mask.numpy(), self.borders):
            digest.update(part.tobytes() + b"|")
        return asdict(self.statistics) | {"sha256": digest.hexdigest()}


@dataclass(frozen=True)
class Batching:
    """How samples become batches. batch_tokens: tokens a batch at the most, padding included.

    row_tokens: pack several samples into each row of this many tokens; None for one sample a row, rows of similar
    length together. seed: the order. rank, world_size: this process among those that share the data.
    """

    batch_tokens: int
    row_tokens: int | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Place:
    """Where in the stream of batches: `index` batches of this epoch are done, the same number on every rank."""

    epoch: int = 0
    index: int = 0


def load_parts(data: Data, evaluation: HeldOut, tokenizer: Any, context: int) -> tuple[Samples, Samples]:
    """(held-out samples, samples to train on), numbered through from the first held-out one.

    Held out are the samples of evaluation.path, or of the builtin text's other part, or else the first of the data.
    """
    wanted = evaluation.samples
    if evaluation.path is None and data.source is not TextSource.builtin:
        both = load_samples(replace(data, samples=data.samples + wanted), tokenizer, context, "data")
        if len(both) <= wanted:
            raise UserError(
                f"data.path={data.path}: {len(both)} samples, of which evaluation.samples={wanted} are held out; none "
                "is left to train on; give more data, or fewer to hold out"
            )
        return both.part(0, wanted), both.part(wanted, len(both))
    other = replace(data, samples=wanted, path=evaluation.path)
    held_out = load_samples(other, tokenizer, context, "evaluation", held_out=True)
    return held_out, replace(load_samples(data, tokenizer, context, "data"), first=len(held_out))


def load_samples(settings: Text, tokenizer: Any, context: int, name: str, held_out: bool = False) -> Samples:
    """The configured data, cut at settings.length. UserError names the option, the file, the line and the remedy.

    chat: the assistant's tokens are supervised. builtin, text and tokens: all are. context: the longest sequence the
    target takes, tokens. name: the option group, for messages. held_out picks the other part of the builtin text.
    """
    check_source(settings, context, name)
    if settings.source is TextSource.chat:
        samples = collect(chat_rows(settings, tokenizer))
        check_supervision(samples.statistics, settings, name)
        return samples
    if settings.source is TextSource.tokens:
        windows = load_windows(settings, tokenizer, context, name)
        return collect(make_row(ids, [True] * len(ids), settings.length) for ids in windows.token_ids.numpy())
    documents: Iterable[str] = builtin_documents(held_out)
    if settings.source is TextSource.text:
        documents = (row_text(where, row) for where, row in read_rows(str(settings.path), settings.seed))
    rows = text_rows(documents, tokenizer, settings.length)
    samples = collect(islice(rows, settings.samples))
    if not len(samples):
        raise UserError(f"{name}.path={settings.path}: the text is empty; expected some words")
    return samples


def collect(rows: Iterable[Row]) -> Samples:
    """The rows that have a supervised token, end to end; the others are counted."""
    kept: list[Row] = []
    truncated = cut_tokens = dropped = dropped_tokens = longest = 0
    for row in rows:
        longest = max(longest, row.uncut)
        truncated += row.uncut > len(row.token_ids)
        cut_tokens += row.uncut - len(row.token_ids)
        if row.loss_mask.any():
            kept.append(row)
        else:
            dropped += 1
            dropped_tokens += len(row.token_ids)
    borders = np.cumsum([0] + [len(row.token_ids) for row in kept], dtype=np.int64)
    token_ids = np.concatenate([np.empty(0, np.int32)] + [row.token_ids for row in kept])
    loss_mask = np.concatenate([np.empty(0, bool)] + [row.loss_mask for row in kept])
    statistics = Statistics(
        len(kept), len(token_ids), int(loss_mask.sum()), truncated, cut_tokens, dropped, dropped_tokens, longest
    )
    domains = tuple(row.domain for row in kept)
    return Samples(torch.from_numpy(token_ids), torch.from_numpy(loss_mask), borders, statistics, domains=domains)


def check_supervision(found: Statistics, settings: Text, name: str) -> None:
    """UserError if there is nothing to learn, or if nothing tells prompts from answers."""
    if not found.rows:
        raise UserError(
            f"{name}.path={settings.path}: none of {found.dropped} conversations has a token of the assistant among "
            f"its first {settings.length} ({found.truncated} were cut there); expected answers of role assistant "
            f"after a prompt; look at the roles, or raise {name}.length"
        )
    if found.supervised == found.tokens - found.rows:  # the first of a row never counts
        raise UserError(
            f"{name}.path={settings.path}: the chat template gives every token of {found.rows} conversations to the "
            "assistant, so prompts would be trained on like answers; mend the template, or ask for that with "
            f"{name}.source=text"
        )


def batches(samples: Samples, batching: Batching, place: Place = Place()) -> Iterator[tuple[Batch, Place]]:
    """Batches of this rank from `place` on, epoch after epoch, each with the place that follows it.

    Started at the place that came with a batch, with the same samples and batching, the stream goes on as if it had
    not been left.
    """
    epoch, index = place.epoch, place.index
    while True:
        plan = plan_epoch(samples, batching, epoch)
        if index > len(plan):
            raise UserError(f"resuming at batch {index} of an epoch of {len(plan)}: the data or its batches changed")
        for rows in plan[index:]:
            index += 1
            yield make_batch(samples, rows, batching.row_tokens), Place(epoch, index)
        epoch, index = epoch + 1, 0


def plan_epoch(samples: Samples, batching: Batching, epoch: int) -> list[list[list[int]]]:
    """Batches of this rank in an epoch: each its rows, each row the samples in it. Their number is every rank's.

    Ranks share no sample. A rank more than one may leave out samples, fewer than there are ranks and others each
    epoch, where the batches cannot be split into equal numbers.
    """
    lengths = samples.lengths
    width = batching.row_tokens or batching.batch_tokens
    if lengths.max() > width or width > batching.batch_tokens:
        raise UserError(
            f"batch_tokens={batching.batch_tokens}, rows of {width} tokens: the longest sample has {lengths.max()}; "
            "a sample must fit into a row and a row into a batch; raise batch_tokens or cut the samples shorter"
        )
    random = np.random.default_rng([batching.seed, epoch])
    order = random.permutation(len(samples))
    planned: list[list[list[int]]] = []
    for start in range(0, len(order), BUCKET):
        bucket = order[start : start + BUCKET]
        bucket = bucket[np.argsort(-lengths[bucket], kind="stable")]  # the longest first
        if batching.row_tokens:
            rows = pack_rows(bucket, lengths, batching.row_tokens)
        else:
            rows = [[int(sample)] for sample in bucket]
        while rows:
            size = batching.batch_tokens // (batching.row_tokens or int(lengths[rows[0][0]]))
            planned.append(rows[:size])
            rows = rows[size:]
    planned = [planned[i] for i in random.permutation(len(planned))]
    planned = split_evenly(planned, batching.world_size)
    if not planned:
        raise UserError(f"{len(samples)} samples do not give each of {batching.world_size} ranks a batch; add data")
    return planned[batching.rank :: batching.world_size]


def pack_rows(ordered: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best fit: each sample in turn goes to the row that it leaves the least room in."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for sample in ordered.tolist():
        need = int(lengths[sample])
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - need, row))
    return rows


def split_evenly(planned: list[list[list[int]]], parts: int) -> list[list[list[int]]]:
    """Halve the batches of most rows until `parts` divides their number; leave out the last where none can be."""
    planned = list(planned)
    while len(planned) % parts:
        widest = max(range(len(planned)), key=lambda i: len(planned[i]))
        rows = planned[widest]
        if len(rows) == 1:
            return planned[: len(planned) - len(planned) % parts]
        planned[widest : widest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return planned


def make_batch(samples: Samples, rows: list[list[int]], row_tokens: int | None) -> Batch:
    lengths = samples.lengths
    width = row_tokens or max(int(lengths[row].sum()) for row in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    document_ids = torch.full((len(rows), width), -1, dtype=torch.int64)
    for i, row in enumerate(rows):
        at = 0
        for sample in row:
            begin, end = int(samples.borders[sample]), int(samples.borders[sample + 1])
            here = slice(at, at + end - begin)
            token_ids[i, here] = samples.token_ids[begin:end]
            loss_mask[i, here] = samples.loss_mask[begin:end]
            positions[i, here] = torch.arange(end - begin)
            document_ids[i, here] = samples.first + sample
            at = here.stop
    return Batch(token_ids, loss_mask, positions, document_ids)
