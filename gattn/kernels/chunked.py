"""Flash attention in plain XLA: loops over blocks of query rows and keys, on every platform.

Memory beyond the inputs, the output and their gradients is one block of logits, O(S * block) at most, forward and
backward: no T x S array exists. Key blocks that a block of query rows cannot see are not visited.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from gattn.kernels import masks
from gattn.kernels.reference import Inputs, Options, accumulation_type, gate_multiplier, transform_dots

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Large enough for matrix products to dominate, small enough for a head's block of logits to stay in a CPU's cache.
BLOCK = 256


class _Sums(NamedTuple):
    """Gradients that add up over the blocks of query rows, in float32."""

    key: Float[Array, "B K H S"]
    value: Float[Array, "B K H S"]
    bias: Float[Array, "#B #N #T #S"] | None
    alibi_slopes: Float[Array, " N"] | None


def forward(
    inputs: Inputs, mask: masks.Mask, options: Options, *, block: int = BLOCK
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated output in the query's dtype and the float32 log-sum-exp, sinks included (-inf in empty rows)."""
    length = inputs.query.shape[1]
    inputs, mask, rows, keys = _pad(inputs, mask, block)
    first, stop = _visited(mask, rows, inputs.key.shape[1], keys)

    def row_block(bounds: tuple[Int[Array, ""], ...]) -> tuple[Array, Array]:
        i, first, stop = bounds
        query = _take(inputs.query, i * rows, rows)
        batch, heads, _, head_dim = query.shape
        dtype = accumulation_type(query)

        def key_block(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, acc = carry
            key, value = (_take(x, j * keys, keys) for x in (inputs.key, inputs.value))
            bias = _bias_block(inputs, i * rows, rows, j * keys, keys)
            dots = _rows_by_keys(query, key)
            logits = transform_dots(dots, bias, inputs.alibi_slopes, mask, options, i * rows, j * keys)
            new_peak = jnp.maximum(peak, logits.max(axis=-1))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights, decay = jnp.exp(logits - shift[..., None]), jnp.exp(peak - shift)
            acc = acc * decay[..., None] + _keys_to_rows(weights.astype(value.dtype), value)
            return new_peak, total * decay + weights.sum(axis=-1), acc

        nothing = jnp.full((batch, heads, rows), -jnp.inf, dtype)
        start = nothing, jnp.zeros_like(nothing), jnp.zeros((batch, heads, rows, head_dim), dtype)
        peak, total, acc = jax.lax.fori_loop(first, stop, key_block, start)
        out, lse = _finish(peak, total, acc, inputs.sinks)
        out, lse = out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)
        if inputs.gate is not None:
            gate = jax.lax.dynamic_slice_in_dim(inputs.gate, i * rows, rows, 1)
            out = out * gate_multiplier(gate, options.gate_activation)
        return out.astype(inputs.query.dtype), lse

    out, lse = jax.lax.map(row_block, (jnp.arange(first.size), first, stop))
    return _join(out, length), _join(lse, length)


def backward(
    inputs: Inputs,
    mask: masks.Mask,
    options: Options,
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    delta: Float[Array, "B T N"],
    *,
    block: int = BLOCK,
) -> Inputs:
    """Gradients of query, key, value, bias and ALiBi slopes, summed in float32; the contract is `vjp.Kernel`."""
    (length, key_length), original = (inputs.query.shape[1], inputs.key.shape[1]), inputs
    inputs, mask, rows, keys = _pad(inputs, mask, block)
    first, stop = _visited(mask, rows, inputs.key.shape[1], keys)
    dout, lse, delta = (_pad_axis(x, inputs.query.shape[1]) for x in (dout, lse, delta))

    def row_block(sums: _Sums, bounds: tuple[Int[Array, ""], ...]) -> tuple[_Sums, Array]:
        i, first, stop = bounds
        row = i * rows
        query, dout_rows = _take(inputs.query, row, rows), _take(dout, row, rows)
        lse_rows, delta_rows = (_take(x[..., None], row, rows) for x in (lse, delta))

        def key_block(j: Int[Array, ""], carry: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            dquery, sums = carry
            key, value = (_take(x, j * keys, keys) for x in (inputs.key, inputs.value))
            bias = _bias_block(inputs, row, rows, j * keys, keys)
            transform = partial(transform_dots, mask=mask, options=options, row=row, key=j * keys)
            logits, pullback = jax.vjp(transform, _rows_by_keys(query, key), bias, inputs.alibi_slopes)
            weights = jnp.exp(logits - lse_rows)
            dlogits = weights * (_rows_by_keys(dout_rows, value) - delta_rows)
            ddots, dbias, dslopes = pullback(dlogits)
            ddots, weights = ddots.astype(query.dtype), weights.astype(query.dtype)
            sums = _Sums(
                key=_add_keys(sums.key, j * keys, _rows_to_keys(ddots, query, key.shape[1])),
                value=_add_keys(sums.value, j * keys, _rows_to_keys(weights, dout_rows, key.shape[1])),
                bias=None if sums.bias is None else _add_block(sums.bias, row, j * keys, dbias),
                alibi_slopes=None if sums.alibi_slopes is None else sums.alibi_slopes + dslopes,
            )
            return dquery + _keys_to_rows(ddots, key), sums

        dquery, sums = jax.lax.fori_loop(
            first, stop, key_block, (jnp.zeros(query.shape, accumulation_type(query)), sums)
        )
        return sums, dquery.transpose(0, 2, 1, 3).astype(query.dtype)

    key, value = (x.transpose(0, 2, 3, 1) for x in (inputs.key, inputs.value))
    summed = _Sums(key, value, inputs.bias, inputs.alibi_slopes)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_type(x)), summed)
    sums, dquery = jax.lax.scan(row_block, zeros, (jnp.arange(first.size), first, stop))
    cut = Inputs(
        query=_join(dquery, length),
        key=sums.key[..., :key_length].transpose(0, 3, 1, 2),
        value=sums.value[..., :key_length].transpose(0, 3, 1, 2),
        bias=None if sums.bias is None else sums.bias[:, :, :length, :key_length],
        alibi_slopes=sums.alibi_slopes,
    )
    return jax.tree.map(lambda grad, x: grad.astype(x.dtype), cut, original._replace(gate=None, sinks=None))


