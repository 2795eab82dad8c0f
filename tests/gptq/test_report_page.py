"""The report page: what it says, and that nothing in a run's facts can break or escape it."""

import math
import re
from html.parser import HTMLParser

import pytest

from soar_prep.gptq.report_page import by_kind, percent, split_name, write_page
from soar_prep.page import apart, line_plot, size_text, ticks_around, time_text

KINDS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
VOID = {"meta", "path", "polyline", "wbr"}  # path and polyline close themselves, unless they hold a title


def linear(error=0.001, fours=0.4, damping=0.01):
    return {
        "method": "gptq",
        "damping": damping,
        "relative_error": error,
        "share_of_fours": fours,
        "input_scale": 0.01,
    }


def make_facts(**changes):
    """Facts of a two-layer run as run.json holds them, without what the page never reads."""
    text = {"source": "builtin", "path": None, "samples": 4, "length": 256, "seed": 0}
    windows = {"samples": 4, "tokens": 1024, "truncated": 0, "sha256": "c0ffee"}
    quality = {"source_perplexity": 20.0, "perplexity": 23.0, "kl": 0.12, "kl_error": 0.04, "top1": 0.82, "tokens": 510}
    facts = {
        "settings": {
            "model": "models/tiny-llama",
            "method": "gptq",
            "scheme": "w4a16",
            "scale_rule": "sweep",
            "damping": 0.01,
            "calibration": text,
            "evaluation": text,
            "gate": {"max_kl": None},
        },
        "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": "abc123+", "device": "H200"},
        "model_sha256": {"model.safetensors": "feed"},
        "calibration": windows,
        "evaluation": windows | {"samples": 2, "tokens": 512, "sha256": "beef"},
        "quality": {"w4a16": quality, "w4a4": quality | {"perplexity": 27.0, "kl": 0.33}},
        "linears": {f"model.layers.{layer}.{kind}": linear() for layer in range(2) for kind in KINDS},
        "kept": {},
        "source_bytes": 269_060_552,
        "output_bytes": 116_513_360,
    }
    return facts | changes


def render(tmp_path, facts):
    write_page(tmp_path / "report.html", facts, elapsed=101.3)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Tags and attribute names of a page; fails where tags do not nest."""

    def __init__(self, html):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID or 'class="dot"' in str(self.get_starttag_text()):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def find(pattern, text):
    """The pattern's group where it first matches."""
    match = re.search(pattern, text, re.S)
    assert match, pattern
    return match[1]


def heat_rows(html):
    """Cells of the heat map's body, layer by layer, as (attributes, text)."""
    body = find(r'class="heat".*?<tbody>(.*?)</tbody>', html)
    return [re.findall(r"<td([^>]*)>([^<]*)</td>", row) for row in body.split("</tr>")[:-1]]


def test_says_what_a_reader_wants(tmp_path):
    """Catches a section or figure that got lost on its way from run.json to the page."""
    facts = make_facts()
    facts["settings"]["gate"] = {"max_kl": 0.2}
    facts["calibration"] = facts["calibration"] | {"truncated": 3}
    html = render(tmp_path, facts)
    Outline(html)
    for text in (
        "<title>tiny-llama in NVFP4</title>",
        "goes from 20.00 to 23.00 (+15.0%), at a KL divergence of 0.12 nats a token",
        "269 MB to 117 MB, 43% of the source",
        "269 MB → 117 MB, 2.31 : 1",
        "0.1200 ± 0.0400",
        "0.3300 ± 0.0400",
        "82.0%",
        "1 min 41 s",
        "4 windows, 1,024 tokens, 3 cut at 256 (builtin)",
        "passed: KL 0.1200 with w4a16, at most 0.2 allowed",
        "On average 40.0% of a linear&#x27;s blocks",
        "None needed more than the configured 0.01.",
        "linears none.",
        "abc123 and changes since",
        "<td>c0ffee</td>",
        "<th>torch</th><td>2.13.0</td>",
        "<th>calibration.samples</th><td>4</td>",
    ):
        assert text in html


def test_verdict_is_of_the_configured_scheme(tmp_path):
    """Catches a verdict that praises weight-only figures when activations are to be quantized too."""
    facts = make_facts()
    facts["settings"]["scheme"] = "w4a4"
    assert "With 4-bit weights and activations, perplexity on held-out text goes from 20.00 to 27.00" in render(
        tmp_path, facts
    )


def test_hostile_names_stay_text(tmp_path):
    """Catches a name, reason or setting that is written unescaped and becomes a tag or ends an attribute."""
    hostile = "\"'><img src=x onerror=alert(1)>&amp;<script>"
    facts = make_facts(kept={f"model.layers.0.{hostile}": hostile}, model_sha256={hostile: hostile})
    facts["linears"][f"model.layers.1.attn.{hostile}"] = linear()
    facts["settings"] |= {"model": hostile, "scale_rule": hostile, hostile: hostile}
    facts["environment"] |= {"device": hostile, "commit": hostile}
    outline = Outline(render(tmp_path, facts))
    assert not outline.tags & {"img", "script"}
    assert not {name for name in outline.attributes if name.startswith("on") or name in ("src", "href")}


