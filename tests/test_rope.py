"""RoPE: scores depend on distances only, and angles are exact far out."""

import jax
import jax.numpy as jnp
import numpy as np

from gattn.rope import apply_rope, rope_table


def test_scores_depend_on_the_distance_only():
    table = rope_table(64, 16, 10_000.0)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    rotated = [apply_rope(jnp.broadcast_to(v, (1, 64, 1, 16)), *table)[0, :, 0] for v in (q, k)]
    scores = np.asarray(rotated[0] @ rotated[1].T)
    for distance in range(-40, 41):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-5)
    assert np.abs(scores[0, 0] - scores[40, 0]) > 1e-3


def test_angles_stay_exact_at_long_range():
    cos, sin = rope_table(131_072, 128, 1e6)
    angle = 131_071 * 1e6 ** (-2 * 5 / 128)
    np.testing.assert_allclose([cos[-1, 5], sin[-1, 5]], [np.cos(angle), np.sin(angle)], atol=1e-6)
