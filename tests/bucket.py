"""A stand-in for a bucket: `gs://bucket/...` in this process is a local folder that behaves as object storage does.

Objects appear whole when they are closed and are replaced whole; nothing can be appended to or renamed; a directory is
a prefix that some object has. `etils.epath` gets a backend, tensorstore (orbax's array data) a server for the part of
the Cloud Storage JSON API it speaks, and orbax, which asks `google.cloud.storage` what kind of bucket it has, a reply.

    with bucket(folder):
        epath.Path("gs://bucket/run/config.json").write_text("{}")

Other processes see the same bucket by entering `bucket(folder)` too. An object cannot be another one's prefix here.
"""

import fcntl
import functools
import glob
import io
import json
import os
import sys
import threading
import time
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from etils.epath import backend, gpath, stat_utils

NAME = "bucket"


class GenerationMismatch(Exception):
    """The object is not the one that the caller asked for."""


class Objects:
    """The objects of a bucket as files of a folder: their names are relative paths, their generations mtimes in ns."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._uploads = folder.with_name(f"{folder.name}.uploads")
        folder.mkdir(parents=True, exist_ok=True)
        self._uploads.mkdir(exist_ok=True)

    def path(self, name: str) -> Path:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"not an object's name here: {name!r}")
        return self.folder / name

    def generation(self, name: str) -> int:
        """A number that every write changes; 0 where there is no such object."""
        path = self.path(name)
        return path.stat().st_mtime_ns if path.is_file() else 0

    def read(self, name: str) -> tuple[bytes, int]:
        """Content and generation of one and the same version."""
        if not self.generation(name):
            raise FileNotFoundError(name)
        with self.path(name).open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns

    def names(self, prefix: str = "") -> list[str]:
        found = (Path(top, name) for top, _, names in os.walk(self.folder) for name in names)
        names = (path.relative_to(self.folder).as_posix() for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def write(self, name: str, content: bytes, expected: int | None = None) -> int:
        """The new generation. Raises GenerationMismatch where the object's generation is not the expected one."""
        path = self.path(name)
        upload = self._uploads / uuid.uuid4().hex
        upload.write_bytes(content)
        with self._locked():
            try:
                old = self._match(name, expected)
                new = max(time.time_ns(), old + 1)
                os.utime(upload, ns=(new, new))
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(upload, path)
            finally:
                upload.unlink(missing_ok=True)
        return new

    def delete(self, name: str, expected: int | None = None) -> None:
        with self._locked():
            if not self._match(name, expected):
                raise FileNotFoundError(name)
            self.path(name).unlink()
            for parent in self.path(name).relative_to(self.folder).parents[:-1]:  # a prefix goes with its last object
                try:
                    (self.folder / parent).rmdir()
                except OSError:
                    break

    def _match(self, name: str, expected: int | None) -> int:
        found = self.generation(name)
        if expected is not None and found != expected:
            raise GenerationMismatch(f"{name}: {found}, not {expected}")
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, over all processes."""
        with open(self._uploads / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Upload(io.BytesIO):
    """An object that is being written; like gcsfs's, it is there once closed, be it by an exception."""

    def __init__(self, objects: Objects, name: str):
        super().__init__()
        self._objects, self._name = objects, name

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._objects.write(self._name, content)


class BucketBackend(backend.Backend):
    """What `epath` asks of a file system, answered as gcsfs 2026.10 answers it: no dates, `iterdir` of an object is the
    object, an absent prefix is not found. What gcsfs fakes or gets wrong is refused: append (it overwrites), rename (it
    copies), walk. One thing is missing: it keeps what it listed, unless fsspec's `use_listings_cache` is off.
    """

    def __init__(self, objects: Objects):
        self._objects = objects

    def open(self, path, mode):
        name, kind = self._name(path), mode.replace("b", "")
        if kind == "r":
            file: Any = io.BytesIO(self._objects.read(name)[0])  # no file descriptor: nothing to map or lock
        elif kind == "w":
            self._objects.path(name)
            file = _Upload(self._objects, name)
        else:
            raise io.UnsupportedOperation(f"{path}: objects cannot be opened with mode {mode!r}")
        return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

    def exists(self, path):
        return self._local(path).exists()

    def isdir(self, path):
        return self._local(path).is_dir()

    def listdir(self, path):
        local = self._local(path)
        return [local.name] if local.is_file() else sorted(os.listdir(local))

    def glob(self, path):
        found = glob.glob(str(self._local(path)), include_hidden=True)
        return sorted(f"gs://{NAME}/{Path(name).relative_to(self._objects.folder).as_posix()}" for name in found)

    def walk(self, top, *, top_down=True, on_error=None):
        raise io.UnsupportedOperation(f"{top}: gcsfs walks folders without their gs://")

    def makedirs(self, path, *, exist_ok=False, mode=None):
        self.mkdir(path, exist_ok=True, mode=mode)

    def mkdir(self, path, *, exist_ok=False, mode=None):
        if mode not in (None, 0o777):
            raise NotImplementedError(f"{path}: buckets know no mode {mode:o}")
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)

    def rmtree(self, path):
        if not self.exists(path):
            raise FileNotFoundError(path)
        name = self._name(path)
        for found in [name] if self._local(path).is_file() else self._objects.names(f"{name}/" if name else ""):
            self._objects.delete(found)

    def remove(self, path):
        self._objects.delete(self._name(path))

    def rename(self, path, dst):
        raise io.UnsupportedOperation(f"{path}: objects cannot be renamed (to {dst})")

    def replace(self, path, dst):
        self.rename(path, dst)

    def copy(self, path, dst, overwrite):
        if not overwrite and gpath.PosixGPath(dst).exists():
            raise FileExistsError(dst)
        gpath.PosixGPath(dst).write_bytes(gpath.PosixGPath(path).read_bytes())

    def stat(self, path):
        found, folder = self._local(path).stat(), self.isdir(path)
        return stat_utils.StatResult(is_directory=folder, length=0 if folder else found.st_size, mtime=0)

    def _name(self, path) -> str:
        name, _, rest = os.fspath(path).removeprefix("gs://").partition("/")
        if name != NAME:
            raise FileNotFoundError(f"{path}: the only bucket here is gs://{NAME}")
        return rest.rstrip("/")

    def _local(self, path) -> Path:
        name = self._name(path)
        return self._objects.path(name) if name else self._objects.folder


