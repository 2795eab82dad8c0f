"""report.html: a quantize run's facts (run.json) as one file that loads nothing, readable light, dark and narrow.

Text becomes HTML in one place each: functions here take plain text and return finished HTML, escaped once. The
browser is told besides (Content-Security-Policy) to run no script and to fetch nothing.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

SCHEMES = {"w4a16": "4-bit weights, 16-bit activations", "w4a4": "4-bit weights and activations"}
DECADES = 2  # of error that the heat map's colours span, downwards from the largest
HOT = 0.62  # shade above which text needs the other ink to be read
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b2430; --soft: #5a6675; --rule: #dfe4ea; --band: #f4f6f9;
  --line: #1f5fae; --low: #edf3fb; --high: #0b3c7d; --hot-ink: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --ink: #e3e8ef; --soft: #9aa6b5; --rule: #2c3540;
  --band: #1a2029; --line: #7db7f5; --low: #1a2431; --high: #a9d4ff; --hot-ink: #0d1219; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .5rem; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .5rem; font-size: 1.2rem; }
p { margin: .5rem 0 1rem; max-width: 44rem; color: var(--soft); }
.lead { font-size: 1.15rem; color: var(--ink); }
.wide { overflow-x: auto; margin: .75rem 0 1.25rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 1.1rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; white-space: nowrap; }
thead th { color: var(--soft); vertical-align: bottom; }
td { overflow-wrap: anywhere; }
.numbers td, .numbers thead th + th { text-align: right; white-space: nowrap; padding: .35rem .5rem .35rem 1.1rem; }
.heat { border-collapse: separate; border-spacing: 2px; font-size: .75rem; width: 100%; }
.heat th, .heat td { border: 0; padding: .1rem .3rem; text-align: center; white-space: nowrap; }
.heat thead th, .heat tfoot th { font-weight: 500; white-space: normal; color: var(--soft); }
.heat th:first-child { position: sticky; left: 0; width: 3rem; text-align: right; color: var(--soft);
  background: var(--page); }
.heat td { border-radius: 3px; min-width: 3.2rem; background: color-mix(in oklab, var(--high) var(--shade), var(--low)); }
.heat td.hot { color: var(--hot-ink); }
.heat td.none { background: none; color: var(--soft); }
.legend { display: grid; grid-template-columns: repeat(3, 1fr); max-width: 22rem; margin-bottom: .75rem;
  font-size: .8rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.legend i { grid-column: 1 / -1; height: .7rem; border-radius: 3px;
  background: linear-gradient(in oklab to right, var(--low), var(--high)); }
.legend :nth-child(3) { text-align: center; }
.legend :nth-child(4) { text-align: right; }
.plot { margin: 1rem 0; font-size: .8rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.plot div { position: relative; height: 11rem; margin: .75rem .75rem 1.75rem 3rem; }
.plot svg { width: 100%; height: 100%; overflow: visible; }
.plot path, .plot polyline { fill: none; stroke: var(--rule); vector-effect: non-scaling-stroke; }
.plot .line, .plot .dot { stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.plot .dot { stroke-width: 7; stroke-linecap: round; }
.plot .level { stroke: var(--soft); stroke-dasharray: 5 4; }
.plot .y { position: absolute; right: calc(100% + .6rem); transform: translateY(-50%); }
.plot .x { position: absolute; top: calc(100% + .4rem); transform: translateX(-50%); }
.plot .name { display: block; text-align: center; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; }
"""


