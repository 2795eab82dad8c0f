"""Drafts trained side by side on one target's states: losses, positions, options, and SpecForge 0.2.0 as the peer.

    python benchmarks/bench_draft.py run TARGET CHATS OUT --seed 0 --updates 600 [--contenders hybrid ...]
    python benchmarks/bench_draft.py table OUT/*.json
    python benchmarks/bench_draft.py speed TARGET CHATS [--contenders hybrid specforge-kl]

run: every contender gets the same batches, target states, schedule, shape, vocabulary and, ours, the same first
weights; a seed draws the order of the data and the weights. Runs of other seeds or contenders may share a GPU:
--seconds and --together N find the number of updates that the slowest of N runs into one OUT can make. OUT/seed-*.json
hold the figures, OUT/<contender>-N the drafts of --keep. speed: updates alone, nothing else on the GPU; seconds an
update without the target's forward pass.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor

from soar_prep.checkpoint import Checkpoint
from soar_prep.eagle3.data import Batching, Place, batches, load_parts
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import write_draft
from soar_prep.eagle3.learner import Learner, Lesson
from soar_prep.eagle3.target import States, Target
from soar_prep.eagle3.train import Judge, LessonStream, draft_config, new_draft
from soar_prep.eagle3.ttt import ask_teacher
from soar_prep.report import environment
from soar_prep.settings import LossKind, PositionRule, TrainDraft
from soar_prep.streaming import StreamedModel, pick_device
from soar_prep.text import load_tokenizer

# name -> changes to the settings by dotted name
OURS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "kl": {"loss.kind": LossKind.kl},
    "tv": {"loss.kind": LossKind.tv},
    "neg-log-alpha": {"loss.kind": LossKind.neg_log_alpha},
    "aoi": {"positions.rule": PositionRule.aoi},
    "aoi-gaps": {"positions.rule": PositionRule.aoi, "positions.gaps": 3},
    "rope-1e6": {"draft.rope_theta": 1e6},
    "fc-norm": {"draft.fc_norm": True},
    "norm-output": {"draft.norm_output": True},
    "random-head": {"draft.head_from_target": False},
    "lr-3e-4": {"optimizer.learning_rate": 3e-4},
}
PEERS = ("specforge-kl", "specforge-lk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "speed"):
        command = commands.add_parser(name)
        add_course_options(command, updates=600 if name == "run" else 20)
        if name == "run":
            command.add_argument("output", type=Path)
            command.add_argument("--keep", nargs="*", default=[])
            command.add_argument("--seconds", type=float, default=None, help="of training, instead of --updates")
            command.add_argument("--together", type=int, default=1, help="runs that agree on a number of updates")
        command.add_argument("--contenders", nargs="*", default=[*OURS, *PEERS])
        command.add_argument("--peer-attention", help="SpecForge's own choice if not given; sdpa compiles nothing")
    commands.add_parser("table").add_argument("records", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print_tables([json.loads(path.read_text()) for path in arguments.records])
        return
    course = Course(arguments)
    if arguments.command == "run":
        run(course, arguments)
    else:
        measure_speed(course, arguments)


def add_course_options(command: argparse.ArgumentParser, updates: int) -> None:
    command.add_argument("target", type=Path)
    command.add_argument("chats")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--updates", type=int, default=updates)
    command.add_argument("--learning-rate", type=float, default=1e-3)
    command.add_argument("--batch-tokens", type=int, default=8192)
    command.add_argument("--samples", type=int, default=100_000)
    command.add_argument("--length", type=int, default=1024)
    command.add_argument("--vocabulary", type=int, default=16_384)
    command.add_argument("--positions", type=int, default=524_288)
    command.add_argument("--prompts", type=int, default=8)
    command.add_argument("--device", default="auto")


class Course:
    """The target, the data and the settings that all contenders share."""

    def __init__(self, arguments: argparse.Namespace):
        self.settings = common_settings(arguments)
        source = Checkpoint(arguments.target)
        self.model = StreamedModel(source, self.settings.compute)
        self.tokenizer = load_tokenizer(source.directory, False)
        data, evaluation = self.settings.data, self.settings.evaluation
        self.held_out, self.samples = load_parts(data, evaluation, self.tokenizer, self.model.context)
        self.target = Target(self.model, DraftConfig.for_target(self.model.model.config).aux_layers)
        self.batching = Batching(self.settings.compute.batch_tokens, seed=arguments.seed)
        self.updates, self.peer_attention = arguments.updates, getattr(arguments, "peer_attention", None)
        print(f"{self.samples.statistics}, held out {self.held_out.statistics.rows}", flush=True)

    def first_draft(self, settings: TrainDraft) -> tuple[Draft, float]:
        config, known = draft_config(settings, self.model)
        return new_draft(settings, self.model, self.tokenizer, self.samples, config, known)

    def judge(self, settings: TrainDraft, draft: Draft) -> Judge:
        ids = draft.target_ids()
        return Judge(settings, draft.config, ids, self.target, self.held_out, self.batching, self.tokenizer)


class Ours:
    def __init__(self, name: str, course: Course):
        self.course, self.settings = course, changed(course.settings, OURS[name])
        draft, self.coverage = course.first_draft(self.settings)
        self.draft = draft.to(course.model.device)
        s = self.settings
        self.learner = Learner(
            self.draft, course.target.embed, s.loss, s.optimizer, course.updates, course.model.dtype, s.parallel
        )
        self.stream = LessonStream(s, course.target, course.samples, course.batching, draft, Place())

    def update(self, given: "Given") -> float:
        positions = self.stream.positions(given.batch, given.epoch)
        lesson = Lesson(replace(given.batch, positions=positions), given.states.aux, given.taught)
        done = self.learner.update([lesson])
        if done is None:
            raise SystemExit("the loss is not finite")
        return done.loss

    def weights(self) -> dict[str, Tensor]:
        return self.learner.weights()


class SpecForge:
    def __init__(self, name: str, course: Course):
        from peer_specforge import SpecForgeDraft, head_inputs

        self.course, self.settings, self.head_inputs = course, course.settings, head_inputs
        draft, self.coverage = course.first_draft(self.settings)
        head = course.model.model.get_output_embeddings().weight
        embeddings, device = course.target.embeddings, course.model.device
        loss: Any = name.removeprefix("specforge-")
        self.peer = SpecForgeDraft(
            draft.config, draft.target_ids(), embeddings, head, device, loss, attention=course.peer_attention
        )
        self.peer.load_draft(draft.to(device))  # the same first weights
        self.draft = draft
        rate, warmup = self.settings.optimizer.learning_rate, self.settings.optimizer.warmup
        self.optimizer = self.peer.optimizer(rate, course.updates, warmup)

    def update(self, given: "Given") -> float:
        loss = self.peer.step(given.batch, given.states.aux, given.head_input(self.head_inputs))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.peer.to_draft().named_parameters())


class Given:
    """A batch and all that the target says of it, computed once for every contender."""

    def __init__(self, course: Course, batch: Any, epoch: int, target_ids: Tensor):
        self.course, self.epoch = course, epoch
        self.batch = batch.to(course.model.device)
        self.states: States = course.target.states(self.batch)
        head, b = course.target.head, self.batch
        self.taught = ask_teacher(self.states.last, head, target_ids, b.loss_mask, b.document_ids)
        self.inputs: Tensor | None = None

    def head_input(self, head_inputs: Callable[[Target, Tensor], Tensor]) -> Tensor:
        if self.inputs is None:
            self.inputs = head_inputs(self.course.target, self.states.last)
        return self.inputs


def common_settings(arguments: argparse.Namespace) -> TrainDraft:
    settings = TrainDraft(target=str(arguments.target), output="unused", seed=arguments.seed)
    settings.data.path, settings.data.length = arguments.chats, arguments.length
    settings.data.samples = arguments.samples
    settings.draft.draft_vocab_size = arguments.vocabulary
    settings.draft.max_position_embeddings = arguments.positions
    settings.optimizer.learning_rate = arguments.learning_rate
    settings.decoding.prompts = arguments.prompts
    settings.compute.device, settings.compute.batch_tokens = arguments.device, arguments.batch_tokens
    return settings


def changed(settings: TrainDraft, changes: dict[str, Any]) -> TrainDraft:
    for name, value in changes.items():
        group, own = name.split(".")
        settings = replace(settings, **{group: replace(getattr(settings, group), **{own: value})})
    return settings


def make(name: str, course: Course) -> Ours | SpecForge:
    return SpecForge(name, course) if name in PEERS else Ours(name, course)


def agree_on_updates(course: Course, arguments: argparse.Namespace) -> int:
    """How many updates the slowest of the runs makes in the time, from a few that are then thrown away."""
    contenders = [make(name, course) for name in arguments.contenders]
    target_ids = contenders[0].draft.target_ids().to(course.model.device)
    for done, (batch, place) in enumerate(islice(batches(course.samples, course.batching), 16)):
        if done == 6:  # the first ones compile
            wait(course.model.device)
            began = time.monotonic()
        given = Given(course, batch, place.epoch, target_ids)
        for contender in contenders:
            contender.update(given)
    wait(course.model.device)
    own = (time.monotonic() - began) / 10
    (arguments.output / f"pace-{arguments.seed}-{arguments.contenders[0]}.txt").write_text(f"{own}")
    while len(paces := list(arguments.output.glob("pace-*.txt"))) < arguments.together:
        time.sleep(0.5)
    time.sleep(0.5)
    slowest = max(float(path.read_text()) for path in paces)
    print(f"{own:.3f} s an update of all, the slowest run {slowest:.3f} s", flush=True)
    return max(int(arguments.seconds / slowest), 1)


def run(course: Course, arguments: argparse.Namespace) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.seconds is not None:
        course.updates = arguments.updates = agree_on_updates(course, arguments)
    contenders = {name: make(name, course) for name in arguments.contenders}
    target_ids = next(iter(contenders.values())).draft.target_ids().to(course.model.device)
    stream = batches(course.samples, course.batching)
    began, tokens = time.monotonic(), 0
    for done, (batch, place) in enumerate(islice(stream, arguments.updates), 1):
        given = Given(course, batch, place.epoch, target_ids)
        tokens += int((batch.document_ids >= 0).sum())
        losses = {name: contender.update(given) for name, contender in contenders.items()}
        if done % 50 == 0 or done == 1:
            shown = ", ".join(f"{name} {float(loss):.3f}" for name, loss in losses.items())
            print(f"seed {arguments.seed}, update {done}, {time.monotonic() - began:.0f} s: {shown}", flush=True)
    record = {
        "seed": arguments.seed,
        "updates": arguments.updates,
        "tokens": tokens,
        "coverage": next(iter(contenders.values())).coverage,
        "data": asdict(course.samples.statistics),
        "environment": environment(pick_device(course.settings.compute)),
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "contenders": {},
    }
    plain: dict[int, list[int]] = {}
    for name, contender in contenders.items():
        judge = course.judge(contender.settings, contender.draft)
        judge.plain = plain  # the target's own output, once
        judge.take(contender.weights())
        if name in arguments.keep:
            write_draft(judge.draft, arguments.output / f"{name}-{arguments.seed}")
        found = {"positions": judge.by_position(), "decoding": judge.decoding()}
        record["contenders"][name] = found
        print(f"seed {arguments.seed}, {name}: {summary(found)}", flush=True)
        path = arguments.output / f"seed-{arguments.seed}-{arguments.contenders[0]}.json"
        path.write_text(json.dumps(record))
    if arguments.keep:
        write_prompts(judge, arguments.output / f"prompts-{arguments.seed}.json")


def write_prompts(judge: Judge, path: Path) -> None:
    """What another program needs to decode the same: prompts, their ends and the target's own output."""
    tokens = judge.settings.decoding.tokens
    content = {
        "prompts": [prompt.token_ids for prompt in judge.prompts],
        "ends": judge.ends,
        "tokens": tokens,
        "plain": judge.plain,
    }
    path.write_text(json.dumps(content))


