"""The capture road: a target's states of all samples on disk, so that drafts can be trained without running it.

n tokens of a shard   N tokens of all samples   H hidden size   aux, last: see target.py

    states-00001-of-00042.safetensors   aux [n, 3H], last [n, H] in the compute dtype: whole samples, in their order
    samples.safetensors                 token_ids int32 [N], loss_mask bool [N], borders int64 [samples + 1],
                                        sha256 uint8 [samples, 32]: of each sample's aux and then last
    run.json                            target, layers, dtype, scheme, data, settings; sha256 and samples of each shard

Held-out samples come first, numbered as the document_ids of batches. `CapturedTarget` reads what `capture` wrote.
Shards are written beside the forward passes: hashing and writing one takes about as long as computing it.
Several processes write shards in turn, by part number; the first opens the directory, and finishes it.
"""

import hashlib
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from soar_prep.checkpoint import (
    Checkpoint,
    PartialOutput,
    find_model,
    open_shard,
    partial_directory,
    read_json,
    refuse_existing,
    sha256,
    write_atomically,
)
from soar_prep.eagle3 import decode
from soar_prep.eagle3.data import Batch, Samples, Statistics, load_parts, make_batch
from soar_prep.eagle3.draft import DraftConfig
from soar_prep.eagle3.regenerate import regenerate_parts
from soar_prep.eagle3.target import States, Target, document_spans
from soar_prep.errors import UserError
from soar_prep.report import Progress, environment, plain
from soar_prep.settings import Capture, Compute, Scheme, Wandb
from soar_prep.streaming import StreamedModel
from soar_prep.text import load_tokenizer

GIB = 2**30
SAMPLES = "samples.safetensors"
STEM = "states"
QUIET = 10.0  # seconds between two lines of progress
WRITERS = 2  # shards being hashed and written while the next is computed; each is in memory twice
READERS = 4  # samples of a batch read at once
REMEDY = "copy the directory again, or remove it and run soar-prep capture anew"


def capture(settings: Capture) -> Path:
    """Write the states of settings.target into settings.output and return that directory; dry_run writes nothing.

    Raises UserError for anything the user can mend, most of it before heavy work. Interrupted, it resumes. With
    several processes every one of them calls this.
    """
    processes = PartialState(cpu=settings.compute.device == "cpu")
    output = Path(settings.output).expanduser()
    refuse_existing(output)
    source = Checkpoint(find_model(settings.target, "target"))
    model = StreamedModel(source, settings.compute, settings.trust_remote_code)
    tokenizer = load_tokenizer(source.directory, settings.trust_remote_code)
    aux_layers = choose_layers(settings, model)
    parts = load_parts(settings.data, settings.evaluation, tokenizer, model.context)
    plan = plan_shards(settings, model, *parts)
    if settings.dry_run:
        return output
    if settings.data.regenerate and processes.num_processes > 1:
        raise UserError("data.regenerate=true: the target answers in one process; run soar-prep capture in one")
    hashes = source.check_and_hash()
    target = Target(model, aux_layers, settings.scheme)
    if settings.data.regenerate:
        with target.decoder():  # rounds activations as the scheme says
            answered = regenerate_parts(settings.data, settings.evaluation, tokenizer, model.model, output, hashes)
        parts = load_parts(*answered, tokenizer, model.context)
        plan = plan_shards(settings, model, *parts)
    partial = open_output(settings, target, hashes, parts, len(plan))
    write_shards(settings, target, join(*parts), plan, partial)
    processes.wait_for_everyone()
    if processes.is_main_process:
        finish(settings, target, hashes, parts, plan, partial)
    processes.wait_for_everyone()
    return output


def choose_layers(settings: Capture, model: StreamedModel) -> tuple[int, ...]:
    """settings.aux_layers, or those that a draft for this target reads if nobody says otherwise; UserError if unfit."""
    chosen: dict[str, Any] = {} if settings.aux_layers is None else {"aux_layers": tuple(settings.aux_layers)}
    return DraftConfig.for_target(model.model.config, **chosen).aux_layers


def join(held_out: Samples, samples: Samples) -> Samples:
    """Both parts as one, numbered from the first held-out sample."""
    borders = np.concatenate([held_out.borders, held_out.borders[-1] + samples.borders[1:]])
    token_ids = torch.cat([held_out.token_ids, samples.token_ids])
    loss_mask = torch.cat([held_out.loss_mask, samples.loss_mask])
    return Samples(token_ids, loss_mask, borders, samples.statistics, held_out.first)


