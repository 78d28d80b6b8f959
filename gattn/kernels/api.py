"""gated_dot_product_attention: signature, choice of implementation, and what each is called with."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gattn.kernels import chunked, masks, reference, sharded, tuning, vjp
from gattn.kernels.arguments import Limits, make_mask, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Bool, Float, Int

IMPLEMENTATIONS = ("tpu", "gpu", "cudnn", "chunked", "reference")
# What a platform prefers, best first. "gpu" comes before "cudnn" once a committed table of a real GPU has proved it.
_PREFERRED = {"tpu": ("tpu",), "gpu": ("cudnn",)}
# From this many keys on a device kernel is used. With fewer, its blocks are mostly padding.
KERNEL_FROM = 512
# From this many logits per head on, `chunked` is used: it is then the faster one on a CPU, and always the smaller.
CHUNKED_FROM = 512 * 512
# Up to this many queries per head, the query heads of a kv head become rows of one block of a device kernel.
PACKED_UP_TO = 8

# The context that runs Pallas kernels in interpreters, where its users look for it.
interpreting = tuning.interpreting


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
    sharding: PartitionSpec | None = None,
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
      implementation: "tpu" and "gpu" (Pallas kernels with the gate in their epilogue), "cudnn" (the gate outside),
        "chunked" (XLA, O(S * block) memory), "reference" (float32, T x S arrays), or None to take what
        `choose_implementation` says. A given one is never replaced.
      sharding: how query lies over the mesh in context (`jax.set_mesh`), as `P("data", None, "tensor")`: batch, rows
        and heads may be split. Device kernels need it where the mesh's axes are automatic; explicit ones say it
        themselves. Key and value are gathered along S. None inside of `shard_map`.
      return_residual: also return the log-sum-exp, float32 [B, T, N], natural logarithm, of the logits as above, sink
        included, gate not, so that partial results can be merged. It is differentiable.

    Returns:
      The output, [B, T, N, H] in the query's dtype; with `return_residual` the pair (output, lse). A row with nothing
      to attend to has output 0, lse -inf (the sink, if there is one) and zero gradients.

    Raises:
      TypeError, ValueError: an argument has a dtype, shape or value that cannot work; it is named with the remedy.
    """
    unbatched = np.ndim(query) == 3
    inputs, limits, options = prepare(
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
    chosen = _choose(inputs, limits, options, implementation)
    layout = sharded.layout(inputs.query, PartitionSpec(None, *sharding) if sharding and unbatched else sharding)
    _check_layout(chosen, layout)
    out, lse = _attend(_attention(chosen), layout, options, inputs, limits)
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
    inputs, limits, options = prepare(query, key, key, bias, mask, **arguments)
    maps = _attention_maps(options, inputs, limits)
    return maps[0] if np.ndim(query) == 3 else maps


def choose_implementation(
    query: Any, key: Any, value: Any, *more: Any, implementation: str | None = None, **arguments: Any
) -> str:
    """The name of the implementation that a call of `gated_dot_product_attention` with these arguments runs.

    Arrays may be `jax.ShapeDtypeStruct`s. None takes, from `KERNEL_FROM` (512) keys on, the platform's device kernel if
    it can do the call: "tpu" on TPUs, "cudnn" on GPUs. Otherwise "reference" while T * S is below `CHUNKED_FROM`
    (512 x 512), then "chunked". The platform is that of the mesh in context, else of the default device.

    Raises:
      ValueError: the name is unknown, or it cannot do an argument, which is named. And what the call itself raises.
    """
    names = ("query", "key", "value", "bias", "mask")
    arguments |= dict(zip(names, (query, key, value, *more), strict=False))
    arguments = {name: x for name, x in arguments.items() if name not in ("sharding", "return_residual")}
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape") or name == "segment_ids"}
    chosen = []

    def trace(arrays: dict[str, Any]) -> None:
        chosen.append(_choose(*prepare(**arguments | arrays), implementation))

    jax.eval_shape(trace, arrays)
    return chosen[0]


def _choose(inputs: reference.Inputs, limits: Limits, options: reference.Options, implementation: str | None) -> str:
    if implementation is None:
        length, key_length = inputs.query.shape[1], inputs.key.shape[1]
        preferred = _PREFERRED.get(tuning.platform(), ()) if key_length >= KERNEL_FROM else ()
        fallback = "chunked" if length * key_length >= CHUNKED_FROM else "reference"
        fitting = (name for name in preferred if _unsupported(name, inputs, limits, options) is None)
        return next(fitting, fallback)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown: use one of {IMPLEMENTATIONS}, or None to choose."
        )
    problem = _unsupported(implementation, inputs, limits, options)
    if problem is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot do this call: {problem}. None chooses one that can."
        )
    return implementation


