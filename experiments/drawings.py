"""The paper's figures as drawings: whose results each needs, which fields of them, and how they are drawn.

Layers count from 1. Lines and bars are means over seeds; bands and brackets go from the lowest seed to the highest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from configs.variants import PAPER
from experiments import plots, report
from experiments.interactive import Drawing, Panel, Pen
from experiments.plots import Styles
from experiments.provenance import at
from experiments.render import Grid
from experiments.report import Result, Stat

BASELINE, GATE, VALUE = "baseline", "g1_elementwise", "g2_elementwise"
VARIANTS = tuple(PAPER["table4"].values())
SMOOTHING = 0.9
TOLD = 20  # points of a loss curve that tell their values
FEW_LAYERS = 8  # whose maps stand in pairs; of more, six in a line
BEFORE, AFTER, SCALED = "before the gate", "after the gate", "before the gate × mean score"
OUTPUTS = {label: look for label, look in plots.styles((BASELINE, BEFORE, AFTER, SCALED)).items() if label != BASELINE}
SDPA = {BEFORE: "before", AFTER: "after", SCALED: "before_times_mean_score"}

Measured = Mapping[str, list[Result]]
"""By label the results that a figure can be drawn from."""


@dataclass(frozen=True)
class Wanted:
    """A figure: whose results it needs, which fields of them, and how they are drawn."""

    name: str
    heading: str
    variants: tuple[str, ...]
    fields: tuple[str, ...]
    """Dotted paths; {gate} stands for the position of the variant's gate."""
    draw: Callable[[Wanted, Measured, Styles], Drawing]
    text: bool = False
    """Whether it is of the language models where these are a part of their own."""

    def paths(self, variant: str) -> list[str]:
        """The fields that a result of this variant needs."""
        return [field.format(gate=variant.partition("_")[0]) for field in self.fields]


# ---- Figure 1: loss ---------------------------------------------------------------------------------------------


def smoothed(losses: Float[np.ndarray, "points"]) -> Float[np.ndarray, "points"]:
    """The exponential moving average, made unbiased at its beginning."""
    out, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1.0
        out.append(total / weight)
    return np.array(out)


