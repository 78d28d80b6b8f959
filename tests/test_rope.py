"""RoPE: scores depend on distances only, angles are exact far out. YaRN and ALiBi are the published ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn.rope import alibi_slopes, apply_rope, rope_table, yarn


@pytest.mark.parametrize("scaling", [(), ("linear", 4.0), ("yarn", 4.0, 16)])
def test_scores_depend_on_the_distance_only(scaling):
    table = rope_table(64, 16, 10_000.0, *scaling)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    rotated = [apply_rope(jnp.broadcast_to(v, (1, 64, 1, 16)), *table)[0, :, 0] for v in (q, k)]
    scores = np.asarray(rotated[0] @ rotated[1].T)
    for distance in range(-40, 41):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=3e-5)
    assert np.abs(scores[0, 0] - scores[40, 0]) > 1e-3


def test_a_table_by_row_rotates_each_row_by_its_own_positions():
    cos, sin = rope_table(32, 16, 10_000.0)
    x, places = jax.random.normal(jax.random.key(0), (2, 3, 2, 16)), np.array([[0, 1, 2], [7, 8, 31]])
    rows = apply_rope(x, cos[places], sin[places])
    for row, place in np.ndindex(2, 3):
        one = slice(places[row, place], places[row, place] + 1)
        alone = apply_rope(x[row : row + 1, place : place + 1], cos[one], sin[one])
        np.testing.assert_allclose(rows[row, place], alone[0, 0], atol=1e-6)


def test_angles_stay_exact_at_long_range():
    cos, sin = rope_table(131_072, 128, 1e6)
    angle = 131_071 * 1e6 ** (-2 * 5 / 128)
    np.testing.assert_allclose([cos[-1, 5], sin[-1, 5]], [np.cos(angle), np.sin(angle)], atol=1e-6)


def test_linear_scaling_is_a_slower_clock():
    for long, short in zip(rope_table(64, 16, 1e4, "linear", 4.0), rope_table(16, 16, 1e4), strict=True):
        np.testing.assert_allclose(long[::4], short, atol=1e-6)


def test_yarn_is_the_published_one():
    """Qwen's setting: channels below 23 keep their frequency, from 40 on they have a quarter of it."""
    plain = 1e6 ** (-np.arange(64) / 64)
    found, factor = yarn(128, 1e6, 4.0, 32_768)
    assert factor == 1.138629436111989
    share = found / plain
    np.testing.assert_array_equal(share[:24], 1.0)
    np.testing.assert_allclose(share[40:], 0.25, rtol=1e-12)
    np.testing.assert_allclose(np.diff(share[23:41]), -0.75 / 17, rtol=1e-9)
    turns = 32_768 * plain / (2 * math.pi)  # the paper's definition of the two ends
    assert turns[23] >= 32 > turns[24]
    assert turns[39] > 1 >= turns[40]


def test_yarn_multiplies_both_tables():
    cos, sin = rope_table(8, 128, 1e6, "yarn", 4.0, 32_768)
    np.testing.assert_allclose(cos**2 + sin**2, 1.138629436111989**2, rtol=1e-5)


def test_alibi_slopes_are_the_published_ones():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2.0 ** (-i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5], rtol=1e-6)
