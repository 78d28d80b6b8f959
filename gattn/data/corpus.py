"""The embedded corpus: the source files of Python's standard library, about 11 MB of real text wherever Python is.

A document is one `*.py` file. Left out are tests, installed packages, files written when Python was built or by the
site (they hold paths of one machine), files that are not UTF-8 (a few codec samples: no tokenizer of ours could give
them back), files without text, and every copy of an earlier file, so that no text stands on both sides of the split.
The corpus differs from one Python version to the next: its fingerprint says which one a run has seen.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gattn.config import ConfigError

HELD_OUT_SHARE = 0.08  # of the files, by hash of salt and path; of the bytes too (3.11 to 3.13)
_SALT = "0"  # chosen so that pydoc_data/topics.py, generated prose that is 7% of the library, is not half of held-out

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_SKIPPED_FILES = {"sitecustomize.py", "usercustomize.py"}
_BUILD_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Document:
    """One file: its path below the library's root, with forward slashes, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their paths. `fingerprint`: 16 hex digits of all paths and texts and of the split."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    fingerprint: str


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads the `*.py` files below `root` (default: this Python's standard library) and splits them by file.

    Raises:
      ConfigError: if there are too few sources to split, as in a Python whose library is a zip or only bytecode.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = list(_documents(root))
    train = tuple(d for d in documents if not _is_held_out(d.path))
    held_out = tuple(d for d in documents if _is_held_out(d.path))
    if not train or not held_out:
        raise ConfigError(
            "data.source",
            "corpus",
            f"{root} holds only {len(documents)} Python source files (a zipped or stripped standard library): "
            "use a Python that was installed with its sources, or name your own 'package.module:function'",
        )
    digest = hashlib.sha256()
    for side in (train, held_out):
        digest.update(b"split")
        for document in side:
            for part in (document.path, document.text):
                digest.update(hashlib.sha256(part.encode()).digest())
    return Corpus(train, held_out, digest.hexdigest()[:16])


def _documents(root: Path) -> Iterator[Document]:
    seen = set()
    for relative in sorted(_source_files(root)):
        try:
            text = (root / relative).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            yield Document(relative, text)


def _source_files(root: Path) -> Iterator[str]:
    for folder, children, names in os.walk(root):
        children[:] = [c for c in children if c not in _SKIPPED_FOLDERS and not c.startswith(_BUILD_PREFIXES)]
        for name in names:
            if name.endswith(".py") and name not in _SKIPPED_FILES and not name.startswith(_BUILD_PREFIXES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_held_out(path: str) -> bool:
    """By the path alone, so that a file stays on its side when others come and go."""
    return int.from_bytes(hashlib.sha256((_SALT + path).encode()).digest()[:8], "big") < HELD_OUT_SHARE * 2**64
