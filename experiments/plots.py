"""The report's pictures from result.json: sinks and activations by layer, gate scores, attention maps, loss curves."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from experiments.render import Grid, Image

Result = dict[str, Any]
Rows = Mapping[str, list[Result]]
Styles = dict[str, dict[str, Any]]

# Okabe-Ito without its yellow, which is too pale for lines on white, and two of Tol's; black is the baseline's.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#882255", "#999933")
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v", "P", "X", "*")
GRID = {"color": "#dddddd", "linewidth": 0.6}


def styles(labels: Iterable[str]) -> Styles:
    """One look per label, the same in every picture; told apart by line and marker as well as by colour."""
    out: Styles = {}
    for label in labels:
        if label not in out:
            n = len(out)
            out[label] = {
                "color": COLOURS[n % len(COLOURS)],
                "linestyle": LINES[(n + n // len(COLOURS)) % len(LINES)],
                "marker": MARKERS[n % len(MARKERS)],
            }
    return out


def images(name: str, rows: Rows, published: Mapping[str, Mapping[str, Any]], looks: Styles) -> list[Image]:
    """Every picture that the results of a section can give."""
    layers = max(result["config"]["model"]["num_layers"] for results in rows.values() for result in results)
    made = [by_variant(rows, published, looks) if layers == 1 else by_layer(rows, looks)]
    made += [gate_histograms(rows, looks), attention_maps(rows), loss_curves(rows, looks)]
    kinds = ("layers", "gates", "maps", "loss")
    out = []
    for kind, drawn in zip(kinds, made, strict=True):
        if drawn:
            figure, alt, caption, data = drawn
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150, facecolor="white")
            width = round(96 * figure.get_figwidth())
            out.append(Image(f"{name}-{kind}.png", buffer.getvalue(), alt, caption, width, data))
    return out


Drawn = tuple[Figure, str, str, tuple[Grid, ...]] | None
"""A picture, what it shows in words, its caption, and its numbers where no table of the report has them."""


def by_variant(rows: Rows, published: Mapping[str, Mapping[str, Any]], looks: Styles) -> Drawn:
    """F-Attn and M-Act of one-layer models: a bar per variant, a dot per seed."""
    if not (rows := _having(rows, "probes.f_attn", "probes.f_attn_floor", "probes.m_act")):
        return None
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))
    for axis, key, title in ((left, "f_attn", "F-Attn"), (right, "m_act", "M-Act")):
        values = [[r["probes"][key] for r in results] for results in rows.values()]
        axis.barh(
            places, [np.mean(v) for v in values], 0.6, color=[looks[label]["color"] for label in rows], alpha=0.45
        )
        for place, seeds in zip(places, values, strict=True):
            axis.plot(
                seeds, [place] * len(seeds), "o", color="#333333", markersize=4, label="a seed" if not place else None
            )
        axis.set_xlabel(title)
        _tidy(axis)
    floor = next(iter(rows.values()))[0]["probes"]["f_attn_floor"]
    left.axvline(floor, color="#444444", linestyle="--", linewidth=1.2, label=f"uniform attention ({floor:.3f})")
    marks = [(published[label]["f_attn"], place) for place, label in enumerate(rows) if label in published]
    if marks := [(value, place) for value, place in marks if value is not None]:
        left.plot(*zip(*marks, strict=True), "D", markerfacecolor="white", color="#D55E00", label="paper")
    left.set_yticks(places, rows)
    left.invert_yaxis()
    left.set_xlim(0, max(1.0, left.get_xlim()[1]))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    means = "; ".join(f"{label} {np.mean([r['probes']['f_attn'] for r in v]):.3f}" for label, v in rows.items())
    return (
        figure,
        f"Bars of F-Attn and M-Act by variant. F-Attn: {means}; uniform attention {floor:.3f}.",
        "Attention to the first token and largest activation by variant; the models have one layer (paper: Fig. 6).",
        (),
    )


def by_layer(rows: Rows, looks: Styles) -> Drawn:
    """F-Attn and M-Act by layer, mean over seeds with the range as a band."""
    if not (rows := _having(rows, "probes.f_attn_by_layer", "probes.f_attn_floor", "probes.m_act_by_layer")):
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    tables = []
    for axis, key, title, form in (
        (left, "f_attn_by_layer", "F-Attn", ".3f"),
        (right, "m_act_by_layer", "M-Act", ".3g"),
    ):
        means = {}
        for label, results in rows.items():
            values = np.array([r["probes"][key] for r in results])
            layers = np.arange(1, values.shape[1] + 1)
            axis.plot(layers, values.mean(0), label=label, markersize=5, **looks[label])
            axis.fill_between(
                layers, values.min(0), values.max(0), color=looks[label]["color"], alpha=0.12, linewidth=0
            )
            means[label] = dict(zip(layers.tolist(), values.mean(0), strict=True))
        tables.append(_table(f"{title} by layer, mean over seeds", "layer", means, form))
        axis.set(xlabel="layer", ylabel=title, ylim=(0, None))
        axis.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axis)
    floor = next(iter(rows.values()))[0]["probes"]["f_attn_floor"]
    left.axhline(floor, color="#444444", linestyle="--", linewidth=1.2, label=f"uniform attention ({floor:.3f})")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    peaks = "; ".join(
        f"{label} at most {np.mean([r['probes']['f_attn_by_layer'] for r in v], axis=0).max():.3f}"
        for label, v in rows.items()
    )
    return (
        figure,
        f"Lines of F-Attn and M-Act by layer. F-Attn: {peaks}; uniform attention {floor:.3f}.",
        "Attention to the first token and largest activation by layer (paper: Fig. 6); bands span the seeds.",
        tuple(tables),
    )


def gate_histograms(rows: Rows, looks: Styles) -> Drawn:
    """How gate scores are spread, all layers, heads and seeds together."""
    rows = _having(rows, "probes.gates")
    gated = {label: [next(iter(g.values())) for r in v if (g := r["probes"]["gates"])] for label, v in rows.items()}
    gated = {label: [gate for gate in gates if "histogram" in gate] for label, gates in gated.items()}
    if not (gated := {label: gates for label, gates in gated.items() if gates}):
        return None
    figure, axes = _small_multiples(len(gated), 2.0, sharex=True, sharey=True)
    bins = {}
    for axis, (label, gates) in zip(axes, gated.items(), strict=True):
        edges = np.array(gates[0]["histogram"]["edges"])
        shares = np.mean([np.mean(gate["histogram"]["shares"], axis=0) for gate in gates], axis=0)
        axis.stairs(shares, edges, fill=True, color=looks[label]["color"], alpha=0.75)
        mean = np.mean([gate["mean"] for gate in gates])
        axis.axvline(mean, color="#333333", linestyle="--", linewidth=1.2)
        axis.set_title(f"{label}\nmean {mean:.3f}", fontsize=8)
        bins[label] = {f"{low:g}–{high:g}": x for low, high, x in zip(edges, edges[1:], shares, strict=False)}
        _tidy(axis)
    axes[0].locator_params(axis="x", nbins=4)
    figure.supxlabel("gate score", fontsize=10)
    figure.supylabel("share of scores", fontsize=10)
    means = "; ".join(f"{label} mean {np.mean([gate['mean'] for gate in gates]):.3f}" for label, gates in gated.items())
    return (
        figure,
        f"Histograms of gate scores: {means}.",
        "Gate scores, dashed line: mean (paper: Fig. 3).",
        (_table("Share of gate scores, mean over seeds", "score", bins, ".1%"),),
    )


def attention_maps(rows: Rows) -> Drawn:
    """Mean over heads of the attention in the layer with the largest sink of the first row; first seed."""
    if not (rows := _having(rows, "probes.attention_map", "probes.f_attn_by_layer")):
        return None
    maps = {label: results[0]["probes"]["attention_map"] for label, results in rows.items()}
    layer = int(np.argmax(next(iter(rows.values()))[0]["probes"]["f_attn_by_layer"]))
    figure, axes = _small_multiples(len(maps), 2.0, sharex=True, sharey=True)
    for axis, (label, found) in zip(axes, maps.items(), strict=True):
        weights = np.array(found["by_layer"][layer])
        shown = axis.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        first = weights[1:, 0].mean()
        axis.set_title(f"{label}\nfirst token: {first:.2f}", fontsize=8)
        tokens = found["tokens"]
        if len(tokens) <= 24:
            size = min(8, 160 / len(tokens))
            axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=size)
            axis.set_yticks(range(len(tokens)), tokens, fontsize=size)
        else:
            ticks = range(0, len(tokens), 16)
            axis.set_xticks(ticks, [tokens[0], *ticks[1:]], fontsize=8)
            axis.set_yticks(ticks, [tokens[0], *ticks[1:]], fontsize=8)
    figure.colorbar(shown, ax=list(axes), shrink=0.7, label="attention probability", ticks=(0, 0.05, 0.2, 0.5, 1))
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    shares = "; ".join(f"{k} {np.array(m['by_layer'][layer])[1:, 0].mean():.2f}" for k, m in maps.items())
    return (
        figure,
        f"Attention maps of layer {layer + 1}. Mean attention to the first token: {shares}.",
        f"Attention of layer {layer + 1} on one held-out text, mean over heads, first seed (paper: Fig. 2).",
        (),
    )


def loss_curves(rows: Rows, looks: Styles) -> Drawn:
    """Training loss, and held-out loss (above Bayes where that is known), mean over seeds with the range as a band; of
    runs that ended (one whose loss ceased to be finite has no last held-out loss)."""
    if not (rows := _having(rows, "curve", "evals", "eval.loss", "eval.bayes_loss")):
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    bayes = next(iter(rows.values()))[0]["eval"]["bayes_loss"]
    means = {}
    for label, results in rows.items():
        for axis, key, base in ((left, "curve", 0.0), (right, "evals", bayes or 0.0)):
            # Seeds of one row log at the same steps; a run resumed with another interval may not.
            common = sorted(set.intersection(*(set(r[key]["step"]) for r in results)))
            tables = [dict(zip(r[key]["step"], r[key]["loss"], strict=True)) for r in results]
            values = np.array([[table[step] - base for step in common] for table in tables])
            means[label] = dict(zip(common, values.mean(0), strict=True))  # of the last of both, "evals"
            look = looks[label] | {"marker": looks[label]["marker"] if key == "evals" else ""}
            axis.plot(common, values.mean(0), linewidth=1.2, markersize=4, label=label, **look)
            axis.fill_between(common, values.min(0), values.max(0), color=look["color"], alpha=0.12, linewidth=0)
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel="held-out loss (nats)")
    if bayes is not None:
        left.axhline(bayes, color="#444444", linestyle="--", linewidth=1.2, label=f"Bayes loss ({bayes:.4f})")
        right.set(yscale="log", ylabel="held-out loss above Bayes (nats)")
    _tidy(left)
    _tidy(right)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    ends = "; ".join(f"{label} {np.mean([r['eval']['loss'] for r in v]):.3f}" for label, v in rows.items())
    what = "Held-out loss" if bayes is None else "Held-out loss above Bayes"
    return (
        figure,
        f"Loss curves. Final held-out loss: {ends}.",
        "Loss during training; bands span the seeds.",
        (_table(f"{what}, mean over seeds", "step", means, ".4f"),),
    )


def _table(caption: str, first: str, columns: Mapping[str, Mapping[Any, float]], form: str) -> Grid:
    """A column per label; the keys of all of them are the rows."""
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [
        (f"{key}", *(f"{column[key]:{form}}" if key in column else "–" for column in columns.values())) for key in keys
    ]
    return Grid((first, *columns), tuple(rows), caption=caption)


def _having(rows: Rows, *paths: str) -> Rows:
    """The rows and results that have all of these fields; a picture shows what there is."""

    def has(result: Result, path: str) -> bool:
        node: Any = result
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    kept = {label: [r for r in results if all(has(r, path) for path in paths)] for label, results in rows.items()}
    return {label: results for label, results in kept.items() if results}


def _small_multiples(count: int, size: float, **share):
    columns = min(count, 4)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(2.3 * columns + 0.8, (size + 0.4) * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, **share).ravel()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _tidy(axis) -> None:
    axis.grid(axis="both", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
