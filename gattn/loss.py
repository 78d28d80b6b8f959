"""Cross entropy over a vocabulary without the logits of a whole batch ever existing."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Losses(NamedTuple):
    """Sums over the targets counted."""

    objective: Float[Array, ""]
    """What training minimises: nll + z_loss * lse^2. The only one that has a gradient."""
    nll: Float[Array, ""]
    """Negative log-likelihood in nats."""
    tokens: Float[Array, ""]
    """How many targets were counted."""


def cross_entropy(
    hidden: Float[Array, "B T D"],
    matrix: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    chunk: int,
    z_loss: float = 0.0,
) -> Losses:
    """Sums over the targets that are not negative; `z_loss` weighs the squared log-partition (PaLM, Sec. 5).

    Logits = hidden @ matrix in hidden's dtype, accumulated and normalised in float32, for `chunk` positions at a time.
    """
    targets = targets.reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    objective, nll = _summed(flat, matrix, targets, min(chunk, targets.size), z_loss)
    return Losses(objective, jax.lax.stop_gradient(nll), jnp.sum(targets >= 0).astype(jnp.float32))


def describe(total: float, tokens: int, size: int) -> dict[str, Any]:
    """A summed loss in nats over `tokens` targets that stand for `size` bytes of text (0: they are no text)."""
    return {
        "loss": total / tokens,
        "perplexity": math.exp(min(total / tokens, 700.0)),
        "bits_per_byte": total / (math.log(2) * size) if size else None,
        "tokens": tokens,
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _summed(hidden: Float[Array, "P D"], matrix: Float[Array, "D V"], targets: Int[Array, "P"], chunk, z_loss):
    matrix = matrix.astype(hidden.dtype)

    def body(totals, block):
        return jax.tree.map(jnp.add, totals, _block(block[0], matrix, block[1], z_loss)[:2]), None

    return jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), _blocks(hidden, targets, chunk))[0]


def _forward(hidden, matrix, targets, chunk, z_loss):
    """Also takes both gradients while a chunk's logits exist: nothing of size V is kept per position or recomputed."""
    cast = matrix.astype(hidden.dtype)

    def body(carry, block):
        totals, dmatrix = carry
        x, t = block
        *sums, dlogits = _block(x, cast, t, z_loss)
        dlogits = dlogits.astype(x.dtype)
        dx = jnp.matmul(dlogits, cast.T)
        dmatrix = dmatrix + jnp.matmul(x.T, dlogits, preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, totals, tuple(sums)), dmatrix), dx

    start = ((jnp.float32(0), jnp.float32(0)), jnp.zeros(matrix.shape, jnp.float32))
    (totals, dmatrix), dhidden = jax.lax.scan(body, start, _blocks(hidden, targets, chunk))
    return totals, (dhidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]], dmatrix.astype(matrix.dtype))


def _backward(chunk, z_loss, residuals, cotangents):
    dhidden, dmatrix = residuals
    cotangent = cotangents[0]  # of the objective; the other one is stopped
    return cotangent.astype(dhidden.dtype) * dhidden, cotangent.astype(dmatrix.dtype) * dmatrix, None


_summed.defvjp(_forward, _backward)


def _blocks(hidden: Float[Array, "P D"], targets: Int[Array, "P"], chunk: int):
    padding = -targets.size % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    return hidden, jnp.pad(targets, (0, padding), constant_values=-1).reshape(-1, chunk)


def _block(x: Float[Array, "C D"], matrix: Float[Array, "D V"], targets: Int[Array, "C"], z_loss: float):
    """One block's summed objective and nll, and the objective's gradient with respect to the logits, float32."""
    logits = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    counted = targets >= 0
    target = jnp.maximum(targets, 0)[:, None]
    nll = jnp.where(counted, lse - jnp.take_along_axis(logits, target, axis=-1)[:, 0], 0.0).sum()
    softmax, one_hot = jnp.exp(logits - lse[:, None]), jnp.arange(logits.shape[1]) == target
    if not z_loss:
        return nll, nll, jnp.where(counted[:, None], softmax - one_hot, 0.0)
    objective = nll + z_loss * jnp.where(counted, jnp.square(lse), 0.0).sum()
    dlogits = softmax * (1.0 + 2.0 * z_loss * lse[:, None]) - one_hot
    return objective, nll, jnp.where(counted[:, None], dlogits, 0.0)
