"""Users' files to tokens: every kind of file and tokenizer, every error, interruptions, the reader of the result."""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from gattn.__main__ import main
from gattn.config import ConfigError
from gattn.data import documents, plan, records
from gattn.data.documents import Part, find_files, read_documents, split_file
from gattn.data.plan import make_units
from gattn.data.prepare import _whole_start, prepare
from gattn.data.records import BLOCK, Shard, ShardWriter, TokenStream, open_prepared
from gattn.data.tokenizer import agrees, fast_encoder, parse_tokenizer, read_tokenizer

ROOT = Path(__file__).parents[1]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "def größe(x):\n\treturn x ** 2  # 尺寸 🙂👩‍👩‍👧\r\n\r\n",
    "<|bos|> <s>x</s> <|endoftext|> [CLS] are text here",
    "  three   spaces    and\n\n\n\nempty lines \n",
    "It's we'll they'VE 12345 1,000.50 e\u0301 \u00e9 \x00 \ufeff",
]


def sources(count: int, size: int = 3000) -> list[str]:
    """Different texts of about that many characters, cut from this file and numbered."""
    text = Path(__file__).read_text(encoding="utf-8")
    return [f"# {i}\n{text[i * 97 % 9000 :][:size]}" for i in range(count)]


def run(files, out, console=None, **changes) -> Path:
    options = {"tokenizer": "bytes", "vocab_size": 300, "bos": None, "field": "text", "held_out": 0.3, "workers": 1}
    console = console or Console(file=io.StringIO())
    return prepare([os.fspath(f) for f in files], out, **(options | changes), console=console)


