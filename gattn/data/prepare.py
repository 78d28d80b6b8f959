"""`python -m gattn prepare`: users' files to a folder of tokens (its format: `records`), by several processes.

The work is cut into units. A unit's shards and then its `unit-*.json` appear whole or not at all, so what is finished
stays finished whatever happens, and the same command goes on with the rest. The plan depends on files and settings
alone: neither the number of workers nor interruptions can change the result. Workers are spawned.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gattn.config import ConfigError
from gattn.data.documents import Part, read_documents
from gattn.data.plan import (
    agree_on_plan,
    finished_unit,
    is_empty,
    locked,
    make_units,
    sample_texts,
    split_position,
    start_over,
    unit_path,
)
from gattn.data.records import FORMAT, SPLITS, ShardWriter, fingerprint, token_dtype
from gattn.data.tokenizer import (
    BOS,
    Tokenizer,
    agrees,
    byte_tokenizer,
    fast_encoder,
    parse_tokenizer,
    read_tokenizer,
    train_tokenizer,
)
from gattn.files import as_path, write_atomically
from gattn.guard import signals

_TRAIN_SAMPLE = 16 << 20  # most bytes of text that bpe is trained on, _TRAIN_SAMPLE_PER_ENTRY for a small vocabulary
_TRAIN_SAMPLE_PER_ENTRY = 2 << 10
_CHECK_SAMPLE = 1 << 20
_BATCH = 1 << 20  # bytes of text that are encoded at a time
_AGAIN = "the same command goes on where it stopped"


@dataclass(frozen=True)
class _Job:
    """All that a worker needs to know."""

    out: str
    field: str
    held_out: float
    definition: str | None
    bos: str | None
    encoder: Literal["bytes", "tokenizers", "tiktoken"]

    def open_tokenizer(self) -> Tokenizer:
        if self.definition is None:
            return byte_tokenizer()
        tokenizer = parse_tokenizer(self.definition, self.bos)
        return (fast_encoder(tokenizer) or tokenizer) if self.encoder == "tiktoken" else tokenizer


def prepare(
    files: Sequence[str],
    out: Path,
    *,
    tokenizer: str,
    vocab_size: int,
    bos: str | None,
    field: str,
    held_out: float,
    workers: int,
    console: Console,
) -> Path:
    """Tokenises files to `out`, or goes on doing so; returns it. Gone wrong or interrupted, it leaves finished units.

    Args:
      files: paths, globs and folders, see `documents`.
      tokenizer: `bpe` (trained on a sample of the train split to `vocab_size` entries), `bytes`, or the path of a
        `tokenizer.json`, whose special token `bos` separates documents.
      field: of JSONL, Parquet and JSON in ArrayRecord.
      held_out: share of the documents that are kept from training, by the hash of their text.

    Raises:
      ConfigError: naming the argument, for whatever a user can get wrong; a full disk too.
    """
    _check_arguments(out, tokenizer, vocab_size, bos, held_out, workers)
    given = None if tokenizer in ("bpe", "bytes") else read_tokenizer(tokenizer, bos)
    inputs, units = make_units(files, out, field)
    settings = {"field": field, "held_out": held_out, "tokenizer": given.fingerprint if given else tokenizer}
    settings |= {"vocab_size": vocab_size} if tokenizer == "bpe" else {}
    settings |= {"bos_id": given.bos_id} if given else {}
    try:
        with locked(out):
            agree_on_plan(out, settings, inputs, units)
            if tokenizer == "bpe" and not (out / "tokenizer.json").exists():
                console.print(f"training a BPE tokenizer of {vocab_size:,} entries")
            chosen = _open_tokenizer(out, given or tokenizer, vocab_size, units, field, held_out)
            fast = fast_encoder(chosen)
            if fast and agrees(chosen, fast, list(sample_texts(units, field, held_out, _CHECK_SAMPLE))):
                chosen = fast
            bos = BOS if tokenizer == "bpe" else _token(chosen)
            job = _Job(os.fspath(out), field, held_out, chosen.definition, bos, chosen.encoder)
            _run(job, units, workers, console)
            _write_index(out, chosen, bos, len(units), held_out)
    except OSError as error:
        raise _failed_write(os.fspath(out), error) from error
    return out


def _check_arguments(
    out: Path, tokenizer: str, vocab_size: int, bos: str | None, held_out: float, workers: int
) -> None:
    if not 0 < held_out < 1:
        raise ConfigError("held_out", held_out, "a share between 0 and 1 of the documents is held out")
    if {",", "="} & set(os.fspath(out)):
        raise ConfigError("out", os.fspath(out), "a comma or an equals sign would be read as a mixture: choose another")
    if workers < 1:
        raise ConfigError("workers", workers, "must be at least 1")
    if tokenizer == "bpe" and vocab_size < 257:
        raise ConfigError("vocab_size", vocab_size, "256 bytes and BOS need at least 257")
    if tokenizer in ("bpe", "bytes") and bos:
        raise ConfigError("bos", bos, f"is for a tokenizer.json; {tokenizer} has a BOS of its own: leave it out")


# ---- tokenizer --------------------------------------------------------------------------------------------------


def _open_tokenizer(
    out: Path, given: Tokenizer | str, vocab_size: int, units: list[list[Part]], field: str, held_out: float
) -> Tokenizer:
    """The tokenizer that `out` keeps; the first time it is put there, trained if need be."""
    if given == "bytes":
        return byte_tokenizer()
    path = out / "tokenizer.json"
    if isinstance(given, str):
        if path.exists():
            return read_tokenizer(path, BOS)
        budget = min(_TRAIN_SAMPLE, vocab_size * _TRAIN_SAMPLE_PER_ENTRY)
        given = train_tokenizer(list(sample_texts(units, field, held_out, budget)), vocab_size)
    assert given.definition is not None
    write_atomically(path, given.definition)
    return given


def _token(tokenizer: Tokenizer) -> str | None:
    """How the tokenizer's file spells BOS; None for bytes, which have no file."""
    if tokenizer.definition is None:
        return None
    added = json.loads(tokenizer.definition)["added_tokens"]
    return next(token["content"] for token in added if token["id"] == tokenizer.bos_id)


