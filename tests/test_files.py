"""Files are replaced whole, on a disk and in a bucket, and what needs a disk is on one wherever home is."""

import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from etils import epath
from etils.epath import backend, gpath

from gattn import files
from gattn.config import Config
from tests.bucket import bucket

PLACES = ("disk", "bucket")


def _place(place: str, folder: Path):
    """A context manager in which the place can be written to, and a folder there."""
    if place == "disk":
        return nullcontext(), str(folder)
    return bucket(folder), "gs://bucket/runs"


def _write_often(place: str, folder: Path, letter: str) -> None:
    context, root = _place(place, folder)
    with context:
        for i in range(30):
            files.write_atomically(files.as_path(root) / "config.json", letter * (100_000 + i))


def _read_often(place: str, folder: Path) -> int:
    """Reads as long as there is no file named `stop`; the number of different contents."""
    context, root = _place(place, folder)
    seen = set()
    with context:
        path = files.as_path(root) / "config.json"
        while not (path.parent / "stop").exists():
            content = path.read_text()
            assert len(content) >= 100_000
            assert set(content) in ({"a"}, {"b"}), "a mixture of two writes"
            seen.add((content[0], len(content)))
    return len(seen)


@pytest.mark.parametrize("place", PLACES)
def test_readers_see_one_write_or_another(place, tmp_path):
    folder = tmp_path / "home"
    context, root = _place(place, folder)
    spawn = multiprocessing.get_context("spawn")
    with context, ProcessPoolExecutor(4, mp_context=spawn) as pool:
        path = files.as_path(root) / "config.json"
        files.write_atomically(path, "a" * 100_000)
        readers = [pool.submit(_read_often, place, folder) for _ in range(2)]
        writers = [pool.submit(_write_often, place, folder, letter) for letter in "ab"]
        try:
            for writer in writers:
                writer.result(timeout=60)
        finally:
            files.write_atomically(path.parent / "stop", b"")
        assert sum(reader.result(timeout=60) for reader in readers) > 2, "nobody read while another wrote"
        assert sorted(found.name for found in path.parent.iterdir()) == ["config.json", "stop"]


@pytest.mark.parametrize("place", PLACES)
def test_write_makes_folders_and_takes_text_and_bytes(place, tmp_path):
    context, root = _place(place, tmp_path)
    with context:
        path = files.as_path(root) / "a" / "b" / "file"
        for content in ("σ²\n", b"\x00\xff"):
            files.write_atomically(path, content)
            assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.write_atomically(path, "new")
    monkeypatch.undo()
    (tmp_path / "folder" / "below").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        files.write_atomically(tmp_path / "folder", "new")
    assert path.read_text() == "old"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "result.json"]


