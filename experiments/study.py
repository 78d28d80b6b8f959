"""What every table has in common: which runs its rows need, one command that trains what is missing and reports.

A study is a list of parts; a part is a base config and lines, each a variant and the paper's row. An
experiment's file says which those are, and nothing else (`experiments/table1.py` is a short one).
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console

from configs.variants import PAPER, apply
from experiments import report
from experiments.launchers import Launcher, SlurmOptions, launch
from experiments.report import Column, Finding, Row, Section, Table
from experiments.runner import Outcome, Run, sweep
from gattn.config import Config, ConfigError, is_import_path, override

if TYPE_CHECKING:
    from gattn.evaluate import Evaluation

AFRESH = 1000  # added to the seed of a run that starts from another: its batches come in another order


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
class ScaledArgs(Args):
    """Of an experiment at three scales."""

    scale: Literal["cpu", "chip", "pod"] = "cpu"
    """cpu: minutes of one core a run; chip: one GPU or TPU, hours; pod: the paper's model, tokens and schedule."""
    source: str | None = None
    """Data as `--data.source` of training has it; by default those of cpu, which are too small for chip and pod."""


@dataclass(frozen=True)
class Line:
    """A row before it is trained."""

    label: str
    variant: str
    """A name of `configs.variants`, or several joined by +."""
    paper: tuple[str, int] | None = None
    """Table and row of the published numbers, e.g. ("table4", 2)."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted fields in which it differs from the base beside its variant."""
    start: Callable[[int], Run] | None = None
    """By seed, the run whose last weights it starts with; it is trained before, and the seed here is AFRESH higher."""


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
            config = apply(override(self.base, line.changes), line.variant)
            for seed in range(self.seeds):
                start = {"train.start_from": line.start(seed).folder.name} if line.start else {}
                runs += sweep(config, {f"{self.name}: {line.label}": start}, [seed + AFRESH if line.start else seed])
        return runs

    def starts(self) -> list[Run]:
        """The runs that those of `needed` start from."""
        lines = [line for line in self.lines if line.label in self.needed]
        runs = [line.start(seed) for line in lines if line.start for seed in range(self.seeds)]
        return list({run.name: run for run in runs}.values())

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
    questions: Mapping[Run, Sequence[Evaluation]] = field(default_factory=dict)
    """Of its runs, once they are trained."""

    def stages(self) -> list[list[Run]]:
        """All that the command trains, one stage after the other: first what others start from."""
        starts = [run for part in self.parts for run in part.starts()]
        return [stage for stage in (starts, [run for part in self.parts for run in part.runs(part.needed)]) if stage]

    def runs(self) -> list[Run]:
        """All that the command trains."""
        return list(itertools.chain.from_iterable(self.stages()))

    def table(self) -> Table:
        """The report from what is on disk."""
        sections = tuple(section for part in self.parts if (section := part.section()))
        return Table(self.name, self.title, self.note, self.command, sections)


Writer = Callable[[Study, Console], Path]


def study(module: str, args: Args, title: str, note: str, parts: Sequence[Part], *, family: str = "") -> Study:
    """A study whose runs are cut to `args.steps`, and which says so and what its command is.

    `family` names the report's folder in place of the scale, where scales share one.
    """
    words, name = ["python -m experiments." + module], module
    if isinstance(args, ScaledArgs):
        words += [f"--source {shlex.quote(args.source)}"] if args.source else []
        words += [f"--scale {args.scale}"]
        name += f"-{family or args.scale}"
    words += [f"--seeds {args.seeds}"] if args.seeds != Args.seeds else []
    words += [f"--steps {args.steps}"] if args.steps else []
    if args.steps:
        note += f" Every run was cut to {args.steps} steps: this tries the machinery, the numbers mean nothing."
        name += f"-{args.steps}-steps"
    return Study(name, title, note, " ".join(words), tuple(parts))


def given(base: Config, args: ScaledArgs) -> Config:
    """The base of a scale with the data of `--source` and at most `--steps` steps.

    Raises:
      ConfigError: without a source where the base has none that suffices, or with one where it has its own.
    """
    if args.source is not None and is_import_path(base.data.source):
        raise ConfigError("--source", args.source, f"the runs of --scale {args.scale} have their data: leave it out")
    if args.source is None and args.scale in ("chip", "pod") and not args.dry_run and base.data.source == "corpus":
        tokens = base.train.steps * base.data.batch_size * base.data.seq_len
        remedy = f"{tokens:,} tokens are not in the embedded corpus: `python -m gattn prepare` a text"
        raise ConfigError("--source", args.source, remedy)
    return cut(base if args.source is None else override(base, {"data.source": args.source}), args.steps)


def cut(base: Config, steps: int | None) -> Config:
    """The config with at most this many steps; as it is with None."""
    if steps is None or steps >= base.train.steps:
        return base
    return override(base, {"train.steps": steps, "optim.warmup_steps": min(base.optim.warmup_steps, steps // 5)})


def as_table(study: Study, console: Console) -> Path:
    """Writes the report of a table."""
    return report.write(study.table(), console)


def run(study: Study, args: Args, console: Console, write: Writer = as_table) -> int:
    """Trains, reports by `write`; the exit code: 1 where a run failed."""
    if args.dry_run and getattr(args, "scale", "") == "pod":
        from experiments import pod  # which takes JAX, seconds that no other command needs

        pod.show(study, console)
        return 0
    if args.dry_run:
        for one in study.runs():
            state = "finished" if one.result() else "to do"
            console.print(f"{state:9} {one.name:45} {one.folder.name}", highlight=False, soft_wrap=True)
        return 0
    failed: list[Outcome] = []
    for runs in study.stages() if not args.report_only else ():
        outcomes = launch(runs, args.launcher, workers=args.workers, slurm=args.slurm, console=console)
        if any(outcome.state == "waiting" for outcome in outcomes):
            return 0  # a later stage needs what this one makes: the same command goes on when it is there
        if failed := [outcome for outcome in outcomes if outcome.state == "failed"]:
            break
    unanswered: list[str] = []
    if study.questions and not args.report_only:
        from experiments.questions import ask, tell  # which takes JAX, too

        if args.launcher == "local":
            unanswered = ask(study.questions, args.workers, console)
        else:  # this is where jobs are started, not where a model of their size is read
            tell(study.questions, console)
    if args.launcher == "print":
        return 0
    write(study, console)
    for outcome in failed:
        console.print(f"failed: {outcome.run.name}: {outcome.run.folder}", highlight=False, soft_wrap=True)
    return 1 if failed or unanswered else 0


def main(kind: type[Args], build: Callable[[Any], Study], doc: str | None, write: Writer = as_table) -> None:
    """The command line of a study: parses `kind`, builds the study, runs it, reports by `write`, exits."""
    command(kind, lambda args, screen: run(build(args), args, screen, write), doc)


def command(kind: type[Any], act: Callable[[Any, Console], int], doc: str | None, width: int = 140) -> None:
    """The command line of an experiment: parses `kind`, does `act`, exits with its code, 2 for bad input, 130 for
    Ctrl-C. `width`: of a pipe, which has none: tables stay whole."""
    screen = Console() if sys.stdout.isatty() else Console(width=width)
    try:
        args = tyro.cli(kind, description=doc)
        for name in ("seeds", "workers", "steps"):
            if (value := getattr(args, name, None)) is not None and value < 1:
                raise ConfigError(f"--{name}", value, "must be at least 1")
        sys.exit(act(args, screen))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
