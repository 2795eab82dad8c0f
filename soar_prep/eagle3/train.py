"""The train-draft road: every step from a target and conversations to a draft that SGLang loads, in order."""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from soar_prep.checkpoint import SINGLE, Checkpoint, PartialOutput, find_model, partial_directory, refuse_existing
from soar_prep.eagle3.capture import CapturedTarget, open_captured
from soar_prep.eagle3.data import Batch, Batching, Place, Samples, batches, load_parts, plan_epoch
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.evaluate import TargetStates, acceptance, decode_prompts, position_buckets, prompts_of
from soar_prep.eagle3.export import read_draft, write_files
from soar_prep.eagle3.learner import Learner, Lesson, Update
from soar_prep.eagle3.nvfp4 import hold_rounded, names_to_round, prepare
from soar_prep.eagle3.positions import draw_positions
from soar_prep.eagle3.regenerate import regenerate_parts
from soar_prep.eagle3.report_page import write_page
from soar_prep.eagle3.supervision import special_ids, stop_ids
from soar_prep.eagle3.target import Target
from soar_prep.eagle3.ttt import ask_teacher
from soar_prep.eagle3.vocab import choose_vocabulary, count_supervised
from soar_prep.errors import UserError
from soar_prep.report import Progress, environment, plain
from soar_prep.settings import DraftFormat, TrainDraft
from soar_prep.streaming import StreamedModel, pick_device
from soar_prep.text import load_tokenizer

STATE = "state.pt"
CALIBRATION_BATCHES = 8  # for the input scales of a draft in NVFP4
QUIET = 10.0  # seconds between two lines of progress


@dataclass
class History:
    """What a run has measured so far; part of the saved state."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    decoding: dict[str, Any] = field(default_factory=dict)

    def best(self) -> dict[str, Any]:
        """The evaluation of the longest accepted length, of those in the format of the last one.

        The untrained draft never is it once there is another; a finished draft that was only rounded may be.
        """
        own = [figures for figures in self.evaluations if figures["format"] == self.evaluations[-1]["format"]]
        trained = [f for f in own if f["update"] or f["format"] == DraftFormat.nvfp4.value]
        return max(trained or own, key=lambda figures: figures["tau_greedy"])


def train_draft(settings: TrainDraft) -> Path:
    """Train a draft for settings.target, write it into settings.output and return that directory.

    Raises UserError for anything the user can mend, most of it before heavy work. Interrupted, it resumes: on a CPU to
    the very bits of a run that was not, on a GPU as far as its kernels repeat themselves (flash attention's gradients
    are summed in no fixed order). With several processes every one of them calls this.
    """
    processes = PartialState(cpu=settings.compute.device == "cpu")
    refuse_existing(Path(settings.output))
    source = Checkpoint(find_model(settings.target, "target"))
    model = StreamedModel(source, settings.compute, settings.trust_remote_code)
    tokenizer = load_tokenizer(source.directory, settings.trust_remote_code)
    hashes = source.check_and_hash()
    config, known = draft_config(settings, model)
    target, held_out, samples = target_and_data(settings, model, tokenizer, hashes, config.aux_layers)
    draft, coverage = new_draft(settings, model, tokenizer, samples, config, known)
    check_lengths(settings, draft.config, held_out, samples)
    names_to_round(draft, settings.qat)  # tells what cannot be before anything is written
    batching = batching_of(settings, processes)
    updates = count_updates(settings, samples, batching)
    say(opening_lines(samples, held_out, draft, coverage, updates))
    output = open_output(settings, hashes, samples, held_out, draft)
    directory = partial_directory(Path(settings.output))
    learner = new_learner(settings, draft, target, updates)
    history, place = resume(directory, learner)
    judge = Judge(settings, draft.config, draft.target_ids(), target, held_out, batching, tokenizer)
    if not history.evaluations:
        evaluate(judge, learner, history)
        history.decoding["before"] = judge.decoding()
        say(decoding_lines(history.decoding["before"]))

    stream = LessonStream(settings, target, samples, batching, draft, place)
    progress = open_progress(settings, directory, updates, learner.done)  # its clock starts here
    while True:
        if learner.done == learner.turn and settings.qat.format is not DraftFormat.none and not learner.is_rounding:
            first = LessonStream(settings, target, samples, batching, draft, Place())
            learner.start_rounding(first.take(CALIBRATION_BATCHES))
            evaluate(judge, learner, history, directory)
        if learner.done == updates:
            break
        started = time.monotonic()
        update = learner.update(stream.take(settings.optimizer.accumulate))
        if update is None:
            raise diverged(learner.done, stream.taken, directory)
        record(progress, update, stream, time.monotonic() - started)
        is_last = learner.done == updates
        if learner.done % settings.evaluation.every == 0 or is_last or learner.done == learner.turn:
            evaluate(judge, learner, history, directory)
        if learner.done % settings.save_every == 0 or is_last:
            save_state(directory, learner, stream.place, history)

    judge.take_written(directory)
    history.decoding["after"] = judge.decoding()
    say(decoding_lines(history.decoding["after"]))
    by_position = judge.by_position()
    facts = run_facts(settings, source, hashes, draft, coverage, samples, held_out, history, by_position, updates)
    finish(output, facts, progress)
    return Path(settings.output).expanduser()


def evaluate(judge: "Judge", learner: Learner, history: History, directory: Path | None = None) -> None:
    """One more evaluation; the best one's draft is written into the directory."""
    judge.take(learner.weights(), learner.input_scales)
    kind = DraftFormat.nvfp4 if learner.is_rounding else DraftFormat.none
    history.evaluations.append({"update": learner.done, "format": kind.value} | judge.acceptance())
    say([evaluation_line(history.evaluations[-1])])
    if directory is not None and history.best() is history.evaluations[-1]:
        write_best(judge.draft, directory)


