import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from soar_prep.eagle3 import regenerate as road
from soar_prep.eagle3.data import load_parts
from soar_prep.eagle3.regenerate import Draw, regenerate, regenerate_parts, split_prompts
from soar_prep.errors import UserError
from soar_prep.settings import Data, HeldOut, TextSource

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
HASHES = {"model.safetensors": "a" * 64}
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def tokenizer(model_directory: Models) -> Any:
    loaded = AutoTokenizer.from_pretrained(model_directory("llama"))
    loaded.chat_template = CHATML
    return loaded


@pytest.fixture(scope="module")
def model(model_directory: Models) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32).eval()


def chats(count: int) -> list[dict[str, Any]]:
    """One to three questions each, of several lengths; every fifth opens with an answer."""
    rows = []
    for i in range(count):
        turns = [{"role": "assistant", "content": "I begin."}] if i % 5 == 4 else []
        for question in range(1 + i % 3):
            turns.append({"role": "user", "content": f"Number {i}, question {question}" + " and more" * (i % 4)})
            turns.append({"role": "assistant", "content": f"source {i}"})
        rows.append({"messages": turns})
    return rows


Regenerate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tokenizer: Any, model: Any, tmp_path: Path) -> Regenerate:
    """Lines of the answers' file."""

    def make(count: int = 11, name: str = "answers.jsonl", together: int = 4, **changes: Any) -> list[dict[str, Any]]:
        source = tmp_path / "source.jsonl"
        if not source.exists():
            source.write_text("".join(json.dumps(row) + "\n" for row in chats(11)))
        data = Data(**{"path": str(source), "length": 256, "answer_tokens": 8, "regenerate": True} | changes)
        regenerate(data, count, tokenizer, model, tmp_path / name, HASHES, together)
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    return make


def generated(model: Any, ids: list[int], tokens: int, stops: list[int]) -> list[int]:
    """What model.generate adds to one prompt, without padding."""
    config = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=stops, pad_token_id=0)
    prompt = torch.tensor([ids])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    return answer[0, len(ids) :].tolist()


def single(model: Any, tokenizer: Any, turns: list[dict[str, str]], tokens: int) -> tuple[str, bool]:
    """The answer to these turns, and whether it was cut."""
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = generated(model, tokenizer(text, add_special_tokens=False).input_ids, tokens, [0, 1])
    return tokenizer.decode(ids, skip_special_tokens=True), ids[-1] not in (0, 1)


def test_greedy_answers_are_those_of_single_prompts(run: Regenerate, model: Any, tokenizer: Any):
    """Catches padding that is seen, answers given to another conversation, an earlier answer of the source in a later
    prompt, and a stop that is decoded."""
    lines = run()
    assert len(lines) == 11
    several = 0
    for line in lines:
        source = chats(11)[line["row"] - 1]["messages"]
        assert [turn["role"] for turn in line["messages"]] == [turn["role"] for turn in source]
        cut = iter(line["cut"])
        for i, turn in enumerate(line["messages"]):
            if turn["role"] == "user" or i == 0:
                assert turn == source[i]
            else:
                assert (turn["content"], next(cut)) == single(model, tokenizer, line["messages"][:i], 8)
                several += i > 2
        assert list(cut) == []
    assert several > 5