def summary(found: dict[str, Any]) -> str:
    natural = found["positions"]["natural"]
    text = f"alpha {natural['alpha'][0]:.3f}, tau {natural['tau_greedy']:.2f} / {natural['tau_sampled']:.2f}"
    return text + "".join(f", {shape} {x['accepted']:.2f}" for shape, x in found["decoding"].items())


def measure_speed(course: Course, arguments: argparse.Namespace) -> None:
    device = course.model.device
    for name in arguments.contenders:
        contender = make(name, course)
        target_ids = contender.draft.target_ids().to(device)
        stream = batches(course.samples, replace(course.batching, seed=1))
        seconds, tokens = [], []
        for done, (batch, place) in enumerate(islice(stream, arguments.updates)):
            given = Given(course, batch, place.epoch, target_ids)
            if isinstance(contender, SpecForge):
                given.head_input(contender.head_inputs)
            wait(device)
            began = time.perf_counter()
            contender.update(given)
            wait(device)
            if done >= arguments.updates // 2:  # the first ones compile
                seconds.append(time.perf_counter() - began)
                tokens.append(int((batch.document_ids >= 0).sum()))
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        rate = median(t / s for t, s in zip(tokens, seconds, strict=True))
        print(
            f"speed {name}: {median(seconds) * 1e3:.1f} ms an update, {rate:,.0f} tokens/s, {memory:.1f} GiB",
            flush=True,
        )
        del contender
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def print_tables(records: list[dict[str, Any]]) -> None:
    first = records[0]
    facts = first["environment"]
    print(f"{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}, {facts['commit']}")
    print(
        f"{len({record['seed'] for record in records})} seeds, {first['updates']} updates of "
        f"{first['arguments']['batch_tokens']} tokens ({first['tokens']:,} tokens seen), draft vocabulary covers "
        f"{first['coverage']:.1%}\n"
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for name, figures in record["contenders"].items():
            found.setdefault(name, []).append(figures)
    heads = ("alpha of steps 1, 2, 3, 5, 7", "simulated greedy", "sampled", "real chain", "real tree", "equal")
    print(f"| contender | seeds | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rows in found.items():
        natural = [row["positions"]["natural"] for row in rows]
        alpha = " ".join(f"{fmean(n['alpha'][k] for n in natural):.3f}" for k in (0, 1, 2, 4, 6))
        cells = [spread([n[key] for n in natural]) for key in ("tau_greedy", "tau_sampled")]
        real = [[row["decoding"][shape] for row in rows if row["decoding"]] for shape in ("chain", "tree")]
        cells += [spread([x["accepted"] for x in shape]) if shape else "" for shape in real]
        outputs = [x for shape in real for x in shape]
        equal = f"{sum(x['equal'] for x in outputs)} of {sum(x['prompts'] for x in outputs)}"
        print(f"| {name} | {len(rows)} | {alpha} | {' | '.join(cells)} | {equal} |")
    buckets = list(next(iter(found.values()))[0]["positions"])
    for key in ("tau_greedy", "tau_sampled"):
        print(f"\n{key} by position\n\n| contender | {' | '.join(buckets)} |")
        print("|---" * (len(buckets) + 1) + "|")
        for name, rows in found.items():
            cells = [spread([row["positions"][bucket][key] for row in rows]) for bucket in buckets]
            print(f"| {name} | {' | '.join(cells)} |")


def spread(values: list[float]) -> str:
    """Mean ± standard deviation over seeds."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