def draft_config(settings: TrainDraft, model: StreamedModel) -> tuple[DraftConfig, Draft | None]:
    """The draft's shape, and the draft itself where draft.init gives one; UserError if it is not for this target."""
    option, start = "draft.init", settings.draft.init
    if settings.qat.start_from is not None:
        if start is not None or settings.qat.format is DraftFormat.none:
            raise UserError(
                "qat.start_from: needs qat=nvfp4, and takes the place of draft.init; leave one of them away"
            )
        option, start = "qat.start_from", settings.qat.start_from
    if start is not None:
        read = read_draft(find_model(start, option)).float()
        draft = Draft(read.config)  # its linears are to be rounded anew, or not at all
        draft.load_state_dict(read.state_dict())
        found, wanted = (draft.config.hidden_size, draft.config.vocab_size), (model.hidden_size, model.vocab_size)
        if found != wanted or draft.config.aux_layers[-1] >= len(model.layers):
            raise UserError(
                f"{option}={start}: hidden size and vocabulary {found}, aux_layers "
                f"{list(draft.config.aux_layers)}; the target has {wanted} and {len(model.layers)} layers"
            )
        return draft.config, draft
    changes = {f.name: getattr(settings.draft, f.name, None) for f in fields(DraftConfig)}
    if changes["aux_layers"] is not None:
        changes["aux_layers"] = tuple(changes["aux_layers"])
    elif settings.states is not None:
        changes["aux_layers"] = tuple(open_captured(Path(settings.states)).facts["aux_layers"])
    given = {name: value for name, value in changes.items() if value is not None}
    return DraftConfig.for_target(model.model.config, **given), None