def test_an_answer_ends_where_the_target_ends_it(run: Regenerate, model: Any, tokenizer: Any, tmp_path: Path):
    """Catches an answer that runs on behind its stop, is called cut though it ended, or the other way round; and a
    stop that only the model's own settings name."""
    questions = [f"{i} is it" for i in range(7)]
    prompts = [f"<s>user\n{question}</s>\n<s>assistant\n" for question in questions]
    free = [generated(model, tokenizer(text, add_special_tokens=False).input_ids, 8, [0, 1]) for text in prompts]
    stop = min({token for ids in free for token in ids[1:]} - set.intersection(*map(set, free)) - {0, 1})
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in questions]
    (tmp_path / "source.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    own, model.generation_config = model.generation_config, GenerationConfig(eos_token_id=[stop])
    try:
        lines = run()
    finally:
        model.generation_config = own
    assert {flag for line in lines for flag in line["cut"]} == {True, False}
    for line in lines:
        ids = free[line["row"] - 1]
        end = next((at for at, token in enumerate(ids) if token in (0, 1, stop)), None)
        content = tokenizer.decode(ids[:end], skip_special_tokens=True)
        assert (line["messages"][1]["content"], line["cut"]) == (content, [end is None])


def test_generation_settings_of_the_model_do_not_count(run: Regenerate, model: Any):
    """Catches a repetition penalty that the model's files bring: the draft would learn another distribution."""
    plain = run()
    own = model.generation_config
    model.generation_config = GenerationConfig(repetition_penalty=5.0, do_sample=True, max_length=3)
    try:
        assert run(name="again.jsonl") == plain
        assert model.generation_config.repetition_penalty == 5.0
    finally:
        model.generation_config = own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_killed_anywhere_it_resumes_to_the_same_bytes(temperature: float, run: Regenerate, tmp_path: Path):
    """Catches draws that go on from another place, half a line that is kept, a conversation lost or answered twice."""
    run(temperature=temperature)
    path = tmp_path / "answers.jsonl"
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for kept in (0, 1, ends[0], ends[3] - 1, ends[3], ends[4] + 3, ends[8], ends[10] - 1, ends[10]):
        path.write_bytes(whole[:kept])
        run(temperature=temperature)
        assert path.read_bytes() == whole


def test_finished_answers_are_not_generated_again(run: Regenerate, monkeypatch: pytest.MonkeyPatch):
    """Catches hours of answers made twice."""
    lines = run()
    monkeypatch.setattr(road, "generate", None)
    assert run() == lines


def test_draws_depend_on_the_seed_and_nothing_else(run: Regenerate):
    """Catches draws that are all alike, that a seed does not change, or that the batch around them does."""
    first, other = run(temperature=1.0), run(name="b.jsonl", temperature=1.0, seed=1)
    alone, greedy = run(name="c.jsonl", temperature=1.0, together=1), run(name="d.jsonl")
    answers = [{line["row"]: line["messages"] for line in lines} for lines in (first, other, alone, greedy)]
    assert answers[0] == answers[2]
    assert all(answers[0][row] != answers[1][row] for row in answers[0])
    assert all(answers[0][row] != answers[3][row] for row in answers[0])


def test_draws_are_from_the_target_at_its_temperature():
    """Catches a temperature that multiplies, and noise that is not the right one. Four standard deviations."""
    logits, n = torch.tensor([2.0, 0.0, -1.0, 1.0]), 20_000
    drawn = Draw(0.5, list(range(n)), torch.device("cpu"))(torch.empty(0), logits.expand(n, 4)).argmax(dim=-1)
    p = (logits / 0.5).softmax(dim=-1)
    share = drawn.bincount(minlength=4) / n
    assert ((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()


@pytest.mark.parametrize("apart", [False, True])
def test_same_conversations_in_the_same_order(apart: bool, tokenizer: Any, model: Any, tmp_path: Path):
    """Catches held-out conversations that are trained on once the answers are the target's."""
    for name, first in (("source.jsonl", 0), ("other.jsonl", 100)):
        rows = [{"messages": [{"role": "user", "content": f"{first + i} is it"}, {"role": "assistant", "content": "x"}]}
                for i in range(9)]  # fmt: skip
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(path=str(tmp_path / "source.jsonl"), samples=5, length=64, answer_tokens=3, seed=3, regenerate=True)
    evaluation = HeldOut(samples=2, path=str(tmp_path / "other.jsonl") if apart else None)
    answered = regenerate_parts(data, evaluation, tokenizer, model, tmp_path / "out", HASHES)
    assert not answered[0].regenerate
    questions = []
    for given in ((data, evaluation), answered):
        found = []
        for part in load_parts(*given, tokenizer, 256):
            texts = [tokenizer.decode(part.token_ids[slice(*part.borders[i : i + 2])]) for i in range(len(part))]
            found.append([text.split(" is it")[0] for text in texts])
        questions.append(found)
    assert questions[0] == questions[1]
    assert [len(part) for part in questions[0]] == [2, 5]
    names = {"out.answers.jsonl"} | ({"out.held_out_answers.jsonl"} if apart else set())
    assert {path.name for path in tmp_path.glob("out*.jsonl")} == names


def test_fewer_conversations_than_wanted(run: Regenerate):
    """Catches a crash, or an endless wait, at the end of the data; and a limit without effect."""
    assert sorted(line["row"] for line in run(count=1000)) == list(range(1, 12))
    assert len(run(count=3, name="b.jsonl")) == 3


def test_what_is_cut_from_the_samples_is_not_generated(run: Regenerate, tokenizer: Any):
    """Catches hours of answers that no sample holds, prompts beyond the target's positions, and answers of the source
    left behind in a long conversation."""
    lines = run(length=60, answer_tokens=40)
    assert {line["row"] for line in lines} == set(range(1, 12))
    shortened = 0
    for line in lines:
        source = chats(11)[line["row"] - 1]["messages"]
        shortened += len(line["messages"]) < len(source)
        for i, turn in enumerate(line["messages"]):
            if turn["role"] == "assistant" and i:
                prompt = tokenizer.apply_chat_template(line["messages"][:i], tokenize=False, add_generation_prompt=True)
                assert len(tokenizer(prompt, add_special_tokens=False).input_ids) < 60
                assert not turn["content"].startswith("source")
    assert shortened > 3


def test_rows_that_run_together_stay_within_the_length():
    """Catches a short prompt's long answer that drives a long prompt's row beyond the model's positions."""
    data = Data(length=100, answer_tokens=30)
    prompts = {0: [1] * 99, 1: [1] * 5, 2: [1] * 70, 3: [1] * 80, 4: [1] * 71}
    assert list(split_prompts(prompts, data, context=100)) == [[1, 2], [4], [3], [0]]
    assert list(split_prompts(prompts, data, context=129)) == [[1, 2, 4, 3, 0]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"answer_tokens": 9}, "answer_tokens"),
        ({"temperature": 1.0}, "temperature"),
        ({"length": 199}, "length"),
        ({"seed": 1}, "seed"),
        ({"count": 10}, "conversations"),
        ({"together": 5}, "together"),
    ],
)
def test_answers_of_other_settings_are_refused(changes: dict[str, Any], named: str, run: Regenerate, tmp_path: Path):
    """Catches answers of two targets or settings in one file, and a file that is lost to a wrong option."""
    run()
    before = (tmp_path / "answers.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"answers with another {named}; give the same options to resume"):
        run(**changes)
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_answers_of_another_target_are_refused(
    run: Regenerate, tokenizer: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches a draft trained on the answers of the target's last version."""
    run()
    monkeypatch.setitem(HASHES, "model.safetensors", "b" * 64)
    with pytest.raises(UserError, match="answers with another target"):
        run()


@pytest.mark.parametrize("damage", ["swapped", "not_json", "longer", "foreign"])
def test_a_damaged_file_is_refused(damage: str, run: Regenerate, tmp_path: Path):
    """Catches conversations in another order, which would be held out or trained on by chance, and foreign files."""
    run()
    path = tmp_path / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "swapped":
        lines[:2] = lines[1::-1]
    elif damage == "not_json":
        lines[1] = b"{\n"
    elif damage == "longer":
        lines.append(lines[0])
    else:
        (tmp_path / "answers.jsonl.identity.json").unlink()
    path.write_bytes(b"".join(lines))
    message = {"swapped": "line 1: row", "not_json": "line 2: row None", "longer": "12 lines, but 11 conversations"}
    with pytest.raises(UserError, match=message.get(damage, "tells whose answers these are; move the file away")):
        run()
    assert path.read_bytes() == b"".join(lines)


def test_second_run_is_refused_while_the_first_lives(run: Regenerate, tmp_path: Path):
    """Catches two runs that write into one file."""
    with open(tmp_path / "answers.jsonl", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UserError, match=r"answers\.jsonl: another run is writing it; wait for it or stop it"):
            run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": TextSource.text}, r"data\.regenerate=true: data\.source=text has no answers; expected chat"),
        ({"length": 257}, r"data\.length=257: the model's context is 256 tokens"),
        ({"path": None}, r"data\.source=chat: needs a file or a dataset id"),
    ],
)
def test_unfit_data_is_told(changes: dict[str, Any], message: str, run: Regenerate):
    """Catches a traceback, and text that is silently trained on as it is."""
    with pytest.raises(UserError, match=message):
        run(**changes)


def test_full_disk_is_told_and_resumes(run: Regenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches an error without a file's name, and half a group that is kept."""
    whole = run(name="whole.jsonl")
    with monkeypatch.context() as patched:
        calls = iter([None, None])

        def fsync(_: int) -> None:
            if next(calls, "full") == "full":
                raise OSError(28, "No space left on device")

        patched.setattr(road.os, "fsync", fsync)
        with pytest.raises(OSError, match=r"No space left on device.*answers\.jsonl"):
            run()
    assert run() == whole
