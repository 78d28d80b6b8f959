"""Where things live, on a disk or in a bucket (`gs://`), and writes that a crash cannot leave half done.

A bucket's objects are written whole and can neither be appended to nor renamed; whatever needs a real file (locks,
caches, memory maps, ArrayRecord readers) stays on the local disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gattn.config import Config


def as_path(text: str | os.PathLike[str]) -> Path:
    """A `pathlib.Path`, or for `gs://bucket/...` an `etils.epath.Path`, which reads and writes like one."""
    if "://" not in os.fspath(text):
        return Path(text).expanduser()
    import fsspec
    from etils import epath

    # A listing that is kept hides what others write later, and reads objects that grew at their old length.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    path: Any = epath.Path(text)
    return path


def is_local(path: Path) -> bool:
    """Whether the path is on a disk of this machine: it can be appended to, renamed, locked and mapped into memory."""
    return isinstance(path, Path)


def home() -> Path:
    """Where runs, data and caches live: $GATTN_HOME, or the working directory."""
    return as_path(os.environ.get("GATTN_HOME") or ".")


def cache() -> Path:
    """Local folder for what can be made again: `cache/` at home, or `~/.cache/gattn` where home is a bucket."""
    if is_local(home()):
        return home() / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gattn"


def run_directory(config: Config) -> Path:
    """Where a run lives: `runs/<its name>` at home."""
    return home() / "runs" / config.run_name


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file at once: a reader, a second writer or a crash sees the old content or the new."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_local(path):
        path.write_bytes(data)  # an object appears whole
        return
    with _whole(path) as file:
        file.write(data)


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into that takes the place of `path` at the end, on the disk by then, or leaves nothing."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def local_copy(path: Path, identity: str, size: int) -> Path:
    """The file itself where it is local, else a copy in the cache, fetched once for its `identity`, such as a hash of
    its content, and again where the copy is not `size` bytes long."""
    if is_local(path):
        return path
    name = hashlib.sha256(f"{path} {identity}".encode()).hexdigest()[:16]
    copy = cache() / "fetched" / f"{name}-{path.name}"
    if not copy.exists() or copy.stat().st_size != size:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, _whole(copy) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return copy