def target_and_data(
    settings: TrainDraft, model: StreamedModel, tokenizer: Any, hashes: dict[str, str], aux_layers: tuple[int, ...]
) -> tuple[Target | CapturedTarget, Samples, Samples]:
    """(the target or its states on disk, held-out samples, samples to train on)."""
    if settings.states is not None:
        captured = open_captured(Path(settings.states))
        if tuple(captured.facts["aux_layers"]) != aux_layers:
            raise UserError(
                f"states={settings.states}: of layers {captured.facts['aux_layers']}, but the draft reads "
                f"{list(aux_layers)}; leave draft.aux_layers away, or capture those layers"
            )
        return CapturedTarget(captured, model, hashes, settings.scheme), captured.held_out, captured.samples
    target = Target(model, aux_layers, settings.scheme)
    data, evaluation = settings.data, settings.evaluation
    if data.regenerate:
        if PartialState().num_processes > 1:
            raise UserError(
                "data.regenerate=true: the target answers in one process; run soar-prep capture data.regenerate=true "
                "first, in one, and train from its states"
            )
        with target.decoder():  # rounds activations as the scheme says
            output = Path(settings.output)
            data, evaluation = regenerate_parts(data, evaluation, tokenizer, model.model, output, hashes)
    return target, *load_parts(data, evaluation, tokenizer, model.context)


def new_draft(
    settings: TrainDraft,
    model: StreamedModel,
    tokenizer: Any,
    samples: Samples,
    config: DraftConfig,
    known: Draft | None,
) -> tuple[Draft, float]:
    """The draft to begin with, on the CPU in fp32, and the share of supervised tokens that its vocabulary holds."""
    counts = count_supervised(samples.token_ids, samples.loss_mask, model.vocab_size)
    if known is not None:
        return known, int(counts[known.target_ids()].sum()) / int(counts.sum())
    vocabulary = choose_vocabulary(counts, config.draft_vocab_size, always=special_ids(tokenizer))
    torch.manual_seed(settings.seed)
    draft = Draft(config)
    draft.set_vocabulary(vocabulary.target_ids)
    head = model.model.get_output_embeddings()
    if settings.draft.head_from_target and head is not None:
        with torch.no_grad():
            draft.lm_head.weight.copy_(head.weight[vocabulary.target_ids.to(head.weight.device)])
    return draft, vocabulary.coverage


def check_lengths(settings: TrainDraft, config: DraftConfig, *parts: Samples) -> None:
    """UserError before any work for samples that are too short to teach all, or too long for the draft's positions."""
    longest = max(int(part.lengths.max()) for part in parts)
    room = config.max_position_embeddings - (settings.loss.steps - 1)
    if longest > room:
        raise UserError(
            f"data.length={settings.data.length}: a sample of {longest} tokens, but the draft has "
            f"{config.max_position_embeddings} positions, of which {settings.loss.steps} steps leave {room}; "
            "cut the samples shorter, or raise draft.max_position_embeddings"
        )


def batching_of(settings: TrainDraft, processes: PartialState) -> Batching:
    row_tokens = settings.data.length if settings.data.pack else None
    rank, world = processes.process_index, processes.num_processes
    return Batching(settings.compute.batch_tokens, row_tokens, settings.seed, rank, world)


def count_updates(settings: TrainDraft, samples: Samples, batching: Batching) -> int:
    batches_an_epoch = len(plan_epoch(samples, batching, epoch=0))
    wanted = settings.optimizer.epochs * batches_an_epoch / settings.optimizer.accumulate
    return settings.optimizer.steps or max(math.ceil(wanted), 1)


def open_output(
    settings: TrainDraft, hashes: dict[str, str], samples: Samples, held_out: Samples, draft: Draft
) -> PartialOutput | None:
    """The output directory, held by the first process alone: None for the others, who only read what it writes."""
    processes = PartialState()
    chosen = plain(settings)
    for name in ("target", "output", "states", "wandb", "save_every"):
        del chosen[name]
    del chosen["draft"]["init"]
    chosen["qat"]["start_from"] = settings.qat.start_from is not None  # "start" below tells what it holds
    chosen["compute"] = {name: chosen["compute"][name] for name in ("dtype", "batch_tokens")}
    for group in ("data", "evaluation"):
        del chosen[group]["path"]  # what the files hold counts, not where they are
    identity = chosen | {
        "model": hashes,
        "samples": samples.facts()["sha256"],
        "held_out": held_out.facts()["sha256"],
        "start": weights_sha256(draft),
        "processes": processes.num_processes,
        "versions": environment(torch.device("cpu"))["packages"],
    }
    output = PartialOutput(Path(settings.output), identity, parts=0) if processes.is_main_process else None
    processes.wait_for_everyone()
    return output


