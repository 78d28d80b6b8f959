"""What every table has in common: which runs its rows need, one command that trains what is missing and reports.

A study is a list of parts; a part is a base config and lines, each a variant and the paper's row. An
experiment's file says which those are, and nothing else (`experiments/table1.py` is a short one).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tyro
from rich.console import Console

from configs.variants import PAPER, apply
from experiments import report
from experiments.launchers import Launcher, SlurmOptions, launch
from experiments.report import Column, Finding, Row, Section, Table
from experiments.runner import Run, sweep
from gattn.config import Config, ConfigError, override


@dataclass(frozen=True)
class Args:
    """Trains what is missing and writes the report."""

    seeds: int = 3
    """Seeds per variant."""
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
class Line:
    """A row before it is trained."""

    label: str
    variant: str
    """A name of `configs.variants`, or several joined by +."""
    paper: tuple[str, int] | None = None
    """Table and row of the published numbers, e.g. ("table4", 2)."""


def paper_lines(table: str) -> tuple[Line, ...]:
    """The rows of a published table by the paper's names, with the activation where two have the same."""
    rows = report.paper_rows(table)
    names = [row["method"] for row in rows]
    labels = [
        f"{name}, {row['activation']}" if names.count(name) > 1 else name for name, row in zip(names, rows, strict=True)
    ]
    return tuple(
        Line(label, PAPER[table][row["row"]], (table, row["row"])) for label, row in zip(labels, rows, strict=True)
    )


@dataclass(frozen=True)
class Part:
    """Lines that may be compared with each other, and their base."""

    name: str
    heading: str
    note: str
    base: Config
    lines: tuple[Line, ...]
    seeds: int
    columns: tuple[Column, ...]
    findings: tuple[Finding, ...] = ()
    optional: frozenset[str] = frozenset()
    """Labels that this command does not train, and shows only where another has."""

    @property
    def needed(self) -> list[str]:
        """Labels that this command trains."""
        return [line.label for line in self.lines if line.label not in self.optional]

    def runs(self, labels: Sequence[str]) -> list[Run]:
        """The runs of these lines."""
        lines = {line.label: line for line in self.lines}
        runs = []
        for line in map(lines.__getitem__, labels):
            runs += sweep(apply(self.base, line.variant), {f"{self.name}: {line.label}": {}}, range(self.seeds))
        return runs

    def section(self) -> Section | None:
        """The part in the report; None where none of it is needed and nothing of it is there."""
        rows = []
        for line in self.lines:
            runs = tuple(self.runs([line.label]))
            if line.label not in self.optional or any(report.load_results(runs)):
                rows.append(Row(line.label, runs, report.paper_row(*line.paper) if line.paper else None))
        slug = self.name.replace(" ", "-")
        return Section(slug, self.heading, self.note, self.columns, tuple(rows), self.findings) if rows else None


@dataclass(frozen=True)
class Study:
    """A table of the paper, as one command trains it."""

    name: str
    """Of the report's folder."""
    title: str
    note: str
    command: str
    parts: tuple[Part, ...]

    def runs(self) -> list[Run]:
        """All that the command trains."""
        return [run for part in self.parts for run in part.runs(part.needed)]

    def table(self) -> Table:
        """The report from what is on disk."""
        sections = tuple(section for part in self.parts if (section := part.section()))
        return Table(self.name, self.title, self.note, self.command, sections)


def study(
    module: str,
    args: Args,
    scale: str,
    title: str,
    note: str,
    parts: Sequence[Part],
    *,
    family: str = "",
    options: Sequence[str] = (),
) -> Study:
    """A study whose runs are cut to `args.steps`, and which says so and what its command is, `options` included.

    `family` names the report's folder in place of the scale, where scales share one.
    """
    words = [*options, f"--scale {scale}", f"--seeds {args.seeds}" if args.seeds != Args.seeds else ""]
    words += [f"--steps {args.steps}" if args.steps else ""]
    name = f"{module}-{family or scale}"
    if args.steps:
        note += f" Every run was cut to {args.steps} steps: this tries the machinery, the numbers mean nothing."
        name += f"-{args.steps}-steps"
    return Study(name, title, note, " ".join([f"python -m experiments.{module}", *filter(None, words)]), tuple(parts))


def cut(base: Config, steps: int | None) -> Config:
    """The config with at most this many steps; as it is with None."""
    if steps is None:
        return base
    return override(base, {"train.steps": steps, "optim.warmup_steps": min(base.optim.warmup_steps, steps // 5)})


def run(study: Study, args: Args, console: Console) -> int:
    """Trains, reports; the exit code: 1 where a run failed."""
    runs = study.runs()
    if args.dry_run:
        for one in runs:
            state = "finished" if one.result() else "to do"
            console.print(f"{state:9} {one.name:45} {one.folder.name}", highlight=False, soft_wrap=True)
        return 0
    failed = []
    if not args.report_only:
        outcomes = launch(runs, args.launcher, workers=args.workers, slurm=args.slurm, console=console)
        if args.launcher == "print" or any(outcome.state == "waiting" for outcome in outcomes):
            return 0
        failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    report.write(study.table(), console)
    for outcome in failed:
        console.print(f"failed: {outcome.run.name}: {outcome.run.folder}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def main(kind: type[Args], build: Callable[[Any], Study], doc: str | None) -> None:
    """The command line of an experiment: parses `kind`, builds the study, runs it, exits."""
    screen = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width: leave the table whole
    try:
        args = tyro.cli(kind, description=doc)
        for name in ("seeds", "workers", "steps"):
            if (value := getattr(args, name)) is not None and value < 1:
                raise ConfigError(f"--{name}", value, "must be at least 1")
        sys.exit(run(build(args), args, screen))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
