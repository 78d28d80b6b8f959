"""Questions to finished runs: `python -m gattn eval` of many, several at a time, and what it left in result.json."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console

from experiments.runner import Run, surroundings
from gattn.evaluate import Evaluation, reading

Questions = Mapping[Run, Sequence[Evaluation]]


def answer(result: Mapping[str, Any], task: str, length: int, read: str = "") -> dict[str, Any]:
    """The entry of a task at a length; `read` is how `gattn eval` calls the reading. KeyError if not asked."""
    for entry in result.get("evaluations", {}).values():
        if (entry["task"], entry["length"], entry["read"]) == (task, length, read):
            return entry
    raise KeyError(f"{task} {length} {read}")


def is_answered(run: Run, evaluation: Evaluation) -> bool:
    """Whether the run has every entry, made of as many prompts or sequences."""
    result, read = run.result() or {}, reading(run.config, evaluation)[1]
    for task in evaluation.each_task():
        for length in evaluation.each_length():
            try:
                entry = answer(result, task, length, read)
            except KeyError:
                return False
            if entry.get("samples", evaluation.samples) != evaluation.samples:
                return False
    return True


def ask(questions: Questions, workers: int | None, console: Console) -> list[str]:
    """Asks finished runs what they were not asked before, each folder once; the last words of those that failed."""
    folders = {run.folder: (run, evaluations) for run, evaluations in questions.items()}  # several rows may share one
    missing = {
        run: left
        for run, evaluations in folders.values()
        if run.result() and (left := [one for one in evaluations if not is_answered(run, one)])
    }
    if not missing:
        return []
    workers, env = surroundings(workers)

    def one(run: Run) -> str:
        for evaluation in missing[run]:
            words = [sys.executable, "-m", "gattn", "eval", str(run.folder), *_options(evaluation)]
            done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                return f"{run.name}: {last}"
        return ""

    console.print(f"{len(missing)} runs to evaluate, {workers} at a time", highlight=False)
    failed = []
    with ThreadPoolExecutor(workers) as pool:
        for run, error in zip(missing, pool.map(one, missing), strict=True):
            console.print(f"failed: {error}" if error else f"evaluated: {run.name}", highlight=False, soft_wrap=True)
            failed += [error] if error else []
    return failed


def _options(evaluation: Evaluation) -> list[str]:
    """As the command line has them: what is not the default."""
    words = []
    for field in dataclasses.fields(evaluation):
        value = getattr(evaluation, field.name)
        if value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            words += [name] if value is True else [name, f"{value}"]
    return words
