"""Cross entropy over a vocabulary without the logits of a whole batch ever existing."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    hidden: Float[Array, "B T D"], matrix: Float[Array, "D V"], targets: Int[Array, "B T"], chunk: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed negative log-likelihood in nats, and the number of targets counted; negative targets are not.

    Logits = hidden @ matrix in hidden's dtype, accumulated and normalised in float32, for `chunk` positions at a time.
    """
    targets = targets.reshape(-1)
    total = _summed(hidden.reshape(-1, hidden.shape[-1]), matrix, targets, min(chunk, targets.size))
    return total, jnp.sum(targets >= 0).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(hidden: Float[Array, "P D"], matrix: Float[Array, "D V"], targets: Int[Array, "P"], chunk: int):
    matrix = matrix.astype(hidden.dtype)

    def body(total, block):
        return total + _block(block[0], matrix, block[1])[0], None

    return jax.lax.scan(body, jnp.float32(0), _blocks(hidden, targets, chunk))[0]


def _forward(hidden, matrix, targets, chunk):
    """Also takes both gradients while a chunk's logits exist: nothing of size V is kept per position or recomputed."""
    cast = matrix.astype(hidden.dtype)

    def body(carry, block):
        total, dmatrix = carry
        x, t = block
        nll, dlogits = _block(x, cast, t)
        dlogits = dlogits.astype(x.dtype)
        dx = jnp.matmul(dlogits, cast.T)
        dmatrix = dmatrix + jnp.matmul(x.T, dlogits, preferred_element_type=jnp.float32)
        return (total + nll, dmatrix), dx

    start = (jnp.float32(0), jnp.zeros(matrix.shape, jnp.float32))
    (total, dmatrix), dhidden = jax.lax.scan(body, start, _blocks(hidden, targets, chunk))
    return total, (dhidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]], dmatrix.astype(matrix.dtype))


def _backward(chunk, residuals, cotangent):
    dhidden, dmatrix = residuals
    return cotangent.astype(dhidden.dtype) * dhidden, cotangent.astype(dmatrix.dtype) * dmatrix, None


_summed.defvjp(_forward, _backward)


def _blocks(hidden: Float[Array, "P D"], targets: Int[Array, "P"], chunk: int):
    padding = -targets.size % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    return hidden, jnp.pad(targets, (0, padding), constant_values=-1).reshape(-1, chunk)


def _block(x: Float[Array, "C D"], matrix: Float[Array, "D V"], targets: Int[Array, "C"]):
    """Summed loss of one block and its gradient with respect to the logits, float32."""
    logits = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    counted = targets >= 0
    target = jnp.maximum(targets, 0)[:, None]
    nll = jnp.where(counted, lse - jnp.take_along_axis(logits, target, axis=-1)[:, 0], 0.0).sum()
    dlogits = jnp.exp(logits - lse[:, None]) - (jnp.arange(logits.shape[1]) == target)
    return nll, jnp.where(counted[:, None], dlogits, 0.0)
