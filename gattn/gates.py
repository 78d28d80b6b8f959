"""The paper's variable: parameters of a GateSpec, its scores, and what they do to a tensor (paper Sec. 2.2).

Y' = Y * act(X W) or Y + act(X W), X being the output of the block's input norm. A score shared between heads is the
mean over the head axis of the *activated* per-head scores; averaging before the activation would be one smaller linear
map written with the parameters of many.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gattn import sharding
from gattn.config import GateSpec, ModelConfig
from gattn.kernels.tuning import platform

ACTIVATIONS = {
    "sigmoid": jax.nn.sigmoid,
    "ns_sigmoid": lambda x: 0.5 + 0.5 * jax.nn.sigmoid(x),
    "two_sigmoid": lambda x: 2.0 * jax.nn.sigmoid(x),
    "silu": jax.nn.silu,
    "identity": lambda x: x,
}
FEW_ROWS = 64  # below, a product on a CPU takes as long as reading its matrix


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def project(x: Float[Array, "B T C"], kernels: Mapping[str, Float[Array, "C *features"]]) -> dict[str, Array]:
    """x times each matrix over its last axis, [B, T, *features], in x's dtype.

    On a CPU as one two-dimensional product: that is up to twice as fast as several narrow ones, and XLA:CPU would
    compute the weight gradient of a product with a three-dimensional left side by transposing both operands. For a few
    rows (decoding) putting the matrices together would cost more than the product.
    """
    if not _wide() or math.prod(x.shape[:-1]) < FEW_ROWS:
        return {name: multiply(x, kernel, 1) for name, kernel in kernels.items()}
    flat = [kernel.astype(x.dtype).reshape(x.shape[-1], -1) for kernel in kernels.values()]
    ends = np.cumsum([kernel.shape[1] for kernel in flat])
    product = x.reshape(-1, x.shape[-1]) @ (jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0])
    parts = jnp.split(product, ends[:-1].tolist(), axis=1)
    shapes = {name: (*x.shape[:-1], *kernel.shape[1:]) for name, kernel in kernels.items()}
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def multiply(x: Float[Array, "B T *inputs"], kernel: Float[Array, "C *features"], axes: int) -> Array:
    """x times a matrix over its last `axes` axes, which have C elements, in x's dtype.

    Away from a CPU, and on a mesh, inputs and features stay axes of their own: heads can be split, and nothing is
    copied to be reshaped.
    """
    kernel, inputs = kernel.astype(x.dtype), x.shape[x.ndim - axes :]
    if not _wide():
        return jnp.tensordot(x, kernel.reshape(*inputs, *kernel.shape[1:]), axes=axes)
    product = x.reshape(-1, kernel.shape[0]) @ kernel.reshape(kernel.shape[0], -1)
    return product.reshape(*x.shape[: x.ndim - axes], *kernel.shape[1:])


def _wide() -> bool:
    return platform() == "cpu" and not sharding.is_split()


class Gate(nnx.Module):
    """Parameters of one gate: `kernel` [D, heads, H or 1] (g5: [D, D]) and `bias`, or input-independent `score`."""

    def __init__(self, spec: GateSpec, model: ModelConfig, rngs: nnx.Rngs):
        self.spec = spec
        shape = spec.score_shape(model)
        if spec.source == "independent":
            self.score = nnx.Param(jnp.zeros(shape, jnp.float32))
            return
        self.kernel = normal(rngs, (model.d_model, *shape), spec.init_scale * model.init_std)
        if spec.bias:
            self.bias = nnx.Param(jnp.full(shape, spec.bias_init, jnp.float32))

    def scores(self, x: Float[Array, "B T D"], product: Array | None) -> Float[Array, "B T *score"]:
        """Pre-activation scores of every token, before sharing; the score axes are (heads, H or 1), or (D,) at g5.

        `product` is x times `kernel`, which the attention layer computes together with its projections.
        """
        if product is None:
            score = self.score[...].astype(x.dtype)
            return jnp.broadcast_to(score, (*x.shape[:2], *score.shape))
        return product + self.bias[...].astype(x.dtype) if self.spec.bias else product


def activate(spec: GateSpec, scores: Float[Array, "B T *score"]) -> Float[Array, "B T *shared"]:
    """Gate values in float32 from pre-activation scores; a shared gate keeps a head axis of length one."""
    values = ACTIVATIONS[spec.activation](scores.astype(jnp.float32))
    return values.mean(axis=2, keepdims=True) if spec.sharing == "shared" else values


def apply(spec: GateSpec, y: Float[Array, "B T *y"], scores: Float[Array, "B T *score"]) -> Float[Array, "B T *y"]:
    """Gates y with pre-activation scores, in float32; returns y's dtype."""
    values = activate(spec, scores)
    gated = y * values if spec.op == "multiply" else y + values
    return gated.astype(y.dtype)


def fuses(spec: GateSpec) -> bool:
    """Whether the attention function applies this gate itself (a sigmoid per head on its output)."""
    return (
        spec.position == "g1"
        and spec.op == "multiply"
        and spec.sharing == "specific"
        and spec.activation in ("sigmoid", "ns_sigmoid")
    )