def loss_curves(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """Smoothed training loss, whole and its second half."""
    curves = {}
    for label, results in measured.items():
        by_step = [dict(zip(r["curve"]["step"], smoothed(np.array(r["curve"]["loss"])), strict=True)) for r in results]
        steps = sorted(set.intersection(*map(set, by_step)))
        curves[label] = (np.array(steps), np.array([[one[step] for step in steps] for one in by_step]))
    last = max(steps[-1] for steps, _ in curves.values())
    panels = [_loss_panel("Training loss", curves)]
    half = {
        label: (steps[steps > last / 2], losses[:, steps > last / 2])
        for label, (steps, losses) in curves.items()
        if (steps > last / 2).sum() > 1
    }
    panels += [_loss_panel("The second half, enlarged", half)] if half else []
    grid = _grid("Smoothed training loss", "step", {k: _told_losses(k, *one)[1] for k, one in curves.items()})
    caption = (
        "After Fig. 1, right: training loss in nats, smoothed by an exponential moving average (coefficient "
        f"{SMOOTHING:g} from one recorded step to the next)."
    )
    return Drawing(wanted.name, wanted.heading, tuple(panels), _chosen(looks, curves), caption, (grid,))


def _loss_panel(title: str, curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Panel:
    def draw(pen: Pen) -> None:
        pen.titles = ("step", "training loss (nats)")
        for label, (steps, losses) in curves.items():
            pen.line(label, steps, losses, _told_losses(label, steps, losses)[0])
        pen.axis.xaxis.get_major_locator().set_params(integer=True)

    words = []
    for label, (steps, losses) in curves.items():
        texts = _told_losses(label, steps, losses)[1]
        some = list(texts)[:: max(1, len(texts) // 5)]
        words.append(
            f"{label}: {', '.join(f'{texts[step]} at step {step}' for step in dict.fromkeys((*some, *texts)))}"
        )
    return Panel(title, f"{title}. {'; '.join(words)}.", draw)


def _told_losses(label: str, steps: np.ndarray, losses: np.ndarray) -> tuple[dict[int, str], dict[str, str]]:
    """At some points, the last among them: what they tell, by place; and their values, by step."""
    places = sorted({round(place) for place in np.linspace(0, len(steps) - 1, min(TOLD, len(steps)))})
    values = {place: _spread(losses[:, place], ".4f") for place in places}
    return (
        {place: f"{label}, step {steps[place]}: {text}" for place, text in values.items()},
        {f"{steps[place]}": text for place, text in values.items()},
    )


# ---- by layer: Figures 2 (left), 4, 5, 6 ------------------------------------------------------------------------


@dataclass(frozen=True)
class ByLayer:
    """One measure by layer, of several series."""

    title: str
    form: str
    series: Mapping[str, Float[np.ndarray, "seeds L"]]
    floor: tuple[str, float] | None = None
    """Label and value of a level to compare with."""

    def texts(self, label: str) -> dict[str, str]:
        """By layer, then the mean over layers."""
        values = self.series[label]
        texts = {f"{layer}": _spread(column, self.form) for layer, column in enumerate(values.T, 1)}
        return texts | {"mean": _spread(values.mean(axis=1), self.form)}

    def panel(self) -> Panel:
        """Lines with markers."""
        words = [
            f"{label} {', '.join(f'{text}' for text in list(texts.values())[:-1])}, on average {texts['mean']}"
            for label in self.series
            if (texts := self.texts(label))
        ]
        words += [f"{self.floor[0]}"] if self.floor else []
        return Panel(self.title, f"{self.title} by layer: {'; '.join(words)}.", self._draw)

    def grid(self) -> Grid:
        """All of it."""
        return _grid(f"{self.title} by layer", "layer", {label: self.texts(label) for label in self.series})

    def _draw(self, pen: Pen) -> None:
        pen.titles = ("layer", self.title)
        for label, values in self.series.items():
            texts = list(self.texts(label).values())[:-1]
            told = {place: f"{label}, layer {place + 1}: {self.title} {text}" for place, text in enumerate(texts)}
            pen.line(label, np.arange(1, values.shape[1] + 1), values, told)
        if self.floor:
            pen.level(*self.floor, self.floor[0])
        pen.axis.set_ylim(0, None)
        pen.axis.xaxis.get_major_locator().set_params(integer=True)


def _f_attn(measured: Measured) -> ByLayer:
    floor = float(np.mean([r["probes"]["f_attn_floor"] for results in measured.values() for r in results]))
    series = {label: _values(results, "probes.f_attn_by_layer") for label, results in measured.items()}
    return ByLayer("F-Attn", ".3f", series, (f"uniform attention ({floor:.3f})", floor))


def _with_floor(looks: Styles, one: ByLayer) -> Styles:
    return looks | {one.floor[0]: {"color": "#444444", "linestyle": "--", "marker": ""}} if one.floor else looks


def sinks(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """F-Attn by layer, and the map of the layer where the first row's is largest."""
    by_layer = _f_attn(measured)
    first, results = next(iter(measured.items()))
    layer = int(np.argmax(results[0]["probes"]["f_attn_by_layer"]))
    maps = [_map(label, results[0], layer) for label, results in measured.items()]
    caption = (
        f"After Fig. 2: F-Attn, attention to the first token, by layer; right: attention in layer {layer + 1}, where "
        f"F-Attn of {first} is largest, on the beginning of one held-out sequence, mean over heads, one seed. "
        f"Paper: {report.paper()['appendix']['layer21_first_token']}."
    )
    shown = _with_floor(_chosen(looks, measured), by_layer)
    panels = (by_layer.panel(), *maps)
    return Drawing(wanted.name, wanted.heading, panels, shown, caption, (by_layer.grid(),), len(panels))


def activations(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """M-Act and F-Attn by layer."""
    series = {label: _values(results, "probes.m_act_by_layer") for label, results in measured.items()}
    both = (ByLayer("M-Act", ".3g", series), _f_attn(measured))
    caption = (
        "After Fig. 6: largest activation of each layer's output (M-Act) and attention to the first token (F-Attn). "
        f"Paper: {report.paper()['appendix']['layerwise']}."
    )
    shown = _with_floor(_chosen(looks, measured), both[1])
    grids = tuple(one.grid() for one in both)
    return Drawing(wanted.name, wanted.heading, tuple(one.panel() for one in both), shown, caption, grids)


def sdpa_size(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """Mean |SDPA output|, before and after a gate, and without one."""
    series = {}
    for label, results in measured.items():
        gated = bool(results[0]["probes"]["gates"])
        for when in (BEFORE, AFTER) if gated else (label,):
            series[when] = _values(results, f"probes.sdpa.{SDPA.get(when, 'after')}.mean_abs_by_layer")
    one = ByLayer("mean |SDPA output|", ".3g", series)
    caption = (
        f"After Fig. 4: mean absolute value of the SDPA output by layer: {', '.join(measured)}, the latter before and "
        f"after its gate. Paper: {report.paper()['appendix']['hidden_mean_abs']}."
    )
    return Drawing(
        wanted.name, wanted.heading, (one.panel(),), _chosen(looks | OUTPUTS, series), caption, (one.grid(),)
    )


def sdpa_sparsity(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """Shares of small values of the SDPA output of a gated model."""
    ((label, results),) = measured.items()
    both = []
    for limit in ("1e-2", "1e-3"):
        series = {when: _values(results, f"probes.sdpa.{key}.below_{limit}_by_layer") for when, key in SDPA.items()}
        both.append(ByLayer(f"share of |SDPA output| below {limit}", ".1%", series))
    caption = (
        f"After Fig. 5: share of small values in the SDPA output of {label} by layer: {BEFORE}, {AFTER}, and {BEFORE} "
        "times the layer's mean score, which is what a gate would do that scales everything alike."
    )
    grids = tuple(one.grid() for one in both)
    return Drawing(wanted.name, wanted.heading, tuple(one.panel() for one in both), OUTPUTS, caption, grids)


# ---- Figure 3: gate scores --------------------------------------------------------------------------------------


def gate_scores(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """Histograms of all layers and heads together, by gating method."""
    gates = {label: [next(iter(r["probes"]["gates"].values())) for r in found] for label, found in measured.items()}
    shares = {
        label: np.array([np.mean(gate["histogram"]["shares"], axis=0) for gate in found])
        for label, found in gates.items()
    }
    top = 1.05 * max(values.mean(axis=0).max() for values in shares.values())
    panels, bins, means = [], {}, {}
    for label, found in gates.items():
        edges = np.array(found[0]["histogram"]["edges"])
        between = [f"{low:g}–{high:g}" for low, high in itertools.pairwise(edges)]
        bins[label] = dict(zip(between, (_spread(column, ".1%") for column in shares[label].T), strict=True))
        means[label] = _spread(np.array([gate["mean"] for gate in found]), ".3f")
        mean = float(np.mean([gate["mean"] for gate in found]))
        panels.append(_histogram(label, edges, shares[label].mean(axis=0), bins[label], (mean, means[label]), top))
    caption = (
        "After Fig. 3: gate scores by gating method, share of all scores of all layers and heads; dashed: their mean."
    )
    rows = tuple((label, text) for label, text in means.items())
    grids = (Grid(("method", "mean"), rows, caption="Mean gate score"), _grid("Share of gate scores", "score", bins))
    patches = {label: {"color": looks[label]["color"], "linestyle": "", "marker": "s"} for label in gates}
    return Drawing(wanted.name, wanted.heading, tuple(panels), patches, caption, grids, min(4, len(panels)))


def _histogram(
    label: str,
    edges: np.ndarray,
    heights: np.ndarray,
    bins: Mapping[str, str],
    mean: tuple[float, str],
    top: float,
) -> Panel:
    def draw(pen: Pen) -> None:
        pen.titles = ("gate score", "share of scores")
        pen.bars(label, edges, heights, [f"{label}: {text} of scores in {where}" for where, text in bins.items()])
        pen.level(label, mean[0], f"{label}: mean {mean[1]}", upright=True)
        pen.axis.set(xlim=(edges[0], edges[-1]), ylim=(0, top))
        pen.axis.locator_params(axis="x", nbins=4)

    where, fullest = list(bins.items())[int(np.argmax(heights))]
    alt = f"Histogram of {label} gate scores: mean {mean[1]}; the fullest bin, {where}, holds {fullest}."
    return Panel(label, alt, draw, f"mean {mean[1]}", series=label, small=True)


# ---- Figures 2 (right) and 7: attention maps --------------------------------------------------------------------


def attention_maps(wanted: Wanted, measured: Measured, looks: Styles) -> Drawing:
    """The map of every layer, row beside row."""
    layers = range(len(next(iter(measured.values()))[0]["probes"]["attention_map"]["by_layer"]))
    panels = [
        dataclasses.replace(_map(label, results[0], layer), choice=f"{layer + 1}")
        for layer in layers
        for label, results in measured.items()
    ]
    shares = {
        label: {f"{layer + 1}": f"{first_share(results[0], layer):.3f}" for layer in layers}
        for label, results in measured.items()
    }
    grid = _grid("Attention to the first token in the map", "layer", shares)
    caption = (
        f"After Fig. 7: attention of every layer ({', '.join(measured)}) on the beginning of one held-out sequence, "
        "mean over heads, one seed."
    )
    columns = len(measured) * (2 if len(layers) <= FEW_LAYERS else 3)
    plain: Styles = {label: {} for label in measured}
    return Drawing(wanted.name, wanted.heading, tuple(panels), plain, caption, (grid,), columns, "Layer")


def _map(label: str, result: Result, layer: int) -> Panel:
    found = result["probes"]["attention_map"]
    weights, tokens, share = np.array(found["by_layer"][layer], float), found["tokens"], first_share(result, layer)
    alt = f"Attention map of {label}, layer {layer + 1}: {share:.3f} to the first token on average."
    title, note = f"{label}, layer {layer + 1}", f"{share:.2f} to the first token"
    return Panel(title, alt, lambda pen: pen.map(label, weights, tokens), note, series=label, small=True)


def first_share(result: Result, layer: int) -> float:
    """Mean attention to the first token of the queries behind it, in the map of a layer."""
    return float(np.array(result["probes"]["attention_map"]["by_layer"][layer], float)[1:, 0].mean())


# ---- numbers in words -------------------------------------------------------------------------------------------


def _values(results: Sequence[Result], path: str) -> Float[np.ndarray, "seeds L"]:
    """NaN where a number is not finite."""
    return np.array([at(result, path) for result in results], float)


def _spread(values: Float[np.ndarray, "seeds"], form: str) -> str:
    """Mean over seeds (lowest–highest)."""
    return Stat(tuple(values.tolist()), True).text(form)


def _grid(caption: str, first: str, columns: Mapping[str, Mapping[str, str]]) -> Grid:
    """A column per label; the keys of all of them are the rows."""
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = tuple((key, *(column.get(key, report.NOT_APPLICABLE) for column in columns.values())) for key in keys)
    return Grid((first, *columns), rows, caption=caption)


def _chosen(looks: Styles, labels: Mapping[str, Any]) -> Styles:
    return {label: looks[label] for label in labels}


# ---- the figures ------------------------------------------------------------------------------------------------

F_ATTN, MAP = ("probes.f_attn_by_layer", "probes.f_attn_floor"), "probes.attention_map.by_layer"
SIZES = tuple(f"probes.sdpa.{when}.mean_abs_by_layer" for when in ("before", "after"))
SHARES = tuple(f"probes.sdpa.{when}.below_{limit}_by_layer" for when in SDPA.values() for limit in ("1e-2", "1e-3"))
BOTH = (BASELINE, GATE)
FIGURES = (
    Wanted("fig-1", "Fig. 1, right: training loss", BOTH, ("curve.step",), loss_curves, text=True),
    Wanted("fig-2", "Fig. 2: attention to the first token", BOTH, (*F_ATTN, MAP), sinks),
    Wanted("fig-3", "Fig. 3: gate scores", VARIANTS[1:], ("probes.gates.{gate}.histogram.shares",), gate_scores),
    Wanted("fig-4", "After Fig. 4: size of the SDPA output", BOTH, SIZES, sdpa_size),
    Wanted("fig-5", "Fig. 5: small values of the SDPA output", (GATE,), SHARES, sdpa_sparsity),
    Wanted("fig-6", "Fig. 6: activations", (*BOTH, VALUE), (*F_ATTN, "probes.m_act_by_layer"), activations),
    Wanted("fig-7", "After Fig. 7: attention of every layer", BOTH, (MAP,), attention_maps),
)
