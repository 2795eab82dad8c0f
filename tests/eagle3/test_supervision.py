import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from soar_prep.eagle3.supervision import Row, chat_rows, special_ids, stop_ids, text_rows, token_extents
from soar_prep.errors import UserError
from soar_prep.settings import Text, TextSource

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
SENTENCES = ["Good day to you, and good bye.", "Hello there\n\nagain\n\nand again\n\n", "And what then?"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A default system prompt, BOS, headers, and contents without the blanks around them.
TRIMMED = (
    "<s>{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# Nothing closes an answer but the next turn's opening.
UNCLOSED = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# BOS before every question; no control token anywhere else; the prompt ends in the middle of the line.
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>Q: {{ m['content'] }}\nA:"
    "{% else %} {{ m['content'] }}\n{% endif %}{% endfor %}"
)
EOS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}",
)
MARKED_CONTENT = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{%- endgeneration -%}<|im_end|>\n")
MARKED_EOS = EOS.replace(
    " {{ m['content'] }} </s>", "{% generation %} {{ m['content'] }}{% endgeneration %}{{ ' </s>' }}"
)
# As some thinking models have it: only the last answer carries its (empty) thought.
LAST_DIFFERS = CHATML.replace(
    "{{ m['content'] }}", "{% if loop.last and m['role'] == 'assistant' %}(no thought) {% endif %}{{ m['content'] }}"
)
PROMPT_DIFFERS = CHATML.replace("assistant\n{% endif %}", "assistant\n(thought) {% endif %}")

TALK = [("user", "Hello"), ("assistant", "Good day"), ("user", "And then?"), ("assistant", "Good bye")]
SPACED = [("user", " Hello "), ("assistant", " \n Good day\n"), ("user", "And then?\n"), ("assistant", "Good bye ")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE that merges line breaks; adds <s> to plain text; <|im_end|> is its EOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SENTENCES * 5, trainer)
    bpe.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="<|im_end|>", additional_special_tokens=CONTROL
    )


Rows = Callable[..., list[Row]]


@pytest.fixture
def rows(tokenizer: Any, tmp_path: Path) -> Rows:
    """Rows of conversations through a template, in the order in which they are drawn."""

    def make(template: str, *talks: list[tuple[str, str]], length: int = 1000, samples: int = 1000) -> list[Row]:
        tokenizer.chat_template = template
        messages = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in talks]
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in messages))
        settings = Text(source=TextSource.chat, path=str(path), samples=samples, length=length)
        return list(chat_rows(settings, tokenizer))

    return make


