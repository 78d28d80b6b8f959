"""The one custom_vjp of every implementation but the reference: residuals, preprocess, gate and sink gradients.

A kernel is a pair of functions; everything that the gate adds to the backward pass happens here, once, elementwise:
with ``out = O * sigma`` and ``delta = rowsum(dout * out)`` (which equals ``rowsum(dO * O)``)

    dO = dout * sigma,   dgate = dout * out * sigma' / sigma   (elementwise; summed over H for a headwise gate),
    dsink = -sum(exp(sink - lse) * delta),

so that the ungated O is never needed and never saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gattn.kernels.masks import Mask
from gattn.kernels.reference import Inputs, Options, accumulation_type, gate_log_slope, gate_multiplier

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float

# Saved by a remat policy such as `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`, these two spare
# the backward pass a second forward kernel.
CHECKPOINT_NAMES = ("attention_out", "attention_lse")


class Kernel(NamedTuple):
    """One implementation, as two functions that JAX does not differentiate.

    forward(inputs, mask, options) -> (gated out [B, T, N, H] in the query's dtype, lse float32 [B, T, N]).
    backward(inputs, mask, options, lse, dout, delta) -> Inputs of gradients, where dout is the cotangent of the ungated
    output, and every logit's gradient is ``p * (dp - delta)`` with delta float32 [B, T, N]. The gate's and the sinks'
    gradients are left None. lse is +inf in rows with nothing to attend to, so that ``exp(logit - lse)`` is 0 there.
    preprocess(gate, options, out, dout) -> (cotangent of the ungated output, delta, the gate's gradient), where XLA
    needs more than one pass for it.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., Inputs]
    preprocess: Callable[..., tuple[Array, Array, Array]] | None = None


# Arrays as hashable static values, and the tree they are leaves of; None where a leaf is not known when tracing.
_Known = tuple[jax.tree_util.PyTreeDef, tuple[tuple[str, tuple[int, ...], bytes] | None, ...]]


def attend(
    kernel: Kernel, options: Options, inputs: Inputs, mask: Mask
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated attention by `kernel`: the output in the query's dtype and the float32 log-sum-exp, both differentiable.

    NumPy arrays of the mask reach the kernel as such, forward and backward, so that it can lay out its grid by them.
    """
    leaves, tree = jax.tree.flatten(mask)
    known = tuple((x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else None for x in leaves)
    return _attend(kernel, options, (tree, known), inputs, [x for x in leaves if not isinstance(x, np.ndarray)])


def _mask(known: _Known, traced: list[Array]) -> Mask:
    remaining = iter(traced)
    tree, leaves = known
    whole = [next(remaining) if x is None else np.frombuffer(x[2], x[0]).reshape(x[1]) for x in leaves]
    return jax.tree.unflatten(tree, whole)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(kernel: Kernel, options: Options, known: _Known, inputs: Inputs, traced: list[Array]):
    return _forward(kernel, options, known, inputs, traced)[0]


def _forward(kernel: Kernel, options: Options, known: _Known, inputs: Inputs, traced: list[Array]):
    outside = _gate_outside(inputs)
    mask = _mask(known, traced)
    out, lse = kernel.forward(inputs if outside is None else inputs._replace(gate=None), mask, options)
    saved = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    residuals = inputs, traced, saved, lse
    if outside is None:
        return (saved, lse), residuals
    out = (saved * gate_multiplier(outside, options.gate_activation)).astype(saved.dtype)
    return (out, lse), residuals


def _backward(kernel: Kernel, options: Options, known: _Known, residuals, cotangents):
    inputs, traced, saved, lse = residuals
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    dungated, delta, dgate = _preprocess(kernel, inputs, options, saved, dout)
    # d lse / d logit = p, so the cotangent of lse only shifts delta. An empty row's lse is a constant.
    delta = delta - jnp.where(empty, 0.0, dlse)
    lse = jnp.where(empty, jnp.inf, lse)
    grads = kernel.backward(inputs, _mask(known, traced), options, lse, dungated, delta)
    dsinks = None
    if inputs.sinks is not None:
        dsinks = -(jnp.exp(inputs.sinks.astype(lse.dtype) - lse) * delta).sum(axis=(0, 1)).astype(inputs.sinks.dtype)
    return grads._replace(gate=dgate, sinks=dsinks), None


_attend.defvjp(_forward, _backward)


def _gate_outside(inputs: Inputs) -> Float[Array, "B T N #H"] | None:
    """The gate, if it is applied after the kernel and the ungated output is saved: in float16.

    There a small sigma can underflow the gated output (the smallest number is 6e-8), and delta with it.
    """
    return inputs.gate if inputs.query.dtype == jnp.float16 else None


def _preprocess(
    kernel: Kernel, inputs: Inputs, options: Options, saved: Float[Array, "B T N H"], dout: Float[Array, "B T N H"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N #H"] | None]:
    """The cotangent of the ungated output, delta = rowsum(dout * out) and the gate's gradient; float32 inside."""
    gate, activation = inputs.gate, options.gate_activation
    if gate is not None and kernel.preprocess is not None and _gate_outside(inputs) is None:
        return kernel.preprocess(gate, options, saved, dout)
    dtype = accumulation_type(dout)
    product = dout.astype(dtype) * saved.astype(dtype)
    if gate is None:
        return dout, product.sum(axis=-1), None
    multiplier = gate_multiplier(gate, activation)
    if _gate_outside(inputs) is not None:
        product = product * multiplier
    delta = product.sum(axis=-1)
    slope = gate_log_slope(gate, activation)
    dgate = delta[..., None] * slope if gate.shape[-1] == 1 else product * slope
    return (dout.astype(dtype) * multiplier).astype(dout.dtype), delta, dgate.astype(gate.dtype)
