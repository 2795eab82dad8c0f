"""report.html of a train-draft run: what run.json and metrics.jsonl hold, as a page for people.

A figure may be missing: None, NaN, or a list that is shorter than the steps, since short samples have nothing to guess
at the last ones. The page then has a dash or a gap; it must not be what a long run fails on.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from soar_prep.page import (
    Points,
    command,
    details,
    flat,
    is_number,
    line_plot,
    origin_rows,
    page,
    paragraph,
    shaded_cell,
    size_text,
    table,
    time_text,
)

Figures = dict[str, Any]
MOST_POINTS = 200  # of a line; more of them are averaged
ROUNDS = "tokens a round"
SHAPES, TIMES, KINDS = ("tree", "chain"), ("before", "after"), ("greedy", "sampled")
STEP_FIGURES = {
    "alpha": "Acceptance: the chance that a token drawn from the draft is accepted. It is the sum over all tokens of "
    "min(p, q), where p is the target's probability and q the draft's.",
    "accuracy": "How often the draft's likeliest token is the target's. One outside the draft's vocabulary is wrong.",
    "conditional": "The same where the draft was right at every step before: what greedy decoding meets.",
    "coverage": "The target's probability of all tokens in the draft's vocabulary together: no alpha can be higher.",
}


def write_page(path: Path, facts: Figures, metrics: list[Figures], elapsed: float) -> None:
    """Write the page of a train-draft run to `path`.

    facts: what run.json holds; metrics: the lines of metrics.jsonl; elapsed: seconds of work.
    """
    sections = {
        "Summary": accepted_table(facts) + table((), summary_rows(facts, metrics, elapsed)),
        "Real decoding": decoding_section(facts["decoding"]),
        "Acceptance by step": step_section(first_and_best(facts)[1]),
        "Over the training": training_section(facts, metrics),
        "By position": position_section(facts["by_position"], facts["settings"]["positions"]["rule"]),
        "Data": data_section(facts),
        "To serve it": serving_section(facts["launch"]),
        "To reproduce": origin_section(facts),
    }
    name = Path(facts["settings"]["target"]).name or facts["settings"]["target"]
    document = page(
        f"EAGLE-3 draft for {name}", verdict(facts), {name: html for name, html in sections.items() if html}
    )
    path.write_text(document, encoding="utf-8", errors="replace")  # a path may hold bytes that are no UTF-8


def verdict(facts: Figures) -> str:
    """One sentence: how many tokens a round, before and after, and whether they are the target's own."""
    runs = runs_of(facts["decoding"])
    after = [run for (_, when), run in runs.items() if when == "after"]
    if not after:
        first, best = (number(figures.get("tau_greedy")) for figures in first_and_best(facts))
        return f"Real decoding was not measured; on held-out text, simulated, it goes from {first} to {best} {ROUNDS}."
    tokens = {name: number(run.get("accepted")) for name, run in runs.items()}
    shapes = [
        f"{tokens[shape, 'after']} {ROUNDS} with a {shape} ({tokens.get((shape, 'before'), '-')} before the training)"
        for shape in SHAPES
        if (shape, "after") in runs
    ]
    outputs, equal = (sum(run.get(key) or 0 for run in after) for key in ("prompts", "equal"))
    proof = f"all {outputs} outputs are" if equal == outputs else f"{outputs - equal} of {outputs} outputs are not"
    return f"Real decoding: {' and '.join(shapes)}; {proof} token for token the target's own."


def accepted_table(facts: Figures) -> str:
    """Accepted lengths, real and simulated, before and after."""
    runs, ends = runs_of(facts["decoding"]), first_and_best(facts)
    shapes = dict.fromkeys(shape for shape, _ in runs)
    pairs = {f"real, {shape}": [runs.get((shape, when), {}).get("accepted") for when in TIMES] for shape in shapes}
    pairs |= {f"simulated, {kind}": [figures.get(f"tau_{kind}") for figures in ends] for kind in KINDS}
    rows = [[name, *map(number, pair), ratio(pair[1], pair[0])] for name, pair in pairs.items()]
    return table((ROUNDS.capitalize(), "Before", "After", "Ratio"), rows, "numbers") + paragraph(
        "Tokens that the target confirms in a round, its own next one included: without a draft it is 1. A round also "
        "takes longer than a plain step, so the speed-up is smaller. Simulated: a chain as deep as the training has "
        "steps, fed the tokens of held-out text, greedy or sampled at temperature 1; real decoding is fed the draft's "
        "own guesses."
    )


