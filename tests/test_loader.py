"""Prepared folders as a source: mixtures, hosts, reading ahead, packing."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gattn.config import Config, ConfigError, override
from gattn.data import loader
from gattn.data.loader import open_source
from gattn.data.prepare import prepare
from gattn.data.tokenizer import byte_tokenizer

T = 16


def quiet() -> Console:
    return Console(quiet=True)


def make(folder, *, letter: str, count: int, tokenizer: str = "bytes"):
    """A prepared folder whose documents consist of one letter, of very different lengths."""
    lengths = np.random.default_rng(ord(letter)).integers(1, 400, count)
    folder.mkdir(parents=True)
    for i, length in enumerate(lengths):
        (folder / f"{i:03}.txt").write_text(f"{i} " + letter * int(length))
    settings = {"vocab_size": 300, "bos": None, "field": "text", "held_out": 0.2, "workers": 1, "console": quiet()}
    return prepare([str(folder)], folder.parent / f"{folder.name}-prepared", tokenizer=tokenizer, **settings)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    return {letter: make(root / letter, letter=letter, count=60) for letter in "abc"}


def config(source: str, **changes) -> Config:
    small = {"data.source": source, "data.seq_len": T, "data.batch_size": 8, "data.eval_sequences": 24}
    return override(Config(), small | {name.replace("__", "."): value for name, value in changes.items()})


def mixed(prepared, **changes) -> Config:
    return config(",".join(f"{prepared[k]}={w}" for k, w in (("a", 0.7), ("b", 0.2), ("c", 0.1))), **changes)


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key])


def letters(rows) -> str:
    """The letter each row is about."""
    return "".join(chr(Counter(int(t) for t in row if t >= ord("a") and t < 256).most_common(1)[0][0]) for row in rows)


def test_a_mixture_keeps_its_weights_over_any_stretch(prepared):
    batches = itertools.islice(open_source(mixed(prepared)).train(0), 500)
    seen = np.array(list(letters(row for batch in batches for row in batch["targets"])))
    for letter, weight in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        so_far = np.concatenate([[0], np.cumsum(seen == letter)])
        for stretch in (40, 200, 1000):
            counts = so_far[stretch:] - so_far[:-stretch]
            assert abs(counts - weight * stretch).max() <= 2, (letter, stretch)


def test_weights_are_relative_and_in_the_fingerprint(prepared):
    one, double, other = (
        open_source(config(f"{prepared['a']}={w},{prepared['b']}={v}")) for w, v in ((1, 3), (2, 6), (1, 1))
    )
    assert one.fingerprint == double.fingerprint != other.fingerprint
    assert_same(next(one.train(5)), next(double.train(5)))


def test_every_text_of_a_mixture_has_its_own_held_out_set(prepared):
    held_out = open_source(mixed(prepared)).held_out
    assert len(held_out) == 3
    for letter, batches in zip("abc", held_out.values(), strict=True):
        rows = np.concatenate([batch["targets"] for batch in batches()])
        assert len(rows) == 24
        assert set(letters(rows)) == {letter}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_neither_order_nor_content(prepared, workers):
    for start in (0, 7):
        alone = open_source(mixed(prepared, data__workers=0)).train(start)
        ahead = open_source(mixed(prepared, data__workers=workers)).train(start)
        for one, other in itertools.islice(zip(alone, ahead, strict=True), 60):
            assert_same(one, other)


@pytest.mark.parametrize("source", ["prepared", "corpus", "experiments.sinkbench:sinkbench"])
@pytest.mark.parametrize("hosts", [2, 8])
def test_hosts_together_read_the_batch_whatever_their_number(prepared, source, hosts):
    changes = {"data__tokenizer": "bytes", "data__seq_len": 64 if "sink" in source else T}
    c = mixed(prepared, **changes) if source == "prepared" else config(source, **changes)
    whole = open_source(c)
    parts = [open_source(c).train(3, rows) for rows in np.split(np.arange(8), hosts)]
    for batch, *rows in itertools.islice(zip(whole.train(3), *parts, strict=True), 4):
        assert all(len(part["inputs"]) == 8 // hosts for part in rows)
        assert_same({key: np.concatenate([part[key] for part in rows]) for key in batch}, batch)


class Counted:
    """Tokens that remember what was read of them."""

    def __init__(self, tokens):
        self.tokens, self.read = tokens, []

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, piece):
        self.read.append((piece.start, piece.stop))
        return self.tokens[piece]


def test_a_host_reads_only_its_rows():
    tokenizer = byte_tokenizer()
    rng = np.random.default_rng(0)

    def counted():
        stream = Counted(rng.integers(0, 257, 50 * T).astype(np.uint16))
        text = loader._Text("text", 1.0, "f", tokenizer, stream, stream, tokenizer.token_bytes)
        return stream, loader._text_source([text], config("corpus", data__workers=0))

    reads = []
    for rows in ([0, 1], [2, 3], [4, 6], [5, 7]):
        stream, source = counted()
        next(source.train(2, np.array(rows)))
        reads.append(stream.read)
    assert [len(read) for read in reads] == [2, 2, 2, 2]
    stream, source = counted()
    next(source.train(2))
    assert sorted(piece for read in reads for piece in read) == sorted(stream.read)


def test_documents_follow_each_other_and_long_ones_go_on_in_the_next_window(prepared):
    """The windows of an epoch, put back in order, are the folder's text: no token is lost, repeated or padded."""
    from gattn.data.records import open_prepared

    folder = open_prepared(prepared["a"])
    source = open_source(config(str(prepared["a"])))
    count = len(folder.train) // T
    rows = itertools.islice((row for batch in source.train(0) for row in batch["targets"]), count)
    whole = folder.train[: count * T].reshape(count, T).astype(np.int32)
    assert Counter(map(bytes, rows)) == Counter(map(bytes, whole))
    bos = folder.tokenizer.bos_id
    assert (whole == bos).sum(axis=1).max() >= 1
    assert ((whole == bos).sum(axis=1) == 0).any()  # windows inside a document
    batch = next(source.train(0))
    np.testing.assert_array_equal(np.diff(batch["segment_ids"]), batch["inputs"][:, 1:] == bos)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 40))
def test_batches_are_addressed_by_step(prepared, step, batch_size, seq_len):
    c = config(str(prepared["b"]), data__batch_size=batch_size, data__seq_len=seq_len, data__workers=0)
    c = override(c, {"data.eval_sequences": 1})
    source = open_source(c)
    two = list(itertools.islice(source.train(step), 2))
    assert_same(next(open_source(c).train(step + 1)), two[1])


def test_what_does_not_fit_is_refused(prepared, tmp_path):
    bpe = make(tmp_path / "bpe", letter="d", count=40, tokenizer="bpe")
    cases = [
        (f"{prepared['a']}={1},{bpe}={1}", {}, "data.source", "one tokenizer"),
        (str(prepared["a"]), {"model__vocab_size": 256}, "model.vocab_size", "at least 257"),
        (str(prepared["a"]), {"data__seq_len": 10**6}, "data.seq_len", "lower it"),
        (str(prepared["a"]), {"data__eval_sequences": 10**6}, "data.eval_sequences", "lower data.eval_sequences"),
        (str(tmp_path / "nowhere"), {}, "data.source", "prepare"),
        (str(tmp_path), {}, "data.source", "prepare"),
    ]
    for source, changes, field, says in cases:
        with pytest.raises(ConfigError) as error:
            open_source(config(source, **changes))
        assert error.value.field == field, source
        assert says in str(error.value), source
