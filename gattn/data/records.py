"""The folder that `prepare` makes and a run reads: token streams as ArrayRecord shards, their tokenizer, an index.

    index.json                 written last: fingerprint, counts, shards; a folder without it is not finished
    tokenizer.json             unless the tokens are bytes
    plan.json, unit-*.json     what `prepare` needs to go on where it stopped
    train-00000.array_record, held_out-00000.array_record, ...

A split is its shards one after the other. A shard's records are its tokens in blocks of 2048, uint16 or uint32, little
endian, the last block shorter; each can be read alone. A document is BOS and its tokens.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gattn.config import ConfigError
from gattn.data.tokenizer import Tokenizer, byte_tokenizer, read_tokenizer
from gattn.files import is_local, local_copy

FORMAT = 1
BLOCK = 2048  # tokens of a record: 4 KiB or 8 KiB, read in some 20 microseconds
SPLITS = ("train", "held_out")
_OPEN_SHARDS = 64  # readers that a stream keeps open: each is a file descriptor
_WRITE_TOKENS = 1 << 17


@dataclass(frozen=True)
class Shard:
    """One file of a split: its tokens, its size in bytes, and the hash of its tokens."""

    path: Path
    tokens: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Prepared:
    """An opened folder. `token_bytes`: UTF-8 bytes of each id, None where tokens cannot be counted in bytes of text."""

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream
    token_bytes: Int[np.ndarray, " V"] | None


class TokenStream:
    """A split as one long array on disk: `len(stream)` tokens, `stream[start:stop]` reads the blocks it needs.

    Shards are opened (and fetched, if they are remote) when first needed. Threads may share a stream; it pickles.
    """

    def __init__(self, shards: Iterable[Shard], dtype: np.dtype):
        self.shards, self.dtype = tuple(shards), np.dtype(dtype)
        self._starts = list(itertools.accumulate((shard.tokens for shard in self.shards), initial=0))
        self._reset()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, wanted: slice) -> Int[np.ndarray, " _"]:
        """Ids of a contiguous range, clipped as a list's. Raises ConfigError if a shard is damaged or gone."""
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise IndexError(f"a stream is read in contiguous ranges, not in steps of {step}")
        parts = [np.empty(0, self.dtype)]
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[number + 1])
            if start < end:
                parts.append(self._read(number, start - self._starts[number], end - self._starts[number]))
            start, number = end, number + 1
        return np.concatenate(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards, "dtype": self.dtype, "_starts": self._starts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()  # a reader moves in its file
        self._readers: OrderedDict[int, Any] = OrderedDict()

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        shard = self.shards[number]
        first, last = start // BLOCK, (stop - 1) // BLOCK
        with self._lock:
            try:
                records = self._reader(number).read(first, last + 1)
            except (RuntimeError, IndexError) as error:
                raise _damaged(shard.path, error) from error
        tokens = np.frombuffer(b"".join(records), self.dtype.newbyteorder("<"))
        if len(tokens) != min((last + 1) * BLOCK, shard.tokens) - first * BLOCK:
            raise _damaged(shard.path, f"{len(tokens)} tokens in the blocks {first} to {last}")
        return tokens[start - first * BLOCK : stop - first * BLOCK].astype(self.dtype)

    def _reader(self, number: int) -> Any:
        from array_record.python import array_record_module

        if number in self._readers:
            self._readers.move_to_end(number)
            return self._readers[number]
        shard = self.shards[number]
        try:
            path = local_copy(shard.path, shard.sha256, shard.size)
        except OSError as error:
            raise _damaged(shard.path, error) from error
        reader = array_record_module.ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0,max_parallelism:0")
        if reader.num_records() != -(-shard.tokens // BLOCK):  # also where it could not be opened: 0
            raise _damaged(shard.path, f"{reader.num_records()} blocks for {shard.tokens} tokens")
        self._readers[number] = reader
        if len(self._readers) > _OPEN_SHARDS:
            self._readers.popitem(last=False)[1].close()
        return reader


class ShardWriter:
    """Writes one shard, which is there whole after `finish` or not at all; without tokens there is no file."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("<")
        folder = path.parent if is_local(path) else Path(tempfile.gettempdir())
        self._part = folder / f".{path.name}.{uuid.uuid4().hex}.part"
        self._writer: Any = None
        self._waiting: list[np.ndarray] = []
        self._num_waiting = self._tokens = 0
        self._digest = hashlib.sha256()

    def add(self, ids: np.ndarray) -> None:
        """Appends ids, which must fit the dtype."""
        self._waiting.append(ids.astype(self._dtype))
        self._num_waiting += len(ids)
        if self._num_waiting >= _WRITE_TOKENS:
            self._write(self._num_waiting // BLOCK * BLOCK)

    def finish(self) -> dict[str, Any] | None:
        """Puts the shard in its place; its name, tokens, size in bytes and the hash of its tokens (None: no tokens)."""
        self._write(self._num_waiting)
        if not self._tokens:
            return None
        self._writer.close()
        size = self._part.stat().st_size
        with self._part.open("rb") as file:
            os.fsync(file.fileno())
            if not is_local(self._path):
                with self._path.open("wb") as target:
                    shutil.copyfileobj(file, target, 1 << 20)
        if is_local(self._path):
            os.replace(self._part, self._path)
        self.discard()
        return {"name": self._path.name, "tokens": self._tokens, "size": size, "sha256": self._digest.hexdigest()}

    def discard(self) -> None:
        """Removes what is half written."""
        if self._writer is not None and self._writer.is_open():
            with contextlib.suppress(Exception):  # it writes what it still holds, for which a full disk has no room
                self._writer.close()
        self._part.unlink(missing_ok=True)

    def _write(self, count: int) -> None:
        from array_record.python import array_record_module

        if not count:
            return
        if self._writer is None:
            self._writer = array_record_module.ArrayRecordWriter(os.fspath(self._part), "group_size:1")
        waiting = np.concatenate(self._waiting)
        self._digest.update(waiting[:count].tobytes())
        for start in range(0, count, BLOCK):
            self._writer.write(waiting[start : min(start + BLOCK, count)].tobytes())
        self._tokens += count
        self._waiting, self._num_waiting = [waiting[count:]], len(waiting) - count


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where the ids fit, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def fingerprint(tokenizer: Tokenizer, shards: dict[str, list[dict[str, Any]]]) -> str:
    """16 hex digits of the tokens of both splits and of what they mean; not of paths or of how they were made."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for split in SPLITS:
        digest.update(" ".join([split, *(shard["sha256"] for shard in shards[split])]).encode())
    return digest.hexdigest()[:16]


def open_prepared(folder: Path) -> Prepared:
    """Opens a folder that `python -m gattn prepare` made.

    Raises:
      ConfigError: `data.source`, if it is not there, not finished, or not what its index says.
    """
    index = _read_index(folder)
    try:
        bos = index["bos"]
        tokenizer = byte_tokenizer() if bos is None else read_tokenizer(folder / "tokenizer.json", bos)
        dtype = token_dtype(index["vocab_size"])
        splits = {
            split: [Shard(folder / s["name"], s["tokens"], s["size"], s["sha256"]) for s in index["shards"][split]]
            for split in SPLITS
        }
        if (
            tokenizer.fingerprint != index["tokenizer"]
            or fingerprint(tokenizer, index["shards"]) != index["fingerprint"]
        ):
            raise ValueError("its tokenizer or its index was changed")
        counted = (
            index["token_bytes"] is not None and abs(index["token_bytes"] - index["bytes"]) <= 0.01 * index["bytes"]
        )
        token_bytes = tokenizer.token_bytes if counted else None
        _check_shards(folder, [*splits["train"], *splits["held_out"]])
        return Prepared(
            name=folder.name,
            fingerprint=index["fingerprint"],
            tokenizer=tokenizer,
            train=TokenStream(splits["train"], dtype),
            held_out=TokenStream(splits["held_out"], dtype),
            token_bytes=token_bytes,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:  # a ConfigError of the tokenizer is a ValueError
        raise _damaged(folder, error) from error


def _read_index(folder: Path) -> dict[str, Any]:
    where, again = os.fspath(folder), "python -m gattn prepare FILES --out FOLDER"
    try:
        index = json.loads((folder / "index.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "plan.json").exists():
            remedy = "preparing was interrupted: the same prepare command goes on, or says what is wrong"
        elif folder.exists() and not folder.is_dir():
            remedy = f"is a file: {again} makes the folder to train on"
        elif folder.exists():
            remedy = f"holds no prepared data (no index.json): {again} makes it"
        else:
            remedy = f"there is no such folder: {again} makes one"
        raise ConfigError("data.source", where, remedy) from None
    except (OSError, ValueError) as error:
        raise _damaged(folder / "index.json", error) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ConfigError("data.source", where, f"not of format {FORMAT}, which this gattn reads: prepare it again")
    return index


def _check_shards(folder: Path, shards: Sequence[Shard]) -> None:
    present = {path.name for path in folder.iterdir()}
    for shard in shards:
        if shard.path.name not in present:
            raise ValueError(f"{shard.path.name} is not there")
        if is_local(folder) and shard.path.stat().st_size != shard.size:
            raise ValueError(f"{shard.path.name} has not the {shard.size} bytes it was written with")


def _damaged(path: Path, error: Any) -> ConfigError:
    remedy = f"damaged ({error}): delete it and run the same prepare command again"
    return ConfigError("data.source", os.fspath(path), remedy)
