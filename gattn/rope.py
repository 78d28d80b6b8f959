"""Position in the attention: RoPE with its scalings, and ALiBi's slopes.

Tables are computed in float64 with NumPy: float32 frequencies drift at long range.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN's turns within the original length that stay as they are, that are stretched


def rope_table(
    length: int,
    head_dim: int,
    theta: float,
    scaling: str = "none",
    factor: float = 1.0,
    original_length: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, head_dim / 2] in float32 of the angles position * theta^(-2i / head_dim).

    `scaling`: linear divides all frequencies by `factor`; yarn is `yarn`, whose attention factor is in both tables.
    """
    frequencies, attention_factor = _frequencies(head_dim, theta), 1.0
    if scaling == "linear":
        frequencies = frequencies / factor
    elif scaling == "yarn":
        frequencies, attention_factor = yarn(head_dim, theta, factor, original_length)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    cos, sin = attention_factor * np.cos(angles), attention_factor * np.sin(angles)
    return cos.astype(np.float32), sin.astype(np.float32)


def yarn(head_dim: int, theta: float, factor: float, original_length: int) -> tuple[Float[np.ndarray, "half"], float]:
    """YaRN's frequencies [head_dim / 2] and the factor of cos and sin (arXiv 2309.00071, Sec. 3.2 and 3.4).

    Channels that turn more than `BETA_FAST` times within `original_length` keep their frequency, those that turn less
    than `BETA_SLOW` times have it divided by `factor`, and between them a ramp over the channels leads from one to the
    other. Queries and keys both grow by 0.1 ln(factor) + 1.
    """

    def channel(turns: float) -> float:
        return head_dim * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = min(max(math.floor(channel(BETA_FAST)), 0), head_dim - 1)
    high: float = min(max(math.ceil(channel(BETA_SLOW)), 0), head_dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return _frequencies(head_dim, theta) * (stretched / factor + 1.0 - stretched), 0.1 * math.log(factor) + 1.0


def _frequencies(head_dim: int, theta: float) -> Float[np.ndarray, "half"]:
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def apply_rope(x: Float[Array, "B T N H"], cos: Float[Array, "*B T half"], sin: Float[Array, "*B T half"]):
    """Rotates channel i with channel i + H/2 (as Llama and Qwen checkpoints do); float32 inside, x's dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., :, None, :], sin[..., :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """What each head takes off a logit per token of distance, float32 (arXiv 2108.12409): 2^(-8 i / N) for i = 1..N.
    Where N is no power of two: those of the power below, and between them every other one of the power above."""
    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between])[:num_heads].astype(np.float32)
