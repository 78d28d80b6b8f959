"""One run: from a Config to a folder with config.json, metrics, events, checkpoints/ and result.json.

A finished run is not trained again, one that was cut goes on from its newest checkpoint, on whatever mesh, and a lock
keeps it from being trained twice at once. Batches are addressed by step, so a checkpoint needs no iterator state.

Of several processes (`gattn.distributed`) each runs all of this, with the same control flow: what steers it is either
the same everywhere by construction (the metrics that a step returns, the log) or decided in the first.
"""

import contextlib
import functools
import importlib.util
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from gattn import metrics, model, moe, probes, sharding
from gattn.checkpoint import CheckpointError, Checkpoints
from gattn.config import Config, ConfigError, to_json
from gattn.data.loader import Batch, Source, open_source
from gattn.distributed import decided, is_first, together
from gattn.files import is_local, run_directory, write_atomically
from gattn.guard import DivergenceError, TrainingError, claim, lock, read_json, signals
from gattn.loss import describe
from gattn.resume import NONE_LEFT, newest, same_data, starting_point, take_over
from gattn.step import (
    State,
    abstract_state,
    describe_model,
    eval_step,
    evaluate_all,
    metric_names,
    new_state,
    train_step,
)

CURVE_POINTS = 300  # at most this many points of the loss curve go into result.json


