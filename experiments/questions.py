"""Questions to finished runs: `python -m gattn eval` of many, several at a time, and what it left in result.json."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console

from experiments.runner import POLL_S, Run, signals, surroundings
from gattn.evaluate import Evaluation, reading

Questions = Mapping[Run, Sequence[Evaluation]]


def answer(result: Mapping[str, Any], task: str, length: int, read: str = "", **made: int) -> dict[str, Any]:
    """The entry of a task at a length, of so many `samples` or `sequences`; `read` is how `gattn eval` calls the
    reading. KeyError where there is none, or where what was measured is not finite."""
    for entry in result.get("evaluations", {}).values():
        if (entry["task"], entry["length"], entry["read"]) == (task, length, read):
            if any(entry.get(name) != count for name, count in made.items()):
                break
            if entry.get("loss", entry.get("score")) is None:
                break
            return entry
    raise KeyError(f"{task} {length} {read}")


def is_answered(run: Run, evaluation: Evaluation) -> bool:
    """Whether the run has every entry, made of as many prompts or sequences; what is not finite is an answer too."""
    entries = (run.result() or {}).get("evaluations", {}).values()
    read = reading(run.config, evaluation)[1]
    found = {(e["task"], e["length"], e.get("samples", e.get("sequences"))) for e in entries if e["read"] == read}
    counts = {task: evaluation.sequences if task == "ppl" else evaluation.samples for task in evaluation.each_task()}
    lengths = evaluation.each_length() or [run.config.data.seq_len]
    return all((task, length, counts[task]) in found for task in counts for length in lengths)


def left(questions: Questions) -> dict[Run, list[Evaluation]]:
    """What was not answered yet, by folder: rows that share one are asked once."""
    folders: dict[Any, tuple[Run, list[Evaluation]]] = {}
    for run, evaluations in questions.items():
        _, wanted = folders.setdefault(run.folder, (run, []))
        wanted += [one for one in evaluations if one not in wanted and not is_answered(run, one)]
    return {run: wanted for run, wanted in folders.values() if wanted}


def command(run: Run, evaluation: Evaluation) -> list[str]:
    """What asks it: `-m gattn eval` with what is not the default."""
    words = ["-m", "gattn", "eval", str(run.folder)]
    for field in dataclasses.fields(evaluation):
        value = getattr(evaluation, field.name)
        if value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            words += [name] if value is True else [name, f"{value}"]
    return words


def tell(questions: Questions, console: Console) -> None:
    """Prints the commands of what is not answered: for machines that are not this one."""
    for run, evaluations in left(questions).items():
        for one in evaluations:
            console.print(shlex.join(["python", *command(run, one)]), highlight=False, soft_wrap=True, markup=False)


def ask(questions: Questions, workers: int | None, console: Console) -> list[str]:
    """Asks finished runs what they were not asked before; the last words of those that failed. Ctrl-C or SIGTERM ends
    what is being asked; what was answered stays."""
    waiting = [(run, wanted) for run, wanted in left(questions).items() if run.result()]
    if not waiting:
        return []
    workers, env = surroundings(workers)
    console.print(f"{len(waiting)} runs to evaluate, {workers} at a time", highlight=False)
    failed: list[str] = []
    active: list[tuple[Run, list[Evaluation], subprocess.Popen, IO[bytes]]] = []

    def start(run: Run, wanted: list[Evaluation]) -> None:
        said = tempfile.TemporaryFile()  # noqa: SIM115  closed when the process has ended
        words = [sys.executable, *command(run, wanted[0])]
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        active.append((run, wanted[1:], process, said))

    with signals() as received:
        try:
            while waiting or active:
                if received:
                    raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
                for one in [one for one in active if one[2].poll() is not None]:
                    active.remove(one)
                    run, more, process, said = one
                    if process.returncode:
                        said.seek(0)
                        words = said.read().decode(errors="replace").strip().splitlines()
                        failed.append(f"{run.name}: {words[-1] if words else f'exit code {process.returncode}'}")
                        console.print(f"failed: {failed[-1]}", highlight=False, soft_wrap=True, markup=False)
                    elif more:
                        start(run, more)
                    else:
                        console.print(f"evaluated: {run.name}", highlight=False, soft_wrap=True, markup=False)
                    said.close()
                while waiting and len(active) < workers:
                    start(*waiting.pop(0))
                time.sleep(POLL_S)
        finally:
            for _, _, process, _ in active:
                process.terminate()
                process.wait()
    return failed
