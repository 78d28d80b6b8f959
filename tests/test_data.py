"""The embedded corpus, its tokenizers and cache, and the loader that is addressed by step."""

import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gattn.data.loader as loader_module
import gattn.data.tokenizer as tokenizer_module
from gattn.config import Config, ConfigError, override
from gattn.data.corpus import read_corpus
from gattn.data.loader import Source, open_source
from gattn.data.tokenizer import BOS, open_tokenizer, token_stream

VOCAB = 320
T = 32


def mixed_text(number: int) -> str:
    return "".join(f"def größe_{number}_{i}(x):  # 尺寸 🙂\n\treturn x ** {i * number}\n\n" for i in range(40))


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """A standard library in small: 70 files worth reading and one of each kind that must be left out."""
    root = tmp_path_factory.mktemp("python")
    for number in range(70):
        folder = root / f"package{number % 5}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(mixed_text(number), encoding="utf-8")
    (root / "copy.py").write_text(mixed_text(3), encoding="utf-8")
    (root / "empty.py").write_text("\n")
    (root / "latin.py").write_bytes("größe".encode("latin-1"))
    (root / "notes.txt").write_text("no source")
    for folder in ("test", "package1/tests", "idlelib/idle_test", "site-packages/numpy", "config-3.12-x"):
        (root / folder).mkdir(parents=True)
        (root / folder / "left_out.py").write_text(f"raise SystemExit('{folder}')")
    (root / "_sysconfigdata__linux.py").write_text("prefix = '/home/somebody'")
    return root


@pytest.fixture
def corpus(library):
    return read_corpus(library)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(monkeypatch, cache):
    monkeypatch.setenv("GATTN_HOME", str(cache))


@pytest.fixture
def fresh_home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def open_small(monkeypatch, corpus):
    """Opens the small library's corpus as the source of a config with the given changes."""
    monkeypatch.setattr(loader_module, "read_corpus", lambda: corpus)

    def open_with(**changes):
        small = {"model.vocab_size": VOCAB, "data.seq_len": T, "data.batch_size": 8, "data.eval_sequences": 24}
        return open_source(override(Config(), small | {k.replace("__", "."): v for k, v in changes.items()}))

    return open_with


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key])


# ---- corpus -----------------------------------------------------------------------------------------------------


def test_standard_library_is_about_11_megabytes_split_without_overlap():
    corpus = read_corpus()
    train, held_out = ({d.text: d.path for d in side} for side in (corpus.train, corpus.held_out))
    sizes = [sum(len(text.encode()) for text in side) for side in (train, held_out)]
    assert 8e6 < sum(sizes) < 16e6
    assert 0.04 < sizes[1] / sum(sizes) < 0.12
    assert not set(train) & set(held_out)
    assert not set(train.values()) & set(held_out.values())
    folders = {part for path in (*train.values(), *held_out.values()) for part in path.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert read_corpus().fingerprint == corpus.fingerprint


def test_corpus_leaves_out_what_is_no_source_text(corpus):
    texts = [d.text for d in (*corpus.train, *corpus.held_out)]
    assert sorted(texts) == sorted(mixed_text(number) for number in range(70))


def test_corpus_fingerprint_is_of_the_text_and_not_of_the_place(library, tmp_path, corpus):
    for document in (*corpus.train, *corpus.held_out):
        (tmp_path / document.path).parent.mkdir(exist_ok=True)
        (tmp_path / document.path).write_text(document.text, encoding="utf-8")
    assert read_corpus(tmp_path) == corpus
    (tmp_path / corpus.held_out[0].path).write_text("one file changed")
    assert read_corpus(tmp_path).fingerprint != corpus.fingerprint


def test_library_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="zipped") as error:
        read_corpus(tmp_path / "python312.zip")
    assert error.value.field == "data.source"


# ---- tokenizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_any_text_survives_encoding_and_its_bytes_are_counted(kind, corpus):
    tokenizer = open_tokenizer(kind, VOCAB, corpus)

    @given(st.text())
    @example(f"{BOS} is text here\r\n\t \x00 größe 🙂")
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def check(text):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not (ids == tokenizer.bos_id).any()
        assert all(tokenizer.label(int(i)).isprintable() for i in ids)

    check()
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.bos_id] == 0
    assert tokenizer.vocab_size == {"bpe": VOCAB, "bytes": 257}[kind]
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.bos_id]) == "a"
    assert tokenizer.label(tokenizer.bos_id) == "<bos>"


def test_bpe_shortens_what_it_was_trained_on(corpus):
    text = corpus.held_out[0].text
    assert len(open_tokenizer("bpe", VOCAB, corpus).encode(text)) < 0.7 * len(text.encode())


