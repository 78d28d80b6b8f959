"""The probe's page: whole by itself, escaped, described in words, and its pictures show the numbers."""

import html.parser
import re

import numpy as np
import pytest

from gattn import page

NASTY = [
    "<script>alert(1)</script>",
    "&amp;",
    '"quoted"',
    "it's",
    "\x00\x1b",
    "\u202eright to left",
    "\ud800",
    "日本",
    "]]>",
]
VOID = {"meta"}


def measured(layers=3, heads=2, gates=("g1", "g2"), tokens=NASTY):
    """The contents of a probe.json, with names and tokens that would break a careless page."""
    rng = np.random.default_rng(0)
    by_layer = lambda: rng.random(layers).tolist()  # noqa: E731
    shares = rng.random((layers, 20))
    gate = {
        "mean": 0.2,
        "mean_by_layer": by_layer(),
        "mean_by_head": rng.random((layers, heads)).tolist(),
        "share_below_0.1": 0.5,
        "share_below_0.1_by_layer": by_layer(),
        "histogram": {
            "edges": np.linspace(0, 1, 21).tolist(),
            "shares": (shares / shares.sum(1, keepdims=True)).tolist(),
        },
    }
    output = lambda: {  # noqa: E731
        name: by_layer() for name in ("mean_abs_by_layer", "below_1e-2_by_layer", "below_1e-3_by_layer")
    }
    maps = np.tril(rng.random((layers, heads, len(tokens), len(tokens)))) + 1e-9
    return {
        "run": "a <b>run</b>",
        "label": "g1_headwise & more",
        "step": 1200,
        "data": {"name": "<i>text</i>.txt", "sequences": 3, "tokens": 100},
        "eval": {"loss": 1.5, "perplexity": 4.48, "bits_per_byte": None, "bayes_loss": 1.4, "tokens": 100},
        "probes": {
            "f_attn": 0.4,
            "f_attn_floor": 0.0123,
            "f_attn_by_layer": [0.123, *by_layer()[1:]],
            "sink_rate": 0.5,
            "sink_rate_by_layer": by_layer(),
            "absorbed": None,
            "m_act": 17792.4,
            "m_act_by_layer": [17792.4, *by_layer()[1:]],
            "kurtosis_by_layer": [None, *by_layer()[1:]],
            "first_token_ratio_by_layer": by_layer(),
            "gates": {position: gate for position in gates},
            "sdpa": {
                "before": output(),
                "after": output(),
                "before_times_mean_score": output() if "g1" in gates else None,
            },
        },
        "maps": {
            "tokens": list(tokens),
            "segment_starts": [0] * len(tokens),
            "layers": [0, layers - 1],
            "by_head": (maps / maps.sum(-1, keepdims=True))[[0, -1]].tolist(),
        },
    }


