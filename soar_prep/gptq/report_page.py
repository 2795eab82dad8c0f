"""report.html of a quantize run: what run.json holds, as a page for people."""

import math
import re
from collections import defaultdict
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from soar_prep.page import (
    details,
    flat,
    line_plot,
    origin_rows,
    page,
    paragraph,
    shaded_cell,
    size_text,
    table,
    time_text,
)

SCHEMES = {"w4a16": "4-bit weights and 16-bit activations", "w4a4": "4-bit weights and activations"}
DECADES = 2  # of error that the heat map's colours span, downwards from the largest


def write_page(path: Path, facts: dict[str, Any], elapsed: float) -> None:
    """Write the page of a quantize run to `path`. facts: what run.json holds; elapsed: seconds of work."""
    settings, linears, kept = facts["settings"], facts["linears"], facts["kept"]
    sections = {"Summary": quality_table(facts["quality"]) + table((), summary_rows(facts, elapsed))}
    if linears:
        sections["Error of each linear"] = heat_map(linears, kept)
        sections["Blocks that use 4 as their maximum"] = fours_plot(linears, settings["scale_rule"])
        sections["Damping"] = damping_section(linears, settings)
        sections["Largest errors"] = worst_table(linears)
    reasons = table(("Linear", "Layers", "Reason"), by_kind(kept)) if kept else ""
    text = "Embeddings, norms and the output head, as always; of the decoder layers' linears "
    sections["Left as it was"] = paragraph(text + ("these:" if kept else "none.")) + reasons
    texts = [[f"{name.capitalize()} text, SHA-256", facts[name]["sha256"]] for name in ("calibration", "evaluation")]
    sections["To reproduce"] = table((), texts + origin_rows(facts["environment"]))
    for heading, values in {"All settings": settings, "SHA-256 of the source's files": facts["model_sha256"]}.items():
        sections["To reproduce"] += details(heading, table((), flat(values)))
    name = Path(settings["model"]).name or settings["model"]
    # A path may hold bytes that are no UTF-8: a long run must not end on its name.
    path.write_text(page(f"{name} in NVFP4", verdict(facts), sections), encoding="utf-8", errors="replace")


def verdict(facts: dict[str, Any]) -> str:
    """One sentence: what the model lost and what the files gained."""
    before, after = facts["source_bytes"], facts["output_bytes"]
    size = f"the files go from {size_text(before)} to {size_text(after)}, {after / before:.0%} of the source"
    if not facts["quality"]:
        return f"Quality was not measured; {size}."
    scheme = facts["settings"]["scheme"]
    scheme = scheme if scheme in facts["quality"] else next(iter(facts["quality"]))
    q = facts["quality"][scheme]
    return (
        f"With {SCHEMES[scheme]}, perplexity on held-out text goes from {q['source_perplexity']:.2f} to "
        f"{q['perplexity']:.2f} ({q['perplexity'] / q['source_perplexity'] - 1:+.1%}), at a KL divergence of "
        f"{q['kl']:.3g} nats a token from the source; {size}."
    )


def quality_table(quality: dict[str, dict[str, Any]]) -> str:
    if not quality:
        return paragraph("Quality was not measured.")
    first = next(iter(quality.values()))
    rows = [["source", f"{first['source_perplexity']:.3f}", "", "", "", f"{first['tokens']:,}"]]
    for scheme, q in quality.items():
        change, kl = q["perplexity"] / q["source_perplexity"] - 1, f"{q['kl']:.4f} ± {q['kl_error']:.4f}"
        rows.append([scheme, f"{q['perplexity']:.3f}", f"{change:+.1%}", kl, f"{q['top1']:.1%}", f"{q['tokens']:,}"])
    head = ("Model", "Perplexity", "Change", "KL, nats a token", "Same top-1", "Tokens")
    schemes = "; ".join(f"{scheme}: {SCHEMES[scheme]}" for scheme in quality)
    return table(head, rows, "numbers") + paragraph(
        f"{schemes}. KL is the mean divergence from the source, ± its standard error over windows; same top-1 is how "
        "often both models rank the same next token first."
    )


def summary_rows(facts: dict[str, Any], elapsed: float) -> list[list[str]]:
    settings, before, after = facts["settings"], facts["source_bytes"], facts["output_bytes"]
    size = f"{size_text(before)} → {size_text(after)}, {before / after:.2f} : 1"
    rows = [["Size", size], ["Time", time_text(elapsed)]]
    for name in ("calibration", "evaluation"):
        windows, text = facts[name], settings[name]
        cut = f", {windows['truncated']:,} cut at {text['length']:,}" if windows["truncated"] else ""
        counts = f"{windows['samples']:,} windows, {windows['tokens']:,} tokens{cut}"
        rows.append([name.capitalize(), f"{counts} ({text['source']})"])
    limit, q = settings["gate"]["max_kl"], facts["quality"].get(settings["scheme"])
    if limit is not None and q:
        outcome = "passed" if q["kl"] <= limit else "failed"
        rows.append(["Gate", f"{outcome}: KL {q['kl']:.4f} with {settings['scheme']}, at most {limit:g} allowed"])
    return rows