def decode(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode(row.token_ids, clean_up_tokenization_spaces=False)


def answers(tokenizer: Any, row: Row) -> list[str]:
    """Text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row.loss_mask, [False]]).astype(int)))
    runs = [row.token_ids[begin:end] for begin, end in edges.reshape(-1, 2)]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


TEMPLATES: dict[str, tuple[str, list[tuple[str, str]], list[str]]] = {
    "chatml": (CHATML, TALK, ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "chatml_blanks": (CHATML, SPACED, [" \n Good day\n<|im_end|>", "Good bye <|im_end|>"]),
    "system": (CHATML, [("system", "Be kind."), *TALK], ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "trimmed": (TRIMMED, SPACED, ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "trimmed_system": (TRIMMED, [("system", "Hi"), *SPACED], ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "unclosed": (UNCLOSED, TALK, ["Good day<|user|>", "Good bye"]),
    "plain": (PLAIN, TALK, [" Good day\n", " Good bye\n"]),
    "eos": (EOS, TALK, [" Good day </s>", " Good bye </s>"]),
    "marked": (MARKED, TALK, ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "marked_content": (MARKED_CONTENT, TALK, ["Good day<|im_end|>", "Good bye<|im_end|>"]),
    "marked_eos": (MARKED_EOS, TALK, [" Good day </s>", " Good bye </s>"]),
    "control_token_inside": (
        CHATML,
        [TALK[0], ("assistant", "<s> or </s>?"), *TALK],
        ["<s> or </s>?<|im_end|>", "Good day<|im_end|>", "Good bye<|im_end|>"],
    ),
    "empty_answer": (CHATML, [("user", "Hello"), ("assistant", "")], ["<|im_end|>"]),
    "two_answers": (
        CHATML,
        [*TALK, ("assistant", "Hello")],
        ["Good day<|im_end|>", "Good bye<|im_end|>", "Hello<|im_end|>"],
    ),
    "no_last_answer": (CHATML, TALK[:3], ["Good day<|im_end|>"]),
    "bytes": (CHATML, [("user", "é"), ("assistant", "é 😀")], ["é 😀<|im_end|>"]),
    "opens_with_an_answer": (CHATML, [("assistant", "Hello"), *TALK], ["Good day<|im_end|>", "Good bye<|im_end|>"]),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_exactly_the_answers_are_supervised(case: str, tokenizer: Any, rows: Rows):
    """Catches role headers, prompts or the line break behind a turn trained on, an answer or its end left out, and
    token ids that are not those of the rendered text, with BOS once."""
    template, talk, expected = TEMPLATES[case]
    (row,) = rows(template, talk)
    assert answers(tokenizer, row) == expected
    turns = [{"role": role, "content": content} for role, content in talk]
    assert row.token_ids.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]
    assert row.uncut == len(row.token_ids)
    assert (row.token_ids.dtype, row.loss_mask.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_CONTENT])
def test_token_that_straddles_the_prompt_is_not_supervised(template: str, tokenizer: Any, rows: Rows):
    """Catches a token counted as answer whose first half the prompt wrote: serving never has it at that place."""
    (row,) = rows(template, [("user", "Hello"), ("assistant", "\n\nGood day")])
    assert "assistant\n\n\nGood" in decode(tokenizer, row)
    double = tokenizer.convert_tokens_to_ids("ĊĊ")  # the prompt's line break and the answer's first
    at = row.token_ids.tolist().index(double)
    assert not row.loss_mask[at]
    assert answers(tokenizer, row) == ["\nGood day<|im_end|>"]


def test_token_that_straddles_the_next_turn_is_not_supervised(tokenizer: Any, rows: Rows):
    """Catches a token counted as answer whose second half belongs to the next question."""
    template = PLAIN.replace("<s>Q:", "\n\n\nQ:")  # Jinja drops the first
    (row,) = rows(template, TALK)
    assert tokenizer.convert_tokens_to_ids("ĊĊ") in row.token_ids.tolist()
    assert answers(tokenizer, row) == [" Good day", " Good bye\n"]


@pytest.mark.parametrize("template", [CHATML, TRIMMED, UNCLOSED, MARKED])
def test_a_cut_row_is_the_beginning_of_the_whole_one(template: str, rows: Rows):
    """Catches an answer near the cut that loses its supervision because later prompts are no longer rendered."""
    talk = [("user", "Hello"), ("assistant", "x y z")] * 2
    (whole,) = rows(template, talk)
    for length in range(2, len(whole.token_ids) + 1):
        (cut,) = rows(template, talk, length=length)
        assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert cut.loss_mask.tolist() == whole.loss_mask[:length].tolist()
        assert cut.uncut == len(whole.token_ids)


@pytest.mark.parametrize(
    ("template", "talk", "reason"),
    [
        (LAST_DIFFERS, TALK, "what follows turn 2 changes how the turns up to it are written"),
        (PROMPT_DIFFERS, TALK, "turn 2 does not begin with the prompt for it"),
    ],
)
def test_template_without_the_prefix_property_is_told(template: str, talk: list, reason: str, rows: Rows):
    """Catches a mask some tokens off, silently, where earlier turns change with what follows them."""
    with pytest.raises(UserError, match=rf"x\.jsonl, line 1: the chat template hides .*: {reason}; put \{{% gener"):
        rows(template, talk)


def test_one_answer_needs_no_more_than_its_own_prefix(tokenizer: Any, rows: Rows):
    """Catches a refusal of conversations that such a template does render faithfully: those of one answer."""
    (row,) = rows(LAST_DIFFERS, TALK[:2])
    assert answers(tokenizer, row) == ["(no thought) Good day<|im_end|>"]


def test_many_rows_keep_their_masks(tokenizer: Any, rows: Rows):
    """Catches masks that are one row off, or rows lost, at the border of two calls of the tokenizer."""
    talks = [[("user", f"n{i}"), ("assistant", f"Good {i}." + " day" * (i % 7))] for i in range(130)]
    found = rows(CHATML, *talks)
    numbers = [int(decode(tokenizer, row).split("user\nn")[1].split("<")[0]) for row in found]
    assert sorted(numbers) == list(range(130))
    for number, row in zip(numbers, found, strict=True):
        assert answers(tokenizer, row) == [f"{talks[number][1][1]}<|im_end|>"]
    assert len(rows(CHATML, *talks, samples=65)) == 65


def test_tokenizer_that_renders_otherwise_is_told(tokenizer: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch):
    """Catches marks of the template laid on a text that is not the template's."""
    render = type(tokenizer).apply_chat_template
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *a, **k: "x" + render(*a, **k))
    with pytest.raises(UserError, match=r"x\.jsonl, line 1: the tokenizer renders conversations otherwise than"):
        rows(MARKED, TALK)