def write(path: Path, texts: list[str], field="text") -> Path:
    """The texts as a file of the kind that the path's ending names; a text file for each where that is a folder."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"n": 1, field: t}) + "\n\n" for t in texts), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(len(texts)), field: texts}), path, row_group_size=7)
    elif path.suffix == ".array_record":
        writer = ArrayRecordWriter(os.fspath(path), "group_size:1")
        for text in texts:
            writer.write(text.encode())
        writer.close()
    else:
        path.mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(texts):
            (path / f"{i:03d}.txt").write_bytes(text.encode())
    return path


def documents_of(stream: TokenStream, tokenizer) -> list[str]:
    ids = stream[:]
    starts = np.flatnonzero(ids == tokenizer.bos_id)
    assert not len(ids) or starts[0] == 0
    return [tokenizer.decode(part[1:]) for part in np.split(ids, starts[1:])] if len(ids) else []


def all_documents(folder: Path) -> list[str]:
    prepared = open_prepared(folder)
    return [d for s in (prepared.train, prepared.held_out) for d in documents_of(s, prepared.tokenizer)]


def is_held_out(text: str, share: float) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 < share


# ---- documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "a.jsonl", "a.parquet", "a.array_record"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_streams_are_the_documents_with_bos_before_each(kind, tokenizer, tmp_path):
    texts = [*TEXTS, *sources(40), "", "  \n", *TEXTS[:1]]
    texts = [t for t in texts if t] if kind == "folder" else texts  # an empty file is refused, an empty row left out
    kept = [t for t in texts if t.strip()]
    out = run([write(tmp_path / kind, texts)], tmp_path / "out", tokenizer=tokenizer)
    prepared = open_prepared(out)
    for stream, side in ((prepared.train, False), (prepared.held_out, True)):
        found = documents_of(stream, prepared.tokenizer)
        assert found == [t for t in kept if is_held_out(t, 0.3) == side]
    index = json.loads((out / "index.json").read_text())
    assert index["bytes"] == index["token_bytes"] == sum(len(t.encode()) for t in kept)
    assert index["empty_documents"] == len(texts) - len(kept)
    assert sum(index["documents"].values()) == len(kept)
    assert index["encoder"] == {"bytes": "bytes", "bpe": "tiktoken"}[tokenizer]
    np.testing.assert_array_equal(prepared.token_bytes, prepared.tokenizer.token_bytes)


text_file = st.lists(st.text(st.sampled_from("a🙂é \n\r"), max_size=30)).map("".join).map(str.encode).filter(len)


@given(text_file, st.integers(1, 8), st.integers(1, 16))
@example("🙂".encode() * 20, 1, 3)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_text_file_read_in_ranges_is_the_file_read_whole(tmp_path, content, unit, piece):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", piece * 4)
        (file,) = find_files([str(path)], tmp_path / "out")
        parts = split_file(file, "text", unit)
        pieces = [text for part in parts for text in read_documents(part, "text")]
        whole = list(read_documents(Part(file, 0, file.size, file.size), "text"))
    assert pieces == whole
    assert "".join(pieces).encode() == content
    assert all(len(p.encode()) <= 8 * piece for p in pieces)
    assert sum(part.size for part in parts) == file.size
    if len(content) <= 4 * piece:
        assert len(whole) == 1
    ends_with_line = [p.endswith("\n") for p in pieces[:-1]]
    assert all(ends_with_line) or max(map(len, content.split(b"\n"))) >= 4 * piece


@given(st.lists(st.text(st.sampled_from("a🙂\n\r \u2028"), max_size=20)), st.integers(1, 40), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_jsonl_read_in_ranges_is_the_file_read_whole(tmp_path, texts, cut, crlf):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": t}, ensure_ascii=not crlf) for t in texts]
    path.write_bytes(("\r\n" if crlf else "\n").join([*rows, '{"text": null}']).encode())
    (file,) = find_files([str(path)], tmp_path / "out")
    bounds = [*range(0, file.size, cut), file.size]
    parts = [Part(file, a, b, b - a) for a, b in itertools.pairwise(bounds)]
    assert [t for part in parts for t in read_documents(part, "text")] == [*texts, ""]


@pytest.mark.parametrize("kind", ["a.parquet", "a.array_record"])
def test_a_table_read_in_ranges_is_the_table_read_whole(kind, tmp_path):
    texts = sources(30)
    (file,) = find_files([str(write(tmp_path / kind, texts))], tmp_path / "out")
    parts = split_file(file, "text", 4000)
    assert len(parts) > 3
    assert [t for part in parts for t in read_documents(part, "text")] == texts


def test_array_records_of_json_give_their_field(tmp_path):
    texts = sources(30)
    path = write(tmp_path / "a.arrayrecord.array_record", [json.dumps({"body": t}) for t in texts])
    assert sorted(all_documents(run([path], tmp_path / "out", field="body"))) == sorted(texts)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    read = [next(read_documents(Part(f, 0, f.size, 0), "text")) for f in find_files([str(tmp_path)], tmp_path / "out")]
    assert read == ["one", "two"]


def test_files_are_found_by_path_glob_and_folder_each_once(tmp_path):
    for name in ("a/1.txt", "a/b/2.md", "a/b/3.JSONL", "a/.git/4.txt", "a/out/5.txt", "a/notes.pdf", "a/[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def found(*names):
        files = find_files([f"{tmp_path}/{name}" for name in names], tmp_path / "a/out")
        return [str(Path(f.path).relative_to(tmp_path)) for f in files]

    assert found("a") == ["a/1.txt", "a/[x].txt", "a/b/2.md", "a/b/3.JSONL"]
    assert found("a/b/*", "a/b") == ["a/b/2.md", "a/b/3.JSONL"]
    assert found("a/**/*.txt", "a/1.txt") == ["a/1.txt", "a/[x].txt", "a/out/5.txt"]
    assert found("a/[x].txt") == ["a/[x].txt"]
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    (tmp_path / "a/b/linked").symlink_to(tmp_path / "a/.git")
    assert found("a/b") == ["a/b/2.md", "a/b/3.JSONL", "a/b/linked/4.txt"]


# ---- the reader -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Shards of awkward lengths, written in awkward portions, and the array they are."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    shards, arrays = [], []
    for i, length in enumerate((1, 3 * BLOCK, BLOCK - 1, 70 * BLOCK + 5, 2 * BLOCK + 1)):
        ids = rng.integers(0, 2**16, length)
        writer = ShardWriter(folder / f"{i}.array_record", np.dtype(np.uint16))
        for portion in np.array_split(ids, 7):
            writer.add(portion)
        done = writer.finish()
        assert done["sha256"] == hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest()
        shards.append(Shard(folder / done["name"], done["tokens"], done["size"], done["sha256"]))
        arrays.append(ids)
    return TokenStream(shards, np.dtype(np.uint16)), np.concatenate(arrays)


def test_slices_are_those_of_the_concatenated_shards(stream):
    tokens, whole = stream
    assert len(tokens) == len(whole)
    place = st.one_of(st.none(), st.integers(-len(whole) - 9, len(whole) + 9), st.integers(0, 6 * BLOCK + 9))

    @given(place, place)
    @settings(max_examples=150, deadline=None)
    def check(start, stop):
        part = tokens[start:stop]
        assert part.dtype == np.uint16
        assert part.ndim == 1
        np.testing.assert_array_equal(part, whole[start:stop])

    check()
    with pytest.raises(IndexError, match="contiguous"):
        tokens[::2]


def test_threads_and_copies_read_the_same(stream, monkeypatch):
    monkeypatch.setattr(records, "_OPEN_SHARDS", 2)  # readers come and go
    tokens, whole = stream
    copy = pickle.loads(pickle.dumps(tokens))
    starts = random.Random(0).sample(range(len(whole)), 400)

    def check(start):
        return np.array_equal(copy[start : start + 3000], whole[start : start + 3000])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, starts))


def test_only_the_blocks_that_are_needed_are_read(stream, monkeypatch):
    tokens, whole = stream
    tokens = pickle.loads(pickle.dumps(tokens))
    opened, read = [], []

    class Reader:
        def __init__(self, path, options):
            opened.append(Path(path).name)
            self._reader = ArrayRecordReader(path, options)
            self.num_records = self._reader.num_records

        def read(self, first, last):
            read.append((first, last))
            return self._reader.read(first, last)

    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordReader", Reader)
    start = 1 + 4 * BLOCK - 1  # where the fourth shard begins
    np.testing.assert_array_equal(
        tokens[start + 50 * BLOCK : start + 51 * BLOCK + 1], whole[start + 50 * BLOCK :][: BLOCK + 1]
    )
    assert (opened, read) == (["3.array_record"], [(50, 52)])


@pytest.fixture(scope="module")
def ready(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ready")
    return run([write(folder / "in.jsonl", sources(60))], folder / "out", tokenizer="bpe")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def scribble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder"),
        (lambda folder: (folder / "index.json").unlink(), "interrupted: the same prepare command goes on"),
        (lambda folder: [f.unlink() for f in folder.glob("*.json")], "no prepared data"),
        (lambda folder: (folder / "index.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "index.json").write_text('{"format": 2}'), "format 1"),
        (lambda folder: (folder / "index.json").write_text('{"format": 1}'), "damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "damaged"),
        (lambda folder: (folder / "train-00000.array_record").unlink(), "train-00000.array_record is not there"),
        (lambda folder: cut(folder / "train-00000.array_record"), "bytes"),
        (lambda folder: scribble(folder / "train-00000.array_record"), "damaged"),
    ],
)
def test_a_folder_that_cannot_be_used_says_so(damage, words, ready, tmp_path):
    folder = shutil.copytree(ready, tmp_path / "copy")
    assert len(open_prepared(folder).train[:]) > 0
    damage(folder)
    with pytest.raises(ConfigError, match=words) as error:
        open_prepared(folder).train[:]
    assert error.value.field == "data.source"
    assert str(folder) in str(error.value.value)


def test_what_is_missing_in_a_finished_folder_is_made_again(tmp_path):
    files = [write(tmp_path / "in.jsonl", sources(30))]
    out = run(files, tmp_path / "out")
    before = open_prepared(out)
    (out / "train-00000.array_record").unlink()
    (out / ".train-00000.array_record.0.part").write_text("left by a killed process")
    run(files, out)
    assert documents_of(open_prepared(out).train, before.tokenizer) == documents_of(before.train, before.tokenizer)
    assert not list(out.glob(".*.part"))


# ---- tokenizers of others ---------------------------------------------------------------------------------------


def trained(model, trainer, *, pre_tokenizer=None, normalizer=None, decoder=None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder or decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(sources(40), trainer)
    return tokenizer


def bpe_trainer(*special, **changes):
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} | changes
    return trainers.BpeTrainer(vocab_size=600, special_tokens=[*special], show_progress=False, **options)


def gpt2():
    return trained(
        models.BPE(), bpe_trainer("<|endoftext|>"), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)
    )


def llama3(normalizer=None):
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    both = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = trained(models.BPE(ignore_merges=True), bpe_trainer(), pre_tokenizer=both, normalizer=normalizer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return tokenizer


def qwen():
    tokenizer = llama3(normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def llama2():
    letters = {c for t in sources(40) for c in t} - {"🙂"}
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = bpe_trainer("<unk>", "<s>", "</s>", *byte_tokens, initial_alphabet=[*letters])
    metaspace = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = trained(models.BPE(byte_fallback=True, unk_token="<unk>"), trainer, normalizer=metaspace)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [t for t in settings["added_tokens"] if t["content"] not in byte_tokens]
    settings["decoder"] = {"type": "ByteFallback"}
    return tokenizers.Tokenizer.from_str(json.dumps(settings))


def unigram():
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer = trained(
        models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=99)
    return tokenizer


def wordpiece():
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
        decoder=decoders.WordPiece(),
    )


def lower_case():
    tokenizer = gpt2()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


FOREIGN = {f.__name__: f for f in (gpt2, llama3, qwen, llama2, unigram, wordpiece, lower_case)}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The file of each kind of tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def path(kind: str) -> Path:
        file = folder / kind / "tokenizer.json"
        if not file.exists():
            file.parent.mkdir()
            FOREIGN[kind]().save(str(file))
        return file

    return path


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "llama2", "unigram"])
def test_pieces_of_others_are_the_bytes_of_the_text(kind, foreign):
    tokenizer = read_tokenizer(foreign(kind))
    known = (
        [sources(1)[0][:800]] if kind == "unigram" else [*TEXTS, *sources(3)]
    )  # its letters are those of its training
    for text in known:
        ids = tokenizer.encode(text)
        expected = {"llama2": " " + text, "unigram": " " + text, "qwen": text.replace("e\u0301", "\u00e9")}.get(
            kind, text
        )
        assert tokenizer.decode(ids) == expected
        assert tokenizer.token_bytes[ids].sum() == len(expected.encode())
        assert tokenizer.bos_id not in ids
    assert tokenizer.token_bytes[tokenizer.bos_id] == 0
    assert tokenizer.token_bytes.max() > 3


@pytest.mark.parametrize("kind", FOREIGN)
def test_special_tokens_in_text_are_text(kind, foreign):
    tokenizer = read_tokenizer(foreign(kind))
    special = [t["content"] for t in json.loads(tokenizer.definition)["added_tokens"] if t["special"]]
    control = [i for i, piece in enumerate(tokenizer.pieces) if not piece]
    for token in (t for t in special if t not in ("<unk>", "[UNK]")):
        ids = tokenizer.encode(f"a {token} b{token}")
        assert len(ids) > 5
        assert not set(ids.tolist()) & (set(control) - {0})  # 0 is the unknown token of some


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen"])
def test_tiktoken_gives_the_same_ids(kind, foreign):
    tokenizer = read_tokenizer(foreign(kind))
    fast = fast_encoder(tokenizer)
    assert fast.encoder == "tiktoken"
    assert fast.fingerprint == tokenizer.fingerprint
    assert agrees(tokenizer, fast, [*TEXTS, *sources(30), "a <tool> b", ""])
    spaces = " " * 1_500_000  # more than its regular expressions can take
    np.testing.assert_array_equal(fast.encode(spaces), tokenizer.encode(spaces))

    @given(st.text())
    @settings(max_examples=200, deadline=None)
    def check(text):
        np.testing.assert_array_equal(fast.encode(text), tokenizer.encode(text))

    check()


def shuffled_merges(settings):
    settings["model"]["merges"].reverse()


def prefix_space(settings):
    settings["pre_tokenizer"]["add_prefix_space"] = True


def dropout(settings):
    settings["model"]["dropout"] = 0.1


def without_byte(settings):
    settings["model"]["vocab"].pop("Ā")


@pytest.mark.parametrize("change", [shuffled_merges, prefix_space, dropout, without_byte])
def test_what_tiktoken_would_do_otherwise_is_left_to_tokenizers(change, foreign):
    settings = json.loads(foreign("gpt2").read_text())
    change(settings)
    assert fast_encoder(parse_tokenizer(json.dumps(settings))) is None


@pytest.mark.parametrize("kind", ["llama2", "unigram", "wordpiece", "lower_case"])
def test_tiktoken_does_not_take_other_models(kind, foreign):
    assert fast_encoder(read_tokenizer(foreign(kind))) is None


def test_encoders_that_differ_on_the_text_are_told_apart(foreign):
    one, other = read_tokenizer(foreign("gpt2")), read_tokenizer(foreign("llama3"))
    assert not agrees(one, other, sources(2))


@pytest.mark.parametrize(
    ("kind", "encoder", "counts_bytes"),
    [
        ("qwen", "tiktoken", True),
        ("llama2", "tokenizers", True),
        ("wordpiece", "tokenizers", False),
        ("lower_case", "tokenizers", False),
    ],
)
def test_bytes_are_counted_only_where_pieces_are_the_text(kind, encoder, counts_bytes, foreign, tmp_path):
    out = run([write(tmp_path / "in.jsonl", sources(20))], tmp_path / "out", tokenizer=str(foreign(kind).parent))
    prepared = open_prepared(out)
    assert json.loads((out / "index.json").read_text())["encoder"] == encoder
    assert (prepared.token_bytes is not None) == counts_bytes
    assert prepared.tokenizer.fingerprint == read_tokenizer(foreign(kind)).fingerprint
    assert (out / "tokenizer.json").read_text() == foreign(kind).read_text()
    assert len(prepared.train) > 5 * 3000 / 5
    assert prepared.train[:].max() < prepared.tokenizer.vocab_size


def test_bos_is_what_the_user_says_or_a_known_one(foreign):
    assert read_tokenizer(foreign("llama3")).pieces[-2:] == (b"", b"")
    ids = {bos: read_tokenizer(foreign("llama3"), bos).bos_id for bos in (None, "<|begin_of_text|>", "<|end_of_text|>")}
    assert ids[None] == ids["<|begin_of_text|>"] == ids["<|end_of_text|>"] - 1
    with pytest.raises(ConfigError, match=re.escape("<|begin_of_text|>, <|end_of_text|>")) as error:
        read_tokenizer(foreign("llama3"), "<s>")
    assert error.value.field == "bos"
    settings = json.loads(foreign("llama3").read_text()) | {"added_tokens": []}
    with pytest.raises(ConfigError, match="no special token"):
        parse_tokenizer(json.dumps(settings))


# ---- errors -----------------------------------------------------------------------------------------------------


def latin(folder):
    text = b"fine\n" * 20_000
    (folder / "a.txt").write_bytes(text + "größe".encode("latin-1"))
    return 100_002


def jsonl(*lines):
    return lambda folder: (folder / "a.jsonl").write_text("\n".join(['{"text": "x"}'] * 3 + [*lines]))


def parquet(**columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / "a.parquet")


def array_records(*texts):
    return lambda folder: write(folder / "a.array_record", [*texts])


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("make", "name", "field", "words"),
    [
        (lambda folder: None, "a.txt", "files", "no such file"),
        (lambda folder: None, "*.txt", "files", "matches no file"),
        (lambda folder: None, "", "files", "holds no files of a known kind"),
        (content("a.pdf", b"x"), "a.pdf", "files", r"\.jsonl"),
        (content("a.txt", b""), "a.txt", "files", "empty"),
        (content("a.jsonl", b""), "", "files", "empty"),
        (latin, "a.txt", "files", "not UTF-8 at byte 100,002"),
        (content("a.txt", "größe".encode("utf-16")), "a.txt", "files", "not UTF-8 at byte 0 "),
        (jsonl("{'text': 1}"), "a.jsonl", "files", "line 4 is not JSON"),
        (jsonl("", "[1]"), "a.jsonl", "files", "line 5 is no JSON object"),
        (
            jsonl('{"body": "x", "id": 1}'),
            "a.jsonl",
            "field",
            "line 4 of .*a.jsonl has no such field; it has: body, id",
        ),
        (jsonl('{"text": 7}'), "a.jsonl", "field", "line 4 of .*a.jsonl holds no text there but a int"),
        (jsonl('{"text": "\\ud800"}'), "a.jsonl", "files", "line 4 holds half of a surrogate pair"),
        (content("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}'), "a.jsonl", "files", "not UTF-8 at byte 25"),
        (content("a.jsonl", b'{"text": null}\n{"text": " "}'), "a.jsonl", "files", "every document is empty"),
        (parquet(body=["x"], n=[1]), "a.parquet", "field", "no such column; it has: body, n"),
        (parquet(text=[1, 2]), "a.parquet", "field", "holds no text but int64"),
        (parquet(text=pa.array([], pa.string())), "a.parquet", "files", "no rows"),
        (content("a.parquet", b"PAR1 not really"), "a.parquet", "files", "may be damaged"),
        (content("a.array_record", b"not really"), "a.array_record", "files", "no ArrayRecord file"),
        (array_records('{"body": "x", "id": 1}'), "a.array_record", "field", "no such field; it has: body, id"),
    ],
)
def test_files_that_cannot_be_used_are_named(make, name, field, words, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    with pytest.raises(ConfigError, match=words) as error:
        run([folder / name if name else folder], tmp_path / "out")
    assert error.value.field == field
    assert str(folder) in str(error.value) or "every document" in words


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"held_out": 0.0}, "held_out", "between 0 and 1"),
        ({"held_out": 1.0}, "held_out", "between 0 and 1"),
        ({"workers": 0}, "workers", "at least 1"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "vocab_size", "at least 257"),
        ({"tokenizer": "bpe", "bos": "<s>"}, "bos", "leave it out"),
        ({"tokenizer": "nowhere.json"}, "tokenizer", "No such file"),
        ({"tokenizer": "in.jsonl"}, "tokenizer", "cannot be read as a tokenizer"),
        ({"tokenizer": "."}, "tokenizer", "No such file"),
        ({"out": "in.jsonl"}, "out", "cannot be written"),
        ({"out": "."}, "out", "holds other files"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    changes, field, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), TEXTS)
    with pytest.raises(ConfigError, match=words) as error:
        run(["in.jsonl"], Path(changes.pop("out", "out")), **changes)
    assert error.value.field == field
    assert not Path("out").exists()
    assert [p.name for p in Path().iterdir() if not p.name.startswith(".")] == ["in.jsonl"]


@pytest.mark.parametrize(("held_out", "other"), [(1e-6, 0), (1 - 1e-6, 1)])
def test_a_split_without_documents_is_refused_with_a_share_that_works(held_out, other, tmp_path):
    files = [write(tmp_path / "in.jsonl", TEXTS)]
    with pytest.raises(ConfigError, match=r"--held-out (above|below)") as error:
        run(files, tmp_path / "out", held_out=held_out)
    assert not (tmp_path / "out/index.json").exists()
    share = float(re.search(r"--held-out (?:above|below) ([.\d]+)", error.value.remedy)[1])
    run(files, tmp_path / "other", held_out=share + (1e-4 if other == 0 else -1e-4))


def test_after_an_error_the_same_folder_can_be_used(tmp_path):
    """An input that was put right, a share that was raised: nothing was made of the old plan, or it came to nothing."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"other": 1}\n')
    with pytest.raises(ConfigError, match="other"):
        run([path], tmp_path / "out", tokenizer="bytes")
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    with pytest.raises(ConfigError, match="--held-out above"):
        run([path], tmp_path / "out", tokenizer="bytes", held_out=1e-6)
    (tmp_path / "one").mkdir()
    for text in ("\n", "a single one"):  # no text, and then one document, which no share could split
        (tmp_path / "one" / "a.txt").write_text(text)
        with pytest.raises(ConfigError, match="every document is empty" if text == "\n" else "give at least two"):
            run([tmp_path / "one"], tmp_path / "out", tokenizer="bytes")
    folder = run([path], tmp_path / "out", tokenizer="bytes", held_out=0.5)
    assert sorted(all_documents(folder)) == sorted(f"document {i}" for i in range(40))