def summary_rows(facts: Figures, metrics: list[Figures], elapsed: float) -> list[list[str]]:
    draft, updates, best = facts["draft"], facts["updates"], facts["best"]["update"]
    epochs = f", {number(metrics[-1].get('epoch'), ',.3g')} epochs" if metrics else ""
    speeds, memory = ([y for _, y in series(metrics, key)] for key in ("tokens_per_second", "memory_bytes"))
    rows = [
        ["Target", facts["settings"]["target"]],
        ["Draft", f"{draft['parameters'] / 1e6:,.1f} million parameters, {size_text(facts['output_bytes'])}"],
        ["It reads", f"the outputs of layers {', '.join(map(str, draft['aux_layers']))} (from 0)"],
        ["Training", f"{updates:,} updates{epochs}; the draft after update {best:,} was the best, and is kept"],
        ["In NVFP4", nvfp4_text(facts["evaluations"])],
        ["Time", time_text(elapsed)],
        ["Speed", f"{median(speeds):,.0f} tokens a second, the median of the updates" if speeds else ""],
        ["Memory", f"{size_text(max(memory))} at the highest" if memory else ""],
        ["Processes", str(facts["processes"])],
    ]
    return [row for row in rows if row[1]]


def nvfp4_text(evaluations: list[Figures]) -> str:
    """Simulated accepted length before rounding, after it, and after training under it; empty for BF16."""
    rounded = [figures for figures in evaluations if figures.get("format") == "nvfp4"]
    if not rounded:
        return ""
    before = evaluations[len(evaluations) - len(rounded) - 1]
    in_bf16, at_first = (number(figures.get("tau_greedy")) for figures in (before, rounded[0]))
    text = f"after update {rounded[0]['update']:,}: {in_bf16} {ROUNDS} in BF16, {at_first} rounded"
    trained = [f["tau_greedy"] for f in rounded[1:] if is_number(f.get("tau_greedy"))]
    return text + (f"; {number(max(trained))} at best after training under it" if trained else "")


def decoding_section(decoding: Figures) -> str:
    runs = {f"{shape}, {when}": run for (shape, when), run in runs_of(decoding).items()}
    if not runs:
        return paragraph("Not measured: decoding.prompts is 0, or every prompt is too long.")
    columns = {"accepted": ".2f", "rounds": ",", "tokens": ",", "prompts": ",", "equal": ","}
    rows = [[name, *(number(run.get(key), form) for key, form in columns.items())] for name, run in runs.items()]
    html = table(("", ROUNDS.capitalize(), "Rounds", "Tokens", "Prompts", "Equal"), rows, "numbers") + paragraph(
        "Speculative decoding of held-out prompts as a server does it, greedy. Equal: outputs that are token for token "
        "the target's own. Where one is not, either rounding, which depends on how many tokens the target reads "
        "at once, tipped a near tie, or there is a fault."
    )
    html += lengths_map({name: run.get("lengths") or [] for name, run in runs.items()})
    lengths = [run.get("by_domain") or {} for run in runs.values()]
    domains = dict.fromkeys(domain for known in lengths for domain in known)
    rows = [[domain, *(number(known.get(domain)) for known in lengths)] for domain in domains]
    return html + (table((f"{ROUNDS}, by domain".capitalize(), *runs), rows, "numbers") if rows else "")


