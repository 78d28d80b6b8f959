"""The paper's Table 4: gate, attention sink, activations, loss, with the published numbers beside ours.

`python -m experiments.table4 --scale demo` (what `make demo` calls) trains bench A in seven variants, head sharing on
bench B and a short pair of language models, in 15 to 20 minutes on 2 cores; `--scale cpu` adds the other variants of
bench B, the rivals, the deep bench and language models at equal parameters and with experts, about two hours in all.
They share runs, repeat none. `--scale chip` and `pod` are the paper's seven rows of a language model with experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from configs.models import tiny
from configs.variants import PAPER
from experiments import perplexity, report, study
from experiments.report import Column, bound, ordering, same_order_as_paper
from experiments.sinkbench import sinkbench_config, sinkbench_deep_config, sinkbench_heads_config
from experiments.study import Line, Part, ScaledArgs, Study, given
from gattn.config import override

BASELINE, ELEMENTWISE, HEADWISE = "baseline", "SDPA elementwise", "SDPA headwise"
SHARED, HEADWISE_SHARED = "SDPA elementwise head-shared", "SDPA headwise head-shared"
VALUE, INDEPENDENT, NS = "value elementwise", "SDPA input-independent", "SDPA elementwise NS-sigmoid"
OFF_BY_ONE, SINK_LOGIT = "off-by-one softmax", "sink logit"
SANDWICH, UNSEEN = "sandwich norm", "baseline, no loss at BOS"

VARIANT = {
    BASELINE: "baseline",
    ELEMENTWISE: "g1_elementwise",
    HEADWISE: "g1_headwise",
    SHARED: "g1_elementwise_shared",
    HEADWISE_SHARED: "g1_headwise_shared",
    VALUE: "g2_elementwise",
    INDEPENDENT: "g1_input_independent",
    NS: "g1_elementwise_ns",
    OFF_BY_ONE: "softmax_off_by_one",
    SINK_LOGIT: "sink_logit",
    SANDWICH: "sandwich_norm",
    UNSEEN: "baseline",
}
CHANGES = {UNSEEN: {"data.source": "experiments.sinkbench:sinkbench_deep_unseen"}}
ROW = {variant: ("table4", row) for row, variant in PAPER["table4"].items()}
PAPER_ROWS = (BASELINE, ELEMENTWISE, HEADWISE, SHARED, VALUE, INDEPENDENT, NS)
SHARING_ROWS = (BASELINE, HEADWISE, HEADWISE_SHARED)
TEXT_ROWS = (BASELINE, ELEMENTWISE, HEADWISE)
RIVALS = (OFF_BY_ONE, SINK_LOGIT)
DEEP_ROWS = (*PAPER_ROWS, SINK_LOGIT, SANDWICH, UNSEEN)
SHORT = {"train.steps": 100, "optim.warmup_steps": 20}

NOTE_A = (
    "A synthetic language in which heads have work only after trigger tokens and must rest everywhere else (one "
    "block, 2 heads, RoPE). What this bench compares is F-Attn and the gate score: one layer forms no massive "
    "activations, and the loss hardly separates the variants. Rivals (below the paper's rows) change the softmax "
    "instead of adding a gate; absorbed is the share of attention that their extra unit takes."
)
NOTE_B = (
    "The same kind of language with four offsets and four heads, so that heads have work at different positions "
    "(learned positions, weight decay 1.0): a score that all heads share cannot let one rest while another works."
)
NOTE_DEEP = (
    "Six layers, copies under four permutations: here massive activations form, in the first token's channels, and the "
    "paper's dissociation can be seen: activations and sink are lowered by different gates. First token: its largest "
    "|h| over the median of the others', mean over all layers but the first and the last. Sandwich norm and a sink "
    "logit lower one or the other without a gate; the last row is not trained to predict what follows BOS."
)
NOTE_TEXT = (
    "Decoders on the embedded corpus; the FFN of a gated model is narrowed so that all have the same number of "
    "parameters (what remains is listed below). Perplexity is per token of our tokenizer and no match for the "
    "paper's; bits/byte does not depend on the tokenizer. Others see sinks in text after 0.5-1 billion tokens: at "
    "this size F-Attn has to be read against its floor."
)


def first_token_ratio(result: report.Result) -> float:
    """Largest |h| of the first token over the median of the others', mean over the layers between first and last."""
    inner = result["probes"]["first_token_ratio_by_layer"][1:-1]
    return sum(inner) / len(inner)


FIRST_TOKEN = Column("first token", first_token_ratio, ".2f", brief="first")
TEXT_COLUMNS = (report.PERPLEXITY, report.BITS, report.LOSS, report.FALL, *report.ATTENTION_COLUMNS)

