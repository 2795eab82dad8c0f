"""What a draft loses in NVFP4, and how much of it comes back: rounded, by GPTQ, by training under it (QAT).

    python benchmarks/bench_draft_nvfp4.py run TARGET CHATS OUT --seed 0 --updates 300 [options as of bench_draft.py]
    python benchmarks/bench_draft_nvfp4.py table OUT/*.json

run: two drafts see the same batches, target states and first weights for the same number of updates: one stays BF16,
the other turns to NVFP4 for the last share of them (--share) while its learning rate goes on falling. --head trains one
more, its lm_head in NVFP4 too; --own-schedule X another, whose BF16 phase ends its schedule, and whose NVFP4 phase has
one from X on. The BF16 one is then rounded in two ways: FourOverSix by itself, and the quantizer's GPTQ, its Hessians
from the first training batches. Inputs stay as they are (W4A16). "recovered": of what FourOverSix alone loses.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from bench_draft import Course, Given, add_course_options, spread
from torch import Tensor

from soar_prep.eagle3.data import Place, batches
from soar_prep.eagle3.draft import Draft
from soar_prep.eagle3.learner import Learner, Lesson
from soar_prep.eagle3.nvfp4 import hold_stored, measuring_input_scales
from soar_prep.eagle3.train import CALIBRATION_BATCHES, Judge, LessonStream
from soar_prep.gptq.hessian import InputStatistics
from soar_prep.gptq.solve import solve_group
from soar_prep.layouts import QuantizedWeight
from soar_prep.qat.linear import nvfp4_linears
from soar_prep.report import environment
from soar_prep.settings import DraftFormat, Qat, Quantize, TrainDraft
from soar_prep.streaming import watching_inputs

BASE = "BF16"
INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    add_course_options(command, updates=300)
    command.add_argument("output", type=Path)
    command.add_argument("--share", type=float, default=Qat().share)
    command.add_argument("--own-schedule", type=float, metavar="X")
    command.add_argument("--head", action="store_true", help="also with lm_head in NVFP4")
    commands.add_parser("table").add_argument("records", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print_table([json.loads(path.read_text()) for path in arguments.records])
    else:
        run(Course(arguments), arguments)


class Trained:
    """One draft and all that trains it."""

    def __init__(self, course: Course, settings: TrainDraft):
        self.course, self.settings = course, settings
        draft, self.coverage = course.first_draft(settings)
        self.draft = draft.to(course.model.device)
        s = settings
        self.learner = Learner(
            self.draft, course.target.embed, s.loss, s.optimizer, course.updates, course.model.dtype, qat=s.qat
        )

    def lessons(self) -> LessonStream:
        course = self.course
        return LessonStream(self.settings, course.target, course.samples, course.batching, self.draft, Place())

    def update(self, lesson: Lesson) -> float:
        learner = self.learner
        if learner.done == learner.turn and self.settings.qat.format is DraftFormat.nvfp4:
            learner.start_rounding(self.lessons().take(CALIBRATION_BATCHES))
        done = learner.update([lesson])
        if done is None:
            raise SystemExit("the loss is not finite")
        return done.loss


def run(course: Course, arguments: argparse.Namespace) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    qat = Qat(DraftFormat.nvfp4, arguments.share)
    formats = {"": qat} | ({", lm_head too": replace(qat, lm_head=True)} if arguments.head else {})
    trained = {BASE: Trained(course, course.settings)}
    for suffix, own in formats.items():
        trained[f"QAT{suffix}"] = Trained(course, replace(course.settings, qat=own))
    base = trained[BASE]
    if arguments.own_schedule is not None:
        own = replace(qat, learning_rate=arguments.own_schedule)
        trained["QAT, own schedule"] = Trained(course, replace(course.settings, qat=own))
    stream, target_ids = base.lessons(), base.draft.target_ids().to(course.model.device)
    began = time.monotonic()
    for done, (batch, place) in enumerate(islice(batches(course.samples, course.batching), arguments.updates), 1):
        given = Given(course, batch, place.epoch, target_ids)
        at = replace(given.batch, positions=stream.positions(given.batch, place.epoch))
        losses = {name: one.update(Lesson(at, given.states.aux, given.taught)) for name, one in trained.items()}
        if done % 25 == 0 or done == 1:
            shown = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"seed {arguments.seed}, update {done}, {time.monotonic() - began:.0f} s: {shown}", flush=True)
    figures: dict[str, Any] = {}
    plain: dict[int, list[int]] = {}

    def measure(name: str, judge: Judge) -> None:
        judge.plain = plain  # the target's own output, once
        figures[name] = judge.acceptance() | {"decoding": judge.decoding()}
        print(f"seed {arguments.seed}, {name}: {summary(figures[name])}", flush=True)

    for name, one in trained.items():
        judge = course.judge(one.settings, one.draft)
        judge.take(one.learner.weights(), one.learner.input_scales)
        measure(name, judge)
    for suffix, own in formats.items():
        judge = course.judge(replace(course.settings, qat=own), base.draft)
        judge.take(base.learner.weights())
        scales, hessians = statistics_of(judge.draft, base)
        judge.take(base.learner.weights(), scales)
        measure(f"rounded{suffix}", judge)
        stored = by_gptq(base.learner.weights(), judge.draft, hessians)
        hold_stored(judge.draft, {name: QuantizedWeight(w, scales[name]) for name, w in stored.items()})
        measure(f"GPTQ{suffix}", judge)
    record = {
        "seed": arguments.seed,
        "coverage": base.coverage,
        "environment": environment(course.model.device),
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "figures": figures,
    }
    (arguments.output / f"nvfp4-seed-{arguments.seed}.json").write_text(json.dumps(record))


@torch.no_grad()
def statistics_of(draft: Draft, base: Trained) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(input scales by linear, H by shared input), over the passes of all TTT steps."""
    sums: dict[str, InputStatistics] = {}

    def add(key: str, x: Tensor) -> None:
        sums.setdefault(key, InputStatistics(x.shape[-1], x.device)).add(x, torch.ones_like(x[..., 0]).bool())

    embed, s = base.course.target.embed, base.settings
    learner = Learner(draft, embed, s.loss, s.optimizer, 1, base.course.model.dtype, qat=s.qat)
    leaders = {input_of(name): name for name in nvfp4_linears(draft)}  # one linear stands for all of its input
    watchers = {name: partial(add, key) for key, name in leaders.items()}
    with measuring_input_scales(draft) as scales, watching_inputs(draft, watchers):
        for lesson in base.lessons().take(CALIBRATION_BATCHES):
            learner.module(lesson)
    return scales, {key: one.finish()[0] for key, one in sums.items()}


