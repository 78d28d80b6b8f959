"""The page of `python -m gattn probe`: one HTML file from measured numbers, with pictures drawn here as inline SVG.

It refers to nothing outside itself and runs no script. On a phone only wide content scrolls, each in its own box; light
and dark follow the reader's setting, print is light. Every picture says in words what it shows.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MISSING = "–"
LABEL_LENGTH = 14  # characters of a token beside a map
CELL = 12  # pixels of one cell of a map with labels
LEVELS = 24  # shades of a map
SHARES = {"below_1e-2_by_layer": "< 1e-2", "below_1e-3_by_layer": "< 1e-3"}
OUTPUTS = {"before": "before", "after": "after", "before_times_mean_score": "before × score"}

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #555; --line: #ccc; --mark: #0b5394; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #15171b; --soft: #a9afb8; --line: #3c424b; --mark: #7ab8f5; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, dl { max-width: 44rem; overflow-wrap: anywhere; } .note { color: var(--soft); font-size: .875rem; }
dl { display: grid; grid-template-columns: minmax(7rem, auto) minmax(0, 1fr); gap: .2rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .75rem 0; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--mark); }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; white-space: normal; }
th:first-child { position: sticky; left: 0; background: var(--paper); } tbody th { font-weight: inherit; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(10rem, 100%), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-size: .8125rem; color: var(--soft); }
svg { display: block; } .swatch { display: inline; } .grid svg { width: 100%; height: auto; }
svg text { fill: var(--ink); }
.ink { fill: var(--mark); } .frame { fill: none; stroke: var(--line); }
.mean { stroke: var(--ink); stroke-dasharray: 4 3; }
.labels { font: 10px ui-monospace, monospace; } .ticks { font: 11px system-ui, sans-serif; }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --mark: #0b5394; }
  body { max-width: none; padding: 0; font-size: 10pt; } table { font-size: 8pt; } th, td { padding: .15rem .35rem; }
  .scroll { overflow: visible; } .scroll svg { max-width: 100%; height: auto; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .ink { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()

LEGEND = (
    "F-Attn: attention that queries give to the first token of their text; the floor is what uniform attention gives "
    "it for the same queries. Sinks: share of heads with F-Attn above 0.3. M-Act: largest activation of a block's "
    "output, mean over sequences. Kurtosis of a token's channels: 3 for normally distributed ones, their number for "
    "one that outweighs all others. First / others: largest activation of the first token over the median of the "
    "others'. SDPA output y: before the g1 gate and after it; before × score: the output before, times the layer's "
    "mean gate score, which is what a gate would do that scales everything alike. Layers count from 0. Padding counts "
    "nowhere."
)


@dataclass(frozen=True)
class Grid:
    """A table of strings by layer: a title, a header and rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def render(measured: Mapping[str, Any]) -> str:
    """A self-contained HTML page from the contents of a probe.json (`gattn.inspection`)."""
    title = f"{measured['run']}, step {measured['step']:,}"
    parts = [f"<h1>{_text(title)}</h1>", _definitions(summary(measured))]
    parts += ["<h2>By layer</h2>"]
    for grid in grids(measured):
        parts += [f"<h3>{_text(grid.title)}</h3>", _table(grid)]
    parts += [f'<p class="note">{_text(LEGEND)}</p>']
    if gates := measured["probes"]["gates"]:
        parts += ["<h2>Gate scores</h2>", '<p class="note">Share of scores by value; dashed: the mean.</p>']
        for position, gate in gates.items():
            parts += [f"<h3>{_text(position)}</h3>", _box(_histograms(position, gate), "grid")]
    parts += ["<h2>Attention maps</h2>", *_maps(measured["maps"])]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def summary(measured: Mapping[str, Any]) -> dict[str, str]:
    """What the numbers are of, and those of the whole model; what does not apply is left out."""
    data, found, probed = measured["data"], measured["eval"], measured["probes"]
    lines = {
        "variant": measured["label"],
        "measured on": f"{data['name']}, {data['sequences']:,} sequences, {data['tokens']:,} tokens",
        "loss": f"{number(found['loss'], '.4f')} nats a token",
        "perplexity": number(found["perplexity"]),
        "bits per byte": number(found["bits_per_byte"], ".4f"),
        "Bayes loss": number(found["bayes_loss"], ".4f"),
        "F-Attn": f"{number(probed['f_attn'], '.4f')} (uniform attention: {number(probed['f_attn_floor'], '.4f')})",
        "sinks": f"{number(probed['sink_rate'], '.0%')} of the heads",
        "absorbed": number(probed["absorbed"], ".3f"),
        "M-Act": number(probed["m_act"]),
    }
    return {name: text for name, text in lines.items() if text != MISSING}


