"""The paper's Table 4 on a CPU: gate, attention sink, activations, loss, with the published numbers beside ours.

`python -m experiments.table4 --scale demo` (what `make demo` calls) trains bench A in seven variants, head sharing on
bench B and a short pair of language models, in 15 to 20 minutes on 2 cores; `--scale cpu` adds the other variants of
bench B, the rivals and language models at equal parameters, about 50 minutes in all. They share runs, repeat none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import tyro
from rich.console import Console

from configs.models import tiny
from configs.variants import VARIANTS
from experiments import report
from experiments.launchers import Launcher, SlurmOptions, launch
from experiments.report import Row, Section, Table, bound, ordering, same_order_as_paper
from experiments.runner import Run, sweep
from experiments.sinkbench import sinkbench_config, sinkbench_heads_config
from gattn.config import Config, ConfigError, override

BASELINE, ELEMENTWISE, HEADWISE = "baseline", "SDPA elementwise", "SDPA headwise"
SHARED, HEADWISE_SHARED = "SDPA elementwise head-shared", "SDPA headwise head-shared"
VALUE, INDEPENDENT, NS = "value elementwise", "SDPA input-independent", "SDPA elementwise NS-sigmoid"
OFF_BY_ONE, SINK_LOGIT = "off-by-one softmax", "sink logit"

# Label -> variant, and the row of the paper's Table 4 (None: not in it).
VARIANT: dict[str, tuple[str, int | None]] = {
    BASELINE: ("baseline", 1),
    ELEMENTWISE: ("g1_elementwise", 2),
    HEADWISE: ("g1_headwise", 3),
    SHARED: ("g1_elementwise_shared", 4),
    HEADWISE_SHARED: ("g1_headwise_shared", None),
    VALUE: ("g2_elementwise", 5),
    INDEPENDENT: ("g1_input_independent", 6),
    NS: ("g1_elementwise_ns", 7),
    OFF_BY_ONE: ("softmax_off_by_one", None),
    SINK_LOGIT: ("sink_logit", None),
}
PAPER_ROWS = (BASELINE, ELEMENTWISE, HEADWISE, SHARED, VALUE, INDEPENDENT, NS)
SHARING_ROWS = (BASELINE, HEADWISE, HEADWISE_SHARED)
TEXT_ROWS = (BASELINE, ELEMENTWISE, HEADWISE)
RIVALS = (OFF_BY_ONE, SINK_LOGIT)
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
NOTE_TEXT = (
    "Decoders on the embedded corpus; the FFN of a gated model is narrowed so that all have the same number of "
    "parameters (what remains is listed below). Perplexity is per token of our tokenizer and no match for the "
    "paper's; bits/byte does not depend on the tokenizer. Others see sinks in text after 0.5-1 billion tokens: at "
    "this size F-Attn has to be read against its floor."
)
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
FINDINGS_TEXT = (
    report.loss_fall,
    report.change(report.PERPLEXITY, BASELINE, ELEMENTWISE),
    report.change(report.PERPLEXITY, BASELINE, HEADWISE),
    ordering(report.F_ATTN, HEADWISE, BASELINE),
)


@dataclass(frozen=True)
class Args:
    """Trains what is missing and prints Table 4."""

    scale: Literal["demo", "cpu"] = "demo"
    """demo: 15 to 20 minutes on 2 cores; cpu: everything, about 50."""
    seeds: int = 3
    """Seeds per variant (the language models of demo have one)."""
    workers: int | None = None
    """Runs at a time with the launcher local; sized to the machine by default."""
    launcher: Launcher = "local"
    """local: on this machine; slurm: a job per run; print: the commands that would train what is missing."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    steps: int | None = None
    """Cuts every run to this many steps, to try the machinery; the report goes to a folder of its own."""
    dry_run: bool = False
    """Lists the runs and their state, trains nothing."""
    report_only: bool = False
    """Writes the report from what is finished, trains nothing."""


@dataclass(frozen=True)
class Part:
    """One base config, the rows this scale needs, and those that are shown only if an earlier command trained them."""

    name: str
    heading: str
    note: str
    base: Config
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    seeds: int
    columns: tuple[report.Column, ...]
    findings: tuple[report.Finding, ...]

    def runs(self, labels: Sequence[str]) -> list[Run]:
        """The runs of these rows."""
        overlays = {
            f"{self.name}: {label}": {f"model.{key}": value for key, value in VARIANTS[VARIANT[label][0]].items()}
            for label in labels
        }
        return sweep(self.base, overlays, range(self.seeds))

    def section(self) -> Section | None:
        """The part in the report; None where this scale needs none of it and nothing of it is there."""
        rows = []
        for label, (_, number) in VARIANT.items():
            runs = tuple(self.runs([label]))
            if label in self.needed or (label in self.optional and any(report.load_results(runs))):
                rows.append(Row(label, runs, report.paper_row("table4", number) if number else None))
        slug = self.name.replace(" ", "-")
        return Section(slug, self.heading, self.note, self.columns, tuple(rows), self.findings) if rows else None


