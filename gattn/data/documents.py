"""Users' files as documents: text, JSONL, Parquet, ArrayRecord; on a disk or in a bucket.

    .txt .text .md             a file is a document; one above 64 KiB is cut at line ends into pieces of about that
    .jsonl .ndjson             a line is a JSON object, its field is a document
    .parquet                   a value of the column is a document
    .array_record .arrayrecord a record is a document, or a JSON object whose field is one if the first record is that

A file is read in `Part`s, so that a big one is work for several processes; where parts meet does not change a document.
Text is UTF-8. Whatever is wrong is a ConfigError that names the file and the place in it.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gattn.config import ConfigError
from gattn.files import as_path, is_local, local_copy

PIECE = 1 << 16
_KINDS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".array_record", ".arrayrecord"), "array_record"),
}
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was found."""

    path: str
    size: int
    mtime: float

    @property
    def kind(self) -> str:
        """text, jsonl, parquet or array_record; by the name's ending."""
        return _KINDS[os.path.splitext(self.path)[1].lower()]


@dataclass(frozen=True)
class Part:
    """A range of a file: of its bytes, of its row groups (Parquet) or of its records (ArrayRecord)."""

    file: InputFile
    start: int
    stop: int
    size: int
    """Bytes, roughly those of its text."""


def find_files(names: Sequence[str], out: Path) -> list[InputFile]:
    """The files that paths, globs (`**` too) and folders name, each once; in folders those of a known kind, but for
    hidden ones and what lies in `out`.

    Raises:
      ConfigError: `files`, for what is not there, is empty or is of no known kind.
    """
    paths: dict[str, str] = {}
    for name in names:
        try:
            for path in _matches(name, out):
                paths.setdefault(os.path.realpath(path) if is_local(as_path(path)) else path, path)
        except OSError as error:
            raise ConfigError("files", name, f"cannot be read: {error}") from None
    return [_describe(path) for path in paths.values()]


