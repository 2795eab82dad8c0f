import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from soar_prep.errors import UserError
from soar_prep.settings import Text, TextSource
from soar_prep.text import Windows, builtin_documents, load_tokenizer, load_windows, pad, read_rows

CHATS = [
    {"messages": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Good day"}]},
    {"conversations": [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Good day"}]},
]
RENDERED = "<s>user\nHello there</s><s>assistant\nGood day</s>"
CONTEXT = 256


@pytest.fixture(scope="module")
def tokenizer(model_directory: Callable[[str], Path]) -> Any:
    """Adds <s> (0) at the start, and has a chat template."""
    return AutoTokenizer.from_pretrained(model_directory("mistral"))


@pytest.fixture(scope="module")
def plain_tokenizer(model_directory: Callable[[str], Path]) -> Any:
    """Has a <s>, but does not add it."""
    return AutoTokenizer.from_pretrained(model_directory("qwen2"))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def windows(tokenizer: Any, source: str, path: Path | None = None, **options: Any) -> Windows:
    options = {"samples": 4, "length": 32, "path": None if path is None else str(path)} | options
    settings = Text(source=TextSource[source], **options)
    return load_windows(settings, tokenizer, CONTEXT, "calibration")


def real_ids(windows_: Windows) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(windows_.token_ids, windows_.mask, strict=True)]


def test_builtin_text_fills_its_windows(tokenizer: Any):
    """Catches short or padded windows, and another text on a second run: a resumed run must see the very same."""
    got = windows(tokenizer, "builtin", samples=7, length=64)
    assert got.token_ids.shape == (7, 64)
    assert bool(got.mask.all())
    assert got.sha256() == windows(tokenizer, "builtin", samples=7, length=64).sha256()
    assert got.facts() == {"samples": 7, "tokens": 7 * 64, "truncated": 0, "sha256": got.sha256()}


def test_held_out_text_was_never_calibrated_on(tokenizer: Any):
    """Catches an evaluation on calibration text, which would praise an overfit: no paragraph or window is shared."""
    documents = [list(builtin_documents(held_out)) for held_out in (False, True)]
    for kind in (slice(0, None, 2), slice(1, None, 2)):  # prose and code alternate
        sizes = [sum(map(len, part[kind])) for part in documents]
        assert sizes[0] > 3 * sizes[1] > 100_000
    calibration, held_out = ({part for d in ds for part in d.split("\n\n") if part.strip()} for ds in documents)
    assert not calibration & held_out
    settings = Text(samples=50, length=64)
    seen = real_ids(load_windows(settings, tokenizer, CONTEXT, "calibration"))
    unseen = real_ids(load_windows(settings, tokenizer, CONTEXT, "evaluation", held_out=True))
    assert not {tuple(ids) for ids in seen} & {tuple(ids) for ids in unseen}


def test_each_packed_window_begins_with_bos_where_the_tokenizer_adds_it(
    tokenizer: Any, plain_tokenizer: Any, tmp_path: Path
):
    """Catches windows that no model of this kind ever sees: without BOS, with two, or with one it does not want."""
    path = lines(tmp_path / "x.jsonl", *({"text": f"Sentence number {i} of many."} for i in range(40)))
    for each in real_ids(windows(tokenizer, "text", path)):
        assert each[0] == 0
        assert 0 not in each[1:]
    assert all(0 not in each for each in real_ids(windows(plain_tokenizer, "text", path)))


def test_packing_loses_and_doubles_nothing(plain_tokenizer: Any, tmp_path: Path):
    """Catches tokens dropped at a window's border, and documents run together without a break."""
    texts = [f"Text {i}: {'word ' * i}" for i in range(12)]
    path = lines(tmp_path / "x.jsonl", *({"text": text} for text in texts))
    order = [row["text"] for _, row in read_rows(str(path), seed=0)]
    assert sorted(order) == sorted(texts)
    got = windows(plain_tokenizer, "text", path, samples=100, length=16)
    joined = plain_tokenizer.decode([token for ids in real_ids(got) for token in ids])
    assert "".join(f"{text}\n\n" for text in order).startswith(joined)
    assert len(joined) > 0.9 * sum(map(len, order))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "txt"])
def test_text_of_every_file_type(suffix: str, plain_tokenizer: Any, tmp_path: Path):
    """Catches a file type that is named in the manual and not read."""
    path = tmp_path / f"x.{suffix}"
    text = "A sentence that is long enough to fill a window of thirty-two tokens, and then some more."
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    else:
        path.write_text(text if suffix == "txt" else json.dumps({"text": text}))
    (first,) = real_ids(windows(plain_tokenizer, "text", path, samples=1))
    assert text.startswith(plain_tokenizer.decode(first))
    assert len(first) == 32


