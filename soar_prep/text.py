"""Text to token windows: calibration and evaluation of both roads start here.

Four sources. builtin: prose and code that every Python ships, split so that evaluation never sees what calibration
saw. chat: conversations through the tokenizer's chat template, one a window. text: documents, packed. tokens: ready
ids. Windows are padded on the right; under causal attention padding there cannot touch a real token.
"""

import hashlib
import json
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.settings import Text, TextSource

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system", "tool": "tool"}


@dataclass(frozen=True)
class Windows:
    """token_ids int64 [n, T], padded on the right with 0; mask bool [n, T] is True on real tokens.

    truncated: how many samples were cut at T tokens.
    """

    token_ids: Tensor
    mask: Tensor
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_tokens(self) -> int:
        return int(self.mask.sum())

    def sha256(self) -> str:
        """Hash of the real token ids and their window borders."""
        digest = hashlib.sha256()
        for ids, mask in zip(self.token_ids, self.mask, strict=True):
            digest.update(ids[mask].numpy().astype("<i8").tobytes() + b"|")
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What run.json keeps of the text: enough to tell whether two runs saw the same."""
        return {"samples": len(self), "tokens": self.n_tokens, "truncated": self.truncated, "sha256": self.sha256()}

    def batches(self, tokens: int) -> Iterator[slice]:
        """Slices of windows that hold at most `tokens` tokens, padding included (one window at the least)."""
        size = max(1, tokens // self.token_ids.shape[1])
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))


def load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory}: no tokenizer that transformers can load ({reason})") from None


def load_windows(settings: Text, tokenizer: Any, context: int, name: str, held_out: bool = False) -> Windows:
    """Windows of the configured text. UserError names the option, the file, the line and the remedy.

    context: the longest sequence the model takes, tokens. name: the option group, for messages. held_out picks the
    other part of the builtin text.
    """
    check_source(settings, context, name)
    if settings.source is TextSource.tokens:
        return read_token_file(Path(str(settings.path)).expanduser(), settings, len(tokenizer))
    if settings.source is TextSource.chat:
        return chat_windows(settings, tokenizer)
    if settings.source is TextSource.builtin:
        return pack(builtin_documents(held_out), settings, tokenizer)
    documents = (row_text(where, row) for where, row in read_rows(str(settings.path), settings.seed))
    return pack(documents, settings, tokenizer)


def check_source(settings: Text, context: int, name: str) -> None:
    if settings.length > context:
        raise UserError(f"{name}.length={settings.length}: the model's context is {context} tokens; give at most that")
    if settings.source is not TextSource.builtin and not settings.path:
        raise UserError(f"{name}.source={settings.source.value}: needs a file or a dataset id, {name}.path=...")


def builtin_documents(held_out: bool) -> Iterator[str]:
    """Python's reference topics and standard library sources, every fifth of them held out.

    Topics repeat each other; a held-out document comes without the paragraphs that the others hold too.
    """
    seen = {part for document in builtin_documents(False) for part in document.split("\n\n")} if held_out else set()
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(library.glob("*.py"))
    prose = (text for i, text in enumerate(topics) if (i % 5 == 0) == held_out)
    code = (read_text(path)[:20_000] for i, path in enumerate(sources) if (i % 5 == 0) == held_out)
    for pair in zip_longest(prose, code, fillvalue=""):  # alternate, so that few windows already hold both
        for document in pair:
            yield "\n\n".join(part for part in document.split("\n\n") if part not in seen)


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def pack(documents: Iterable[str], settings: Text, tokenizer: Any) -> Windows:
    """Documents one after another, cut into full windows; a window begins with BOS where the tokenizer wants one."""
    start = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
    body = settings.length - len(start)
    ids: list[int] = []
    windows: list[list[int]] = []
    for document in documents:
        if not document.strip():
            continue
        ids += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        ids += tokenizer("\n\n", add_special_tokens=False).input_ids
        while len(ids) >= body and len(windows) < settings.samples:
            windows.append(start + ids[:body])
            ids = ids[body:]
        if len(windows) == settings.samples:
            break
    if not windows and len(ids) > 1:
        windows = [start + ids]
    if not windows:
        raise UserError(f"source={settings.source.value}: the text is empty; expected some words")
    return pad(windows)


def starts_with_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def chat_windows(settings: Text, tokenizer: Any) -> Windows:
    """One window a conversation, cut at settings.length."""
    check_chat_template(tokenizer)
    windows, truncated = [], 0
    for where, row in read_rows(str(settings.path), settings.seed):
        rendered = render_chat(where, conversation(where, row), tokenizer)
        ids = tokenizer(rendered, add_special_tokens=False, verbose=False).input_ids
        if len(ids) < 2:
            raise UserError(f"{where}: {len(ids)} tokens through the chat template; expected two or more")
        truncated += len(ids) > settings.length
        windows.append(ids[: settings.length])
        if len(windows) == settings.samples:
            break
    return pad(windows, truncated)


def check_chat_template(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template, which chat data needs; "
            "add chat_template.jinja to the model directory or use source=text"
        )


def render_chat(where: str, turns: list[dict[str, str]], tokenizer: Any, prompt: bool = False) -> str:
    """The turns as the chat template writes them; prompt adds what makes the assistant begin to answer."""
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"{where}: the model's chat template refuses this conversation ({error})") from None


def conversation(where: str, row: dict[str, Any]) -> list[dict[str, str]]:
    """Role and content of each turn, from `messages` (role, content) or `conversations` (from, value)."""
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise UserError(
            f"{where}: expected a list `messages` of {{role, content}} or `conversations` of {{from, value}}"
        )
    result = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role not in ROLES or not isinstance(content, str):
            raise UserError(
                f"{where}: a turn with role {role!r} and content {str(content)[:40]!r}; expected "
                f"one of {', '.join(sorted(ROLES))} and a string"
            )
        result.append({"role": ROLES[role], "content": content})
    return result


def row_text(where: str, row: dict[str, Any]) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise UserError(f"{where}: expected a string `text`, found keys {sorted(row)}")
    return text


def read_rows(path: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a .jsonl, .parquet or .txt file, or of a hub dataset's train split, in seeded order."""
    file = Path(path).expanduser()
    if file.suffix == ".txt" and file.is_file():
        rows = [(str(file), {"text": read_text(file)})]
    elif file.suffix in (".jsonl", ".json") and file.is_file():
        rows = read_jsonl(file)
    else:
        yield from read_dataset(path, seed)
        return
    random.Random(seed).shuffle(rows)
    yield from rows


