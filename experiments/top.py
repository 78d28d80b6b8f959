"""The top page: which variants lower perplexity, remove the sink, lower activations, bear larger learning rates.

`python -m experiments.top` trains nothing. It reads what the commands it names have trained at the scale of a CPU, and
writes one screen with the paper's answers beside ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console

from experiments import continued, report, stability, table1, table2, table3, table4, table6
from experiments.render import Block, Bullets, Grid, Heading, Link, Text, Words, plain, save, terminal
from experiments.report import Column, Measured, Stat
from experiments.study import Part, ScaledArgs, Study
from gattn.config import ConfigError
from gattn.files import home

ROWS = {
    "g1_elementwise": "SDPA elementwise",
    "g1_headwise": "SDPA headwise",
    "g1_elementwise_shared": "SDPA head-shared",
    "g2_elementwise": "value elementwise",
    "g1_input_independent": "SDPA input-independent",
    "g1_elementwise_ns": "SDPA NS-sigmoid",
    "sink_logit": "sink logit (no gate)",
    "sandwich_norm": "sandwich norm (no gate)",
}
PAPER_ROWS = {variant: row for row, variant in table4.PAPER["table4"].items()}
# Table 2 at the learning rate of 0.008, at which the baseline of 48 layers does not converge.
PAPER_STABLE = {"baseline": 6, "sandwich_norm": 7, "g1_elementwise": 10}


@dataclass(frozen=True)
class Args:
    """Writes the top page from what was trained."""

    seeds: int = 3
    """Seeds per variant that the tables were trained with."""


@dataclass(frozen=True)
class Question:
    """One column: a measure in which a variant is compared with the baseline of the same part."""

    title: str
    study: Study
    part: Part
    column: Column
    relative: bool
    """Whether the change is told in percent; else as a factor."""


@dataclass(frozen=True)
class Answer:
    """A variant against the baseline, of the seeds' means, lowest and highest."""

    verdict: str
    text: str


def questions(args: Args) -> list[Question]:
    """The measures of Table 4 that the page compares."""
    study = table4.build(table4.Args(scale="cpu", seeds=args.seeds))
    parts = {part.name: part for part in study.parts}
    return [
        Question("perplexity, text", study, parts["experts cpu"], report.PERPLEXITY, True),
        Question("sink: F-Attn, bench A", study, parts["A"], report.F_ATTN, False),
        Question("sink: F-Attn, deep bench", study, parts["deep"], report.F_ATTN, False),
        Question("M-Act, deep bench", study, parts["deep"], report.M_ACT, False),
    ]


def compare(ours: Stat, base: Stat, relative: bool) -> Answer:
    """Lower: every seed lies below every seed of the baseline. The text is the change of the mean, and of the seeds."""
    if not ours.values or not base.values:
        return Answer("", "not trained")
    changes = [value / base.mean for value in (ours.mean, min(ours.values), max(ours.values))]
    mean, low, high = [f"{change - 1:+.1%}" if relative else f"{change:.2f}x" for change in changes]
    text = mean if low == high else f"{mean} ({low} to {high})"
    if len(ours.values) == 1 or len(base.values) == 1:
        return Answer("one seed", text)
    if max(ours.values) < min(base.values):
        return Answer("lower", text)
    return Answer("higher" if min(ours.values) > max(base.values) else "overlaps", text)


def published(variant: str, question: Question) -> str:
    """The paper's number against its baseline's, in the same way."""
    row, base = PAPER_ROWS.get(variant), report.paper_row("table4", 1)
    key = question.column.paper
    if row is None or key is None:
        return report.NOT_APPLICABLE
    ratio = report.paper_row("table4", row)[key] / base[key]
    return f"{ratio - 1:+.1%}" if question.relative else f"{ratio:.2f}x"


def stable(part: Part) -> dict[str, str]:
    """Variant -> its largest stable learning rate over the seeds."""
    section = part.section()
    rates = stability.scales()["cpu"].rates
    found = stability.limits(Measured(section), rates) if section else {}
    texts = {}
    for name, values in found.items():
        spread = sorted({f"{value:g}" if value else f"below {rates[0]:g}" for value in values})
        texts[stability.VARIANTS[name]] = " to ".join(spread) or "not trained"
    return texts


def blocks(args: Args) -> list[Block]:
    """The page."""
    asked, study = questions(args), stability.build(ScaledArgs(seeds=args.seeds))
    measured = {one.title: Measured(section) if (section := one.part.section()) else None for one in asked}
    limits = stable(study.parts[0])
    header = ["variant"]
    for one in asked:
        header += [one.title, "paper"]
    header += ["largest stable LR, deep bench", "paper: perplexity at LR 0.008"]
    rows: list[tuple[Words, ...]] = []
    lower: dict[str, list[str]] = {one.title: [] for one in asked}
    for variant, name in ROWS.items():
        cells: list[Words] = [name]
        for one in asked:
            answer = _answer(one, variant, measured[one.title])
            if answer.verdict == "lower":
                lower[one.title].append(name)
            target = f"../{one.study.name}/report.html"
            cells.append((Link(answer.text, target), f" {answer.verdict}") if answer.verdict else answer.text)
            cells.append(published(variant, one))
        limit = Link(limits[variant], f"../{study.name}/report.html") if variant in limits else report.NOT_APPLICABLE
        cells += [limit, _paper_stable(variant)]
        rows.append(tuple(cells))
    claims = [f"Lower {title}: {', '.join(names) or 'none'}." for title, names in lower.items()]
    base = limits.get("baseline", "not trained")
    claims.append(f"Largest stable learning rate: baseline {base}; {_listed(limits)}.")
    return [
        Heading(1, "Gated attention: what a gate does, at the scale of a CPU"),
        Text(
            "Every variant against the ungated baseline: mean over seeds (lowest to highest), the paper's ratio beside "
            "it. `lower` and `higher`: no seed overlaps the baseline's range. The paper's models are thousands of "
            "times larger; what can be compared is the direction."
        ),
        Grid(tuple(header), tuple(rows), _short(header, rows), caption="Ours and the paper's, against the baseline"),
        Bullets(tuple(claims)),
        Heading(2, "Tables"),
        Bullets(tuple(_reports(args))),
        Heading(2, "How to get this"),
        Text("Command: python -m experiments.top", terminal=True),
        Text(f"Published: {report.paper()['source']}"),
    ]


def _answer(question: Question, variant: str, measured: Measured | None) -> Answer:
    labels = {line.variant: line.label for line in reversed(question.part.lines) if not line.changes}
    if measured is None or variant not in labels:
        return Answer("", "–")
    stats = [measured.stat(labels[name], question.column) for name in (variant, "baseline")]
    return compare(stats[0], stats[1], question.relative)


def _paper_stable(variant: str) -> str:
    if variant not in PAPER_STABLE:
        return report.NOT_APPLICABLE
    base = report.paper_row("table2", PAPER_STABLE["baseline"])["ppl"]
    return f"{report.paper_row('table2', PAPER_STABLE[variant])['ppl']:g} (baseline {base:g})"


def _listed(limits: dict[str, str]) -> str:
    return ", ".join(f"{ROWS[variant]} {text}" for variant, text in limits.items() if variant in ROWS) or "no other"


def _reports(args: Args) -> list[Words]:
    """Every report of this scale, with its command; a link where it is there."""
    scaled = ScaledArgs(seeds=args.seeds)
    studies = [module.build(scaled) for module in (table1, table2, table3, table6, stability, continued)]
    studies.insert(3, table4.build(table4.Args(scale="cpu", seeds=args.seeds)))
    found = [(study.name, study.title, study.command) for study in studies]
    found.append(("interventions", "Interventions on trained gates", "python -m experiments.interventions"))
    found.append(("figures-cpu", "The paper's figures", "python -m experiments.figures"))
    out: list[Words] = []
    for name, title, command in found:
        there = (home() / "runs" / name / "report.html").exists()
        out.append((Link(title, f"../{name}/report.html") if there else f"{title}, not written yet", f" (`{command}`)"))
    return out


def _short(header: Sequence[str], rows: Sequence[tuple[Words, ...]]) -> tuple[tuple[str, ...], ...]:
    return (tuple(header), *(tuple(plain(cell) for cell in row) for row in rows))


def main(args: Args, console: Console) -> int:
    """Writes the page."""
    if args.seeds < 1:
        raise ConfigError("--seeds", args.seeds, "must be at least 1")
    folder = home() / "runs" / "top"
    page = blocks(args)
    save(folder, "report", "gattn", page)
    terminal(page, console)
    console.print(f"\nReport: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__), Console() if sys.stdout.isatty() else Console(width=200)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
