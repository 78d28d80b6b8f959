"""A language in which attention has to find what stands far back: needles and questions of `ruler-mini`.

One token a character, rows of any length: so the length can be raised from stage to stage, and a model that was trained
on it can be asked RULER's questions in their smallest form (`TAUGHT`; `gattn.ruler`), at any length.

The rows, to the letter:

* BOS = 39 stands before x_1 .. x_T; inputs are BOS, x_1 .. x_{T-1}, targets x_1 .. x_T. Tokens 0..38 are `CHARACTERS`.
  No segment_ids: a row is one document.
* `random.Random(f"{seed} {step} {row}")` makes a row in training. All tokens are targets; the kind is drawn first:
  - `copied`: a string of 4 to T/4 characters, over and over. (It teaches to look back; without it needles take longer.)
  - `needles`: pieces one after the other. A needle gives a new key of two letters a value of three digits, ` ab=123 `;
    a question asks for a key, any of those given so far, and answers, ` ?ab=123`. A row has at most so many keys, drawn
    from 1 to 16; up to there the next piece is either with even odds, then it asks. The row ends after T characters.
  - `filled`: the same with noise before every piece, of a length drawn from 0 to a limit, drawn from 1 to T/4.
* Held out are `needles` and `filled`, made by `random.Random(f"held-out {kind} {row}")`, and their targets are answers
  alone: three digits that follow from the row, so that the Bayes loss is 0; who does not see the key pays `CHANCE`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import string
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from experiments.sinkbench import sinkbench_config
from gattn.config import Config, ConfigError, override
from gattn.data.loader import Batch, Source
from gattn.ruler import mini_key, mini_noise, mini_value

CHARACTERS = string.ascii_lowercase + string.digits + " =?"
IDS = {character: i for i, character in enumerate(CHARACTERS)}
BOS = len(CHARACTERS)
SHORTEST, MAX_KEYS = 4, 16
TAUGHT = ("mini_single", "mini_multikey")
CHANCE = math.log(10)
"""Nats per digit for one who knows the form and does not find the key."""

Row = tuple[str, list[int]]
"""Characters, and the places of answers among them."""


def _copied(rng: random.Random, length: int) -> Row:
    part = "".join(rng.choices(CHARACTERS, k=rng.randint(SHORTEST, length // 4)))
    return (part * (length // len(part) + 1))[:length], []


def _needles(rng: random.Random, length: int, noise: int = 0) -> Row:
    """With at most so much noise before every piece."""
    limit, values, text = rng.randint(1, MAX_KEYS), {}, ""
    answers: list[int] = []
    while len(text) < length:
        text += mini_noise(rng, rng.randint(0, noise))
        if values and (len(values) == limit or rng.random() < 0.5):
            key = rng.choice(list(values))
            text += f" ?{key}={values[key]}"
            answers += range(len(text) - 3, len(text))
        else:
            key = mini_key(rng)
            while key in values:
                key = mini_key(rng)
            values[key] = mini_value(rng)
            text += f" {key}={values[key]} "
    return text[:length], [place for place in answers if place < length]


KINDS: dict[str, Callable[[random.Random, int], Row]] = {
    "copied": _copied,
    "needles": _needles,
    "filled": lambda rng, length: _needles(rng, length, rng.randint(1, length // 4)),
}


def longcontext(config: Config) -> Source:
    """The language as a data source (`data.source = "experiments.longcontext:longcontext"`).

    Raises:
      ConfigError: below T = 16, a quarter of which is the shortest string that is copied.
    """
    data, length = config.data, config.data.seq_len
    if length < 4 * SHORTEST:
        remedy = f"a quarter of it is copied, {SHORTEST} characters or more: set it to at least {4 * SHORTEST}"
        raise ConfigError("data.seq_len", length, remedy)

    def held_out(kind: str) -> Iterator[Batch]:
        for start in range(0, data.eval_sequences, data.batch_size):
            rows = range(start, min(start + data.batch_size, data.eval_sequences))
            made = [KINDS[kind](random.Random(f"held-out {kind} {row}"), length) for row in rows]
            batch = _batch([text for text, _ in made])
            targets = np.full_like(batch["targets"], -1)
            for row, (_, answers) in enumerate(made):
                targets[row, answers] = batch["targets"][row, answers]
            yield batch | {"targets": targets}

    return Source(
        fingerprint=_fingerprint(),
        vocab_size=BOS + 1,
        train=functools.partial(_train, config.train.seed, data.batch_size, length),
        held_out={kind: functools.partial(held_out, kind) for kind in ("needles", "filled")},
        token_bytes=None,
        bayes_loss=0.0,
        decode_tokens=lambda ids: ["BOS" if i == BOS else CHARACTERS[i] for i in ids],
        encode=encode,
        decode=lambda ids: "".join(CHARACTERS[i] for i in ids if i != BOS),
        bos_id=BOS,
    )


def encode(text: str) -> Int[np.ndarray, " _"]:
    """Ids of a text.

    Raises:
      ConfigError: for a character that the language lacks.
    """
    if foreign := sorted(set(text) - set(CHARACTERS)):
        raise ConfigError("text", "".join(foreign), f"the language has these characters alone: {CHARACTERS!r}")
    return np.array([IDS[character] for character in text], np.int32)


def longcontext_config() -> Config:
    """The ungated model and its training at T = 64: two layers of two heads."""
    changes = {
        "model.vocab_size": BOS + 1,
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 32,
        "model.ffn_dim": 128,
        "data.source": "experiments.longcontext:longcontext",
        "data.batch_size": 16,
        "data.eval_sequences": 64,
        "optim.learning_rate": 4e-3,
        "optim.final_learning_rate": 4e-4,
        "optim.warmup_steps": 100,
        "train.steps": 4000,
        "train.eval_every": 1000,
        "train.checkpoint_every": 1000,
    }
    return override(sinkbench_config(), changes)


def _train(
    seed: int, size: int, length: int, step: int, rows: slice | Int[np.ndarray, " R"] = slice(None)
) -> Iterator[Batch]:
    chosen: Sequence[int] = np.arange(size)[rows].tolist()
    kinds = list(KINDS.values())
    while True:
        made = []
        for row in chosen:
            rng = random.Random(f"{seed} {step} {row}")
            made.append(rng.choice(kinds)(rng, length)[0])
        yield _batch(made)
        step += 1


def _batch(texts: Sequence[str]) -> Batch:
    targets = np.stack([encode(text) for text in texts])
    first = np.full_like(targets[:, :1], BOS)
    return {"inputs": np.concatenate([first, targets[:, :-1]], axis=1), "targets": targets}


def _fingerprint() -> str:
    """16 hex digits of rows of every kind: whatever is changed in how they are made changes it."""
    made = [KINDS[kind](random.Random(str(row)), 128) for kind in KINDS for row in range(16)]
    return hashlib.sha256(repr(made).encode()).hexdigest()[:16]
