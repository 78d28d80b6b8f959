"""How far accumulation bends the balance loss's gradient: `python -m benchmarks.balance_accumulation` (CPU, minutes).

Under `train.accumulation` the frequencies of a micro-batch's balance loss are those counted in the step so far, because
those of the whole batch are not known before its last part. The value reported is the definition's; the gradient is
not that of the unsplit batch. Printed, for `moe_tiny` at batch 32 before training and after 50 steps: the length of the
difference over the length of the unsplit batch's gradient, of the balance loss alone (weight 1) and of the whole
objective with the preset's weight. Three seeds, mean and spread.
"""

import functools
import sys

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from configs.models import moe_tiny
from gattn import model
from gattn.config import Config, override
from gattn.data.loader import open_source
from gattn.step import new_state, train_step

PARTS, SEEDS, STEPS = (2, 8, 32), (0, 1, 2), 50
CHANGES = {"data.batch_size": 32, "train.steps": 300, "optim.clip_norm": 1e9, "model.scan_layers": True}


@functools.cache
def compiled(config: Config):
    """The step, and a fresh state."""
    return train_step(model.abstract(config.model)[0], config), jax.device_get(new_state(config))


def gradient(config: Config, params, batch) -> np.ndarray:
    """The whole gradient as one vector: Adam's first moment after a first step is a tenth of it."""
    step, state = compiled(config)
    new, _ = step(state._replace(params=params), np.int32(0), batch)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(new.optimizer[1][0].mu)]) / (1 - config.optim.b1)


def differences(seed: int) -> np.ndarray:
    """[before or after training, balance loss or objective, parts]."""
    base = override(moe_tiny(), CHANGES | {"train.seed": seed})
    source, weight = open_source(base), base.train.balance_loss
    state, batches = new_state(base), source.train(0)
    step = train_step(model.abstract(base.model)[0], base)
    params = [jax.device_get(state.params)]
    for index in range(STEPS):
        state, _ = step(state, np.int32(index), next(batches))
    params.append(jax.device_get(state.params))
    batch, found = next(batches), []
    for weights in params:
        balance, whole = [], []
        for parts in (1, *PARTS):
            config = override(base, {"train.accumulation": parts, "train.balance_loss": 1.0, "train.seed": 0})
            with_one = gradient(config, weights, batch)
            without = gradient(override(config, {"train.balance_loss": 0.0}), weights, batch)
            balance.append(with_one - without)
            whole.append(without + weight * balance[-1])
        found.append([[np.linalg.norm(g - gs[0]) / np.linalg.norm(gs[0]) for g in gs[1:]] for gs in (balance, whole)])
    return np.array(found)


def main() -> int:
    measured = np.array([differences(seed) for seed in SEEDS])
    mean, spread = measured.mean(axis=0), measured.std(axis=0, ddof=1)
    table = Table(box=None)
    for title in ("gradient of", "weights", *(f"{parts} parts" for parts in PARTS)):
        table.add_column(title, justify="right" if "parts" in title else "left")
    for i, what in enumerate(("the balance loss", "the objective")):
        for j, when in enumerate(("initial", f"after {STEPS} steps")):
            cells = (f"{m:.2%} ± {s:.2%}" for m, s in zip(mean[j, i], spread[j, i], strict=True))
            table.add_row(what, when, *cells)
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