def read_jsonl(file: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise UserError(f"{file}, line {number}: not JSON ({error}); expected one object a line") from None
            if not isinstance(row, dict):
                raise UserError(f"{file}, line {number}: expected a JSON object, found {type(row).__name__}")
            rows.append((f"{file}, line {number}", row))
    if not rows:
        raise UserError(f"{file}: empty; expected one JSON object a line")
    return rows


def read_dataset(path: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # heavy, and only this branch needs it

    try:
        if Path(path).expanduser().is_file():
            rows = datasets.load_dataset("parquet", data_files=str(Path(path).expanduser()), split="train")
        else:
            rows = datasets.load_dataset(path, split="train")
    except Exception as error:  # the library raises many unrelated types; all mean the same to the user
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"path={path}: no such file, and no dataset of that name could be loaded ({reason})") from None
    for number, row in enumerate(rows.shuffle(seed=seed), 1):
        yield f"{path}, row {number}", row


def read_token_file(file: Path, settings: Text, vocabulary: int) -> Windows:
    """The first `samples` rows and `length` columns of an .npy file of token ids below `vocabulary`."""
    try:
        array = np.load(file)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UserError(f"path={file}: cannot be read as .npy ({error})") from None
    if not isinstance(array, np.ndarray) or array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise UserError(f"path={file}: {found}; expected integers [n, T]")
    if array.shape[0] < 1 or array.shape[1] < 2:
        raise UserError(f"path={file}: shape {array.shape}; expected one row or more of two tokens or more")
    if array.min() < 0 or array.max() >= vocabulary:
        raise UserError(
            f"path={file}: token ids {array.min()} to {array.max()}; expected 0 to {vocabulary - 1}, "
            "the tokenizer's vocabulary"
        )
    ids = torch.from_numpy(array[: settings.samples, : settings.length].astype(np.int64))
    return Windows(ids, torch.ones_like(ids, dtype=torch.bool))


def pad(windows: list[list[int]], truncated: int = 0) -> Windows:
    width = max(len(window) for window in windows)
    token_ids = torch.zeros(len(windows), width, dtype=torch.long)
    mask = torch.zeros(len(windows), width, dtype=torch.bool)
    for row, window in enumerate(windows):
        token_ids[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = True
    return Windows(token_ids, mask, truncated)
