"""The top page: which variants lower perplexity, remove the sink, lower activations, bear larger learning rates.

`python -m experiments.top` trains nothing. It reads what the commands it names have trained at the scale of a CPU, and
writes one screen with the paper's answers beside ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from experiments import continued, report, stability, table1, table2, table3, table4, table6
from experiments.render import Block, Bullets, Grid, Heading, Link, Text, Words, plain, save, terminal
from experiments.report import Column, Measured, Section, Stat
from experiments.study import Line, Part, ScaledArgs, Study, command
from gattn.files import home

ROWS = {
    "g1_elementwise": "SDPA elementwise",
    "g1_headwise": "SDPA headwise",
    "g1_elementwise_shared": "SDPA head-shared",
    "g1_additive_silu": "SDPA additive",
    "g1_elementwise_silu": "SDPA elementwise SiLU",
    "g1_input_independent": "SDPA input-independent",
    "g1_elementwise_ns": "SDPA NS-sigmoid",
    "g2_elementwise": "value elementwise",
    "g2_headwise": "value headwise",
    "g3_elementwise": "key elementwise",
    "g4_elementwise": "query elementwise",
    "g5_elementwise": "dense output",
    "sink_logit": "sink logit (no gate)",
    "sandwich_norm": "sandwich norm (no gate)",
}
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
    parts: tuple[tuple[Study, Part], ...]
    """Where a variant is looked for; the first that has it answers."""
    column: Column
    relative: bool
    """Whether the change is told in percent; else as a factor."""
    brief: str
    """Title on the terminal."""


@dataclass(frozen=True)
class Answer:
    """A variant against the baseline, of the seeds' means, lowest and highest; no verdict where it was not trained."""

    verdict: str
    text: str


def questions(args: Args) -> list[Question]:
    """The measures of Tables 1 and 4 that the page compares."""
    first = table1.build(ScaledArgs(seeds=args.seeds))
    fourth = table4.build(table4.Args(scale="cpu", seeds=args.seeds))
    parts = {part.name: (fourth, part) for part in fourth.parts}
    return [
        Question("perplexity", ((first, first.parts[0]), parts["experts cpu"]), report.PERPLEXITY, True, "ppl"),
        Question("sink (F-Attn), bench A", (parts["A"],), report.F_ATTN, False, "sink, A"),
        Question("sink (F-Attn), deep bench", (parts["deep"],), report.F_ATTN, False, "sink, deep"),
        Question("M-Act, deep bench", (parts["deep"],), report.M_ACT, False, "M-Act, deep"),
    ]


def compare(ours: Stat, base: Stat, relative: bool) -> Answer:
    """The verdict of `report.against`; the text is the change of the mean, and of the seeds."""
    verdict = report.against(ours, base)
    if not verdict:
        return Answer("", f"{ours.diverged} not finite" if ours.diverged else "not trained")
    changes = [value / base.mean for value in (ours.mean, min(ours.values), max(ours.values))]
    mean, low, high = [f"{change - 1:+.1%}" if relative else f"{change:.2f}x" for change in changes]
    return Answer(verdict, mean if low == high else f"{mean} ({low} to {high})")


def cells(question: Question, variant: str) -> tuple[Answer, Words, str]:
    """Our answer, as it stands in the table, and the paper's."""
    for study, part in question.parts:
        lines = {line.variant: line for line in reversed(part.lines) if not line.changes}
        if variant in lines:
            measured = Measured(part.section() or Section("", "", "", (), ()))
            ours, base = (measured.stat(lines[name].label, question.column) for name in (variant, "baseline"))
            found = compare(ours, base, question.relative)
            words = (_link(found.text, study.name), f" {found.verdict}") if found.verdict else found.text
            return found, words, published(lines[variant], question)
    return Answer("", ""), report.NOT_APPLICABLE, report.NOT_APPLICABLE


def published(line: Line, question: Question) -> str:
    """The paper's number against its baseline's, in the same way."""
    if line.paper is None or question.column.paper is None:
        return report.NOT_APPLICABLE
    table, row = line.paper
    ours, base = (report.paper_row(table, number)[question.column.paper] for number in (row, 1))
    return f"{ours / base - 1:+.1%}" if question.relative else f"{ours / base:.2f}x"


