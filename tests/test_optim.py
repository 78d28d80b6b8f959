"""AdamW: the schedule's corners, who decays, clipping, and one step against a transcription."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.models import tiny
from gattn import model, optim
from gattn.config import GateSpec, override

CONFIG = override(
    tiny(),
    {
        "model.gates": (
            GateSpec("g1", "headwise", bias=True),
            GateSpec("g2", source="independent"),
            GateSpec("g3", "headwise", source="independent"),
        ),
        "model.softmax": "sink_logit",
        "model.position": "learned",
        "model.sandwich_norm": True,
        "model.tied_embeddings": False,
    },
)


@pytest.mark.parametrize("warmup", [0, 1, 50])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_against_their_formulas(schedule, warmup):
    """Every step of 200, in plain NumPy: s / warmup, then from the peak towards the final rate at step 200."""
    changes = {"optim.schedule": schedule, "optim.warmup_steps": warmup, "train.steps": 200}
    config = override(CONFIG, changes | ({"optim.decay_steps": 40} if schedule == "wsd" else {}))
    peak, final = config.optim.learning_rate, config.optim.final_learning_rate
    steps = np.arange(200)
    along = (steps - warmup) / (200 - warmup)
    after = {
        "cosine": final + (peak - final) * (1 + np.cos(np.pi * along)) / 2,
        "linear": peak + (final - peak) * along,
        "constant": np.full(200, peak),
        "wsd": np.where(steps < 160, peak, peak + (final - peak) * (steps - 160) / 40),
    }[schedule]
    expected = np.where(steps < warmup, peak * steps / max(warmup, 1), after)
    np.testing.assert_allclose(jax.vmap(optim.learning_rate(config))(steps), expected, rtol=1e-5)


def test_matrices_decay_and_norms_biases_and_sinks_do_not():
    mask = nnx.to_pure_dict(optim.decay_mask(model.abstract(CONFIG.model)[1]))
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    decayed = {".".join(str(k.key) for k in path) for path, value in leaves if value}
    spared = {".".join(str(k.key) for k in path) for path, value in leaves if not value}
    attention, mlp = "blocks.attention.", "blocks.mlp."
    assert decayed == {
        "embedding",
        "positions",
        "output",
        *(f"{attention}{name}.kernel" for name in ("query", "key", "value", "out", "gates.g1")),
        *(f"{attention}gates.{position}.score" for position in ("g2", "g3")),
        *(f"{mlp}{name}.kernel" for name in ("gate", "up", "down")),
    }
    assert f"{attention}gates.g1.bias" in spared
    assert f"{attention}sink" in spared
    assert "final_norm.gain" in spared


def test_one_step_is_clipped_adamw():
    params = {"blocks": {"w": jnp.full((1, 2, 2), 2.0)}, "gain": jnp.ones(3)}
    gradients = {"blocks": {"w": jnp.full((1, 2, 2), 30.0)}, "gain": jnp.full(3, -40.0)}
    transform = optim.optimizer(CONFIG)
    state = transform.init(params)
    for _ in range(2):  # the first step has learning rate 0
        updates, state = transform.update(gradients, state, params)
    o = CONFIG.optim
    rate = o.learning_rate / o.warmup_steps
    # A constant gradient: both moments' bias corrections cancel, so the direction is its sign.
    np.testing.assert_allclose(updates["blocks"]["w"], -rate * (1.0 + o.weight_decay * 2.0), rtol=1e-4)
    np.testing.assert_allclose(updates["gain"], rate, rtol=1e-4)
    norm = np.sqrt(4 * 30.0**2 + 3 * 40.0**2)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["gain"], -40.0 / norm * o.clip_norm * (1 - o.b1**2), rtol=1e-4)