def train(
    config: Config,
    directory: Path | None = None,
    console: Console | None = None,
    *,
    profile: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Trains the run to its end, or goes on with it, on `config.mesh`, and returns the contents of its result.json.

    Args:
      directory: the run's folder, local or in a bucket; by default `files.run_directory(config)`.
      profile: first step and step after the last of a profiler trace, written to `profile/`.

    Raises:
      ConfigError: the data or the mesh do not fit the config.
      TrainingError: another process trains this run, its folder holds another config or data, its checkpoints cannot be
        read or written, or loss or gradient are not finite (`guard.DivergenceError`).
      SystemExit: 143 or 130 after a SIGTERM or Ctrl-C, to any of the processes; training goes on from the checkpoint
        that was left.
    """
    directory = directory or run_directory(config)
    console = (console or metrics.RunConsole()) if is_first() else Console(quiet=True)
    if config.train.wandb and decided(lambda: importlib.util.find_spec("wandb") is None):
        remedy = "wandb is not installed: pip install wandb, or leave it empty"
        raise ConfigError("train.wandb", config.train.wandb, remedy)
    if profile and not (is_local(directory) and 0 <= profile[0] < profile[1] and profile[0] < config.train.steps):
        remedy = f"give two steps below train.steps = {config.train.steps}, the first the lower, and a folder on a disk"
        raise ConfigError("profile", profile, remedy)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, dict(mesh.shape))
    with signals() as interrupted, contextlib.ExitStack() as held:
        source = together(lambda: open_source(config))  # says what is wrong with the data before anything is written
        begun = Checkpoints(directory / "checkpoints")
        started = decided(lambda: bool(begun.steps) or (directory / "result.json").exists())
        start = None if started else decided(lambda: starting_point(config, directory))
        if (stopping := interrupted()) and jax.process_count() == 1:
            raise SystemExit(128 + stopping)

        def begin() -> dict[str, Any] | None:
            held.enter_context(lock(directory))
            claim(directory, config, console)
            if not (directory / "result.json").exists():
                return None
            console.print(f"finished before: {directory}", highlight=False)
            result = read_json(directory / "result.json")
            same_data(directory, result["data"]["fingerprint"], source)
            return result

        def end() -> dict[str, Any]:
            write_atomically(directory / "result.json", json.dumps(result, allow_nan=False))
            return result

        try:
            if finished := decided(begin):
                return finished
            with jax.set_mesh(mesh), Checkpoints(directory / "checkpoints", config.train) as checkpoints:
                run = _Run(config, directory, source, checkpoints, console, interrupted, profile, mesh, start)
                try:
                    result = run.finish()
                except DivergenceError as error:
                    if not config.train.divergence_is_a_result:
                        raise
                    result = run.description() | {"diverged": {"step": run.step, "reason": str(error)}}
            return decided(end)
        except CheckpointError as error:
            raise TrainingError(str(error)) from error
        except OSError as error:  # a full disk, above all
            raise TrainingError(f"{error}. The same command goes on from the last checkpoint") from error


class _Interrupted(Exception):
    """A signal arrived; raised only where the state is whole."""


class _Run:
    """A run in progress."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        source: Source,
        checkpoints: Checkpoints,
        console: Console,
        interrupted: Callable[[], int | None],
        profile: tuple[int, int] | None,
        mesh: Mesh,
        start: Path | None,
    ):
        self.mesh, self.stopping = mesh, False
        self.config, self.directory, self.source, self.checkpoints = config, directory, source, checkpoints
        self.interrupted, self.profile, self.tracing = interrupted, profile, False
        self.graph = model.abstract(config.model)[0]
        self.step_fn = train_step(self.graph, config)
        self.eval_fn = self.on_mesh(eval_step(self.graph, config))
        self.probe_fn = self.on_mesh(eval_step(self.graph, config, probe=True))
        self.progress = metrics.ProgressLine(config.train.steps, 0, console)
        self.state, self.step, self.seconds = self._begin(start)
        lines = decided(lambda: metrics.read_metrics(directory))
        self.log = together(lambda: metrics.MetricsLog(directory, self.step, self._sinks(), lines, writes=is_first()))
        if (known := len(self.log.losses)) != self.step:
            self.progress.note(
                f"the metrics hold {known} losses of {self.step} steps: curve and spikes begin with those"
            )
        self.spikes = metrics.SpikeCounter(self.log.losses)
        self.pending: tuple[int, jax.Array] | None = None
        self.recent: list[float] = []  # losses since the last line of the log
        self.mark = (self.step, time.monotonic())  # where the next interval's speed is measured from
        self.flops_per_token = model.flops_per_token(config.model, config.data.seq_len)
        self.progress.note(f"{config.run_name}: {'from step ' + str(self.step) if self.step else 'new run'}")
        size = describe_model(config)
        self.progress.note(
            f"{size['params']:,} parameters, {size['param_difference']:+,} to the plain model (FFN {size['ffn_width']})"
        )

    def finish(self) -> dict[str, Any]:
        """Trains what is left, evaluates and probes; the result."""
        done = None
        self.progress.start()
        try:
            try:
                self.loop()
                self.end_trace()
                done = self.evaluate(probe=True)
                self.began = time.monotonic()  # the evaluation was no training
            except _Interrupted:
                pass
            self.settle(write=True)
            self.save()
            self.checkpoints.wait()
        finally:
            with contextlib.ExitStack() as closing:  # each, whatever another raises
                closing.callback(self.progress.stop)
                closing.callback(self.log.close)
                closing.callback(self.end_trace)
        if not done:
            self.progress.note(f"stopped at step {self.step}: the same command goes on from here")
            raise SystemExit(128 + (self.interrupted() or signal.SIGTERM))
        found = self.description()
        found["eval"] |= done[0]
        return {**found, "probes": self.measure(done[1])}

    def loop(self) -> None:
        """Dispatches each step before the metrics of the one before are read, so the device never waits for Python."""
        train = self.config.train
        batches = self.source.train(self.step, sharding.my_rows(self.mesh, self.config.data.batch_size))
        self.began = time.monotonic()
        self.mark = (self.step, self.began)
        while self.step < train.steps:
            self.pause()
            if self.step % train.eval_every == 0 and self.step not in self.log.evaluated:
                self.settle()
                self.evaluate()
            if train.probe_every and self.step % train.probe_every == 0:
                self.probe()
            if self.profile:
                self.trace(*self.profile)
            self.state, vector = self.step_fn(self.state, np.int32(self.step), self.place(next(batches)))
            self.step += 1
            self.settle()
            self.pending = (self.step, vector)
            if self.step % train.checkpoint_every == 0 and self.step < train.steps:
                self.settle(write=True)
                if self.step % train.eval_every == 0:
                    self.evaluate()
                self.save()
        self.settle(write=True)
        self.tick()

    def tick(self) -> None:
        """Counts the time since the last call as training."""
        now = time.monotonic()
        self.seconds, self.began = self.seconds + now - self.began, now

    def on_mesh(self, evaluate: Callable) -> Callable:
        """`evaluate` (of `eval_step`) for whole batches, which every process has read."""
        return lambda params, batch: evaluate(params, sharding.place(self.mesh, batch, len(batch["inputs"])))

    def place(self, batch: Batch) -> dict[str, Any]:
        """This process' rows of a training batch on the mesh, and to the other processes whether a signal came here."""
        placed = sharding.place(self.mesh, batch, self.config.data.batch_size)
        if jax.process_count() > 1:
            flags = np.full(self.mesh.size, self.interrupted() is not None, np.int32)
            where = NamedSharding(self.mesh, PartitionSpec(sharding.AXES))
            placed["stop"] = jax.make_array_from_callback(flags.shape, where, flags.__getitem__)
        return placed

    def pause(self) -> None:
        """Where a signal may stop the run: one process at once, several after the step that told it to all."""
        if self.stopping or (jax.process_count() == 1 and self.interrupted()):
            raise _Interrupted

    def pausing(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; before each a signal may stop the run: of several processes, only one that a step told of,
        so that an evaluation which has begun ends."""
        for batch in batches:
            self.pause()
            yield batch

    def settle(self, write: bool = False) -> None:
        """Reads the metrics of the step dispatched before; a line of the log when one is due, or to `write`."""
        if self.pending:
            step, vector = self.pending
            self.pending = None
            *values, stop, updates = np.asarray(vector).tolist()
            named = dict(zip(metric_names(self.config), values, strict=True))
            self.stopping = self.stopping or stop > 0
            if int(updates) != step:
                self.stop_at_bad_step(named)
            self.recent.append(named["loss"])
            if self.spikes.add(named["loss"]):
                self.progress.note(f"step {step}: loss spike, {named['loss']:.4f}")
            if write or step % self.config.train.log_every == 0:
                self.report(step, named)
        elif write and self.recent:
            self.report(self.step, {})

    def report(self, step: int, named: dict[str, float]) -> None:
        """A line of the log and of the screen."""
        now, tokens = time.monotonic(), self.config.data.batch_size * self.config.data.seq_len
        pace = (now - self.mark[1]) / max(step - self.mark[0], 1)
        named = {**named, "tokens_per_s": tokens / pace, "mfu": self.utilisation(tokens / pace) or math.nan}
        self.log.write(step, self.recent, **{k: v for k, v in named.items() if math.isfinite(v)})
        self.progress.update(step, self.recent[-1], tokens / pace, pace * (self.config.train.steps - step))
        self.recent, self.mark = [], (step, now)

    def utilisation(self, tokens_per_s: float) -> float | None:
        """MFU of the mesh's devices."""
        kind = jax.devices()[0].device_kind
        return metrics.flops_utilisation(self.flops_per_token, tokens_per_s, kind, self.mesh.size)

    def stop_at_bad_step(self, named: dict[str, float]) -> None:
        """Keeps the state before the step that was not finite, and says where it went wrong."""
        self.step = int(self.state.step)
        self.keep()
        try:
            where = self.where_it_is_largest()
        except Exception as error:  # such as no memory for the probes: the state is safe, and the step is known
            where = f"Its layer could not be found ({str(error).partition(chr(10))[0]})"
        raise DivergenceError(
            f"step {self.step + 1}: the loss is {named['loss']:.6g}, the gradient norm {named['grad_norm']:.6g}. "
            f"{where}. The state before this step is kept as checkpoint {self.step}; lower optim.learning_rate or "
            "optim.clip_norm in a new run"
        )

    def where_it_is_largest(self) -> str:
        """The first layer whose activations on the next batch are not finite, or the one where they are largest."""
        batch, largest = next(self.source.train(self.step)), []
        for part in range(self.config.train.accumulation):
            rows = {key: np.split(value, self.config.train.accumulation)[part] for key, value in batch.items()}
            sums = jax.device_get(self.probe_fn(self.state.params, rows)[2])
            largest.append(sums["layers"]["m_act"] / sums["sequences"])
        worst = np.max(largest, axis=0)  # which keeps NaN
        wrong = np.flatnonzero(~np.isfinite(worst))
        layer = int(wrong[0]) if len(wrong) else int(worst.argmax())
        what = "First layer that is not finite" if len(wrong) else "Largest activations"
        return f"{what}: layer {layer} of 0 to {len(worst) - 1}, max |h| = {worst[layer]:.4g} (mean over sequences)"

    def keep(self) -> None:
        """Log and state as they are, on the disk before this returns."""
        if self.recent:
            self.log.write(self.step, self.recent)
            self.recent = []
        self.save()
        self.checkpoints.wait()

    def save(self) -> None:
        """A checkpoint of this step, written while training goes on."""
        self.tick()
        self.log.flush()
        metadata = {"data": self.source.fingerprint, "seconds": self.seconds}
        self.checkpoints.save(self.step, self.state, metadata, self.held_out_losses)

    @property
    def held_out_losses(self) -> dict[int, float]:
        """Step -> held-out loss, where it was measured."""
        return {step: line["eval_loss"] for step, line in self.log.evaluated.items()}

    def evaluate(self, probe: bool = False) -> tuple[dict[str, Any], Any]:
        """Held-out loss and what follows from it, and with `probe` the sums of all probes over the held-out batches."""
        evaluate, params = self.probe_fn if probe else self.eval_fn, self.state.weights
        by_set = {
            name: evaluate_all(evaluate, params, self.pausing(batches()), self.source.token_bytes)
            for name, batches in self.source.held_out.items()
        }
        total, tokens, size = (sum(part) for part in list(zip(*by_set.values(), strict=True))[:3])
        sums = functools.reduce(probes.add, [one.probes for one in by_set.values()]) if probe else None
        if not math.isfinite(total):
            self.settle()
            self.keep()
            raise DivergenceError(f"step {self.step}: the held-out loss is {total / tokens}; lower optim.learning_rate")
        measured = describe(total, tokens, size)
        sets = {name: describe(one.loss, one.tokens, one.size) for name, one in by_set.items()}
        if self.step not in self.log.evaluated:
            several = {f"eval_loss/{name}": one["loss"] for name, one in sets.items()} if len(sets) > 1 else {}
            self.log.write(self.step, eval_loss=measured["loss"], **several)
        self.progress.note(f"step {self.step}: held-out loss {measured['loss']:.4f}")
        self.mark = (self.step, time.monotonic())
        return {**measured, "bayes_loss": self.source.bayes_loss, "sets": sets}, sums

    def probe(self) -> None:
        """Probes the first held-out batch while training goes on."""
        batch = next(next(iter(self.source.held_out.values()))())
        sums = jax.device_get(self.probe_fn(self.state.weights, batch)[2])
        found = probes.summarise(sums, self.config.model.activations)
        numbers = {f"probe/{name}": found[name] for name in ("f_attn", "f_attn_floor", "sink_rate", "m_act")}
        gates = {f"probe/gate_{position}": gate["mean"] for position, gate in found["gates"].items()}
        self.log.write(self.step, **numbers, **gates)

    def trace(self, start: int, stop: int) -> None:
        """Begins or ends the profiler's trace of the steps from `start` to before `stop`, as far as this process is."""
        if not self.tracing and start <= self.step < stop:
            self.tracing = True
            if is_first():
                jax.profiler.start_trace(str(self.directory / "profile"))
        elif self.tracing and self.step >= stop:
            self.settle()
            self.end_trace()

    def end_trace(self) -> None:
        """Writes the trace, if one was begun."""
        if self.tracing:
            self.tracing = False
            if is_first():
                jax.profiler.stop_trace()
            self.progress.note(f"profile up to step {self.step}: {self.directory / 'profile'}")

    def measure(self, sums: Any) -> dict[str, Any]:
        """The probes' numbers, and the attention maps of the first held-out sequence's beginning, mean over heads."""
        maps = sums["layers"]["map"].mean(axis=1)
        tokens = next(next(iter(self.source.held_out.values()))())["inputs"][0, : maps.shape[-1]]
        shown = {"tokens": self.source.decode_tokens(tokens), "by_layer": np.round(maps.astype(float), 4).tolist()}
        experts = {"experts": moe.summarise(sums["moe"], self.config)} if self.config.model.num_experts else {}
        return {**probes.summarise(sums, self.config.model.activations), **experts, "attention_map": shown}

    def description(self) -> dict[str, Any]:
        """The contents of result.json but for what is measured at the end."""
        config, losses, evals = self.config, self.log.losses, sorted(self.held_out_losses.items())
        every = max(1, math.ceil(len(losses) / CURVE_POINTS))
        trained = self.step * config.data.batch_size * config.data.seq_len
        speed = trained / self.seconds
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
            "environment": metrics.environment(config, self.mesh),
            "time": {"train_s": self.seconds, "tokens_per_s": speed, "mfu": self.utilisation(speed)},
            "eval": {"initial_loss": evals[0][1]} if evals else {},
            "spikes": self.spikes.summary(),
            "best_checkpoint": self.checkpoints.best(self.held_out_losses),
            "curve": {"step": list(range(every, len(losses) + 1, every)), "loss": losses[every - 1 :: every]},
            "evals": {"step": [step for step, _ in evals], "loss": [loss for _, loss in evals]},
        }

    def _begin(self, start: Path | None) -> tuple[State, int, float]:
        """The newest readable checkpoint's state, step and training seconds, or at step 0 fresh parameters, or those of
        the run in `start`."""
        self.began = time.monotonic()
        found = newest(self.checkpoints, abstract_state(self.config, self.mesh), self.progress.note)
        if found is None and (damaged := decided(lambda: self.checkpoints.damaged)):
            raise CheckpointError(f"{' and '.join(map(str, damaged))} cannot be used. {NONE_LEFT}")
        if found is None:
            if start is None:
                return new_state(self.config, self.mesh), 0, 0.0
            self.progress.note(f"starts with the weights of {start}")
            return new_state(self.config, self.mesh, lambda fresh: take_over(fresh, start, self.mesh)), 0, 0.0
        same_data(self.directory, found.metadata["data"], self.source)
        for later in decided(lambda: [step for step in self.checkpoints.steps if step > found.step]):
            self.checkpoints.set_aside(later)
        for path in decided(lambda: self.checkpoints.damaged):
            self.progress.note(f"a damaged checkpoint was set aside as {path}")
        return found.state, found.step, found.metadata["seconds"]

    def _sinks(self) -> list[metrics.Sink]:
        sinks: list[metrics.Sink] = []
        if not is_first():
            return sinks
        if self.config.train.tensorboard and is_local(self.directory):
            sinks.append(metrics.TensorBoard(self.directory / "events", self.step))
        elif self.config.train.tensorboard:
            self.progress.note("no TensorBoard events in a bucket: metrics-*.jsonl has every number")
        if self.config.train.wandb:
            sinks.append(metrics.WandB(self.config.train.wandb, self.config))
        return sinks
