"""`python -m experiments.status`: every run under GATTN_HOME, its progress, time left, and how stopped ones ended.

It reads configs, logs and locks, and changes nothing; sweeps and single trainings alike, whoever started them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.runner import Job, Run, cells, indent, last_lines
from gattn.config import Config, ConfigError, from_dict
from gattn.files import home, is_local

TAIL = 5  # lines of the log of a run that stopped
ORDER = ("running", "stopped", "unreadable", "finished")


@dataclass(frozen=True)
class Args:
    """Shows all runs."""

    failures: bool = True
    """Whether to print the last lines of runs that stopped without a result."""
    finished: bool = False
    """Whether to list finished runs too, instead of counting them."""


@dataclass(frozen=True)
class Seen:
    """One run's folder."""

    folder: Path
    state: Literal["running", "stopped", "unreadable", "finished"]
    job: Job | None = None
    problem: str = ""


def look(folder: Path) -> Seen:
    """What is known of the run in a folder: stopped is what neither has a result nor is held by a trainer."""
    try:
        config = from_dict(Config, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        job = Job(Run(folder.name, config.train.seed, config))
        if job.run.folder != folder:
            return Seen(folder, "unreadable", None, f"its config belongs to {job.run.folder.name}")
        if job.run.result() is not None:
            return Seen(folder, "finished", job)
    except (ConfigError, ValueError, OSError) as error:
        return Seen(folder, "unreadable", None, str(error))
    return Seen(folder, "running" if job.is_held else "stopped", job)


def main(args: Args, console: Console) -> int:
    """Prints the table; 0 whatever it shows."""
    if not is_local(home()):
        raise ConfigError("GATTN_HOME", str(home()), "locks and logs are on a disk: give it the folder that runs use")
    runs = [look(path.parent) for path in (home() / "runs").glob("*/config.json")]
    runs.sort(key=lambda seen: (ORDER.index(seen.state), seen.folder.name))
    counts = {state: sum(seen.state == state for seen in runs) for state in ORDER}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    console.print(Text(f"{home() / 'runs'}: {words or 'no runs'}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("run", "step", "loss", "left", ""):
        table.add_column(title, justify="left" if title in ("run", "") else "right", no_wrap=True)
    for seen in runs:
        if seen.state != "finished" or args.finished:
            step, loss, left = cells(seen.job) if seen.job else ("-", "-", "-")
            table.add_row(seen.folder.name, step, loss, left if seen.state == "running" else "-", seen.state)
    if table.row_count:
        console.print(table)
    for seen in runs:
        if args.failures and seen.state in ("stopped", "unreadable"):
            tail = seen.problem or "\n".join(last_lines(seen.folder / "log.txt", TAIL)) or "no log: started by hand"
            console.print(Text(f"{seen.state}: {seen.folder}\n{indent(tail)}"), soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__), Console()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
