import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran
from safetensors.torch import load_file

from soar_prep.eagle3 import train
from soar_prep.eagle3.export import read_draft
from soar_prep.eagle3.learner import Learner

TOPICS = ["weights", "scales", "layers", "tokens", "values", "sequences", "models", "blocks"]
OPTIONS = (
    "data.length=48",
    "evaluation.samples=3",
    "evaluation.every=4",
    "optimizer.steps=8",
    "optimizer.learning_rate=3e-3",
    "loss.steps=3",
    "save_every=3",
    "draft.draft_vocab_size=200",
    "decoding.prompts=2",
    "decoding.tokens=12",
    "decoding.depth=3",
    "decoding.candidates=6",
    "decoding.width=2",
    "compute.batch_tokens=192",
    "compute.device=cpu",
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = []
    for number in range(24):
        topic = TOPICS[number % len(TOPICS)]
        turns = [("user", f"Tell of {topic}, {number}."), ("assistant", f"The {topic} keep their {topic}. " * 2)]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def train_draft(
    soar_prep: Callable[..., Ran], model_directory: Callable[[str], Path], chats: Path
) -> Callable[..., Ran]:
    """The command on the tiny Llama; a later option stands for an earlier one."""

    def run(output: Path, *options: str, target: Path | None = None) -> Ran:
        chosen = dict(o.split("=", 1) for o in (f"data.path={chats}", *OPTIONS, *options))
        arguments = [f"{name}={value}" for name, value in chosen.items() if value != "leave_out"]
        return soar_prep("train-draft", f"target={target or model_directory('llama')}", f"output={output}", *arguments)

    return run


def facts_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


TIMES = ("elapsed_seconds", "memory_bytes", "tokens_per_second")


def test_the_whole_road(tmp_path: Path, train_draft: Callable[..., Ran]):
    """Catches a road that does not train, does not measure what it wrote, or leaves something behind."""
    output = tmp_path / "draft"
    ran = train_draft(output, "optimizer.steps=40", "evaluation.every=20")
    assert (ran.code, ran.err) == (0, "")
    names = sorted(path.name for path in output.iterdir())
    assert names == ["config.json", "metrics.jsonl", "model.safetensors", "report.html", "run.json"]
    assert not (tmp_path / "draft.partial").exists()
    facts, metrics = facts_of(output), metrics_of(output)
    assert [row["update"] for row in metrics] == list(range(1, 41))
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert all(len(row[name]) == 3 for row in metrics for name in ("lambda", "alpha", "accuracy"))
    assert [e["update"] for e in facts["evaluations"]] == [0, 20, 40]
    assert facts["evaluations"][-1]["alpha"][0] > facts["evaluations"][0]["alpha"][0] + 0.05
    assert facts["best"]["tau_greedy"] == max(e["tau_greedy"] for e in facts["evaluations"][1:])
    for when in ("before", "after"):
        for shape in ("chain", "tree"):
            found = facts["decoding"][when][shape]
            assert found["equal"] == found["prompts"] == 2
            assert sum(n * rounds for n, rounds in enumerate(found["lengths"], 1)) >= found["tokens"] - 2
    assert "--speculative-algorithm EAGLE3" in facts["launch"]["tree"]
    assert str(output) in facts["launch"]["tree"]
    draft = read_draft(output)
    assert draft.config.draft_vocab_size == 200
    assert facts["draft"]["parameters"] == sum(p.numel() for p in draft.parameters())
    assert f"report: {output}/report.html" in ran.out


VARIANTS = {
    "plain": (),
    "average": ("optimizer.ema=0.9", "optimizer.accumulate=2", "positions.rule=aoi", "positions.gaps=2"),
    # the saved state is of update 3: before the turn, which comes again, or after it
    "nvfp4 to come": ("qat=nvfp4", "qat.share=0.5", "qat.activations=static", "optimizer.ema=0.9"),
    "nvfp4": ("qat=nvfp4", "qat.share=0.75", "qat.lm_head=true"),
    "packed": ("data.pack=true", "checkpointing=true", "loss.kind=tv", "optimizer.weight_decay=0.1"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, train_draft: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, variant: str
):
    """Catches anything that a saved state leaves out: moments, average, place in the data, best draft, history."""
    options = VARIANTS[variant]
    assert train_draft(tmp_path / "whole", *options).code == 0
    update = Learner.update
    with monkeypatch.context() as patch:

        def stop(self: Learner, lessons: Any) -> Any:
            if self.done == 5:  # two updates after the last saved state
                raise KeyboardInterrupt
            return update(self, lessons)

        patch.setattr(Learner, "update", stop)
        assert train_draft(tmp_path / "halved", *options).code == 130
    assert len(metrics_of(tmp_path / "halved.partial")) == 5
    ran = train_draft(tmp_path / "halved", *options)
    assert (ran.code, "resuming after update 3" in ran.out) == (0, True)
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert (whole / "model.safetensors").read_bytes() == (halved / "model.safetensors").read_bytes()
    assert metrics_of(whole) == metrics_of(halved)
    for name in ("evaluations", "decoding", "by_position", "best"):
        assert facts_of(whole)[name] == facts_of(halved)[name], name


def test_a_killed_process_resumes(
    tmp_path: Path, model_directory: Callable[[str], Path], chats: Path, train_draft: Callable[..., Ran]
):
    """Catches a state that only an orderly end completes: the process gets SIGKILL, wherever it is just then."""
    output, steps = tmp_path / "draft", "optimizer.steps=60"
    arguments = [f"target={model_directory('llama')}", f"data.path={chats}", f"output={output}", *OPTIONS, steps]
    command = [sys.executable, "-m", "soar_prep.cli", "train-draft", *arguments, "save_every=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    state = tmp_path / "draft.partial" / train.STATE
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    printed, _ = process.communicate()
    assert state.exists(), printed
    ran = train_draft(output, steps)
    assert (ran.code, "resuming after update " in ran.out) == (0, True), ran.err
    assert train_draft(tmp_path / "whole", steps).code == 0
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_divergence_stops_with_the_samples_named(tmp_path: Path, train_draft: Callable[..., Ran]):
    """Catches a NaN that is trained on, and a good draft that it takes along."""
    output = tmp_path / "draft"
    ran = train_draft(output, "optimizer.learning_rate=1e30", "optimizer.warmup=0", "save_every=1")
    assert ran.code == 2
    assert "the loss or its gradient is NaN or infinite" in ran.err
    assert "Samples of its batches: " in ran.err
    assert not output.exists()
    kept = torch.load(tmp_path / "draft.partial" / train.STATE, weights_only=True)
    assert all(bool(t.isfinite().all()) for t in kept["learner"]["weight"].values())


def test_other_settings_do_not_resume(tmp_path: Path, train_draft: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    """Catches two half runs that are taken for a whole one."""

    def stop(self: Learner, lessons: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", stop)
        assert train_draft(tmp_path / "draft").code == 130
    ran = train_draft(tmp_path / "draft", "optimizer.learning_rate=1e-3")
    assert (ran.code, "an interrupted run with another optimizer" in ran.err) == (2, True)
    assert train_draft(tmp_path / "draft").code == 0


def test_a_damaged_state_is_told(tmp_path: Path, train_draft: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    """Catches a traceback from inside torch where a file was cut short."""
    monkeypatch.setattr(train, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert train_draft(tmp_path / "draft").code == 130
    state = tmp_path / "draft.partial" / train.STATE
    state.write_bytes(state.read_bytes()[:-100])
    ran = train_draft(tmp_path / "draft")
    assert (ran.code, f"{state}: damaged" in ran.err) == (2, True)


def test_a_full_disk_keeps_the_state_before(
    tmp_path: Path, train_draft: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    """Catches a saved state that is overwritten by half of the next one."""
    save = torch.save

    def full(state: Any, file: Any) -> None:
        if state["learner"]["done"] > 3:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    ran = train_draft(tmp_path / "draft")
    assert (ran.code, "No space left on device" in ran.err) == (2, True)
    partial = tmp_path / "draft.partial"
    assert torch.load(partial / train.STATE, weights_only=True)["learner"]["done"] == 3
    assert not (partial / (train.STATE + ".tmp")).exists()


def test_states_from_disk_give_the_same_draft(
    tmp_path: Path, soar_prep: Callable[..., Ran], model_directory: Callable[[str], Path], chats: Path, train_draft: Any
):
    """Catches states, samples or numbers that differ between capture and training."""
    target = model_directory("llama")
    small = ("data.length=48", "evaluation.samples=3", "compute.device=cpu", "compute.batch_tokens=192")
    ran = soar_prep("capture", f"target={target}", f"data.path={chats}", f"output={tmp_path / 'states'}", *small)
    assert (ran.code, ran.err) == (0, "")
    assert train_draft(tmp_path / "online").code == 0
    ran = train_draft(tmp_path / "disk", f"states={tmp_path / 'states'}", "data.path=leave_out")
    assert (ran.code, ran.err) == (0, "")
    online, disk = (load_file(tmp_path / name / "model.safetensors") for name in ("online", "disk"))
    for name, tensor in online.items():
        torch.testing.assert_close(disk[name], tensor, rtol=0.02, atol=2e-3, msg=name)
    ran = train_draft(tmp_path / "other", f"states={tmp_path / 'states'}", "draft.aux_layers=[0,1,2]")
    assert ran.code == 0, ran.err


def test_from_an_existing_draft(tmp_path: Path, train_draft: Callable[..., Ran], model_directory: Any):
    """Catches draft.init that loses weights or vocabulary, or is taken for another target's."""
    assert train_draft(tmp_path / "first").code == 0
    ran = train_draft(tmp_path / "second", f"draft.init={tmp_path / 'first'}", "optimizer.steps=1")
    assert (ran.code, ran.err) == (0, "")
    first, second = facts_of(tmp_path / "first"), facts_of(tmp_path / "second")
    assert second["evaluations"][0]["alpha"] == pytest.approx(first["evaluations"][-1]["alpha"], rel=1e-3)
    ran = train_draft(tmp_path / "third", f"draft.init={tmp_path / 'first'}", target=model_directory("qwen3"))
    assert (ran.code, "draft.init=" in ran.err) == (2, True)


def test_the_best_evaluation():
    """Catches a BF16 figure that stands for an NVFP4 draft, and training under NVFP4 kept where it only did harm."""

    def best(*evaluations: tuple[int, str, float]) -> tuple[int, str]:
        rows = [dict(zip(("update", "format", "tau_greedy"), e, strict=True)) for e in evaluations]
        found = train.History(evaluations=rows).best()
        return found["update"], found["format"]

    assert best((0, "none", 1.5)) == (0, "none")
    assert best((0, "none", 1.5), (4, "none", 1.2), (8, "none", 1.3)) == (8, "none")
    assert best((0, "none", 1.5), (4, "none", 1.4), (4, "nvfp4", 1.2), (8, "nvfp4", 1.3)) == (8, "nvfp4")
    assert best((0, "none", 1.5), (0, "nvfp4", 1.4), (4, "nvfp4", 1.3)) == (0, "nvfp4")  # qat.start_from


def test_nvfp4_draft(tmp_path: Path, train_draft: Callable[..., Ran], soar_prep: Callable[..., Ran]):
    """Catches a draft in NVFP4 that is not trained under it, not told of, or that no server would know for one."""
    output = tmp_path / "draft"
    ran = train_draft(output, "qat=nvfp4", "qat.share=0.5", "optimizer.steps=20", "qat.learning_rate=1e-3")
    assert (ran.code, ran.err) == (0, "")
    facts = facts_of(output)
    kinds = [(e["update"], e["format"]) for e in facts["evaluations"]]
    assert kinds == [(n, "none") for n in (0, 4, 8, 10)] + [(n, "nvfp4") for n in (10, 12, 16, 20)]
    assert facts["best"]["format"] == "nvfp4"  # though an evaluation in BF16 may have been better
    assert "at best after training under it" in (output / "report.html").read_text()
    assert "--speculative-draft-model-quantization modelopt_fp4" in facts["launch"]["tree"]
    assert metrics_of(output)[10]["learning_rate"] == pytest.approx(1e-3)
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["fc", "lm_head"]
    assert facts["decoding"]["after"]["chain"]["equal"] == 2
    verified = soar_prep("verify", f"directory={output}")
    assert (verified.code, "7 NVFP4 linears" in verified.out) == (0, True), verified.err
    again = tmp_path / "again"  # a finished draft goes on under rounded weights
    ran = train_draft(again, "qat=nvfp4", f"qat.start_from={output}", "optimizer.steps=2", "qat.lm_head=true")
    assert (ran.code, ran.err) == (0, "")
    assert {e["format"] for e in facts_of(again)["evaluations"][1:]} == {"nvfp4"}
    assert json.loads((again / "config.json").read_text())["quantization_config"]["ignore"] == ["fc"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("qwen3", ("draft.aux_layers=leave_out",)), ("llama", ("data.regenerate=true", "data.answer_tokens=8"))],
)
def test_other_targets_and_regenerated_answers(
    tmp_path: Path, train_draft: Callable[..., Ran], model_directory: Any, name: str, changes: tuple[str, ...]
):
    """Catches a road that fits one family alone, and answers that never reach the training."""
    ran = train_draft(tmp_path / "draft", "optimizer.steps=2", *changes, target=model_directory(name))
    if name == "qwen3":  # two layers: EAGLE-3 needs three
        assert (ran.code, "reads three different layers" in ran.err) == (2, True)
        return
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "draft.answers.jsonl").exists()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("draft.aux_layers=[0,1]", "expected three different layers, ascending"),
        ("draft.aux_layers=[0,1,7]", "the target's 3 layers are 0 to 2"),
        ("draft.max_position_embeddings=20", "raise draft.max_position_embeddings"),
        ("draft.num_key_value_heads=3", "do not divide among 3"),
        ("data.length=300", "the model's context is 256 tokens"),
        ("evaluation.samples=24", "none is left to train on"),
        ("data.path=/nowhere.jsonl", "/nowhere.jsonl"),
        ("states=/nowhere", "no run.json"),
        ("loss.steps=0", "loss.steps=0: expected 1 or more"),
        ("loss.kind=l2", "loss.kind=l2"),
        ("positions.rule=alibi", "positions.rule=alibi"),
        ("qat=fp8", "nvfp4"),
        ("qat.start_from=/nowhere", "qat.start_from: needs qat=nvfp4"),
        ("qat.share=1.5", "qat.share=1.5"),
        ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, train_draft: Callable[..., Ran], option: str, told: str):
    """Catches an option that is ignored, or that fails late and in torch's words."""
    ran = train_draft(tmp_path / "draft", option)
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert not (tmp_path / "draft.partial").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("qat.scale_error=hessian_diag",), "qat.scale_error=hessian_diag: a draft in training has no Hessian"),
        (("draft.intermediate_size=40",), "midlayer.mlp.down_proj has 40 inputs, which do not divide into blocks"),
        (("qat.start_from=a", "draft.init=b"), "takes the place of draft.init"),
    ],
)
def test_wrong_options_of_nvfp4_are_told(tmp_path: Path, train_draft: Callable[..., Ran], options: Any, told: str):
    """Catches a draft that cannot be rounded and is trained all the same."""
    ran = train_draft(tmp_path / "draft", "qat=nvfp4", *options)
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert not (tmp_path / "draft.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes(tmp_path: Path, model_directory: Callable[[str], Path], chats: Path, parallel: str):
    """Catches processes that wait for each other for ever, write over each other, or train on the same samples."""
    output = tmp_path / "draft"
    arguments = [f"target={model_directory('llama')}", f"data.path={chats}", f"output={output}", *OPTIONS]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    command = [*launch, "-m", "soar_prep.cli", "train-draft", *arguments, f"parallel={parallel}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    facts = facts_of(output)
    assert facts["processes"] == 2
    assert len(metrics_of(output)) == 8
    assert facts["decoding"]["after"]["chain"]["equal"] == 2
    assert facts["evaluations"][-1]["alpha"][0] > facts["evaluations"][0]["alpha"][0]
    assert ran.stdout.count("wrote ") >= 1
