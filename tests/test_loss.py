"""Cross entropy in chunks: values, gradients, ignored targets, and no array of all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn.loss import cross_entropy

HIDDEN = jax.random.normal(jax.random.key(0), (3, 10, 8))
MATRIX = jax.random.normal(jax.random.key(1), (8, 50))
TARGETS = jax.random.randint(jax.random.key(2), (3, 10), -10, 50)  # about a sixth of them are ignored


def plain(hidden, matrix, targets, z_loss=0.0):
    logits = jnp.einsum("btd,dv->btv", hidden, matrix, precision="highest")
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    penalty = z_loss * jnp.square(jnp.log(jnp.exp(logits).sum(axis=-1)))
    return jnp.where(targets >= 0, penalty - picked, 0).sum()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_z_loss_and_its_gradient(chunk):
    objective, nll, _ = cross_entropy(HIDDEN, MATRIX, TARGETS, chunk, 0.1)
    np.testing.assert_allclose(objective, plain(HIDDEN, MATRIX, TARGETS, 0.1), rtol=1e-5)
    np.testing.assert_allclose(nll, plain(HIDDEN, MATRIX, TARGETS), rtol=1e-5)
    ours = jax.grad(lambda h, m: 0.3 * cross_entropy(h, m, TARGETS, chunk, 0.1).objective, (0, 1))(HIDDEN, MATRIX)
    theirs = jax.grad(lambda h, m: 0.3 * plain(h, m, TARGETS, 0.1), (0, 1))(HIDDEN, MATRIX)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])
def test_value_and_gradients_for_any_chunk(chunk):
    total, _, count = cross_entropy(HIDDEN, MATRIX, TARGETS, chunk)
    assert int(count) == int((TARGETS >= 0).sum()) < TARGETS.size
    np.testing.assert_allclose(total, plain(HIDDEN, MATRIX, TARGETS), rtol=1e-5)
    ours = jax.grad(lambda h, m: 0.3 * cross_entropy(h, m, TARGETS, chunk)[0], (0, 1))(HIDDEN, MATRIX)
    theirs = jax.grad(lambda h, m: 0.3 * plain(h, m, TARGETS), (0, 1))(HIDDEN, MATRIX)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


def test_all_targets_ignored():
    total, _, count = cross_entropy(HIDDEN, MATRIX, jnp.full((3, 10), -1), 4)
    assert (float(total), float(count)) == (0.0, 0.0)


def test_bfloat16_hidden_states():
    half = HIDDEN.astype(jnp.bfloat16)
    total, _, _ = cross_entropy(half, MATRIX, TARGETS, 8)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, plain(HIDDEN, MATRIX, TARGETS), rtol=2e-2)
    gradient = jax.grad(lambda m: cross_entropy(half, m, TARGETS, 8)[0])(MATRIX)
    assert gradient.dtype == jnp.float32


def test_the_logits_of_a_batch_never_exist():
    hidden, matrix = jnp.zeros((4, 64, 8)), jnp.zeros((8, 1000))
    targets = jnp.zeros((4, 64), jnp.int32)
    program = jax.jit(jax.grad(lambda h, m: cross_entropy(h, m, targets, 16)[0], (0, 1)))
    compiled = program.lower(hidden, matrix).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 1000 * 4 / 2