def plan_shards(settings: Capture, model: StreamedModel, held_out: Samples, samples: Samples) -> list[range]:
    """The samples of each shard. Says how large all will be; UserError, with the numbers, for what cannot fit."""
    every = join(held_out, samples)
    longest, largest = int(every.lengths.max()), int(every.token_ids.max())
    for name, most in (
        ("compute.batch_tokens", settings.compute.batch_tokens),
        ("shard_tokens", settings.shard_tokens),
    ):
        if longest > most:
            raise UserError(
                f"{name}={most}: the longest sample has {longest} tokens; raise it or cut the samples shorter"
            )
    if largest >= model.vocab_size:
        raise UserError(
            f"{model.checkpoint.directory}: the tokenizer gives token id {largest}, but the model embeds only "
            f"{model.vocab_size} tokens; do both belong together?"
        )
    plan, start = [], 0
    for stop in range(1, len(every) + 1):
        if stop == len(every) or every.borders[stop + 1] - every.borders[start] > settings.shard_tokens:
            plan.append(range(start, stop))
            start = stop
    check_disk(settings, model, every, len(plan))
    return plan


def check_disk(settings: Capture, model: StreamedModel, samples: Samples, shards: int) -> None:
    tokens, a_token = int(samples.borders[-1]), 4 * model.hidden_size * model.dtype.itemsize
    needed = tokens * (a_token + 5) + len(samples) * 40
    partial = partial_directory(Path(settings.output))
    written = sum(path.stat().st_size for path in partial.glob(f"{STEM}-*.safetensors"))
    free = shutil.disk_usage(next(path for path in partial.absolute().parents if path.exists())).free
    if PartialState().is_main_process:
        print(
            f"states: {len(samples):,} samples, {tokens:,} tokens of {a_token:,} bytes, in {shards:,} shards: "
            f"{needed / GIB:.2f} GiB, of which {written / GIB:.2f} GiB are written (disk free: {free / GIB:.2f} GiB)"
            + ("; with the answers in the data, the target's own may be longer" if settings.data.regenerate else ""),
            flush=True,
        )
    if needed - written > free:
        raise UserError(
            f"disk: {(needed - written) / GIB:.2f} GiB needed for the states, {free / GIB:.2f} GiB free; lower "
            "data.samples or data.length, free some, or write the output elsewhere"
        )


def open_output(
    settings: Capture, target: Target, hashes: dict[str, str], parts: tuple[Samples, Samples], shards: int
) -> PartialOutput:
    """The output directory. Its identity is all that the written states depend on: a resumed run must agree with it."""
    processes, output = PartialState(), Path(settings.output).expanduser()
    held_out, samples = parts
    chosen = plain(settings)
    for name in ("target", "output", "compute", "dry_run"):
        del chosen[name]
    for group in ("data", "evaluation"):
        del chosen[group]["path"]  # what the files hold counts, not where they are
    del chosen["evaluation"]["every"]
    identity = chosen | {
        "model": hashes,
        "aux_layers": list(target.aux_layers),
        "dtype": dtype_name(target.model.dtype),
        "batch_tokens": settings.compute.batch_tokens,
        "samples": samples.facts()["sha256"],
        "held_out": held_out.facts()["sha256"],
        "versions": environment(torch.device("cpu"))["packages"],
    }
    with processes.main_process_first():
        if processes.is_main_process:
            return PartialOutput(output, identity, shards, STEM)
        return PartialOutput.joined(output, shards, STEM)


def write_shards(settings: Capture, target: Target, samples: Samples, plan: list[range], output: PartialOutput) -> None:
    """Compute and write this process's shards that are not there yet."""
    processes = PartialState()
    mine = range(len(plan))[processes.process_index :: processes.num_processes]
    missing = [part for part in mine if output.record(part) is None]
    done = len(mine) - len(missing)
    progress = None
    if processes.is_main_process:
        progress = Progress(output.directory, len(mine), "shard", Wandb(), plain(settings), done, QUIET)
    writing: deque[tuple[int, Future[None]]] = deque()

    def wait(most: int) -> None:
        while len(writing) > most:
            tokens, written = writing.popleft()
            written.result()
            if progress is not None:
                progress.step({"tokens": tokens}, f"{tokens:,} tokens")

    with ThreadPoolExecutor(WRITERS) as pool:
        for part in missing:
            tensors = states_of(target, samples, plan[part], settings.compute.batch_tokens)
            lengths = samples.lengths[plan[part]].tolist()
            wait(most=WRITERS - 1)
            writing.append((sum(lengths), pool.submit(write_shard, output, part, tensors, lengths)))
        wait(most=0)
    if progress is not None:
        progress.close({})