@pytest.mark.parametrize("chat", CHATS)
def test_chat_goes_through_the_template(chat: dict, tokenizer: Any, tmp_path: Path):
    """Catches raw text in place of the template, a doubled BOS, and either of the two row formats misread."""
    got = windows(tokenizer, "chat", lines(tmp_path / "x.jsonl", chat), length=256)
    (ids,) = real_ids(got)
    assert tokenizer.decode(ids) == RENDERED
    assert ids[0] == 0
    assert ids[1] != 0
    assert got.truncated == 0


def test_long_chats_are_cut_and_counted(tokenizer: Any, tmp_path: Path):
    """Catches a 100k-token sample that exhausts memory, a cut nobody hears of, and padding taken for tokens."""
    chats = [{"messages": [{"role": "user", "content": "x " * n}]} for n in (1, 200, 300)]
    got = windows(tokenizer, "chat", lines(tmp_path / "x.jsonl", *chats), length=40)
    assert got.token_ids.shape == (3, 40)
    assert got.truncated == got.facts()["truncated"] == 2
    assert sorted(len(ids) for ids in real_ids(got))[1:] == [40, 40]
    assert got.n_tokens == got.facts()["tokens"] == sum(map(len, real_ids(got))) < 100


def test_rows_are_drawn_by_seed(tmp_path: Path):
    """Catches an order that depends on the machine, and a seed without effect."""
    path = lines(tmp_path / "x.jsonl", *({"text": str(i)} for i in range(50)))
    orders = [[row["text"] for _, row in read_rows(str(path), seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    where, row = next(iter(read_rows(str(path), 0)))
    assert where == f"{path}, line {int(row['text']) + 1}"  # the line in the file, not in the shuffled order


def test_token_files_are_taken_as_they_are(tokenizer: Any, tmp_path: Path):
    """Catches ids that are changed, wrapped or given a BOS; too many rows or columns are left out."""
    ids = np.arange(6 * 40).reshape(6, 40).astype(np.uint16)
    np.save(tmp_path / "x.npy", ids)
    got = windows(tokenizer, "tokens", tmp_path / "x.npy")
    assert got.token_ids.dtype is torch.int64
    assert got.token_ids.tolist() == ids[:4, :32].tolist()
    assert bool(got.mask.all())


GOOD = {"messages": [{"role": "user", "content": "Hello there"}]}
MALFORMED: dict[str, tuple[str, list, str]] = {
    "not_json": ("chat", ['{"messages": [', GOOD], r"x\.jsonl, line 1: not JSON \(.*expected one object a line"),
    "list": ("chat", [GOOD, "", [1, 2]], r"x\.jsonl, line 3: expected a JSON object, found list"),
    "empty": ("chat", [], r"x\.jsonl: empty; expected one JSON object a line"),
    "no_turns": ("chat", [{"text": "x"}], r"x\.jsonl, line 1: expected a list `messages` .* or `conversations`"),
    "no_turn": ("chat", [{"messages": []}], r"x\.jsonl, line 1: expected a list `messages`"),
    "role": ("chat", [{"messages": [{"role": "usr", "content": "x"}]}], r"line 1: a turn with role 'usr' .*assistant"),
    "content": (
        "chat",
        [{"messages": [{"role": "user", "content": None}]}],
        "content 'None'; expected one of .*string",
    ),
    "turn": ("chat", [{"messages": ["hello"]}], r"line 1: a turn with role None"),
    "template": (
        "chat",
        [{"messages": [{"role": "tool", "content": "x"}]}],
        "line 1: .*chat template refuses.*no tools",
    ),
    "no_text": ("text", [{"texts": "x"}], r"x\.jsonl, line 1: expected a string `text`, found keys \['texts'\]"),
    "blank": ("text", [{"text": " \n"}, {"text": ""}], "source=text: the text is empty; expected some words"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_row_is_named_by_its_line(case: str, tokenizer: Any, tmp_path: Path):
    """Catches a row that is skipped or guessed at, and a message that leaves one to search a gigabyte."""
    source, rows, message = MALFORMED[case]
    with pytest.raises(UserError, match=message) as told:
        windows(tokenizer, source, lines(tmp_path / "x.jsonl", *rows))
    assert "\n" not in str(told.value)


def test_bytes_that_are_no_text_are_named(tokenizer: Any, tmp_path: Path):
    """Catches a traceback of the decoder for a line in another encoding."""
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 2: not JSON \(.*utf-8"):
        windows(tokenizer, "text", tmp_path / "x.jsonl")


def test_conversation_without_content_is_an_error(model_copy: Callable[..., Path], tmp_path: Path):
    """Catches a window of one token: it predicts nothing, and its KL would be NaN."""
    directory = model_copy("mistral")
    (directory / "chat_template.jinja").write_text("<s>")
    with pytest.raises(UserError, match=r"x\.jsonl, line 1: 1 tokens through the chat template; expected two or more"):
        windows(AutoTokenizer.from_pretrained(directory), "chat", lines(tmp_path / "x.jsonl", GOOD))


def test_missing_chat_template_is_an_error(model_copy: Callable[..., Path], tmp_path: Path):
    """Catches chats calibrated in a format that the model does not speak."""
    directory = model_copy("mistral")
    (directory / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    with pytest.raises(UserError, match=r"no chat template, which chat data needs; add chat_template\.jinja"):
        windows(tokenizer, "chat", lines(tmp_path / "x.jsonl", GOOD))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 257}, r"calibration\.length=257: the model's context is 256 tokens; give at most that"),
        ({"source": "chat"}, r"calibration\.source=chat: needs a file or a dataset id, calibration\.path=\.\.\."),
        ({"source": "text"}, r"calibration\.source=text: needs a file"),
        ({"source": "tokens"}, r"calibration\.source=tokens: needs a file"),
        ({"source": "text", "path": Path("/no/such.jsonl")}, r"path=/no/such\.jsonl: no such file, and no dataset"),
        ({"source": "text", "path": Path("nobody/nothing")}, r"path=nobody/nothing: no such file, and no dataset"),
        ({"source": "tokens", "path": Path("/no/such.npy")}, r"path=/no/such\.npy: cannot be read as \.npy"),
    ],
)
def test_unfit_options_are_told(options: dict, message: str, tokenizer: Any):
    """Catches positions beyond the model's context, and a path that is only missed after an hour."""
    with pytest.raises(UserError, match=message) as told:
        windows(tokenizer, **{"source": "builtin"} | options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3)), r"float64 \(2, 3\); expected integers \[n, T\]"),
        (np.zeros(3, dtype=np.int64), r"int64 \(3,\); expected integers"),
        (np.zeros((0, 8), dtype=np.int64), r"shape \(0, 8\); expected one row or more of two tokens or more"),
        (np.zeros((3, 1), dtype=np.int64), r"shape \(3, 1\); expected one row"),
        (np.array([[0, 300]]), r"token ids 0 to 300; expected 0 to 299, the tokenizer's vocabulary"),
        (np.array([[-1, 5]]), r"token ids -1 to 5; expected 0 to 299"),
    ],
)
def test_unfit_token_file_is_told(array: np.ndarray, message: str, tokenizer: Any, tmp_path: Path):
    """Catches an index error deep in the embedding, or windows that predict nothing."""
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(UserError, match=rf"path={tmp_path / 'x.npy'}: {message}"):
        windows(tokenizer, "tokens", tmp_path / "x.npy")