def test_paths_on_disk_and_in_buckets(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert files.as_path("~/runs") == Path("/somewhere/runs")
    assert files.is_local(files.as_path("runs"))
    remote = files.as_path("gs://bucket/runs") / "a"
    assert not files.is_local(remote)
    assert str(remote) == os.fspath(files.as_path(remote)) == "gs://bucket/runs/a"


def test_home_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    assert files.home() == tmp_path
    assert files.cache() == tmp_path / "cache"
    assert files.run_directory(Config()).parent == tmp_path / "runs"
    monkeypatch.setenv("GATTN_HOME", "")
    assert files.home() == Path(".")
    monkeypatch.setenv("GATTN_HOME", "gs://bucket/me")
    assert str(files.run_directory(Config()).parent) == "gs://bucket/me/runs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache() == tmp_path / "xdg" / "gattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert files.cache() == Path("/somewhere/.cache/gattn")


def test_local_copy_fetches_once_for_each_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", "gs://bucket")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    on_disk = tmp_path / "text.txt"
    assert files.local_copy(on_disk, "any", 0) == on_disk
    with bucket(tmp_path / "bucket") as objects:
        remote = files.home() / "data" / "text.txt"
        remote.write_bytes(b"first")
        copy = files.local_copy(remote, "1", 5)
        assert files.is_local(copy)
        assert copy.read_bytes() == b"first"
        assert copy.name.endswith("text.txt")  # readers go by the suffix
        copy.write_bytes(b"fir")  # a damaged copy is fetched again
        assert files.local_copy(remote, "1", 5).read_bytes() == b"first"
        remote.write_bytes(b"second")
        assert files.local_copy(remote, "2", 6).read_bytes() == b"second"
        objects.delete("data/text.txt")
        assert files.local_copy(remote, "1", 5).read_bytes() == b"first"
        with pytest.raises(FileNotFoundError):
            files.local_copy(remote, "3", 5)
    assert len(list((tmp_path / "xdg" / "gattn" / "fetched").iterdir())) == 2


# The stand-in itself: were it a normal file system, nothing that passes in it would mean anything.


def test_bucket_neither_appends_nor_renames(tmp_path):
    with bucket(tmp_path / "bucket"):
        path = epath.Path("gs://bucket/run/metrics.jsonl")
        path.write_text("one\n")
        for mode in ("a", "ab"):
            with pytest.raises(io.UnsupportedOperation):
                path.open(mode)
        with pytest.raises(ValueError, match="mode"):
            path.open("r+")
        local = epath.Path(tmp_path / "local")
        local.write_text("two\n")
        for source in (path, path.parent, local):
            for move in (source.rename, source.replace):
                with pytest.raises(io.UnsupportedOperation):
                    move("gs://bucket/run/other")
        with pytest.raises(io.UnsupportedOperation):
            path.open("rb").fileno()
        assert path.read_text() == "one\n"
        assert [found.name for found in path.parent.iterdir()] == ["metrics.jsonl"]


def test_bucket_objects_appear_whole_on_close(tmp_path):
    with bucket(tmp_path / "bucket"):
        path = epath.Path("gs://bucket/object")
        with path.open("w") as file:
            file.write("new")
            file.flush()
            assert not path.exists()
        with path.open("w") as file, path.open() as reader:
            file.write("newer")
            file.flush()
            assert path.read_text() == "new"
            file.close()
            assert path.read_text() == "newer"
            assert reader.read() == "new"


def test_bucket_folders_are_prefixes(tmp_path):
    with bucket(tmp_path / "bucket"):
        folder = epath.Path("gs://bucket/run/checkpoints")
        folder.mkdir(parents=True)
        assert not folder.exists()
        with pytest.raises(FileNotFoundError):
            list(folder.iterdir())
        with pytest.raises(FileNotFoundError):
            folder.rmtree()
        (folder / "1" / "a").write_text("12345")  # needs no mkdir
        assert folder.is_dir()
        assert (folder / "1" / "a").stat().length == 5
        with pytest.raises(FileExistsError):
            folder.mkdir()
        assert list(folder.parent.glob("check*/1")) == [folder / "1"]
        with pytest.raises(FileNotFoundError):
            (folder / "1").unlink()
        (folder / "1" / "a").unlink()
        assert not folder.parent.exists(), "a prefix outlived its last object"
        assert list(epath.Path("gs://bucket").iterdir()) == []
    assert gpath._PREFIX_TO_BACKEND["gs"] is backend.fsspec_backend


def test_bucket_is_the_same_for_tensorstore(tmp_path, monkeypatch):
    import tensorstore

    monkeypatch.setattr("tests.bucket._Handler.page", 10)
    for content in (b"0123456789", b"abcdefghij"):  # the second bucket of a process is not the first
        with bucket(tmp_path / content.decode()) as objects:
            spec = {"driver": "gcs", "bucket": "bucket", "path": "run/"}
            store = tensorstore.KvStore.open(spec).result()
            assert store.read("x").result().state == "missing"
            written = store.write("x", content).result()
            assert epath.Path("gs://bucket/run/x").read_bytes() == content
            assert store.read("x").result().value == content
            epath.Path("gs://bucket/run/x").write_bytes(b"other")
            refused = store.write("x", b"mine", if_equal=written.generation).result()
            assert refused.generation != written.generation
            assert store.read("x").result().value == b"other"
            database = tensorstore.KvStore.open({"driver": "ocdbt", "base": {**spec, "path": "db/"}}).result()
            with tensorstore.Transaction() as transaction:  # one object, read by ranges
                for letter in content.decode():
                    database.with_transaction(transaction)[letter] = letter.encode() * 5000
            assert all(database[letter] == letter.encode() * 5000 for letter in content.decode())
            epath.Path("gs://bucket/db").rmtree()
            for i in range(25):  # more than a page
                store.write(f"y{i}", content).result()
            assert len(store.list().result()) == 26
            store.delete_range(tensorstore.KvStore.KeyRange("y", "z")).result()
            assert objects.names() == ["run/x"]
