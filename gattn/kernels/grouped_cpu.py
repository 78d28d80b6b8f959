"""Grouped products for CPUs: loops over blocks of rows that belong to one group, and whole experts in such a loop.

M rows, K and N columns, E groups; for experts A assignments of T tokens, D model, F width of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Bool, Float, Int

# Rows of a block: multiples of the first, up to the second.
SMALL_BLOCK, LARGE_BLOCK = 8, 128
# Blocks that groups do not fill cost up to E blocks of rows: no more than this share of M, if that leaves any rows.
# An expert layer, its router included, then does at most 1.1 times the FLOPs of its experts where those are much larger
# than the router (tests/test_grouped.py).
SPARE = 0.09
# Blocks that are taken as one where they belong to one group.
JOINED = 4


class _Block(NamedTuple):
    """Rows [start, stop) of one group, among those of a block that begins at `at`; none if start = stop."""

    group: Int[Array, ""]
    at: Int[Array, ""]
    start: Int[Array, ""]
    stop: Int[Array, ""]
    first: Bool[Array, ""]
    """Whether it is its group's first block."""
    last: Bool[Array, ""]


def _blocks(rows: int, sizes: Int[Array, " E"], size: int, count: int) -> _Block:
    """The first `count` blocks in the order of their rows; where there are fewer, what remains has no rows."""
    groups = sizes.shape[0]
    stops, counts = jnp.cumsum(sizes), -(-sizes // size)
    past = jnp.cumsum(counts)
    i = jnp.arange(count, dtype=jnp.int32)
    group = (i[:, None] >= past).sum(axis=1, dtype=jnp.int32)
    exists = group < groups
    group = jnp.minimum(group, groups - 1)
    before = i - (past - counts)[group]
    start = jnp.where(exists, (stops - sizes)[group] + before * size, 0)
    stop = jnp.where(exists, jnp.minimum(start + size, stops[group]), 0)
    first, last = exists & (before == 0), exists & (i == past[group] - 1)
    return _Block(group, jnp.minimum(start, rows - size), start, stop, first, last)


def _over_blocks(rows: int, sizes: Int[Array, " E"], step: Callable[[Any, _Block, int], Any], carry: Any) -> Any:
    """The carry after ``carry = step(carry, block, size)`` for as many blocks as the sizes could ever need.

    Where JOINED blocks in a row are one group's, they are taken as one: larger products are faster, on several cores
    above all. The small ones are there to waste few FLOPs where a group ends.
    """
    groups = sizes.shape[0]
    size = int(SPARE * rows / groups) // SMALL_BLOCK * SMALL_BLOCK
    size = min(max(size, SMALL_BLOCK), LARGE_BLOCK, rows)
    joined = JOINED if rows >= JOINED * size else 1
    windows = -(-min(rows // size + groups, rows) // joined)
    blocks = _blocks(rows, sizes, size, windows * joined)
    if joined == 1:
        return lax.scan(lambda carry, block: (step(carry, block, size), None), carry, blocks)[0]

    def together(carry: Any, window: _Block) -> Any:
        start, stop = window.start[0], window.stop[-1]
        at = jnp.minimum(start, rows - joined * size)
        return step(carry, _Block(window.group[0], at, start, stop, window.first[0], window.last[-1]), joined * size)

    def apart(carry: Any, window: _Block) -> Any:
        return lax.scan(lambda carry, block: (step(carry, block, size), None), carry, window)[0]

    def either(carry: Any, window: _Block) -> tuple[Any, None]:
        one = (window.group[0] == window.group[-1]) & (window.stop[-1] > window.start[-1])
        return lax.cond(one, together, apart, carry, window), None

    return lax.scan(either, carry, jax.tree.map(lambda x: x.reshape(windows, joined), blocks))[0]


def rows(lhs: Array, rhs: Array, sizes: Array, transposed: bool) -> Array:
    """Carries the group's matrix along: slicing it out for every block would take longer than the product."""
    columns = rhs.shape[1 if transposed else 2]

    def step(carry: tuple[Array, Array], block: _Block, size: int) -> tuple[Array, Array]:
        out, matrix = carry
        matrix = lax.cond(block.first, lambda _: _take(rhs, block.group, lhs.dtype), lambda matrix: matrix, matrix)

        def product(matrix: Array) -> Array:
            return _product(_rows_at(lhs, block, size), matrix, (1, 1 if transposed else 0)).astype(out.dtype)

        def nothing(_: Array) -> Array:
            return jnp.zeros((size, columns), out.dtype)

        return _put(out, lax.cond(block.stop > block.start, product, nothing, matrix), block), matrix

    start = _zeros((lhs.shape[0], columns), lhs.dtype, sizes, lhs, rhs), jnp.zeros(rhs.shape[1:], jnp.float32)
    return _over_blocks(lhs.shape[0], sizes, step, start)[0]


def matrices(lhs: Array, dout: Array, sizes: Array, dtype: Any) -> Array:
    """Carries the sum of the group along, and writes it once."""
    shape = lhs.shape[1], dout.shape[1]

    def step(carry: tuple[Array, Array], block: _Block, size: int) -> tuple[Array, Array]:
        out, total = carry

        def add(total: Array) -> Array:
            mine = _belongs(block, size)
            left, right = (jnp.where(mine, _rows_at(x, block, size), 0) for x in (lhs, dout))
            return jnp.where(block.first, 0, total) + _product(left, right, (0, 0))

        def write(out: Array) -> Array:
            return lax.dynamic_update_index_in_dim(out, total.astype(dtype), block.group, 0)

        total = lax.cond(block.stop > block.start, add, lambda total: total, total)
        return lax.cond(block.last, write, lambda out: out, out), total

    start = _zeros((sizes.shape[0], *shape), dtype, sizes, lhs, dout), jnp.zeros(shape, jnp.float32)
    return _over_blocks(lhs.shape[0], sizes, step, start)[0]


# ---- whole experts ------------------------------------------------------------------------------------------------


class Assigned(NamedTuple):
    """Assignments of tokens to experts, sorted by expert, and all that an expert needs."""

    x: Float[Array, "T D"]
    tokens: Int[Array, " A"]
    """Which row of x each takes."""
    scales: Float[Array, " A"]
    kernels: tuple[Array, Array, Array]
    """Gate and up [E, D, F], down [E, F, D], in x's dtype."""
    sizes: Int[Array, " E"]
    """How many each expert has; they add up to A."""


def experts(
    activate: Callable[[Array, Array], Array], assigned: Assigned, *, keep: bool
) -> tuple[Float[Array, "A D"], Float[Array, "A 2F"] | None]:
    """``activate([x W_gate, x W_up], scale) W_down`` for ``x[tokens]``, sorted by expert: `rows` twice, in one loop.

    A block's rows are taken from x, and what is between the two products stays in the processor's caches. Results are
    those of separate products to the last bit: each is rounded to x's dtype.

    Args:
      activate: [rows, 2F] and [rows] in float32 -> [rows, F].
      keep: whether to return the first product too, which `experts_gradients` needs.
    """
    x, tokens, scales, kernels, sizes = assigned
    count, dtype = tokens.size, x.dtype

    def step(carry: Any, block: _Block, size: int) -> Any:
        (out, kept), matrices = carry
        matrices = _matrices_of(kernels, block, matrices)

        def products(matrices: tuple[Array, Array]) -> tuple[Array, Array]:
            both = _product(_gathered(x, tokens, block, size), matrices[0], (1, 0)).astype(dtype)
            hidden = activate(both.astype(jnp.float32), _rows_at(scales, block, size)).astype(dtype)
            return _product(hidden, matrices[1], (1, 0)).astype(dtype), both

        def nothing(_: Any) -> tuple[Array, Array]:
            return jnp.zeros((size, x.shape[1]), dtype), jnp.zeros((size, matrices[0].shape[1]), dtype)

        y, both = lax.cond(block.stop > block.start, products, nothing, matrices)
        return (_put(out, y, block), _put(kept, both, block) if keep else None), matrices

    empty = _no_matrices(kernels)
    out = _zeros((count, x.shape[1]), dtype, sizes, x)
    kept = _zeros((count, empty[0].shape[1]), dtype, sizes, x, kernels[0]) if keep else None
    return _over_blocks(count, sizes, step, ((out, kept), empty))[0]


def experts_gradients(
    activate: Callable[[Array, Array], Array],
    assigned: Assigned,
    kept: Float[Array, "A 2F"],
    cotangent: Float[Array, "T D"],
) -> tuple[Float[Array, "A D"], Float[Array, " A"], tuple[Array, Array, Array]]:
    """Gradients of `experts` for ``x[tokens]``, scales and kernels, where the result's rows are added up by token.

    `cotangent` is that of the sums; `kept` is what `experts` kept.
    """
    x, tokens, scales, kernels, sizes = assigned
    count, dtype, width = tokens.size, x.dtype, kernels[0].shape[2]

    def step(carry: Any, block: _Block, size: int) -> Any:
        (dx, dscales, dkernels), matrices, totals = carry
        matrices = _matrices_of(kernels, block, matrices)

        def products(matrices: tuple[Array, Array], totals: tuple[Array, Array]) -> Any:
            mine = _belongs(block, size)
            rows, dout = (jnp.where(mine, _gathered(a, tokens, block, size), 0) for a in (x, cotangent))
            both = jnp.where(mine, _rows_at(kept, block, size), 0).astype(jnp.float32)
            scale = jnp.where(mine[:, 0], _rows_at(scales, block, size), 0)
            hidden, pullback = jax.vjp(activate, both, scale)
            dboth, dscale = pullback(_product(dout, matrices[1], (1, 1)).astype(dtype).astype(jnp.float32))
            dboth, hidden = dboth.astype(dtype), hidden.astype(dtype)
            terms = _product(rows, dboth, (0, 0)), _product(hidden, dout, (0, 0))
            totals = jax.tree.map(lambda total, term: jnp.where(block.first, 0, total) + term, totals, terms)
            return _product(dboth, matrices[0], (1, 1)).astype(dtype), dscale, totals

        def nothing(_: Any, totals: tuple[Array, Array]) -> Any:
            return jnp.zeros((size, x.shape[1]), dtype), jnp.zeros(size, scales.dtype), totals

        def write(out: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            totals_of = totals[0][:, :width], totals[0][:, width:], totals[1]
            pairs = zip(out, totals_of, strict=True)
            return tuple(lax.dynamic_update_index_in_dim(a, b.astype(dtype), block.group, 0) for a, b in pairs)

        rows, dscale, totals = lax.cond(block.stop > block.start, products, nothing, matrices, totals)
        dkernels = lax.cond(block.last, write, lambda out: out, dkernels)
        return (_put(dx, rows, block), _put(dscales, dscale, block), dkernels), matrices, totals

    dx = _zeros((count, x.shape[1]), dtype, sizes, x, cotangent)
    dkernels = tuple(_zeros(kernel.shape, dtype, sizes, kernel, cotangent) for kernel in kernels)
    start = (dx, jnp.zeros_like(scales), dkernels), _no_matrices(kernels), _no_matrices(kernels)
    return _over_blocks(count, sizes, step, start)[0]


def _no_matrices(kernels: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    _, size, width = kernels[0].shape
    return jnp.zeros((size, 2 * width), jnp.float32), jnp.zeros((width, size), jnp.float32)


def _matrices_of(kernels: tuple[Array, Array, Array], block: _Block, carried: tuple[Array, Array]) -> Any:
    """[W_gate, W_up] and W_down of a block's group, which are taken once for a group and then carried along."""

    def take(_: Any) -> tuple[Array, Array]:
        gate, up, down = (_take(kernel, block.group, kernel.dtype) for kernel in kernels)
        return jnp.concatenate([gate, up], axis=1), down

    return lax.cond(block.first, take, lambda matrices: matrices, carried)


# ---- parts of all -------------------------------------------------------------------------------------------------


def _product(left: Array, right: Array, axes: tuple[int, int]) -> Float[Array, "? ?"]:
    """Contracts one axis of each, in float32."""
    contract = ((axes[0],), (axes[1],)), ((), ())
    operands = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(*operands, contract, precision=lax.Precision.HIGHEST)


def _put(out: Array, new: Array, block: _Block) -> Array:
    """`new` at its rows of `out`, without those that are not the group's."""
    mine = _belongs(block, len(new)).reshape(-1, *(1,) * (new.ndim - 1))
    new = jnp.where(mine, new, _rows_at(out, block, len(new)))
    return lax.dynamic_update_slice_in_dim(out, new, block.at, 0)


def _gathered(x: Array, tokens: Array, block: _Block, size: int) -> Array:
    return x.at[_rows_at(tokens, block, size)].get(mode="promise_in_bounds")


def _zeros(shape: tuple[int, ...], dtype: Any, sizes: Array, *operands: Array) -> Array:
    """Zeros of which XLA cannot know that those of other products are the same.

    It would make one array for all of them, and a copy of that for each, by one thread.
    """
    anything = sum(x[(0,) * x.ndim].astype(dtype) for x in operands)
    return jnp.full(shape, jnp.where(sizes[0] < 0, anything, 0), dtype)


def _take(rhs: Array, group: Array, dtype: Any) -> Array:
    return lax.dynamic_index_in_dim(rhs, group, keepdims=False).astype(dtype).astype(jnp.float32)


def _rows_at(x: Array, block: _Block, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, block.at, size)


def _belongs(block: _Block, size: int) -> Bool[Array, "size 1"]:
    row = block.at + np.arange(size, dtype=np.int32)[:, None]
    return (row >= block.start) & (row < block.stop)
