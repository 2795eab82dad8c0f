import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from two_processes import CONFIG, UPDATES, lessons, new_learner, run

from soar_prep.eagle3.draft import Draft
from soar_prep.eagle3.export import read_draft, write_draft
from soar_prep.eagle3.learner import Learner, Lessons, learning_rate
from soar_prep.eagle3.nvfp4 import hold_rounded, prepare
from soar_prep.settings import Activations, DraftFormat, LossKind, Parallel, Qat


def test_the_schedule_rises_and_falls():
    """Catches a first update of rate zero, a last one above it, or a warm-up that ends elsewhere."""
    rates = [learning_rate(1.0, 0.1, done, 100) for done in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0) == rates[10]
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 1e-3
    assert learning_rate(1.0, 0.0, 0, 1) == 1.0


def test_updates_under_nvfp4_have_a_schedule_of_their_own():
    """Catches rounded weights trained at the end of a schedule, at a rate of zero."""
    learner = new_learner(qat=Qat(DraftFormat.nvfp4, share=0.5, learning_rate=1e-3))
    rates = []
    for done in range(10):
        learner.done = done
        rates.append(learner.learning_rate())
    assert rates[0] == 3e-3
    assert rates[5] == 1e-3
    assert 0 < rates[4] < 1e-3
    assert 0 < rates[9] < 2e-4


def test_bf16_computes_with_fp32_masters():
    """Catches masters that are rounded: at a rate this small a BF16 weight would never move."""
    learner = new_learner(dtype=torch.bfloat16, learning_rate=1e-6)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    assert all(weight.dtype == torch.float32 for weight in before.values())
    learner.update(lessons(0, 1, dtype=torch.bfloat16))
    after = learner.weights()
    assert any((after[name] != before[name]).any() for name in before)
    assert all((after[name] - before[name]).abs().max() < 1e-5 for name in before)


