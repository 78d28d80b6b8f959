"""Whether a mixture of experts learns the same on any mesh: `python -m benchmarks.mesh_curves` (CPU, minutes).

`moe_tiny` in float32 is trained for 50 steps by the command line, on one device, on `data=2,expert=4` (8 virtual
devices), in two processes of 4 devices each, and on one mesh up to step 25 and on another after that. Printed: how far
the loss falls, the largest difference to the curve of one device, and how many of the routers' choices differ at steps
25 and 50 on one held-out batch, all runs' weights being evaluated on one device. Exit code 1 if a curve differs by 1e-4
or more, or if the loss falls by less than 1 nat.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from gattn import moe, sharding
from gattn.layers import Context
from gattn.metrics import read_metrics
from gattn.resume import load
from gattn.rope import rope_table

STEPS, CUT = 50, 25
COMMAND = (
    *(sys.executable, "-m", "gattn", "train", "--preset", "moe_tiny", "--train.steps", str(STEPS)),
    *("--optim.warmup-steps", "10", "--train.keep-last", "9", "--train.checkpoint-every", str(CUT)),
    *("--data.eval-sequences", "16", "--train.tensorboard", "False"),
    # Adam turns a gradient that is all rounding error into a step of full length; with a larger eps it does not.
    *("--optim.eps", "1e-6", "--optim.learning-rate", "1e-3"),
)


def train(directory: Path, mesh: str, devices: int, *, processes: int = 1) -> None:
    """Trains a run to its end, or goes on with it."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices // processes)}
    words = [*COMMAND, "--dir", str(directory), "--mesh", mesh]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    several = [["--distributed", f"{address},{processes},{i}"] for i in range(processes)] if processes > 1 else [[]]
    running = [subprocess.Popen(words + more, env=environment, stdout=subprocess.DEVNULL) for more in several]
    if codes := [code for process in running if (code := process.wait())]:
        raise SystemExit(f"{directory.name}: exit codes {codes}")


def choices(directory: Path, step: int) -> np.ndarray:
    """The experts [L, tokens, k] that a run's routers choose at a step on the first held-out batch."""
    loaded = load(directory, step)
    batch = next(next(iter(loaded.source.held_out.values()))())
    config = loaded.config.model

    @jax.jit
    def chosen(params):
        decoder = nnx.merge(loaded.graph, params)
        hidden = sharding.embed(decoder.embedding[...], batch["inputs"], config.dtype)
        context = Context(batch.get("segment_ids"), None, rope_table(hidden.shape[1], config.head_dim, 1e4))
        graph, stacked = nnx.split(decoder.blocks)
        found = []
        for i in range(config.num_layers):
            block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            attended = hidden + block.attention(block.attention_norm(hidden), context)[0]
            rows = block.mlp_norm(attended).reshape(-1, config.d_model)
            found.append(moe.route(rows, block.experts.router[...], config.experts_per_token, normalise=True)[1])
            hidden = block(hidden, context)[0]
        return jnp.stack(found)

    return np.sort(chosen(loaded.params), axis=-1)


def losses(directory: Path) -> np.ndarray:
    """The loss of every step."""
    return np.array([loss for line in read_metrics(directory) for loss in line.get("losses", ())])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "one device": Path(folder, "one"),
            "data=2,expert=4": Path(folder, "eight"),
            "the same in two processes": Path(folder, "two"),
            f"that up to step {CUT}, then fsdp=2,tensor=2": Path(folder, "restarted"),
        }
        one, eight, two, restarted = runs.values()
        train(one, "data=1", 1)
        train(eight, "data=2,expert=4", 8)
        train(two, "data=2,expert=4", 8, processes=2)
        shutil.copytree(eight, restarted)
        (restarted / "result.json").unlink()
        for step in restarted.glob("checkpoints/*"):
            if int(step.name) > CUT:
                shutil.rmtree(step)
        train(restarted, "fsdp=2,tensor=2", 4)

        first, table, worst = losses(one), Table(box=None), 0.0
        for title in ("run", "loss, step 1", f"step {STEPS}", "largest difference"):
            table.add_column(title, justify="left" if title == "run" else "right")
        for step in (CUT, STEPS):
            table.add_column(f"choices that differ, step {step}", justify="right")
        before = {step: choices(one, step) for step in (CUT, STEPS)}
        for name, directory in runs.items():
            curve = losses(directory)
            difference = float(np.abs(curve - first).max())
            worst = max(worst, difference)
            flips = []
            for step, expected in before.items():
                same = (choices(directory, step)[..., None] == expected[..., None, :]).any(-1)
                flips.append(f"{(~same).sum()} of {same.size}")
            table.add_row(name, f"{curve[0]:.4f}", f"{curve[-1]:.4f}", f"{difference:.1e}", *flips)
        Console(width=140).print(table)
        environment = json.loads((one / "result.json").read_text())["environment"]
        print(f"{' '.join(COMMAND[1:])}; {environment['device_kind']}, jax {environment['jax']}")
        return int(worst >= 1e-4 or first[0] - first[-1] < 1)


if __name__ == "__main__":
    sys.exit(main())
