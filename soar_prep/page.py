"""Parts of a report page: one HTML file that loads nothing, readable light, dark and narrow.

The functions take plain text and return finished HTML, escaped once. The browser is told besides
(Content-Security-Policy) to run no script and to fetch nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, TypeGuard

Points = Sequence[tuple[float, float | None]]
HOT = 0.6  # shade from which the other ink has the better contrast, in both modes
MOST_DOTS = 40  # points of a line that are marked one by one

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b2430; --soft: #5a6675; --rule: #dfe4ea; --line: #1f5fae;
  --hue1: #c9540a; --hue2: #00855f; --hue3: #a8477f; --low: #e3effd; --high: #04337f; --cold-ink: #000;
  --hot-ink: #fff }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --ink: #e3e8ef; --soft: #9aa6b5; --rule: #2c3540;
  --line: #7db7f5; --hue1: #f0a03c; --hue2: #1fb58a; --hue3: #d98bbb; --low: #13263f; --high: #86c0ff;
  --cold-ink: #fff; --hot-ink: #000 } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { margin: 0 0 .5rem; line-height: 1.2; overflow-wrap: anywhere } h2 { margin: 2.75rem 0 .5rem; font-size: 1.2rem }
p { margin: .5rem 0 1rem; max-width: 44rem; color: var(--soft) } .lead { font-size: 1.15rem; color: var(--ink) }
summary { margin: .75rem 0; cursor: pointer; font-weight: 600 } .wide { overflow-x: auto; margin: .75rem 0 1.25rem }
table { border-collapse: collapse; font-size: .9rem } thead th, tfoot th { color: var(--soft) }
th, td { padding: .35rem 1.1rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
th { font-weight: 500; white-space: nowrap } td { overflow-wrap: anywhere }
.numbers td, .numbers th + th { padding: .35rem .5rem .35rem 1.1rem; text-align: right; white-space: nowrap }
@media (max-width: 30rem) { .numbers { font-size: .75rem } .numbers thead th { white-space: normal }
  .numbers td, .numbers th + th { padding-left: .3rem } }
.heat { border-collapse: separate; border-spacing: 2px; table-layout: fixed; width: 100%; font-size: .75rem }
.heat th, .heat td { padding: .1rem .25rem; border: 0; text-align: center } .heat .hot { color: var(--hot-ink) }
.heat th + th { padding: .1rem 0; white-space: normal; overflow-wrap: anywhere; vertical-align: bottom }
.heat th:first-child { position: sticky; left: 0; width: 2.6rem; background: var(--page); color: var(--soft) }
.heat td { border-radius: 3px; background: color-mix(in oklab, var(--high) var(--shade), var(--low)) }
.heat td:not(.hot) { color: var(--cold-ink) } .heat td.none { background: none; color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; justify-content: space-between; max-width: 22rem; font-size: .8rem }
.legend i { width: 100%; height: .7rem; background: linear-gradient(in oklab to right, var(--low), var(--high)) }
pre { padding: .75rem 1rem; border: 1px solid var(--rule); border-radius: 4px; font-size: .85rem;
  white-space: pre-wrap; overflow-x: auto } pre span { white-space: nowrap }
.hue1 { --line: var(--hue1) } .hue2 { --line: var(--hue2) } .hue3 { --line: var(--hue3) }
.plot { margin: 1rem 0; font-size: .8rem; color: var(--soft) } .plot .name { display: block; text-align: center }
.plot div { position: relative; margin: .75rem .75rem 1.75rem 3rem }
.plot svg { width: 100%; height: 100%; overflow: visible }
.plot path, .plot polyline { fill: none; stroke: var(--rule); vector-effect: non-scaling-stroke }
.plot .line, .plot .dot { stroke: var(--line); stroke-width: 2; stroke-linejoin: round }
.plot .dot { stroke-width: 7; stroke-linecap: round } .plot .level { stroke: var(--soft); stroke-dasharray: 5 4 }
.plot .dash1 .line { stroke-dasharray: 7 4 } .plot .dash2 .line { stroke-dasharray: 1 4; stroke-linecap: round }
.plot .named { margin-right: 6rem } .plot .end { position: absolute; left: calc(100% + .5rem);
  transform: translateY(-50%); line-height: 1; white-space: nowrap }
.plot i { display: inline-block; width: 1.3rem; margin-right: .35rem; border-top: 2px solid var(--line);
  vertical-align: middle } .plot .dash1 i { border-top-style: dashed } .plot .dash2 i { border-top-style: dotted }
.plot .y { position: absolute; right: calc(100% + .6rem); transform: translateY(-50%) }
.plot .x { position: absolute; top: calc(100% + .4rem); transform: translateX(-50%) }
@media (max-width: 30rem) { .plot .spare { display: none } }
"""