# ---- work -------------------------------------------------------------------------------------------------------


def _run(job: _Job, units: list[list[Part]], workers: int, console: Console) -> None:
    """Does the units that are not finished."""
    out = as_path(job.out)
    todo = [number for number in range(len(units)) if finished_unit(out, number) is None]
    total = sum(part.size for number in todo for part in units[number])
    if skipped := len(units) - len(todo):
        console.print(f"{skipped} of {len(units)} parts are finished already")
    if not todo:
        return
    console.print(f"tokenising {total / 1e6:,.1f} MB with {job.encoder}, in {len(todo)} parts, {workers} at a time")
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        min(workers, len(todo)), mp_context=context, initializer=_start_worker, initargs=(job, done, stop)
    )
    began = time.monotonic()
    with pool, _progress(total, console) as show:
        try:
            with _whole_start():
                pending = {pool.submit(_prepare_unit, number, units[number]) for number in todo}
            while pending:
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                show(done.value)
        except BrokenProcessPool as error:
            raise ConfigError(
                "workers", workers, f"a worker process died (no memory left?): try fewer workers, {_AGAIN}"
            ) from error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    seconds = time.monotonic() - began
    console.print(f"tokenised {total / 1e6:,.1f} MB in {seconds:,.1f} s, {total / 1e6 / seconds:.1f} MB/s")


