import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from soar_prep.eagle3.data import (
    BUCKET,
    Batch,
    Batching,
    Place,
    Samples,
    batches,
    collect,
    load_samples,
    plan_epoch,
)
from soar_prep.eagle3.supervision import make_row
from soar_prep.errors import UserError
from soar_prep.settings import Text, TextSource
from soar_prep.text import read_rows

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CONTEXT = 256


def numbered(lengths: Any) -> Samples:
    """Samples whose token ids are all different, so that a lost or doubled token shows; every third is supervised."""
    ends = np.cumsum(lengths)
    ids = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return collect(make_row(each, [True] + [(i % 3) == 1 for i in range(1, len(each))], 1 << 30) for each in ids)


def random_lengths(n: int, most: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, most + 1, n)


def epoch_of(samples: Samples, batching: Batching, epoch: int = 0) -> list[Batch]:
    size = len(plan_epoch(samples, batching, epoch))
    return [batch for batch, _ in islice(batches(samples, batching, Place(epoch)), size)]


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


SHAPES = [
    pytest.param(1, 17, Batching(17), id="one_sample"),
    pytest.param(15, 17, Batching(40, world_size=2), id="few"),
    pytest.param(130, 50, Batching(300, world_size=3), id="padded"),
    pytest.param(130, 50, Batching(300, row_tokens=50, world_size=3), id="packed"),
    pytest.param(130, 50, Batching(301, row_tokens=150, seed=5), id="packed_wide"),
    pytest.param(BUCKET + 130, 30, Batching(400, row_tokens=100, world_size=7), id="two_buckets"),
]


@pytest.mark.parametrize(("n", "most", "batching"), SHAPES)
def test_ranks_share_an_epoch_and_lose_nothing(n: int, most: int, batching: Batching):
    """Catches samples seen twice or never, ranks with unequal numbers of batches (which hang), a batch beyond its
    budget, a token that loses its mask, and positions or document ids that run over a border."""
    samples = numbered(random_lengths(n, most))
    ranks = [epoch_of(samples, replace(batching, rank=rank)) for rank in range(batching.world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    documents: list[int] = []
    for batch in (batch for rank in ranks for batch in rank):
        assert batch.token_ids.numel() <= batching.batch_tokens
        if batching.row_tokens:
            assert batch.token_ids.shape[1] == batching.row_tokens
        real = batch.document_ids >= 0
        for field in (batch.token_ids, batch.positions, batch.loss_mask.long()):
            assert not field[~real].any()
        assert not (real[:, 1:] & ~real[:, :-1]).any()  # padding on the right
        for row in range(len(batch.token_ids)):
            ids, borders = torch.unique_consecutive(batch.document_ids[row][real[row]], return_counts=True)
            documents += ids.tolist()
            pieces = torch.arange(int(real[row].sum())).split(borders.tolist())
            for document, piece in zip(ids.tolist(), pieces, strict=True):
                begin, end = samples.borders[document : document + 2]
                assert batch.token_ids[row, piece].tolist() == list(range(begin, end))
                assert batch.loss_mask[row, piece].tolist() == samples.loss_mask[begin:end].tolist()
                assert batch.positions[row, piece].tolist() == list(range(end - begin))
    assert sorted(documents) == list(range(n))
    assert [field.dtype for field in vars(ranks[0][0]).values()] == [torch.int64, torch.bool, torch.int64, torch.int64]


def test_packed_row_by_hand():
    """Catches documents told apart wrongly in the one case that fits on paper."""
    samples = collect([make_row([5, 6, 7], [1, 0, 1], 9), make_row([8, 9], [1, 1], 9)])
    (batch,) = epoch_of(samples, Batching(6, row_tokens=6))
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, False, True, False]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1]]
    assert same(batch.to("cpu"), batch)


@pytest.mark.parametrize("row_tokens", [None, 64])
def test_little_is_padded(row_tokens: int | None):
    """Catches batches of mixed lengths and rows packed badly: half of the work would be for padding."""
    samples = numbered(random_lengths(1000, 64))
    got = epoch_of(samples, Batching(512, row_tokens=row_tokens))
    assert sum(batch.token_ids.numel() for batch in got) < 1.05 * samples.statistics.tokens


@pytest.mark.parametrize("row_tokens", [None, 60])
@pytest.mark.parametrize("rank", [0, 1])
def test_stream_resumes_exactly(row_tokens: int | None, rank: int):
    """Catches a resumed run that repeats or skips a batch, also at the end of an epoch, or draws another order."""
    samples = numbered(random_lengths(40, 50))
    batching = Batching(120, row_tokens=row_tokens, seed=3, rank=rank, world_size=2)
    sizes = [len(plan_epoch(samples, batching, epoch)) for epoch in (0, 1)]
    stream = list(islice(batches(samples, batching), sum(sizes) + 3))
    places = [place for _, place in stream]
    assert places[sizes[0] - 1 : sizes[0] + 1] == [Place(0, sizes[0]), Place(1, 1)]
    assert places[-1] == Place(2, 3)
    for at in range(len(stream) - 1):
        resumed = islice(batches(samples, batching, Place(**asdict(places[at]))), 3)
        for (batch, place), (again, place_again) in zip(stream[at + 1 :], resumed, strict=False):
            assert place == place_again
            assert same(batch, again)