def lengths_map(lengths: dict[str, list[int]]) -> str:
    """Rows are confirmed tokens 1, 2, ..., columns the runs; colour is the share of a run's rounds."""
    shares = {name: [count / sum(counts) for count in counts] for name, counts in lengths.items() if sum(counts)}
    largest = max(map(max, shares.values()), default=1.0)
    body = ""
    for n in range(max(map(len, shares.values()), default=0)):
        cells = [(at(values, n) or 0.0, f"{name}: {n + 1} tokens") for name, values in shares.items()]
        row = "".join(shaded_cell(f"{share:.0%}", share / largest, title) for share, title in cells)
        body += f"<tr><th>{n + 1}</th>{row}</tr>\n"
    head = "".join(f"<th>{escape(name)}</th>" for name in shares)
    return (
        f"""{paragraph("Share of the rounds, by the tokens that a round confirmed:")}
<div class="wide"><table class="heat" style="max-width:36rem"><thead><tr><th>tokens</th>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
"""
        if shares
        else ""
    )


def step_section(best: Figures) -> str:
    """Figures of the best evaluation, step by step, and what they mean."""
    steps = max(len(best.get(name) or []) for name in STEP_FIGURES)
    rows = [[str(k), *(number(at(best.get(name), k), ".3f") for name in STEP_FIGURES)] for k in range(steps)]
    text = (
        "The draft that is kept, on held-out text. Step 0 guesses the token after the one that the target chose last; "
    )
    text += "every further step reads the draft's own state of the step before. All are means."
    meanings = table((), [[name.capitalize(), meaning] for name, meaning in STEP_FIGURES.items()])
    return paragraph(text) + table(("Step", *map(str.capitalize, STEP_FIGURES)), rows, "numbers") + meanings


def training_section(facts: Figures, metrics: list[Figures]) -> str:
    evaluations, group = facts["evaluations"], math.ceil(len(metrics) / MOST_POINTS)
    plots: dict[str, dict[str, Points]] = {"loss": {"loss": averaged(series(metrics, "loss"))}}
    text = "Trained on: the batch of each update"
    text += f"; each point is the mean of {group:,} updates in a row. " if group > 1 else ". "
    if facts["settings"]["loss"]["kind"] == "hybrid":
        text += "Lambda: the share of KL divergence in a step's loss; the rest is acceptance itself. "
        mixing = step_lines(metrics, "lambda")
        plots["lambda, trained on"] = {name: mixing[name] for name in list(mixing)[:: max(len(mixing) - 1, 1)]}
    plots["acceptance (alpha), trained on"] = step_lines(metrics, "alpha")
    plots["acceptance (alpha), held out"] = step_lines(evaluations, "alpha")
    plots[f"simulated {ROUNDS}, held out"] = {kind: series(evaluations, f"tau_{kind}") for kind in KINDS}
    text += "Held out: the evaluations, the first of them before training."
    return paragraph(text) + "".join(line_plot(lines, "update", title) for title, lines in plots.items())


def position_section(by_position: dict[str, Figures], rule: str) -> str:
    """Acceptance with the draft's positions spread over ever longer contexts."""
    sizes, natural = sorted(int(name) for name in by_position if name.isdigit()), by_position.get("natural") or {}
    shown = {"natural": natural} | {f"to {size:,}": by_position[str(size)] for size in sizes}
    keys = [f"tau_{kind}" for kind in KINDS]
    rows = [
        [name, *(number(figures.get(key)) for key in keys), number(at(figures.get("alpha"), 0), ".3f")]
        for name, figures in shown.items()
    ]
    html = table(("Positions", *map(str.capitalize, KINDS), "Alpha, step 0"), rows, "numbers")
    if not sizes:
        return html + paragraph("Longer contexts were not simulated: the draft has no positions for them.")
    lines = {kind: [(math.log2(n), by_position[str(n)].get(f"tau_{kind}")) for n in sizes] for kind in KINDS}
    level = natural.get("tau_greedy") if is_number(natural.get("tau_greedy")) else None
    text = (
        f"Simulated {ROUNDS} on the same held-out samples, but with the draft's positions spread over the first n: how "
    )
    text += "far its rotary embedding carries. There is no text in between, so a real long document can do worse. "
    text += f"Trained with positions.rule={rule}. Dashed: greedy, natural positions."
    plot = line_plot(lines, "positions", f"simulated {ROUNDS}", level, lambda n: f"{2 ** (n - 10):,.3g}k")
    return html + paragraph(text) + plot