@contextmanager
def _whole_start() -> Iterator[None]:
    """Signals wait until the processes are started: one half started would complain of a parent that left it.

    Ctrl-C, which reaches every process, waits for good in those started here: it is the parent who stops them.
    """
    with signals() as arrived:  # the mask holds back this thread alone; Python answers what another one receives
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if number := arrived():
        signal.raise_signal(number)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Any]:
    """Shows bytes done: a bar on a terminal, elsewhere a line every ten seconds."""
    if console.is_terminal:
        columns = (
            TextColumn("tokenising"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    began = shown = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= 10:
            shown = now
            console.print(
                f"{done / max(total, 1):4.0%}, {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, "
                f"{done / 1e6 / (now - began):.1f} MB/s"
            )

    yield show


_job: _Job
_tokenizer: Tokenizer
_done: Any
_stop: Any


class _Stopped(Exception):
    """The parent wants no more."""


def _start_worker(job: _Job, done: Any, stop: Any) -> None:
    global _job, _tokenizer, _done, _stop
    os.environ["RAYON_NUM_THREADS"] = "1"  # before `tokenizers` starts its threads
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()  # nobody else would stop it
    _job, _tokenizer, _done, _stop = job, job.open_tokenizer(), done, stop


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _prepare_unit(number: int, parts: list[Part]) -> None:
    out = as_path(_job.out)
    dtype = token_dtype(_tokenizer.vocab_size)
    writers = {split: ShardWriter(out / f"{split}-{number:05d}.array_record", dtype) for split in SPLITS}
    counts: dict[str, Any] = {"bytes": 0, "token_bytes": 0, "empty": 0, "documents": dict.fromkeys(SPLITS, 0)}
    positions = []
    start_of_document = np.array([_tokenizer.bos_id])
    try:
        for batch in _batches(parts, counts):
            for data, ids in zip(batch, _tokenizer.encode_batch([d.decode() for d in batch]), strict=True):
                position = split_position(data)
                split = "held_out" if position < _job.held_out else "train"
                writers[split].add(start_of_document)
                writers[split].add(ids)
                positions.append(position)
                counts["documents"][split] += 1
                counts["bytes"] += len(data)
                counts["token_bytes"] += int(_tokenizer.token_bytes[ids].sum())
        shards = {split: writer.finish() for split, writer in writers.items()}
        counts |= {"shards": shards, "positions": [min(positions, default=1.0), max(positions, default=0.0)]}
        write_atomically(unit_path(out, number), json.dumps(counts))
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError for a full disk
        raise _failed_write(_job.out, error) from error
    finally:
        for writer in writers.values():
            writer.discard()


def _batches(parts: list[Part], counts: dict[str, Any]) -> Iterator[list[bytes]]:
    """The documents with text, about 1 MB at a time; counts the others, and for the parent what is done."""
    batch: list[bytes] = []
    size = 0
    for part in parts:
        counted = 0
        for text in read_documents(part, _job.field):
            if is_empty(text):
                counts["empty"] += 1
                continue
            batch.append(text.encode())
            size += len(batch[-1])
            if size >= _BATCH:
                yield batch
                if _stop.is_set():
                    raise _Stopped
                progress = min(size, part.size - counted)
                counted += progress
                _add_done(progress)
                batch, size = [], 0
        _add_done(part.size - counted)
    yield batch


def _add_done(size: int) -> None:
    with _done.get_lock():
        _done.value += size


# ---- finishing --------------------------------------------------------------------------------------------------


def _write_index(out: Path, tokenizer: Tokenizer, bos: str | None, num_units: int, held_out: float) -> None:
    units = [finished_unit(out, number) for number in range(num_units)]
    done = [unit for unit in units if unit is not None]
    if len(done) < num_units:
        raise ConfigError("out", os.fspath(out), f"a finished shard has vanished: {_AGAIN}")
    documents = {split: sum(unit["documents"][split] for unit in done) for split in SPLITS}
    lowest, highest = min(unit["positions"][0] for unit in done), max(unit["positions"][1] for unit in done)
    if not sum(documents.values()):
        start_over(out)
        raise ConfigError("files", os.fspath(out), "there is no text in them: every document is empty")
    if lowest == highest:
        start_over(out)
        raise ConfigError("files", os.fspath(out), "hold one document, which cannot be split: give at least two")
    if not documents["held_out"]:
        remedy = (
            f"none of the {documents['train']} documents is held out: give more text, or --held-out above {lowest:.4f}"
        )
        start_over(out)
        raise ConfigError("held_out", held_out, remedy)
    if not documents["train"]:
        remedy = (
            f"all {documents['held_out']} documents are held out: give more text, or --held-out below {highest:.4f}"
        )
        start_over(out)
        raise ConfigError("held_out", held_out, remedy)
    shards = {split: [unit["shards"][split] for unit in done if unit["shards"][split]] for split in SPLITS}
    index = {
        "format": FORMAT,
        "fingerprint": fingerprint(tokenizer, shards),
        "tokenizer": tokenizer.fingerprint,
        "encoder": tokenizer.encoder,
        "vocab_size": tokenizer.vocab_size,
        "bos": bos,
        "bos_id": tokenizer.bos_id,
        "bytes": sum(unit["bytes"] for unit in done),
        "token_bytes": None if tokenizer.folds_text else sum(unit["token_bytes"] for unit in done),
        "documents": documents,
        "empty_documents": sum(unit["empty"] for unit in done),
        "tokens": {split: sum(shard["tokens"] for shard in shards[split]) for split in SPLITS},
        "shards": shards,
    }
    write_atomically(out / "index.json", json.dumps(index, indent=1))


def _failed_write(out: str, error: Exception) -> ConfigError:
    full = "No space left" in str(error) or "quota" in str(error).lower()
    remedy = f"the disk is full: make room, {_AGAIN}" if full else f"cannot be written: {error}"
    return ConfigError("out", out, remedy)
