"""Cross entropy over a vocabulary without the logits of a whole batch ever existing."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gattn import sharding


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
    On a mesh every device takes its own part of the positions, also along `tensor`, and the whole matrix.
    """
    objective, nll = _summed(hidden, matrix, targets, chunk, z_loss)
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
def _summed(hidden: Float[Array, "B T D"], matrix: Float[Array, "D V"], targets: Int[Array, "B T"], chunk, z_loss):
    def part(hidden, matrix, targets):
        def body(totals, block):
            return jax.tree.map(jnp.add, totals, _block(block[0], matrix, block[1], z_loss)[:2]), None

        return jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), _blocks(hidden, targets, chunk))[0]

    return _on_devices(part)(hidden, matrix, targets)


def _forward(hidden, matrix, targets, chunk, z_loss):
    """Also takes both gradients while a chunk's logits exist: nothing of size V is kept per position or recomputed."""

    def part(hidden, matrix, targets):
        def body(carry, block):
            totals, dmatrix = carry
            x, t = block
            *sums, dlogits = _block(x, matrix, t, z_loss)
            dlogits = dlogits.astype(x.dtype)
            dx = jnp.matmul(dlogits, matrix.T)
            dmatrix = dmatrix + jnp.matmul(x.T, dlogits, preferred_element_type=jnp.float32)
            return (jax.tree.map(jnp.add, totals, tuple(sums)), dmatrix), dx

        start = ((jnp.float32(0), jnp.float32(0)), jnp.zeros(matrix.shape, jnp.float32))
        (totals, dmatrix), dx = jax.lax.scan(body, start, _blocks(hidden, targets, chunk))
        return *totals, dx.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape), dmatrix

    objective, nll, dhidden, dmatrix = _on_devices(part)(hidden, matrix, targets)
    return (objective, nll), (dhidden, dmatrix.astype(matrix.dtype))


def _backward(chunk, z_loss, residuals, cotangents):
    dhidden, dmatrix = residuals
    cotangent = cotangents[0]  # of the objective; the other one is stopped
    return cotangent.astype(dhidden.dtype) * dhidden, cotangent.astype(dmatrix.dtype) * dmatrix, None


_summed.defvjp(_forward, _backward)


def _on_devices(part: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """`part` (hidden, matrix, targets) -> (two sums, and the gradients of hidden and matrix, if it takes them), of
    every device's own positions. The matrix comes in hidden's dtype, whole; its gradient is summed over devices."""
    positions = PartitionSpec(sharding.BATCH, ("context", "tensor"))
    pieces = sharding.spec("output")

    def cast(hidden, matrix, targets):
        return part(hidden, matrix.astype(hidden.dtype), targets)

    if not sharding.is_split():
        return cast

    def on_one(hidden, matrix, targets):
        matrix = jax.lax.all_gather(matrix.astype(hidden.dtype), sharding.SHARDS, axis=0, tiled=True)
        objective, nll, *gradients = part(hidden, matrix, targets)
        sums = jax.lax.psum(objective, sharding.AXES), jax.lax.psum(nll, sharding.AXES)
        return (*sums, gradients[0], sharding.sum_pieces(gradients[1], 0, sharding.AXES)) if gradients else sums

    def run(hidden, matrix, targets):
        taken = jax.eval_shape(cast, hidden, matrix, targets)
        out_specs = (PartitionSpec(), PartitionSpec(), positions, pieces)[: len(taken)]
        in_specs = (positions, pieces, positions)
        return jax.shard_map(on_one, in_specs=in_specs, out_specs=out_specs, check_vma=False)(hidden, matrix, targets)

    return run


def _blocks(hidden: Float[Array, "B T D"], targets: Int[Array, "B T"], chunk: int):
    """Positions in blocks of `chunk`: [blocks, C, D] and [blocks, C], filled up with targets that do not count."""
    hidden, targets, chunk = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), min(chunk, targets.size)
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
