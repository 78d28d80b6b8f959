"""Four capabilities in a good minute of one CPU core, to stand beside perplexity where MMLU and GSM8K mean nothing.

Induction, key-value recall, arithmetic and bracket matching, learned together by one small decoder with experts. Only
*answers* are counted: tokens that follow from what stands before them in their row, so that the Bayes loss is 0. All
other targets are -1, which neither training nor evaluation counts. Each task is a held-out set of its own:
`eval.sets[task].loss`, to be read against `CHANCE[task]`.

The rows, to the letter:

* BOS = 64 stands before x_1 .. x_64; inputs are BOS, x_1 .. x_63, targets x_1 .. x_64. No segment_ids: a row is one
  document. Tokens: symbols 0..31, of which 0..15 are keys and 16..31 values; numbers 0..16 are 32..48; = is 49; the
  opening brackets of the 7 types are 50..56, the closing ones 57..63.
* A row is made from u_0 .. u_220 of `random()`; i(u, n) = floor(n u). Training: row r of step s has the number
  g = s B + r, its task is the (g mod 4)-th in the order below, and its u are the 221 numbers of `default_rng(seed + 1)`
  from the 221 g-th on. Held-out set k (0..3): its j-th row has those of `default_rng(10**6 + k)` from the 221 j-th on.
* `induction`: w_1 .. w_n are symbols, n = 16 + i(u_0, 17), w_j = i(u_j, 32); x_t = w_((t - 1) mod n + 1). Answers: x_t
  with t >= n + 3 and the same as what followed x_{t-2} x_{t-1} wherever these two stood before. One symbol of context
  is often enough, two always are.
* `recall`: 16 pairs k_j v_j, then 16 queries q_j and their answers a_j, where k_j = i(u_{j-1}, 16),
  v_j = 16 + i(u_{j+15}, 16), q_j = k_m with m = 1 + i(u_{j+31}, 16), and a_j is the value of the last pair with the
  key q_j. Keys occur several times among the pairs: the newest value is the right one.
* `arithmetic`: 16 different problems a b = c, c = (a + b) mod 17. Problems are in the order of a, then b; those with
  (a - b) mod 17 in 1..4 are held out and the set has no others; the l-th of the rest (of those held out, in that set)
  gets u_l, and the 16 with the lowest u follow each other from the lowest on. Answers: c. For each held-out problem its
  mirror image b a = c is trained on: asked is whether the order of what is added is known not to matter.
* `brackets`: a word of matched brackets. x_t opens if nothing is open, closes if 65 - t brackets are, else opens if
  u_{2t-2} < 1/2. Opening brackets have the type i(u_{2t-1}, 7), closing ones that of the bracket they close. Answers:
  closing brackets after a closing bracket (behind its own opening one the type is that of the last token). That one
  closes there is given, since nothing else is counted.

A row has 37 answers of induction, 16 of recall, 16 of arithmetic, 15.4 of brackets (means). Chance: without the row
every symbol, value, number or type is an equally frequent answer, so no predictor pays less than ln 32 = 3.466,
ln 16 = 2.773, ln 17 = 2.833, ln 7 = 1.946 nats. (Problems with the same a - b have every sum once.)

Measured with `capability_config`, held-out nats after 1,200 steps:

| variant, seed | induction | recall | arithmetic | brackets |
| --- | --- | --- | --- | --- |
| baseline 0, 1, 2 | 0.066, 0.055, 0.047 | 0.127, 0.128, 0.114 | 0.112, 0.014, 0.050 | 0.520, 0.559, 0.509 |
| g1_elementwise 0, 1 | 0.056, 0.050 | 0.108, 0.136 | 1.820, 0.077 | 0.528, 0.579 |

Induction, recall and brackets differ little from seed to seed. Arithmetic leaves chance suddenly, between steps 200 and
800; in one run of the five so late that it had memorised (0.044 on problems trained on) more than generalised. Compare
its medians, not its means.
"""

from __future__ import annotations

import functools
import hashlib
import math
import string
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.sinkbench import training_uniforms
from gattn.config import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig
from gattn.data.loader import Batch, Source

LENGTH = 64  # T: tokens after BOS
SYMBOLS, SHORTEST, LONGEST = 32, 16, 32  # of strings
KEYS, PAIRS = SYMBOLS // 2, LENGTH // 4  # the other symbols are values; as many queries as pairs
MODULUS, UNSEEN_DIFFERENCES = 17, (1, 2, 3, 4)
TYPES = 7  # of brackets

