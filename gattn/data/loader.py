"""Batches addressed by step: batch s is the same whatever step a run starts from, so resuming needs only the step.

Global row = step * B + r, sent through a permutation of the windows that is seeded by `train.seed` and by the epoch.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

from gattn.config import Config, ConfigError, is_import_path
from gattn.data.corpus import read_corpus
from gattn.data.records import open_prepared
from gattn.data.tokenizer import Tokenizer, open_tokenizer, token_stream
from gattn.files import as_path

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, int32 [B, T], target t being the token after input t. `segment_ids`, int32 [B, T], is there
only when documents must not attend to each other; it counts from 1 and never falls along a row."""


class Tokens(Protocol):
    """A long sequence of token ids that is read piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice) -> np.ndarray: ...


class Train(Protocol):
    """Endless batches from the given step on; of each only `rows`, a slice or an array of indices of its B rows, which
    are the same whatever rows others read."""

    def __call__(self, step: int, rows: slice | Int[np.ndarray, " R"] = ...) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Source:
    """What a run trains and is measured on; `data.source` names how to make one."""

    fingerprint: str
    """16 hex digits of the data (not of how they are batched): a checkpoint resumes only on the same."""
    vocab_size: int
    """V of the data: every token lies below it. The model's may be larger."""
    train: Train
    """Batches of B = data.batch_size sequences, addressed by step."""
    held_out: Mapping[str, Callable[[], Iterator[Batch]]]
    """Name -> data.eval_sequences sequences in batches of B, always the same; only the last batch may be smaller."""
    token_bytes: Int[np.ndarray, " V"] | None
    """UTF-8 bytes that each token stands for (bits per byte), None where tokens are no text."""
    bayes_loss: float | None
    """Nats per target that the best predictor pays on `held_out`, where it is known."""
    decode_tokens: Callable[[Int[np.ndarray, " _"]], list[str]]
    """One printable string per token."""
    encode: Callable[[str], Int[np.ndarray, " _"]] | None = None
    """Ids of a text, BOS not among them; None where tokens are no text."""
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of ids, BOS skipped; None where tokens are no text."""
    bos_id: int = 0
    """The token that begins every window and every document."""
    tokenizer_json: str | None = None
    """The file of Hugging Face's `tokenizers` that gives the same ids; None where there is none."""


def open_source(config: Config) -> Source:
    """The source that `data.source` names: `corpus`, prepared folders, or what `package.module:function` makes of
    `config`.

    Raises:
      ConfigError: if it cannot be imported or read or is no Source, if its vocabulary exceeds the model's, or if there
        are fewer sequences than asked for.
    """
    name = config.data.source
    if is_import_path(name):
        source = _imported(name)(config)
    else:
        source = _text_source(_corpus(config) if name == "corpus" else _prepared(config), config)
    if not isinstance(source, Source):
        raise ConfigError("data.source", name, f"returned a {type(source).__name__}, not a gattn.data.loader.Source")
    if source.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            config.model.vocab_size,
            f"{name} has {source.vocab_size} tokens: set model.vocab_size to at least {source.vocab_size}",
        )
    return source


def _imported(name: str) -> Callable[[Config], Source]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            "data.source", name, f"cannot import it ({error}): install it, or start where it can be imported"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        close = difflib.get_close_matches(function_name, callables, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "give a function that takes the Config"
        raise ConfigError("data.source", name, f"{module_name} has no function {function_name!r}: {hint}")
    return function


@dataclass(frozen=True)
class _Text:
    """One body of text as tokens: what is trained on and what is held out, documents apart by BOS."""

    name: str
    weight: float
    fingerprint: str
    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    token_bytes: Int[np.ndarray, " V"] | None


def _corpus(config: Config) -> list[_Text]:
    corpus = read_corpus()
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size, corpus)
    train, held_out = (token_stream(tokenizer, corpus, split) for split in ("train", "held_out"))
    return [_Text("corpus", 1.0, corpus.fingerprint, tokenizer, train, held_out, tokenizer.token_bytes)]


def _prepared(config: Config) -> list[_Text]:
    texts = []
    for folder, weight in config.data.mixture().items():
        p = open_prepared(as_path(folder))
        texts.append(_Text(p.name, weight, p.fingerprint, p.tokenizer, p.train, p.held_out, p.token_bytes))
    for text in texts:
        if text.tokenizer.fingerprint != texts[0].tokenizer.fingerprint:
            remedy = f"{text.name} has another tokenizer than {texts[0].name}: prepare both with one tokenizer and BOS"
            raise ConfigError("data.source", config.data.source, remedy)
    return texts