@pytest.mark.parametrize("name", ["a,b", "a=1"])
def test_a_folder_that_would_be_read_as_a_mixture_is_refused(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="mixture"):
        run([tmp_path / "a.txt"], tmp_path / name, tokenizer="bytes")
    assert not (tmp_path / name).exists()


def test_a_plan_that_differs_is_refused_and_says_how(tmp_path):
    path = write(tmp_path / "in.jsonl", sources(20))
    out = run([path], tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ConfigError, match=r"held_out was 0.3 and is 0.25.*another --out"):
        run([path], out, held_out=0.25)
    with pytest.raises(ConfigError, match=r"tokenizer was bytes and is bpe"):
        run([path], out, tokenizer="bpe")
    with pytest.raises(ConfigError, match=r"more.jsonl is new"):
        run([path, write(tmp_path / "more.jsonl", TEXTS)], out)
    write(path, sources(21))
    with pytest.raises(ConfigError, match=r"in.jsonl has changed"):
        run([path], out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = write(tmp_path / "in.jsonl", TEXTS)
    (file,) = find_files([str(path)], tmp_path)
    path.write_text('{"text": "other"}')
    with pytest.raises(ConfigError, match="changed while"):
        next(read_documents(Part(file, 0, file.size, 0), "text"))


# ---- workers, interruptions, disks, buckets ---------------------------------------------------------------------

COMMAND = """
import sys
from gattn.data import documents, plan
plan.UNIT = documents.PIECE  # many small units
from gattn.__main__ import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
BPE, BYTES = ("--vocab-size", "300"), ("--tokenizer", "bytes")


@pytest.fixture(scope="module")
def many_units(tmp_path_factory):
    """Files of some 20 units, a function that starts the command on them, and what must come of it."""
    folder = tmp_path_factory.mktemp("units")
    write(folder / "in", sources(60))
    write(folder / "in" / "b.jsonl", sources(150, 2500))
    (folder / "in" / "c.txt").write_text("".join(sources(150, 4000)))
    (folder / "command.py").write_text(COMMAND)

    def start(out: Path, *options: str, prefix=(), **environment: str) -> subprocess.Popen:
        words = [*prefix, sys.executable, str(folder / "command.py"), "prepare", str(folder / "in"), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} | environment
        words += options
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, env=environment, start_new_session=True, **pipes)

    done = start(folder / "out", *BPE, "--workers", "1")
    assert done.wait(timeout=60) == 0, done.stderr.read()
    assert len(list((folder / "out").glob("unit-*.json"))) > 12
    return start, open_prepared(folder / "out")


def interrupt(process: subprocess.Popen, out: Path, units: int, number: int) -> int:
    """Sends the signal once that many more units are finished; the exit code."""
    deadline = time.monotonic() + 30
    units += len(list(out.glob("unit-*.json")))
    while process.poll() is None and len(list(out.glob("unit-*.json"))) < units and time.monotonic() < deadline:
        time.sleep(0.005)
    if number == signal.SIGINT:  # a terminal sends it to every process
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    return process.wait(timeout=30)


def test_interrupted_anywhere_and_continued_it_is_the_same(many_units, tmp_path):
    """Killed, terminated, interrupted; with one worker and with two."""
    start, whole = many_units
    out = tmp_path / "out"
    stops = [("1", signal.SIGKILL, -9, 0), ("2", signal.SIGINT, 130, 0), ("2", signal.SIGTERM, 143, 2)]
    for workers, number, code, units in [*stops, ("2", signal.SIGKILL, -9, 2), ("1", signal.SIGINT, 130, 2)]:
        process = start(out, *BPE, "--workers", workers)
        if number == signal.SIGKILL and not units:
            time.sleep(random.uniform(0.3, 1.5))
        elif not units:  # while the workers start
            assert any(line.startswith("tokenising") for line in process.stdout)
            time.sleep(random.uniform(0.0, 0.2))
        assert interrupt(process, out, units, number) == code
        assert "Traceback" not in process.stderr.read()
        assert not (out / "index.json").exists()
        with pytest.raises(ConfigError, match=r"interrupted|no such folder|no prepared data"):
            open_prepared(out)
    finished = {p: p.stat().st_mtime_ns for p in out.glob("unit-*.json")}
    process = start(out, *BPE, "--workers", "2")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{len(finished)} of" in printed
    assert f"python -m gattn train --data.source {out}" in printed
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items())
    assert not list(out.glob(".*.part"))
    again = open_prepared(out)
    assert again.fingerprint == whole.fingerprint
    for split in ("train", "held_out"):
        np.testing.assert_array_equal(getattr(again, split)[:], getattr(whole, split)[:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_workers_are_started(number):
    """Also one that reaches another thread, and Python from there; it then does what it would have done."""
    other = threading.Thread(target=(over := threading.Event()).wait, daemon=True)
    other.start()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    events = []
    before = signal.signal(number, lambda *_: events.append("answered"))
    woken = signal.set_wakeup_fd(writer.fileno())
    try:
        with _whole_start():
            signal.pthread_kill(other.ident, number)
            assert reader.recv(1) == bytes([number])  # Python knows
            events.append("started")
        assert events == ["started", "answered"]
        assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(number, before)
        over.set()
        reader.close()
        writer.close()


def test_two_at_the_same_place_are_refused(many_units, tmp_path):
    start, _ = many_units
    with plan.locked(tmp_path / "out"):
        second = start(tmp_path / "out", *BYTES, "--workers", "1")
        assert second.wait(timeout=60) == 2
    assert "another prepare is at work" in second.stderr.read()


def test_workers_end_with_a_killed_parent(many_units, tmp_path):
    start, _ = many_units
    process = start(tmp_path / "out", *BYTES, "--workers", "1")
    assert interrupt(process, tmp_path / "out", 1, signal.SIGKILL) == -9
    # the pipes close when the last process that holds them has gone
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    reader.start()
    reader.join(timeout=10)
    assert not reader.is_alive()


def test_an_error_in_a_worker_arrives_as_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "UNIT", 1 << 16)
    lines = [json.dumps({"text": t}) for t in sources(100)]
    lines[77] = '{"text": 1}'
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"line 78 of {path} holds no text") as error:
        run([path], tmp_path / "out", workers=2)
    assert error.value.field == "field"
    assert list((tmp_path / "out").glob("unit-*.json"))
    assert not list((tmp_path / "out").glob(".*.part"))


def test_a_full_disk_is_one_clear_line_and_can_be_continued(many_units, tmp_path):
    start, _ = many_units
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        process = start(disk / "out", *BYTES, "--workers", "2")
        assert process.wait(timeout=60) == 2
        error = process.stderr.read()
        assert "disk is full" in error
        assert len(error.splitlines()) == 1
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        process = start(disk / "out", *BYTES, "--workers", "2")
        assert process.wait(timeout=60) == 0, process.stderr.read()
        assert open_prepared(disk / "out").tokenizer.vocab_size == 257
    finally:
        subprocess.run(["umount", str(disk)], check=True)


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from gattn.data.records import ShardWriter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
writers = [ShardWriter(Path(sys.argv[1]) / name, np.dtype(np.uint16)) for name in ("train", "held_out")]
try:
    for writer in writers:
        writer.add(np.arange(1 << 17) % 1000)
        writer.add(np.arange(1 << 17) % 1000)
    for writer in writers:
        writer.finish()
except (OSError, RuntimeError):
    print("refused")
finally:
    for writer in writers:
        writer.discard()
"""


@pytest.mark.parametrize("limit", [10_000, 70_000, 200_000, 300_000])
def test_nothing_half_written_stays_on_a_full_disk(limit, tmp_path):
    """Wherever a file may grow no more, in one shard while the other still holds what it has not written."""
    command = [sys.executable, "-c", FULL, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "refused\n", done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob(".*")) == []


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    """A folder that cannot be listed, a file that cannot be opened (root can do both, hence the stand-ins)."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n')

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("iterdir", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(ConfigError, match="Permission denied") as error:
                make_units([str(tmp_path / "in")], tmp_path / "out", "text")
            assert error.value.field == "files"


BUCKET = """
import os
if "GATTN_TEST_BUCKET" in os.environ:
    from pathlib import Path
    from tests.bucket import bucket
    _entered = bucket(Path(os.environ["GATTN_TEST_BUCKET"]))
    _entered.__enter__()
"""


def test_from_a_bucket_to_a_bucket(tmp_path, monkeypatch):
    from tests.bucket import bucket

    (tmp_path / "usercustomize.py").write_text(BUCKET)
    (tmp_path / "sitecustomize.py").write_text(BUCKET)
    files = tmp_path / "objects" / "in"
    for kind in ("texts", "a.jsonl", "a.parquet", "a.array_record"):
        files.mkdir(parents=True, exist_ok=True)
        write(files / kind, sources(10))
    command = [sys.executable, "-m", "gattn", "prepare", "gs://bucket/in", "gs://bucket/in/*.jsonl"]
    command += ["--out", "gs://bucket/data/a", "--tokenizer", "bytes", "--workers", "1", "--held-out", "0.3"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "GATTN_TEST_BUCKET": str(tmp_path / "objects")}
    environment["GATTN_HOME"] = str(tmp_path / "home")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    here = run([files], tmp_path / "here")
    monkeypatch.setenv("GATTN_HOME", str(tmp_path / "home"))
    with bucket(tmp_path / "objects"):
        from gattn.files import as_path

        there = open_prepared(as_path("gs://bucket/data/a"))
        assert there.fingerprint == open_prepared(here).fingerprint
        np.testing.assert_array_equal(there.train[:], open_prepared(here).train[:])


# ---- the command ------------------------------------------------------------------------------------------------


def test_command_prepares_where_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path / "home"))
    before = signal.getsignal(signal.SIGTERM)
    write(tmp_path / "my texts", sources(40))
    try:
        assert main(["prepare", str(tmp_path / "my texts"), "--vocab-size", "300", "--workers", "1"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    folder = tmp_path / "home/data/my texts"
    assert f"python -m gattn train --data.source '{folder}'" in out
    assert "40 documents" in out
    assert "MB/s" in out
    assert len(open_prepared(folder).train) > 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "files"),
        (["/nowhere/*.txt"], "matches no file"),
        ([str(Path(__file__)), "--workers", "1"], "known kind"),
        (["x.txt", "--worker", "1"], "--workers"),
    ],
)
def test_command_explains_what_is_wrong(argv, says, capsys):
    try:
        code = main(["prepare", *argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert says in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err


def test_units_are_neighbours_and_neither_tiny_nor_huge(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "UNIT", 1 << 17)
    write(tmp_path / "in", sources(100))
    (tmp_path / "in" / "z.txt").write_text("".join(sources(400)))
    files, units = plan.make_units([str(tmp_path / "in")], tmp_path / "out", "text")
    sizes = [sum(part.size for part in unit) for unit in units]
    assert sum(sizes) == sum(file.size for file in files)
    assert all(1 << 17 <= size <= 1 << 18 for size in sizes[:-1])
    assert [part.file for unit in units for part in unit if not part.start] == files
