"""Benches A, B and deep: attention sinks in a minute or two on one CPU core.

A small language in which attention has work only after *trigger* tokens: a trigger with offset o makes the next token a
copy of the one o positions before the trigger, anything else is followed by a draw from a bigram table. At all other
positions a softmax head needs a way to do nothing, and the fixed first token is the way it finds: a plain decoder
puts most of its attention there within 1,200 steps. (After the Bigram-Backcopy task of Guo et al. 2024, made robust
and fast.) Bench A (`sinkbench`: RoPE, 2 heads) asks which gates remove the sink, bench B (`sinkbench_heads`: learned
positions, 4 heads and offsets, weight decay 1.0) whether the heads need gates of their own. In one layer no massive
activations form; the deep bench (`sinkbench_deep`: six layers, copies under four permutations) has them too, and lets
sink and activations be told apart.

The language of A and B, to the letter:

* Tokens 0..63; BOS = 64 stands before every sequence of T = 64. A batch has inputs x[:, :-1] and targets x[:, 1:], so
  that inputs are T long and every token after BOS is a target. No segment_ids: a row is one document.
* `default_rng(123)` draws row i of the bigram table from Dirichlet(6.4 marginal + 1e-4), marginal_i ~ 1 / (i + 1).
* Triggers are tokens 0 .. n-1, n = k * len(offsets); trigger i has offset `offsets[i % len(offsets)]`. In the rows of
  the others each trigger gets 0.4 / n and the rest is scaled to 0.6; the rows of triggers never lead to triggers.
* x_1 follows the marginal over non-triggers. For t >= 2 and p = x_{t-1}: if p is a trigger and t-1-o >= 1 then
  x_t = s(x_{t-1-o}), s being the identity on non-triggers and trigger i -> the i-th non-trigger; else x_t ~ row p.
* Position t of step j takes one `random(B)` of `default_rng(seed + 1)`, whether it uses it or not, after those of all
  earlier positions and steps, x_1 included; u becomes the number of entries of the cumulated row that are <= u.
  Evaluation: the same from `default_rng(10**6)`, B being the number of sequences.
* A longer T goes on: evaluation's sequences begin with those of the shorter one.
* Bayes loss = mean negative log-likelihood of the evaluation set's targets, x_1 under its own distribution and copies
  at 0. With 256 sequences 1.6714 (A) and 1.6680 (B); 28.5% of the positions are triggers.

The deep bench differs from that in this:

* T = 48: BOS and 47 tokens are read. The triggers are the 8 most frequent tokens, that is 0..7, with offsets 1, 2, 3, 4
  in turn; after a non-trigger a trigger follows with probability 0.5 (0.5 / 8 each, the rest scaled to 0.5).
* s is a fixed permutation of the 56 non-triggers for each offset, drawn by the table's generator after its rows, offset
  by offset (`permutation(56)`); trigger i as a source counts as the i-th non-trigger before it is permuted.
* Rows are Dirichlet(64 * 0.1 * marginal + 1e-4), as in A and B; training and evaluation draw as there. With 128
  sequences the Bayes loss is 1.7478; 33.3% of the positions are triggers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from gattn.config import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig, override
from gattn.data.loader import Batch, Source

VOCAB = 64  # tokens without BOS
BOS = 64
LENGTH = 64  # T of benches A and B: tokens after BOS
TABLE_SEED, EVAL_SEED = 123, 10**6
ROWS_AT_ONCE = 1024  # sequences generated together: NumPy's cost per call is shared by their steps


@dataclass(frozen=True)
class Language:
    """The language with `per_offset` triggers for each offset; n triggers in all."""

    offsets: tuple[int, ...]
    per_offset: int
    length: int = LENGTH
    """T: tokens after BOS."""
    trigger_share: float = 0.4
    """How often a trigger follows a non-trigger."""
    permuted: bool = False
    """Whether copies pass through a permutation of their offset's own."""

    @property
    def num_triggers(self) -> int:
        """n: tokens below it are triggers."""
        return self.per_offset * len(self.offsets)

    @functools.cached_property
    def first(self) -> Float[np.ndarray, " V"]:
        """Distribution of x_1."""
        weights = np.where(np.arange(VOCAB) >= self.num_triggers, _marginal(), 0.0)
        return weights / weights.sum()

    @functools.cached_property
    def _drawn(self) -> tuple[Float[np.ndarray, "V V"], Int[np.ndarray, "offsets V"]]:
        """`bigram` and `copy_of`."""
        rng = np.random.default_rng(TABLE_SEED)
        table = np.stack([rng.dirichlet(_marginal() * VOCAB * 0.1 + 1e-4) for _ in range(VOCAB)])
        n = self.num_triggers
        table[n:, n:] *= (1.0 - self.trigger_share) / table[n:, n:].sum(axis=1, keepdims=True)
        table[n:, :n] = self.trigger_share / n
        table[:n, :n] = 0.0
        table[:n] /= table[:n].sum(axis=1, keepdims=True)
        orders = [rng.permutation(VOCAB - n) if self.permuted else np.arange(VOCAB - n) for _ in self.offsets]
        tokens = np.arange(VOCAB)
        return table, np.stack([n + order[np.where(tokens < n, tokens, tokens - n)] for order in orders])

    @property
    def bigram(self) -> Float[np.ndarray, "V V"]:
        """Distribution of the next token (columns) after each token (rows) where nothing is copied."""
        return self._drawn[0]

    @property
    def copy_of(self) -> Int[np.ndarray, "offsets V"]:
        """s: what a token becomes when a trigger of each offset copies it."""
        return self._drawn[1]

    @functools.cached_property
    def offset_of(self) -> Int[np.ndarray, " V"]:
        """Offset of each token, 0 for non-triggers."""
        tokens = np.arange(VOCAB)
        return np.where(tokens < self.num_triggers, np.array(self.offsets)[tokens % len(self.offsets)], 0)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what defines the language. (The table's last bits depend on the C library's logarithm.)"""
        text = f"sinkbench {self.offsets} {self.per_offset} {VOCAB} {self.length} {TABLE_SEED} {EVAL_SEED}"
        if self.permuted:
            text += f" {self.trigger_share} permuted"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def speak(self, uniforms: Float[np.ndarray, "T B"]) -> tuple[Int[np.ndarray, "B T+1"], Float[np.ndarray, "B T"]]:
        """Sequences, BOS first, made from one uniform number per position; with the negative log-likelihood in nats of
        each token after BOS."""
        length, batch = uniforms.shape
        table, cumulated, rows = self.bigram, self.bigram.cumsum(axis=1), np.arange(batch)
        tokens = np.full((length + 1, batch), BOS)
        nll = np.zeros((length, batch))
        tokens[1] = _invert(self.first.cumsum(), uniforms[0])
        nll[0] = -np.log(self.first[tokens[1]])
        for t in range(2, length + 1):
            before = tokens[t - 1]
            drawn = _invert(cumulated[before], uniforms[t - 1])
            offset = self.offset_of[before]
            source = np.minimum(tokens[np.maximum(t - 1 - offset, 0), rows], VOCAB - 1)  # BOS is never copied
            copied = self.copy_of[before % len(self.offsets), source]
            copies = (offset > 0) & (t - 1 - offset >= 1)
            tokens[t] = np.where(copies, copied, drawn)
            nll[t - 1] = np.where(copies, 0.0, -np.log(table[before, drawn]))
        return tokens.T, nll.T


BENCH_A = Language(offsets=(2, 3), per_offset=2)
BENCH_B = Language(offsets=(1, 2, 3, 4), per_offset=1)
DEEP = Language(offsets=(1, 2, 3, 4), per_offset=2, length=48, trigger_share=0.5, permuted=True)


def sinkbench(config: Config) -> Source:
    """Bench A as a data source (`data.source = "experiments.sinkbench:sinkbench"`). ConfigError below T = 64."""
    return _source(BENCH_A, config)


def sinkbench_heads(config: Config) -> Source:
    """Bench B as a data source (`data.source = "experiments.sinkbench:sinkbench_heads"`). ConfigError below T = 64."""
    return _source(BENCH_B, config)


def sinkbench_deep(config: Config) -> Source:
    """The deep bench as a data source (`data.source = "experiments.sinkbench:sinkbench_deep"`). ConfigError below
    T = 48."""
    return _source(DEEP, config)


def sinkbench_deep_unseen(config: Config) -> Source:
    """The deep bench without a target at BOS (`experiments.sinkbench:sinkbench_deep_unseen`); its loss is that of the
    other targets, and so is the Bayes loss. ConfigError below T = 48."""
    source = _source(DEEP, config, skip=1)

    def unseen(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            targets = batch["targets"].copy()
            targets[:, 0] = -1
            yield batch | {"targets": targets}

    return dataclasses.replace(
        source,
        fingerprint=hashlib.sha256(f"{source.fingerprint} unseen".encode()).hexdigest()[:16],
        train=lambda step, rows=slice(None): unseen(source.train(step, rows)),
        held_out={"held-out": lambda: unseen(source.held_out["held-out"]())},
    )


def sinkbench_config() -> Config:
    """The ungated model of bench A with its training; variants replace model.gates or model.softmax, runs train.seed.

    A prototype measured F-Attn 0.65 for the baseline, 0.02 for G1 gates (floor 0.059), loss = Bayes + 0.0075.
    """
    return _config("sinkbench", num_heads=2, position="rope", weight_decay=0.1)


def sinkbench_heads_config() -> Config:
    """The ungated model of bench B with its training.

    A prototype measured F-Attn 0.60 for the baseline, 0.17 G1 headwise, 0.49 G1 headwise shared (floor 0.059).
    """
    return _config("sinkbench_heads", num_heads=4, position="learned", weight_decay=1.0)


def sinkbench_deep_config() -> Config:
    """The ungated model of the deep bench with its training: 6 layers, 2 heads, no weight decay.

    A prototype measured F-Attn 0.31 and M-Act 364 for the baseline, 0.44 and 113 for G2 elementwise, 0.08 and 186 for
    G1 elementwise (floor about 0.07).
    """
    shallow = _config("sinkbench_deep", num_heads=2, position="rope", weight_decay=0.0)
    deep = {"model.num_layers": 6, "model.ffn_dim": 128, "model.scan_layers": False, "model.max_seq_len": DEEP.length}
    short = {"data.seq_len": DEEP.length, "data.batch_size": 16, "data.eval_sequences": 128}
    return override(shallow, {**deep, **short, "train.steps": 1500, "train.eval_every": 750})


def _config(source: str, *, num_heads: int, position: Literal["rope", "learned"], weight_decay: float) -> Config:
    model = ModelConfig(
        vocab_size=VOCAB + 1,
        num_layers=1,
        d_model=128,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=128 // num_heads,
        ffn_dim=256,
        position=position,
        rope_theta=10_000.0,
        max_seq_len=LENGTH,
        qk_norm=False,
        tied_embeddings=False,
        norm_eps=1e-6,
        init_std=0.02,
        match_params=False,
        dtype="float32",
    )
    return Config(
        model=model,
        data=DataConfig(source=f"experiments.sinkbench:{source}", seq_len=LENGTH, batch_size=32, eval_sequences=256),
        optim=OptimConfig(
            learning_rate=3e-3,
            final_learning_rate=3e-4,
            warmup_steps=50,
            weight_decay=weight_decay,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            clip_norm=1.0,
        ),
        train=TrainConfig(steps=1200, eval_every=600, checkpoint_every=600),
    )


def _source(language: Language, config: Config, skip: int = 0) -> Source:
    length = config.data.seq_len
    if length < language.length:
        remedy = f"the bench has sequences of {language.length}, and goes on beyond: set it to at least that"
        raise ConfigError("data.seq_len", length, remedy)
    language = dataclasses.replace(language, length=length)
    batch_size = config.data.batch_size
    uniforms = np.random.default_rng(EVAL_SEED).random((length, config.data.eval_sequences))
    held_out_tokens, nll = language.speak(uniforms)

    def held_out() -> Iterator[Batch]:
        for start in range(0, len(held_out_tokens), batch_size):
            yield _batch(held_out_tokens[start : start + batch_size])

    return Source(
        fingerprint=language.fingerprint,
        vocab_size=VOCAB + 1,
        train=functools.partial(_train, language, config.train.seed, batch_size),
        held_out={"held-out": held_out},
        token_bytes=None,
        bayes_loss=float(nll[:, skip:].mean()),
        decode_tokens=lambda ids: [_label(language, int(i)) for i in ids],
    )


def _train(
    language: Language, seed: int, batch_size: int, step: int, rows: slice | Int[np.ndarray, " R"] = slice(None)
) -> Iterator[Batch]:
    for uniforms in training_uniforms(seed, step, (language.length, batch_size), max(1, ROWS_AT_ONCE // batch_size)):
        tokens, _ = language.speak(uniforms.transpose(1, 0, 2).reshape(language.length, -1))
        for i in range(len(uniforms)):
            yield _batch(tokens[i * batch_size : (i + 1) * batch_size][rows])


def training_uniforms(
    seed: int, step: int, shape: tuple[int, int], steps_at_once: int
) -> Iterator[Float[np.ndarray, "steps_at_once _ _"]]:
    """What a bench draws its training data from: numbers in `shape` for every step, those before `step` passed over."""
    bits = np.random.PCG64(seed + 1)  # what default_rng(seed + 1) draws from
    bits.advance(step * math.prod(shape))  # random() takes one state per number
    rng = np.random.Generator(bits)
    while True:
        yield rng.random((steps_at_once, *shape))


def _batch(tokens: Int[np.ndarray, "B T+1"]) -> Batch:
    return {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def _marginal() -> Float[np.ndarray, " V"]:
    weights = 1.0 / np.arange(1, VOCAB + 1)
    return weights / weights.sum()


def _invert(cumulated: Float[np.ndarray, "*B V"], uniforms: Float[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """The first token whose cumulated probability exceeds u; the last where rounding leaves even the sum below u."""
    return np.minimum((cumulated <= uniforms[:, None]).sum(axis=-1), VOCAB - 1)


def _label(language: Language, token: int) -> str:
    if token == BOS:
        return "BOS"
    offset = language.offset_of[token]
    return f"{token}↩{offset}" if offset else str(token)
