"""What `prepare` has to do: units of work, the plan that all runs of one command agree on, what is done of it."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gattn.config import ConfigError
from gattn.data.documents import InputFile, Part, find_files, read_documents, split_file
from gattn.data.records import FORMAT
from gattn.files import is_local, write_atomically

UNIT = 8 << 20  # some two seconds of work: what an interruption costs, and small enough to share out 40 MB
_MOST_UNITS = 2048  # above 16 GB of text units grow instead


def make_units(names: Sequence[str], out: Path, field: str) -> tuple[list[InputFile], list[list[Part]]]:
    """The files that are meant (see `documents`), and their parts in units of 8 to 16 MB.

    Raises:
      ConfigError: `files` or `field`.
    """
    inputs = find_files(names, out)
    size = max(UNIT, sum(file.size for file in inputs) // _MOST_UNITS)
    return inputs, _pack([part for file in inputs for part in split_file(file, field, size)], size)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """One `prepare` at a time in a local folder; the lock goes with the process, however it ends."""
    if not is_local(out):
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("out", os.fspath(out), "another prepare is at work there: wait for it") from None
        yield


def agree_on_plan(out: Path, settings: dict[str, Any], inputs: list[InputFile], units: list[list[Part]]) -> None:
    """Writes the plan, or checks that the one there is the same. Removes what a killed process left half written."""
    number = {file.path: i for i, file in enumerate(inputs)}
    plan = {
        "format": FORMAT,
        "settings": settings,
        "files": [dataclasses.asdict(file) for file in inputs],
        "units": [[[number[part.file.path], part.start, part.stop] for part in unit] for unit in units],
    }
    path = out / "plan.json"
    if not path.exists():
        if out.exists() and any(not entry.name.startswith(".") for entry in out.iterdir()):
            raise ConfigError("out", os.fspath(out), "holds other files: choose a new folder with --out")
        write_atomically(path, json.dumps(plan))
        return
    for leftover in out.glob(".*.part") if is_local(out) else ():
        leftover.unlink(missing_ok=True)
    try:
        difference = _difference(json.loads(path.read_bytes()), plan)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        difference = f"its plan.json cannot be read ({error})"
    if difference and not any(out.glob("unit-*.json")):  # nothing was made of the old plan: an error was put right
        start_over(out)
        write_atomically(path, json.dumps(plan))
    elif difference:
        remedy = f"was prepared from something else: {difference}. Choose another --out, or delete this folder"
        raise ConfigError("out", os.fspath(out), remedy)


def start_over(out: Path) -> None:
    """Removes what was made of a plan that came to nothing, so that the folder can be used again."""
    for pattern in ("unit-*.json", "*.array_record", "tokenizer.json", "plan.json"):
        for path in out.glob(pattern):
            path.unlink()


def unit_path(out: Path, number: int) -> Path:
    return out / f"unit-{number:05d}.json"


def finished_unit(out: Path, number: int) -> dict[str, Any] | None:
    """What a finished unit says of itself; None if it or one of its shards is not there as it was written."""
    try:
        unit = json.loads(unit_path(out, number).read_bytes())
        for shard in filter(None, unit["shards"].values()):
            found: Any = (out / shard["name"]).stat()
            if (found.st_size if isinstance(found, os.stat_result) else found.length) != shard["size"]:
                return None
        return unit
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def sample_texts(units: list[list[Part]], field: str, held_out: float, budget: int) -> Iterator[str]:
    """About `budget` bytes of the train split, evenly from all parts of all files; each part gives its beginning."""
    parts = [part for unit in units for part in unit]
    total, passed, taken = sum(part.size for part in parts), 0, 0
    for part in parts:
        passed += part.size
        allowed = min(budget, budget * passed // max(total, 1)) if total > budget else passed + 1
        if taken >= allowed:
            continue
        for text in read_documents(part, field):
            data = text.encode()
            if not is_empty(text) and split_position(data) >= held_out:
                taken += len(data)
                yield text
            if taken >= allowed:
                break


def is_empty(text: str) -> bool:
    return not text or text.isspace()


def split_position(data: bytes) -> float:
    """Where in [0, 1) a document's text puts it; what lies below `held_out` is held out."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64


def _pack(parts: list[Part], unit: int) -> list[list[Part]]:
    """Neighbouring parts together until they make a unit."""
    units: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if size >= unit:
            units.append([])
            size = 0
        units[-1].append(part)
        size += part.size
    return units


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """What sets two plans apart, in words; empty if nothing does."""
    said = [
        f"{key} was {there['settings'].get(key, 'not set')} and is {here['settings'].get(key, 'not set')}"
        for key in sorted({*there["settings"], *here["settings"]})
        if there["settings"].get(key) != here["settings"].get(key)
    ]
    old, new = ({file["path"]: file for file in plan["files"]} for plan in (there, here))
    for words, paths in (
        ("is new", [p for p in new if p not in old]),
        ("is no longer there", [p for p in old if p not in new]),
        ("has changed (its size or the time of its last change)", [p for p in new if p in old and old[p] != new[p]]),
    ):
        if paths:
            said.append(f"{paths[0]} {words}" + f" (and {len(paths) - 1} more)" * (len(paths) > 1))
    if not said and there != here:
        said.append("the order of the files or the version of gattn is another")
    return ", ".join(said)