def by_gptq(weights: dict[str, Tensor], draft: Draft, hessians: dict[str, Tensor]) -> dict[str, Any]:
    """NVFP4 weights by linear, with the quantizer's own settings."""
    settings, groups = Quantize(model="unused", output="unused"), dict[str, dict[str, Tensor]]()
    for name in nvfp4_linears(draft):
        groups.setdefault(input_of(name), {})[name] = weights[f"{name}.weight"]
    solved = [solve_group(group, hessians[key], settings) for key, group in groups.items()]
    return {name: one.weight for group in solved for name, one in group.items()}


def input_of(name: str) -> str:
    own = name.rpartition(".")[2]
    return INPUTS.get(own, own)


def summary(found: dict[str, Any]) -> str:
    text = f"alpha {found['alpha'][0]:.4f}, tau {found['tau_greedy']:.4f} / {found['tau_sampled']:.4f}"
    return text + "".join(f", {shape} {x['accepted']:.3f}" for shape, x in found["decoding"].items())


def print_table(records: list[dict[str, Any]]) -> None:
    first = records[0]
    facts = first["environment"]
    print(f"{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}, {facts['commit']}")
    chosen = first["arguments"]
    print(
        f"{len(records)} seeds, {chosen['updates']} updates of {chosen['batch_tokens']} tokens, of them "
        f"{float(chosen['share']):.0%} under NVFP4 for QAT\n"
    )
    print("| draft | simulated greedy | loses | recovered | sampled | loses | recovered | real chain | real tree |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in first["figures"]:
        cells = []
        rounded = "rounded, lm_head too" if name.endswith("lm_head too") else "rounded"
        for key in ("tau_greedy", "tau_sampled"):
            own, best, worst = ([r["figures"][n][key] for r in records] for n in (name, BASE, rounded))
            lost = [b - o for b, o in zip(best, own, strict=True)]  # of one seed each: the batches are the same
            gone = fmean(best) - fmean(worst)
            recovered = "" if name in (BASE, rounded) else f"{1 - fmean(lost) / gone:.0%}"
            cells += [spread(own), "" if name == BASE else signed(lost), recovered]
        for shape in ("chain", "tree"):
            cells.append(spread([r["figures"][name]["decoding"][shape]["accepted"] for r in records]))
        print(f"| {name} | {' | '.join(cells)} |")


def signed(values: list[float]) -> str:
    return f"{fmean(values):+.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
