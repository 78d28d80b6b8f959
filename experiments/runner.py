"""Sweeps: a base config, named overlays and seeds become runs; runs become processes; finished ones are never repeated.

A run is a folder named by its config's fingerprint, so tables share runs and a sweep that was cut goes on where it was.
Who trains a run holds a lock on its folder's log.txt from the moment of its birth (it is the process' own stdout), so a
trainer that outlived its runner is seen, awaited and counted, and no run is ever trained twice at once.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gattn.config import Config, ConfigError, override, to_json
from gattn.files import cache, home, is_local, run_directory, write_atomically

POLL_S = 0.2
PLAIN_EVERY_S = 60.0  # between progress lines where there is no terminal to redraw
GRACE_S = 120.0  # a stopped run gets this long to write its checkpoint (it may sit in a compilation first)
BYTES_PER_RUN = 2 << 30  # memory to reckon with for one training process on a CPU


@dataclass(frozen=True)
class Run:
    """One training run of a sweep."""

    label: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Where it lives; the same for every sweep with this config."""
        return run_directory(self.config)

    @property
    def name(self) -> str:
        """Label and seed, for people."""
        return f"{self.label}, seed {self.seed}"

    def result(self) -> dict[str, Any] | None:
        """The run's result.json, None while it is not finished.

        Raises:
          ValueError: where the file is broken or belongs to another config.
        """
        path = self.folder / "result.json"
        try:
            result = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}): delete the folder and run again") from None
        if result.get("fingerprint") != self.config.fingerprint():
            raise ValueError(f"{path} belongs to another config ({result.get('fingerprint')!r}): move it away")
        return result


@dataclass(frozen=True)
class Outcome:
    """How one run ended; `tail` holds the last lines of a failed run's log. A run that waits was left to Slurm, or only
    printed (`experiments.launchers`)."""

    run: Run
    state: Literal["finished", "failed", "waiting"]
    tail: str = ""


def sweep(base: Config, overlays: Mapping[str, Mapping[str, Any]], seeds: Iterable[int]) -> list[Run]:
    """One run per overlay (dotted fields, see `gattn.config.override`) and seed.

    Raises:
      ConfigError: for an unknown key or a value that does not fit, before anything starts.
    """
    runs = []
    seeds = list(seeds)
    for label, overlay in overlays.items():
        if "train.seed" in overlay:
            raise ConfigError("train.seed", overlay["train.seed"], f"overlay {label!r} must leave it to `seeds`")
        for seed in seeds:
            runs.append(Run(label, seed, override(base, {**overlay, "train.seed": seed})))
    return runs


def train_command(run: Run) -> list[str]:
    """The process that trains one run."""
    return [sys.executable, "-m", "gattn", "train", "--config", str((run.folder / "config.json").resolve())]


def run_all(
    runs: Sequence[Run],
    workers: int | None = None,
    *,
    command: Callable[[Run], list[str]] = train_command,
    console: Console | None = None,
) -> list[Outcome]:
    """Trains what is not finished, at most `workers` at a time (default: sized to the machine); one outcome per run.

    Ctrl-C or SIGTERM stops the trainers, which leave checkpoints; the same call goes on from there.

    Raises:
      ValueError: where two different configs share label and seed, or a folder holds another config's result.
    """
    jobs = jobs_by_folder(runs)
    if any(job.state == "waiting" for job in jobs.values()):
        workers, env = surroundings(workers)
        _Scheduler(list(jobs.values()), workers, env, command).loop(console or Console())
    return [Outcome(run, jobs[run.folder].state, jobs[run.folder].tail) for run in runs]


def surroundings(workers: int | None) -> tuple[int, dict[str, str]]:
    """How many processes at a time (default: sized to the machine), and the environment of each."""
    accelerator = _has_accelerator()
    workers = workers or default_workers(accelerator)
    return workers, _environment(accelerator, workers)


def default_workers(accelerator: bool = False) -> int:
    """As many runs at once as there are usable cores and memory; one where an accelerator does the work."""
    if accelerator:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // BYTES_PER_RUN))


