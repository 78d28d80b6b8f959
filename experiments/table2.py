"""The paper's Table 2 and appendix A.6: dense models, shallow and deep, at larger learning rates and batches.

`python -m experiments.table2` trains `tiny` and a deeper, narrower model of the same size: 16 rows, 3 seeds each, about
3 minutes of one core a run. The scales differ in models, learning rate and batch alone; what the paper's rows do to
those (twice the learning rate, four times the batch) is done to ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.models import dense_1p7b_28l, dense_1p7b_48l, small, tiny
from configs.variants import PAPER
from experiments import report, study
from experiments.report import Column, Finding, change
from experiments.stability import DIVERGED
from experiments.study import Line, Part, ScaledArgs, Study
from gattn.config import Config, override

# Of the paper's text, not of its table: outputs of attention and FFN clipped, the deep model at the high learning rate.
CLIPPED = {"baseline clipped at 300": 300.0, "baseline clipped at 100": 100.0}
PAPER_RATE = 0.004  # to which the rows' learning rates relate
PAPER_M_ACT = 1053  # of the paper's baseline (Table 4), to which the limits of A.6 relate
DEEP = "48L, 400B tokens, batch 1024"
FIRST = 100_000 * 1024 * 4096  # tokens of the presets' 100,000 steps; 400B would be 95,367
# Setting of the paper: how many times the first one's batch, and its tokens.
SETTINGS = {
    "28L, 400B tokens, batch 1024": (1, 1.0),
    "28L, 3.5T tokens, batch 2048": (2, 3.5e12 / FIRST),
    DEEP: (1, 1.0),
    "48L, 1T tokens, batch 4096": (4, 1e12 / FIRST),
}

RATE = Column("max LR", lambda r: r["config"]["optim"]["learning_rate"], ".2g", paper="max_lr", brief="LR")
EXTRA = tuple(
    Column(title, lambda r, key=key: r["benchmarks"][key], ".2f", paper=key)
    for key, title in (("humaneval", "HumanEval"), ("cmmlu", "CMMLU"))
)
COLUMNS = (
    RATE,
    DIVERGED,
    report.PERPLEXITY,
    report.BITS,
    report.LOSS,
    report.FALL,
    *report.ATTENTION_COLUMNS,
    *report.BENCHMARKS,
    *EXTRA,
)


@dataclass(frozen=True)
class Scale:
    """What a scale puts in the place of the paper's two models."""

    shallow: Config
    deep: Config
    tokens: dict[str, float]
    """By setting, how many times the tokens of the first one are trained on."""
    clip: float
    """What the limits of A.6 are multiplied by; 0 where M-Act is not known, which they relate to: no such rows."""


def scales() -> dict[str, Scale]:
    """The models of each scale. Small ones see equal tokens in every setting: a step of a larger batch costs more."""
    small_batch = {"data.batch_size": 4, "train.steps": 600, "optim.warmup_steps": 60}
    shallow = override(tiny(), small_batch)
    deep = override(shallow, {"model.num_layers": 7, "model.d_model": 96, "model.ffn_dim": 384})
    chip = override(small(), {"model.dtype": "bfloat16"})
    chip_deep = override(chip, {"model.num_layers": 14, "model.d_model": 384, "model.ffn_dim": 1152})
    equal = dict.fromkeys(SETTINGS, 1.0)
    own = {setting: times for setting, (_, times) in SETTINGS.items()}
    return {
        "cpu": Scale(shallow, deep, equal, 8.0 / PAPER_M_ACT),  # 8: M-Act of `tiny` without a gate
        "chip": Scale(chip, chip_deep, equal, 0.0),
        "pod": Scale(dense_1p7b_28l(), dense_1p7b_48l(), own, 1.0),
    }


def build(args: ScaledArgs) -> Study:
    """Fourteen rows in four settings, and two of A.6."""
    scale = scales()[args.scale]
    parts = []
    for setting in SETTINGS:
        lines = _lines(setting, scale)
        base = study.given(_base(scale, setting), args)
        parts.append(
            Part(
                name=f"dense {args.scale} {setting.partition(',')[0]} {setting.rpartition(' ')[2]}",
                heading=f"Paper: {setting}. Here: {_describe(base)}",
                note="Held equal in this section: model size (the FFN pays for a gate), tokens, batch, schedule.",
                base=base,
                lines=tuple(lines),
                seeds=args.seeds,
                columns=COLUMNS,
                findings=(report.loss_fall, *_findings(lines)),
            )
        )
    note = (
        "Rows of the paper's Table 2 (dense 1.7B). Its learning rates and batches are ours times a constant: "
        f"{scale.shallow.optim.learning_rate:g} stands for 0.004, a batch of {scale.shallow.data.batch_size} for 1024. "
    )
    note += "Its tokens are ours too. " if args.scale == "pod" else "Its tokens are not: all see equally many here. "
    if scale.clip:
        note += (
            "The last two rows of the third section are appendix A.6 (no numbers are published, only that they did not "
            "converge): outputs of attention and FFN clipped at 300 and 100"
        )
        note += "." if scale.clip == 1 else f", here times {scale.clip:.3g}, which is our M-Act over the paper's."
    return study.study("table2", args, "Gated attention, Table 2", note, parts)


def _base(scale: Scale, setting: str) -> Config:
    base = scale.deep if setting.startswith("48L") else scale.shallow
    batch, _ = SETTINGS[setting]
    steps = round(base.train.steps * scale.tokens[setting] / batch)
    warmup = round(base.optim.warmup_steps * steps / base.train.steps)
    changes = {"data.batch_size": base.data.batch_size * batch, "train.steps": steps, "optim.warmup_steps": warmup}
    return override(base, {**changes, "train.divergence_is_a_result": True})


def _lines(setting: str, scale: Scale) -> list[Line]:
    lines, ours = [], scale.shallow.optim.learning_rate / PAPER_RATE
    for row in report.paper_rows("table2"):
        if row["setting"] == setting:
            label = f"{row['method'].removesuffix(' (diverges)')}, LR {row['max_lr']:g}"
            label += " (paper: diverges)" if row["ppl"] is None else ""
            changes = {"optim.learning_rate": round(row["max_lr"] * ours, 10)}
            lines.append(Line(label, PAPER["table2"][row["row"]], ("table2", row["row"]), changes))
    if setting == DEEP and scale.clip:
        for label, limit in CLIPPED.items():
            changes = {"optim.learning_rate": round(0.008 * ours, 10), "model.clip_outputs": limit * scale.clip}
            lines.append(Line(f"{label}, LR 0.008", "baseline", None, changes))
    return lines


def _findings(lines: Sequence[Line]) -> list[Finding]:
    """Every row against the baseline at its learning rate, and the baseline's highest against its lowest."""
    rate = {line.label: line.changes["optim.learning_rate"] for line in lines}
    baseline = {rate[line.label]: line.label for line in lines if line.label.startswith("baseline, LR")}
    pairs = [(baseline[rate[label]], label) for label in rate if baseline[rate[label]] != label]
    if len(baseline) > 1:
        pairs.append((baseline[min(baseline)], baseline[max(baseline)]))
    return [change(report.PERPLEXITY, *pair) for pair in pairs]


def _describe(base: Config) -> str:
    tokens = base.train.steps * base.data.batch_size * base.data.seq_len
    layers = f"{base.model.num_layers} layers, D {base.model.d_model}"
    return (
        f"{layers}, {tokens:,} tokens, batch {base.data.batch_size} x {base.data.seq_len}, {base.train.steps:,} steps"
    )


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