def states_of(target: Target, samples: Samples, numbers: range, batch_tokens: int) -> dict[str, Tensor]:
    """aux [n, 3H] and last [n, H] of these samples end to end, on the CPU; samples of similar length run together."""
    lengths, start = samples.lengths, int(samples.borders[numbers.start])
    tokens, width = int(samples.borders[numbers.stop]) - start, target.model.hidden_size
    aux, last = (torch.empty(tokens, n * width, dtype=target.model.dtype) for n in (3, 1))
    waiting = sorted(numbers, key=lambda number: -lengths[number])
    while waiting:
        size = batch_tokens // int(lengths[waiting[0]])
        numbers_here, waiting = waiting[:size], waiting[size:]
        batch = make_batch(samples, [[number] for number in numbers_here], row_tokens=None)
        states = target.states(batch.to(target.model.device))
        refuse_not_finite(states, batch)
        for row, number in enumerate(numbers_here):
            begin, end = (int(border) - start for border in samples.borders[number : number + 2])
            aux[begin:end], last[begin:end] = states.aux[row, : end - begin], states.last[row, : end - begin]
    return {"aux": aux, "last": last}


def refuse_not_finite(states: States, batch: Batch) -> None:
    finite = torch.isfinite(states.aux).all(dim=-1) & torch.isfinite(states.last).all(dim=-1)
    if not finite.all():
        number = int(batch.document_ids[~finite.cpu()].min())
        raise UserError(
            f"sample {number}, counted from the first held-out one: NaN or infinite states of the target; try "
            "compute.dtype=float32, or leave that sample out"
        )


def write_shard(output: PartialOutput, part: int, tensors: dict[str, Tensor], lengths: list[int]) -> None:
    samples = zip(tensors["aux"].split(lengths), tensors["last"].split(lengths), strict=True)
    output.write(part, tensors, {"sha256": [hash_states(aux, last) for aux, last in samples]})


def hash_states(aux: Tensor, last: Tensor) -> str:
    """Of one sample: aux [n, 3H] and last [n, H], contiguous, on the CPU."""
    digest = hashlib.sha256(aux.view(torch.uint8).numpy().data)
    digest.update(last.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def finish(
    settings: Capture,
    target: Target,
    hashes: dict[str, str],
    parts: tuple[Samples, Samples],
    plan: list[range],
    output: PartialOutput,
) -> None:
    """Add the samples and run.json, which has no times, so that a resumed run writes the same bytes; rename."""
    written, every = output.written(), join(*parts)
    digests = b"".join(bytes.fromhex(digest) for shard in written for digest in shard["record"]["sha256"])
    tensors = {
        "token_ids": every.token_ids,
        "loss_mask": every.loss_mask,
        "borders": torch.from_numpy(every.borders),
        "sha256": torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32),
    }
    write_atomically(output.directory / SAMPLES, save(tensors))
    shards = [
        {
            "file": shard["file"],
            "sha256": shard["sha256"],
            "bytes": (output.directory / shard["file"]).stat().st_size,
            "samples": [numbers.start, numbers.stop],
        }
        for shard, numbers in zip(written, plan, strict=True)
    ]
    facts = {
        "settings": plain(settings),
        "environment": environment(target.model.device),
        "target_sha256": hashes,
        "aux_layers": list(target.aux_layers),
        "dtype": dtype_name(target.model.dtype),
        "scheme": settings.scheme.value,
        "held_out": parts[0].facts(),
        "data": parts[1].facts(),
        "samples_sha256": sha256(output.directory / SAMPLES),
        "shards": shards,
    }
    output.add_json("run.json", facts)
    output.finish()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Captured:
    """A directory that `capture` wrote: run.json, both parts of the data, and each sample's sha256, uint8 [n, 32]."""

    directory: Path
    facts: dict[str, Any]
    held_out: Samples
    samples: Samples
    digests: np.ndarray


def open_captured(directory: Path) -> Captured:
    """UserError, with the remedy, if the directory is none of ours, or a file is missing, truncated, or (all but
    the shards, which may be terabytes) altered."""
    directory = directory.expanduser()
    if not (directory / "run.json").exists():
        raise UserError(
            f"states={directory}: no run.json; expected the finished output of soar-prep capture (an interrupted one "
            "ends in .partial: the same command resumes it)"
        )
    facts = read_json(directory / "run.json")
    if "shards" not in facts or "samples_sha256" not in facts:
        raise UserError(f"{directory / 'run.json'}: not of soar-prep capture; give a directory that it wrote")
    for shard in facts["shards"]:
        path = directory / shard["file"]
        found = path.stat().st_size if path.exists() else 0
        if found != shard["bytes"]:
            raise UserError(f"{path}: {found} bytes, expected {shard['bytes']}; {REMEDY}")
    path = directory / SAMPLES
    if not path.exists() or sha256(path) != facts["samples_sha256"]:
        raise UserError(f"{path}: missing or altered; {REMEDY}")
    tensors = load_file(path)
    every = Samples(tensors["token_ids"], tensors["loss_mask"], tensors["borders"].numpy(), Statistics())
    first = facts["held_out"]["rows"]
    held_out, samples = (
        Samples(part.token_ids, part.loss_mask, part.borders, statistics_of(facts[name]), part.first)
        for name, part in (("held_out", every.part(0, first)), ("data", every.part(first, len(every))))
    )
    return Captured(directory, facts, held_out, samples, tensors["sha256"].numpy())


