"""A drawing as a PNG for a report, and as SVG on a page where series can be hidden and marks tell their values.

Both come from the same matplotlib calls. The page needs no script and nothing from outside: checkboxes and radio
buttons act by CSS (`:has`; a browser without it shows everything), values are `<title>`s. On a phone panels stand below
each other, so that their texts keep their size.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import render
from experiments.plots import GRID, Styles
from experiments.render import Block, Details, Grid, Heading, Image, Text

WIDE, SMALL = (4.6, 3.3), (2.4, 2.4)  # inches of a panel
SVG = {"svg.fonttype": "none", "svg.hashsalt": "gattn"}
SHADES, SCALE = "Blues", PowerNorm(0.5, 0, 1)
SHOWN = (0.0, 0.05, 0.2, 0.5, 1.0)  # probabilities beside a map's colours
LETTERS = 8  # of the first token beside a map
KEYS_TOLD, LEAST_TOLD = 3, 0.01  # of a query in a map
XLINK = "{http://www.w3.org/1999/xlink}href"
STYLE = """
.interactive fieldset { border: 0; padding: 0; margin: .5rem 0; min-width: 0; }
.interactive fieldset > div { display: flex; flex-wrap: wrap; gap: 0 1.25rem; }
.interactive legend { padding: 0; color: var(--soft); font-size: .875rem; }
.interactive label { display: inline-flex; align-items: center; gap: .4rem; min-height: 2rem; cursor: pointer; }
.interactive input { width: 1.1rem; height: 1.1rem; margin: 0; accent-color: var(--mark); }
.interactive .swatch { flex: none; background: #fff; }
.panels { display: flex; flex-wrap: wrap; gap: .75rem 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(10rem, 100%), 1fr)); }
.panel { margin: 0; flex: 1 1 20rem; max-width: 28rem; }
.panel.small { flex-basis: 10rem; max-width: 20rem; } .panel figcaption { color: var(--ink); }
.drawn { width: 100%; height: auto; background: #fff; } .drawn text { fill: #000; }
.drawn *, .swatch * { stroke-linejoin: round; stroke-linecap: butt; }
.row { pointer-events: all; } .row:hover path { stroke: #d55e00 !important; stroke-width: 1; }
@media print {
  .interactive input, .interactive .choice, .interactive label:has(input:not(:checked)) { display: none; }
  .panel, .interactive label { break-inside: avoid; } .interactive label { min-height: 0; }
  .drawn, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()


class Pen:
    """Draws on one pair of axes, and remembers which series a thing belongs to and what a pointer is told there."""

    def __init__(self, axis: Axes, looks: Styles):
        self.axis, self.looks = axis, looks
        self.marks: dict[str, tuple[str, tuple[str, ...], bool]] = {}
        self.titles = ("", "")
        self.shown: Any = None

    def name_axes(self) -> None:
        """Writes `titles` beside them."""
        self.axis.set(xlabel=self.titles[0], ylabel=self.titles[1])

    def line(
        self,
        label: str,
        x: Float[np.ndarray, "points"],
        values: Float[np.ndarray, "seeds points"],
        told: Mapping[int, str],
    ) -> None:
        """The mean over seeds, their range as a band, and markers at the points of `told`, which are told there."""
        look, mean = self.looks[label], values.mean(axis=0)
        finite = [place for place in told if np.isfinite(mean[place])]
        (line,) = self.axis.plot(x, mean, label=label, markersize=6, markevery=finite, linewidth=1.4, **look)
        self._mark(line, label, [told[place] for place in finite])
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            band = self.axis.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)
            self._mark(band, label)
        self._tidy()

    def level(self, label: str, value: float, told: str, *, upright: bool = False) -> None:
        """A straight line at a value, without a place in the legend where it is upright."""
        draw = self.axis.axvline if upright else self.axis.axhline
        look = {"color": "#333333", "linestyle": "--"} if upright else {"label": label, **self.looks[label]}
        self._mark(draw(value, linewidth=1.4, **look), label, [told])

    def bars(
        self, label: str, edges: Float[np.ndarray, "bins+1"], heights: Float[np.ndarray, "bins"], told: Sequence[str]
    ) -> None:
        """One bar for each pair of edges."""
        colour = self.looks[label]["color"]
        drawn = self.axis.bar(edges[:-1], heights, np.diff(edges), align="edge", color=colour, alpha=0.75)
        for bar, text in zip(drawn, told, strict=True):
            self._mark(bar, label, [text])
        self._tidy()

    def map(self, label: str, weights: Float[np.ndarray, "T T"], tokens: Sequence[str]) -> None:
        """An attention map; every row tells the keys that its query attends to most."""
        self.shown = self.axis.imshow(weights, cmap=SHADES, norm=SCALE, interpolation="none")
        for query, row in enumerate(weights):
            strip = Rectangle((-0.5, query - 0.5), query + 1, 1, facecolor="none", edgecolor="none", clip_on=False)
            self._mark(self.axis.add_patch(strip), label, [most_attended(query, row, tokens)], row=True)
        places = range(0, len(tokens), 16)
        names = [printable(tokens[0])[:LETTERS], *map(str, places[1:])]
        self.axis.set_xticks(places, names, fontsize=9, parse_math=False)
        self.axis.set_yticks(places, names, fontsize=9, parse_math=False)
        self.titles = ("key", "query")

    def _mark(self, artist: Artist, label: str, told: Sequence[str] = (), *, row: bool = False) -> None:
        name = f"mark-{len(self.marks)}"
        artist.set_gid(name)
        self.marks[name] = (label, tuple(told), row)

    def _tidy(self) -> None:
        self.axis.grid(axis="both", **GRID)
        self.axis.set_axisbelow(True)
        self.axis.spines[["top", "right"]].set_visible(False)


def most_attended(query: int, row: Float[np.ndarray, "T"], tokens: Sequence[str]) -> str:
    """The keys with the largest probabilities of a map's row, in words."""
    keys = [key for key in np.argsort(-row, kind="stable")[:KEYS_TOLD] if row[key] >= LEAST_TOLD]
    shares = ", ".join(f"{row[key]:.3f} to key {key} “{printable(tokens[key])}”" for key in keys)
    return f"query {query} “{printable(tokens[query])}”: {shares or f'less than {LEAST_TOLD:g} to any key'}"


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a drawing."""

    title: str
    alt: str
    """What it shows in words, with its numbers."""
    draw: Callable[[Pen], None]
    note: str = ""
    """Below or behind the title."""
    series: str = ""
    """The one series that all of it belongs to."""
    choice: str = ""
    """What it is of, where readers choose between such panels."""
    small: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure."""

    name: str
    """Of its file, and the beginning of its ids."""
    heading: str
    panels: tuple[Panel, ...]
    looks: Styles
    """By series, in the order of the legend; an empty one has no swatch."""
    caption: str
    data: tuple[Grid, ...]
    """What is drawn as numbers."""
    columns: int = 2
    """Panels side by side in the PNG."""
    chosen: str = ""
    """What readers choose between, where panels have a `choice`."""

    @property
    def alt(self) -> str:
        """The whole figure in words."""
        return " ".join(panel.alt for panel in self.panels)


# ---- the PNG ----------------------------------------------------------------------------------------------------


def image(drawing: Drawing) -> Image:
    """All panels in one picture, with titles and a legend."""
    figure, pens = _sketch(drawing, drawing.panels, drawing.columns)
    for pen, panel in zip(pens, drawing.panels, strict=True):
        pen.axis.set_title(f"{panel.title}\n{panel.note}".strip(), fontsize=8 if panel.small else 10)
    if len(axes := {pen.titles for pen in pens}) == 1 and len(pens) > drawing.columns:
        x, y = axes.pop()
        figure.supxlabel(x, fontsize=10)
        figure.supylabel(y, fontsize=10)
    else:
        for pen in pens:
            pen.name_axes()
    if maps := [pen for pen in pens if pen.shown is not None]:
        which = [pen.axis for pen in maps]
        figure.colorbar(maps[-1].shown, ax=which, shrink=0.7, label="attention probability", ticks=SHOWN)
    entries = {}
    for pen in pens:
        handles, labels = pen.axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    width = round(96 * figure.get_figwidth())
    return Image(f"{drawing.name}.png", buffer.getvalue(), drawing.alt, drawing.caption, width, drawing.data)


def _sketch(drawing: Drawing, panels: Sequence[Panel], columns: int) -> tuple[Figure, list[Pen]]:
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    sizes = [SMALL if panel.small else WIDE for panel in panels[:columns]]
    widths = [width for width, _ in sizes]
    figure = Figure(figsize=(sum(widths), rows * max(height for _, height in sizes)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths).ravel()
    for axis in axes[len(panels) :]:
        axis.remove()
    pens = [Pen(axis, drawing.looks) for axis in axes[: len(panels)]]
    for pen, panel in zip(pens, panels, strict=True):
        panel.draw(pen)
    return figure, pens


# ---- the page ---------------------------------------------------------------------------------------------------


def page(title: str, blocks: Sequence[Block | Drawing]) -> str:
    """A page of a report's looks on which drawings are interactive; each comes with its heading, words and numbers."""
    shown: list[Block] = []
    drawings = [block for block in blocks if isinstance(block, Drawing)]
    for block in blocks:
        if isinstance(block, Drawing):
            said = Details("In words and numbers", (Text(block.alt), *block.data))
            shown += [Heading(2, block.heading), Text(f"[[{block.name}]]"), said]  # its place, filled below
        else:
            shown.append(block)
    text = render.html(title, shown)
    for drawing in drawings:
        text = text.replace(f"<p>[[{drawing.name}]]</p>", fragment(drawing))
    return text.replace("</style>\n</head>", f"{STYLE}\n{_switches(drawings)}\n</style>\n</head>")


def _switches(drawings: Sequence[Drawing]) -> str:
    """What a checkbox hides and a radio button leaves."""
    series = range(max((len(drawing.looks) for drawing in drawings), default=0))
    choices = range(max((len(_choices(drawing)) for drawing in drawings), default=0))
    rules = [f".interactive:has(.show-{n}:not(:checked)) .series-{n} {{ display: none; }}" for n in series]
    rules += [f".interactive:has(.pick-{n}:checked) .panel:not(.choice-{n}) {{ display: none; }}" for n in choices]
    return "\n".join(rules)


def _choices(drawing: Drawing) -> list[str]:
    return list(dict.fromkeys(panel.choice for panel in drawing.panels if panel.choice))


def fragment(drawing: Drawing) -> str:
    """A figure with its controls, for a page that has STYLE and the rules of its switches."""
    panels = []
    choices, series = _choices(drawing), list(drawing.looks)
    for number, panel in enumerate(drawing.panels):
        kinds = ["panel"] + ["small"] * panel.small
        kinds += [f"series-{series.index(panel.series)}"] if panel.series else []
        kinds += [f"choice-{choices.index(panel.choice)}"] if panel.choice else []
        title = f"<figcaption>{_text(': '.join(filter(None, (panel.title, panel.note))))}</figcaption>"
        panels.append(f'<figure class="{" ".join(kinds)}">\n{title}\n{_drawn(drawing, number)}\n</figure>')
    boxes = [
        f'<label><input type="checkbox" class="show-{n}" checked/>{_swatch(drawing, n)}{_text(label)}</label>'
        for n, label in enumerate(series)
    ]
    controls = _controls("Shown", boxes)
    if choices:
        radio = f'<label><input type="radio" name="{drawing.name}"'
        buttons = [f"{radio} checked/>all</label>"]
        buttons += [f'{radio} class="pick-{n}"/>{_text(one)}</label>' for n, one in enumerate(choices)]
        controls += "\n" + _controls(drawing.chosen, buttons, "choice")
    kind = "panels tiles" if all(panel.small for panel in drawing.panels) else "panels"
    scale = f"{_scale()}\n" if any("<image" in panel for panel in panels) else ""
    return (
        f'<figure class="interactive" aria-label="{_text(drawing.heading)}">\n{controls}\n<div class="{kind}">\n'
        + "\n".join(panels)
        + f"\n</div>\n{scale}<figcaption>{_text(drawing.caption)}</figcaption>\n</figure>"
    )


def _controls(title: str, items: Sequence[str], kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f"<fieldset{name}>\n<legend>{_text(title)}</legend>\n<div>\n" + "\n".join(items) + "\n</div>\n</fieldset>"


def _scale() -> str:
    """A map's colours."""
    shades = colormaps[SHADES]
    swatches = ", ".join(
        f'<svg class="swatch" width="14" height="14" aria-hidden="true"><rect width="14" height="14" '
        f'fill="{to_hex(shades(float(SCALE(share))))}" stroke="#777"/></svg> {share:g}'
        for share in SHOWN
    )
    return f'<p class="note">Attention probability: {swatches}.</p>'


def _drawn(drawing: Drawing, number: int) -> str:
    panel = drawing.panels[number]
    with rc_context(SVG):
        figure, (pen,) = _sketch(drawing, [panel], 1)
        pen.name_axes()
        root = _saved(figure)
    for element in list(root.iter()):
        if mark := pen.marks.get(element.get("id", "")):
            label, told, row = mark
            element.set("class", f"series-{list(drawing.looks).index(label)}" + " row" * row)
            _tell(element, told)
    _own_ids(root, f"{drawing.name}-{number}-")
    root.attrib |= {"class": "drawn", "role": "img", "aria-label": printable(panel.alt)}
    return ElementTree.tostring(root, encoding="unicode")


def _swatch(drawing: Drawing, number: int) -> str:
    """A piece of the series' line, or nothing."""
    look = list(drawing.looks.values())[number]
    if not look:
        return ""
    with rc_context(SVG):
        figure = Figure(figsize=(0.5, 0.2))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], markersize=6, linewidth=1.4, **look)
        root = _saved(figure)
    _own_ids(root, f"{drawing.name}-key-{number}-")
    root.attrib |= {"class": "swatch", "width": "36", "height": "14.4", "aria-hidden": "true"}
    return ElementTree.tostring(root, encoding="unicode")


def _saved(figure: Figure) -> ElementTree.Element:
    """The SVG without what an HTML page must not or need not have: namespaces, style sheets, sizes, fonts, blanks."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", facecolor="white", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if XLINK in element.attrib:
            element.set("href", element.attrib.pop(XLINK))
        element.attrib = {name: value for name, value in element.attrib.items() if "{" not in name}
        if "font" in element.get("style", ""):
            element.set("style", re.sub(r"(font: [\d.]+px) [^;]*", r"\1 system-ui, sans-serif", element.get("style")))
        element.text, element.tail = (part if part and part.strip() else None for part in (element.text, element.tail))
    for element in root.iter():
        for child in [one for one in element if one.tag in ("style", "metadata")]:
            element.remove(child)
    root.attrib = {"viewBox": root.get("viewBox")}
    return root


def _tell(group: ElementTree.Element, told: Sequence[str]) -> None:
    """Titles for the markers of a line, or one for anything else."""
    parents = [(parent, child) for parent in group.iter() for child in parent if child.tag == "use"]
    if not parents and len(told) == 1:
        group.insert(0, _title(told[0]))
    elif told:
        for (parent, child), text in zip(parents, told, strict=True):
            place = list(parent).index(child)
            parent.remove(child)
            point = ElementTree.Element("g")
            point.extend([_title(text), child])
            parent.insert(place, point)


def _title(text: str) -> ElementTree.Element:
    title = ElementTree.Element("title")
    title.text = text
    return title


def _own_ids(root: ElementTree.Element, prefix: str) -> None:
    """Ids that nothing else on the page has, and only where something refers to them."""
    used = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "href" and value.startswith("#"):
                used.add(value[1:])
                element.set(name, f"#{prefix}{value[1:]}")
            elif found := re.fullmatch(r"url\(#(.+)\)", value):
                used.add(found[1])
                element.set(name, f"url(#{prefix}{found[1]})")
    for element in root.iter():
        if (name := element.attrib.pop("id", "")) in used:
            element.set("id", prefix + name)


def printable(text: str) -> str:
    """With U+FFFD for what cannot be printed (control, bidirectional)."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _text(text: str) -> str:
    return html.escape(printable(text))