def weights_sha256(draft: Draft) -> str:
    digest = hashlib.sha256()
    for tensor in draft.state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def new_learner(settings: TrainDraft, draft: Draft, target: Target | CapturedTarget, updates: int) -> Learner:
    model = target.model
    return Learner(
        draft.to(model.device),
        target.embed,
        settings.loss,
        settings.optimizer,
        updates,
        model.dtype,
        settings.parallel,
        settings.checkpointing,
        settings.qat,
    )


class LessonStream:
    """Lessons without end. place: where the next one comes from; taken: the batches of the last update."""

    def __init__(
        self,
        settings: TrainDraft,
        target: TargetStates,
        samples: Samples,
        batching: Batching,
        draft: Draft,
        place: Place,
    ):
        self.settings, self.target, self.draft, self.place = settings, target, draft, place
        self.target_ids = draft.target_ids()
        self.batches_an_epoch = len(plan_epoch(samples, batching, place.epoch))
        self.stream = batches(samples, batching, place)
        self.taken: list[Batch] = []

    def take(self, count: int) -> Iterator[Lesson]:
        """The next `count` lessons, each made when it is asked for."""
        self.taken = []
        for batch, after in islice(self.stream, count):
            self.place = after
            self.taken.append(batch)
            yield self.lesson(batch, after.epoch)

    @torch.no_grad()
    def lesson(self, batch: Batch, epoch: int) -> Lesson:
        batch = replace(batch, positions=self.positions(batch, epoch)).to(self.target_ids.device)
        states = self.target.states(batch)
        taught = ask_teacher(states.last, self.target.head, self.target_ids, batch.loss_mask, batch.document_ids)
        return Lesson(batch, states.aux, taught)

    def positions(self, batch: Batch, epoch: int) -> torch.Tensor:
        """Positions by the rule that the settings name, int64 [B, T]."""
        rule, gaps = self.settings.positions.rule, self.settings.positions.gaps
        steps, most = self.settings.loss.steps, self.draft.config.max_position_embeddings
        return draw_positions(batch.document_ids, rule, most, steps, gaps, self.settings.seed, epoch)


class Judge:
    """A copy of the draft, rounded to what will be written, and the held-out samples to measure it on."""

    def __init__(
        self,
        settings: TrainDraft,
        config: DraftConfig,
        target_ids: torch.Tensor,
        target: Target | CapturedTarget,
        held_out: Samples,
        batching: Batching,
        tokenizer: Any,
    ):
        self.settings, self.target, self.held_out, self.batching = settings, target, held_out, batching
        draft = Draft(config)
        draft.set_vocabulary(target_ids)
        prepare(draft, settings.qat)
        self.draft = self.placed(draft)
        how = settings.decoding
        longest = target.model.context - how.tokens - how.depth - 1
        self.prompts = prompts_of(held_out, how.prompts, longest)
        self.ends = stop_ids(tokenizer)
        self.plain: dict[int, list[int]] = {}

    def placed(self, draft: Draft) -> Draft:
        return draft.to(self.target.model.device, self.target.model.dtype).requires_grad_(False)

    def take(self, weights: dict[str, torch.Tensor], input_scales: dict[str, torch.Tensor] | None = None) -> None:
        """Weights in fp32, by name: rounded to BF16, or to NVFP4 where there are input scales."""
        rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        self.draft.load_state_dict(self.draft.state_dict() | rounded)
        if input_scales:
            hold_rounded(self.draft, weights, input_scales, self.settings.qat)

    def take_written(self, directory: Path) -> None:
        self.draft = self.placed(read_draft(directory))

    def acceptance(self) -> dict[str, Any]:
        return acceptance(self.draft, self.target, self.held_out, self.batching, self.settings.loss)["natural"]

    def by_position(self) -> dict[str, Any]:
        buckets = position_buckets(self.draft, int(self.held_out.lengths.max()))
        return acceptance(self.draft, self.target, self.held_out, self.batching, self.settings.loss, buckets)

    def decoding(self) -> dict[str, Any]:
        """Nothing if decoding.prompts=0 or every prompt is too long for the target's context."""
        if not self.prompts:
            return {}
        with self.target.decoder() as decoder:
            how = self.settings.decoding
            return decode_prompts(self.draft, decoder, self.target.embed, self.prompts, how, self.ends, self.plain)


