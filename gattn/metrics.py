"""What a run writes and shows: metrics.jsonl, result.json, and a progress line."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gattn.files import write_atomically


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class MetricsLog:
    """Appends one JSON object a line to metrics.jsonl. Opened at a step, it drops lines beyond it: they are redone."""

    def __init__(self, path: Path, step: int):
        kept = [line for line in read_lines(path) if line["step"] <= step]
        self.evaluated = {line["step"] for line in kept if "eval_loss" in line}
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the run

    def write(self, **values: Any) -> None:
        """One line; numbers that are not finite are written as null, so that every line is JSON."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(clean) + "\n")

    def close(self) -> None:
        self._file.close()


class ProgressLine:
    """Steps, loss, tokens/s and time left: a live bar on a terminal, else a line at most every ten seconds."""

    def __init__(self, steps: int, start: int, console: Console):
        self._console = console
        self._steps = steps
        self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.fields[status]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, status="compiling")
        self._bar.start()

    def update(self, step: int, loss: float, tokens_per_s: float, seconds_left: float) -> None:
        """Shows where the run is; `step` counts finished steps."""
        status = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step == self._steps or time.monotonic() - self._printed >= 10):
            self._printed = time.monotonic()
            self._console.print(f"step {step}/{self._steps}  {status}  {seconds_left:,.0f} s left")

    def note(self, text: str) -> None:
        """A line of its own above the bar."""
        self._console.print(text)

    def stop(self) -> None:
        self._bar.stop()