def parts(args: Args) -> list[Part]:
    """Everything Table 4 has on a CPU; the scale decides what of it is needed."""
    full = args.scale == "cpu"

    def rows(demo: tuple[str, ...], cpu: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        return {"needed": cpu, "optional": demo} if full else {"needed": demo, "optional": cpu}

    return [
        Part(
            name="A",
            heading="Bench A: which gates remove the sink",
            note=NOTE_A,
            base=_cut(sinkbench_config(), args.steps),
            **rows(PAPER_ROWS, (*PAPER_ROWS, *RIVALS)),
            seeds=args.seeds,
            columns=(*report.ATTENTION_COLUMNS, report.ABSORBED, report.EXCESS),
            findings=FINDINGS_A,
        ),
        Part(
            name="B",
            heading="Bench B: head-specific against head-shared",
            note=NOTE_B,
            base=_cut(sinkbench_heads_config(), args.steps),
            **rows(SHARING_ROWS, (*PAPER_ROWS, HEADWISE_SHARED, OFF_BY_ONE)),
            seeds=args.seeds,
            columns=(*report.ATTENTION_COLUMNS, report.ABSORBED, report.EXCESS),
            findings=FINDINGS_B if full else FINDINGS_B[:2],
        ),
        Part(
            name="text short",
            heading="Language models, short training",
            note=NOTE_TEXT,
            base=_cut(override(tiny(), SHORT), args.steps),
            **rows((BASELINE, HEADWISE), ()),
            seeds=1,
            columns=TEXT_COLUMNS,
            findings=(report.loss_fall, report.change(report.PERPLEXITY, BASELINE, HEADWISE)),
        ),
        Part(
            name="text",
            heading="Language models at equal parameters",
            note=NOTE_TEXT,
            base=_cut(tiny(), args.steps),
            **rows((), TEXT_ROWS),
            seeds=args.seeds,
            columns=TEXT_COLUMNS,
            findings=FINDINGS_TEXT,
        ),
    ]


def table(args: Args) -> Table:
    """The report from what is on disk."""
    every = parts(args)
    words = [f"--scale {args.scale}", f"--seeds {args.seeds}" if args.seeds != Args.seeds else ""]
    words += [f"--steps {args.steps}" if args.steps else ""]
    model = report.paper()["table4"]["model"]
    note = (
        f"Rows of the paper's Table 4 ({model}) at the scale of a CPU. The paper's numbers stand beside ours for the "
        "order of rows and the size of effects: models, data and training differ by orders of magnitude."
    )
    left_out = [
        f"{p.name}: {', '.join(extra)}" for p in every if (extra := [x for x in p.optional if x not in p.needed])
    ]
    if args.scale == "demo":
        note += f" Left out at this scale (--scale cpu trains it): {'; '.join(left_out)}."
    if args.steps:
        note += f" Every run was cut to {args.steps} steps: this tries the machinery, the numbers mean nothing."
    return Table(
        name=f"table4-cpu-{args.steps}-steps" if args.steps else "table4-cpu",
        title="Gated attention, Table 4 on a CPU",
        note=note,
        command=" ".join(["python -m experiments.table4", *filter(None, words)]),
        sections=tuple(section for part in every if (section := part.section())),
    )


def main(args: Args, console: Console) -> int:
    """Trains, reports; the exit code: 1 where a run failed."""
    for name in ("seeds", "workers", "steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            console.print(f"--{name} {value}: must be at least 1")
            return 2
    runs = [run for part in parts(args) for run in part.runs(part.needed)]
    if args.dry_run:
        for run in runs:
            state = "finished" if run.result() else "to do"
            console.print(f"{state:9} {run.name:45} {run.folder.name}", highlight=False, soft_wrap=True)
        return 0
    failed = []
    if not args.report_only:
        outcomes = launch(runs, args.launcher, workers=args.workers, slurm=args.slurm, console=console)
        if args.launcher == "print" or any(outcome.state == "waiting" for outcome in outcomes):
            return 0
        failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    report.write(table(args), console)
    for outcome in failed:
        console.print(f"failed: {outcome.run.name}: {outcome.run.folder}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _cut(base: Config, steps: int | None) -> Config:
    if steps is None:
        return base
    return override(base, {"train.steps": steps, "optim.warmup_steps": min(base.optim.warmup_steps, steps // 5)})


if __name__ == "__main__":
    screen = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width: leave the table whole
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__), screen))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