def test_order_is_drawn_by_seed_and_epoch():
    """Catches a seed without effect, epochs that repeat each other, and batches that go from long to short."""
    samples = numbered(random_lengths(60, 20))
    plans = [
        plan_epoch(samples, Batching(60, seed=seed), epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert plans[0] == plans[1]
    assert all(plans[a] != plans[b] for a, b in ((0, 2), (0, 3), (2, 3), (2, 4), (3, 4)))
    longest = [max(int(samples.lengths[row].sum()) for row in rows) for rows in plans[0]]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_what_cannot_be_shared_is_left_out_and_changes():
    """Catches a sample given to two ranks, or the same one never seen, where batches of one sample do not divide."""
    samples = numbered([10] * 5)
    seen = []
    for epoch in range(40):
        plans = [plan_epoch(samples, Batching(10, rank=rank, world_size=3), epoch) for rank in range(3)]
        documents = [sample for plan in plans for rows in plan for row in rows for sample in row]
        assert [len(plan) for plan in plans] == [1, 1, 1]
        assert len(set(documents)) == len(documents) == 3
        seen += documents
    assert set(seen) == set(range(5))


@pytest.mark.parametrize(
    ("lengths", "batching", "message"),
    [
        ([10, 21], Batching(20), r"batch_tokens=20, rows of 20 tokens: the longest sample has 21; .*raise batch_tok"),
        ([10, 21], Batching(40, row_tokens=20), r"batch_tokens=40, rows of 20 tokens: the longest sample has 21"),
        ([10, 15], Batching(16, row_tokens=20), r"batch_tokens=16, rows of 20 tokens: .*a row into a batch"),
        ([10, 15], Batching(16, world_size=3), r"2 samples do not give each of 3 ranks a batch; add data"),
    ],
)
def test_unfit_batches_are_told(lengths: list[int], batching: Batching, message: str):
    """Catches an endless loop of empty epochs, a batch of no rows, and a sample cut without a word."""
    with pytest.raises(UserError, match=message):
        next(batches(numbered(lengths), batching))


def test_place_beyond_the_epoch_is_told():
    """Catches a run resumed on other data, which would silently begin the next epoch."""
    with pytest.raises(UserError, match="resuming at batch 9 of an epoch of 2: the data or its batches changed"):
        next(batches(numbered([10, 10]), Batching(10), Place(0, 9)))


def test_facts_tell_data_apart():
    """Catches a resume on other data taken for the same: ids, masks and borders all count."""
    rows = [make_row([1, 2, 3], [0, 1, 1], 9), make_row([4, 5], [0, 1], 9)]
    changes = [
        rows,
        [make_row([1, 2, 7], [0, 1, 1], 9), rows[1]],
        [make_row([1, 2, 3], [0, 1, 0], 9), rows[1]],
        [make_row([1, 2], [0, 1], 9), make_row([3, 4, 5], [0, 0, 1], 9)],
    ]
    assert len({collect(each).facts()["sha256"] for each in changes}) == 4
    assert collect(rows).facts() == collect(iter(rows)).facts()
    assert collect(rows).facts()["rows"] == 2


# From here on: files in, samples out.


@pytest.fixture(scope="module")
def tokenizer(model_directory: Callable[[str], Path]) -> Any:
    """Adds <s> (0) to plain text; a chat template with a prompt for the answer."""
    loaded = AutoTokenizer.from_pretrained(model_directory("mistral"))
    loaded.chat_template = CHATML
    return loaded


Load = Callable[..., Samples]


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path) -> Load:
    def make(source: str, *rows: Any, **options: Any) -> Samples:
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = Text(source=TextSource[source], **{"samples": 1000, "length": 64, "path": str(path)} | options)
        return load_samples(settings, tokenizer, CONTEXT, "data")

    return make


def chat(question: str, *answer: str) -> dict:
    turns = [{"role": "user", "content": question}, *({"role": "assistant", "content": text} for text in answer)]
    return {"messages": turns}


def test_statistics_account_for_every_token(tokenizer: Any, load: Load):
    """Catches tokens that vanish from the count, and rows dropped or cut that nobody hears of."""
    rows = [
        chat("Hello", "Good day"),  # whole
        chat("Hello", "Good day " * 40),  # cut in the answer
        chat("Hello " * 40, "Good day"),  # cut before it
        chat("Hello"),  # no answer
    ]
    lengths = [len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in rows]
    got = load("chat", *rows)
    found = got.statistics
    assert found.rows == len(got) == 2
    assert found.tokens == len(got.token_ids) == lengths[0] + 64
    assert found.supervised == int(got.loss_mask.sum())
    assert (found.truncated, found.dropped, found.longest) == (2, 2, max(lengths))
    assert found.dropped_tokens == 64 + lengths[3]
    assert found.tokens + found.cut_tokens + found.dropped_tokens == sum(lengths)
    both = [slice(*got.borders[i : i + 2]) for i in range(2)]
    texts = [tokenizer.decode(got.token_ids[row][got.loss_mask[row]]) for row in both]
    assert min(texts, key=len) == "Good day</s>"
    assert max(texts, key=len).startswith("Good day Good day")


def test_samples_limit_counts_rows(load: Load):
    """Catches a limit without effect, and one that reads a whole gigabyte first."""
    rows = [chat("Hello", f"Good day {i}") for i in range(20)]
    assert len(load("chat", *rows, samples=7)) == 7
    assert len(load("text", *({"text": f"Text {i}"} for i in range(20)), samples=7)) == 7


ALL = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"


def test_chats_without_anything_to_learn_are_refused(load: Load):
    """Catches hours of training on a mask of zeros, where the loss is a perfect 0."""
    message = r"data\.path=.*x\.jsonl: none of 2 conversations has a token of the assistant among its first 64 \("
    with pytest.raises(UserError, match=message + r"0 were cut there\).*look at the roles, or raise data\.length"):
        load("chat", chat("Hello"), chat("Good day"))
    with pytest.raises(UserError, match=message + r"1 were cut there\)"):
        load("chat", chat("Hello"), chat("Hello " * 40, "Good day"))


def test_chats_with_everything_supervised_are_refused(tokenizer: Any, load: Load, monkeypatch: pytest.MonkeyPatch):
    """Catches a draft trained on prompts, which it never has to guess."""
    monkeypatch.setattr(tokenizer, "chat_template", ALL)
    with pytest.raises(UserError, match=r"every token of 2 conversations to the assistant.*data\.source=text"):
        load("chat", chat("Hello", "Good day"), chat("Good day", "Hello"))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("chat", {"length": 257}, r"data\.length=257: the model's context is 256 tokens"),
        ("chat", {"path": None}, r"data\.source=chat: needs a file or a dataset id, data\.path=\.\.\."),
        ("chat", {}, r"x\.jsonl, line 1: expected a list `messages`"),
        ("text", {}, r"x\.jsonl, line 1: expected a string `text`"),
    ],
)
def test_unfit_data_is_told(source: str, options: dict, message: str, load: Load):
    """Catches positions beyond the target's context, and rows of another kind that are skipped."""
    with pytest.raises(UserError, match=message):
        load(source, {"texts": "x"}, **options)


