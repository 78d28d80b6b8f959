"""The oracle: attention in float32 that fixes the semantics, attention maps included; differentiated by JAX itself.

It builds the whole T x S array, which is also the fastest way on a CPU while that array is small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from gattn.kernels import masks

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Inputs(NamedTuple):
    """Every array that attention is differentiated by; K divides N, and bias dimensions of size 1 broadcast."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    gate: Float[Array, "B T N #H"] | None = None
    sinks: Float[Array, " N"] | None = None
    bias: Float[Array, "#B #N #T #S"] | None = None
    alibi_slopes: Float[Array, " N"] | None = None


class Options(NamedTuple):
    """What is known when tracing (hashable). Causality and window act through the mask that is made of them."""

    scale: float
    logits_soft_cap: float | None = None
    gate_activation: str = "sigmoid"
    is_causal: bool = False
    window: tuple[int, int] | None = None


def gate_multiplier(gate: Float[Array, "B T N #H"], activation: str) -> Float[Array, "B T N #H"]:
    """The factor in (0, 1) that multiplies the attention output, in float32 (arXiv 2505.06708, section 2.2, G1)."""
    sigma = jax.nn.sigmoid(gate.astype(accumulation_type(gate)))
    return 0.5 + 0.5 * sigma if activation == "ns_sigmoid" else sigma


def gate_log_slope(gate: Float[Array, "B T N #H"], activation: str) -> Float[Array, "B T N #H"]:
    """Derivative of the logarithm of `gate_multiplier`: the gate's gradient is this times dout * out; in float32."""
    gate = gate.astype(accumulation_type(gate))
    # sigma' / sigma = 1 - sigma = sigmoid(-gate), which unlike 1 - sigma stays exact for large gates.
    slope = jax.nn.sigmoid(-gate)
    if activation == "ns_sigmoid":
        slope = 0.5 * jax.nn.sigmoid(gate) * slope / gate_multiplier(gate, activation)
    return slope


def accumulation_type(x: Array) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.promote_types(x.dtype, jnp.float32)


def attend(inputs: Inputs, mask: masks.Mask, options: Options) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated attention output in the query's dtype, and the float32 log-sum-exp of the logits, sink included.

    A row with nothing to attend to has out = 0 and, without a sink, lse = -inf; its gradients are 0.
    """
    query = inputs.query
    batch, length, heads, head_dim = query.shape
    weights, total, lse = _softmax(inputs, mask, options)
    value = inputs.value.astype(weights.dtype).transpose(0, 2, 1, 3)
    rows = weights.reshape(batch, value.shape[1], -1, value.shape[2])
    out = jnp.einsum("BKTS,BKSH->BKTH", rows, value, precision="highest").reshape(batch, heads, length, head_dim)
    # Dividing here touches T x H numbers instead of T x S.
    out = (out / total).transpose(0, 2, 1, 3)
    if inputs.gate is not None:
        out = out * gate_multiplier(inputs.gate, options.gate_activation)
    return out.astype(query.dtype), lse.transpose(0, 2, 1)


def attention_maps(inputs: Inputs, mask: masks.Mask, options: Options) -> Float[Array, "B N T S"]:
    """softmax(logits) in float32; rows sum to 1, to less if there is a sink, to 0 if there is nothing to attend to."""
    weights, total, _ = _softmax(inputs, mask, options)
    return weights / total


def _softmax(inputs: Inputs, mask: masks.Mask, options: Options) -> tuple[Array, Array, Array]:
    """Unnormalised weights [B, N, T, S], their total [B, N, T, 1] (never 0) and lse [B, N, T]."""
    logits = _logits(inputs, mask, options)
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    sinks = None
    if inputs.sinks is not None:
        sinks = inputs.sinks.astype(logits.dtype)[:, None, None]
        peak = jnp.maximum(peak, jax.lax.stop_gradient(sinks))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - peak)
    # An empty row takes constants from here on, so that no gradient (and no 0 / 0) comes back through it.
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return weights, total, jnp.where(empty, -jnp.inf, jnp.log(total) + peak)[..., 0]


def _logits(inputs: Inputs, mask: masks.Mask, options: Options) -> Float[Array, "B N T S"]:
    dtype = accumulation_type(inputs.query)
    query, key = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (inputs.query, inputs.key))
    batch, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    # The query heads of a kv head become rows of one matrix: a plain batched product, and GQA for free.
    grouped = query.reshape(batch, kv_heads, -1, head_dim)
    dots = jnp.einsum("BKTH,BKSH->BKTS", grouped, key, precision="highest").reshape(batch, heads, rows, keys)
    return transform_dots(dots, inputs.bias, inputs.alibi_slopes, mask, options, 0, 0)


def transform_dots(
    dots: Float[Array, "B N rows keys"],
    bias: Float[Array, "#B #N #rows #keys"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    mask: masks.Mask,
    options: Options,
    row: int | Array,
    key: int | Array,
) -> Float[Array, "B N rows keys"]:
    """Logits of the block that begins at (row, key): scale, soft cap, bias, ALiBi and mask, in this order.

    A bias may be an additive mask (-inf or -1e9), which a later soft cap would undo.
    """
    rows, keys = dots.shape[2:]
    logits = dots * options.scale
    if options.logits_soft_cap is not None:
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    if bias is not None:
        logits = logits + bias.astype(dots.dtype)
    if alibi_slopes is not None:
        distances = masks.distances(mask, row, rows, key, keys).astype(dots.dtype)
        logits = logits - alibi_slopes.astype(dots.dtype)[:, None, None] * distances
    allowed = masks.allowed(mask, row, rows, key, keys)
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
