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
from jax.ad_checkpoint import checkpoint_name

from gattn.kernels.masks import Mask
from gattn.kernels.reference import Inputs, Options, accumulation_type, gate_multiplier

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
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., Inputs]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernel: Kernel, options: Options, inputs: Inputs, mask: Mask
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated attention by `kernel`: the output in the query's dtype and the float32 log-sum-exp, both differentiable."""
    return _forward(kernel, options, inputs, mask)[0]


def _forward(kernel: Kernel, options: Options, inputs: Inputs, mask: Mask):
    outside = _gate_outside(inputs)
    out, lse = kernel.forward(inputs if outside is None else inputs._replace(gate=None), mask, options)
    saved = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    if outside is None:
        return (saved, lse), (inputs, mask, saved, lse)
    out = (saved * gate_multiplier(outside, options.gate_activation)).astype(saved.dtype)
    return (out, lse), (inputs, mask, saved, lse)


def _backward(kernel: Kernel, options: Options, residuals, cotangents):
    inputs, mask, saved, lse = residuals
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    dungated, delta, dgate = _preprocess(inputs, options, saved, dout)
    # d lse / d logit = p, so the cotangent of lse only shifts delta. An empty row's lse is a constant.
    delta = delta - jnp.where(empty, 0.0, dlse)
    lse = jnp.where(empty, jnp.inf, lse)
    grads = kernel.backward(inputs, mask, options, lse, dungated, delta)
    dsinks = None
    if inputs.sinks is not None:
        dsinks = -(jnp.exp(inputs.sinks.astype(lse.dtype) - lse) * delta).sum(axis=(0, 1)).astype(inputs.sinks.dtype)
    return grads._replace(gate=dgate, sinks=dsinks), None


attend.defvjp(_forward, _backward)


def _gate_outside(inputs: Inputs) -> Float[Array, "B T N #H"] | None:
    """The gate, if it is applied after the kernel and the ungated output is saved: in float16.

    There a small sigma can underflow the gated output (the smallest number is 6e-8), and delta with it.
    """
    return inputs.gate if inputs.query.dtype == jnp.float16 else None


def _preprocess(
    inputs: Inputs, options: Options, saved: Float[Array, "B T N H"], dout: Float[Array, "B T N H"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N #H"] | None]:
    """The cotangent of the ungated output, delta = rowsum(dout * out) and the gate's gradient; float32 inside."""
    dtype = accumulation_type(dout)
    product = dout.astype(dtype) * saved.astype(dtype)
    if inputs.gate is None:
        return dout, product.sum(axis=-1), None
    gate = inputs.gate.astype(dtype)
    multiplier = gate_multiplier(gate, options.gate_activation)
    if _gate_outside(inputs) is not None:
        product = product * multiplier
    # sigma' / sigma = 1 - sigma = sigmoid(-gate), which unlike 1 - sigma stays exact for large gates.
    log_slope = jax.nn.sigmoid(-gate)
    if options.gate_activation == "ns_sigmoid":
        log_slope = 0.5 * jax.nn.sigmoid(gate) * log_slope / multiplier
    delta = product.sum(axis=-1)
    dgate = delta[..., None] * log_slope if gate.shape[-1] == 1 else product * log_slope
    return (dout.astype(dtype) * multiplier).astype(dout.dtype), delta, dgate.astype(inputs.gate.dtype)