@pytest.mark.parametrize("content", [b"", b"no numpy", b"PK\x03\x04"])
def test_damaged_token_file_is_told(content: bytes, tokenizer: Any, tmp_path: Path):
    """Catches any of numpy's half dozen exceptions coming through."""
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.npy: cannot be read as \.npy"):
        windows(tokenizer, "tokens", tmp_path / "x.npy")


def test_archive_of_arrays_is_told(tokenizer: Any, tmp_path: Path):
    """Catches an .npz file, which numpy opens as something else."""
    with open(tmp_path / "x.npy", "wb") as file:
        np.savez(file, ids=np.zeros((2, 8), dtype=np.int64))
    with pytest.raises(UserError, match=r"NpzFile; expected integers \[n, T\]"):
        windows(tokenizer, "tokens", tmp_path / "x.npy")


def test_directory_without_tokenizer_is_told(model_copy: Callable[..., Path]):
    """Catches a traceback out of transformers for a directory that holds weights alone."""
    directory = model_copy("mistral")
    for path in directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"model: no tokenizer that transformers can load \(") as told:
        load_tokenizer(directory, trust_remote_code=False)
    assert "\n" not in str(told.value)


def test_hash_knows_ids_and_borders_and_no_padding():
    """Catches two different texts with one hash, and one text with two because of its padding."""
    hashes = [pad(rows).sha256() for rows in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]])]
    assert len(set(hashes)) == 4
    wider = Windows(
        torch.tensor([[1, 2, 9, 9], [3, 9, 9, 9]]), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    )
    assert wider.sha256() == hashes[0]


@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1] * 5), (31, [1] * 5), (96, [3, 2]), (10_000, [5])])
def test_batches_hold_every_window_once(tokens: int, sizes: list[int]):
    """Catches a window that is left out or counted twice, and a batch larger than allowed."""
    five = Windows(torch.zeros(5, 32, dtype=torch.long), torch.ones(5, 32, dtype=torch.bool))
    slices = list(five.batches(tokens))
    assert [s.stop - s.start for s in slices] == sizes
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(5))