def test_bpe_has_seen_the_train_split_only(fresh_home, corpus):
    other = dataclasses.replace(corpus, held_out=corpus.held_out[1:], fingerprint="other")
    less = dataclasses.replace(corpus, train=corpus.train[:1], fingerprint="less")
    prints = [open_tokenizer("bpe", VOCAB, c).fingerprint for c in (corpus, other, less)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_stream_is_the_documents_with_bos_before_each(kind, split, corpus):
    tokenizer = open_tokenizer(kind, VOCAB, corpus)
    stream = token_stream(tokenizer, corpus, split)
    assert isinstance(stream, np.memmap)
    starts = np.flatnonzero(stream == tokenizer.bos_id)
    assert starts[0] == 0
    pieces = [tokenizer.decode(ids[1:]) for ids in np.split(stream, starts[1:])]
    assert pieces == [document.text for document in getattr(corpus, split)]


# ---- cache ------------------------------------------------------------------------------------------------------


def refuse(*_):
    raise AssertionError("built again although it is in the cache")


def test_cache_is_used(fresh_home, monkeypatch, corpus):
    tokenizer = open_tokenizer("bpe", VOCAB, corpus)
    stream = token_stream(tokenizer, corpus, "train")
    monkeypatch.setattr(tokenizer_module, "_train_bpe", refuse)
    monkeypatch.setattr(tokenizer_module, "_encode_documents", refuse)
    again = open_tokenizer("bpe", VOCAB, corpus)
    assert again.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(token_stream(again, corpus, "train"), stream)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def zeroed(content: bytes) -> bytes:
    return content[:200] + bytes(len(content) - 200)


DAMAGES = {"cut": half, "emptied": lambda c: b"", "noise": lambda c: os.urandom(300), "zeroed": zeroed}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rebuilt_and_said_so(damage, fresh_home, caplog, corpus):
    tokenizer = open_tokenizer("bpe", VOCAB, corpus)
    stream = np.array(token_stream(tokenizer, corpus, "train"))
    files = sorted(fresh_home.rglob("*.*"))
    whole = {file: file.read_bytes() for file in files}
    assert len(files) == 2
    for file in files:
        file.write_bytes(DAMAGES[damage](whole[file]))
    again = open_tokenizer("bpe", VOCAB, corpus)
    assert again.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(token_stream(again, corpus, "train"), stream)
    assert [any(str(file) in record.getMessage() for record in caplog.records) for file in files] == [True, True]
    assert {file: file.read_bytes() for file in sorted(fresh_home.rglob("*.*"))} == whole


BUILD = """
import hashlib, sys
from pathlib import Path
from gattn.data.corpus import read_corpus
from gattn.data.tokenizer import open_tokenizer, token_stream
corpus = read_corpus(Path(sys.argv[1]))
tokenizer = open_tokenizer("bpe", int(sys.argv[2]), corpus)
stream = token_stream(tokenizer, corpus, "train")
print(corpus.fingerprint, tokenizer.fingerprint, hashlib.sha256(stream.tobytes()).hexdigest())
"""


def test_processes_that_build_at_the_same_time_agree(fresh_home, library, corpus, monkeypatch):
    command = [sys.executable, "-c", BUILD, str(library), str(VOCAB)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment, "RAYON_NUM_THREADS": threads})
        for threads in ("1", "3")
    ]
    printed = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert not list(fresh_home.rglob("*.part"))
    monkeypatch.setenv("GATTN_HOME", str(fresh_home / "other"))
    tokenizer = open_tokenizer("bpe", VOCAB, corpus)
    stream = hashlib.sha256(token_stream(tokenizer, corpus, "train").tobytes()).hexdigest()
    assert printed == {f"{corpus.fingerprint} {tokenizer.fingerprint} {stream}"}


# ---- batches ----------------------------------------------------------------------------------------------------


def test_batch_does_not_depend_on_the_step_a_run_starts_from(open_small):
    whole = list(itertools.islice(open_small().train(0), 400))  # more than two epochs
    for start in (1, 7, 399):
        assert_same(next(open_small().train(start)), whole[start])


def test_every_epoch_shows_every_window_once_in_another_order(open_small, corpus):
    stream = token_stream(open_tokenizer("bpe", VOCAB, corpus), corpus, "train")
    count = len(stream) // T
    windows = stream[: count * T].reshape(count, T)
    batches = itertools.islice(open_small().train(0), 2 * count // 8 + 1)
    rows = np.concatenate([batch["targets"] for batch in batches])
    epochs = rows[:count], rows[count : 2 * count]
    for epoch in epochs:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, windows.astype(np.int32)))
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], windows)