def write_page(path: Path, facts: dict[str, Any], elapsed: float) -> None:
    """Write the page of a quantize run to `path`. facts: what run.json holds; elapsed: seconds of work."""
    settings, linears = facts["settings"], facts["linears"]
    sections = {
        "Summary": quality_table(facts["quality"]) + table((), summary_rows(facts, elapsed)),
        "Error of each linear": heat_map(linears, facts["kept"]),
        "Blocks that use 4 as their maximum": fours_plot(linears, settings["scale_rule"]),
        "Damping": damping_section(linears, settings),
        "Largest errors": worst_table(linears),
        "Linears left as they were": kept_section(facts["kept"]),
        "To reproduce": table((), origin_rows(facts))
        + folded("SHA-256 of the source's files", table((), list(facts["model_sha256"].items())))
        + folded("All settings", table((), flat(settings))),
    }
    name = Path(settings["model"]).name or settings["model"]
    # A path may hold bytes that are no UTF-8: a long run must not end on its name.
    path.write_text(page(f"{name} in NVFP4", verdict(facts), sections), encoding="utf-8", errors="replace")


def page(title: str, lead: str, sections: dict[str, str]) -> str:
    """The document: title, lead and headings are text, section bodies HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = "\n".join(f"<section><h2>{escape(heading)}</h2>\n{html}</section>" for heading, html in sections.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
</body></html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """An HTML table of plain values; a row's first is its heading. kind="numbers" aligns the others to the right."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escape(str(first))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in rest)}</tr>\n"
        for first, *rest in rows
    )
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>\n'


def line_plot(points: Sequence[tuple[float, float]], x_name: str, y_name: str, level: float) -> str:
    """A line through (x, y) points, x rising by whole numbers, and a dashed line at height `level`.

    The drawing stretches with the page but its labels are HTML, so that they stay readable on a telephone.
    """
    heights = [level, *(y for _, y in points)]
    y_ticks = ticks_around(min(heights), max(heights))
    left, right, bottom, top = points[0][0], points[-1][0], y_ticks[0], y_ticks[-1]
    x_ticks = [x for x in ticks_around(left, right, smallest_step=1) if left <= x <= right]

    def across(x: float) -> float:
        return round(100 * (x - left) / (right - left), 2) if right > left else 50

    def down(y: float) -> float:
        return round(100 * (top - y) / (top - bottom), 2)

    grid = "".join(f"M0 {down(y)}H100" for y in y_ticks)
    line = " ".join(f"{across(x)},{down(y)}" for x, y in points)
    dots = "".join(
        f'<path class="dot" d="M{across(x)} {down(y)}h0"><title>{escape(x_name)} {x:g}: {y:.4g}</title></path>'
        for x, y in points
    )
    labels = "".join(f'<span class="y" style="top:{down(y)}%">{y:g}</span>' for y in y_ticks)
    labels += "".join(f'<span class="x" style="left:{across(x)}%">{x:g}</span>' for x in x_ticks)
    return f"""<figure class="plot">{escape(y_name)}<div>
<svg viewBox="0 0 100 100" preserveAspectRatio="none"><path d="{grid}"/><path class="level" d="M0 {down(level)}H100"/>
<polyline class="line" points="{line}"/>{dots}</svg>{labels}</div><span class="name">{escape(x_name)}</span></figure>
"""