def split_file(file: InputFile, field: str, unit: int) -> list[Part]:
    """Parts of about `unit` bytes. Looks at the beginning of the file, or at its schema.

    Raises:
      ConfigError: `files` or `field`, if the file is not what its name says or has no such field.
    """
    if file.kind == "text":
        with _reading(file), as_path(file.path).open("rb") as stream:
            _decode(file, stream.read(4096).rsplit(b"\n", 1)[0], 0, partial=True)
    elif file.kind == "jsonl":
        with _reading(file):
            next(_jsonl(Part(file, 0, file.size, file.size), field), None)
    elif file.kind == "parquet":
        return _row_groups(file, field, unit)
    else:
        return _record_ranges(file, field, unit)
    unit = -(-unit // PIECE) * PIECE
    return [Part(file, at, min(at + unit, file.size), min(unit, file.size - at)) for at in range(0, file.size, unit)]


def read_documents(part: Part, field: str) -> Iterator[str]:
    """The texts of a part in their order; "" where a row or line holds null.

    Raises:
      ConfigError: `files` or `field`, if the file has changed since it was found, or for what cannot be read.
    """
    if _describe(part.file.path) != part.file:
        _refuse(part.file, "changed while it was being prepared: run the command again")
    readers: dict[str, Callable[[Part, str], Iterator[str]]] = {
        "text": _text_pieces,
        "jsonl": _jsonl,
        "parquet": _parquet,
        "array_record": _array_record,
    }
    with _reading(part.file):
        yield from readers[part.file.kind](part, field)


# ---- finding ----------------------------------------------------------------------------------------------------


def _matches(name: str, out: Path) -> list[str]:
    path = as_path(name)
    if path.is_dir():
        found = sorted(_below(path, out))
        if not found:
            raise ConfigError("files", name, f"holds no files of a known kind ({', '.join(_KINDS)})")
        return found
    if glob.has_magic(name) and not path.exists():
        if is_local(path):
            found = sorted(f for f in glob.glob(os.fspath(path), recursive=True) if os.path.isfile(f))
        else:
            found = sorted(map(os.fspath, _remote_glob(name)))
        if not found:
            raise ConfigError("files", name, "matches no file: check the pattern (and quote it from the shell)")
    else:
        if not path.exists():
            raise ConfigError("files", name, "no such file or folder")
        found = [os.fspath(path)]
    if unknown := [f for f in found if not _is_known(f)]:
        raise ConfigError("files", unknown[0], f"of no known kind: give one of {', '.join(_KINDS)}")
    return found


def _below(folder: Path, out: Path) -> Iterator[str]:
    """Files of known kinds in a folder and in its folders."""
    above = {folder.resolve(), *folder.resolve().parents} if is_local(folder) else set()
    for path in folder.iterdir():
        if path.name.startswith(".") or _is_same(path, out):
            continue
        if _is_folder(path):
            if not above or path.resolve() not in above:  # a link that leads back up has no end
                yield from _below(path, out)
        elif _is_known(path.name):
            yield os.fspath(path)


def _is_folder(path: Path) -> bool:
    """In a bucket it takes a request to know, which what is named like a file is spared."""
    return (is_local(path) or not _is_known(path.name)) and path.is_dir()


def _is_same(path: Path, out: Path) -> bool:
    return is_local(path) == is_local(out) and (path.resolve() == out.resolve() if is_local(path) else path == out)


def _remote_glob(name: str) -> Iterable[Path]:
    """A bucket's pattern, from its first folder with a wildcard on; `**` is refused by the file system."""
    parts = name.split("/")
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    try:
        return list(as_path("/".join(parts[:fixed])).glob("/".join(parts[fixed:])))
    except NotImplementedError:
        raise ConfigError("files", name, "** does not work in a bucket: name the folder, or use *") from None


def _is_known(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in _KINDS


def _describe(path: str) -> InputFile:
    try:
        found: Any = as_path(path).stat()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ConfigError("files", path, "no such file" if missing else f"cannot be read: {error}") from None
    size = found.st_size if isinstance(found, os.stat_result) else found.length
    if not size:
        raise ConfigError("files", path, "the file is empty: leave it out")
    return InputFile(path, size, found.st_mtime if isinstance(found, os.stat_result) else found.mtime)


# ---- errors -----------------------------------------------------------------------------------------------------


class _reading:
    """Turns what goes wrong with a file into a ConfigError that names it."""

    def __init__(self, file: InputFile):
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (OSError, RuntimeError, ValueError)) and not isinstance(error, ConfigError):
            raise ConfigError("files", self.file.path, f"cannot be read, it may be damaged: {error}") from error


def _refuse(file: InputFile, remedy: str) -> NoReturn:
    raise ConfigError("files", file.path, remedy)


def _decode(file: InputFile, content: bytes, position: int, partial: bool = False) -> str:
    """`position`: where in the file the content begins. `partial`: its last character may be cut."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if partial and error.reason == "unexpected end of data":
            return content[: error.start].decode("utf-8")
        offset = position + error.start
        _refuse(file, f"not UTF-8 at byte {offset:,} ({error.reason}): convert it, e.g. with iconv")


def _line_number(file: InputFile, position: int) -> int:
    with as_path(file.path).open("rb") as stream:
        blocks = (stream.read(min(1 << 20, position - at)) for at in range(0, position, 1 << 20))
        return 1 + sum(block.count(b"\n") for block in blocks)


# ---- text -------------------------------------------------------------------------------------------------------


def _text_pieces(part: Part, _: str) -> Iterator[str]:
    """Piece k of a file lies between its cuts k and k + 1; so pieces do not depend on where parts begin."""
    with as_path(part.file.path).open("rb") as stream:
        stream.seek(part.start)
        block = stream.read(PIECE)
        begin = _cut(block) if part.start else len(_UTF8_BOM) * block.startswith(_UTF8_BOM)
        for position in range(part.start, part.stop, PIECE):
            following = stream.read(PIECE)
            cut = _cut(following)
            if piece := block[begin:] + following[:cut]:
                yield _decode(part.file, piece, position + begin)
            block, begin = following, cut


def _cut(block: bytes) -> int:
    """Where a piece ends in the block after its own: behind the first line end, else at the end of the file, or else
    between two characters."""
    if (end := block.find(b"\n") + 1) or len(block) < PIECE:
        return end or len(block)
    return next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def _jsonl(part: Part, field: str) -> Iterator[str]:
    """The lines that begin inside the part."""
    with as_path(part.file.path).open("rb") as stream:
        position = part.start
        if position:
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        for line in stream:
            if position >= part.stop:
                return
            start, position = position, position + len(line)
            line = line.removeprefix(_UTF8_BOM) if not start else line
            if line.strip():
                where = lambda start=start: f"line {_line_number(part.file, start)}"  # noqa: E731
                yield _field_of_json(part.file, _decode(part.file, line, start), field, where)


def _field_of_json(file: InputFile, line: str, field: str, where: Callable[[], str]) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"{where()} is not JSON ({error}): correct or remove it")
    if not isinstance(row, dict):
        _refuse(file, f"{where()} is no JSON object with fields but a {type(row).__name__}: correct or remove it")
    if field not in row:
        fields = ", ".join(row) or "none"
        raise ConfigError("field", field, f"{where()} of {file.path} has no such field; it has: {fields}")
    return _text(file, row[field], field, where)


def _text(file: InputFile, value: Any, field: str, where: Callable[[], str]) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ConfigError("field", field, f"{where()} of {file.path} holds no text there but a {kind}: name another")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(file, f"{where()} holds half of a surrogate pair, which is no character: correct or remove it")
    return value


# ---- Parquet ----------------------------------------------------------------------------------------------------


def _row_groups(file: InputFile, field: str, unit: int) -> list[Part]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(file), as_path(file.path).open("rb") as stream:
        table = pq.ParquetFile(stream)
        schema = table.schema_arrow
        if field not in schema.names:
            columns = ", ".join(schema.names)
            raise ConfigError("field", field, f"{file.path} has no such column; it has: {columns}")
        kind = schema.field(field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise ConfigError("field", field, f"that column of {file.path} holds no text but {kind}: name another")
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        number = next(i for i in range(table.metadata.num_columns) if table.schema.column(i).path == field)
        sizes = [group.column(number).total_uncompressed_size for group in groups]
    if not sum(group.num_rows for group in groups):
        _refuse(file, "the file has no rows: leave it out")
    parts, first = [], 0
    for i in range(len(sizes)):
        if i + 1 == len(sizes) or sum(sizes[first : i + 2]) > unit:
            parts.append(Part(file, first, i + 1, sum(sizes[first : i + 1])))
            first = i + 1
    return parts


def _parquet(part: Part, field: str) -> Iterator[str]:
    import pyarrow.parquet as pq

    with as_path(part.file.path).open("rb") as stream:
        table = pq.ParquetFile(stream)
        row = sum(table.metadata.row_group(i).num_rows for i in range(part.start))
        groups = list(range(part.start, part.stop))
        for batch in table.iter_batches(256, row_groups=groups, columns=[field], use_threads=False):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _text(part.file, value, field, lambda row=row: f"row {row}")  # type: ignore[misc]


# ---- ArrayRecord ------------------------------------------------------------------------------------------------


def _open_records(file: InputFile) -> Any:
    from array_record.python import array_record_module

    path = local_copy(as_path(file.path), f"{file.size} {file.mtime}", file.size)
    reader = array_record_module.ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0,max_parallelism:0")
    if not reader.num_records():
        _refuse(file, "no ArrayRecord file, a damaged one, or one without records")
    return reader


def _record_ranges(file: InputFile, field: str, unit: int) -> list[Part]:
    next(_array_record(Part(file, 0, 1, 0), field))
    count = _open_records(file).num_records()
    bounds = [*range(0, count, max(1, count * unit // file.size)), count]
    return [Part(file, a, b, file.size * (b - a) // count) for a, b in itertools.pairwise(bounds)]


def _array_record(part: Part, field: str) -> Iterator[str]:
    with _reading(part.file):
        reader = _open_records(part.file)
        first = _decode(part.file, reader.read(0, 1)[0], 0)
        is_json = _is_object(first)
        for number in range(part.start, part.stop):
            text = _decode_record(part.file, reader.read(number, number + 1)[0], number)
            where = lambda number=number: f"record {number}"  # noqa: E731
            yield _field_of_json(part.file, text, field, where) if is_json else text


def _decode_record(file: InputFile, record: bytes, number: int) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(file, f"record {number} is not UTF-8 at its byte {error.start} ({error.reason})")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