def test_unfit_rows_and_tokenizers_are_told(tokenizer: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch):
    """Catches a malformed conversation that is skipped, and tokenizers for which the mask cannot be made."""
    with pytest.raises(UserError, match=r"x\.jsonl, line 2: .*chat template refuses this conversation \(no tools"):
        rows(
            "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
            TALK,
            [("tool", "x")],
        )
    with pytest.raises(UserError, match="no chat template, which chat data needs"):
        rows("", TALK)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(UserError, match=r"does not tell where its tokens lie .*tokenizer\.json"):
        rows(CHATML, TALK)


def test_extents_of_tokens():
    """Catches offsets taken as they come: pieces of one character share theirs, and trimmed blanks belong to nobody."""
    starts, ends = token_extents([(0, 3), (3, 4), (3, 4), (5, 9), (8, 8), (9, 9)])
    assert starts.tolist() == [0, 3, 3, 4, 8, 9]
    assert ends.tolist() == [3, 4, 4, 9, 9, 9]
    assert [part.tolist() for part in token_extents([])] == [[], []]


def test_control_tokens(tokenizer: Any):
    """Catches ordinary added words taken for control tokens, and BOS taken for the end of a turn."""
    tokenizer.add_tokens(["<think>"])
    assert special_ids(tokenizer) == set(range(6))
    assert stop_ids(tokenizer) == [1, 2, 3, 4, 5]
    both = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="<s>")
    assert 0 in stop_ids(both)


@pytest.mark.parametrize("length", [2, 15, 17, 1000])
def test_text_is_cut_into_rows_without_loss(length: int, tokenizer: Any):
    """Catches tokens lost between two rows, a row without BOS, documents run together, and a supervised BOS."""
    documents = ["Good day to you.", "", "Hello there again and again. " * 9]
    found = list(text_rows(documents, tokenizer, length))
    assert all(row.token_ids[0] == 0 and not row.loss_mask[0] for row in found)
    assert all(row.loss_mask[1:].all() and row.uncut == len(row.token_ids) <= length for row in found)
    bodies = [tokenizer.decode(row.token_ids[1:], clean_up_tokenization_spaces=False) for row in found]
    assert "".join(bodies) == "".join(documents)
    assert any("".join(bodies[:i]) == documents[0] for i in range(len(bodies)))
