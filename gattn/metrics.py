"""What a run writes and shows while it trains: metrics, TensorBoard and W&B, loss spikes, a progress line."""

import collections
import contextlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gattn import __version__
from gattn.config import Config, to_json
from gattn.files import is_local, write_atomically
from gattn.kernels.api import choose_implementation

PART_LINES = 2000  # of metrics, where a file cannot be appended to

# Dense bfloat16 FLOP/s of one device by `jax.Device.device_kind`, from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
}


class Sink(Protocol):
    """Where numbers go besides the log."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def flops_utilisation(flops_per_token: float, tokens_per_s: float, device_kind: str, devices: int) -> float | None:
    """MFU (PaLM, App. B): the model's own training FLOPs over the devices' bfloat16 peak, None where it is unknown."""
    peak = PEAK_FLOPS.get(device_kind)
    return None if peak is None else flops_per_token * tokens_per_s / (peak * devices)


class SpikeCounter:
    """Counts loss spikes, one loss a step.

    A loss spikes when it lies more than `DEVIATIONS` standard deviations above the mean of the last `WINDOW` losses
    that did not spike (at least `LEAST` of them). A spike is an event: it begins with such a loss and lasts until
    `QUIET` losses in a row did not spike, so a jump, its tail, and a loss that never comes back are one spike each. The
    share of spiking losses is what OLMo 2 (arXiv 2501.00656) calls the spike score, with its 7 deviations over 1000
    steps made fit for runs of some hundred steps. A loss that is not finite spikes.
    """

    WINDOW, LEAST, QUIET, DEVIATIONS = 128, 32, 16, 6.0

    def __init__(self, losses: Iterable[float] = ()):
        self._calm: collections.deque[float] = collections.deque(maxlen=self.WINDOW)
        self._seen = 0
        self._last = -self.QUIET - 1
        self.begins: list[int] = []
        """Steps, from 1, at which a spike begins."""
        self.spiking = 0
        """Losses that spiked."""
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Takes the next step's loss; whether a spike begins with it."""
        self._seen += 1
        if not self._is_high(loss):
            self._calm.append(loss)
            return False
        begins = self._seen - self._last > self.QUIET
        self._last = self._seen
        self.spiking += 1
        if begins:
            self.begins.append(self._seen)
        return begins

    def _is_high(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._calm) < self.LEAST:
            return False
        mean = sum(self._calm) / len(self._calm)
        variance = sum((x - mean) ** 2 for x in self._calm) / len(self._calm)
        return loss - mean > self.DEVIATIONS * math.sqrt(variance)

    def summary(self) -> dict[str, Any]:
        """The count, where each begins, and the share of losses that spiked."""
        return {"count": len(self.begins), "steps": self.begins, "share": self.spiking / max(self._seen, 1)}


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Every complete line of a run's metrics, in order; a last line that a crash cut short is left out."""
    files = [directory / "metrics.jsonl"] if is_local(directory) else sorted(directory.glob("metrics-*.jsonl"))
    lines = []
    for text in dict.fromkeys(t for file in files if file.exists() for t in file.read_text().splitlines()):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class MetricsLog:
    """One JSON object a line: appended to metrics.jsonl, or in a bucket, whose objects cannot be appended to, in parts
    `metrics-<number>.jsonl` that are written whole at every `flush`. Opened at a step, it drops lines beyond it: they
    are redone. Of several processes one `writes`; the others are given the `lines` that it read, and know the same."""

    def __init__(
        self,
        directory: Path,
        step: int,
        sinks: Sequence[Sink] = (),
        lines: Sequence[dict[str, Any]] | None = None,
        *,
        writes: bool = True,
    ):
        lines = read_metrics(directory) if lines is None else lines
        kept = [line for line in lines if line["step"] <= step]
        self.evaluated = {line["step"]: line for line in kept if "eval_loss" in line}
        losses = (x for line in kept for x in line.get("losses", ()))
        self.losses: list[float] = [math.nan if x is None else x for x in losses]
        """The loss of every step so far."""
        self._directory, self._sinks = directory, sinks
        self._lines = [json.dumps(line) + "\n" for line in kept]
        self._file, self._writes = None, writes
        if not writes:
            return
        if is_local(directory):
            path = directory / "metrics.jsonl"
            write_atomically(path, "".join(self._lines))
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the run
            return
        self._part = 0
        old = sorted(directory.glob("metrics-*.jsonl"))
        self.flush()
        for path in old[1:]:
            path.unlink()

    def write(self, step: int, losses: Sequence[float] = (), **values: Any) -> None:
        """One line: `losses` are those of the steps since the line before. What is not finite is written as null, so
        that every line is JSON."""
        self.losses += losses
        line = {"step": step, **values, **({"losses": list(losses)} if losses else {})}
        if "eval_loss" in line:
            self.evaluated[step] = line
        text = json.dumps(finite(line)) + "\n"
        if self._file:
            self._file.write(text)
        elif self._writes:
            self._lines.append(text)
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        for sink in self._sinks:
            sink.write(step, numbers)

    def flush(self) -> None:
        """Writes what only memory holds yet, through to the disk."""
        if self._file:
            os.fsync(self._file.fileno())
            return
        if not (self._writes and self._lines):
            return
        write_atomically(self._directory / f"metrics-{self._part:06d}.jsonl", "".join(self._lines))
        if len(self._lines) >= PART_LINES:
            self._part, self._lines = self._part + 1, []

    def close(self) -> None:
        """Also of the sinks; each is closed whatever another raises."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)
            if self._file:
                closing.callback(self._file.close)
            self.flush()


class TensorBoard:
    """Events below `directory`; those beyond `step` are marked as redone. Written at once, so that a disk that takes no
    more is an OSError here and not a thread that died."""

    def __init__(self, directory: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), filename_suffix=f".{step}")
        self._writer.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.write_event(self._event(step=step, wall_time=time.time(), summary=self._scalar(name, value)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run of the same name, which goes on when the run does."""

    def __init__(self, project: str, config: Config):
        import wandb

        values, name = json.loads(to_json(config)), config.run_name
        self._run = wandb.init(project=project, id=name, name=name, config=values, resume="allow")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def finite(value: Any) -> Any:
    """The same dicts and lists with None for every number that is not finite, so that they can be written as JSON."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunConsole(Console):
    """A console whose reader may go away (`| head`): it falls silent, and what it reported on goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressLine:
    """Steps, loss, tokens/s and time left: a live bar on a terminal, else a line at most every ten seconds."""

    def __init__(self, steps: int, start: int, console: Console):
        self._console = console
        self._steps = steps
        self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.fields[status]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, status="compiling")

    def start(self) -> None:
        self._bar.start()

    def update(self, step: int, loss: float, tokens_per_s: float, seconds_left: float) -> None:
        """Shows where the run is; `step` counts finished steps."""
        status = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step == self._steps or time.monotonic() - self._printed >= 10):
            self._printed = time.monotonic()
            self._console.print(f"step {step}/{self._steps}  {status}  {seconds_left:,.0f} s left")

    def note(self, text: str) -> None:
        """A line of its own above the bar."""
        self._console.print(text, highlight=False)

    def stop(self) -> None:
        self._bar.stop()


def environment(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What ran where, the attention implementation included."""
    model, length = config.model, config.data.seq_len
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads, model.head_dim), model.dtype)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    attention = choose_implementation(
        query,
        key,
        key,
        is_causal=True,
        segment_ids=None if config.data.attend_across_documents else jax.ShapeDtypeStruct((1, length), "int32"),
        sinks=None if model.softmax == "standard" else jax.ShapeDtypeStruct((model.num_heads,), "float32"),
        implementation=None if model.attention == "auto" else model.attention,
    )
    return {
        "gattn": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "cpu": f"{platform.system()} {platform.machine()}",
        "attention": attention,
        "dtype": config.model.dtype,
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "processes": jax.process_count(),
    }