def test_bf16_gradients_are_near_fp32():
    """Catches a forward pass in BF16 that loses more than the dtype does."""
    norms = []
    for dtype in (torch.float32, torch.bfloat16):
        update = new_learner(dtype=dtype).update(lessons(0, 1, dtype=dtype))
        assert update is not None
        norms.append(update.gradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_accumulated_lessons_make_one_update():
    """Catches a sum where a mean belongs, and gradients that outlive their update."""
    two = new_learner(accumulate=2)
    update = two.update(lessons(0, 2))
    one = new_learner()
    gradients = []
    for lesson in lessons(0, 2):
        loss, _ = one.module(lesson)
        gradients.append(torch.autograd.grad(loss, list(one.parameters.values())))
    norm = torch.cat([((a + b) / 2).flatten() for a, b in zip(*gradients, strict=True)]).norm()
    assert update is not None
    assert update.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert all(weight.grad is None for weight in two.parameters.values())


@pytest.mark.parametrize("qat", [Qat(), Qat(DraftFormat.nvfp4, share=1.0, activations=Activations.static)], ids=str)
@pytest.mark.parametrize("kind", list(LossKind))
def test_checkpointing_changes_no_gradient(kind: LossKind, qat: Qat):
    """Catches a second forward pass with other weights than the first."""
    plain, again = (new_learner(kind=kind, checkpointing=on, dtype=torch.bfloat16, qat=qat) for on in (False, True))
    for learner in (plain, again):
        if learner.turn == 0:
            learner.start_rounding(lessons(0, 1, dtype=torch.bfloat16))
        for step in range(3):
            learner.update(lessons(step, 1, dtype=torch.bfloat16))
    for name, weight in plain.weights().items():
        assert torch.equal(weight, again.weights()[name]), name


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("head", [False, True], ids=["head in BF16", "head in NVFP4"])
def test_the_file_holds_what_the_forward_pass_ran(tmp_path: Path, activations: Activations, head: bool):
    """Catches a draft that is served with other weights than it was trained under: one more rounding, another scale.

    Loss and acceptance of the files, loaded afresh, equal those of the training forward bit for bit.
    """
    qat = Qat(DraftFormat.nvfp4, share=1.0, activations=activations, lm_head=head)
    learner = new_learner(dtype=torch.bfloat16, qat=qat)
    learner.start_rounding(lessons(0, 1, dtype=torch.bfloat16))
    learner.update(lessons(0, 1, dtype=torch.bfloat16))
    draft = Draft(CONFIG)
    draft.set_vocabulary(torch.arange(30))
    prepare(draft, qat)
    masters = learner.weights()
    draft.load_state_dict(draft.state_dict() | masters)
    draft.bfloat16()
    hold_rounded(draft, masters, learner.input_scales, qat)
    write_draft(draft, tmp_path / "draft")
    (lesson,) = lessons(7, 1, dtype=torch.bfloat16)
    served = Lessons(read_draft(tmp_path / "draft"), learner.module.inner.loss, learner.module.inner.embed)
    with torch.no_grad():
        (loss, trained), (again, found) = learner.module(lesson), served(lesson)
    assert torch.equal(loss, again)
    assert all(torch.equal(a.figures.alpha, b.figures.alpha) for a, b in zip(trained.steps, found.steps, strict=True))
    rounded = {name for name in load_file(tmp_path / "draft" / "model.safetensors") if name.endswith("weight_scale")}
    assert len(rounded) == 7 + head


def test_average_of_the_weights():
    """Catches an average that is the weights, or never moves."""
    learner = new_learner(ema=0.5)
    first = {name: weight.clone() for name, weight in learner.weights().items()}
    learner.update(lessons(0, 1))
    for name, weight in learner.weights().items():
        own = learner.parameters[name].detach()
        torch.testing.assert_close(weight, (first[name] + own) / 2)


def test_a_gradient_that_is_not_finite_changes_nothing():
    """Catches an optimizer that takes in NaN before anybody looks."""
    learner = new_learner(ema=0.9)
    learner.update(lessons(0, 1))
    before = learner.state()
    (lesson,) = lessons(1, 1)
    lesson.aux[0, 3] = torch.nan
    assert learner.update([lesson]) is None
    after = learner.state()
    assert before["done"] == after["done"] == 1
    for kind in ("weight", "exp_avg", "exp_avg_sq", "ema"):
        for name, tensor in before[kind].items():
            assert torch.equal(tensor, after[kind][name]), (kind, name)
    assert learner.update(lessons(1, 1)) is not None


def test_weight_decay_spares_norms():
    """Catches norms that are pulled to zero."""
    groups = new_learner(weight_decay=0.1).optimizer.param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0, {1})]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DraftFormat))
@pytest.mark.parametrize("parallel", list(Parallel))
def test_two_processes_train_as_one(tmp_path: Path, parallel: Parallel, kind: DraftFormat):
    """Catches gradients that are averaged where they are to be summed, a lambda of one process's own samples, shards
    put together wrongly, and a saved state that another number of processes cannot load."""
    script = Path(__file__).with_name("two_processes.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ran = subprocess.run(
        [*launch, str(script), parallel.value, kind.value, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    two: dict[str, Any] = torch.load(tmp_path / "two.pt", weights_only=True)
    qat = Qat(kind, share=0.8)  # of 10 updates: under rounded weights from the third on
    alone: Learner = new_learner(qat=qat, ema=0.9)
    updates = run(alone, UPDATES)
    for name in ("loss", "gradient_norm"):
        assert two[name] == pytest.approx([getattr(update, name) for update in updates], rel=2e-4), name
    for name in ("mixing", "alpha", "accuracy"):
        for there, here in zip(two[name], (getattr(update, name) for update in updates), strict=True):
            assert there == pytest.approx(here, rel=1e-3), name
    state = alone.state()
    for kind in ("weight", "exp_avg", "exp_avg_sq", "ema"):
        for name, tensor in state[kind].items():
            torch.testing.assert_close(two["state"][kind][name], tensor, rtol=1e-3, atol=2e-5, msg=f"{kind} {name}")
    assert two["state"]["input_scales"] == state["input_scales"]
    resumed = new_learner(qat=qat, ema=0.9)
    resumed.load(two["state"])
    assert resumed.done == UPDATES
    assert two["resumed"] is True