def grids(measured: Mapping[str, Any]) -> list[Grid]:
    """The tables by layer: attention and activations, gates (where there are any), SDPA output."""
    probed = measured["probes"]
    floor = number(probed["f_attn_floor"], ".3f")
    columns = {
        "F-Attn": _column(probed["f_attn_by_layer"], ".3f"),
        "floor": [floor] * len(probed["f_attn_by_layer"]),
        "sinks": _column(probed["sink_rate_by_layer"], ".0%"),
        "M-Act": _column(probed["m_act_by_layer"]),
        "kurtosis": _column(probed["kurtosis_by_layer"]),
        "first / others": _column(probed["first_token_ratio_by_layer"]),
    }
    out = [_grid("Attention and activations", columns)]
    if probed["gates"]:
        columns = {}
        for position, gate in probed["gates"].items():
            columns[f"{position} mean"] = _column(gate["mean_by_layer"], ".3f")
            columns[f"{position} < 0.1"] = _column(gate["share_below_0.1_by_layer"], ".1%")
        out.append(_grid("Gate scores: mean, and share below 0.1", columns))
    sdpa = {name: found for name, found in probed["sdpa"].items() if found is not None}
    columns = {}
    if "g1" not in probed["gates"]:  # nothing lies between before and after
        columns["mean |y|"] = _column(sdpa["before"]["mean_abs_by_layer"])
        columns |= {f"|y| {title}": _column(sdpa["before"][key], ".1%") for key, title in SHARES.items()}
        return [*out, _grid("SDPA output y: mean |y|, shares of small |y| (no g1 gate)", columns)]
    for name, found in sdpa.items():
        if name != "before_times_mean_score":
            columns[f"mean |y| {OUTPUTS[name]}"] = _column(found["mean_abs_by_layer"])
    for key, title in SHARES.items():
        columns |= {f"{title} {OUTPUTS[name]}": _column(found[key], ".1%") for name, found in sdpa.items()}
    return [*out, _grid("SDPA output y: mean |y|, shares of small |y|", columns)]


def number(value: float | None, spec: str = "") -> str:
    """Formatted, by default to three digits; a dash where there is no finite number."""
    if value is None:
        return MISSING
    if spec:
        return format(value, spec)
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".removesuffix(".")


# ---- pictures ---------------------------------------------------------------------------------------------------


def _histograms(position: str, gate: Mapping[str, Any]) -> Iterable[str]:
    """One small picture a layer, all of a position with the same axes."""
    edges, shares = gate["histogram"]["edges"], [_zeros(row) for row in gate["histogram"]["shares"]]
    top = max(max(row) for row in shares) or 1.0
    for layer, row in enumerate(shares):
        mean, sparse = gate["mean_by_layer"][layer], gate["share_below_0.1_by_layer"][layer]
        fullest = int(np.argmax(row))
        alt = (
            f"Histogram of {position} gate scores in layer {layer}: mean {number(mean, '.3f')}, "
            f"{number(sparse, '.0%')} below 0.1; the fullest of {len(row)} bins, {edges[fullest]:g} to "
            f"{edges[fullest + 1]:g}, holds {row[fullest]:.0%}."
        )
        caption = f"layer {layer}: mean {number(mean, '.3f')}, {number(sparse, '.0%')} below 0.1"
        yield _figure(_histogram(edges, row, top, mean, alt), caption)


def _histogram(edges: Sequence[float], shares: Sequence[float], top: float, mean: float | None, alt: str) -> str:
    width, height = 200, 90
    step = width / len(shares)
    bars = "".join(
        f"M{i * step:.5g} {height}v{-height * share / top:.5g}h{step:.5g}V{height}z"
        for i, share in enumerate(shares)
        if share > 0
    )
    low, high = edges[0], edges[-1]
    body = f'<path class="ink" d="{bars}"/><path class="frame" d="M0 {height}h{width}"/>'
    if mean is not None:
        place = min(max((mean - low) / (high - low), 0.0), 1.0) * width
        body += f'<path class="mean" d="M{place:.5g} 0V{height}"/>'
    ticks = ((0, "start", low), (width / 2, "middle", (low + high) / 2), (width, "end", high))
    body += "".join(
        f'<text class="ticks" x="{x:g}" y="{height + 14}" text-anchor="{anchor}">{tick:g}</text>'
        for x, anchor, tick in ticks
    )
    return f'<svg viewBox="0 0 {width} {height + 18}" role="img" aria-label="{_text(alt)}">{body}</svg>'


def _maps(maps: Mapping[str, Any]) -> Iterable[str]:
    """For each chosen layer the mean over heads with the tokens beside it, and every head without."""
    tokens, starts = maps["tokens"], np.array(maps["segment_starts"])
    text = (
        f"The first {len(tokens)} tokens of the first sequence: each row is a query, each column a key. The strength "
        "of a cell is the square root of the probability:"
    )
    yield f'<p class="note">{_text(text)} {_scale()}</p>'
    for layer, by_head in zip(maps["layers"], maps["by_head"], strict=True):
        heads = np.array([[_zeros(row) for row in head] for head in by_head])
        yield f"<h3>Layer {layer}</h3>"
        mean = heads.mean(axis=0)
        alt = f"Attention map of layer {layer}, mean over {len(heads)} heads: {_first_share(mean, starts)}."
        yield _box([_figure(_labelled_map(mean, tokens, alt), f"{_first_share(mean, starts)}.")], "scroll")
        if len(heads) > 1:
            yield _box([_head(layer, i, head, starts) for i, head in enumerate(heads)], "grid")