def _unsupported(name: str, inputs: reference.Inputs, limits: Limits, options: reference.Options) -> str | None:
    if name == "cudnn":
        return _module(name).unsupported(inputs, limits, options)
    if name in ("tpu", "gpu"):
        mask = jax.eval_shape(partial(make_mask, options=options), inputs, limits)
        return _module(name).unsupported(inputs, mask, options)
    return None


def _check_layout(implementation: str, layout: PartitionSpec | None) -> None:
    """XLA can split everything but the Pallas kernels, cuDNN's rows excepted."""
    if implementation == "cudnn" and layout is not None and layout[1] is not None:
        raise ValueError(f'implementation="cudnn" cannot split rows: sharding={layout}.')
    sizes = jax.sharding.get_abstract_mesh().shape
    if implementation in ("tpu", "gpu") and layout is None and any(sizes[axis] > 1 for axis in sharded.free_axes()):
        raise ValueError(
            f"implementation={implementation!r} under a mesh needs sharding=P(batch axes, None, head axes): XLA cannot "
            "split a device kernel, and the axes of the mesh are automatic."
        )


def _attention(name: str) -> Callable[..., tuple[Array, Array]]:
    """The implementation as a hashable function (inputs, mask, (query lengths, key lengths), options) -> (out, lse)."""
    if name == "reference":
        return _reference
    if name == "cudnn":
        return _module(name).attend
    return _fused(_kernel(name, interpreting.value), name in ("tpu", "gpu"))