# ---- one run ----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A folder on its way to a result; several runs of a sweep may share it."""

    run: Run
    state: Literal["waiting", "running", "elsewhere", "finished", "failed"] = "waiting"
    tail: str = ""
    log: str = "log.txt"  # where in the folder its output is
    process: subprocess.Popen | None = None

    @property
    def has_result(self) -> bool:
        return (self.run.folder / "result.json").exists()

    @property
    def is_held(self) -> bool:
        """Whether someone trains it: a sweep's trainer locks log.txt, every trainer locks `lock` once it is up."""
        return _held(self.run.folder / "log.txt") or _held(self.run.folder / "lock")

    def start(self, command: Callable[[Run], list[str]], env: dict[str, str]) -> None:
        """Starts the trainer, unless someone else trains this run."""
        folder = self.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "a") as log:
            if not _try_lock(log.fileno()) or _held(folder / "lock"):
                self.state = "elsewhere"
                return
            write_atomically(folder / "config.json", to_json(self.run.config))
            words = command(self.run)
            log.write(f"# {datetime.now().isoformat(timespec='seconds')} start: {' '.join(words)}\n")
            log.flush()
            # A session of its own: Ctrl-C reaches the runner alone, which then asks for a checkpoint. The lock on
            # log.txt belongs to the open file, hence from here on to the child.
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self.state = "running"

    def poll(self) -> None:
        """Moves on from running or elsewhere when that came to an end."""
        folder = self.run.folder
        if self.state == "running" and (code := self.process.poll()) is not None:
            if code and _held(folder / "lock"):  # someone trained it by hand meanwhile
                self.state = "elsewhere"
            elif code == 0 and self.has_result:
                self.state = "finished"
            else:
                self.state = "failed"
                self.tail = "\n".join([*last_lines(folder / "log.txt", 15), f"exit code {code}"])
        elif self.state == "elsewhere" and not self.is_held:
            self.state = "finished" if self.has_result else "waiting"  # cut: it goes on from its checkpoint

    def progress(self) -> tuple[int, float | None, float | None]:
        """Step, loss and seconds left, from the last lines of metrics.jsonl."""
        config = self.run.config
        for line in reversed(last_lines(self.run.folder / "metrics.jsonl", 40)):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line may be half written
            if "loss" in record:
                speed = record.get("tokens_per_s")
                tokens = (config.train.steps - record["step"]) * config.data.batch_size * config.data.seq_len
                return record["step"], record["loss"], tokens / speed if speed else None
        return 0, None, None


def jobs_by_folder(runs: Sequence[Run]) -> dict[Path, Job]:
    """The folders of these runs, each finished or waiting.

    Raises:
      ConfigError: where they would lie in a bucket.
      ValueError: where two different configs share label and seed, or a folder holds another config's result.
    """
    if not is_local(home()):
        raise ConfigError("GATTN_HOME", str(home()), "a sweep watches logs and locks: give it a folder on a disk")
    jobs: dict[Path, Job] = {}
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        if seen.setdefault((run.label, run.seed), run.folder) != run.folder:
            raise ValueError(f"two different configs are both called '{run.name}'")
        jobs.setdefault(run.folder, Job(run, "finished" if run.result() else "waiting"))
    return jobs


def _by_program(jobs: Sequence[Job]) -> list[Job]:
    """First seeds first: the others then find their program in the compilation cache instead of compiling it too."""
    counts: dict[str, int] = {}
    ranks = []
    for job in jobs:
        program = override(job.run.config, {"train.seed": 0}).fingerprint()
        counts[program] = counts.get(program, 0) + 1
        ranks.append(counts[program])
    return [job for _, job in sorted(zip(ranks, jobs, strict=True), key=lambda pair: pair[0])]


# ---- all runs ---------------------------------------------------------------------------------------------------


class _Scheduler:
    def __init__(self, jobs: list[Job], workers: int, env: dict[str, str], command: Callable[[Run], list[str]]):
        self.jobs, self.workers, self.env, self.command = _by_program(jobs), workers, env, command

    def loop(self, console: Console) -> None:
        """Until every job is finished or failed, or a signal stops it."""
        with signals() as received, View(console, self.jobs, f"{self.workers} at a time") as view:
            try:
                while any(job.state in ("waiting", "running", "elsewhere") for job in self.jobs):
                    if received:
                        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
                    self._advance(view)
                    view.refresh()
                    time.sleep(POLL_S)
            finally:
                self._stop(received, view)

    def _advance(self, view: View) -> None:
        for job in self.jobs:
            before = job.state
            job.poll()
            if job.state == "waiting":
                if job.is_held:
                    job.state = "elsewhere"  # noticed before anything starts, because it occupies a slot
                elif job.has_result:
                    job.state = "finished"  # by another sweep that shares it
            if job.state != before:
                view.event(job)
        for job in self.jobs:
            busy = sum(other.state in ("running", "elsewhere") for other in self.jobs)
            if job.state == "waiting" and busy < self.workers:
                job.start(self.command, self.env)
                view.event(job)

    def _stop(self, received: list[int], view: View) -> None:
        mine = [job.process for job in self.jobs if job.state == "running"]
        if mine:
            view.say(f"stopping {len(mine)} runs at a checkpoint; once more to kill them")
        for process in mine:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in mine):
            if len(received) > 1 or time.monotonic() > deadline:
                for process in mine:
                    process.kill()
            time.sleep(POLL_S)
        if others := [job.run.name for job in self.jobs if job.state == "elsewhere"]:
            view.say(f"not mine, still running: {'; '.join(others)}")