NUMBER = SYMBOLS  # the first token of each kind; symbols begin at 0
EQUALS = NUMBER + MODULUS
OPENING = EQUALS + 1
CLOSING = OPENING + TYPES
BOS = CLOSING + TYPES
LABELS = (
    *string.ascii_letters[:SYMBOLS],
    *map(str, range(MODULUS)),
    "=",
    *(f"({kind}" for kind in range(TYPES)),
    *(f"{kind})" for kind in range(TYPES)),
    "BOS",
)

EVAL_SEED = 10**6
ROWS_AT_ONCE = 1024  # rows made together: NumPy's cost per call is shared by their steps

CHANCE: Mapping[str, float] = {
    "induction": math.log(SYMBOLS),
    "recall": math.log(SYMBOLS - KEYS),
    "arithmetic": math.log(MODULUS),
    "brackets": math.log(TYPES),
}
"""Task -> nats per answer that the best predictor pays which knows the task and sees nothing of the row: exact, since
all its possible answers are equally frequent."""

Rows = tuple[Int[np.ndarray, "R T"], Bool[np.ndarray, "R T"]]
"""Tokens after BOS, and which of them are answers."""
Task = Callable[[Float[np.ndarray, "R U"]], Rows]


def capability(config: Config) -> Source:
    """The four tasks as a data source (`data.source = "experiments.capability:capability"`), each also a held-out set.

    Raises:
      ConfigError: unless T = 64.
    """
    data = config.data
    if data.seq_len != LENGTH:
        raise ConfigError("data.seq_len", data.seq_len, f"the capability bench has rows of {LENGTH}: set it so")

    def held_out(number: int, task: Task) -> Iterator[Batch]:
        rows = task(np.random.default_rng(EVAL_SEED + number).random((data.eval_sequences, DRAWS)))
        for start in range(0, data.eval_sequences, data.batch_size):
            yield _batch(rows, slice(start, start + data.batch_size))

    return Source(
        fingerprint=_fingerprint(),
        vocab_size=BOS + 1,
        train=functools.partial(_train, config.train.seed, data.batch_size),
        held_out={
            name: functools.partial(held_out, number, task) for number, (name, task) in enumerate(HELD_OUT.items())
        },
        token_bytes=None,
        bayes_loss=0.0,
        decode_tokens=lambda ids: [LABELS[i] for i in ids],
        bos_id=BOS,
    )


def capability_config() -> Config:
    """The ungated model of the bench with its training: 0.21M active of 0.49M non-embedding parameters in 8 experts,
    top-2.

    `python -m gattn train --preset experiments.capability:capability_config`: held-out loss 0.06 on induction, 0.12 on
    recall, 0.06 on arithmetic, 0.53 on brackets (means of 3 seeds), in 70 to 100 s of one core.
    """
    return Config(
        model=ModelConfig(
            vocab_size=BOS + 1,
            num_layers=2,
            d_model=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            init_std=0.06,  # 0.02 is for wider models: with it an earlier form of arithmetic stayed at chance
            match_params=False,
            scan_layers=False,  # as in `tiny`
            num_experts=8,
            experts_per_token=2,
            expert_dim=64,
        ),
        data=DataConfig(source="experiments.capability:capability", seq_len=LENGTH, batch_size=16, eval_sequences=256),
        optim=OptimConfig(learning_rate=2e-3, final_learning_rate=2e-4, warmup_steps=50, weight_decay=1.0),
        train=TrainConfig(steps=1200, eval_every=600, checkpoint_every=600, balance_loss=0.01, router_z_loss=1e-3),
    )


def _induction(uniforms: Float[np.ndarray, "R U"]) -> Rows:
    length = SHORTEST + _below(LONGEST - SHORTEST + 1, uniforms[:, :1])
    strings = _below(SYMBOLS, uniforms[:, 1 : 1 + LONGEST])
    tokens = np.take_along_axis(strings, np.arange(LENGTH) % length, axis=1)
    before, token = SYMBOLS * tokens[:, :-2] + tokens[:, 1:-1], tokens[:, 2:]
    contradicts = (before[:, :, None] == before[:, None, :]) & (token[:, :, None] != token[:, None, :])
    answers = np.arange(LENGTH) >= length + 2
    answers[:, 2:] &= ~np.tril(contradicts).any(axis=2)
    return tokens, answers


def _recall(uniforms: Float[np.ndarray, "R U"]) -> Rows:
    keys, values, asked = np.split(uniforms[:, : 3 * PAIRS], 3, axis=1)
    keys, values = _below(KEYS, keys), KEYS + _below(SYMBOLS - KEYS, values)
    queries = np.take_along_axis(keys, _below(PAIRS, asked), axis=1)
    newest = PAIRS - 1 - (queries[:, :, None] == keys[:, None, ::-1]).argmax(axis=2)
    replies = np.take_along_axis(values, newest, axis=1)
    pairs = np.stack([np.concatenate([keys, queries], axis=1), np.concatenate([values, replies], axis=1)], axis=2)
    position = np.arange(LENGTH)
    answers = (position >= 2 * PAIRS) & (position % 2 == 1)
    return pairs.reshape(-1, LENGTH), np.tile(answers, (len(pairs), 1))


