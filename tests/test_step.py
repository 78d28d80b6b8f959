"""The jitted step: accumulation, z-loss, averages, and a state that a bad batch cannot touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model
from gattn.config import Config, override
from gattn.step import METRICS, State, abstract_state, new_state, train_step
from tests.eight import found_by
from tests.eight_meshes import MESHES

SMALL = override(
    apply(sinkbench_config(), "g1_headwise"),
    {
        "model.d_model": 32,
        "model.head_dim": 16,
        "model.ffn_dim": 32,
        "model.num_layers": 2,
        "train.steps": 50,
        "train.log_every": 1,
    }
    | {"optim.warmup_steps": 0, "model.vocab_size": 65},
)


def batch(rows: int, ragged: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens; `ragged` ignores another share of the targets in every row, all of them in the first."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 65, (rows, 33), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    if ragged:
        targets[np.arange(32) >= np.linspace(0, 32, rows)[:, None]] = -1
    return {"inputs": tokens[:, :-1], "targets": targets, "segment_ids": np.ones((rows, 32), np.int32)}


@functools.cache
def compiled(config: Config):
    return train_step(model.abstract(config.model)[0], config)


def stepped(config: Config, *batches):
    state, vector = new_state(config), None
    step = compiled(config)
    for index, one in enumerate(batches):
        state, vector = step(state, np.int32(index), one)
    return state, dict(zip((*METRICS, "stop", "updates"), np.asarray(vector).tolist(), strict=True))


def moments(state: State):
    """AdamW's first moment after one step from zero is (1 - b1) times the clipped gradient."""
    return jax.tree.leaves(state.optimizer)


def assert_close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("parts", [2, 4, 16])
def test_accumulated_parts_equal_the_whole_batch(parts, ragged):
    """Value and gradient, also where one part holds no target at all and others many: tokens have weight, not parts."""
    config = override(SMALL, {"data.batch_size": 32, "train.z_loss": 1e-2})
    whole, measured = stepped(config, batch(32, ragged))
    split, also = stepped(override(config, {"train.accumulation": parts}), batch(32, ragged))
    for name in ("loss", "grad_norm", "z_loss"):
        assert also[name] == pytest.approx(measured[name], rel=2e-5), name
    assert_close(moments(split), moments(whole), rtol=1e-3, atol=2e-8)


def test_ragged_parts_differ_from_a_mean_of_means():
    """What accumulation must not do: the mean of the parts' means is another number on these batches."""
    whole = stepped(SMALL, batch(32, ragged=True))[1]["loss"]
    parts = [{k: v[i : i + 8] for k, v in batch(32, ragged=True).items()} for i in range(0, 32, 8)]
    means = [stepped(SMALL, part)[1]["loss"] for part in parts]
    assert abs(np.mean(means) - whole) > 1e-4


def test_z_loss_is_the_mean_squared_log_partition():
    config = override(SMALL, {"train.z_loss": 0.1})
    measured = stepped(config, batch(4, ragged=True))[1]
    decoder = nnx.merge(model.abstract(config.model)[0], new_state(config).params)
    one = batch(4, ragged=True)
    hidden, _ = decoder(one["inputs"], one["segment_ids"])
    lse = jax.nn.logsumexp(decoder.logits(hidden), axis=-1)
    assert measured["z_loss"] == pytest.approx(0.1 * float(np.square(lse)[one["targets"] >= 0].mean()), rel=1e-4)
    assert measured["loss"] == pytest.approx(stepped(SMALL, one)[1]["loss"], rel=1e-6)
    assert measured["grad_norm"] != pytest.approx(stepped(SMALL, one)[1]["grad_norm"], rel=1e-3)


def test_update_ratio_is_what_happened_to_the_weights():
    before = new_state(SMALL).params
    after, measured = stepped(SMALL, batch(4))
    norm = lambda tree: float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))))  # noqa: E731
    change = jax.tree.map(lambda a, b: a - b, after.params, before)
    assert measured["update_ratio"] == pytest.approx(norm(change) / norm(before), rel=1e-3)
    assert measured["updates"] == 1


def test_average_follows_the_weights():
    """Replayed in NumPy from the weights after each step; `weights` is what is evaluated."""
    config = override(SMALL, {"train.ema_decay": 0.2})
    state = new_state(config)
    average = jax.tree.leaves(jax.tree.map(np.array, state.params))
    for count in range(1, 6):
        state, _ = compiled(config)(state, np.int32(count - 1), batch(4, seed=count))
        decay = min(0.2, count / (9 + count))
        average = [decay * a + (1 - decay) * p for a, p in zip(average, jax.tree.leaves(state.params), strict=True)]
    assert_close(jax.tree.leaves(state.weights), average, rtol=1e-5, atol=1e-7)
    assert not jnp.array_equal(state.weights["embedding"][...], state.params["embedding"][...])
    assert_close(state.params, stepped(SMALL, *(batch(4, seed=count) for count in range(1, 6)))[0].params, rtol=1e-6)
    assert new_state(SMALL).average is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_nor_do_later_ones(value):
    """Parameters, moments and average stay bit for bit, however many steps are dispatched until anybody looks. Token 64
    is poisoned in the input embedding alone, so that batches without it are as good as ever."""
    config = override(SMALL, {"train.ema_decay": 0.5, "model.tied_embeddings": False})
    good = batch(4)
    good["inputs"] = np.minimum(good["inputs"], 63)
    bad = {**good, "inputs": good["inputs"].copy()}
    bad["inputs"][2, 5] = 64
    state = new_state(config)
    state.params["embedding"][...] = state.params["embedding"][...].at[64].set(value)
    before = jax.tree.map(np.array, state)
    step = compiled(config)
    for index, one in enumerate([bad, good, good]):
        state, vector = step(state, np.int32(index), one)
        assert np.isfinite(np.asarray(vector)[:2]).all() == (index > 0)
        assert vector[-1] == 0
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_after_a_bad_step_good_batches_do_not_train():
    """The guard itself: a state that is one update behind what is expected is left alone, then trains as expected."""
    state = new_state(SMALL)
    before = jax.tree.map(np.array, state)
    step = compiled(SMALL)
    state, vector = step(state, np.int32(1), batch(4))
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert np.isfinite(vector).all()
    state, vector = step(state, np.int32(0), batch(4))
    assert vector[-1] == state.step == 1


def test_abstract_state_is_the_state_that_is_made():
    config = override(SMALL, {"train.ema_decay": 0.5})
    shapes = lambda state: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)  # noqa: E731
    assert shapes(abstract_state(config)) == shapes(new_state(config))


# ---- meshes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def meshes():
    return found_by("tests.eight_meshes")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [f"{name}: {mesh}" for name, meshes in MESHES.items() for mesh in meshes])
def test_a_mesh_changes_neither_loss_nor_gradients(meshes, mesh):
    """Nor the router's sums, nor what probes measure; and the new state lies where the old one did."""
    found = meshes[mesh]
    metrics = found["metrics"]
    assert metrics.pop("stop") == [found["devices"] - 1, 0], "the largest of all devices"
    for name, (value, expected) in metrics.items():
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), name
    assert found["gradients"] < 1e-5
    assert found["evaluated"] < 1e-5
    assert found["stays"]
