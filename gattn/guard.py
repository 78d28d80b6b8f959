"""What guards a run's folder and its process: a lock, the claim of one config, signals that are answered in time."""

import contextlib
import fcntl
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from gattn.config import Config, differences, from_dict, to_json
from gattn.files import is_local, write_atomically


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


class DivergenceError(TrainingError):
    """Loss or gradient are not finite."""


def read_json(path: Path) -> Any:
    """A file of the run.

    Raises:
      TrainingError: if it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no UTF-8
        raise TrainingError(f"{path} is damaged ({error}): move it away, and run the same command again") from error


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds the folder for this process; the operating system lets go when the process ends, however it ends. A bucket
    has no locks: whoever starts runs there must start each once."""
    if not is_local(directory):
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "a", encoding="utf-8") as file:
        for _ in range(10):  # a sweep that looks whether a run is held holds it for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise TrainingError(f"{directory} is being trained by another process: wait for it or stop it")
        yield


def claim(directory: Path, config: Config, console: Console) -> None:
    """Writes config.json, or checks that the folder's is the same run; a finished one's stays as it is."""
    path = directory / "config.json"
    if path.exists():
        mathematical, cosmetic = differences(from_dict(Config, read_json(path)), config)
        if mathematical:
            raise TrainingError(
                f"{directory} holds another run, with {_spell(mathematical)}: choose another folder, or the old values"
            )
        if cosmetic:
            console.print(f"changed since this run began: {_spell(cosmetic)}", highlight=False)
        if not cosmetic or (directory / "result.json").exists():
            return
    write_atomically(path, to_json(config))


def _spell(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} = {old!r} and not {new!r}" for name, (old, new) in changes.items())


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], int | None]]:
    """A function that says which of SIGTERM and SIGINT arrived, if one did; a second one acts at once."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield lambda: None
        return

    def note(number, frame):
        arrived.append(number)
        for other, handler in previous.items():
            signal.signal(other, handler)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: arrived[0] if arrived else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