def _head(layer: int, index: int, weights: np.ndarray, starts: np.ndarray) -> str:
    size, share = len(weights), _first_share(weights, starts)
    alt = f"Attention map of layer {layer}, head {index}: {share}."
    svg = f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{_text(alt)}">{_cells(weights)}</svg>'
    return _figure(svg, f"head {index}: {share}")


def _labelled_map(weights: np.ndarray, tokens: Sequence[str], alt: str) -> str:
    labels = [_text(token if len(token) <= LABEL_LENGTH else token[: LABEL_LENGTH - 1] + "…") for token in tokens]
    margin = 8 + 6 * max(len(token[:LABEL_LENGTH]) for token in tokens)
    side = margin + CELL * len(tokens) + 1
    rows = (
        f'<text x="{margin - 4}" y="{margin + CELL * (i + 0.75):g}" text-anchor="end">{label}</text>'
        for i, label in enumerate(labels)
    )
    columns = (
        f'<text transform="translate({margin + CELL * (i + 0.75):g} {margin - 4}) rotate(-90)">{label}</text>'
        for i, label in enumerate(labels)
    )
    return (
        f'<svg width="{side}" height="{side}" viewBox="0 0 {side} {side}" role="img" aria-label="{_text(alt)}">'
        f'<g transform="translate({margin} {margin}) scale({CELL})">{_cells(weights)}</g>'
        f'<g class="labels">{"".join(rows)}{"".join(columns)}</g></svg>'
    )


def _cells(weights: np.ndarray) -> str:
    """Unit cells, one path for each shade; neighbours of one shade in a row are one rectangle."""
    levels = np.ceil(np.sqrt(np.clip(weights, 0.0, 1.0)) * LEVELS - 0.5).astype(int)
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        ends = [*(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if row[start] > 0:
                paths.setdefault(int(row[start]), []).append(f"M{start} {y}h{end - start}v1h{start - end}z")
    size = len(weights)
    body = f'<rect class="frame" width="{size}" height="{size}" stroke-width=".1"/>'
    return body + "".join(
        f'<path class="ink" shape-rendering="crispEdges" fill-opacity="{level / LEVELS:.3g}" d="{"".join(found)}"/>'
        for level, found in sorted(paths.items())
    )


def _scale() -> str:
    """Swatches of a few probabilities, in words too."""
    swatches = (
        f'<svg class="swatch" width="14" height="14" aria-hidden="true"><rect class="ink" width="14" height="14" '
        f'fill-opacity="{p**0.5:.3g}"/></svg> {p:g}'
        for p in (0.01, 0.1, 0.5, 1.0)
    )
    return ", ".join(swatches) + "."


def _first_share(weights: np.ndarray, starts: np.ndarray) -> str:
    """Mean attention to the first token of each query's segment, without the queries that are that token."""
    queries = np.flatnonzero(np.arange(len(weights)) > starts)
    return f"{weights[queries, starts[queries]].mean():.2f} to the first token" if len(queries) else "single tokens"


# ---- pieces -----------------------------------------------------------------------------------------------------


def _grid(title: str, columns: Mapping[str, Sequence[str]]) -> Grid:
    rows = zip(*columns.values(), strict=True)
    return Grid(title, ("layer", *columns), tuple((str(layer), *row) for layer, row in enumerate(rows)))


def _column(values: Sequence[float | None], spec: str = "") -> list[str]:
    return [number(value, spec) for value in values]


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in grid.header)
    lines = (
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in grid.rows
    )
    body = "\n".join(lines)
    return _box([f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"], "scroll", grid.title)


def _definitions(lines: Mapping[str, str]) -> str:
    return "<dl>\n" + "\n".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in lines.items()) + "\n</dl>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _box(parts: Iterable[str], kind: str, label: str = "Attention map") -> str:
    """A `grid` of figures, or a `scroll` box, which a keyboard can reach to scroll it."""
    focus = f' tabindex="0" role="region" aria-label="{_text(label)}"' if kind == "scroll" else ""
    return f'<div class="{kind}"{focus}>\n' + "\n".join(parts) + "\n</div>"


def _zeros(values: Sequence[float | None]) -> list[float]:
    """Pictures show what is not finite as nothing."""
    return [0.0 if value is None else value for value in values]


def _text(text: str) -> str:
    """Escaped for an element or an attribute; what cannot be printed (control, bidirectional) becomes U+FFFD."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))
