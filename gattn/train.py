"""One run: from a Config to a folder with config.json, metrics.jsonl, checkpoints/ and result.json.

A finished run is not trained again, one that was cut goes on from its newest checkpoint, and a lock keeps two processes
from training the same run. Batches are addressed by step, so a checkpoint needs no iterator state.
"""

import contextlib
import fcntl
import json
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from gattn import __version__, model, optim, probes
from gattn.checkpoint import Checkpoints
from gattn.config import Config, ModelConfig, from_dict, to_json
from gattn.data.loader import Source, open_source
from gattn.files import run_directory, write_atomically
from gattn.kernels.api import choose_implementation
from gattn.loss import cross_entropy
from gattn.metrics import MetricsLog, ProgressLine, read_lines

CURVE_POINTS = 300  # at most this many points of the loss curve go into result.json


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


class State(NamedTuple):
    """Everything that training changes."""

    params: Any
    optimizer: Any


def train(config: Config, directory: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Trains the run to its end, or goes on with it, and returns the contents of its result.json.

    Raises:
      ConfigError: the data do not fit the config.
      TrainingError: another process trains this run, its folder holds another config, or the loss is not finite.
      SystemExit: 143 or 130 after a SIGTERM or Ctrl-C that left a checkpoint.
    """
    directory = directory or run_directory(config)
    console = console or Console()
    with _lock(directory):
        _claim(directory, config)
        if (directory / "result.json").exists():
            console.print(f"finished before: {directory}")
            return json.loads((directory / "result.json").read_text(encoding="utf-8"))
        with Checkpoints(directory / "checkpoints") as checkpoints:
            result = _Run(config, directory, checkpoints, console).finish()
        write_atomically(directory / "result.json", json.dumps(result, allow_nan=False))
        return result


class _Run:
    """A run in progress."""

    def __init__(self, config: Config, directory: Path, checkpoints: Checkpoints, console: Console):
        self.config, self.directory, self.checkpoints = config, directory, checkpoints
        self.source: Source = open_source(config)
        self.graph, self.abstract = model.abstract(config.model)
        self.step_fn = train_step(self.graph, config)
        self.eval_fn = eval_step(self.graph, config)
        self.state, self.step, self.seconds = self._start()
        self.log = MetricsLog(directory / "metrics.jsonl", self.step)
        self.progress = ProgressLine(config.train.steps, self.step, console)
        self.progress.note(f"{config.run_name}: {'from step ' + str(self.step) if self.step else 'new run'}")
        size, ffn = model.param_counts(config.model), config.model.ffn_width
        self.progress.note(
            f"{size['params']:,} parameters, {size['param_difference']:+,} to the plain model (FFN {ffn})"
        )

    def finish(self) -> dict[str, Any]:
        """Trains what is left, evaluates and probes; the result."""
        try:
            with _signals() as interrupted:
                self.loop(interrupted)
            evaluated, sums = self.evaluate(probe=True)
        finally:
            self.log.close()
            self.progress.stop()
        return self.summary(evaluated, self.measure(sums))

    def loop(self, interrupted: Callable[[], int | None]) -> None:
        """Dispatches each step before the metrics of the one before are read, so the device never waits for Python."""
        train = self.config.train
        batches = self.source.train(self.step)
        began, pending = time.monotonic(), None
        mark = (self.step, began)
        while self.step < train.steps:
            if self.step % train.eval_every == 0 and self.step not in self.log.evaluated:
                if pending:
                    self.report(*pending, mark)
                    pending = None
                self.evaluate()
                mark = (self.step, time.monotonic())
            self.state, metrics = self.step_fn(self.state, next(batches))
            self.step += 1
            if pending:
                mark = self.report(*pending, mark)
                pending = None
            if self.step % train.log_every == 0 or self.step == train.steps:
                pending = (self.step, metrics)
            stopping = interrupted()
            if stopping or self.step % train.checkpoint_every == 0 or self.step == train.steps:
                if pending:
                    mark = self.report(*pending, mark)
                    pending = None
                self.check(self.step, float(metrics["loss"]))
                self.save(self.seconds + time.monotonic() - began)
            if stopping:
                self.progress.note(f"stopped at step {self.step}: the same command goes on from here")
                raise SystemExit(128 + stopping)
        self.seconds += time.monotonic() - began

    def report(self, step: int, metrics: dict[str, Any], mark: tuple[int, float]) -> tuple[int, float]:
        """Writes one step's metrics; returns where the next interval's speed is measured from."""
        values = {name: float(value) for name, value in metrics.items()}
        self.check(step, values["loss"])
        now = time.monotonic()
        pace = (now - mark[1]) / (step - mark[0])
        tokens_per_s = self.config.data.batch_size * self.config.data.seq_len / pace
        self.log.write(step=step, **values, tokens_per_s=tokens_per_s)
        self.progress.update(step, values["loss"], tokens_per_s, pace * (self.config.train.steps - step))
        return step, now

    def check(self, step: int, loss: float) -> None:
        """Stops a run whose loss is not finite, before it overwrites a checkpoint."""
        if not math.isfinite(loss):
            raise TrainingError(f"step {step}: the loss is {loss}; lower optim.learning_rate or optim.clip_norm")

    def save(self, seconds: float) -> None:
        """A checkpoint of this step."""
        self.checkpoints.save(self.step, self.state, {"data": self.source.fingerprint, "seconds": seconds})

    def evaluate(self, probe: bool = False) -> tuple[dict[str, Any], Any]:
        """Held-out loss and what follows from it, and with `probe` the sums of all probes over the held-out batches."""
        evaluate = eval_step(self.graph, self.config, probe=True) if probe else self.eval_fn
        total, tokens, size, sums = 0.0, 0, 0, None
        for batch in self.source.held_out():
            loss, count, aux = jax.device_get(evaluate(self.state.params, batch))
            total, tokens = total + float(loss), tokens + int(count)
            if self.source.token_bytes is not None:
                size += int(self.source.token_bytes[batch["targets"][batch["targets"] >= 0]].sum())
            if probe:
                sums = aux if sums is None else add_sums(sums, aux)
        self.check(self.step, total / tokens)
        if self.step not in self.log.evaluated:
            self.log.write(step=self.step, eval_loss=total / tokens)
        self.progress.note(f"step {self.step}: held-out loss {total / tokens:.4f}")
        return {
            "loss": total / tokens,
            "perplexity": math.exp(min(total / tokens, 700.0)),
            "bits_per_byte": total / (math.log(2) * size) if size else None,
            "bayes_loss": self.source.bayes_loss,
            "tokens": tokens,
        }, sums

    def measure(self, sums: Any) -> dict[str, Any]:
        """The probes' numbers, and the attention maps of the first held-out sequence's beginning."""
        activations = {spec.position: spec.activation for spec in self.config.model.gates}
        maps = sums["layers"]["map"]
        tokens = next(self.source.held_out())["inputs"][0, : maps.shape[-1]]
        shown = {"tokens": self.source.decode_tokens(tokens), "by_layer": np.round(maps.astype(float), 4).tolist()}
        return {**probes.summarise(sums, activations), "attention_map": shown}

    def summary(self, evaluated: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
        """The contents of result.json."""
        config, lines = self.config, read_lines(self.directory / "metrics.jsonl")
        curve = [line for line in lines if "loss" in line]
        curve = curve[:: math.ceil(len(curve) / CURVE_POINTS)]
        evals = [line for line in lines if "eval_loss" in line]
        trained = config.train.steps * config.data.batch_size * config.data.seq_len
        return {
            "schema": 1,
            "run": config.run_name,
            "fingerprint": config.fingerprint(),
            "label": config.model.label,
            "seed": config.train.seed,
            "config": json.loads(to_json(config)),
            "model": describe_model(config),
            "data": {
                "source": config.data.source,
                "fingerprint": self.source.fingerprint,
                "tokens": trained,
                "vocab_size": self.source.vocab_size,
            },
            "environment": environment(config),
            "time": {"train_s": self.seconds, "tokens_per_s": trained / self.seconds},
            "eval": {**evaluated, "initial_loss": evals[0]["eval_loss"]},
            "probes": measured,
            "curve": {"step": [line["step"] for line in curve], "loss": [line["loss"] for line in curve]},
            "evals": {"step": [line["step"] for line in evals], "loss": [line["eval_loss"] for line in evals]},
        }

    def _start(self) -> tuple[State, int, float]:
        """The newest checkpoint's state, step and training seconds, or fresh parameters at step 0."""
        init_optimizer = optim.optimizer(self.config).init
        if (step := self.checkpoints.latest) is None:
            params = model.init(self.config.model, self.config.train.seed)
            return State(params, jax.jit(init_optimizer)(params)), 0, 0.0
        saved = self.checkpoints.metadata(step)
        if saved["data"] != self.source.fingerprint:
            raise TrainingError(
                f"{self.directory} was trained on data {saved['data']}, here they are {self.source.fingerprint} (the "
                "embedded corpus differs between Python versions): resume with that Python, or move the folder away"
            )
        like = State(self.abstract, jax.eval_shape(init_optimizer, self.abstract))
        return self.checkpoints.restore(step, on_this_device(like)), step, saved["seconds"]


def train_step(graph: nnx.GraphDef, config: Config) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """The jitted optimiser step: (state, batch) -> (state, loss and gradient norm). Donates the old state."""
    optimizer = optim.optimizer(config)

    def loss_fn(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, _ = decoder(batch["inputs"], batch.get("segment_ids"))
        total, count = cross_entropy(hidden, decoder.output_matrix(), batch["targets"], config.train.loss_chunk)
        return total / count

    def step(state: State, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state), {"loss": loss, "grad_norm": optax.tree.norm(gradients)}

    return jax.jit(_precise(step, config.model), donate_argnums=0)


def eval_step(graph: nnx.GraphDef, config: Config, *, probe: bool = False) -> Callable:
    """The jitted evaluation: (params, batch) -> (summed loss, tokens, sums of the probes)."""

    def step(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, aux = decoder(batch["inputs"], batch.get("segment_ids"), probe=probe)
        total, count = cross_entropy(hidden, decoder.output_matrix(), batch["targets"], config.train.loss_chunk)
        return total, count, aux

    return jax.jit(_precise(step, config.model))


def on_this_device(shapes: Any) -> Any:
    """The same `jax.ShapeDtypeStruct`s, placed on the first device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)


def add_sums(total: Any, more: Any) -> Any:
    """Probe sums of two sets of batches; the map stays that of the first."""
    added = jax.tree.map(np.add, total, more)
    added["layers"]["map"] = total["layers"]["map"]
    return added


def describe_model(config: Config) -> dict[str, Any]:
    """Counts of the model as built, for result.json and `--dry-run`."""
    return {
        **model.param_counts(config.model),
        "ffn_width": config.model.ffn_width,
        "flops_per_token": model.flops_per_token(config.model, config.data.seq_len),
    }


def memory_estimate(config: Config) -> dict[str, int]:
    """Bytes on one device, from shapes alone: `states` (parameters, gradients, two Adam moments, all float32) and
    `activations` (what forward keeps for backward at the full batch, before the compiler removes any)."""
    graph, params = model.abstract(config.model)
    tokens = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), jnp.int32)

    def forward(params, tokens):
        return nnx.merge(graph, params)(tokens)[0]

    kept = jax.eval_shape(lambda p, t: jax.vjp(lambda p: forward(p, t), p)[1], params, tokens)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    activations = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    return {"states": 16 * weights, "activations": activations}


def environment(config: Config) -> dict[str, Any]:
    """What ran where, the attention implementation included."""
    shape = jax.ShapeDtypeStruct((1, config.data.seq_len, 1, config.model.head_dim), config.model.dtype)
    asked = None if config.model.attention == "auto" else config.model.attention
    return {
        "gattn": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "cpu": f"{platform.system()} {platform.machine()}",
        "attention": choose_implementation(shape, shape, asked),
        "dtype": config.model.dtype,
    }


def _precise(function: Callable, config: ModelConfig) -> Callable:
    """Float32 means float32 on TPU and GPU too, where the default would round matrix products to bf16 or tf32."""

    def wrapped(*args):
        with jax.default_matmul_precision("highest" if config.dtype == "float32" else "default"):
            return function(*args)

    return wrapped


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Holds the folder for this process; the operating system lets go when the process ends, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "a", encoding="utf-8") as file:
        for _ in range(10):  # a sweep that looks whether a run is held holds it for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise TrainingError(f"{directory} is being trained by another process: wait for it or stop it")
        yield


def _claim(directory: Path, config: Config) -> None:
    """Writes config.json, or checks that the folder's is the same run."""
    path = directory / "config.json"
    if path.exists():
        other = from_dict(Config, json.loads(path.read_text(encoding="utf-8")))
        if other.fingerprint() != config.fingerprint():
            raise TrainingError(f"{directory} holds another run ({other.run_name}): choose another folder")
    write_atomically(path, to_json(config))


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int | None]]:
    """A function that says which of SIGTERM and SIGINT arrived, if one did; a second one acts at once."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield lambda: None
        return

    def note(number, frame):
        arrived.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: arrived[0] if arrived else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