def _reference(
    inputs: reference.Inputs, mask: masks.Mask, lengths: Any, options: reference.Options
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    return reference.attend(inputs, mask, options)


# Cached, because jit's cache knows functions by identity.
@cache
def _fused(kernel: vjp.Kernel, packs: bool) -> Callable[..., tuple[Array, Array]]:
    def attention(inputs: reference.Inputs, mask: masks.Mask, lengths: Any, options: reference.Options) -> Any:
        few = inputs.query.shape[1] <= PACKED_UP_TO and inputs.query.shape[2] > inputs.key.shape[2]
        attend = _attend_packed if packs and few else vjp.attend
        return attend(kernel, options, inputs, mask)

    return attention


@cache
def _kernel(name: str, interpret: Any) -> vjp.Kernel:
    if name == "chunked":
        return vjp.Kernel(chunked.forward, chunked.backward)
    module = _module(name)
    functions = {part: getattr(module, part) for part in vjp.Kernel._fields if hasattr(module, part)}
    return vjp.Kernel(**{part: partial(function, interpret=interpret) for part, function in functions.items()})


def _module(name: str) -> Any:
    """The module of a device's kernels, which may import only where Pallas has that device."""
    return importlib.import_module(f"gattn.kernels.{name}")


def _attend_packed(
    kernel: vjp.Kernel, options: reference.Options, inputs: reference.Inputs, mask: masks.Mask
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`vjp.attend` with the G = N / K query heads of a kv head as rows: T * G rows of K heads, for a few queries.

    So a block of keys is read once for all of them, and the matrix unit gets more than T rows. Rows of several heads
    have no sink in common: the kernel runs without, and what the sinks take is taken from the output afterwards.
    """
    batch, length, heads, _ = inputs.query.shape
    kv_heads = inputs.key.shape[2]
    group = heads // kv_heads

    def swap(x: Array, *sizes: int) -> Array:
        return x.reshape(batch, length, *sizes, x.shape[-1]).swapaxes(2, 3)

    def pack(x: Float[Array, "B T N X"]) -> Float[Array, "B T*G K X"]:
        return swap(x, kv_heads, group).reshape(batch, length * group, kv_heads, -1)

    def unpack(x: Float[Array, "B T*G K X"]) -> Float[Array, "B T N X"]:
        return swap(x, group, kv_heads).reshape(batch, length, heads, -1)

    def repeat(x: Int[Array, "B T"]) -> Int[Array, "B T*G"]:
        return (np if isinstance(x, np.ndarray) else jnp).repeat(x, group, axis=1)

    rows = mask._replace(
        positions=repeat(mask.positions),
        interval=None if mask.interval is None else (repeat(mask.interval[0]), repeat(mask.interval[1])),
        segments=None if mask.segments is None else (repeat(mask.segments[0]), mask.segments[1]),
    )
    gate = None if inputs.gate is None else pack(inputs.gate)
    packed = inputs._replace(query=pack(inputs.query), gate=gate, sinks=None)
    out, lse = vjp.attend(kernel, options, packed, rows)
    out, lse = unpack(out), unpack(lse[..., None])[..., 0]
    if inputs.sinks is None:
        return out, lse
    sinks = inputs.sinks.astype(lse.dtype)
    # Of the softmax with a sink, exp(lse) / (exp(lse) + exp(sink)) falls to the keys.
    empty = lse == -jnp.inf
    finite = jnp.where(empty, 0.0, lse)
    share = jnp.where(empty, 0.0, jax.nn.sigmoid(finite - sinks))
    lse = jnp.where(empty, sinks, jnp.logaddexp(finite, sinks))
    return (out * share[..., None]).astype(out.dtype), lse


# Jitted so that calls outside of jit compile once per shape, and not their loops at every call.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(
    attention: Callable[..., tuple[Array, Array]],
    layout: PartitionSpec | None,
    options: reference.Options,
    inputs: reference.Inputs,
    limits: Limits,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    inputs, mask = _mask_and_clear(options, inputs, limits)
    lengths = limits.query_lengths, limits.key_lengths
    if layout is None:
        out, lse = attention(inputs, mask, lengths, options)
    else:
        out, lse = sharded.attend(attention, layout, inputs, mask, lengths, options)
    # Stops whatever cotangent a caller's padding rows bring.
    return _clear(out, limits.query_lengths), lse


@partial(jax.jit, static_argnums=0)
def _attention_maps(options: reference.Options, inputs: reference.Inputs, limits: Limits) -> Float[Array, "B N T S"]:
    inputs, mask = _mask_and_clear(options, inputs, limits)
    return reference.attention_maps(inputs, mask, options)


def _mask_and_clear(
    options: reference.Options, inputs: reference.Inputs, limits: Limits
) -> tuple[reference.Inputs, masks.Mask]:
    cleared = inputs._replace(
        query=_clear(inputs.query, limits.query_lengths),
        key=_clear(inputs.key, limits.key_lengths),
        value=_clear(inputs.value, limits.key_lengths),
        gate=None if inputs.gate is None else _clear(inputs.gate, limits.query_lengths),
    )
    return cleared, make_mask(inputs, limits, options)


def _clear(x: Float[Array, "B T N H"], lengths: Int[Array, " B"] | None) -> Float[Array, "B T N H"]:
    """Zeros beyond the lengths: a probability of 0 times a NaN left there would be NaN."""
    if lengths is None:
        return x
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[:, :, None, None], x, 0)