def heat_map(linears: dict[str, dict[str, Any]], kept: dict[str, str]) -> str:
    """Rows are decoder layers, columns kinds of linear; colour is the logarithm of the relative error."""
    names = {split_name(name): name for name in [*linears, *kept]}
    kinds = list(dict.fromkeys(kind for _, kind in names))
    layers = sorted({layer for layer, _ in names})
    largest = max(linear["relative_error"] for linear in linears.values())
    head = "".join(f"<th>{escape(kind).replace('.', '.<wbr>')}</th>" for kind in kinds)
    head = f"<tr><th>layer</th>{head}</tr>"
    body = ""
    for layer in layers:
        cells = (heat_cell(names.get((layer, kind), ""), linears, largest) for kind in kinds)
        body += f"<tr><th>{layer}</th>{''.join(cells)}</tr>\n"
    foot = f"<tfoot>{head}</tfoot>" if len(layers) > 20 else ""
    lowest, middle, highest = (escape(percent(largest / 10**n)) for n in (DECADES, DECADES / 2, 0))
    text = (
        "Share of a linear's output energy that rounding its weights took, in percent: squared error over squared "
        "output on the calibration text. Colours are logarithmic. An empty cell: the layer has no such linear."
    )
    return f"""{paragraph(text)}
<div class="legend"><i></i><span>&le; {lowest}</span><span>{middle}</span><span>{highest}</span></div>
<div class="wide"><table class="heat" style="min-width:{3 + 5 * len(kinds):.0f}rem">
<thead>{head}</thead><tbody>{body}</tbody>{foot}</table></div>
"""


def heat_cell(name: str, linears: dict[str, dict[str, Any]], largest: float) -> str:
    """One cell; name is "" where the layer has no such linear, and not in `linears` where it was kept."""
    if name not in linears:
        return f'<td class="none" title="{escape(name)}">{"kept" if name else ""}</td>'
    error = linears[name]["relative_error"]
    shade = max(0.0, 1 + math.log10(error / largest) / DECADES) if error > 0 else 0.0
    return shaded_cell(percent(error), shade, f"{name}: {percent(error)}%")


def fours_plot(linears: dict[str, dict[str, Any]], rule: str) -> str:
    shares = defaultdict(list)
    for name, linear in linears.items():
        shares[split_name(name)[0]].append(100 * linear["share_of_fours"])
    mean = fmean(100 * linear["share_of_fours"] for linear in linears.values())
    points = [(layer, fmean(values)) for layer, values in sorted(shares.items())]
    return paragraph(
        "The largest weight of each block of 16 is stored as 6, the top of the FP4 grid, or as 4, which leaves 6 "
        f"unused but puts the block's large weights on finer steps. On average {mean:.1f}% of a linear's blocks are "
        f"nearer to 4 (dashed line); the rule was {rule}."
    ) + line_plot({"mean": points}, "decoder layer", "share of 4-blocks, percent", mean)


def damping_section(linears: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    wanted = settings["damping"]  # a linear's own is None where the method needs no factor
    more = {name: f"{x['damping']:g}" for name, x in linears.items() if x["damping"] and x["damping"] > wanted}
    if not more:
        return paragraph(f"None needed more than the configured {wanted:g}.")
    text = f"{len(more)} of {len(linears)} linears needed more than the configured {wanted:g} for their Hessian to be "
    text += "factored; more calibration text helps."
    return paragraph(text) + table(("Linear", "Layers", "Damping"), by_kind(more))


def worst_table(linears: dict[str, dict[str, Any]]) -> str:
    worst = sorted(linears.items(), key=lambda item: -item[1]["relative_error"])[:10]
    rows = [[name, f"{percent(x['relative_error'])}%", f"{x['share_of_fours']:.1%}"] for name, x in worst]
    return table(("Linear", "Error", "4-blocks"), rows, "numbers")


def by_kind(values: dict[str, str]) -> list[list[str]]:
    """Rows of kind, layers and value: linears of one kind and one value share a row, layers as `0-2, 5`."""
    layers = defaultdict(list)
    for name, value in values.items():
        layer, kind = split_name(name)
        layers[kind, value].append(layer)
    rows = []
    for (kind, value), numbers in layers.items():
        runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
        spans = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
        rows.append([kind, ", ".join(spans), value])
    return rows


def split_name(name: str) -> tuple[int, str]:
    """`model.layers.3.self_attn.q_proj` -> (3, `self_attn.q_proj`): the first number is the decoder layer."""
    _, layer, kind = re.split(r"\.(\d+)\.", name, maxsplit=1)
    return int(layer), kind


def percent(share: float) -> str:
    """Two digits, without the sign: 0.0009 -> `0.090`."""
    value = 100 * share
    if 0 < value < 1e-4:
        return "<0.0001"
    return f"{value:#.2g}" if 0 < value < 9.95 else f"{value:.0f}"