def test_seed_decides_the_order(open_small):
    first, same, other = (next(open_small(train__seed=seed).train(0)) for seed in (0, 0, 1))
    assert_same(first, same)
    assert not np.array_equal(first["targets"], other["targets"])


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_windows_start_with_bos_and_targets_are_the_next_tokens(kind, open_small, corpus):
    source = open_small(data__tokenizer=kind)
    bos_id = open_tokenizer(kind, VOCAB, corpus).bos_id
    for batch in (*itertools.islice(source.train(0), 5), *source.held_out["corpus"]()):
        assert {(a.dtype.name, a.shape) for a in batch.values()} == {("int32", (8, T))}
        assert (batch["inputs"][:, 0] == bos_id).all()
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_segments_are_the_documents_inside_a_window(open_small, corpus):
    tokenizer = open_tokenizer("bpe", VOCAB, corpus)
    lengths = [1 + len(tokenizer.encode(document.text)) for document in corpus.held_out]
    document = np.repeat(np.arange(len(lengths)), lengths)
    count = len(document) // T
    document = document[: count * T].reshape(count, T)
    segments = np.concatenate([b["segment_ids"] for b in open_small(data__eval_sequences=count).held_out["corpus"]()])
    np.testing.assert_array_equal(np.diff(segments[:, 1:]), np.diff(document[:, :-1]))
    batches = open_small(data__eval_sequences=count).held_out["corpus"]()
    starts_a_document = np.concatenate([b["inputs"][:, 1] for b in batches])
    np.testing.assert_array_equal(segments[:, 0], 1)
    np.testing.assert_array_equal(segments[:, 1] == 2, starts_a_document == tokenizer.bos_id)
    assert segments.max() > 1


def test_no_segments_when_documents_attend_to_each_other(open_small):
    whole = next(open_small(data__attend_across_documents=True).train(3))
    assert_same(whole, {k: v for k, v in next(open_small().train(3)).items() if k != "segment_ids"})


def test_held_out_windows_are_spread_evenly_and_different(open_small, corpus):
    stream = token_stream(open_tokenizer("bpe", VOCAB, corpus), corpus, "held_out")
    place = {stream[start : start + T].astype(np.int32).tobytes(): start // T for start in range(0, len(stream), T)}
    source = open_small(data__eval_sequences=21)
    batches = list(source.held_out["corpus"]())
    assert [len(batch["targets"]) for batch in batches] == [8, 8, 5]
    gaps = np.diff([place[row.tobytes()] for batch in batches for row in batch["targets"]])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    assert gaps.sum() > 0.9 * (len(stream) // T)
    others = open_small(data__eval_sequences=21, train__seed=5).held_out["corpus"]()
    for batch, again in zip(batches, others, strict=True):
        assert_same(batch, again)


def test_source_counts_bytes_and_names_tokens(open_small, corpus):
    source, tokenizer = open_small(), open_tokenizer("bpe", VOCAB, corpus)
    targets = next(source.train(0))["targets"][0]
    pieces = [tokenizer.pieces[i] for i in targets]
    assert source.token_bytes[targets].sum() == sum(map(len, pieces))
    assert source.bayes_loss is None
    names = source.decode_tokens(np.array([tokenizer.bos_id, *tokenizer.encode("f\n é")]))
    assert names[0] == "<bos>"
    assert "".join(names[1:]) in ("f\\n·é", "f\\n·\\xc3\\xa9")


def test_source_fingerprint_names_the_data_not_the_batching(open_small):
    prints = [
        open_small(**changes).fingerprint
        for changes in ({}, {"data__batch_size": 4, "train__seed": 3}, {"data__tokenizer": "bytes"})
    ]
    assert prints[0] == prints[1] != prints[2]


# ---- errors -----------------------------------------------------------------------------------------------------


def small_source(config: Config) -> Source:
    return Source("0" * 16, 300, lambda step: iter(()), lambda: iter(()), None, None, lambda ids: [])


def no_source(config: Config) -> dict:
    return {}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"data.eval_sequences": 10**6}, "data.eval_sequences", "lower"),
        ({"data.seq_len": 10**8}, "data.seq_len", "lower"),
        ({"data.source": "nowhere_at_all.module:function"}, "data.source", "nowhere_at_all"),
        ({"data.source": f"{__name__}:smal_source"}, "data.source", "did you mean 'small_source'"),
        ({"data.source": f"{__name__}:zzz"}, "data.source", "no function 'zzz'"),
        ({"data.source": f"{__name__}:no_source"}, "data.source", "dict"),
        ({"data.source": f"{__name__}:small_source", "model.vocab_size": 299}, "model.vocab_size", "at least 300"),
    ],
)
def test_what_cannot_work_is_refused_with_field_and_remedy(changes, field, words):
    with pytest.raises(ConfigError, match=words) as error:
        open_source(override(Config(), {"data.tokenizer": "bytes", **changes}))
    assert error.value.field == field


def test_own_source_is_imported_and_called():
    config = override(Config(), {"data.source": f"{__name__}:small_source", "model.vocab_size": 300})
    assert open_source(config).vocab_size == 300
