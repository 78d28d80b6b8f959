"""Three seeds in one program (vmap) against one after the other: `NPROC=1 python -m benchmarks.vmap_seeds`."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from configs.models import tiny
from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model
from gattn.config import Config, override
from gattn.data.loader import open_source
from gattn.step import new_state, train_step

SEEDS = 3


def measure(name: str, config: Config, steps: int, rounds: int) -> None:
    """Prints milliseconds of one step of all seeds, both ways, in each round."""
    step = train_step(model.abstract(config.model)[0], config)
    states = [new_state(override(config, {"train.seed": seed})) for seed in range(SEEDS)]
    batch = jax.device_put(next(open_source(config).train(0)))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf] * SEEDS), batch)
    mapped = jax.jit(jax.vmap(step.__wrapped__, in_axes=(0, None, 0)), donate_argnums=0)
    count = [0, 0]

    def one_by_one() -> None:
        for i in range(SEEDS):
            states[i], vector = step(states[i], np.int32(count[0]), batch)
        count[0] += 1
        jax.block_until_ready(vector)

    def at_once() -> None:
        nonlocal together
        together, vector = mapped(together, np.int32(count[1]), batches)
        count[1] += 1
        jax.block_until_ready(vector)

    one_by_one(), at_once()  # compiled now
    for _ in range(rounds):
        print(f"{name}: vmap {clock(at_once, steps):.0f} ms, one after the other {clock(one_by_one, steps):.0f} ms")


def clock(function: Callable[[], None], times: int) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    for _ in range(times):
        function()
    return 1e3 * (time.perf_counter() - began) / times


if __name__ == "__main__":
    measure("bench A", apply(sinkbench_config(), "g1_headwise"), 10, 3)
    measure("tiny", tiny(), 4, 3)
