"""Tensors of checkpoint files, one at a time: safetensors, and PyTorch's zip files without PyTorch.

A `pytorch_model.bin` is a zip of a pickle and of the bytes of every tensor. Of the pickle only what `torch.save` writes
for a dict of tensors is understood; anything else it names is refused before it could run.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gattn.config import ConfigError
from gattn.files import write_atomically

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD_BYTES = 2 << 30
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
STORAGES = {
    "FloatStorage": DTYPES["F32"],
    "HalfStorage": DTYPES["F16"],
    "BFloat16Storage": DTYPES["BF16"],
}


@dataclass(frozen=True)
class Tensor:
    """One tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by its name; the files are opened, their data not read.

    Raises:
      ConfigError: no such files, or one that is damaged, outside of the folder, of another kind than it says, or holds
        something else than tensors.
    """
    for index, single, opener in ((SAFE_INDEX, SAFE, _safetensors), (TORCH_INDEX, TORCH, _torch)):
        if (folder / index).exists():
            return _sharded(folder, index, opener)
        if (folder / single).exists():
            return opener(folder / single)
    raise ConfigError("checkpoint", str(folder), f"holds neither {SAFE} nor {TORCH}, nor an index of shards")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Safetensors of at most `SHARD_BYTES` each (a larger tensor has its own); an index where there are several."""
    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        name = f"part-{len(shards)}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, value in tensors:
        if held and sum(one.nbytes for one in held.values()) + value.nbytes > SHARD_BYTES:
            flush()
        held[name] = np.ascontiguousarray(value)
        total += value.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / SAFE)
        return
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / file)
        where |= dict.fromkeys(names, file)
    write_atomically(
        folder / SAFE_INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    )


def _sharded(folder: Path, index: str, opener: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        where = json.loads((folder / index).read_text())["weight_map"]
        files = {name: str(file) for name, file in where.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("checkpoint", str(folder / index), f"is no index of shards: {error!r}") from error
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError("checkpoint", file, f"{index} points out of its folder: a shard lies beside it")
        if not (folder / file).exists():
            raise ConfigError("checkpoint", file, f"{index} names it, and {folder} does not hold it: fetch it again")
        for name, tensor in opener(folder / file).items():
            if files.get(name) != file:
                said = f"is in {file}, where {index} has {files.get(name, 'nothing')}"
                raise ConfigError("checkpoint", name, f"{said}: fetch both again")
            found[name] = tensor
    if lost := sorted(set(files) - set(found)):
        raise ConfigError("checkpoint", lost[0], f"is not in {files[lost[0]]}, where {index} has it")
    return found


def _safetensors(path: Path) -> dict[str, Tensor]:
    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            with safe_open(path, "np") as file:
                return file.get_tensor(name)

        return read

    found = {}
    try:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  no dict
                part = file.get_slice(name)
                dtype = _dtype(DTYPES, part.get_dtype(), name, path)
                found[name] = Tensor(tuple(part.get_shape()), dtype, reader(name))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    return found


def _dtype(known: Mapping[str, np.dtype], name: str, tensor: str, path: Path) -> np.dtype:
    if name not in known:
        raise ConfigError("checkpoint", tensor, f"is {name} in {path.name}: float32, float16 and bfloat16 can be read")
    return known[name]


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError("checkpoint", str(path), f"cannot be read ({error}): fetch it again")


# ---- PyTorch's zip ----------------------------------------------------------------------------------------------


class _Forbidden(Exception):
    """A pickle names something else than tensors."""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    size: int


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> tuple:
    return storage, offset, tuple(shape), tuple(stride)


class _Kind:
    """Stands for a storage's class."""

    def __init__(self, name: str):
        self.name = name


class _Unpickler(pickle.Unpickler):
    ALLOWED = {  # noqa: RUF012
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        **{("torch", name): _Kind(name) for name in (*STORAGES, "LongStorage", "IntStorage", "DoubleStorage")},
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise _Forbidden(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _, size = pid
        if kind != "storage" or not isinstance(storage, _Kind):
            raise _Forbidden(f"a reference to {kind!r}")
        return _Storage(storage.name, str(key), int(size))


def _torch(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in entries if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(pickles) != 1:
                raise ConfigError(
                    "checkpoint", str(path), f"has {len(pickles)} pickles and not one: no torch.save file"
                )
            root = pickles[0].removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in entries and archive.read(order) != b"little":
                raise ConfigError("checkpoint", str(path), "was written big-endian: save it again on another machine")
            content = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
            if not isinstance(content, dict):
                raise ConfigError("checkpoint", str(path), f"holds a {type(content).__name__}, not a dict of tensors")
            starts = {name: _start(path, info) for name, info in entries.items() if name.startswith(f"{root}data/")}
    except _Forbidden as error:
        remedy = f"its pickle wants {error}, which is no tensor: nothing was run; use safetensors, or trust nobody"
        raise ConfigError("checkpoint", str(path), remedy) from error
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise _damaged(path, error) from error
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise _damaged(path, error) from error
    return {str(name): _described(str(name), value, path, root, entries, starts) for name, value in content.items()}


def _described(
    name: str, value: Any, path: Path, root: str, entries: Mapping[str, zipfile.ZipInfo], starts: Mapping[str, int]
) -> Tensor:
    if not (isinstance(value, tuple) and len(value) == 4 and isinstance(value[0], _Storage)):
        raise ConfigError("checkpoint", name, f"is a {type(value).__name__} in {path.name}, not a tensor")
    storage, offset, shape, stride = value
    dtype, entry = _dtype(STORAGES, storage.dtype, name, path), f"{root}data/{storage.key}"
    usual = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(step != want for step, want, size in zip(stride, usual, shape, strict=True) if size > 1):
        raise ConfigError("checkpoint", name, f"is not contiguous in {path.name}: save it with .contiguous()")
    count = math.prod(shape)
    if entry not in starts or offset < 0 or (offset + count) * dtype.itemsize > entries[entry].file_size:
        raise ConfigError("checkpoint", name, f"is cut in {path.name}: fetch it again")

    def read() -> np.ndarray:
        start = starts[entry] + offset * dtype.itemsize
        return np.memmap(path, dtype, "r", start, (count,)).reshape(shape) if count else np.empty(shape, dtype)

    return Tensor(shape, dtype, read)


def _start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin, behind its local header."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ConfigError("checkpoint", str(path), f"{info.filename} is compressed: save it with torch.save")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no header of {info.filename}")
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if start + info.file_size > path.stat().st_size:
        raise zipfile.BadZipFile(f"{info.filename} is cut")
    return start
