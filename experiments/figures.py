"""The paper's figures, as PNGs in a report and as a page on which series can be hidden and marks tell their values.

`python -m experiments.figures` trains what is missing of the runs it draws: seven rows of Table 4's deep bench and two
of its language models at equal parameters, or with `--scale chip` and `pod` the seven rows with experts. These are
Table 4's runs, so nothing is trained twice. It writes report.md, report.html, figures.html and a PNG per figure; what
was not measured is named and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments import interactive, plots, provenance, report, study, table4
from experiments.drawings import FIGURES, VARIANTS, Wanted
from experiments.interactive import Drawing
from experiments.provenance import at
from experiments.render import Block, Heading, Link, Text, save, terminal
from experiments.report import Result
from experiments.study import Part, ScaledArgs, Study
from gattn.files import home, write_atomically

NOTE = (
    "Numbered after the paper's figures; the numbers 4 and 7 could not be checked, so captions say what is shown. "
    "Lines and bars: mean over seeds; bands and brackets: lowest to highest seed. Layers count from 1."
)
BENCH = (
    " Figure 1 is of language models at equal parameters, the others are of the deep bench, a synthetic language in "
    "which six layers form sinks and massive activations."
)
HOW_TO_SEE = "With series that can be hidden and marks that tell their values: "
HOW_TO_USE = (
    "Unchecking a series hides it; pointing at a marker, a bar or a row of a map tells its values, which also stand in "
    "words and numbers below each figure. To print or read in one piece: "
)

TEXT_VARIANTS = ("baseline", "g1_elementwise")


def build(args: ScaledArgs) -> Study:
    """The rows of Table 4 that are drawn; with one part all figures are of it, else Figure 1 is of the second."""
    tables = {part.name: part for part in table4.build(table4.Args(**vars(args))).parts}
    if args.scale == "cpu":
        parts = [_rows(tables["deep"], VARIANTS), _rows(tables["text"], TEXT_VARIANTS)]
    else:
        parts = [_rows(tables[f"experts {args.scale}"], VARIANTS)]
    return study.study("figures", args, "Figures", NOTE + BENCH * (len(parts) > 1), parts)


def _rows(part: Part, variants: Sequence[str]) -> Part:
    lines = tuple(line for line in part.lines if line.variant in variants and not line.changes)
    return dataclasses.replace(part, lines=lines, optional=frozenset(), findings=())


# ---- what is there ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A figure as far as it was measured."""

    wanted: Wanted
    drawing: Drawing | None
    missing: tuple[str, ...]


def find(parts: Sequence[Part]) -> list[Found]:
    """Every figure, from the results on disk."""
    results = [{line.variant: report.load_results(part.runs([line.label])) for line in part.lines} for part in parts]
    labels = [{line.variant: line.label for line in part.lines} for part in parts]
    out = []
    for wanted in FIGURES:
        which = -1 if wanted.text else 0
        measured, missing = {}, []
        for variant in wanted.variants:
            label = labels[which][variant]
            complete, absent = _complete(results[which][variant], wanted.paths(variant))
            if complete:
                measured[label] = complete
            missing += [f"{label} ({', '.join(absent)})"] if absent else []
        drawing = wanted.draw(wanted, measured, plots.styles(labels[which].values())) if measured else None
        out.append(Found(wanted, drawing, tuple(missing)))
    return out


def _complete(results: Sequence[Result | None], paths: Sequence[str]) -> tuple[list[Result], list[str]]:
    """The results that have all of these fields, and what the others lack."""
    complete, absent = [], []
    for seed, result in enumerate(results):
        lacks = [path for path in paths if at(result, path) is None] if result else []
        if result and not lacks:
            complete.append(result)
        else:
            absent.append(f"no {lacks[0]} in seed {seed}" if lacks else f"seed {seed} not trained")
    return complete, absent


# ---- the report -------------------------------------------------------------------------------------------------


def write(one: Study, console: Console) -> Path:
    """Writes report and page, shows what is missing; returns the folder."""
    folder, found = home() / "runs" / one.name, find(one.parts)
    trained = _trained(one)
    note = Text(one.note, terminal=True)
    blocks: list[Block] = [Heading(1, one.title), note, Text((HOW_TO_SEE, Link("figures.html", "figures.html"), "."))]
    page: list[Block | Drawing] = [Heading(1, one.title), note]
    page.append(Text((HOW_TO_USE, Link("report.html", "report.html"), ".")))
    for figure in found:
        heading = Heading(2, figure.wanted.heading)
        words = [Text(f"missing: {'; '.join(figure.missing)}", terminal=True)] if figure.missing else []
        blocks += [heading, *([interactive.image(figure.drawing)] if figure.drawing else []), *words]
        page += [figure.drawing or heading, *words]
    names = [*save(folder, "report", one.title, [*blocks, *trained]), "figures.html"]
    write_atomically(folder / "figures.html", interactive.page(one.title, [*page, *trained]).encode())
    for stale in set(folder.glob("*.png")) - {folder / name for name in names}:
        stale.unlink()
    terminal([*blocks, *trained], console)
    for name in ("report.html", "figures.html"):
        console.print(f"{name}: {folder / name}", highlight=False, soft_wrap=True)
    return folder


def _trained(one: Study) -> list[Block]:
    """The command, and of each part its rows, settings, machine, time, runs and configs."""
    blocks: list[Block] = [Heading(2, "How to get this"), Text(f"Command: {one.command}", terminal=True)]
    sources = []
    for part in one.parts:
        measured = report.Measured(part.section())
        if found := measured.sources():
            sources.append((part.heading, found))
            blocks += [Heading(2, part.heading), provenance.models(found), provenance.setting(found)]
            blocks += provenance.runs([column.title for column in measured.columns], found)
    return [*blocks, *provenance.configs(sources)]


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__, write)
