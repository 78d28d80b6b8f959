"""A sweep of 24 runs, killed five times at random, against one that was left alone: the same result.json, times apart.

`python -m benchmarks.interrupted_sweep` (Linux; some 10 minutes on 2 cores). Each kill is a SIGKILL: to the runner
alone, whose trainers live on and are found by the next one, or to the runner and all its trainers, in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from configs.variants import apply
from experiments.runner import Run, sweep
from experiments.sinkbench import sinkbench_config
from gattn.config import override

SMALL = {
    "model.d_model": 32,
    "model.head_dim": 16,
    "model.ffn_dim": 64,
    "train.steps": 120,
    "train.eval_every": 40,
    "train.checkpoint_every": 20,
    "optim.warmup_steps": 10,
    "data.eval_sequences": 64,
}
VARIANTS = (
    "baseline",
    "g1_elementwise",
    "g1_headwise",
    "g1_elementwise_shared",
    "g2_elementwise",
    "g1_input_independent",
    "softmax_off_by_one",
    "sink_logit",
)
APART = ("time",)  # of result.json


@dataclass(frozen=True)
class Args:
    """Trains the sweep twice, and kills one of the two."""

    kills: int = 5
    """SIGKILLs."""
    seed: int = 0
    """Of the moments at which they come."""


def runs() -> list[Run]:
    """Eight variants of a small bench A, three seeds each."""
    base = override(sinkbench_config(), SMALL)
    return [run for name in VARIANTS for run in sweep(apply(base, name), {name: {}}, range(3))]


def start(home: Path) -> subprocess.Popen:
    """The sweep in a process of its own."""
    env = os.environ | {"GATTN_HOME": str(home)}
    code = "from benchmarks.interrupted_sweep import runs; from experiments.runner import run_all; run_all(runs())"
    with open(home / "sweep.log", "a") as log:
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=log, stderr=log)


def trainers(home: Path) -> list[int]:
    """Processes that train runs of this home."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"train" in words and any(os.fsencode(home) in word for word in words):
                found.append(int(folder.name))
    return found


def results(home: Path) -> dict[str, Any]:
    """Run's folder -> result.json without what may differ."""
    out = {}
    for path in sorted((home / "runs").glob("*/result.json")):
        result = json.loads(path.read_text())
        out[path.parent.name] = {key: value for key, value in result.items() if key not in APART}
    return out


def main(args: Args, console: Console) -> int:
    """0 where all results agree and all kills hit a running sweep."""
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder) / "calm", Path(folder) / "killed"
        for home in (calm, killed):
            home.mkdir()
        began = time.monotonic()
        if code := start(calm).wait():
            console.print(
                f"the sweep that was left alone ended with {code}: {(calm / 'sweep.log').read_text()[-2000:]}"
            )
            return 1
        seconds = time.monotonic() - began
        console.print(f"left alone: {len(results(calm))} runs in {seconds:.0f} s")
        moments = np.random.default_rng(args.seed).uniform(0.05, 0.8, args.kills) * seconds / args.kills * 1.2
        for number, moment in enumerate(moments):
            process = start(killed)
            try:
                process.wait(timeout=moment)
            except subprocess.TimeoutExpired:
                pass
            else:
                console.print(f"kill {number + 1} came too late: the sweep had ended")
                return 1
            process.kill()
            process.wait()
            alive = trainers(killed)
            if number % 2:
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(pid, signal.SIGKILL)
            words = f"and its {len(alive)} trainers" if number % 2 else f"alone, {len(alive)} trainers live on"
            console.print(
                f"kill {number + 1} after {moment:.0f} s: the runner {words}; {len(results(killed))} runs done"
            )
        code = start(killed).wait()
        whole, other = results(calm), results(killed)
        same = sum(whole[name] == other.get(name) for name in whole)
        console.print(f"went on to the end (exit code {code}): {same} of {len(whole)} results equal, times apart")
        return 0 if same == len(whole) == len(runs()) and not code else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__), Console()))