@contextmanager
def signals():
    """Collects stop signals in a list: raised anywhere, one could hit between a start and its record."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # An ignored SIGHUP (nohup) stays ignored.
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    old = {s: signal.signal(s, lambda number, _: received.append(number)) for s in wanted}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def whereabouts() -> dict[str, str]:
    """What a trainer needs in its environment, wherever it starts: this checkout and one home."""
    root = str(Path(__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {"GATTN_HOME": str(home().resolve()), "PYTHONPATH": python_path}


def _environment(accelerator: bool, workers: int) -> dict[str, str]:
    """What the trainers see: their whereabouts, a shared compilation cache, one thread each on a CPU."""
    env = os.environ | whereabouts()
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str((cache() / "jax").resolve()))
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if accelerator:
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / workers:.2f}")
    else:
        env["JAX_PLATFORMS"] = "cpu"
        # NPROC is what sizes XLA's pools; --xla_cpu_multi_thread_eigen=false alone left two threads busy (jax 0.12).
        env |= dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return env


def _has_accelerator() -> bool:
    """Asked in a process of its own: a runner that held the device would leave the trainers none."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] != "cpu"
    if not any(importlib.util.find_spec(plugin) for plugin in ("jax_plugins", "libtpu")):
        return False
    words = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() not in ("cpu", "")


# ---- what the user sees -----------------------------------------------------------------------------------------


class View:
    """A live table on a terminal; elsewhere a line per start and end, and now and then one about progress."""

    def __init__(self, console: Console, jobs: list[Job], how: str):
        self.console, self.jobs, self.how = console, jobs, how
        self.began = self.spoke = time.monotonic()
        self.live = Live(console=console, get_renderable=self._table, refresh_per_second=2, transient=True)

    def __enter__(self) -> View:
        done = sum(job.state == "finished" for job in self.jobs)
        self.say(f"{len(self.jobs)} runs, {done} finished before, {self.how}")
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(Text(text))

    def event(self, job: Job) -> None:
        if job.state == "failed":
            self.say(f"failed: {job.run.name} ({job.run.folder / job.log})\n{indent(job.tail)}")
        elif job.state == "finished" or not self.console.is_terminal:
            done = sum(job.state in ("finished", "failed") for job in self.jobs)
            word = {"running": "started", "elsewhere": "running elsewhere"}.get(job.state, job.state)
            self.say(f"[{done}/{len(self.jobs)} {_clock(time.monotonic() - self.began)}] {word}: {job.run.name}")

    def refresh(self) -> None:
        now = time.monotonic()
        if not self.console.is_terminal and now - self.spoke > PLAIN_EVERY_S:
            self.spoke = now
            active = [job for job in self.jobs if job.state in ("running", "elsewhere")]
            self.say("   " + "; ".join(f"{job.run.name}: {' '.join(cells(job))}" for job in active))

    def _table(self) -> Group:
        count = {state: sum(job.state == state for job in self.jobs) for state in ("finished", "failed", "waiting")}
        words = ", ".join(f"{n} {state}" for state, n in count.items() if n)
        table = Table(box=None, pad_edge=False)
        for title in ("run", "seed", "step", "loss", "left", ""):
            table.add_column(title, justify="left" if title in ("run", "") else "right")
        for job in self.jobs:
            if job.state in ("running", "elsewhere"):
                table.add_row(job.run.label, str(job.run.seed), *cells(job), job.state)
        return Group(table, Text(f"{words}, {_clock(time.monotonic() - self.began)} so far", style="dim"))


def cells(job: Job) -> tuple[str, str, str]:
    step, loss, left = job.progress()
    return (
        f"{step}/{job.run.config.train.steps}",
        "-" if loss is None else f"{loss:.3f}",
        "-" if left is None else _clock(left),
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


# ---- files ------------------------------------------------------------------------------------------------------


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(path: Path) -> bool:
    """Whether a process holds the lock on this file."""
    try:
        with open(path, "r+") as file:
            return not _try_lock(file.fileno())
    except FileNotFoundError:
        return False


def last_lines(path: Path, count: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (32 << 10)))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []
