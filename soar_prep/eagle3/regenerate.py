"""The target's own answers in place of those in the data: a draft learns best what it will have to guess.

    {"row": 17, "cut": [false, true], "messages": [{"role": "user", "content": ...}, ...]}        a line a conversation

row: the line or row of the source. cut: whether each answer was stopped at its limit, not by the target. An answer
follows on the regenerated ones before it. The model's generation_config (top-p, penalties) does not count, but for
where it stops: the draft is to learn the target, and temperature alone.

Lines stand so that `read_rows`, which shuffles them by data.seed, gives the conversations in the order of the source:
the first ones, which are held out, are the same. The file grows by whole groups of conversations that are answered
together; a run that is started again drops half a group and goes on, to the same bytes.
"""

import fcntl
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from soar_prep.checkpoint import read_json, write_json
from soar_prep.eagle3.supervision import stop_ids
from soar_prep.errors import UserError
from soar_prep.report import environment
from soar_prep.settings import Data, HeldOut, TextSource
from soar_prep.text import check_chat_template, check_source, conversation, read_rows, render_chat

TOGETHER = 32  # conversations answered at once
QUIET = 10.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Conversation:
    """row: its line or number in the source, which `where` tells in words. turns: role and content of each."""

    where: str
    row: int
    turns: list[dict[str, str]]


def regenerate_parts(
    data: Data, evaluation: HeldOut, tokenizer: Any, model: PreTrainedModel, output: Path, target_sha256: dict[str, str]
) -> tuple[Data, HeldOut]:
    """What `load_parts` is to be given instead. The answers stay beside the output, as <output>.answers.jsonl."""
    output = output.expanduser()
    answers = output.with_name(output.name + ".answers.jsonl")
    if evaluation.path is None:
        count = data.samples + evaluation.samples
        return regenerate(data, count, tokenizer, model, answers, target_sha256), evaluation
    other = replace(data, path=evaluation.path)
    held_out = output.with_name(output.name + ".held_out_answers.jsonl")
    other = regenerate(other, evaluation.samples, tokenizer, model, held_out, target_sha256)
    answered = regenerate(data, data.samples, tokenizer, model, answers, target_sha256)
    return answered, replace(evaluation, path=other.path)


@torch.no_grad()
def regenerate(
    data: Data,
    count: int,
    tokenizer: Any,
    model: PreTrainedModel,
    path: Path,
    target_sha256: dict[str, str],
    together: int = TOGETHER,
) -> Data:
    """The first `count` conversations of the data, answered by the model, in `path`, a .jsonl file; Data to read it.

    target_sha256: of the model's files; it and the settings are kept beside the file, and a file of others is refused.
    Of a conversation longer than data.length only turns that begin before that are kept. One process at a time.
    """
    if data.source is not TextSource.chat:
        raise UserError(f"data.regenerate=true: data.source={data.source.value} has no answers; expected chat")
    if not model.can_generate():
        raise UserError(f"data.regenerate=true: {type(model).__name__} has no generate method of transformers")
    check_source(data, context_of(model), "data")
    check_chat_template(tokenizer)
    conversations = in_file_order(read_conversations(data, count), data.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path) as file:
        check_identity(path, identity(data, conversations, tokenizer, target_sha256, together))
        done = keep_whole_groups(file, path, conversations, together)
        started = shown_at = time.monotonic()
        for start in range(done, len(conversations), together):
            group = conversations[start : start + together]
            append(file, path, answer(group, data, tokenizer, model))
            now, stop = time.monotonic(), start + len(group)
            if now - shown_at >= QUIET or stop == len(conversations):
                remaining = (now - started) / (stop - done) * (len(conversations) - stop)
                print(
                    f"answers {stop:,}/{len(conversations):,} conversations, {now - started:.0f} s, about "
                    f"{remaining:.0f} s to go",
                    flush=True,
                )
                shown_at = now
    return replace(data, path=str(path), regenerate=False)


def read_conversations(data: Data, count: int) -> list[Conversation]:
    rows = ((where, conversation(where, row)) for where, row in read_rows(str(data.path), data.seed))
    return [Conversation(where, int(where.rsplit(" ", 1)[1]), turns) for where, turns in islice(rows, count)]


def in_file_order(conversations: list[Conversation], seed: int) -> list[Conversation]:
    """The order from which `read_rows` shuffles them back."""
    places = list(range(len(conversations)))
    random.Random(seed).shuffle(places)
    ordered = list(conversations)
    for place, each in zip(places, conversations, strict=True):
        ordered[place] = each
    return ordered


def identity(
    data: Data, conversations: list[Conversation], tokenizer: Any, target_sha256: dict[str, str], together: int
) -> dict[str, Any]:
    """All that the answers depend on: what the source holds counts, not where it is."""
    digest = hashlib.sha256()
    for each in conversations:
        digest.update(json.dumps([each.row, each.turns]).encode())
    return {
        "conversations": digest.hexdigest(),
        "target": target_sha256,
        "chat_template": hashlib.sha256(str(tokenizer.get_chat_template()).encode()).hexdigest(),
        "length": data.length,
        "seed": data.seed,
        "answer_tokens": data.answer_tokens,
        "temperature": data.temperature,
        "together": together,
        "versions": environment(torch.device("cpu"))["packages"],
    }


def check_identity(path: Path, wanted: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".identity.json")
    if not beside.exists():
        if path.stat().st_size:
            raise UserError(f"{path}: no {beside.name} beside it tells whose answers these are; move the file away")
        write_json(beside, wanted)
    begun = read_json(beside)
    changed = [key for key in wanted if wanted[key] != begun.get(key)]
    if changed:
        raise UserError(
            f"{path}: answers with another {', '.join(changed)}; give the same options to resume, or remove the file "
            f"and {beside.name} to start anew"
        )


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """The file, made if need be, to read and write; UserError while another process has it."""
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path}: another run is writing it; wait for it or stop it") from None
        yield file


def keep_whole_groups(file: BinaryIO, path: Path, conversations: list[Conversation], together: int) -> int:
    """Drop what comes after the last whole group, and say how many conversations are left."""
    file.seek(0)
    lines = file.readlines()
    whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
    if whole > len(conversations):
        raise UserError(f"{path}: {whole} lines, but {len(conversations)} conversations; remove the file to start anew")
    done = whole if whole == len(conversations) else whole - whole % together
    for number, (line, expected) in enumerate(zip(lines[:done], conversations, strict=False), 1):
        try:
            row = json.loads(line)["row"]
        except (ValueError, KeyError, TypeError):
            row = None
        if row != expected.row:
            raise UserError(
                f"{path}, line {number}: row {row}, expected {expected.row}; the file is damaged, remove it to start "
                "anew"
            )
    file.truncate(sum(map(len, lines[:done])))
    return done


def append(file: BinaryIO, path: Path, answered: list[dict[str, Any]]) -> None:
    try:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in answered).encode())
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def answer(group: Sequence[Conversation], data: Data, tokenizer: Any, model: PreTrainedModel) -> list[dict[str, Any]]:
    """The lines of these conversations. The n-th answers of all of them are generated together."""
    written: list[list[dict[str, str]]] = [[] for _ in group]
    cut: list[list[bool]] = [[] for _ in group]
    unfinished = list(range(len(group)))
    while unfinished:
        prompts: dict[int, list[int]] = {}
        for i in unfinished:
            copy_turns(group[i].turns, written[i])
            if len(written[i]) < len(group[i].turns):
                text = render_chat(group[i].where, written[i], tokenizer, prompt=True)
                ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
                if len(ids) < data.length:  # else the samples are cut before this answer
                    prompts[i] = ids
        unfinished = list(prompts)
        for batch in split_prompts(prompts, data, context_of(model)):
            seeds = [seed_of(data.seed, group[i].row, len(written[i])) for i in batch]
            answers = generate([prompts[i] for i in batch], seeds, data, tokenizer, model)
            for i, (ids, was_cut) in zip(batch, answers, strict=True):
                content = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                written[i].append({"role": "assistant", "content": content})
                cut[i].append(was_cut)
    return [{"row": each.row, "cut": cut[i], "messages": written[i]} for i, each in enumerate(group)]


def copy_turns(source: list[dict[str, str]], written: list[dict[str, str]]) -> None:
    """Add the turns up to the next answer. One that opens the conversation stays: no prompt leads to it."""
    while len(written) < len(source) and (not written or source[len(written)]["role"] != "assistant"):
        written.append(source[len(written)])


def context_of(model: PreTrainedModel) -> int:
    return model.config.get_text_config().max_position_embeddings


def limit_of(prompt: list[int], data: Data) -> int:
    """Tokens of an answer at the most: what is beyond data.length would be cut anyway."""
    return min(data.answer_tokens, data.length - len(prompt))


def split_prompts(prompts: dict[int, list[int]], data: Data, context: int) -> Iterator[list[int]]:
    """Numbers of prompts to run together: all, unless the longest one's row would run on beyond the model's context."""
    ordered = sorted(prompts, key=lambda i: (len(prompts[i]), i))
    while ordered:
        limit = limit_of(prompts[ordered[0]], data)
        fitting = [i for i in ordered if len(prompts[i]) + limit <= context]
        yield fitting
        ordered = ordered[len(fitting) :]


def seed_of(seed: int, row: int, turn: int) -> int:
    """Of one answer's draws: they do not depend on what else is answered, or was."""
    return int.from_bytes(hashlib.sha256(f"{seed} {row} {turn}".encode()).digest()[:7], "big")


def generate(
    prompts: list[list[int]], seeds: list[int], data: Data, tokenizer: Any, model: PreTrainedModel
) -> list[tuple[list[int], bool]]:
    """The answer to each prompt, without the token that ended it, and whether it was cut."""
    longest, limits = max(map(len, prompts)), [limit_of(prompt, data) for prompt in prompts]
    stops = all_stops(tokenizer, model)
    token_ids = torch.full((len(prompts), longest), stops[0])
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(limits), eos_token_id=stops, pad_token_id=stops[0], bos_token_id=None
    )
    untyped: Any = model  # transformers gives the method no type
    draws = [Draw(data.temperature, seeds, model.device)] if data.temperature else []
    with generating_by(model, config):
        generated = untyped.generate(
            input_ids=token_ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=LogitsProcessorList(draws),
        )
    answers = []
    for ids, limit in zip(generated[:, longest:].tolist(), limits, strict=True):
        end = next((at for at, token in enumerate(ids[:limit]) if token in stops), None)
        answers.append((ids[:limit] if end is None else ids[:end], end is None))
    return answers


def all_stops(tokenizer: Any, model: PreTrainedModel) -> list[int]:
    """Tokens at which an answer ends: the tokenizer's control tokens, and the model's own."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    more = [own] if isinstance(own, int) else own or []
    return sorted({*stop_ids(tokenizer), *more})


@contextmanager
def generating_by(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """While this lasts the model's own generation settings do not fill in what `config` leaves open."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class Draw(LogitsProcessor):
    """Scores whose largest is a draw from softmax(scores / temperature), by a generator for each row.

    The largest of p_v / e_v, with e_v independent and exponential, is v with probability p_v.
    """

    def __init__(self, temperature: float, seeds: list[int], device: torch.device):
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = [
            torch.empty_like(row).exponential_(generator=g) for row, g in zip(scores, self.generators, strict=True)
        ]
        return scores / self.temperature - torch.stack(drawn).log()
