import gc
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from soar_prep.checkpoint import Checkpoint, sha256
from soar_prep.eagle3 import capture as road
from soar_prep.eagle3.capture import CapturedTarget, capture, join, open_captured
from soar_prep.eagle3.data import Batch, Batching, batches, load_parts
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.target import States, Target
from soar_prep.eagle3.ttt import ask_teacher, ttt_loss
from soar_prep.errors import UserError
from soar_prep.settings import Capture, Compute, Data, HeldOut, Scheme, TextSource
from soar_prep.streaming import StreamedModel
from soar_prep.text import load_tokenizer

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FP32 = Compute(device="cpu", dtype="float32", batch_tokens=40)
TIMED = {"metrics.jsonl"}
Models = Callable[[str], Path]


class Killed(BaseException):
    """Nothing catches it, so what is on disk is what a kill would leave."""


@dataclass(frozen=True)
class Written:
    """A captured directory, its settings, and the target opened once more."""

    settings: Capture
    directory: Path
    model: StreamedModel
    hashes: dict[str, str]

    def opened(self, scheme: Scheme = Scheme.w4a16) -> CapturedTarget:
        return CapturedTarget(open_captured(self.directory), self.model, self.hashes, scheme)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name not in TIMED}


def write_texts(path: Path, count: int = 13) -> Path:
    words = random.Random(0)
    rows = [{"text": f"Text {i}: " + "word " * words.randrange(1, 9)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_for(model: Path, directory: Path, **changes: Any) -> Capture:
    data = Data(source=TextSource.text, path=str(write_texts(directory / "texts.jsonl")), samples=9, length=17)
    chosen: dict[str, Any] = {"shard_tokens": 50, "data": data, "evaluation": HeldOut(samples=3), "compute": FP32}
    return Capture(target=str(model), output=str(directory / "out"), **chosen | changes)


@pytest.fixture(scope="module")
def written(model_directory: Models, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("captured")
    settings = settings_for(model_directory("llama"), directory)
    source = Checkpoint(model_directory("llama"))
    return Written(settings, capture(settings), StreamedModel(source, FP32), source.check_and_hash())


@pytest.fixture
def spoilt(written: Written, tmp_path: Path) -> Written:
    """A copy that a test may spoil."""
    return replace(written, directory=shutil.copytree(written.directory, tmp_path / "states"))


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Die at the n-th file that gets its name, and at every later one; -1 for never."""
    rename = os.rename

    def arm(renames: int) -> None:
        left = [renames]

        def rename_or_die(source: Any, target: Any) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            rename(source, target)

        monkeypatch.setattr(os, "rename", rename_or_die)

    yield arm
    monkeypatch.setattr(os, "rename", rename)


def test_shards_hold_what_the_target_says(written: Written):
    """Catches samples in another order, a border that is off, aux and last exchanged, shards beyond their limit."""
    target = Target(StreamedModel(Checkpoint(Path(written.settings.target)), FP32), (0, 1, 2))
    tokenizer = load_tokenizer(Path(written.settings.target), False)
    every = join(*load_parts(written.settings.data, written.settings.evaluation, tokenizer, 256))
    facts = json.loads((written.directory / "run.json").read_text())
    assert facts["aux_layers"] == [0, 1, 2]
    assert facts["target_sha256"] == written.hashes
    shards = facts["shards"]
    assert len(shards) > 2
    assert [number for shard in shards for number in range(*shard["samples"])] == list(range(12))
    names = {"run.json", "samples.safetensors", "metrics.jsonl"} | {shard["file"] for shard in shards}
    assert {path.name for path in written.directory.iterdir()} == names
    for shard in shards:
        assert sha256(written.directory / shard["file"]) == shard["sha256"]
        tensors = load_file(written.directory / shard["file"])
        start, stop = shard["samples"]
        assert len(tensors["aux"]) == len(tensors["last"]) == every.borders[stop] - every.borders[start] <= 50
        for number in range(start, stop):
            (batch, _), here = next(batches(every.part(number, number + 1), Batching(40))), every.borders
            states = target.states(batch)
            tokens = slice(here[number] - here[start], here[number + 1] - here[start])
            torch.testing.assert_close(tensors["aux"][tokens], states.aux[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(tensors["last"][tokens], states.last[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row_tokens", [None, 40], ids=["bucketed", "packed"])
def test_same_loss_from_disk_as_from_the_target(row_tokens: int | None, written: Written):
    """Catches states of another sample or place, embeddings or a head that differ, held-out numbers taken for those
    of training. fp32: batches of another shape sum in another order."""
    online = Target(StreamedModel(Checkpoint(Path(written.settings.target)), FP32), (0, 1, 2))
    disk = written.opened()
    torch.manual_seed(0)
    draft = Draft(DraftConfig.for_target(written.model.model.config, draft_vocab_size=130))
    draft.set_vocabulary(torch.arange(130) * 2)
    losses: list[list[float]] = [[], []]
    for part in (disk.captured.held_out, disk.captured.samples):
        for batch, _ in islice(batches(part, Batching(80, row_tokens)), 3):
            for target, found in zip((online, disk), losses, strict=True):
                states = target.states(batch)
                taught = ask_teacher(states.last, target.head, draft.target_ids(), batch.loss_mask, batch.document_ids)
                found.append(ttt_loss(draft, target.embed, states.aux, batch, taught).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert min(losses[0]) > 0.1
    assert disk.is_checked.sum() > 6


RANK = """
import sys
from soar_prep.eagle3.capture import capture
from soar_prep.settings import Capture, Compute, Data, HeldOut, TextSource
target, path, output = sys.argv[1:]
data = Data(source=TextSource.text, path=path, samples=9, length=17)
compute = Compute(device="cpu", dtype="float32", batch_tokens=40)
capture(Capture(target=target, output=output, shard_tokens=50, data=data, evaluation=HeldOut(3), compute=compute))
"""


def test_two_processes_write_what_one_does(written: Written, tmp_path: Path):
    """Catches shards that no process writes, or a directory that is finished before the other one is done."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [written.settings.target, str(written.settings.data.path), str(tmp_path / "out")]
    ran = subprocess.run(
        [*command, str(tmp_path / "rank.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(road.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    one, two = files_of(written.directory), files_of(tmp_path / "out")
    del one["run.json"], two["run.json"]  # where the output is
    assert one == two


def test_data_comes_back_as_it_was(written: Written):
    """Catches a run from states that trains on other samples, or counts them otherwise, than one from the data."""
    tokenizer = load_tokenizer(Path(written.settings.target), False)
    parts = load_parts(written.settings.data, written.settings.evaluation, tokenizer, 256)
    captured = open_captured(written.directory)
    for part, read in zip(parts, (captured.held_out, captured.samples), strict=True):
        assert read.facts() == part.facts()
        assert read.first == part.first


def test_decoder_is_the_whole_target(written: Written):
    """Catches real decoding by a model whose layers are empty, and layers that stay in memory."""
    online = Target(StreamedModel(Checkpoint(Path(written.settings.target)), FP32), (0, 1, 2))
    disk = written.opened()
    with disk.decoder() as one, online.decoder() as two:
        assert torch.equal(one.start([5, 6, 7]).logits, two.start([5, 6, 7]).logits)
    assert all(parameter.is_meta for parameter in disk.model.layers.parameters())


def test_killed_anywhere_it_resumes_to_the_same_bytes(written: Written, dying: Callable[[int], None], tmp_path: Path):
    """Catches anything that a kill can break: death at every single file of the run, then the same command again."""
    settings, expected = replace(written.settings, output=str(tmp_path / "out")), files_of(written.directory)
    expected["run.json"] = expected["run.json"].replace(str(written.directory).encode(), settings.output.encode())
    shards = len(list(written.directory.glob("states-*")))
    deaths, is_dead = 0, True
    while is_dead:
        dying(deaths)
        try:
            capture(settings)
            is_dead = False
        except Killed:
            pass
        if is_dead:
            gc.collect()  # the traceback held the lock
            assert not (tmp_path / "out").exists()
            dying(-1)
            capture(settings)
            deaths += 1
        assert files_of(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")
    assert deaths == 2 * shards + 4  # identity, shards with a record each, samples, run.json, the directory


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_damaged_shard_is_captured_again(damage: str, written: Written, dying: Callable[[int], None], tmp_path: Path):
    """Catches a resume that trusts what a dying disk left; the other shards are not computed again."""
    settings, shards = (
        replace(written.settings, output=str(tmp_path / "out")),
        len(list(written.directory.glob("s*-*"))),
    )
    dying(2 * shards + 3)
    with pytest.raises(Killed):
        capture(settings)
    gc.collect()
    dying(-1)
    paths = sorted((tmp_path / "out.partial").glob("states-*"))
    times = [path.stat().st_mtime_ns for path in paths]
    content = bytearray(paths[1].read_bytes())
    content[-9] ^= 1
    if damage == "gone":
        paths[1].unlink()
    else:
        paths[1].write_bytes(content if damage == "flipped" else content[:-7])
    capture(settings)
    again = sorted((tmp_path / "out").glob("states-*"))
    assert [path.read_bytes() for path in again] == [
        path.read_bytes() for path in sorted(written.directory.glob("states-*"))
    ]
    assert [path.stat().st_mtime_ns == time for path, time in zip(again, times, strict=True)] == [
        number != 1 for number in range(shards)
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shard_tokens": 51}, "shard_tokens"),
        ({"scheme": Scheme.w4a4}, "scheme"),
        ({"compute": replace(FP32, dtype="bfloat16")}, "dtype"),
        ({"compute": replace(FP32, batch_tokens=41)}, "batch_tokens"),
        ({"evaluation": HeldOut(samples=2)}, "evaluation, samples, held_out"),
    ],
)
def test_other_settings_do_not_resume(
    changes: dict[str, Any], named: str, written: Written, dying: Callable[[int], None], tmp_path: Path
):
    """Catches shards of two different runs in one directory: what differs is named, and nothing is touched."""
    settings = replace(written.settings, output=str(tmp_path / "out"))
    dying(4)
    with pytest.raises(Killed):
        capture(settings)
    gc.collect()
    dying(-1)
    before = files_of(tmp_path / "out.partial")
    with pytest.raises(UserError, match=f"an interrupted run with another {named}; give the same options"):
        capture(replace(settings, **changes))
    gc.collect()
    assert files_of(tmp_path / "out.partial") == before
    capture(settings)


def test_full_disk_is_foreseen(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches hours of work whose last shard was never going to fit."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(road.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"disk: 0\.00 GiB needed for the states, 0\.00 GiB free; lower data\.samples"):
        capture(replace(written.settings, output=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


def test_full_disk_loses_no_finished_shard(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a half shard taken for whole, and an error in a writing thread that nobody hears of."""
    settings, save = replace(written.settings, output=str(tmp_path / "out")), road.PartialOutput.write

    def write(self: Any, part: int, tensors: Any, record: Any) -> None:
        if part == 2:
            raise OSError(28, "No space left on device", str(self.directory / self.shard_name(part)))
        save(self, part, tensors, record)

    with monkeypatch.context() as patched:
        patched.setattr(road.PartialOutput, "write", write)
        with pytest.raises(OSError, match="No space left on device"):
            capture(settings)
    gc.collect()
    assert (tmp_path / "out.partial" / "part-00001.json").exists()
    capture(settings)
    assert (tmp_path / "out" / "samples.safetensors").read_bytes() == (
        written.directory / "samples.safetensors"
    ).read_bytes()


def test_dry_run_only_tells_the_size(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches a dry run that writes, or loads a model of hundreds of gigabytes, or forgets how much is needed."""
    output = tmp_path / "out"
    assert capture(replace(written.settings, output=str(output), dry_run=True)) == output
    tokens = int(written.opened().every.borders[-1])
    assert f"states: 12 samples, {tokens} tokens of 1,024 bytes, in" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_batches_stay_within_their_tokens(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a batch sized by a short sample that holds a long one, which a full GPU does not survive; and padding
    because samples of all lengths were run together."""
    states, shapes, real = Target.states, [], []

    def noting(self: Target, batch: Any) -> States:
        shapes.append(batch.token_ids.numel())
        real.append(int((batch.document_ids >= 0).sum()))
        return states(self, batch)

    monkeypatch.setattr(Target, "states", noting)
    data = replace(written.settings.data, samples=10, length=40)
    capture(replace(written.settings, output=str(tmp_path / "out"), data=data, shard_tokens=1000))
    assert max(shapes) <= 40
    assert sum(real) > 0.9 * sum(shapes)
    assert len(shapes) < 13


def test_states_that_are_not_finite_are_refused(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a draft that is trained to NaN, and a message that does not say by which sample."""
    states = Target.states

    def overflowing(self: Target, batch: Any) -> States:
        found = states(self, batch)
        found.aux[batch.document_ids == 7, 5] = torch.inf
        return found

    monkeypatch.setattr(Target, "states", overflowing)
    with pytest.raises(UserError, match=r"sample 7, counted from the first held-out one: NaN or infinite states"):
        capture(replace(written.settings, output=str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_tokens": 16}, r"shard_tokens=16: the longest sample has 17 tokens; raise it"),
        ({"compute": replace(FP32, batch_tokens=16)}, r"compute\.batch_tokens=16: the longest sample has 17 tokens"),
        ({"aux_layers": [0, 1, 3]}, r"aux_layers=\[0, 1, 3\]: the target's 3 layers are 0 to 2"),
        (
            {"evaluation": HeldOut(samples=30)},
            r"13 samples, of which evaluation\.samples=30 are held out; none is left",
        ),
    ],
)
def test_unfit_options_are_told(changes: dict[str, Any], message: str, written: Written, tmp_path: Path):
    """Catches a traceback, or an hour of work before it."""
    settings = replace(written.settings, output=str(tmp_path / "out"), **changes)
    if "evaluation" in changes:
        settings = replace(settings, data=replace(settings.data, length=64))
    with pytest.raises(UserError, match=message):
        capture(settings)
    assert list(tmp_path.iterdir()) == []


def test_empty_data_is_told(written: Written, tmp_path: Path):
    """Catches a directory without a shard."""
    (tmp_path / "empty.jsonl").write_text("")
    data = replace(written.settings.data, path=str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match=r"empty\.jsonl: empty; expected one JSON object a line"):
        capture(replace(written.settings, output=str(tmp_path / "out"), data=data))


def test_corrupt_state_is_refused_when_it_is_read(spoilt: Written):
    """Catches a flipped bit that is trained on; the other samples stay readable."""
    path = spoilt.directory / open_captured(spoilt.directory).facts["shards"][1]["file"]
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["aux", "last"]
    content[-1] ^= 1  # of the shard's last sample
    path.write_bytes(content)
    target = spoilt.opened()
    first, stop = target.captured.facts["shards"][1]["samples"]
    for number in range(len(target.every)):
        (batch, _) = next(batches(target.every.part(number, number + 1), Batching(40)))
        if number == stop - 1:
            message = rf"{path.name}: the states of sample {number} are not those that were written; copy the directory"
            with pytest.raises(UserError, match=message):
                target.states(batch)
        else:
            target.states(batch)
    assert stop - first > 1


def open_and_read(written: Written, batch: Batch | None) -> None:
    """Only a shard's header is damage that opening does not see."""
    target = written.opened()
    if batch is not None:
        target.states(batch)


@pytest.mark.parametrize("damage", ["truncated", "gone", "header", "samples", "run"])
def test_damaged_directory_is_refused(damage: str, spoilt: Written):
    """Catches a copy that was cut short, found out hours into training: each message names the file and the remedy."""
    first_batch = next(batches(spoilt.opened().every.part(0, 1), Batching(40)))[0]
    shard = spoilt.directory / open_captured(spoilt.directory).facts["shards"][0]["file"]
    samples, content = spoilt.directory / "samples.safetensors", bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(content[:-7])
    elif damage == "gone":
        shard.unlink()
    elif damage == "header":
        shard.write_bytes(b"\xff" * 16 + content[16:])
    elif damage == "samples":
        tensors = load_file(samples)
        tensors["token_ids"][3] += 1
        save_file(tensors, samples)
    else:
        (spoilt.directory / "run.json").unlink()
    name = {"samples": samples.name, "run": "no run.json; expected the finished output"}.get(damage, shard.name)
    remedy = (
        "the same command resumes" if damage == "run" else "copy the directory again, or remove it and run soar-prep"
    )
    with pytest.raises(UserError, match=rf"{name}.*{remedy}"):
        open_and_read(spoilt, first_batch if damage == "header" else None)


def test_another_target_is_refused(written: Written, model_directory: Models):
    """Catches a draft trained on the states of one model and the head of another, or under another scheme or dtype."""
    with pytest.raises(UserError, match="the states of another target; give the one they are of"):
        replace(written, hashes=written.hashes | {"config.json": "0" * 64}).opened()
    with pytest.raises(UserError, match="states of scheme w4a16, but this run has w4a4; give scheme=w4a16"):
        written.opened(Scheme.w4a4)
    half = StreamedModel(Checkpoint(model_directory("llama")), replace(FP32, dtype="bfloat16"))
    with pytest.raises(UserError, match=r"dtype float32, but this run has bfloat16; give compute\.dtype=float32"):
        replace(written, model=half).opened()


def test_other_samples_are_refused(written: Written):
    """Catches states given to the tokens of another data set that has as many samples."""
    target = written.opened()
    (batch, _) = next(batches(target.captured.samples, Batching(40)))
    batch.token_ids[0, 1] += 1
    with pytest.raises(UserError, match=r"sample \d+ of the data is not the one that was captured"):
        target.states(batch)


def test_bf16_states_are_kept_to_the_bit(written: Written, tmp_path: Path):
    """Catches states that pass through another dtype on their way."""
    compute = replace(FP32, dtype="bfloat16")
    settings = replace(written.settings, output=str(tmp_path / "out"), compute=compute, shard_tokens=17)
    disk = replace(
        written,
        directory=capture(settings),
        model=StreamedModel(Checkpoint(Path(settings.target)), compute),
    ).opened()
    online = Target(StreamedModel(Checkpoint(Path(settings.target)), compute), (0, 1, 2))
    for number in range(3):  # a shard each, so the same shape was run
        (batch, _) = next(batches(disk.every.part(number, number + 1), Batching(40)))
        assert torch.equal(disk.states(batch).aux, online.states(batch).aux)
        assert torch.equal(disk.states(batch).last, online.states(batch).last)


def test_regenerated_answers_are_captured(model_copy: Callable[..., Path], tmp_path: Path):
    """Catches states of the answers in the data where the target's own were asked for, and held-out ones left alone."""
    model = model_copy("llama")
    (model / "chat_template.jinja").write_text(CHATML)
    chats = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "q" * 30}]}
        for i in range(6)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = Data(path=str(path), samples=4, length=64, regenerate=True, answer_tokens=9)
    settings = Capture(
        target=str(model),
        output=str(tmp_path / "out"),
        data=data,
        evaluation=HeldOut(samples=2),
        compute=replace(FP32, batch_tokens=64),
    )
    captured = open_captured(capture(settings))
    lines = [json.loads(line) for line in (tmp_path / "out.answers.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == [1, 2, 3, 4, 5, 6]
    assert (len(captured.held_out), len(captured.samples)) == (2, 4)
    tokenizer = load_tokenizer(model, False)
    every = join(captured.held_out, captured.samples)
    texts = {tokenizer.decode(every.token_ids[slice(*every.borders[i : i + 2])]) for i in range(6)}
    assert texts == {tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines}
    assert not any("qqqqqqqqqq" in text for text in texts)