def test_name_that_is_no_utf8(tmp_path):
    """Catches a crash, after hours of work, on a model path with undecodable bytes."""
    facts = make_facts()
    facts["settings"]["model"] = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert "<title>caf? in NVFP4</title>" in render(tmp_path, facts)


def test_loads_nothing(tmp_path):
    """Catches a font, script, picture or style sheet that would be fetched."""
    html = render(tmp_path, make_facts())
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=|url\(|@import|<link|<script", html)
    assert "default-src 'none'" in html


def test_without_quality(tmp_path):
    """Catches the first scheme being taken from an empty dict."""
    facts = make_facts(quality={})
    facts["settings"]["gate"] = {"max_kl": 0.2}
    html = render(tmp_path, facts)
    assert "Quality was not measured; the files go from 269 MB" in html
    assert "Perplexity" not in html
    assert "Gate" not in html


def test_weight_only(tmp_path):
    """Catches a page that expects w4a4 figures of a checkpoint that has no activation scales."""
    facts = make_facts()
    del facts["quality"]["w4a4"]
    html = render(tmp_path, facts)
    assert "<th>w4a16</th>" in html
    assert "w4a4" not in html


def test_layers_that_differ(tmp_path):
    """Catches cells of a hybrid model that slide into a neighbour's column, and kept linears shown as missing."""
    linears = {
        "model.layers.0.linear_attn.in_proj": linear(0.001),
        "model.layers.0.mlp.up_proj": linear(0.002),
        "model.layers.1.self_attn.q_proj": linear(0.003),
        "model.layers.1.mlp.up_proj": linear(0.004),
    }
    html = render(tmp_path, make_facts(linears=linears, kept={"model.layers.0.linear_attn.gate": "keep_unquantized"}))
    Outline(html)
    heads = find(r'class="heat".*?<thead><tr>(.*?)</tr>', html).replace("<wbr>", "")
    assert re.findall(r"<th>(.*?)</th>", heads)[1:] == [
        "linear_attn.in_proj",
        "mlp.up_proj",
        "self_attn.q_proj",
        "linear_attn.gate",
    ]
    texts = [[text for _, text in row] for row in heat_rows(html)]
    assert texts == [["0.10", "0.20", "", "kept"], ["", "0.40", "0.30", ""]]
    assert "<th>linear_attn.gate</th><td>0</td><td>keep_unquantized</td>" in html


def test_shades_are_logarithmic(tmp_path):
    """Catches a linear or reversed colour scale, a shade out of range, and a logarithm of zero."""
    errors = (0.01, 0.001, 0.0001, 1e-9, 0.0)
    html = render(tmp_path, make_facts(linears={f"m.layers.{i}.fc": linear(error) for i, error in enumerate(errors)}))
    cells = [row[0] for row in heat_rows(html)]
    assert [find(r"--shade:(\d+%)", attributes) for attributes, _ in cells] == ["100%", "50%", "0%", "0%", "0%"]
    assert [text for _, text in cells] == ["1.0", "0.10", "0.010", "&lt;0.0001", "0"]
    assert ["hot" in attributes for attributes, _ in cells] == [True, False, False, False, False]
    assert 'title="m.layers.1.fc: 0.10%"' in cells[1][0]


def test_one_layer_without_error(tmp_path):
    """Catches divisions by a range of zero in the heat map and in both axes of the plot."""
    html = render(tmp_path, make_facts(linears={"transformer.h.3.attn.c_attn": linear(error=0.0, fours=0.0)}))
    Outline(html)
    assert [[text for _, text in row] for row in heat_rows(html)] == [["0"]]
    assert 'd="M50 100.0h0"><title>decoder layer 3: 0</title>' in html


def test_nothing_quantized(tmp_path):
    """Catches the largest or mean of nothing, when every linear is kept."""
    kept = {f"model.layers.{layer}.mlp.up_proj": "keep_unquantized" for layer in range(3)}
    html = render(tmp_path, make_facts(linears={}, kept=kept))
    Outline(html)
    assert "<th>mlp.up_proj</th><td>0-2</td><td>keep_unquantized</td>" in html
    assert "Largest errors" not in html


def test_plot_shows_the_mean_of_each_layer(tmp_path):
    """Catches layers in string order (10 before 2), and points that are not the layer's mean."""
    linears = {f"model.layers.{layer}.a": linear(fours=layer / 100) for layer in (10, 2, 0)}
    linears["model.layers.2.b"] = linear(fours=0.06)
    html = render(tmp_path, make_facts(linears=linears))
    assert re.findall(r"<title>decoder layer (.*?)</title>", html) == ["0: 0", "2: 4", "10: 10"]
    assert [x for x, _ in re.findall(r"([\d.]+),([\d.]+)", find(r'points="(.*?)"', html))] == [
        "0.0",
        "20.0",
        "100.0",
    ]


def test_damping(tmp_path):
    """Catches raised damping that goes unreported, and the None of round_to_nearest being compared."""
    linears = {f"model.layers.{layer}.mlp.up_proj": linear(damping=0.1 if layer < 3 else 0.01) for layer in range(5)}
    html = render(tmp_path, make_facts(linears=linears))
    assert "3 of 5 linears needed more than the configured 0.01" in html
    assert "<th>mlp.up_proj</th><td>0-2</td><td>0.1</td>" in html
    rounded = {"model.layers.0.mlp.up_proj": linear(damping=None)}
    assert "None needed more" in render(tmp_path, make_facts(linears=rounded))


def test_ten_largest_errors(tmp_path):
    """Catches the smallest errors, or all of them, in the table of the largest."""
    linears = {f"model.layers.{i}.fc": linear(error=(i + 1) / 1000) for i in range(12)}
    table = render(tmp_path, make_facts(linears=linears)).split("Largest errors")[1].split("</table>")[0]
    assert re.findall(r"layers\.(\d+)\.fc", table) == [str(i) for i in range(11, 1, -1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj", (3, "self_attn.q_proj")),
        ("transformer.h.12.attn.c_attn", (12, "attn.c_attn")),
        ("model.layers.1.mlp.experts.7.up_proj", (1, "mlp.experts.7.up_proj")),
    ],
)
def test_split_name(name, expected):
    """Catches the number of an expert taken for that of the layer."""
    assert split_name(name) == expected


def test_by_kind_joins_neighbouring_layers():
    """Catches ranges over gaps, and layers whose reasons differ in one row."""
    values = {f"m.layers.{i}.fc": "odd" if i == 4 else "x" for i in (10, 0, 1, 2, 4, 5, 11)}
    assert by_kind(values) == [["fc", "0-2, 5, 10-11", "x"], ["fc", "4", "odd"]]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (3, 3), (39.1, 42.3), (-0.2, 0.1), (1e-7, 2e-7), (0, 20_000), (5, 10)]
)
def test_ticks_enclose_the_values(low, high):
    """Catches axes that cut the data off, have a height of zero or hold dozens of labels."""
    ticks = ticks_around([low, high])
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] > high
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([10, 50], [10, 50]),
        ([10, 12, 13], [10, 19, 28]),
        ([95, 96, 97], [82, 91, 100]),
        ([50, 50, 99], [50, 59, 99]),
    ],
)
def test_labels_keep_apart(places, expected):
    """Catches names that are written over each other, leave their order, or hang below the plot."""
    assert apart(places, gap=9) == expected


