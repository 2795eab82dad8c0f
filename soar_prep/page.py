"""Parts of a report page: one HTML file that loads nothing, readable light, dark and narrow.

The functions take plain text and return finished HTML, escaped once. The browser is told besides
(Content-Security-Policy) to run no script and to fetch nothing.
"""

import math
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b2430; --soft: #5a6675; --rule: #dfe4ea; --line: #1f5fae;
  --low: #e3effd; --high: #04337f; --cold-ink: #000; --hot-ink: #fff }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --ink: #e3e8ef; --soft: #9aa6b5; --rule: #2c3540;
  --line: #7db7f5; --low: #13263f; --high: #86c0ff; --cold-ink: #fff; --hot-ink: #000 } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { margin: 0 0 .5rem; line-height: 1.2; overflow-wrap: anywhere } h2 { margin: 2.75rem 0 .5rem; font-size: 1.2rem }
p { margin: .5rem 0 1rem; max-width: 44rem; color: var(--soft) } .lead { font-size: 1.15rem; color: var(--ink) }
summary { margin: .75rem 0; cursor: pointer; font-weight: 600 } .wide { overflow-x: auto; margin: .75rem 0 1.25rem }
table { border-collapse: collapse; font-size: .9rem } thead th, tfoot th { color: var(--soft) }
th, td { padding: .35rem 1.1rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
th { font-weight: 500; white-space: nowrap } td { overflow-wrap: anywhere }
.numbers td, .numbers th + th { padding: .35rem .5rem .35rem 1.1rem; text-align: right; white-space: nowrap }
@media (max-width: 30rem) { .numbers { font-size: .75rem } .numbers td, .numbers th + th { padding-left: .3rem } }
.heat { border-collapse: separate; border-spacing: 2px; table-layout: fixed; width: 100%; font-size: .75rem }
.heat th, .heat td { padding: .1rem .25rem; border: 0; text-align: center } .heat .hot { color: var(--hot-ink) }
.heat th + th { padding: .1rem 0; white-space: normal; overflow-wrap: anywhere; vertical-align: bottom }
.heat th:first-child { position: sticky; left: 0; width: 2.6rem; background: var(--page); color: var(--soft) }
.heat td { border-radius: 3px; background: color-mix(in oklab, var(--high) var(--shade), var(--low)) }
.heat td:not(.hot) { color: var(--cold-ink) } .heat td.none { background: none; color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; justify-content: space-between; max-width: 22rem; font-size: .8rem }
.legend i { width: 100%; height: .7rem; background: linear-gradient(in oklab to right, var(--low), var(--high)) }
.plot { margin: 1rem 0; font-size: .8rem; color: var(--soft) } .plot .name { display: block; text-align: center }
.plot div { position: relative; height: 11rem; margin: .75rem .75rem 1.75rem 3rem }
.plot svg { width: 100%; height: 100%; overflow: visible }
.plot path, .plot polyline { fill: none; stroke: var(--rule); vector-effect: non-scaling-stroke }
.plot .line, .plot .dot { stroke: var(--line); stroke-width: 2; stroke-linejoin: round }
.plot .dot { stroke-width: 7; stroke-linecap: round } .plot .level { stroke: var(--soft); stroke-dasharray: 5 4 }
.plot .y { position: absolute; right: calc(100% + .6rem); transform: translateY(-50%) }
.plot .x { position: absolute; top: calc(100% + .4rem); transform: translateX(-50%) }
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


def line_plot(points: Sequence[tuple[float, float]], x_name: str, y_name: str, level: float) -> str:
    """A line through (x, y) points, x rising by whole numbers, and a dashed line at height `level`.

    The drawing stretches with the page, but its labels are HTML and keep their size: a telephone can show them.
    """
    y_ticks = ticks_around([level, *(y for _, y in points)])
    left, right, bottom, top = points[0][0], points[-1][0], y_ticks[0], y_ticks[-1]
    x_ticks = [x for x in ticks_around([left, right], smallest_step=1) if left <= x <= right]

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


def ticks_around(values: list[float], smallest_step: float = 0.0) -> list[float]:
    """A few round numbers, two at least, the first at or below all values and the last above them."""
    low, high = min(values), max(values)
    rough = max((high - low) / 5, smallest_step) or abs(low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    return [n * step for n in range(math.floor(low / step), math.floor(high / step) + 2)]
