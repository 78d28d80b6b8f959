"""Learning rate x depth x variant x precision: what diverges, and does stability follow massive activations?

`python -m experiments.stability` trains the deep bench at three learning rates. A run *diverged* if loss or gradient
ceased to be finite, if the loss of its last twentieth lies above the lowest mean of as many consecutive losses by more
than a tenth of what had been learned till then, or if it learned less than a third of ln V (that is at most how often
tokens occur). The largest stable learning rate of a seed is the highest one up to which none diverged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from configs.models import dense_1p7b_48l, small
from experiments import report, study
from experiments.report import Column, Finding, Measured, Result
from experiments.sinkbench import sinkbench_deep_config
from experiments.study import Line, Part, ScaledArgs, Study
from gattn.config import Config, override

BASELINE, ELEMENTWISE = "baseline", "SDPA elementwise"
VARIANTS = {
    BASELINE: "baseline",
    ELEMENTWISE: "g1_elementwise",
    "SDPA headwise": "g1_headwise",
    "sandwich norm": "sandwich_norm",
}
LAST, RISE, LEARNED = 1 / 20, 1 / 10, 1 / 3  # of the run, of what was learned, of ln V


@dataclass(frozen=True)
class Scale:
    """What is trained at a scale."""

    base: Config
    rates: tuple[float, ...]
    shallow: int
    """Layers of the shallower model."""


def scales() -> dict[str, Scale]:
    """Models and learning rates of each scale; the paper's are 0.004 and 0.008."""
    return {
        "cpu": Scale(sinkbench_deep_config(), (0.003, 0.01, 0.03), 2),
        "chip": Scale(small(), (0.002, 0.006, 0.02), 4),
        "pod": Scale(dense_1p7b_48l(), (0.004, 0.008, 0.016), 28),
    }


# ---- what is measured -------------------------------------------------------------------------------------------


def diverged(result: Result) -> bool:
    """Whether a run diverged, as the module says."""
    if "diverged" in result:
        return True
    losses = np.array(result["curve"]["loss"])
    window = max(1, round(len(losses) * LAST))
    means = np.convolve(losses, np.full(window, 1 / window), "valid")
    initial, lowest, last = result["eval"]["initial_loss"], means.min(), means[-1]
    return bool(
        last - lowest > RISE * (initial - lowest) or initial - last < LEARNED * math.log(result["data"]["vocab_size"])
    )


def largest_stable(by_rate: Mapping[float, Sequence[Result | None]]) -> list[float]:
    """By seed, the highest learning rate up to which no run diverged, 0 where the lowest did; seeds that miss a run are
    left out."""
    found = []
    for results in zip(*(by_rate[rate] for rate in sorted(by_rate)), strict=True):
        if all(results):
            unstable = [diverged(result) for result in results]
            found.append(([0.0, *sorted(by_rate)])[unstable.index(True) if True in unstable else len(unstable)])
    return found


DIVERGED = Column("diverged", lambda r: float(diverged(r)), ".2f", brief="diverged")
SPIKES = Column("loss spikes", lambda r: float(r["spikes"]["count"]), ".1f", brief="spikes")
COLUMNS = (DIVERGED, SPIKES, report.M_ACT, report.F_ATTN, report.FLOOR, report.GATE, report.LOSS, report.EXCESS)


# ---- what is claimed --------------------------------------------------------------------------------------------


def limits(measured: Measured, rates: Sequence[float]) -> dict[str, list[float]]:
    """Variant -> the largest stable learning rate of each seed."""
    names = [name for name in VARIANTS if _label(name, rates[0]) in measured.results]
    return {name: largest_stable({rate: measured.results[_label(name, rate)] for rate in rates}) for name in names}


def spell(rate: float, rates: Sequence[float]) -> str:
    """A largest stable rate in words: the grid ends somewhere."""
    return f"below {rates[0]:g}" if not rate else f"at least {rate:g}" if rate == max(rates) else f"{rate:g}"


def stable_rates(rates: Sequence[float]) -> Finding:
    """The largest stable learning rates, variant by variant."""

    def finding(measured: Measured) -> str:
        texts = []
        for name, found in limits(measured, rates).items():
            texts.append(f"{name} {', '.join(spell(rate, rates) for rate in found) or 'not measured'}")
        return (
            f"Largest stable learning rate of {', '.join(f'{r:g}' for r in rates)}, seed by seed: {'; '.join(texts)}."
        )

    return finding


