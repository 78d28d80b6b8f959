"""gated_dot_product_attention: signature, checks and choice of implementation."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gattn.kernels import chunked, masks, reference, vjp

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int

GATE_ACTIVATIONS = ("sigmoid", "ns_sigmoid")
# From this many logits per head on, `chunked` is used: it is then the faster one on a CPU, and always the smaller.
CHUNKED_FROM = 512 * 512

# None: JAX differentiates the reference itself.
_KERNELS = {"reference": None, "chunked": vjp.Kernel(chunked.forward, chunked.backward)}
IMPLEMENTATIONS = tuple(_KERNELS)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def gated_dot_product_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K H"],
    bias: Float[ArrayLike, "#B #N #T #S"] | None = None,
    mask: Bool[ArrayLike, "#B #N #T #S"] | None = None,
    *,
    gate: Float[ArrayLike, "*B T N #H"] | None = None,
    gate_activation: str = "sigmoid",
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, " B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Int[ArrayLike, "B S"] | tuple[Int[ArrayLike, "B T"], Int[ArrayLike, "B S"]] | None = None,
    query_offset: int | Int[ArrayLike, "#B"] = 0,
    sinks: Float[ArrayLike, " N"] | None = None,
    alibi_slopes: Float[ArrayLike, " N"] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Float[Array, "*B T N H"] | tuple[Float[Array, "*B T N H"], Float[Array, "*B T N"]]:
    """Softmax attention whose output is multiplied by a gate: ``softmax(q k^T * scale + ...) v * sigmoid(gate)``.

    A drop-in for `jax.nn.dot_product_attention` (same names, layout and meaning), plus the gate of arXiv 2505.06708
    (section 2.2, position G1), sinks, segments, ALiBi, soft cap and a query offset. Logits are formed in this order:
    scale, soft cap, bias, ALiBi, masks. (jax.nn has no cap; tokamax caps after the bias, which undoes additive masks.)
    B batch, T query length, S key length, N query heads, K kv heads (K divides N), H head_dim.

    Args:
      query: [B, T, N, H], or [T, N, H] without a batch (then key, value and gate too). float16, bfloat16 or float32.
      key, value: [B, S, K, H], in the query's dtype; query head n uses kv head n // (N / K).
      bias: added to the logits; 4D (or NTS) and broadcastable to [B, N, T, S]. Differentiated.
      mask: boolean, True = take part; shaped as bias.
      gate: scores before the activation, computed from the query's token: [B, T, N, H] elementwise, [B, T, N, 1]
        headwise. The activation is applied in float32 here; gates of other kinds belong outside.
      gate_activation: "sigmoid", or "ns_sigmoid" for 0.5 + 0.5 * sigmoid.
      scale: multiplies q k^T; 1 / sqrt(H) by default.
      is_causal: a query at global position p sees the keys 0..p.
      query_seq_lengths, key_value_seq_lengths: [B], rows of each sequence that count; what lies beyond them may hold
        anything, NaN included, and gets zeros and zero gradients.
      local_window_size: (left, right) or one int for both: keys p - left .. p + right, p itself not counted. A Hugging
        Face window W is (W - 1, 0).
      segment_ids: [B, S] for T == S, or a pair ([B, T], [B, S]); only equal ids see each other. Negative ids are
        padding, which sees nothing and is seen by nothing.
      query_offset: global position of query row 0 (key 0 is at 0) for causality, window and ALiBi; an int or [B].
        Negative values are allowed, for a shard of later keys.
      sinks: [N], one more logit per head in the softmax's denominator, without a value. Zeros: off-by-one softmax.
      alibi_slopes: [N], adds ``-slope * |query position - key position|``.
      logits_soft_cap: ``cap * tanh(logits / cap)``.
      implementation: "reference" (float32, T x S arrays), "chunked" (O(S * block) memory) or None to take what
        `choose_implementation` says.
      return_residual: also return the log-sum-exp, float32 [B, T, N], natural logarithm, of the logits as above, sink
        included, gate not, so that partial results can be merged. It is differentiable.

    Returns:
      The output, [B, T, N, H] in the query's dtype; with `return_residual` the pair (output, lse). A row with nothing
      to attend to has output 0, lse -inf (the sink, if there is one) and zero gradients.

    Raises:
      TypeError, ValueError: an argument has a dtype, shape or value that cannot work; it is named with the remedy.
    """
    unbatched = np.ndim(query) == 3
    inputs, limits, options = _prepare(
        query,
        key,
        value,
        bias,
        mask,
        gate=gate,
        gate_activation=gate_activation,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        query_offset=query_offset,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        logits_soft_cap=logits_soft_cap,
    )
    kernel = _KERNELS[choose_implementation(inputs.query, inputs.key, implementation)]
    out, lse = _attend(kernel, options, inputs, limits)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def attention_maps(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    bias: Float[ArrayLike, "#B #N #T #S"] | None = None,
    mask: Bool[ArrayLike, "#B #N #T #S"] | None = None,
    **arguments: Any,
) -> Float[Array, "*B N T S"]:
    """The attention probabilities, float32 [B, N, T, S]: the T x S array is built, so this is for short texts.

    Takes the keyword arguments of `gated_dot_product_attention` that shape the softmax (scale, is_causal, sinks, ...),
    with the same errors. A row sums to 1, to less with a sink, and to 0 if it has nothing to attend to.
    """
    inputs, limits, options = _prepare(query, key, key, bias, mask, **arguments)
    maps = _attention_maps(options, inputs, limits)
    return maps[0] if np.ndim(query) == 3 else maps


def choose_implementation(query: Any, key: Any, implementation: str | None = None) -> str:
    """The name of the implementation that attention on these arrays (or `jax.ShapeDtypeStruct`s, BTNH) runs.

    None means "reference" while T * S is below `CHUNKED_FROM` (512 x 512), then "chunked"; a given name is taken as
    it is. ValueError for an unknown name.
    """
    if implementation is None:
        return "chunked" if query.shape[-3] * key.shape[-3] >= CHUNKED_FROM else "reference"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown: use one of {IMPLEMENTATIONS}, or None to choose."
        )
    return implementation


class _Limits(NamedTuple):
    """The arrays that say who sees whom."""

    query_offset: Int[Array, "#B"]
    query_lengths: Int[Array, " B"] | None
    key_lengths: Int[Array, " B"] | None
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    dense: Bool[Array, "#B #N #T #S"] | None


# Jitted so that calls outside of jit compile once per shape, and not their loops at every call.
@partial(jax.jit, static_argnums=(0, 1))
def _attend(
    kernel: vjp.Kernel | None, options: reference.Options, inputs: reference.Inputs, limits: _Limits
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    inputs, mask = _mask_and_clear(options, inputs, limits)
    if kernel is None:
        out, lse = reference.attend(inputs, mask, options)
    else:
        out, lse = vjp.attend(kernel, options, inputs, mask)
    # Stops whatever cotangent a caller's padding rows bring.
    return _clear(out, limits.query_lengths), lse


@partial(jax.jit, static_argnums=0)
def _attention_maps(options: reference.Options, inputs: reference.Inputs, limits: _Limits) -> Float[Array, "B N T S"]:
    inputs, mask = _mask_and_clear(options, inputs, limits)
    return reference.attention_maps(inputs, mask, options)


def _mask_and_clear(
    options: reference.Options, inputs: reference.Inputs, limits: _Limits
) -> tuple[reference.Inputs, masks.Mask]:
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    mask = masks.make_mask(*lengths, is_causal=options.is_causal, window=options.window, **limits._asdict())
    cleared = inputs._replace(
        query=_clear(inputs.query, limits.query_lengths),
        key=_clear(inputs.key, limits.key_lengths),
        value=_clear(inputs.value, limits.key_lengths),
        gate=None if inputs.gate is None else _clear(inputs.gate, limits.query_lengths),
    )
    return cleared, mask


def _clear(x: Float[Array, "B T N H"], lengths: Int[Array, " B"] | None) -> Float[Array, "B T N H"]:
    """Zeros beyond the lengths: a probability of 0 times a NaN left there would be NaN."""
    if lengths is None:
        return x
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[:, :, None, None], x, 0)


def _prepare(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    gate: ArrayLike | None = None,
    gate_activation: str = "sigmoid",
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    query_offset: int | ArrayLike = 0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[reference.Inputs, _Limits, reference.Options]:
    """Checks every argument and brings it into the one form that implementations take."""
    query, key, value = _check_qkv(query, key, value)
    (batch, length, heads, head_dim), key_length = query.shape, key.shape[1]
    logits_shape = batch, heads, length, key_length
    if gate_activation not in GATE_ACTIVATIONS:
        raise ValueError(
            f"gate_activation={gate_activation!r} is unknown: use one of {GATE_ACTIVATIONS}, or apply the gate outside."
        )
    inputs = reference.Inputs(
        query,
        key,
        value,
        gate=_check_gate(gate, query),
        sinks=None if sinks is None else _check("sinks", sinks, jnp.floating, (heads,)),
        bias=_check_broadcastable("bias", bias, jnp.floating, logits_shape),
        alibi_slopes=None if alibi_slopes is None else _check("alibi_slopes", alibi_slopes, jnp.floating, (heads,)),
    )
    limits = _Limits(
        query_offset=_check_offset(query_offset, batch),
        query_lengths=_check_lengths("query_seq_lengths", query_seq_lengths, batch),
        key_lengths=_check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        segments=_check_segments(segment_ids, batch, length, key_length),
        dense=_check_broadcastable("mask", mask, jnp.bool_, logits_shape),
    )
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal={is_causal!r} must be True or False, known when tracing.")
    options = reference.Options(
        scale=1 / math.sqrt(head_dim) if scale is None else _check_number("scale", scale),
        logits_soft_cap=None if logits_soft_cap is None else _check_number("logits_soft_cap", logits_soft_cap),
        gate_activation=gate_activation,
        is_causal=bool(is_causal),
        window=_check_window(local_window_size),
    )
    if options.logits_soft_cap is not None and options.logits_soft_cap <= 0:
        raise ValueError(f"logits_soft_cap={logits_soft_cap} must be positive; pass None for no cap.")
    return inputs, limits, options


def _array(name: str, x: ArrayLike) -> Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}.") from error


def _check(name: str, x: ArrayLike, kind: Any, shape: tuple[int, ...]) -> Array:
    x = _array(name, x)
    _check_kind(name, x, kind)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, must be {shape}.")
    return x


def _check_kind(name: str, x: Array, kind: Any) -> None:
    if not jnp.issubdtype(x.dtype, kind):
        remedy = " (an additive mask goes into bias)" if name == "mask" else ""
        raise TypeError(
            f"{name} has dtype {x.dtype}, must be {np.dtype(bool) if kind is jnp.bool_ else kind.__name__}{remedy}."
        )


def _check_broadcastable(name: str, x: ArrayLike | None, kind: Any, shape: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    x = _array(name, x)
    _check_kind(name, x, kind)
    padded = (1,) * (4 - x.ndim) + x.shape
    if len(padded) != 4 or any(size not in (1, full) for size, full in zip(padded, shape, strict=True)):
        raise ValueError(f"{name} has shape {x.shape}, must broadcast to [B, N, T, S] = {shape}.")
    return x.reshape(padded)


def _check_qkv(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array, Array]:
    query, key, value = _array("query", query), _array("key", key), _array("value", value)
    if query.ndim not in (3, 4) or 0 in query.shape:
        raise ValueError(f"query has shape {query.shape}, must be [B, T, N, H] or [T, N, H] and not empty.")
    if query.dtype.name not in _DTYPES:
        raise TypeError(f"query has dtype {query.dtype}, must be one of {_DTYPES}: cast it.")
    if (
        key.ndim != query.ndim
        or 0 in key.shape
        or (*key.shape[:-3], key.shape[-1]) != (*query.shape[:-3], query.shape[-1])
    ):
        raise ValueError(
            f"key has shape {key.shape}, must be {'[B, S, K, H]' if query.ndim == 4 else '[S, K, H]'} with the batch "
            f"and head_dim of query, whose shape is {query.shape}."
        )
    if value.shape != key.shape:
        raise ValueError(f"value has shape {value.shape}, must be that of key, {key.shape}.")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, query has {query.dtype}: cast them to one dtype.")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query has {query.shape[-2]} heads, must be a multiple of the {key.shape[-2]} heads of key.")
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    return query, key, value


def _check_gate(gate: ArrayLike | None, query: Float[Array, "B T N H"]) -> Float[Array, "B T N #H"] | None:
    if gate is None:
        return None
    scores = _array("gate", gate)
    _check_kind("gate", scores, jnp.floating)
    headwise = (*query.shape[:-1], 1)
    if scores.ndim == 3 and query.shape[0] == 1:
        scores = scores[None]
    if scores.shape not in (query.shape, headwise):
        raise ValueError(
            f"gate has shape {scores.shape}, must be {query.shape} (elementwise) or {headwise} (headwise)."
        )
    return scores


def _check_segments(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None, batch: int, length: int, key_length: int
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    if segment_ids is None:
        return None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids has {len(segment_ids)} parts, must be one array or (query ids, key ids).")
        query_ids, key_ids = segment_ids
    elif length != key_length:
        raise ValueError(
            f"segment_ids is one array, but query has {length} rows and key {key_length}: pass (query ids, key ids)."
        )
    else:
        query_ids = key_ids = segment_ids
    return (
        _check("segment_ids (query)", query_ids, jnp.signedinteger, (batch, length)),
        _check("segment_ids (key)", key_ids, jnp.signedinteger, (batch, key_length)),
    )


def _check_lengths(name: str, lengths: ArrayLike | None, batch: int) -> Int[Array, " B"] | None:
    return None if lengths is None else _check(name, lengths, jnp.integer, (batch,))


def _check_offset(query_offset: int | ArrayLike, batch: int) -> Int[Array, "#B"]:
    offset = _array("query_offset", query_offset)
    _check_kind("query_offset", offset, jnp.integer)
    if offset.shape not in ((), (1,), (batch,)):
        raise ValueError(f"query_offset has shape {offset.shape}, must be an int or an array of shape ({batch},).")
    return offset.reshape(-1)


def _check_number(name: str, x: float) -> float:
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(f"{name} is {type(x).__name__}, must be a Python number known when tracing.")
    if not math.isfinite(x):
        raise ValueError(f"{name}={x} must be finite.")
    return float(x)


def _check_window(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(isinstance(x, int | np.integer) and x >= 0 for x in pair):
        raise ValueError(
            f"local_window_size={window!r} must be an int or (left, right), not negative; None for no window."
        )
    return int(pair[0]), int(pair[1])
