"""AdamW with linear warm-up, four schedules, and weight decay only where there is a matrix."""

import jax
import optax

from gattn.config import Config
from gattn.sharding import STACKED

NEVER_DECAYED = "bias"


def learning_rate(config: Config) -> optax.Schedule:
    """Step (from 0) -> learning rate: linear from 0 to the peak, then `optim.schedule`, which would end one step on."""
    optim = config.optim
    peak, final = optim.learning_rate, optim.final_learning_rate
    left = config.train.steps - optim.warmup_steps
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, left, alpha=final / peak),
        "linear": lambda: optax.linear_schedule(peak, final, left),
        "constant": lambda: optax.constant_schedule(peak),
        "wsd": lambda: optax.linear_schedule(peak, final, optim.decay_steps, left - optim.decay_steps),
    }[optim.schedule]()
    warmup = optax.linear_schedule(0.0, peak, optim.warmup_steps)
    return optax.join_schedules([warmup, after], [optim.warmup_steps])


def decay_mask(params):
    """True for every parameter with two or more axes per layer that is not a bias: matrices, embeddings, gates."""

    def decays(path, leaf) -> bool:
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        return leaf.ndim - (STACKED in names) >= 2 and NEVER_DECAYED not in names

    return jax.tree_util.tree_map_with_path(decays, params)


def optimizer(config: Config) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (decoupled decay, scaled by the learning rate)."""
    optim = config.optim
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(
            learning_rate(config), optim.b1, optim.b2, optim.eps, weight_decay=optim.weight_decay, mask=decay_mask
        ),
    )
