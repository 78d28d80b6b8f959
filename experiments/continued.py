"""The paper's appendix A.7: a gate added to a model that has been trained without one.

`python -m experiments.continued` trains the deep bench's baseline, then half as many steps more with a gate or without.
A gate is drawn at random (scores near 0, so that it halves what it gates), or is twice a sigmoid with zero weights (the
identity at first). Both at the learning rate with which training had ended, and warmed up to its peak again.
"""

from __future__ import annotations

from configs.models import dense_1p7b_28l, small
from experiments import report, study
from experiments.report import bound, change
from experiments.runner import Run
from experiments.sinkbench import sinkbench_deep_config
from experiments.study import Line, Part, ScaledArgs, Study
from experiments.table4 import FIRST_TOKEN
from gattn.config import Config, override

BASES = {"cpu": sinkbench_deep_config, "chip": small, "pod": dense_1p7b_28l}
BASELINE, SCRATCH = "baseline", "SDPA elementwise from the start"
KINDS = {
    "no gate": "baseline",
    "SDPA elementwise": "g1_elementwise",
    "SDPA elementwise, 2 sigmoid, zero init": "g1_elementwise_identity",
    "SDPA headwise": "g1_headwise",
}
NOTE = (
    "Held equal: tokens, model but for the gate (which adds its parameters), training. The first two rows are trained "
    "once; the others start with the first row's weights, an optimiser that has seen nothing and batches of another "
    "seed, and are trained half as long again. No numbers are published: the paper says that neither sinks nor massive "
    "activations go away."
)


def build(args: ScaledArgs) -> Study:
    """Two models from scratch, and what becomes of the first one."""
    base = study.given(override(BASES[args.scale](), {"model.match_params": False}), args)

    def start(seed: int) -> Run:
        return Run(f"to start from: {BASELINE}", seed, override(base, {"train.seed": seed}))

    lines = [Line(BASELINE, "baseline"), Line(SCRATCH, "g1_elementwise")]
    for when, peak in (("final LR", base.optim.final_learning_rate), ("peak LR", base.optim.learning_rate)):
        for kind, variant in KINDS.items():
            lines.append(Line(_label(kind, when), variant, None, _longer(base, peak), start))
    final, peak = ([_label(kind, when) for kind in KINDS] for when in ("final LR", "peak LR"))
    part = Part(
        name=f"continued {args.scale}",
        heading=f"A gate added after {base.train.steps:,} steps, for {_longer(base, 1.0)['train.steps']:,} more",
        note=NOTE,
        base=base,
        lines=tuple(lines),
        seeds=args.seeds,
        columns=(
            *report.ATTENTION_COLUMNS,
            FIRST_TOKEN,
            report.INITIAL_LOSS,
            report.LOSS,
            report.EXCESS,
        ),
        findings=(
            change(report.F_ATTN, BASELINE, SCRATCH),
            *(change(report.F_ATTN, labels[0], label) for labels in (final, peak) for label in labels[1:]),
            *(change(report.M_ACT, labels[0], label) for labels in (final, peak) for label in labels[1:]),
            bound(report.RATIO, [*final[1:], *peak[1:]], above=2),
        ),
    )
    note = "Appendix A.7 of the paper: does a gate remove what training without it has made?"
    return study.study("continued", args, "A gate added later", note, [part])


def _label(kind: str, when: str) -> str:
    return f"continued at {when}: {kind}"


def _longer(base: Config, peak: float) -> dict[str, float]:
    steps = max(base.train.steps // 2, 2)
    return {
        "train.steps": steps,
        "optim.warmup_steps": min(base.optim.warmup_steps, steps // 5),
        "optim.learning_rate": peak,
    }


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