def _arithmetic(problems: Int[np.ndarray, "N 4"], uniforms: Float[np.ndarray, "R U"]) -> Rows:
    chosen = uniforms[:, : len(problems)].argsort(axis=1)[:, : LENGTH // 4]
    return problems[chosen].reshape(-1, LENGTH), np.tile(np.arange(LENGTH) % 4 == 3, (len(chosen), 1))


def _brackets(uniforms: Float[np.ndarray, "R U"]) -> Rows:
    count = len(uniforms)
    rows, depth = np.arange(count), np.zeros(count, int)
    tokens, opened = np.empty((count, LENGTH), int), np.empty((count, LENGTH // 2), int)  # opened: the stack of types
    for t in range(LENGTH):
        opens = (depth == 0) | ((depth < LENGTH - t) & (uniforms[:, 2 * t] < 0.5))
        level = depth - ~opens
        opened[rows, level] = np.where(opens, _below(TYPES, uniforms[:, 2 * t + 1]), opened[rows, level])
        tokens[:, t] = np.where(opens, OPENING, CLOSING) + opened[rows, level]
        depth = level + opens
    answers = tokens >= CLOSING
    answers[:, 1:] &= tokens[:, :-1] >= CLOSING  # behind its own opening bracket the type is that of the last token
    return tokens, answers


def _problems() -> tuple[Int[np.ndarray, "N 4"], Int[np.ndarray, "M 4"]]:
    """Rows a, b, =, sum as tokens: those to train on, and those held out."""
    a, b = (x.ravel() for x in np.indices((MODULUS, MODULUS)))
    problems = np.stack([NUMBER + a, NUMBER + b, np.full_like(a, EQUALS), NUMBER + (a + b) % MODULUS], axis=1)
    unseen = np.isin((a - b) % MODULUS, UNSEEN_DIFFERENCES)
    return problems[~unseen], problems[unseen]


SEEN, UNSEEN = _problems()
TRAINED: Mapping[str, Task] = {
    "induction": _induction,
    "recall": _recall,
    "arithmetic": functools.partial(_arithmetic, SEEN),
    "brackets": _brackets,
}
HELD_OUT: Mapping[str, Task] = {**TRAINED, "arithmetic": functools.partial(_arithmetic, UNSEEN)}
DRAWS = len(SEEN)  # U, uniform numbers that a row takes: arithmetic needs most


def _train(seed: int, batch_size: int, step: int, rows: slice | Int[np.ndarray, " R"] = slice(None)) -> Iterator[Batch]:
    for uniforms in training_uniforms(seed, step, (batch_size, DRAWS), max(1, ROWS_AT_ONCE // batch_size)):
        made = _rows(step * batch_size, uniforms.reshape(-1, DRAWS))
        for i in range(len(uniforms)):
            yield _batch(made, np.arange(i * batch_size, (i + 1) * batch_size)[rows])
        step += len(uniforms)


def _rows(first: int, uniforms: Float[np.ndarray, "R U"]) -> Rows:
    """Rows to train on, the tasks taking turns; `first` is the number of the first."""
    tokens, answers = np.empty((len(uniforms), LENGTH), int), np.empty((len(uniforms), LENGTH), bool)
    for turn, task in enumerate(TRAINED.values()):
        its = slice((turn - first) % len(TRAINED), None, len(TRAINED))
        tokens[its], answers[its] = task(uniforms[its])
    return tokens, answers


def _batch(rows: Rows, chosen: slice | Int[np.ndarray, " B"]) -> Batch:
    tokens, answers = (part[chosen] for part in rows)
    inputs = np.concatenate([np.full((len(tokens), 1), BOS), tokens[:, :-1]], axis=1)
    return {"inputs": inputs.astype(np.int32), "targets": np.where(answers, tokens, -1).astype(np.int32)}


def _below(limit: int, uniforms: Float[np.ndarray, "*S"]) -> Int[np.ndarray, "*S"]:
    """Whole numbers below the limit, all equally likely."""
    return (uniforms * limit).astype(int)


def _fingerprint() -> str:
    """16 hex digits of rows of every task: whatever is changed in how they are made changes it."""
    tokens, answers = _rows(0, np.random.default_rng(0).random((64, DRAWS)))
    return hashlib.sha256(np.where(answers, tokens, -1 - tokens).astype("<i4").tobytes()).hexdigest()[:16]