FINDINGS_A = (
    bound(report.RATIO, [BASELINE], above=7),
    bound(report.F_ATTN, [ELEMENTWISE, HEADWISE], below=0.1),
    bound(report.F_ATTN, [VALUE, INDEPENDENT, NS], above=0.3),
    ordering(report.GATE, ELEMENTWISE, SHARED, INDEPENDENT, NS),
    same_order_as_paper(report.F_ATTN),
    same_order_as_paper(report.GATE),
)
FINDINGS_B = (
    ordering(report.F_ATTN, HEADWISE, HEADWISE_SHARED, BASELINE),
    ordering(report.GATE, HEADWISE, HEADWISE_SHARED),
    ordering(report.GATE, ELEMENTWISE, SHARED, INDEPENDENT, NS),
)
FINDINGS_DEEP = (
    ordering(report.M_ACT, VALUE, BASELINE),
    ordering(report.F_ATTN, BASELINE, VALUE),
    ordering(report.F_ATTN, ELEMENTWISE, BASELINE),
    ordering(report.F_ATTN, HEADWISE, BASELINE),
    ordering(report.M_ACT, SANDWICH, BASELINE),
    ordering(report.F_ATTN, SINK_LOGIT, BASELINE),
    report.goes_with(report.GATE, report.F_ATTN, ELEMENTWISE, HEADWISE, SHARED, INDEPENDENT, NS),
    report.goes_with(report.GATE, report.M_ACT, ELEMENTWISE, HEADWISE, SHARED, INDEPENDENT, NS),
    same_order_as_paper(report.F_ATTN),
    same_order_as_paper(report.M_ACT),
    same_order_as_paper(report.GATE),
)
FINDINGS_EXPERTS = tuple(map(same_order_as_paper, (report.F_ATTN, report.M_ACT, report.GATE)))
FINDINGS_TEXT = (
    report.loss_fall,
    report.change(report.PERPLEXITY, BASELINE, ELEMENTWISE),
    report.change(report.PERPLEXITY, BASELINE, HEADWISE),
    ordering(report.F_ATTN, HEADWISE, BASELINE),
)


@dataclass(frozen=True)
class Args(ScaledArgs):
    scale: Literal["demo", "cpu", "chip", "pod"] = "demo"  # type: ignore[assignment]
    """demo: 15 to 20 minutes on 2 cores, language models with one seed; cpu: everything, about two hours; chip, pod:
    the paper's rows with experts, as in Table 1."""


def build(args: Args) -> Study:
    """Everything Table 4 has at this scale."""
    if args.scale in ("demo", "cpu"):
        return on_cpu(args)
    return perplexity.build("table4", args, "Gate, sink and activations", FINDINGS_EXPERTS)


def on_cpu(args: Args) -> Study:
    """The benches and small language models; demo and cpu differ in what of them is trained."""
    full = args.scale == "cpu"
    every = [
        Part(
            name="A",
            heading="Bench A: which gates remove the sink",
            note=NOTE_A,
            base=given(sinkbench_config(), args),
            **_lines(full, demo=PAPER_ROWS, cpu=(*PAPER_ROWS, *RIVALS)),
            seeds=args.seeds,
            columns=(*report.ATTENTION_COLUMNS, report.ABSORBED, report.EXCESS),
            findings=FINDINGS_A,
        ),
        Part(
            name="B",
            heading="Bench B: head-specific against head-shared",
            note=NOTE_B,
            base=given(sinkbench_heads_config(), args),
            **_lines(full, demo=SHARING_ROWS, cpu=(*PAPER_ROWS, HEADWISE_SHARED, OFF_BY_ONE)),
            seeds=args.seeds,
            columns=(*report.ATTENTION_COLUMNS, report.ABSORBED, report.EXCESS),
            findings=FINDINGS_B if full else FINDINGS_B[:2],
        ),
        Part(
            name="deep",
            heading="Deep bench: sink and activations apart",
            note=NOTE_DEEP,
            base=given(sinkbench_deep_config(), args),
            **_lines(full, demo=(), cpu=DEEP_ROWS),
            seeds=args.seeds,
            columns=(*report.ATTENTION_COLUMNS, FIRST_TOKEN, report.EXCESS),
            findings=FINDINGS_DEEP,
        ),
        Part(
            name="text short",
            heading="Language models, short training",
            note=NOTE_TEXT,
            base=given(override(tiny(), SHORT), args),
            **_lines(full, demo=(BASELINE, HEADWISE), cpu=()),
            seeds=1,
            columns=TEXT_COLUMNS,
            findings=(report.loss_fall, report.change(report.PERPLEXITY, BASELINE, HEADWISE)),
        ),
        Part(
            name="text",
            heading="Language models at equal parameters",
            note=NOTE_TEXT,
            base=given(tiny(), args),
            **_lines(full, demo=(), cpu=TEXT_ROWS),
            seeds=args.seeds,
            columns=TEXT_COLUMNS,
            findings=FINDINGS_TEXT,
        ),
    ]
    experts = perplexity.rows("table4", args, "Language models with experts", FINDINGS_EXPERTS, "cpu")
    every.append(experts if full else dataclasses.replace(experts, optional=frozenset(experts.needed)))
    model = report.paper()["table4"]["model"]
    note = (
        f"Rows of the paper's Table 4 ({model}) at the scale of a CPU. The paper's numbers stand beside ours for the "
        "order of rows and the size of effects: models, data and training differ by orders of magnitude."
    )
    if not full:
        extra = [
            f"{part.name}: {', '.join(x.label for x in part.lines if x.label in part.optional)}"
            for part in every
            if part.optional
        ]
        note += f" Left out at this scale (--scale cpu trains it): {'; '.join(extra)}."
    return study.study("table4", args, "Gated attention, Table 4 on a CPU", note, every, family="cpu")


def _lines(full: bool, *, demo: tuple[str, ...], cpu: tuple[str, ...]) -> dict[str, Any]:
    """The lines of both scales, and which of them this one does not train."""
    needed = cpu if full else demo
    lines = tuple(
        Line(label, variant, None if label == UNSEEN else ROW.get(variant), CHANGES.get(label, {}))
        for label, variant in VARIANT.items()
        if label in (*demo, *cpu)
    )
    return {"lines": lines, "optional": frozenset(line.label for line in lines) - set(needed)}


if __name__ == "__main__":
    study.main(Args, build, __doc__)
