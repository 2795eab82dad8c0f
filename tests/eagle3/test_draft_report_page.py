"""The page of a train-draft run: what it says, and that no missing, odd or hostile fact can break or escape it."""

import math
import re
from html.parser import HTMLParser

import pytest

from soar_prep.eagle3.report_page import MOST_POINTS, averaged, series, write_page
from soar_prep.report import plain
from soar_prep.settings import TrainDraft

VOID = {"meta", "path", "polyline"}  # path closes itself, unless it holds a title
STEPS = 7
BUCKETS = [4096 << n for n in range(8)]


def decoded(lengths, equal=8):
    """Figures of eight prompts; lengths: how many rounds confirmed 1, 2, ... tokens."""
    tokens = sum(n * count for n, count in enumerate(lengths, 1))
    accepted = tokens / sum(lengths)
    counts = {"rounds": sum(lengths), "tokens": tokens, "prompts": 8, "equal": equal, "lengths": lengths}
    return {"accepted": accepted, **counts, "by_domain": {"chat": accepted + 0.15, "code": 2.5}}


def evaluated(update, skill, steps=STEPS):
    """Figures of a draft whose step 0 has acceptance `skill`."""
    alpha = [skill * 0.96**k for k in range(steps)]
    return {
        "update": update,
        "alpha": alpha,
        "accuracy": [0.97 * a for a in alpha],
        "conditional": [min(1.0, 1.02 * a) for a in alpha],
        "coverage": [0.981 - 0.001 * k for k in range(steps)],
        "tau_greedy": 1 + sum(math.prod(alpha[: k + 1]) for k in range(steps)),
        "tau_sampled": 1 + 0.93 * sum(math.prod(alpha[: k + 1]) for k in range(steps)),
    }


def skill_at(update):
    return 0.02 + 0.76 * (1 - math.exp(-update / 450))


def make_metrics(updates=2400):
    lines = []
    for update in range(1, updates + 1):
        noise = math.sin(update**2) * 0.03
        alpha = [max(0.0, (skill_at(update) + noise) * 0.96**k) for k in range(STEPS)]
        lines.append(
            {
                "update": update,
                "loss": 1.2 + 5 * math.exp(-update / 300) + noise,
                "learning_rate": 3e-4,
                "gradient_norm": 0.8,
                "lambda": [math.exp(-3 * a) for a in alpha],
                "alpha": alpha,
                "accuracy": alpha,
                "epoch": update / 1200,
                "tokens_per_second": 41_000 + 900 * noise,
                "elapsed_seconds": 1.4 * update,
                "memory_bytes": 61_000_000_000,
            }
        )
    return lines


def make_facts(**changes):
    """Facts of a plausible run on an 8B target, as run.json holds them."""
    rows = {"rows": 61_204, "tokens": 48_910_331, "supervised": 29_034_112, "truncated": 1_903, "cut_tokens": 2_204_815}
    rows |= {"dropped": 212, "dropped_tokens": 15_208, "longest": 31_884, "sha256": "c0ffee" * 10}
    evaluations = [evaluated(update, skill_at(update)) for update in range(0, 2401, 200)]
    best = evaluations[-1]
    untrained, chain, tree = [590, 6, 1, 0, 0], [31, 38, 29, 22, 15, 10, 7, 18], [18, 30, 31, 26, 20, 16, 12, 17]
    facts = {
        "settings": plain(TrainDraft(target="models/Llama-3.1-8B-Instruct", output="out/draft")),
        "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": "abc123+", "device": "H200"},
        "processes": 1,
        "target_sha256": {"model-00001-of-00004.safetensors": "feed" * 16},
        "data": rows,
        "held_out": rows | {"rows": 64, "tokens": 50_112, "supervised": 30_004, "sha256": "beef" * 16},
        "draft": {
            "hidden_size": 4096,
            "vocab_size": 128_256,
            "draft_vocab_size": 32_000,
            "max_position_embeddings": 131_072,
            "aux_layers": [2, 16, 29],
            "parameters": 424_678_400,
        },
        "vocabulary": {"size": 32_000, "coverage": 0.98731},
        "updates": 2400,
        "best": {key: best[key] for key in ("update", "tau_greedy", "tau_sampled")},
        "evaluations": evaluations,
        "by_position": {"natural": evaluated(0, 0.776)}
        | {str(size): evaluated(0, 0.775 - 0.02 * n) for n, size in enumerate(BUCKETS)},
        "decoding": {
            "before": {"chain": decoded(untrained), "tree": decoded(untrained)},
            "after": {"chain": decoded(chain), "tree": decoded(tree)},
        },
        "launch": {
            shape: "python -m sglang.launch_server --model-path models/Llama-3.1-8B-Instruct --speculative-algorithm "
            "EAGLE3 --speculative-draft-model-path out/draft --speculative-num-steps 7 --speculative-eagle-topk "
            f"{width} --speculative-num-draft-tokens {tokens}"
            for shape, width, tokens in (("chain", 1, 8), ("tree", 4, 15))
        },
        "output_bytes": 849_356_800,
    }
    return facts | changes