class Reader(html.parser.HTMLParser):
    """Checks that tags nest, and keeps figures, tags and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.figures = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figure":
            self.figures.append([])
        if "figure" in self.open:
            self.figures[-1].append(self.tags[-1])

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.mark.parametrize("gates", [("g1", "g2"), ("g5",), ()])
def test_the_page_is_whole_by_itself_and_nothing_in_it_is_markup(gates):
    text = page.render(measured(gates=gates))
    read = Reader(text)
    names = {tag for tag, _ in read.tags}
    assert not names & {"script", "link", "iframe", "img", "b", "i", "a"}
    assert not re.search(r"https?:|url\(|@import|href|src=|javascript:", text.replace("</script&gt;", ""))
    attributes = {name for _, found in read.tags for name in found}
    assert not [name for name in attributes if name.startswith("on")]
    words = "".join(read.text)
    assert "a <b>run</b>, step 1,200" in words
    assert "<i>text</i>.txt" in words
    assert "<script>alert" in words
    assert "&amp;" in words
    assert all(c.isprintable() or c == "\n" for c in text)
    text.encode()


def test_every_picture_is_described_and_wide_content_scrolls_in_its_box():
    read = Reader(page.render(measured()))
    assert len(read.figures) == 2 * 3 + 2 * (1 + 2)
    for figure in read.figures:
        (svg,) = [found for tag, found in figure if tag == "svg"]
        assert svg["role"] == "img"
        assert len(svg["aria-label"]) > 40
        assert "figcaption" in [tag for tag, _ in figure]
    labels = [found["aria-label"] for tag, found in read.tags if "aria-label" in found]
    assert len(set(labels)) == len(labels) - 1, "only the boxes of the maps are called alike"
    boxes = [found for tag, found in read.tags if found.get("class") == "scroll"]
    assert len(boxes) == 3 + 2
    assert all(box["tabindex"] == "0" for box in boxes)
    assert "overflow-x: auto" in page.STYLE
    assert "prefers-color-scheme: dark" in page.STYLE
    assert "@media print" in page.STYLE


def test_tables_hold_the_numbers_and_dashes_where_there_are_none():
    attention, gates, sdpa = page.grids(measured())
    first = dict(zip(attention.header, attention.rows[0], strict=True))
    assert first["layer"] == "0"
    assert first["F-Attn"] == "0.123"
    assert first["floor"] == "0.012"
    assert first["M-Act"] == "17,792"
    assert first["kurtosis"] == page.MISSING
    assert gates.header == ("layer", "g1 mean", "g1 < 0.1", "g2 mean", "g2 < 0.1")
    assert len(sdpa.header) == 1 + 2 + 2 * 3
    found = measured()["probes"]["sdpa"]
    for layer, row in enumerate(sdpa.rows):
        cells = dict(zip(sdpa.header, row, strict=True))
        assert cells["mean |y| after"] == f"{found['after']['mean_abs_by_layer'][layer]:#.3g}"
        share = found["before_times_mean_score"]["below_1e-3_by_layer"][layer]
        assert cells["< 1e-3 before × score"] == f"{share:.1%}"
    assert page.summary(measured())["Bayes loss"] == "1.4000"
    assert "bits per byte" not in page.summary(measured())


def test_without_a_g1_gate_there_is_one_sdpa_output():
    assert [grid.header for grid in page.grids(measured(gates=()))][1:] == [
        ("layer", "mean |y|", "|y| < 1e-2", "|y| < 1e-3")
    ]
    assert len(page.grids(measured(gates=("g2",)))[2].header) == 4


def test_an_additive_gate_has_no_scaled_output():
    numbers = measured(gates=("g1",))
    numbers["probes"]["sdpa"]["before_times_mean_score"] = None
    assert len(page.grids(numbers)[2].header) == 1 + 2 + 2 * 2
    page.render(numbers)


def test_maps_show_the_probabilities():
    """Every cell's shade, read back from the paths, is the square root of its probability."""
    rng = np.random.default_rng(0)
    weights = np.tril(rng.random((9, 9)) ** 3)
    weights[3, :3] = 0.25
    drawn = np.zeros((9, 9))
    for opacity, path in re.findall(r'fill-opacity="([\d.]+)" d="([^"]+)"', page._cells(weights)):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            cells = drawn[int(y), int(x) : int(x) + int(width)]
            assert not cells.any(), "no cell is painted twice"
            cells[:] = float(opacity)
    np.testing.assert_allclose(drawn, np.sqrt(weights), atol=0.51 / page.LEVELS)


def test_map_labels_stand_beside_their_rows():
    tokens = ["BOS", "a", "much longer than a label can be"]
    svg = page._labelled_map(np.eye(3), tokens, "a map")
    assert svg.count(">BOS</text>") == 2
    assert "much longer t…</text>" in svg
    heights = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)"', svg)]
    assert np.diff(heights).tolist() == [page.CELL, page.CELL]


def test_histograms_have_one_scale():
    """Bars are proportional to shares, the same for all layers, and the mean stands at its place."""
    gate = measured()["probes"]["gates"]["g1"]
    shares = np.array(gate["histogram"]["shares"])
    for layer, figure in enumerate(page._histograms("g1", gate)):
        heights = [-float(h) for h in re.findall(r"M[\d.]+ 90v(-[\d.]+)h", figure)]
        np.testing.assert_allclose(heights, 90 * shares[layer] / shares.max(), rtol=1e-3)
        place = float(re.search(r'class="mean" d="M([\d.]+) 0', figure)[1])
        assert place == pytest.approx(200 * gate["mean_by_layer"][layer], rel=1e-3)
        assert f"layer {layer}" in figure


def test_the_share_of_the_first_token_is_that_of_the_segment():
    weights = np.array([[1, 0, 0, 0], [0.25, 0.75, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]])
    assert page._first_share(weights, np.array([0, 0, 2, 2])) == "0.38 to the first token"
    assert page._first_share(weights[:1, :1], np.array([0])) == "single tokens"