def open_progress(settings: TrainDraft, directory: Path, updates: int, done: int) -> Progress | None:
    if not PartialState().is_main_process:
        return None
    return Progress(directory, updates, "update", settings.wandb, plain(settings), done, QUIET)


def record(progress: Progress | None, update: Update, stream: LessonStream, seconds: float) -> None:
    if progress is None:
        return
    tokens = sum(int((batch.document_ids >= 0).sum()) for batch in stream.taken) * PartialState().num_processes
    figures = asdict(update) | {"lambda": update.mixing, "tokens_per_second": tokens / seconds}
    del figures["mixing"]
    figures["epoch"] = stream.place.epoch + stream.place.index / stream.batches_an_epoch
    shown = f"loss {update.loss:.3f}, alpha {update.alpha[0]:.3f}, {tokens / seconds:.0f} tokens/s"
    progress.step(figures, shown)


def diverged(done: int, taken: list[Batch], directory: Path) -> UserError:
    documents = sorted({int(i) for batch in taken for i in batch.document_ids.unique() if i >= 0})
    shown = ", ".join(map(str, documents[:20])) + (", ..." if len(documents) > 20 else "")
    return UserError(
        f"update {done + 1}: the loss or its gradient is NaN or infinite; it was not applied. Samples of its batches: "
        f"{shown}. The best draft so far and the last saved state are in {directory}; lower "
        "optimizer.learning_rate or optimizer.clip, or look at these samples"
    )


def write_best(draft: Draft, directory: Path) -> None:
    if PartialState().is_main_process:
        write_files(draft, directory)
    PartialState().wait_for_everyone()


