"""Rotary position embedding. Angles are computed in float64 with NumPy: float32 frequencies drift at long range."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def rope_table(length: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, head_dim / 2] in float32 of the angles position * theta^(-2i / head_dim)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def apply_rope(x: Float[Array, "B T N H"], cos: np.ndarray, sin: np.ndarray) -> Float[Array, "B T N H"]:
    """Rotates channel i with channel i + H/2 (as Llama and Qwen checkpoints do); float32 inside, x's dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
