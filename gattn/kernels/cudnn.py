"""cuDNN's attention, as jax.nn offers it, with the gate outside: what GPUs older than Hopper have.

The gate is a pass of its own over the output, and the ungated output one more residual.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from gattn.kernels import chunked, vjp
from gattn.kernels.reference import Inputs, Options, gate_multiplier

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from gattn.kernels.arguments import Limits
    from gattn.kernels.masks import Mask


def unsupported(inputs: Inputs, limits: Limits, options: Options) -> str | None:
    """The first argument of gated_dot_product_attention that cuDNN cannot do, and why; None if it can do the call.

    Also what it would do differently: its masks are large finite numbers, so a row that sees nothing gets the mean of
    the values instead of 0.
    """
    (_, length, _, head_dim), key_length = inputs.query.shape, inputs.key.shape[1]
    if inputs.query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"query has dtype {inputs.query.dtype}, cuDNN does float16 and bfloat16"
    if head_dim % 8 or head_dim > _largest_head_dim():
        return f"query has head_dim {head_dim}, cuDNN does multiples of 8 up to {_largest_head_dim()} on this device"
    for name, x in (
        ("bias", inputs.bias),
        ("mask", limits.dense),
        ("segment_ids", limits.segments),
        ("query_offset", limits.query_offset),
        ("sinks", inputs.sinks),
        ("alibi_slopes", inputs.alibi_slopes),
        ("logits_soft_cap", options.logits_soft_cap),
    ):
        if x is not None:
            return f"{name} is not done by cuDNN here"
    if options.window is not None:
        left, right = options.window
        if right and not options.is_causal:
            return f"local_window_size={options.window} looks ahead, cuDNN's windows do not"
        if limits.query_lengths is not None or limits.key_lengths is not None or length - left > key_length:
            return f"local_window_size={options.window} leaves rows without keys, which cuDNN gets wrong"
    return None


def attend(
    inputs: Inputs, mask: Mask, lengths: tuple[Array | None, Array | None], options: Options
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The gated output and the log-sum-exp of a call that is not `unsupported`.

    `lengths` are of queries and keys; what lies beyond them is 0.
    """
    query_lengths, key_lengths = (None if x is None else x.astype(jnp.int32) for x in lengths)
    # A window that does not look ahead is causal; and only causal attention has windows in cuDNN.
    window = None if options.window is None else (options.window[0], 0)
    out = jax.nn.dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        scale=options.scale,
        is_causal=options.is_causal or window is not None,
        query_seq_lengths=query_lengths,
        # Not 0: such a sequence sees one key, whose value is 0 like all beyond the lengths.
        key_value_seq_lengths=None if key_lengths is None else jnp.maximum(key_lengths, 1),
        local_window_size=window,
        implementation="cudnn",
    )
    if inputs.gate is not None:
        out = _apply_gate(out, inputs.gate, options.gate_activation)
    # jax.nn rounds cuDNN's log-sum-exp to the output's dtype and gives it no gradient. So it is computed here, where it
    # is used; where it is not, as in training, the compiler drops this.
    kernel = vjp.Kernel(chunked.forward, chunked.backward)
    _, lse = vjp.attend(kernel, options, inputs._replace(gate=None), mask)
    return out, lse


# Computed again for its gradient: JAX would save the float32 factor and product.
@partial(jax.checkpoint, static_argnums=2)
def _apply_gate(
    out: Float[Array, "B T N H"], gate: Float[Array, "B T N #H"], activation: str
) -> Float[Array, "B T N H"]:
    return (out * gate_multiplier(gate, activation)).astype(out.dtype)


def _largest_head_dim() -> int:
    """256 from Hopper on, 0 before Ampere and on another maker's GPU; one that is not here counts as Ampere."""
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")
    # "0.0" is no GPU at all, as when compiling for one.
    if capability.startswith("gfx") or 0 < float(capability) < 8:
        return 0
    return 256 if float(capability) >= 9 else 128