def _text_source(texts: Sequence[_Text], config: Config) -> Source:
    data, tokenizer = config.data, texts[0].tokenizer
    batch = functools.partial(_batch, bos_id=tokenizer.bos_id, one_segment=data.attend_across_documents)
    order = _order(texts, config)
    parts = [f"{text.fingerprint} {text.tokenizer.fingerprint}" for text in texts]
    if len(texts) > 1:
        parts = [f"{part} {text.weight!r}" for part, text in zip(parts, texts, strict=True)]

    def train(step: int, rows: slice | Int[np.ndarray, " R"] = slice(None)) -> Iterator[Batch]:
        here = np.arange(data.batch_size)[rows].tolist()

        def read(step: int) -> Batch:
            places = [order[step * data.batch_size + r] for r in here]
            return batch(np.stack([_window(texts[text].train, window, data.seq_len) for text, window in places]))

        return _read_ahead(read, step, data.workers)

    def held_out(text: _Text) -> Iterator[Batch]:
        spread = _spread(text, config)
        for row in range(0, len(spread), data.batch_size):
            windows = spread[row : row + data.batch_size]
            yield batch(np.stack([_window(text.held_out, window, data.seq_len) for window in windows]))

    names = _names(texts)
    for text in texts:
        _spread(text, config)
    return Source(
        fingerprint=hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16],
        vocab_size=tokenizer.vocab_size,
        train=train,
        held_out={name: functools.partial(held_out, text) for name, text in zip(names, texts, strict=True)},
        token_bytes=None if any(text.token_bytes is None for text in texts) else texts[0].token_bytes,
        bayes_loss=None,
        decode_tokens=lambda ids: [tokenizer.label(int(i)) for i in ids],
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        bos_id=tokenizer.bos_id,
        tokenizer_json=tokenizer.spelling,
    )


def _window(stream: Tokens, index: int, seq_len: int) -> Int[np.ndarray, " T"]:
    """Windows are contiguous and disjoint; the last len(stream) % T tokens are in none."""
    return np.asarray(stream[index * seq_len : (index + 1) * seq_len], np.int32)


def _names(texts: Sequence[_Text]) -> list[str]:
    """The texts' names, numbered where two folders have the same."""
    names = [text.name for text in texts]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _order(texts: Sequence[_Text], config: Config) -> Sequence[tuple[int, int]]:
    """Global row -> (text, window) without end, O(1) memory: every window of a text once per epoch of that text, in
    another order each epoch, and the texts interleaved so that any stretch of rows keeps their weights."""
    import grain  # 0.8 s, which runs on synthetic data need not spend

    shuffled = []
    for i, text in enumerate(texts):
        count = len(text.train) // config.data.seq_len
        if not count:
            raise ConfigError(
                "data.seq_len", config.data.seq_len, f"longer than the whole train split of {text.name}: lower it"
            )
        windows = grain.MapDataset.range(count).seed(config.train.seed).shuffle().repeat()
        shuffled.append(windows.map(functools.partial(_place, i)))
    return grain.MapDataset.mix(shuffled, [text.weight for text in texts]) if len(texts) > 1 else shuffled[0]


def _place(text: int, window: int) -> tuple[int, int]:
    return text, window


def _read_ahead(read: Callable[[int], Batch], step: int, workers: int) -> Iterator[Batch]:
    """read(step), read(step + 1), ... in this order, by `workers` threads that stay a little ahead."""
    if not workers:
        return map(read, itertools.count(step))
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    return iter(grain.MapDataset.range(step, sys.maxsize).map(read).to_iter_dataset(options))


def _batch(windows: Int[np.ndarray, "B T"], *, bos_id: int, one_segment: bool) -> Batch:
    """Each window predicted from BOS on. A document's first token is BOS, which is thus also the end of the one before:
    it is the last target of that document's segment and the first input of its own."""
    targets = windows.astype(np.int32)
    inputs = np.empty_like(targets)
    inputs[:, 0], inputs[:, 1:] = bos_id, targets[:, :-1]
    batch = {"inputs": inputs, "targets": targets}
    if not one_segment:
        batch["segment_ids"] = np.cumsum(inputs == bos_id, axis=1, dtype=np.int32)
    return batch


def _spread(text: _Text, config: Config) -> Int[np.ndarray, " E"]:
    """Windows of the held-out split, evenly spread over it and all different."""
    wanted, count = config.data.eval_sequences, len(text.held_out) // config.data.seq_len
    if count < wanted:
        raise ConfigError(
            "data.eval_sequences",
            wanted,
            f"the held-out split of {text.name} holds only {count} windows of {config.data.seq_len} tokens: "
            "lower data.eval_sequences or data.seq_len",
        )
    return np.arange(wanted) * count // wanted