def render(tmp_path, facts, metrics=None):
    """The page, whose tags are seen to nest."""
    path = tmp_path / "report.html"
    write_page(path, facts, make_metrics(30) if metrics is None else metrics, elapsed=3_451.0)
    html = path.read_text(encoding="utf-8")
    Outline(html)
    return html


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
        self.handle_startendtag(tag, attrs)
        if tag not in VOID or 'class="dot"' in str(self.get_starttag_text()):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def section(html, heading):
    return html.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]


def test_says_what_a_reader_wants(tmp_path):
    """Catches a section or figure that got lost on its way from run.json to the page."""
    html = render(tmp_path, make_facts(), make_metrics())
    for text in (
        "<title>EAGLE-3 draft for Llama-3.1-8B-Instruct</title>",
        "4.06 tokens a round with a tree (1.01 before the training) and 3.59 tokens a round with a chain (1.01 "
        "before the training); all 16 outputs are token for token the target&#x27;s own.",
        "<th>real, tree</th><td>1.01</td><td>4.06</td><td>4.01</td>",
        "<th>simulated, greedy</th><td>1.02</td><td>3.43</td>",
        "424.7 million parameters, 849 MB",
        "2,400 updates, 2 epochs; the draft after update 2,400 was the best",
        "57 min 31 s",
        "<th>tree, after</th><td>4.06</td><td>170</td><td>691</td><td>8</td><td>8</td>",
        "<th>chat</th><td>1.16</td><td>4.21</td><td>1.16</td><td>3.74</td>",
        '<th>1</th><td class="hot" style="--shade:100%" title="tree, before: 1 tokens">99%</td>',
        "<th>0</th><td>0.776</td>",
        "each point is the mean of 12 updates in a row",
        "<th>to 524,288</th>",
        "<th>Share supervised</th><td>59.4%</td><td>59.9%</td>",
        "Samples are cut at 2,048 tokens",
        "32,000 of the target&#x27;s 128,256 tokens; they are 98.73% of",
        "<span>--speculative-eagle-topk</span> <span>4</span> <span>--speculative-num-draft-tokens</span> "
        "<span>15</span></pre>",
        "abc123 and changes since",
        "<th>data.samples</th><td>100000</td>",
        "feedfeed",
    ):
        assert text in html


def test_what_rounding_cost(tmp_path):
    """Catches a draft in NVFP4 whose loss is not told, and a gain by training where there was none."""
    assert "In NVFP4" not in render(tmp_path, make_facts())
    in_bf16, rounded, worse = evaluated(1800, 0.7), evaluated(1800, 0.6), evaluated(2400, 0.5)
    told = "after update 1,800: 2.87 tokens a round in BF16, 2.33 rounded"
    evaluations = [evaluated(0, 0.02) | {"format": "none"}, in_bf16 | {"format": "none"}, rounded | {"format": "nvfp4"}]
    facts = make_facts(evaluations=evaluations)
    assert f"<th>In NVFP4</th><td>{told}</td>" in render(tmp_path, facts)
    facts["evaluations"].append(worse | {"format": "nvfp4"})
    assert f"{told}; 1.93 at best after training under it</td>" in render(tmp_path, facts)


def test_outputs_that_differ(tmp_path):
    """Catches a page that calls an output the target's own when it was not, or counts the ones before training."""
    facts = make_facts()
    facts["decoding"]["after"]["tree"]["equal"] = 6
    facts["decoding"]["before"]["tree"]["equal"] = 0
    assert "2 of 16 outputs are not token for token" in render(tmp_path, facts)


@pytest.mark.parametrize("decoding", [{}, {"before": {}, "after": {}}, {"before": None}])
def test_without_decoding(tmp_path, decoding):
    """Catches figures of real decoding being taken from nothing."""
    html = render(tmp_path, make_facts(decoding=decoding))
    assert "Real decoding was not measured; on held-out text, simulated, it goes from 1.02 to 3.43" in html
    assert "<th>real," not in html