def test_blank_text_is_told(load: Load):
    """Catches an empty data set that is only missed when the first batch is asked for."""
    with pytest.raises(UserError, match=r"data\.path=.*x\.jsonl: the text is empty; expected some words"):
        load("text", {"text": ""})


def test_text_is_supervised_whole(tokenizer: Any, load: Load, tmp_path: Path):
    """Catches text refused like a chat without prompts, in another order than its seed's, or with BOS supervised."""
    texts = [f"Text {i}: {'word ' * (9 * i)}" for i in range(12)]
    got = load("text", *({"text": text} for text in texts))
    assert got.statistics.supervised == got.statistics.tokens - got.statistics.rows
    assert (got.token_ids[got.borders[:-1]] == 0).all()
    order = [row["text"] for _, row in read_rows(str(tmp_path / "x.jsonl"), seed=0)]
    assert tokenizer.decode(got.token_ids[got.loss_mask]) == "".join(order)


def test_builtin_text_and_its_held_out_part_differ(tokenizer: Any):
    """Catches a draft judged on the text that it was trained on."""
    settings = Text(source=TextSource.builtin, samples=20, length=64)
    parts = [load_samples(settings, tokenizer, CONTEXT, "data", held_out=held_out) for held_out in (False, True)]
    assert [part.statistics.rows for part in parts] == [20, 20]
    rows = [{tuple(p.token_ids[a:b].tolist()) for a, b in zip(p.borders, p.borders[1:], strict=False)} for p in parts]
    assert not rows[0] & rows[1]


def test_token_files_are_taken_as_they_are(tokenizer: Any, tmp_path: Path):
    """Catches ready ids that are changed, or an id 0 in them taken for padding."""
    ids = np.arange(6 * 40).reshape(6, 40)
    ids[:, -1] = 0
    np.save(tmp_path / "x.npy", ids)
    settings = Text(source=TextSource.tokens, path=str(tmp_path / "x.npy"), samples=4, length=64)
    got = load_samples(settings, tokenizer, CONTEXT, "data")
    assert got.token_ids.tolist() == ids[:4].flatten().tolist()
    assert got.statistics.supervised == 4 * 39