def test_plot_of_several_lines():
    """Catches a line without its name, names at another line's end, and two lines of one look."""
    lines = {f"step {n}": [(0, 0.1), (10, n / 10)] for n in (2, 0, 1, 6, 5, 4, 3)}
    html = line_plot(lines, "update", "alpha")
    Outline(html)
    assert html.count("<polyline") == 7
    assert re.findall(r"</i>(.*?)</span>", html) == [f"step {n}" for n in (6, 5, 4, 3, 2, 1, 0)]
    names = dict(re.findall(r'class="end (hue\d dash\d)".*?</i>(.*?)</span>', html))
    drawn = dict(re.findall(r'<g class="(hue\d dash\d)">.*?<title>(step \d), update 0: 0.1</title>', html))
    assert len(names) == 7
    assert names == drawn


def test_plot_leaves_out_what_is_no_number():
    """Catches nan in a drawing, where the browser gives up on the whole line, and ticks around nothing."""
    html = line_plot({"a": [(0, None), (1, 2.0), (2, math.nan)], "b": [(0, math.inf)]}, "x", "y", level=3.0)
    Outline(html)
    assert re.findall(r"<title>(.*?)</title>", html) == ["x 1: 2"]
    assert "nan" not in html
    assert "</i>" not in html
    assert line_plot({"a": [(0, None)], "b": []}, "x", "y", level=3.0) == ""


def test_dots_of_a_long_line():
    """Catches thousands of dots that cover each other, and a line that is lost with its dots."""
    html = line_plot({"loss": [(n, n % 7) for n in range(1000)]}, "update", "loss")
    assert 'class="dot"' not in html
    assert html.count("<polyline") == 1


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(0.0009), "0.090"),
        (percent(0.0996), "10"),
        (percent(1.5), "150"),
        (percent(1e-8), "<0.0001"),
        (size_text(512), "512 B"),
        (size_text(999_700), "1 MB"),
        (size_text(141e9), "141 GB"),
        (size_text(1.34e12), "1.34 TB"),
        (time_text(0.4), "0 s"),
        (time_text(59.7), "1 min 00 s"),
        (time_text(13_290), "3 h 41 min"),
    ],
)
def test_numbers_for_people(shown, expected):
    """Catches 1e+01 for ten percent, 1000 kB, and 60 s."""
    assert shown == expected
