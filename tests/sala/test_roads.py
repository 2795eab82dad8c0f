"""Both roads on the tiny MiniCPM-SALA that was trained for these tests, with texts longer than its dense_len."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran
from safetensors.torch import load_file

from soar_prep.eagle3.export import read_draft
from soar_prep.sala import infllm
from soar_prep.sala.configuration import SPARSE

TINY = Path(__file__).with_name("tiny")
LENGTH = 200  # its dense_len is 128
QUANTIZE = ("calibration.samples=6", "evaluation.samples=4", "compute.device=cpu")
LENGTHS = (f"calibration.length={LENGTH}", f"evaluation.length={LENGTH}")
TRAIN = (
    *("data=builtin", f"data.length={LENGTH}", "data.samples=48", "evaluation.samples=4", "compute.batch_tokens=800"),
    *("optimizer.steps=12", "optimizer.learning_rate=3e-3", "loss.steps=3", "draft.draft_vocab_size=300"),
    *("decoding.prompts=2", "decoding.tokens=24", "decoding.depth=3", "decoding.candidates=6", "decoding.width=2"),
    "compute.device=cpu",
)
MIXERS = {
    "minicpm4": {"q_proj", "k_proj", "v_proj", "o_proj", "o_gate"},
    "lightning-attn": {"q_proj", "k_proj", "v_proj", "o_proj", "z_proj"},
}


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def facts_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, soar_prep: Callable[..., Ran]) -> Callable[[str], Path]:
    """Output of `soar-prep quantize` in one of the layouts."""

    @cache
    def run(layout: str) -> Path:
        output = tmp_path_factory.mktemp("sala") / layout
        ran = soar_prep("quantize", f"model={TINY}", f"output={output}", f"export={layout}", *QUANTIZE, *LENGTHS)
        assert (ran.code, ran.err) == (0, "")
        return output

    return run


@pytest.mark.parametrize("layout", ["modelopt", "compressed_tensors"])
def test_all_linears_are_quantized_and_nothing_else_changes(quantized: Callable[[str], Path], layout: str):
    """Catches a gate that stays BF16, and a config value that is dropped, changed or written as a default."""
    directory, source = quantized(layout), config_of(TINY)
    expected = set()
    for index, mixer in enumerate(source["mixer_types"]):
        layer = f"model.layers.{index}."
        expected |= {f"{layer}self_attn.{name}" for name in MIXERS[mixer]}
        expected |= {f"{layer}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    facts = facts_of(directory)
    assert set(facts["linears"]) == expected
    assert facts["kept"] == {}
    config = config_of(directory)
    del config["quantization_config"]
    assert config == source
    written = {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        if name.removesuffix(".weight") not in expected:
            assert torch.equal(written[name], tensor), name


def test_quality_is_that_of_a_trained_model(quantized: Callable[[str], Path]):
    """Catches a path of its own for measuring: perplexity of a model that was trained, little lost by quantizing."""
    quality = facts_of(quantized("modelopt"))["quality"]
    source = quality["w4a16"]["source_perplexity"]
    assert source < 20  # measured: 14; counts of pairs of tokens give 48
    assert quality["w4a16"]["perplexity"] < 1.02 * source
    assert 0 < quality["w4a16"]["kl"] < quality["w4a4"]["kl"] < 0.04


def test_calibration_runs_the_path_that_serving_runs(
    tmp_path: Path, soar_prep: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    """Catches calibration under dense attention: long windows choose blocks in sparse layers, short ones in none."""
    lengths: list[int] = []
    attend = infllm.sparse_attention

    def watched(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        lengths.append(q.shape[1])
        return attend(q, *arguments)

    monkeypatch.setattr(infllm, "sparse_attention", watched)
    for length in (100, LENGTH):
        lengths.clear()
        sizes = (f"calibration.length={length}", f"evaluation.length={length}", "method=round_to_nearest")
        ran = soar_prep("quantize", f"model={TINY}", f"output={tmp_path / str(length)}", *QUANTIZE, *sizes)
        assert (ran.code, ran.err) == (0, "")
        sparse = config_of(TINY)["mixer_types"].count(SPARSE)
        assert len(lengths) >= (0 if length < 128 else 6 * sparse)
        assert set(lengths) == (set() if length < 128 else {LENGTH})


def test_verify(quantized: Callable[[str], Path], soar_prep: Callable[..., Ran]):
    """Catches a checkpoint that our own check refuses, or that needs the source's code to be measured."""
    sizes = ("evaluation.samples=2", f"evaluation.length={LENGTH}", "compute.device=cpu", "gate.max_kl=0.2")
    ran = soar_prep("verify", quantized("modelopt"), f"reference={TINY}", *sizes)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("layout", ["", "modelopt"])
def test_a_draft(quantized: Callable[[str], Path], tmp_path: Path, soar_prep: Callable[..., Ran], layout: str):
    """Catches a recurrent state that is not rolled back, or that a context crossing dense_len reads otherwise: then
    the output with a draft is not the target's own."""
    target = quantized(layout) if layout else TINY
    ran = soar_prep("train-draft", f"target={target}", f"output={tmp_path / 'draft'}", *TRAIN)
    assert (ran.code, ran.err) == (0, "")
    facts = facts_of(tmp_path / "draft")
    for when in ("before", "after"):
        for shape in ("chain", "tree"):
            found = facts["decoding"][when][shape]
            assert found["equal"] == found["prompts"] == 2
    assert facts["evaluations"][-1]["alpha"][0] > facts["evaluations"][0]["alpha"][0]
    assert read_draft(tmp_path / "draft").config.hidden_size == config_of(TINY)["hidden_size"]


def test_captured_states_are_the_targets(
    quantized: Callable[[str], Path], tmp_path: Path, soar_prep: Callable[..., Ran]
):
    """Catches scaled logits or states that are stored otherwise than they are used: the same draft from disk."""
    target, data = quantized("modelopt"), [o for o in TRAIN if o.startswith(("data", "evaluation", "compute.device"))]
    states = tmp_path / "states"
    ran = soar_prep("capture", f"target={target}", f"output={states}", *data)
    assert (ran.code, ran.err) == (0, "")
    losses = []
    for name, more in (("online", ()), ("disk", (f"states={states}",))):
        options = [o for o in TRAIN if not o.startswith("decoding.prompts")]
        ran = soar_prep(
            "train-draft", f"target={target}", f"output={tmp_path / name}", *options, *more, "decoding.prompts=0"
        )
        assert (ran.code, ran.err) == (0, "")
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # states are stored in BF16
