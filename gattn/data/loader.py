"""Batches addressed by step: batch s is the same whatever step a run starts from, so resuming needs only the step.

Global row = step * B + r, sent through a permutation of the windows that is seeded by `train.seed` and by the epoch.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gattn.config import Config, ConfigError
from gattn.data.corpus import read_corpus
from gattn.data.tokenizer import open_tokenizer, token_stream

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, int32 [B, T], target t being the token after input t. `segment_ids`, int32 [B, T], is there
only when documents must not attend to each other; it counts from 1 and never falls along a row."""


@dataclass(frozen=True)
class Source:
    """What a run trains and is measured on; `data.source` names how to make one."""

    fingerprint: str
    """16 hex digits of the data (not of how they are batched): a checkpoint resumes only on the same."""
    vocab_size: int
    """V of the data: every token lies below it. The model's may be larger."""
    train: Callable[[int], Iterator[Batch]]
    """Endless batches of B = data.batch_size sequences, from the given step on."""
    held_out: Callable[[], Iterator[Batch]]
    """data.eval_sequences sequences in batches of B, always the same; only the last batch may be smaller."""
    token_bytes: Int[np.ndarray, " V"] | None
    """UTF-8 bytes that each token stands for (bits per byte), None where tokens are no text."""
    bayes_loss: float | None
    """Nats per target that the best predictor pays on `held_out`, where it is known."""
    decode_tokens: Callable[[Int[np.ndarray, " _"]], list[str]]
    """One printable string per token."""


def open_source(config: Config) -> Source:
    """The source that `data.source` names: `corpus`, or the result of `package.module:function` called with `config`.

    Raises:
      ConfigError: if it cannot be imported or is no Source, if its vocabulary exceeds the model's, or if there are
        fewer sequences than asked for.
    """
    name = config.data.source
    source = _corpus_source(config) if name == "corpus" else _imported(name)(config)
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


def _corpus_source(config: Config) -> Source:
    corpus = read_corpus()
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size, corpus)
    train_windows = _cut(token_stream(tokenizer, corpus, "train"), config.data.seq_len)
    held_out_windows = _cut(token_stream(tokenizer, corpus, "held_out"), config.data.seq_len)
    order = _shuffled(len(train_windows), config)
    spread = _spread(len(held_out_windows), config)
    batch_size = config.data.batch_size
    batch = functools.partial(_batch, bos_id=tokenizer.bos_id, one_segment=config.data.attend_across_documents)

    def train(step: int) -> Iterator[Batch]:
        for row in itertools.count(step * batch_size, batch_size):
            yield batch(train_windows[[order[row + r] for r in range(batch_size)]])

    def held_out() -> Iterator[Batch]:
        for row in range(0, len(spread), batch_size):
            yield batch(held_out_windows[spread[row : row + batch_size]])

    return Source(
        fingerprint=hashlib.sha256(f"{corpus.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:16],
        vocab_size=tokenizer.vocab_size,
        train=train,
        held_out=held_out,
        token_bytes=tokenizer.token_bytes,
        bayes_loss=None,
        decode_tokens=lambda ids: [tokenizer.label(int(i)) for i in ids],
    )


def _cut(stream: Int[np.ndarray, " _"], seq_len: int) -> Int[np.ndarray, "W T"]:
    """Contiguous windows, still memory-mapped; the last len(stream) % T tokens are in none."""
    count = len(stream) // seq_len
    return np.asarray(stream)[: count * seq_len].reshape(count, seq_len)


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


def _shuffled(num_windows: int, config: Config) -> Sequence[int]:
    """Row -> window without end: every window once per epoch, in another order each epoch. O(1) memory."""
    import grain  # 0.8 s, which runs on synthetic data need not spend

    if num_windows < 1:
        raise ConfigError("data.seq_len", config.data.seq_len, "longer than the whole train split: lower it")
    return grain.MapDataset.range(num_windows).seed(config.train.seed).shuffle().repeat()


def _spread(num_windows: int, config: Config) -> Int[np.ndarray, " E"]:
    """Windows of the held-out split, evenly spread over it and all different."""
    wanted = config.data.eval_sequences
    if num_windows < wanted:
        raise ConfigError(
            "data.eval_sequences",
            wanted,
            f"the held-out split holds only {num_windows} windows of {config.data.seq_len} tokens: "
            "lower data.eval_sequences or data.seq_len",
        )
    return np.arange(wanted) * num_windows // wanted
