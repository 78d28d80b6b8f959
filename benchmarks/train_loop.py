"""What the training loop costs over the bare jitted step, side by side: `python -m benchmarks.train_loop [tiny small]`.

The loop is the real one: batches read from the corpus, every step's metrics read, log, TensorBoard events, spike count.
The bare step is the same compiled function in a Python loop over one batch that lies on the device. Both take turns in
one process, some steps each, so that a machine whose speed drifts does not decide; the ratio is of their summed times.
`small` is measured with one sequence a step, as a CPU can. A probe's cost is measured too: the interval from which on
it is under 3%.
"""

import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from configs.models import small, tiny
from gattn.checkpoint import Checkpoints
from gattn.config import Config, override
from gattn.data.loader import open_source
from gattn.sharding import make_mesh
from gattn.train import _Interrupted, _Run

NEVER = 10**6
WITHOUT_PAUSES = {
    "train.steps": NEVER,
    "train.eval_every": NEVER,
    "train.checkpoint_every": NEVER,
    "optim.warmup_steps": 1,
}
PRESETS = {
    "tiny": (override(tiny(), WITHOUT_PAUSES), 20, 8),
    "small": (override(small(), WITHOUT_PAUSES | {"data.batch_size": 1, "data.eval_sequences": 2}), 4, 6),
}


def bare(run: _Run, batch, steps: int) -> float:
    """Seconds of `steps` calls of the jitted step."""
    began = time.perf_counter()
    for _ in range(steps):
        run.state, vector = run.step_fn(run.state, np.int32(run.step), batch)
        run.step += 1
    jax.block_until_ready(vector)
    return time.perf_counter() - began


def loop(run: _Run, steps: int) -> float:
    """Seconds of `steps` turns of the training loop."""
    target = run.step + steps
    run.interrupted = lambda: 1 if run.step >= target else None
    began = time.perf_counter()
    try:
        run.loop()
    except _Interrupted:
        run.settle(write=True)
    return time.perf_counter() - began


def probe(run: _Run) -> float:
    """Seconds of one probe during training."""
    began = time.perf_counter()
    run.probe()
    return time.perf_counter() - began


def measure(name: str, config: Config, steps: int, rounds: int, folder: Path) -> None:
    console = Console(quiet=True)
    source, mesh = open_source(config), make_mesh(config.mesh)
    with jax.set_mesh(mesh), Checkpoints(folder / "checkpoints", config.train) as checkpoints:
        run = _Run(config, folder, source, checkpoints, console, lambda: None, None, mesh)
        run.log.evaluated[0] = {}  # the evaluation before the first step is not what is measured
        batch = jax.device_put(next(source.train(0)))
        bare(run, batch, 2), loop(run, 2), probe(run)  # compiled now
        pairs = []
        for turn in range(rounds):
            if turn % 2:
                pairs.append((bare(run, batch, steps), loop(run, steps)))
            else:
                pairs.append((loop(run, steps), bare(run, batch, steps))[::-1])
        probes = [probe(run) for _ in range(3)]
        run.log.close()
    without, with_loop = (sum(times) for times in zip(*pairs, strict=True))
    ratios = sorted(a / b for b, a in pairs)
    step = without / (steps * rounds)
    print(
        f"{name}: {1e3 * step:.1f} ms a bare step, loop / bare = {with_loop / without:.3f} "
        f"(turns {ratios[0]:.3f} to {ratios[-1]:.3f}, median {statistics.median(ratios):.3f}; {rounds} x {steps} steps)"
    )
    cost = statistics.median(probes) / step
    print(f"{name}: a probe costs {cost:.2f} steps, under 3% with train.probe_every >= {math.ceil(cost / 0.03)}")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PRESETS:
        with tempfile.TemporaryDirectory() as place:
            measure(chosen, *PRESETS[chosen], Path(place))