def stable(part: Part) -> dict[str, str]:
    """Variant -> its largest stable learning rates over the seeds, and how they compare with the baseline's."""
    section, rates = part.section(), stability.scales()["cpu"].rates
    found = stability.limits(Measured(section), rates) if section else {}
    base, texts = found.get("baseline", []), {}
    for name, values in found.items():
        text = "not trained"
        if values:
            low, high = (stability.spell(rate, rates) for rate in (min(values), max(values)))
            text = low if low == high else f"{low} to {high}"
        if values and base and name != "baseline":
            wider, narrower = min(values) > max(base), max(values) < min(base)
            text += ", wider" if wider else ", narrower" if narrower else ", overlaps"
        texts[stability.VARIANTS[name]] = text
    return texts


def blocks(args: Args) -> list[Block]:
    """The page."""
    asked, study = questions(args), stability.build(ScaledArgs(seeds=args.seeds))
    limits = stable(study.parts[0])
    header, brief = ["variant"], ["variant"]
    for one in asked:
        header += [one.title, "paper"]
        brief += [one.brief, "paper"]
    header += ["largest stable LR, deep bench", "paper: perplexity at LR 0.008"]
    brief += ["stable LR, deep", "paper: ppl at 0.008"]
    rows: list[tuple[Words, ...]] = []
    verdicts: dict[str, dict[str, list[str]]] = {one.title: {} for one in asked}
    for variant, name in ROWS.items():
        row: list[Words] = [name]
        for one in asked:
            found, ours, theirs = cells(one, variant)
            verdicts[one.title].setdefault(found.verdict, []).append(name)
            row += [ours, theirs]
        limit = _link(limits[variant], study.name) if variant in limits else report.NOT_APPLICABLE
        rows.append((*row, limit, _paper_stable(variant)))
    claims = [report.claim(title, found) for title, found in verdicts.items()]
    listed = [f"{ROWS.get(variant, variant)} {text}" for variant, text in limits.items()]
    claims.append(f"Largest stable learning rate: {'; '.join(listed) or 'not trained'}.")
    return [
        Heading(1, "Gated attention: what a gate does, at the scale of a CPU"),
        Text(
            "Every variant against the ungated baseline: mean over seeds (lowest to highest), the paper's ratio beside "
            "it. `lower` and `higher`: no seed overlaps the baseline's range. The paper's models are thousands of "
            "times larger; what can be compared is the direction. –: not part of that comparison."
        ),
        Grid(tuple(header), tuple(rows), _short(brief, rows), caption="Ours and the paper's, against the baseline"),
        Bullets(tuple(claims)),
        Heading(2, "Tables"),
        Bullets(tuple(_reports(args))),
        Heading(2, "How to get this"),
        Text("Command: python -m experiments.top", terminal=True),
        Text(f"Published: {report.paper()['source']}"),
    ]


def _link(text: str, name: str) -> str | Link:
    """To a study's report where it is there."""
    return Link(text, f"../{name}/report.html") if (home() / "runs" / name / "report.html").exists() else text


def _paper_stable(variant: str) -> str:
    if variant not in PAPER_STABLE:
        return report.NOT_APPLICABLE
    base = report.paper_row("table2", PAPER_STABLE["baseline"])["ppl"]
    return f"{report.paper_row('table2', PAPER_STABLE[variant])['ppl']:g} (baseline {base:g})"


def _reports(args: Args) -> list[Words]:
    """Every report of this scale, with its command; a link where it is there."""
    scaled = ScaledArgs(seeds=args.seeds)
    studies = [module.build(scaled) for module in (table1, table2, table3, table6, stability, continued)]
    studies.insert(3, table4.build(table4.Args(scale="cpu", seeds=args.seeds)))
    found = [(study.name, study.title, study.command) for study in studies]
    found.append(("interventions", "Interventions on trained gates", "python -m experiments.interventions"))
    found.append(("figures-cpu", "The paper's figures", "python -m experiments.figures"))
    return [(_link(title, name), f" (`{command}`)") for name, title, command in found]


def _short(header: Sequence[str], rows: Sequence[tuple[Words, ...]]) -> tuple[tuple[str, ...], ...]:
    """Means and verdicts without what stands in brackets, for a terminal."""
    return (tuple(header), *(tuple(re.sub(r" \([^)]*\)", "", plain(cell)) for cell in row) for row in rows))


def main(args: Args, console: Console) -> int:
    """Writes the page."""
    folder = home() / "runs" / "top"
    page = blocks(args)
    save(folder, "report", "gattn", page)
    terminal(page, console)
    console.print(f"\nReport: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    command(Args, main, __doc__, width=200)