def test_missing_figures(tmp_path):
    """Catches None, NaN, short lists and absent keys, which short samples and interrupted runs leave."""
    nothing = {
        "accepted": None,
        "rounds": 0,
        "tokens": 0,
        "prompts": 0,
        "equal": 0,
        "lengths": [0] * 8,
        "by_domain": {},
    }
    short = {"alpha": [], "accuracy": [], "conditional": [], "coverage": [], "tau_greedy": 1.0, "tau_sampled": math.nan}
    facts = make_facts(
        evaluations=[{"update": 0} | short, evaluated(10, 0.5, steps=2) | {"conditional": [0.5], "tau_sampled": None}],
        best={"update": 10, "tau_greedy": 1.7, "tau_sampled": None},
        by_position={"natural": short, "4096": {}, "16384": short},
        decoding={
            "before": {"chain": nothing},
            "after": {"chain": nothing, "tree": decoded([1]) | {"accepted": math.nan}},
        },
        vocabulary={"size": 10, "coverage": None},
        data={},
        launch={},
    )
    metrics = make_metrics(3)
    metrics[0] |= {"loss": None, "alpha": [], "lambda": [None] * STEPS, "epoch": None, "tokens_per_second": math.inf}
    metrics[1] = {"update": 2}
    html = render(tmp_path, facts, metrics)
    assert "<th>1</th><td>0.480</td><td>0.466</td><td>-</td><td>0.980</td>" in html
    assert "nan" not in html
    assert "To serve it" not in html
    assert "To reproduce" in render(tmp_path, facts | {"evaluations": [], "by_position": {}}, [])


def test_natural_positions_only(tmp_path):
    """Catches a plot of no buckets."""
    html = render(tmp_path, make_facts(by_position={"natural": evaluated(0, 0.7)}))
    assert "Longer contexts were not simulated" in html
    assert "<svg" not in section(html, "By position")


def test_buckets_are_in_the_order_of_their_size(tmp_path):
    """Catches 131072 before 16384, as strings sort, and an axis on which 4096 to 262144 lie on one spot."""
    facts = make_facts(by_position={str(size): evaluated(0, 0.7) for size in reversed(BUCKETS)})
    plot = section(render(tmp_path, facts), "By position")
    assert re.findall(r"<th>to ([\d,]+)</th>", plot) == [f"{size:,}" for size in BUCKETS]
    assert re.findall(r"greedy, positions (\w+):", plot) == [f"{4 << n}k" for n in range(8)]
    assert re.findall(r'points="[\d.]+,[\d.]+ ([\d.]+),[\d.]+ ([\d.]+)', plot) == [("14.29", "28.57")] * 2


def test_lambda_belongs_to_the_hybrid_loss(tmp_path):
    """Catches an explanation and a plot of lambda for a loss without KL, and a run of one step."""
    facts, metrics = make_facts(), make_metrics(3)
    assert "step 6" in section(render(tmp_path, facts, metrics), "Over the training").split("lambda, trained on")[1]
    assert "lambda, trained on" in render(tmp_path, facts, [line | {"lambda": [0.5]} for line in metrics])
    facts["settings"]["loss"]["kind"] = "tv"
    assert "ambda" not in section(render(tmp_path, facts, metrics), "Over the training")


def test_thousands_of_updates_are_averaged():
    """Catches a page of megabytes, and thinning that drops the last updates or takes one of many for all."""
    line = series([{"update": n, "loss": n % 3} for n in range(1, 1001)], "loss")
    thin = averaged(line)
    assert len(thin) == MOST_POINTS
    assert thin[0] == (3.0, 1.2)  # updates 1 to 5: 1 2 0 1 2
    assert thin[-1][0] == 998
    assert averaged(line[:MOST_POINTS]) == line[:MOST_POINTS]
    assert len(averaged(line[: MOST_POINTS + 1])) == MOST_POINTS // 2 + 1
    assert averaged([]) == []


def test_hostile_names_stay_text(tmp_path):
    """Catches a name, domain, command or setting that is written unescaped and becomes a tag or ends an attribute."""
    hostile = "\"'><img src=x onerror=alert(1)>&amp;<script>"
    facts = make_facts(launch={hostile: hostile}, target_sha256={hostile: hostile})
    facts["decoding"]["after"]["tree"]["by_domain"] = {hostile: 2.0}
    facts["settings"] |= {"target": hostile, hostile: hostile, "positions": {"rule": hostile}}
    facts["environment"] |= {"device": hostile, "commit": hostile}
    outline = Outline(render(tmp_path, facts))
    assert not outline.tags & {"img", "script"}
    assert not {name for name in outline.attributes if name.startswith("on") or name in ("src", "href")}


def test_name_that_is_no_utf8(tmp_path):
    """Catches a crash, after days of work, on a model path with undecodable bytes."""
    facts = make_facts()
    facts["settings"]["target"] = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert "<title>EAGLE-3 draft for caf?</title>" in render(tmp_path, facts)


def test_loads_nothing(tmp_path):
    """Catches a font, script, picture or style sheet that would be fetched."""
    html = render(tmp_path, make_facts())
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=|url\(|@import|<link|<script", html)
    assert "default-src 'none'" in html
