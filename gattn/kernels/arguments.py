"""What a call of gated_dot_product_attention says: every argument checked and brought into the one form used inside."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gattn.kernels import masks, reference

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int

GATE_ACTIVATIONS = ("sigmoid", "ns_sigmoid")
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Limits(NamedTuple):
    """The arrays that say who sees whom."""

    query_offset: Int[Array, "#B"] | None
    """None if row 0 is known to stand at 0 when tracing: its mask is then known as well."""
    query_lengths: Int[Array, " B"] | None
    key_lengths: Int[Array, " B"] | None
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    dense: Bool[Array, "#B #N #T #S"] | None


def make_mask(inputs: reference.Inputs, limits: Limits, options: reference.Options) -> masks.Mask:
    """Who sees whom, in the one representation of all implementations."""
    arrays = limits._asdict() | ({"query_offset": 0} if limits.query_offset is None else {})
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    return masks.make_mask(*lengths, is_causal=options.is_causal, window=options.window, **arrays)


def prepare(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
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
) -> tuple[reference.Inputs, Limits, reference.Options]:
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
    limits = Limits(
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


def _check_offset(query_offset: int | ArrayLike, batch: int) -> Int[Array, "#B"] | None:
    # Other integers stay arrays: a loop over positions must not compile once for each.
    if type(query_offset) is int and query_offset == 0:
        return None
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