def data_section(facts: Figures) -> str:
    parts, draft, vocabulary = (facts["data"], facts["held_out"]), facts["draft"], facts["vocabulary"]
    names = {"Samples": "rows", "Tokens": "tokens", "Supervised tokens": "supervised", "Samples cut": "truncated"}
    names |= {"Tokens cut off": "cut_tokens", "Samples dropped": "dropped", "Tokens dropped": "dropped_tokens"}
    names |= {"Longest sample, before the cut": "longest"}
    rows = [[name, *(number(part.get(key), ",") for part in parts)] for name, key in names.items()]
    rows.insert(3, ["Share supervised", *(ratio(part.get("supervised"), part.get("tokens"), ".1%") for part in parts)])
    return table(("", "Training", "Held out"), rows, "numbers") + paragraph(
        f"Samples are cut at {facts['settings']['data']['length']:,} tokens, and dropped if none that is left is "
        f"supervised. The draft's vocabulary is {number(vocabulary.get('size'), ',')} of the target's "
        f"{number(draft.get('vocab_size'), ',')} tokens; they are {number(vocabulary.get('coverage'), '.2%')} of the "
        "supervised training text."
    )


def serving_section(launch: dict[str, str]) -> str:
    html = paragraph(
        "With SGLang. Paths are those given to the training; tree or chain: measure, it depends on the load."
    )
    return html + "".join(paragraph(f"As a {name}:") + command(line) for name, line in launch.items()) if launch else ""


def origin_section(facts: Figures) -> str:
    parts = {"Training samples, SHA-256": facts["data"], "Held-out samples, SHA-256": facts["held_out"]}
    html = table(
        (), [[name, str(part.get("sha256"))] for name, part in parts.items()] + origin_rows(facts["environment"])
    )
    folded = {"All settings": facts["settings"], "Shape of the draft": facts["draft"]}
    folded["SHA-256 of the target's files"] = facts["target_sha256"]
    return html + "".join(details(heading, table((), flat(values))) for heading, values in folded.items())


def first_and_best(facts: Figures) -> tuple[Figures, Figures]:
    """The evaluation before training, and that of the draft that is kept."""
    best = [figures for figures in facts["evaluations"] if figures["update"] == facts["best"]["update"]]
    return (facts["evaluations"] or [{}])[0], (best or [facts["best"]])[-1]


def runs_of(decoding: Figures) -> dict[tuple[str, str], Figures]:
    """What was measured: (tree, before), (tree, after), (chain, before), (chain, after)."""
    runs = {(shape, when): (decoding.get(when) or {}).get(shape) for shape in SHAPES for when in TIMES}
    return {name: run for name, run in runs.items() if run}


def step_lines(records: Sequence[Figures], key: str) -> dict[str, Points]:
    """A line, averaged, for each step of the lists that records hold under `key`."""
    steps = max((len(record.get(key) or []) for record in records), default=0)
    return {f"step {k}": averaged(series(records, key, k)) for k in range(steps)}


def series(records: Sequence[Figures], key: str, step: int | None = None) -> list[tuple[float, float]]:
    """(update, value) of the records that have the value; where it is a list, that of a step."""
    pairs = [(r["update"], r.get(key) if step is None else at(r.get(key), step)) for r in records]
    return [(update, value) for update, value in pairs if is_number(value)]


def averaged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS points, each the mean of as many neighbours."""
    group = max(math.ceil(len(points) / MOST_POINTS), 1)
    groups = [points[start : start + group] for start in range(0, len(points), group)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in groups]


def at(values: Sequence[Any] | None, k: int) -> Any:
    return values[k] if values and k < len(values) else None


def number(value: Any, form: str = ".2f") -> str:
    return format(value, form) if is_number(value) else "-"


def ratio(value: Any, other: Any, form: str = ".2f") -> str:
    return format(value / other, form) if is_number(value) and is_number(other) and other else "-"