def save_state(directory: Path, learner: Learner, place: Place, history: History) -> None:
    """Replace the saved state; what was there stays until all of the new one is on disk."""
    state = {"learner": learner.state(), "place": asdict(place), "history": asdict(history)}
    if PartialState().is_main_process:
        path, temporary = directory / STATE, directory / (STATE + ".tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except (OSError, RuntimeError) as error:  # a full disk reaches us as either
            temporary.unlink(missing_ok=True)
            raise UserError(f"{path}: cannot be written ({error}); the state saved before is kept") from None
    PartialState().wait_for_everyone()


def resume(directory: Path, learner: Learner) -> tuple[History, Place]:
    """Take up the saved state, if there is one."""
    path = directory / STATE
    if not path.exists():
        return History(), Place()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch have each their own
        raise UserError(f"{path}: damaged ({error}); remove {directory} to start anew") from None
    learner.load(state["learner"])
    say([f"resuming after update {learner.done}"])
    return History(**state["history"]), Place(**state["place"])


def finish(output: PartialOutput | None, facts: dict[str, Any], progress: Progress | None) -> None:
    if output is not None and progress is not None:  # the first process alone: it renames what the others would read
        facts |= {"output_bytes": (output.directory / SINGLE).stat().st_size}
        output.add_json("run.json", facts)
        lines = (output.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        write_page(output.directory / "report.html", facts, [json.loads(line) for line in lines], progress.elapsed())
        progress.close({"tau_greedy": facts["best"]["tau_greedy"]})
        output.finish()
        (output.output / STATE).unlink(missing_ok=True)
    PartialState().wait_for_everyone()


def run_facts(
    settings: TrainDraft,
    source: Checkpoint,
    hashes: dict[str, str],
    draft: Draft,
    coverage: float,
    samples: Samples,
    held_out: Samples,
    history: History,
    by_position: dict[str, Any],
    updates: int,
) -> dict[str, Any]:
    """run.json: what went in and what came out."""
    parameters = sum(weight.numel() for weight in draft.parameters())
    best = {key: history.best()[key] for key in ("update", "format", "tau_greedy", "tau_sampled")}
    return {
        "settings": plain(settings),
        "environment": environment(pick_device(settings.compute)),
        "processes": PartialState().num_processes,
        "target_sha256": hashes,
        "data": samples.facts(),
        "held_out": held_out.facts(),
        "draft": asdict(draft.config) | {"parameters": parameters},
        "vocabulary": {"size": draft.config.draft_vocab_size, "coverage": coverage},
        "updates": updates,
        "best": best,
        "evaluations": history.evaluations,
        "by_position": by_position,
        "decoding": history.decoding if settings.decoding.prompts else {},
        "launch": launch_commands(settings, source),
    }


def launch_commands(settings: TrainDraft, source: Checkpoint) -> dict[str, str]:
    """How SGLang serves the draft, as a chain and as a tree."""
    how = settings.decoding
    method = (source.config.get("quantization_config") or {}).get("quant_method")
    own = "unquant" if settings.qat.format is DraftFormat.none else "modelopt_fp4"
    # without a word the draft is taken for quantized as the target is
    quantized = "" if own == "unquant" and not method else f" --speculative-draft-model-quantization {own}"
    layout = " --quantization modelopt_fp4" if method == "modelopt" else ""
    common = (
        f"python -m sglang.launch_server --model-path {settings.target}{layout} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {settings.output}{quantized} --speculative-num-steps {how.depth}"
    )
    return {
        "chain": f"{common} --speculative-eagle-topk 1 --speculative-num-draft-tokens {how.depth + 1}",
        "tree": f"{common} --speculative-eagle-topk {how.width} --speculative-num-draft-tokens {how.candidates}",
    }


def say(lines: list[str]) -> None:
    if PartialState().is_main_process:
        print(*lines, sep="\n", flush=True)


def opening_lines(samples: Samples, held_out: Samples, draft: Draft, coverage: float, updates: int) -> list[str]:
    data, config = samples.statistics, draft.config
    parameters = sum(weight.numel() for weight in draft.parameters())
    return [
        f"data: {data.rows:,} samples, {data.tokens:,} tokens, {data.supervised / data.tokens:.0%} supervised; "
        f"{data.truncated:,} cut ({data.cut_tokens:,} tokens), {data.dropped:,} without an answer left out; held out: "
        f"{held_out.statistics.rows:,} samples, {held_out.statistics.tokens:,} tokens",
        f"draft: {parameters:,} parameters, layers {list(config.aux_layers)}, {config.draft_vocab_size:,} of "
        f"{config.vocab_size:,} tokens, which are {coverage:.1%} of those supervised; {updates:,} updates",
    ]


def evaluation_line(figures: dict[str, Any]) -> str:
    alpha = " ".join(f"{x:.3f}" for x in figures["alpha"])
    kind = ", in NVFP4" if figures["format"] == DraftFormat.nvfp4.value else ""
    return (
        f"held out, after {figures['update']} updates{kind}: acceptance by step {alpha}; simulated accepted length "
        f"{figures['tau_greedy']:.2f} greedy, {figures['tau_sampled']:.2f} sampled"
    )


def decoding_lines(figures: dict[str, Any]) -> list[str]:
    return [
        f"real decoding, {shape}: {found['accepted']:.2f} tokens a round ({found['tokens']} tokens in "
        f"{found['rounds']} rounds); {found['equal']} of {found['prompts']} outputs are the target's own, token for "
        "token"
        for shape, found in figures.items()
    ]
