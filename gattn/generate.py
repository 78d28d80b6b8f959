"""Text from a decoder: prefill and decode with a KV cache, prompts of any lengths in one batch, sampling by the usual
rules.

A prompt is read in one forward pass, and every token after it by one step that is compiled once. What a prompt is
continued with depends on nothing but the prompt, the sampling and its place in the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from gattn import model, sharding
from gattn.config import Config, ConfigError, MeshConfig
from gattn.resume import Loaded
from gattn.schema import at_least, check_types
from gattn.step import precise

Memory = tuple[model.Memory, ...]

ROUND = 64  # prompts and caches are padded to multiples, so that few lengths are compiled


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int = 128
    """Tokens per prompt at most; a document's end ends it earlier."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the most probable token (greedy)."""
    top_k: int = 0
    """Only the k most probable tokens; 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that together have this probability, after top_k."""
    seed: int = 0
    """Of the sampling; each prompt of a batch draws by itself."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which is cut before them."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 1, "max_new_tokens")
        at_least(self, 0, "temperature", "top_k", "seed")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top_p", self.top_p, "a probability above 0, at most 1")
        if "" in self.stop:
            raise ConfigError("stop", self.stop, "an empty string would stop everything: leave it out")


class Generator:
    """A decoder that continues prompts, on one device or on a mesh."""

    def __init__(self, config: Config, params: nnx.State, end: int, mesh: Mesh | None = None):
        """`params` of `gattn.model.init`, on the mesh; `end` is the token that ends a text.

        Raises:
          ConfigError: the mesh cuts sequences.
        """
        if mesh is not None and mesh.shape["context"] > 1:
            raise ConfigError("mesh.context", mesh.shape["context"], "decoding has one token at a time: set it to 1")
        self.config, self.end, self.mesh = config, end, mesh
        with self._context():
            self.graph, self.params = model.unstack(config.model, params)
        self._prefill, self._decode = (
            jax.jit(precise(function, config.model), donate_argnums=1, static_argnums=5)
            for function in (self._first, self._next)
        )

    def tokens(self, prompts: Sequence[Int[np.ndarray, " _"]], sampling: Sampling) -> Iterator[Int[np.ndarray, " B"]]:
        """The next token of every prompt, one step after another; `end` for those that have ended.

        Prompts are ids, BOS included. A step is handed out while the one after it runs.

        Raises:
          ConfigError: a prompt is empty, or reaches beyond the positions that the model has.
        """
        count, longest = len(prompts), max(map(len, prompts), default=0)
        if not count or not min(map(len, prompts)):
            raise ConfigError("prompt", "", "nothing to go on from: give at least one token")
        config = self.config.model
        if config.position == "learned" and longest + sampling.max_new_tokens > config.max_seq_len:
            remedy = f"with {sampling.max_new_tokens} new ones beyond the {config.max_seq_len} learned positions"
            raise ConfigError("prompt", f"{longest} tokens", remedy)
        with self._context():
            rows = _round(count, sharding.parts(*sharding.BATCH))
            width, length = _round(longest, ROUND), _round(longest + sampling.max_new_tokens, ROUND)
            tokens = np.full((rows, width), self.end, np.int32)
            lengths = np.ones(rows, np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            options, greedy = _options(sampling, rows), sampling.temperature == 0
            make = jax.jit(lambda: _laid_out(model.new_memory(config, rows, length)))
            memory, last = self._prefill(self.params, make(), tokens, lengths, options, greedy)
            positions, ended = jnp.asarray(lengths), np.zeros(count, bool)
        for left in reversed(range(sampling.max_new_tokens)):
            before = last
            if left:
                with self._context():  # not around the yield, where the mesh would be the caller's too
                    memory, last, positions = self._decode(self.params, memory, last, positions, options, greedy)
            found = np.where(ended, self.end, np.asarray(before)[:count])
            yield found
            ended |= found == self.end
            if ended.all():
                return

    def _context(self) -> Any:
        return jax.set_mesh(self.mesh if self.mesh is not None else sharding.make_mesh(MeshConfig(), jax.devices()[:1]))

    def _first(self, params, memory: Memory, tokens, lengths, options, greedy):
        decoder = nnx.merge(self.graph, params)
        hidden, memory = decoder.extend(tokens, memory, jnp.zeros_like(lengths))
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return memory, _choose(decoder.logits(last)[:, 0], lengths, options, greedy)

    def _next(self, params, memory: Memory, tokens, positions, options, greedy):
        decoder = nnx.merge(self.graph, params)
        hidden, memory = decoder.extend(tokens[:, None], memory, positions)
        chosen = _choose(decoder.logits(hidden)[:, 0], positions + 1, options, greedy)
        return memory, chosen, positions + 1


def _options(sampling: Sampling, rows: int) -> dict[str, Any]:
    return {
        "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(sampling.top_k),
        "top_p": np.float32(sampling.top_p),
        "seed": np.uint32(sampling.seed),
        "rows": np.arange(rows, dtype=np.int32),
    }


def _laid_out(memory: Memory) -> Memory:
    return jax.tree.map(lambda x: sharding.constrain(x, sharding.BATCH, None, "tensor"), memory)


def _fitting(config: Config, devices: int) -> Config:
    """With a batch that every mesh divides: what is left to check is the model."""
    data = dataclasses.replace(config.data, batch_size=devices, eval_sequences=devices, seq_len=2 * devices)
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, accumulation=1))


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _choose(
    logits: Float[Array, "B V"], positions: Int[Array, "B"], options: dict[str, Any], greedy: bool
) -> Int[Array, "B"]:
    """The token at each row's position: the same whatever the batch's other rows are."""
    logits = sharding.constrain(logits, sharding.BATCH)
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def one(logits, position, row):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(options["seed"]), row), position)
        return jax.random.categorical(key, kept(logits / options["temperature"], options["top_k"], options["top_p"]))

    return jax.vmap(one)(logits, positions, options["rows"]).astype(jnp.int32)


def kept(logits: Float[Array, "V"], top_k: Int[Array, ""], top_p: Float[Array, ""]) -> Float[Array, "V"]:
    """Logits with -inf in place of those that the two rules leave out; what equals the last that stays, stays too."""
    ranked = jnp.sort(logits, descending=True)
    size = logits.shape[-1]
    inside = jnp.arange(size) < jnp.where(top_k > 0, top_k, size)
    probabilities = jax.nn.softmax(jnp.where(inside, ranked, -jnp.inf))
    inside &= jnp.cumsum(probabilities) - probabilities < top_p  # the first always
    least = jnp.min(jnp.where(inside, ranked, jnp.inf))
    return jnp.where(logits >= least, logits, -jnp.inf)


# ---- texts ------------------------------------------------------------------------------------------------------


class Text:
    """One prompt's continuation as it grows: what may be shown of it, and whether a stop string has ended it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]):
        self.ids: list[int] = []
        self.text, self.ended = "", False
        self._decode, self._stop, self._shown = decode, stop, 0

    def add(self, token: int) -> str:
        """Takes one more token; what has become certain of the text: no half character, no beginning of a stop."""
        self.ids.append(token)
        self.text = self._decode(self.ids)
        places = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.ended = self.text[: min(places)], True
            return self._show(len(self.text))
        certain = len(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        for stop in self._stop:
            begun = (n for n in range(min(len(stop) - 1, certain), 0, -1) if self.text[:certain].endswith(stop[:n]))
            certain -= next(begun, 0)
        return self._show(certain)

    def rest(self) -> str:
        """What is left to show when nothing more comes."""
        return self._show(len(self.text))

    def _show(self, until: int) -> str:
        part = self.text[self._shown : until]
        self._shown = max(until, self._shown)
        return part


def texts(
    generator: Generator,
    prompts: Sequence[Int[np.ndarray, " _"]],
    sampling: Sampling,
    decode: Callable[[Sequence[int]], str],
    show: Callable[[int, str], None] = lambda row, part: None,
) -> list[str]:
    """The continuation of every prompt; `show` gets each piece of row r's as soon as it is certain."""
    grown = [Text(decode, sampling.stop) for _ in prompts]
    over = [False] * len(prompts)
    for found in generator.tokens(prompts, sampling):
        for row, (one, token) in enumerate(zip(grown, found.tolist(), strict=True)):
            if not over[row]:
                part = one.rest() if token == generator.end else one.add(token)
                over[row] = one.ended or token == generator.end
                if part:
                    show(row, part)
        if all(over):
            break
    for row, one in enumerate(grown):
        if not over[row] and (part := one.rest()):
            show(row, part)
    return [one.text for one in grown]


def interactive(loaded: Loaded, prompts: Sequence[str], sampling: Sampling, mesh: MeshConfig) -> None:
    """Prints prompts with their continuations: the first as it grows, the others after it.

    Raises:
      ConfigError: the run's tokens are no text, or the mesh does not fit.
    """
    source, config = loaded.source, loaded.config
    if source.encode is None or source.decode is None:
        raise ConfigError("run", config.run_name, "was trained on data that are no text: there is nothing to prompt")
    devices, params = None, loaded.params
    if jax.device_count() > 1:
        devices = sharding.make_mesh(mesh)
        sharding.check(_fitting(config, devices.size), dict(devices.shape))
        params = jax.device_put(params, sharding.shardings(devices, params))
    generator = Generator(config, params, source.bos_id, devices)
    ids = [np.concatenate([[source.bos_id], source.encode(prompt)]).astype(np.int32) for prompt in prompts]
    waiting = list(prompts)

    def show(row: int, part: str) -> None:
        if row:
            waiting[row] += part
        else:
            print(part, end="", flush=True)

    print(prompts[0], end="", flush=True)
    texts(generator, ids, sampling, source.decode, show)
    for text in waiting[1:]:
        print(f"\n---\n{text}", end="")
    print()