def statistics_of(facts: dict[str, Any]) -> Statistics:
    return Statistics(**{name: value for name, value in facts.items() if name != "sha256"})


class CapturedTarget:
    """A `Target` whose states are read from disk; of the model itself only embeddings, norm and head are loaded.

    A sample's sha256 is checked when it is first read. Checking whole shards would read and hash terabytes before the
    first update; this way nothing is read twice, and nothing that is trained on goes unchecked.
    """

    def __init__(self, captured: Captured, model: StreamedModel, target_sha256: dict[str, str], scheme: Scheme):
        """target_sha256: of the model's files, from Checkpoint.check_and_hash. UserError if the states are another
        target's, or of another scheme or dtype."""
        self.captured, self.model, self.scheme = captured, model, scheme
        facts, where = captured.facts, f"states={captured.directory}"
        if facts["target_sha256"] != target_sha256:
            raise UserError(f"{where}: the states of another target; give the one they are of, or capture this one's")
        wanted = {"scheme": scheme.value, "dtype": dtype_name(model.dtype)}
        for name, option in (("scheme", "scheme"), ("dtype", "compute.dtype")):
            if facts[name] != wanted[name]:
                raise UserError(
                    f"{where}: states of {name} {facts[name]}, but this run has {wanted[name]}; give "
                    f"{option}={facts[name]}, or capture them anew"
                )
        self.aux_layers = tuple(facts["aux_layers"])
        self.every = join(captured.held_out, captured.samples)
        self.firsts = [shard["samples"][0] for shard in facts["shards"]]
        self.is_checked = np.zeros(len(self.every), dtype=bool)
        self.embeddings: Tensor = model.model.get_input_embeddings().get_parameter("weight")
        self.pool = ThreadPoolExecutor(READERS)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings as stored [..., H], without a model's own multiplier: the draft shares the raw table."""
        return F.embedding(token_ids, self.embeddings)

    @torch.no_grad()
    def head(self, rows: Tensor) -> Tensor:
        """Rows of `last` [n, H] -> fp32 logits [n, V], with all that the model does on the way."""
        return self.model.logits(torch.zeros(1, len(rows), dtype=torch.long), rows[None])[0]

    def states(self, batch: Batch) -> States:
        """States of a batch of captured samples, packed or a row each. UserError if a sample was captured otherwise."""
        spans, token_ids, documents = (
            document_spans(batch.document_ids),
            batch.token_ids.cpu(),
            batch.document_ids.cpu(),
        )
        numbers = [int(documents[row, start]) for row, start, _ in spans]
        for number, (row, start, stop) in zip(numbers, spans, strict=True):
            self._refuse_other_tokens(number, token_ids[row, start:stop])
        width, dtype, device = self.model.hidden_size, self.model.dtype, self.model.device
        aux, last = (torch.zeros(*token_ids.shape, n * width, dtype=dtype, device=device) for n in (3, 1))
        for (row, start, stop), read in zip(spans, self.pool.map(self._read, numbers), strict=True):
            aux[row, start:stop], last[row, start:stop] = read
        return States(aux, last)

    @contextmanager
    def decoder(self) -> Iterator[decode.Target]:
        """The whole model as the target of `decode`; its layers are loaded for as long as the `with` lasts."""
        compute = Compute(device=str(self.model.device), dtype=dtype_name(self.model.dtype))
        model = StreamedModel(self.model.checkpoint, compute, self.model.trust_remote_code)
        with Target(model, self.aux_layers, self.scheme).decoder() as decoder:
            yield decoder

    def _refuse_other_tokens(self, number: int, token_ids: Tensor) -> None:
        known = number < len(self.every)
        captured = self.every.token_ids[slice(*self.every.borders[number : number + 2])] if known else token_ids[:0]
        if not torch.equal(captured.long(), token_ids):
            raise UserError(
                f"states={self.captured.directory}: sample {number} of the data is not the one that was captured under "
                "this number; train on the data that came with the states"
            )

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        shard = self.captured.facts["shards"][bisect_right(self.firsts, number) - 1]
        path, borders = self.captured.directory / shard["file"], self.every.borders
        tokens = slice(*(int(borders[n] - borders[shard["samples"][0]]) for n in (number, number + 1)))
        try:
            with open_shard(path) as file:
                aux, last = (file.get_slice(name)[tokens] for name in ("aux", "last"))
        except (UserError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {REMEDY}") from None
        if not self.is_checked[number]:
            if hash_states(aux, last) != self.captured.digests[number].tobytes().hex():
                raise UserError(f"{path}: the states of sample {number} are not those that were written; {REMEDY}")
            self.is_checked[number] = True
        return aux, last
