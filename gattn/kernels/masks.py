"""The one mask representation: what a query row may see, as a key interval, segment ids and (rarely) a dense mask.

Causality, a local window, lengths and a query offset all reduce to one half-open interval of key indices per query row,
so no implementation needs a T x S array for them, and blocks outside the intervals can be skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from jaxtyping import Array, Bool, Int


class Mask(NamedTuple):
    """Which keys each query row may see; batch and head dimensions of size 1 broadcast.

    Query row t sees key s iff s is in the row's interval [start, stop), their segment ids are equal and not negative,
    and ``dense[t, s]``; a part that is None restricts nothing. ``positions`` are global: key 0 is at 0, query row 0 at
    the query offset.
    """

    positions: Int[Array, "#B T"]
    interval: tuple[Int[Array, "#B T"], Int[Array, "#B T"]] | None = None
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    dense: Bool[Array, "#B #N #T #S"] | None = None


def make_mask(
    query_length: int,
    key_length: int,
    *,
    query_offset: Int[Array, "#B"] | int = 0,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    dense: Bool[Array, "#B #N #T #S"] | None = None,
) -> Mask:
    """Folds causality, window (left, right; self not counted), lengths and offset into one interval per query row.

    With an offset known when tracing (an int) and no lengths, positions and interval are NumPy arrays.
    """
    xp = _module(query_offset, *(x for x in (query_lengths, key_lengths) if x is not None))
    rows = np.arange(query_length, dtype=np.int32)[None]
    positions = rows + xp.asarray(query_offset, np.int32).reshape(-1, 1)
    mask = Mask(positions, None, segments, dense)
    if not is_causal and window is None and query_lengths is None and key_lengths is None:
        return mask

    start, stop = xp.zeros_like(positions), xp.full_like(positions, key_length)
    if is_causal:
        stop = xp.minimum(stop, positions + 1)
    if window is not None:
        # Wider ones would overflow, and no sequence is as long.
        left, right = (min(width, 2**30) for width in window)
        start = xp.maximum(start, positions - left)
        stop = xp.minimum(stop, positions + right + 1)
    if key_lengths is not None:
        stop = xp.minimum(stop, key_lengths[:, None].astype(np.int32))
    if query_lengths is not None:
        stop = xp.where(rows < query_lengths[:, None], stop, 0)
    return mask._replace(interval=tuple(xp.broadcast_arrays(start, stop)))


def pad(mask: Mask, query_length: int, key_length: int, padded_query_length: int, padded_key_length: int) -> Mask:
    """The same mask for arrays padded at their ends: padded query rows see nothing, padded keys are seen by nobody."""
    more_rows, more_keys = padded_query_length - query_length, padded_key_length - key_length
    if not more_rows and not more_keys:
        return mask
    start, stop = mask.interval or (0 * mask.positions, 0 * mask.positions + key_length)

    def extend(x, more, fill=0):
        return _module(x).pad(x, ((0, 0), (0, more)), constant_values=fill)

    segments = mask.segments
    if segments is not None:
        segments = extend(segments[0], more_rows, -1), extend(segments[1], more_keys, -1)
    return Mask(
        extend(mask.positions, more_rows),
        (extend(start, more_rows), extend(stop, more_rows)),
        segments,
        None if mask.dense is None else pad_block(mask.dense, more_rows, more_keys),
    )


def pad_block(x: Array, more_rows: int, more_keys: int) -> Array:
    """Pads the last two dimensions of a [B, N, T, S] array, except where they broadcast (size 1)."""
    widths = [(0, more if size > 1 else 0) for size, more in zip(x.shape[2:], (more_rows, more_keys), strict=True)]
    return jnp.pad(x, ((0, 0), (0, 0), *widths))


def block_indices(shape: tuple[int, ...], row: int | Array, key: int | Array) -> tuple[int | Array, ...]:
    """Where the block that begins at (row, key) begins in a [B, N, T, S] array whose dimensions may broadcast."""
    return (0, 0, row if shape[2] > 1 else 0, key if shape[3] > 1 else 0)


def take_block(x: Array, row: int | Array, rows: int, key: int | Array, keys: int) -> Array:
    """Rows [row, row + rows) and keys [key, key + keys) of a [B, N, T, S] array whose dimensions may broadcast."""
    sizes = (*x.shape[:2], min(rows, x.shape[2]), min(keys, x.shape[3]))
    return jax.lax.dynamic_slice(x, block_indices(x.shape, row, key), sizes)


def distances(mask: Mask, row: int | Array, rows: int, key: int | Array, keys: int) -> Int[Array, "#B 1 rows keys"]:
    """|query position - key position| of one block, for ALiBi."""
    positions = jax.lax.dynamic_slice_in_dim(mask.positions, row, rows, 1)
    return jnp.abs(positions[:, None, :, None] - (key + jnp.arange(keys, dtype=jnp.int32)))


def allowed(
    mask: Mask, row: int | Array, rows: int, key: int | Array, keys: int
) -> Bool[Array, "#B #N #rows #keys"] | None:
    """Which pairs of query rows [row, row + rows) and keys [key, key + keys) attend; None if all of them do."""

    def cut(x, start, size, axis):
        return jnp.expand_dims(jax.lax.dynamic_slice_in_dim(x, start, size, 1), (1, axis))

    parts = []
    if mask.interval is not None:
        start, stop = (cut(x, row, rows, 3) for x in mask.interval)
        keys_here = key + jnp.arange(keys, dtype=jnp.int32)
        parts += [keys_here >= start, keys_here < stop]
    if mask.segments is not None:
        ids, key_ids = cut(mask.segments[0], row, rows, 3), cut(mask.segments[1], key, keys, 2)
        # Padding carries negative ids, which must not match even each other.
        parts += [ids == key_ids, ids >= 0]
    if mask.dense is not None:
        parts.append(take_block(mask.dense, row, rows, key, keys))
    if not parts:
        return None
    together = parts[0]
    for part in parts[1:]:
        together &= part
    return together


def block_map(
    mask: Mask, rows: int, key_length: int, keys: int
) -> tuple[Bool[Array, "#B row_blocks key_blocks"], Bool[Array, "#B row_blocks key_blocks"]]:
    """Per block of `rows` query rows and `keys` keys: whether some pair in it may attend, and whether every pair does.

    The lengths must be multiples of the block sizes (`pad` first). The dense part is not looked at. Segment ids may
    come in any order; contiguous (packed) segments are the ones that let blocks be skipped. A mask of NumPy arrays has
    maps of NumPy arrays, known when tracing.
    """
    xp = _module(*jax.tree.leaves(mask))
    blocks = mask.positions.shape[1] // rows
    edges = np.arange(0, key_length, keys, dtype=np.int32)
    needed = full = xp.ones((1, blocks, edges.size), bool)
    if mask.interval is not None:
        start, stop = (x.reshape(-1, blocks, rows, 1) for x in mask.interval)
        seen = start < stop
        first = xp.where(seen, start, key_length).min(axis=2)
        last = xp.where(seen, stop, 0).max(axis=2)
        needed = needed & (first < edges + keys) & (last > edges)
        full = full & (start.max(axis=2) <= edges) & (stop.min(axis=2) >= edges + keys)
    if mask.segments is not None:
        query_low, query_high, query_padding = (x[:, :, None] for x in _segment_range(mask.segments[0], rows, xp))
        key_low, key_high, key_padding = (x[:, None] for x in _segment_range(mask.segments[1], keys, xp))
        needed = needed & (query_low <= key_high) & (key_low <= query_high)
        one_id = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
        full = full & one_id & ~query_padding & ~key_padding
    return needed, full


def visited_range(needed: Bool[Array, "... blocks"]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """The half-open range [first, stop) of the blocks that are needed, along the last axis; first = stop for none."""
    xp = _module(needed)
    first = xp.argmax(needed, axis=-1).astype(np.int32)
    stop = (needed.shape[-1] - xp.argmax(needed[..., ::-1], axis=-1)).astype(np.int32)
    return first, xp.where(needed.any(axis=-1), stop, first)


def _segment_range(ids: Int[Array, "B T"], size: int, xp: ModuleType) -> tuple[Array, Array, Array]:
    """Per block of `size`: smallest and largest id, padding left out (an empty range if there is nothing else), and
    whether the block holds padding."""
    blocks = ids.reshape(ids.shape[0], -1, size)
    padding = blocks < 0
    return xp.where(padding, np.iinfo(np.int32).max, blocks).min(axis=2), blocks.max(axis=2), padding.any(axis=2)


def _module(*arrays: Array | np.ndarray | int) -> ModuleType:
    """NumPy for what is known when tracing, so that it stays known; else jax.numpy."""
    return np if all(isinstance(x, np.ndarray | int) for x in arrays) else jnp