def ticks_around(low: float, high: float, smallest_step: float = 0.0) -> list[float]:
    """A few round numbers, two at least, the first at or below low and the last above high."""
    rough = max((high - low) / 5, smallest_step) or abs(low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    return [n * step for n in range(math.floor(low / step), math.floor(high / step) + 2)]


def folded(heading: str, html: str) -> str:
    return f"<details><summary>{escape(heading)}</summary>{html}</details>\n"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def verdict(facts: dict[str, Any]) -> str:
    """One sentence: what the files lost and what they gained."""
    before, after = facts["source_bytes"], facts["output_bytes"]
    size = f"the files go from {size_text(before)} to {size_text(after)}, {after / before:.0%} of the source"
    if not facts["quality"]:
        return f"Quality was not measured; {size}."
    wanted = facts["settings"]["scheme"]
    scheme = wanted if wanted in facts["quality"] else next(iter(facts["quality"]))
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
        change = q["perplexity"] / q["source_perplexity"] - 1
        divergence = f"{q['kl']:.4f} ± {q['kl_error']:.4f}"
        rows.append(
            [scheme, f"{q['perplexity']:.3f}", f"{change:+.1%}", divergence, f"{q['top1']:.1%}", f"{q['tokens']:,}"]
        )
    head = ("", "Perplexity", "Change", "KL, nats a token", "Same top-1", "Tokens")
    schemes = "; ".join(f"{scheme}: {SCHEMES[scheme]}" for scheme in quality)
    explanation = "KL is the divergence from the source, ± its standard error over windows; top-1, how often both models"
    return table(head, rows, "numbers") + paragraph(f"{schemes}. {explanation} find the same next token likeliest.")


def summary_rows(facts: dict[str, Any], elapsed: float) -> list[list[str]]:
    settings, before, after = facts["settings"], facts["source_bytes"], facts["output_bytes"]
    rows = [
        ["Size", f"{size_text(before)} → {size_text(after)}, {before / after:.2f} : 1"],
        ["Time", time_text(elapsed)],
        ["Calibration", text_facts(facts["calibration"], settings["calibration"])],
        ["Evaluation", text_facts(facts["evaluation"], settings["evaluation"])],
    ]
    limit, q = settings["gate"]["max_kl"], facts["quality"].get(settings["scheme"])
    if limit is not None and q:
        outcome = "passed" if q["kl"] <= limit else "failed"
        rows.append(["Gate", f"{outcome}: KL {q['kl']:.4f} with {settings['scheme']}, at most {limit:g} allowed"])
    return rows


def text_facts(windows: dict[str, Any], settings: dict[str, Any]) -> str:
    cut = f", {windows['truncated']:,} cut at {settings['length']:,}" if windows["truncated"] else ""
    return f"{windows['samples']:,} windows, {windows['tokens']:,} tokens{cut} ({settings['source']})"


def heat_map(linears: dict[str, dict[str, Any]], kept: dict[str, str]) -> str:
    """Rows are decoder layers, columns kinds of linear; colour is the logarithm of the relative error."""
    if not linears:
        return paragraph("No linear was quantized.")
    names = {split_name(name): name for name in [*linears, *kept]}
    kinds = list(dict.fromkeys(kind for _, kind in names))
    largest = max(linear["relative_error"] for linear in linears.values())
    heads = "".join(f"<th>{escape(kind).replace('.', '.<wbr>')}</th>" for kind in kinds)
    heads = f"<tr><th>layer</th>{heads}</tr>"
    body = ""
    for layer in sorted({layer for layer, _ in names}):
        cells = (heat_cell(names.get((layer, kind), ""), linears, largest) for kind in kinds)
        body += f"<tr><th>{layer}</th>{''.join(cells)}</tr>\n"
    legend = "".join(f"<span>{percent(largest / 10**n)}%</span>" for n in (DECADES, DECADES / 2, 0))
    return (
        paragraph(
            "Share of a linear's output energy, on the calibration text, that rounding its weights took: squared error "
            "over squared output, in percent. Colours are logarithmic."
        )
        + f'<div class="legend"><i></i>{legend}</div>\n'
        + f'<div class="wide"><table class="heat"><thead>{heads}</thead><tbody>{body}</tbody>'
        + f"<tfoot>{heads}</tfoot></table></div>\n"
    )


def heat_cell(name: str, linears: dict[str, dict[str, Any]], largest: float) -> str:
    """One cell; name is "" where the layer has no such linear, and not in `linears` where it was kept."""
    if name not in linears:
        return f'<td class="none" title="{escape(name)}">{"kept" if name else ""}</td>'
    error = linears[name]["relative_error"]
    shade = max(0.0, 1 + math.log10(error / largest) / DECADES) if error > 0 else 0.0
    hot = ' class="hot"' if shade > HOT else ""
    return f'<td{hot} style="--shade:{shade:.0%}" title="{escape(name)}: {percent(error)}%">{percent(error)}</td>'


def fours_plot(linears: dict[str, dict[str, Any]], rule: str) -> str:
    shares = defaultdict(list)
    for name, linear in linears.items():
        shares[split_name(name)[0]].append(100 * linear["share_of_fours"])
    if not shares:
        return paragraph("No linear was quantized.")
    mean = fmean(100 * linear["share_of_fours"] for linear in linears.values())
    points = [(layer, fmean(values)) for layer, values in sorted(shares.items())]
    return paragraph(
        "The largest weight of each block of 16 is stored as 6, the top of the FP4 grid, or as 4, which leaves 6 unused "
        f"but puts the block's large weights on finer steps. On average {mean:.1f}% of a linear's blocks are nearer to 4 "
        f"(dashed line); the rule was {rule}."
    ) + line_plot(points, "decoder layer", "share of 4-blocks, percent", mean)


def damping_section(linears: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    if settings["method"] != "gptq":
        return paragraph(f"Method {settings['method']} needs none.")
    wanted = settings["damping"]
    more = {name: f"{linear['damping']:g}" for name, linear in linears.items() if linear["damping"] > wanted}
    if not more:
        return paragraph(f"None needed more than the {wanted:g} of the settings.")
    text = f"The Hessian of {len(more)} of {len(linears)} linears could not be factored with the {wanted:g} of the settings."
    return paragraph(text + " More calibration text is the remedy.") + table(("Linear", "Layers", "Damping"), by_kind(more))


def worst_table(linears: dict[str, dict[str, Any]]) -> str:
    worst = sorted(linears.items(), key=lambda item: -item[1]["relative_error"])[:10]
    if not worst:
        return paragraph("No linear was quantized.")
    rows = [[name, f"{percent(x['relative_error'])}%", f"{x['share_of_fours']:.1%}"] for name, x in worst]
    return table(("Linear", "Error", "4-blocks"), rows, "numbers")


def kept_section(kept: dict[str, str]) -> str:
    always = "Embeddings, norms and the output head always stay as they are"
    if not kept:
        return paragraph(f"None. {always}.")
    return paragraph(f"{always}; of the decoder layers' linears, these.") + table(
        ("Linear", "Layers", "Reason"), by_kind(kept)
    )


def origin_rows(facts: dict[str, Any]) -> list[list[str]]:
    environment = facts["environment"]
    commit = environment["commit"] or "unknown: an installed package"
    return [
        ["Calibration text, SHA-256", facts["calibration"]["sha256"]],
        ["Evaluation text, SHA-256", facts["evaluation"]["sha256"]],
        ["Commit of soar-prep", commit.replace("+", " and changes since")],
        ["Device", environment["device"]],
        ["Python", environment["python"]],
        *([name, version] for name, version in environment["packages"].items()),
    ]


def by_kind(values: dict[str, str]) -> list[list[str]]:
    """Rows of kind, layers and value: linears of one kind with one value share a row."""
    layers = defaultdict(list)
    for name, value in values.items():
        layer, kind = split_name(name)
        layers[kind, value].append(layer)
    return [[kind, ranges(numbers), value] for (kind, value), numbers in layers.items()]


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def split_name(name: str) -> tuple[int, str]:
    """`model.layers.3.self_attn.q_proj` -> (3, `self_attn.q_proj`): the first number is the decoder layer."""
    _, layer, kind = re.split(r"\.(\d+)\.", name, maxsplit=1)
    return int(layer), kind


def flat(settings: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Rows of dotted name and value."""
    rows = []
    for name, value in settings.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [[prefix + name, str(value)]]
    return rows


def percent(share: float) -> str:
    """Two digits, without the sign: 0.00082 -> `0.082`."""
    value = 100 * share
    if 0 < value < 1e-4:
        return "<0.0001"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def size_text(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} GB"


def time_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