def _finish(
    peak: Float[Array, "B N rows"], total: Float[Array, "B N rows"], acc: Array, sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "B N rows H"], Float[Array, "B N rows"]]:
    """Adds the sink to the denominator, then normalises; a row that saw nothing gets out = 0, lse = -inf."""
    if sinks is not None:
        sinks = sinks.astype(peak.dtype)[:, None]
        new_peak = jnp.maximum(peak, sinks)
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        decay = jnp.exp(peak - shift)
        peak, total, acc = new_peak, total * decay + jnp.exp(sinks - shift), acc * decay[..., None]
    return acc / jnp.where(total == 0, 1.0, total)[..., None], peak + jnp.log(total)


def _visited(mask: masks.Mask, rows: int, key_length: int, keys: int) -> tuple[Array, Array]:
    """Per block of query rows, the range of key blocks that some sequence of the batch needs."""
    needed, _ = masks.block_map(mask, rows, key_length, keys)
    return masks.visited_range(needed.any(axis=0))


def _block_size(length: int, block: int) -> int:
    """The largest size up to `block` that wastes little padding: 300 rows are 2 blocks of 152, not of 256."""
    blocks = -(-length // block)
    return min(block, -(-length // (8 * blocks)) * 8)


def _pad(inputs: Inputs, mask: masks.Mask, block: int) -> tuple[Inputs, masks.Mask, int, int]:
    """Pads lengths to multiples of the block sizes: zeros, which the mask hides (0 * garbage could be NaN)."""
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    rows, keys = _block_size(length, block), _block_size(key_length, block)
    padded, padded_keys = -(-length // rows) * rows, -(-key_length // keys) * keys
    padded_inputs = inputs._replace(
        query=_pad_axis(inputs.query, padded),
        key=_pad_axis(inputs.key, padded_keys),
        value=_pad_axis(inputs.value, padded_keys),
        gate=None if inputs.gate is None else _pad_axis(inputs.gate, padded),
        bias=None if inputs.bias is None else masks.pad_block(inputs.bias, padded - length, padded_keys - key_length),
    )
    return padded_inputs, masks.pad(mask, length, key_length, padded, padded_keys), rows, keys


def _pad_axis(x: Array, length: int) -> Array:
    if x.shape[1] == length:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def _take(x: Float[Array, "B T N H"], start: Int[Array, ""], size: int) -> Float[Array, "B N size H"]:
    """One block of rows with the heads in front; copying a block costs nothing beside the products made of it."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, 1).transpose(0, 2, 1, 3)


def _bias_block(inputs: Inputs, row: Array, rows: int, key: Array, keys: int) -> Array | None:
    return None if inputs.bias is None else masks.take_block(inputs.bias, row, rows, key, keys)


def _add_keys(x: Float[Array, "B K H S"], start: Array, block: Float[Array, "B K H keys"]) -> Float[Array, "B K H S"]:
    old = jax.lax.dynamic_slice_in_dim(x, start, block.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(x, old + block, start, 3)


def _add_block(x: Float[Array, "#B #N #T #S"], row: Array, key: Array, block: Array) -> Float[Array, "#B #N #T #S"]:
    where = masks.block_indices(x.shape, row, key)
    old = jax.lax.dynamic_slice(x, where, block.shape)
    return jax.lax.dynamic_update_slice(x, old + block, where)


def _join(blocks: Array, length: int) -> Array:
    """[blocks, B, rows, ...] -> [B, length, ...]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _einsum(letters: str, x: Array, y: Array) -> Array:
    return jnp.einsum(letters, x, y, precision="highest", preferred_element_type=accumulation_type(x))


def _grouped(x: Float[Array, "B N rows X"], kv_heads: int) -> Float[Array, "B K G*rows X"]:
    """The query heads of a kv head as rows of one matrix, so that GQA is a plain batched product."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def _rows_by_keys(x: Float[Array, "B N rows H"], y: Float[Array, "B K keys H"]) -> Float[Array, "B N rows keys"]:
    dots = _einsum("BKTH,BKSH->BKTS", _grouped(x, y.shape[1]), y)
    return dots.reshape(*x.shape[:3], y.shape[2])


def _keys_to_rows(x: Float[Array, "B N rows keys"], y: Float[Array, "B K keys H"]) -> Float[Array, "B N rows H"]:
    sums = _einsum("BKTS,BKSH->BKTH", _grouped(x, y.shape[1]), y)
    return sums.reshape(*x.shape[:3], y.shape[3])


def _rows_to_keys(x: Float[Array, "B N rows keys"], y: Array, kv_heads: int) -> Float[Array, "B K H keys"]:
    # The large factor on the right, untransposed: twice as fast on a CPU as asking for [keys, H].
    return _einsum("BKTH,BKTS->BKHS", _grouped(y, kv_heads), _grouped(x, kv_heads))