def page(title: str, lead: str, sections: dict[str, str]) -> str:
    """The document: title, lead and headings are text, section bodies HTML."""
    body = "\n".join(f"<section><h2>{escape(heading)}</h2>\n{html}</section>" for heading, html in sections.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
</body></html>
"""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows of text, each led by its heading. kind="numbers" aligns all but the headings to the right."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>\n"
        for first, *rest in rows
    )
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>\n'


def shaded_cell(text: str, shade: float, title: str) -> str:
    """A cell of a heat map; shade: 0 to 1."""
    hot = ' class="hot"' if shade >= HOT else ""
    return f'<td{hot} style="--shade:{shade:.0%}" title="{escape(title)}">{escape(text)}</td>'


def command(text: str) -> str:
    """A command to copy: it wraps between words only, and is one line in the clipboard."""
    return f"<pre>{' '.join(f'<span>{escape(word)}</span>' for word in text.split(' '))}</pre>\n"


def details(heading: str, html: str) -> str:
    """HTML that shows when its heading is clicked."""
    return f"<details><summary>{escape(heading)}</summary>{html}</details>\n"


def line_plot(
    lines: Mapping[str, Points],
    x_name: str,
    y_name: str,
    level: float | None = None,
    x_text: Callable[[float], str] = "{:,.10g}".format,
) -> str:
    """Lines through (x, y) points, x rising by whole numbers, and a dashed line at height `level`; "" without points.

    Of several lines each has its name at its right end. A point whose y is None or no number is left out.
    x_text: how an x is written. The drawing stretches with the page, but its labels are HTML and keep their size: a
    telephone can show them.
    """
    drawn = {name: [(x, y) for x, y in points if is_number(y)] for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    widths = [x for points in drawn.values() for x, _ in points]
    heights = [y for points in drawn.values() for _, y in points] + ([] if level is None else [level])
    left, right, y_ticks = min(widths), max(widths), ticks_around(heights)
    x_ticks = [x for x in ticks_around([left, right], smallest_step=1) if left <= x <= right]

    def across(x: float) -> float:
        return round(100 * (x - left) / (right - left), 2) if right > left else 50

    def down(y: float) -> float:
        return round(100 * (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]), 2)

    several, height, curves = len(drawn) > 1, 16 if len(drawn) > 4 else 11, ""
    for n, (name, points) in enumerate(drawn.items()):
        hover = f"{name}, {x_name}" if several else x_name
        curves += curve([(across(x), down(y), f"{hover} {x_text(x)}: {y:.4g}") for x, y in points], n)
    grid = "".join(f"M0 {down(y)}H100" for y in y_ticks)
    dashes = "" if level is None else f'<path class="level" d="M0 {down(level)}H100"/>'
    labels = "".join(f'<span class="y" style="top:{down(y)}%">{y:g}</span>' for y in y_ticks)
    for n, x in enumerate(x_ticks):
        spare = " spare" if n % 2 and len(x_ticks) > 4 else ""  # a narrow page has no room for all
        labels += f'<span class="x{spare}" style="left:{across(x)}%">{escape(x_text(x))}</span>'
    labels += end_labels({name: down(points[-1][1]) for name, points in drawn.items()}, 100 / height) if several else ""
    return f"""<figure class="plot">{escape(y_name)}
<div class="{"named" if several else ""}" style="height:{height}rem">
<svg viewBox="0 0 100 100" preserveAspectRatio="none"><path d="{grid}"/>{dashes}{curves}</svg>{labels}</div>
<span class="name">{escape(x_name)}</span></figure>
"""


def is_number(value: Any) -> TypeGuard[float]:
    """False for None, NaN and infinity too."""
    return isinstance(value, int | float) and math.isfinite(value)


def curve(points: Sequence[tuple[float, float, str]], number: int) -> str:
    """Line 0, 1, ... of a plot through points (across, down, what a dot says), percent."""
    line = " ".join(f"{x},{y}" for x, y, _ in points)
    dots = [f'<path class="dot" d="M{x} {y}h0"><title>{escape(text)}</title></path>' for x, y, text in points]
    shown = "".join(dots) if len(dots) <= MOST_DOTS else ""
    return f'<g class="{look(number)}"><polyline class="line" points="{line}"/>{shown}</g>'


def end_labels(ends: Mapping[str, float], gap: float) -> str:
    """Names of lines, each at the height where its line ends or, if that is taken, near it; percent, downwards."""
    order = sorted(enumerate(ends.items()), key=lambda line: line[1][1])
    places = apart([place for _, (_, place) in order], min(gap, 100 / len(ends)))
    return "".join(
        f'<span class="end {look(number)}" style="top:{place:.1f}%"><i></i>{escape(name)}</span>'
        for (number, (name, _)), place in zip(order, places, strict=True)
    )


def look(number: int) -> str:
    """Classes of line 0, 1, ...: four colours after Okabe and Ito, told apart by the colour-blind; then dashes."""
    return f"hue{number % 4} dash{number // 4 % 3}"


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places, moved so that neighbours are `gap` apart and, if they fit, none is beyond 100."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = 100.0
    for n in reversed(range(len(moved))):
        moved[n] = min(moved[n], limit)
        limit = moved[n] - gap
    return moved


def ticks_around(values: list[float], smallest_step: float = 0.0) -> list[float]:
    """A few round numbers, two at least, the first at or below all values and the last above them."""
    low, high = min(values), max(values)
    rough = max((high - low) / 5, smallest_step) or abs(low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    return [n * step for n in range(math.floor(low / step), math.floor(high / step) + 2)]


def origin_rows(environment: dict[str, Any]) -> list[list[str]]:
    """What report.environment found: commit, device and versions."""
    commit = (environment["commit"] or "unknown (an installed package)").replace("+", " and changes since")
    rows = [["Commit", commit], ["Device", environment["device"]], ["Python", environment["python"]]]
    return rows + flat(environment["packages"])


def flat(values: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Rows of dotted name and value."""
    rows = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [[prefix + name, str(value)]]
    return rows


def size_text(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def time_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
