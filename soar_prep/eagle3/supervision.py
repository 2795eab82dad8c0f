"""Which tokens of a conversation the assistant wrote: a draft is trained on those alone.

The chat template itself tells. Where it marks the answers ({% generation %}), its marks are taken. Elsewhere the
conversation is rendered up to each answer, with the prompt for it, and once more with it: what the second text adds
to the first is the answer. Both give characters; a token is supervised when all of its characters are the answer's,
because one that reaches into the prompt is never generated at that place. An answer ends with the token at which a
server stops, not with the line break that templates put behind it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from soar_prep.errors import UserError
from soar_prep.settings import Text
from soar_prep.text import check_chat_template, conversation, read_rows, render_chat, starts_with_bos

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CHUNK = 64  # rows a call of the tokenizer, which spreads them over the cores


@dataclass(frozen=True)
class Row:
    """token_ids int32 [n] and loss_mask bool [n] of one sample, cut to its length; uncut: its tokens before that;
    domain: what kind of text it is, from the row's own `domain`, for figures by domain.

    loss_mask[0] is False: nothing comes before the first token, so nothing predicts it.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    uncut: int
    domain: str = ""


def make_row(token_ids: Any, loss_mask: Any, length: int, domain: Any = "") -> Row:
    mask = np.array(loss_mask[:length], dtype=bool)
    mask[:1] = False
    return Row(np.array(token_ids[:length], dtype=np.int32), mask, len(token_ids), str(domain))


def text_rows(documents: Iterable[str], tokenizer: Any, length: int) -> Iterator[Row]:
    """Every token supervised. A long document becomes several rows, each with BOS where the tokenizer adds one."""
    start = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
    body = length - len(start)
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        for at in range(0, len(ids), body):
            piece = start + ids[at : at + body]
            yield make_row(piece, [True] * len(piece), length)


def chat_rows(settings: Text, tokenizer: Any) -> Iterator[Row]:
    """One row a conversation, the assistant's tokens supervised, for the first settings.samples of the data.

    An answer that opens a conversation is not supervised: no prompt leads to it.
    UserError names the row that is malformed, that the template refuses, or in which answers cannot be told apart.
    """
    check_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer does not tell where its tokens lie in the text; chat data needs "
            "one of the tokenizers library (tokenizer.json)"
        )
    stops = stop_ids(tokenizer)
    rows = islice(read_rows(str(settings.path), settings.seed), settings.samples)
    while chunk := [(where, conversation(where, row), row.get("domain", "")) for where, row in islice(rows, CHUNK)]:
        texts = [render_chat(where, turns, tokenizer) for where, turns, _ in chunk]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for (where, turns, domain), text, ids, offsets in zip(
            chunk, texts, encoded.input_ids, encoded.offset_mapping, strict=True
        ):
            starts, ends = token_extents(offsets)
            kept = int(ends[: settings.length].max(initial=0))
            spans = assistant_spans(where, turns, text, tokenizer, kept)
            mask = supervise(text, spans, starts, ends, np.isin(ids, stops))
            yield make_row(ids, mask, settings.length, domain)


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of the control tokens: those a user does not write."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def stop_ids(tokenizer: Any) -> list[int]:
    """Control tokens that can end an answer: all but BOS, unless it is EOS too."""
    return sorted(special_ids(tokenizer) - ({tokenizer.bos_token_id} - {tokenizer.eos_token_id}))


def assistant_spans(
    where: str, turns: list[dict[str, str]], text: str, tokenizer: Any, kept: int
) -> list[tuple[int, int]]:
    """Character ranges of `text`, the rendered turns, that the assistant writes; those after `kept` may be missing."""
    template = tokenizer.get_chat_template()
    if GENERATION.search(template):
        return spans_by_marks(where, turns, text, tokenizer, template)
    return spans_by_prefixes(where, turns, text, tokenizer, kept)


def spans_by_marks(
    where: str, turns: list[dict[str, str]], text: str, tokenizer: Any, template: str
) -> list[tuple[int, int]]:
    # Not apply_chat_template(return_assistant_tokens_mask=True): it gives tokens, and takes in those that straddle.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [turns], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    (rendered_text,), (spans,) = rendered
    if rendered_text != text:
        raise UserError(
            f"{where}: the tokenizer renders conversations otherwise than its chat template does, so that the "
            "template's {% generation %} marks do not fit; remove them from the template"
        )
    return spans


def spans_by_prefixes(
    where: str, turns: list[dict[str, str]], text: str, tokenizer: Any, kept: int
) -> list[tuple[int, int]]:
    spans = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant" or i == 0:
            continue
        prompt = render_chat(where, turns[:i], tokenizer, prompt=True)
        if len(prompt) >= kept:
            break
        answered = render_chat(where, turns[: i + 1], tokenizer)
        if not answered.startswith(prompt):
            reason = f"turn {i + 1} does not begin with the prompt for it"
        elif not text.startswith(answered):
            reason = f"what follows turn {i + 1} changes how the turns up to it are written"
        else:
            spans.append((len(prompt), len(answered)))
            continue
        raise UserError(
            f"{where}: the chat template hides where answers begin and end: {reason}; put {{% generation %}} and "
            "{% endgeneration %} around the answers in the template, or leave such rows out"
        )
    return spans


def token_extents(offsets: Any) -> tuple[np.ndarray, np.ndarray]:
    """First character and one past the last of each token, both rising; characters of no token join the next one."""
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(pairs[:, 1])
    starts = np.minimum(pairs[:, 0], np.concatenate([[0], ends])[:-1])
    return starts, ends


def supervise(
    text: str, spans: list[tuple[int, int]], starts: np.ndarray, ends: np.ndarray, is_stop: np.ndarray
) -> np.ndarray:
    """bool [n]: tokens that lie inside a span, each span up to the token that ends the turn."""
    mask = np.zeros(len(starts), dtype=bool)
    for begin, end in spans:
        first, last = np.searchsorted(starts, begin), np.searchsorted(ends, end, side="right")
        mask[first : turn_end(text, int(first), int(last), starts, ends, is_stop)] = True
    return mask


def turn_end(text: str, first: int, last: int, starts: np.ndarray, ends: np.ndarray, is_stop: np.ndarray) -> int:
    """One past the token that ends the turn, which spans the tokens first to last - 1.

    It is the control token in the span with nothing but blanks behind it; or the one that follows the span, blanks
    between them aside, where the template closes an answer after its mark or by opening the next turn. Else `last`.
    """
    inside = np.flatnonzero(is_stop[first:last])
    if len(inside) and not text[ends[first + inside[-1]] : ends[last - 1]].strip():
        return first + int(inside[-1]) + 1
    after = last
    while after < len(ends) and not is_stop[after] and not text[starts[after] : ends[after]].strip():
        after += 1
    return after + 1 if after < len(ends) and is_stop[after] else last