class _Handler(BaseHTTPRequestHandler):
    """Objects get (whole, by range, by generation), list, media upload and delete of the Cloud Storage JSON API."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    page = 1000  # names in one answer to a list

    def do_GET(self):
        objects, name, query = self._asked()
        if objects is None:
            return self._answer(404)
        if not name:
            return self._list(objects, query)
        try:
            content, generation = objects.read(name)
        except FileNotFoundError:
            return self._answer(404)
        if query.get("ifGenerationNotMatch") == str(generation):
            return self._answer(304)
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self._answer(412)
        if query.get("alt") != "media":
            return self._answer(200, json.dumps(_resource(name, len(content), generation)).encode())
        headers = {"x-goog-generation": str(generation), "Content-Type": "application/octet-stream"}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            size = len(content)
            start, end = (int(first), int(last or size - 1)) if first else (max(size - int(last), 0), size - 1)
            end = min(end, size - 1)
            if start > end:
                return self._answer(416, headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{end}/{size}"
            return self._answer(206, content[start : end + 1], headers)
        return self._answer(200, content, headers)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        objects, _, query = self._asked()
        if objects is None or query.get("uploadType") != "media":
            return self._answer(404)
        expected = query.get("ifGenerationMatch")
        try:
            generation = objects.write(query["name"], content, None if expected is None else int(expected))
        except GenerationMismatch:
            return self._answer(412)
        return self._answer(200, json.dumps(_resource(query["name"], len(content), generation)).encode())

    def do_DELETE(self):
        objects, name, query = self._asked()
        if objects is None:
            return self._answer(404)
        expected = query.get("ifGenerationMatch")
        try:
            objects.delete(name, None if expected is None else int(expected))
        except GenerationMismatch:
            return self._answer(412)
        except FileNotFoundError:
            return self._answer(404)
        return self._answer(204)

    def _list(self, objects: Objects, query: dict[str, str]):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        names = [n for n in objects.names(prefix) if n >= start and (not end or n < end)]
        prefixes = set()
        if delimiter:
            cut = {n: n.find(delimiter, len(prefix)) for n in names}
            prefixes = {n[: cut[n] + 1] for n in names if cut[n] >= 0}
            names = [n for n in names if cut[n] < 0]
        names = [n for n in names if n > query.get("pageToken", "")]
        page = names[: min(int(query.get("maxResults", self.page)), self.page)]
        found: list[dict[str, str]] = []
        for name in page:
            try:
                found.append(_resource(name, objects.path(name).stat().st_size, objects.generation(name)))
            except FileNotFoundError:  # deleted meanwhile
                continue
        answer = {"kind": "storage#objects", "items": found, "prefixes": sorted(prefixes)}
        if len(page) < len(names):
            answer["nextPageToken"] = page[-1]
        return self._answer(200, json.dumps(answer).encode())

    def _asked(self) -> tuple[Objects | None, str, dict[str, str]]:
        """The bucket (None: there is none), the object's name and the query's parameters."""
        url = urlsplit(self.path)
        _, found, rest = url.path.partition(f"/storage/v1/b/{NAME}/o")
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        return (_served[-1] if found and _served else None), unquote(rest.removeprefix("/")), query

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(key, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def _resource(name: str, size: int, generation: int) -> dict[str, str]:
    kind = {"kind": "storage#object", "bucket": NAME, "metageneration": "1"}
    return {**kind, "name": name, "size": str(size), "generation": str(generation)}


_served: list[Objects] = []


@functools.cache
def _server_url() -> str:
    """Starts the server once a process: tensorstore keeps the address (and connections) it saw first."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def _google_cloud() -> dict[str, types.ModuleType]:
    """`google.cloud.storage`, as far as orbax uses it: to ask whether the bucket has real folders. It has none."""
    cloud, storage = types.ModuleType("google.cloud"), types.ModuleType("google.cloud.storage")
    flat = types.SimpleNamespace(name=NAME, hierarchical_namespace_enabled=False)
    storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: flat)  # type: ignore[attr-defined]
    cloud.storage = storage  # type: ignore[attr-defined]
    return {"google.cloud": cloud, "google.cloud.storage": storage}


@contextmanager
def bucket(folder: Path) -> Iterator[Objects]:
    """Within it `gs://bucket/` is the folder, which is made if need be; afterwards everything is as it was before."""
    objects = Objects(Path(folder).absolute())
    replaced = BucketBackend(objects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpath._PREFIX_TO_BACKEND, "gs", replaced)
        patch.setattr(gpath, "_GCS_BACKENDS", gpath._GCS_BACKENDS | {replaced})
        patch.setattr(gpath, "_is_tf_installed", lambda: False)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", _server_url())
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none needed")
        for name, module in _google_cloud().items():
            patch.setitem(sys.modules, name, module)
        _served.append(objects)
        try:
            yield objects
        finally:
            _served.remove(objects)