def follows(column: Column, rates: Sequence[float]) -> Finding:
    """Claims that of two variants the one with less of a measure, at the lowest rate, bears a higher rate; by the mean
    place on the grid of rates."""

    def finding(measured: Measured) -> str:
        grid = [0.0, *rates]
        found = {k: statistics.fmean(map(grid.index, v)) for k, v in limits(measured, rates).items() if v}
        stats = {name: measured.stat(_label(name, rates[0]), column) for name in found}
        less = {name: stat.mean for name, stat in stats.items() if stat.values}
        pairs = [(a, b) for a, b in combinations(less, 2) if found[a] != found[b] and less[a] != less[b]]
        same = sum((less[a] < less[b]) == (found[a] > found[b]) for a, b in pairs)
        claim = f"Less {column.title} at LR {rates[0]:g}, a larger stable learning rate"
        if not pairs:
            return f"{claim}: no two variants that were measured differ in both."
        verdict = "holds" if same == len(pairs) else "does not hold"
        text = f"{claim}: {verdict}; so it is in {same} of {len(pairs)} pairs of variants"
        ties = len(less) * (len(less) - 1) // 2 - len(pairs)
        text += f", {ties} pairs do not differ" if ties else ""
        lost = [name for name in found if name not in less]
        return f"{text}{'; without a value: ' + ', '.join(lost) if lost else ''}."

    return finding


def precision_gap(full: Part, names: Sequence[str], rates: Sequence[float]) -> Finding:
    """The loss of bfloat16 above that of float32, seed by seed, and how it goes with M-Act among runs of one rate."""

    def finding(measured: Measured) -> str:
        section = full.section()
        exact = Measured(section).results if section else {}
        pairs, left_out = [], 0
        for name, rate in product(names, rates):
            label = _label(name, rate)
            both = zip(exact.get(label, []), measured.results.get(label, []), strict=False)
            for a, b in ((a, b) for a, b in both if a and b):
                if diverged(a) or diverged(b):
                    left_out += 1
                else:
                    gap = b["eval"]["loss"] - a["eval"]["loss"]
                    pairs.append((name, rate, gap, math.log(a["probes"]["m_act"])))
        excuse = f" ({left_out} pairs left out: one of the two diverged)" if left_out else ""
        if len(pairs) < 3:
            return f"Loss of bfloat16 against float32: too few pairs of runs that did not diverge{excuse}."
        gaps = []
        for name in names:
            if mine := [gap for who, _, gap, _ in pairs if who == name]:
                gaps.append(f"{name} {statistics.fmean(mine):+.4f} ({min(mine):+.4f} to {max(mine):+.4f})")
        return (
            f"Loss of bfloat16 minus that of float32 at equal seeds, in nats: {'; '.join(gaps)}. Correlation with the "
            f"logarithm of M-Act over {len(pairs)} pairs, each less the mean of its learning rate: "
            f"{_correlation(pairs)}{excuse}."
        )

    return finding


def _correlation(pairs: Sequence[tuple[str, float, float, float]]) -> str:
    """Of gap and logarithm of M-Act within learning rates, and the share of variance that it explains."""
    by_rate: dict[float, list[tuple[float, float]]] = {}
    for _, rate, gap, m_act in pairs:
        by_rate.setdefault(rate, []).append((gap, m_act))
    centred = [np.array(group) - np.mean(group, axis=0) for group in by_rate.values()]
    gap, m_act = np.concatenate(centred).T
    if not gap.any() or not m_act.any():
        return "undefined"
    r = float(gap @ m_act / math.sqrt((gap @ gap) * (m_act @ m_act)))
    return f"{r:+.2f} ({r * r:.0%} of the variance)"


# ---- what is trained --------------------------------------------------------------------------------------------


def build(args: ScaledArgs) -> Study:
    """All variants deep and in float32; baseline and elementwise gate also shallow, and in bfloat16."""
    scale = scales()[args.scale]
    base = study.given(override(scale.base, {"model.dtype": "float32", "train.divergence_is_a_result": True}), args)
    two = (BASELINE, ELEMENTWISE)
    rates = scale.rates

    def part(layers: int, dtype: str, names: Sequence[str], *more: Finding) -> Part:
        return Part(
            name=f"stability {args.scale} {layers} {dtype}",
            heading=f"{layers} layers, {dtype}",
            note="Held equal: tokens, batch, schedule but for its peak, seeds.",
            base=override(base, {"model.num_layers": layers, "model.dtype": dtype}),
            lines=tuple(_line(name, rate) for name in names for rate in rates),
            seeds=args.seeds,
            columns=COLUMNS,
            findings=(stable_rates(rates), follows(report.M_ACT, rates), follows(report.F_ATTN, rates), *more),
        )

    deep = part(base.model.num_layers, "float32", tuple(VARIANTS))
    parts = [deep, part(scale.shallow, "float32", two)]
    parts.append(part(base.model.num_layers, "bfloat16", two, precision_gap(deep, two, rates)))
    note = (
        f"A run diverged if its loss or gradient ceased to be finite, if its last losses lie above its lowest by more "
        f"than {RISE:.0%} of what had been learned, or if it learned less than {LEARNED:.0%} of ln V. The largest "
        "stable learning rate of a seed is the highest up to which none diverged. In the paper the baseline of 48 "
        "layers converges at 0.004 and not at 0.008 (perplexity 9.2), with a gate or sandwich norm at both (Table 2)."
    )
    return study.study("stability", args, "Stability", note, parts)


def _label(name: str, rate: float) -> str:
    return f"{name}, LR {rate:g}"


def _line(name: str, rate: float) -> Line:
    return Line(_label(name, rate), VARIANTS[name], None, {"optim.learning_rate": rate})


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
