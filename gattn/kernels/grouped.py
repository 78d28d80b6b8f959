"""One grouped matrix product with its gradient, for experts: rows sorted by group, each group with its own matrix.

Three implementations, none of which drops or pads rows in memory: "ragged" is XLA's ragged dot, grouped on TPUs only;
"gpu" is a Mosaic GPU kernel for Hopper; "blocks" is a loop over blocks of rows, for CPUs.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from gattn.kernels import tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Bool, Float, Int

IMPLEMENTATIONS = ("ragged", "gpu", "blocks")
# Rows of a block on a CPU: multiples of the first, up to the second.
SMALL_BLOCK, LARGE_BLOCK = 8, 128
# Blocks that groups do not fill cost up to E blocks of rows: no more than this share of M, if that leaves any rows.
SPARE = 0.1
# Blocks that are taken as one where they belong to one group.
JOINED = 4


def grouped_dot(
    lhs: Float[ArrayLike, "M K"],
    rhs: Float[ArrayLike, "E K N"],
    group_sizes: Int[ArrayLike, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Each group's rows times its own matrix: ``out[m] = lhs[m] @ rhs[e]`` for the rows m of group e.

    M rows, K and N columns, E groups. Sums are in float32, and the gradients of lhs and rhs are grouped products too.

    Args:
      lhs: [M, K] float16, bfloat16 or float32, sorted by group: the first group_sizes[0] rows are group 0's, and so on.
      rhs: [E, K, N] in lhs's dtype or in float32, then rounded to lhs's dtype; its gradient comes in its own dtype.
      group_sizes: [E] integers, non-negative, with a sum of at most M; any may be zero. Not differentiated. Rows beyond
        the sum may hold anything, NaN included: they give zeros, and get and cause zero gradients.
      implementation: "ragged", "gpu", "blocks", or None to take what `choose_grouped` says. A given one is never
        replaced.

    Returns:
      [M, N] in lhs's dtype.

    Raises:
      TypeError, ValueError: an argument has a dtype or shape that cannot work, or the implementation cannot do it.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    name = choose_grouped(lhs, rhs, implementation=implementation)
    if group_sizes.shape != rhs.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be [E] = [{rhs.shape[0]}] integers, got {group_sizes.dtype} {group_sizes.shape}."
        )
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    return _grouped_dot(_methods(name, tuning.interpreting.value), lhs, rhs, group_sizes.astype(jnp.int32))


def choose_grouped(lhs: Any, rhs: Any, *, implementation: str | None = None) -> str:
    """The name of the implementation that `grouped_dot` runs for such arrays (or `jax.ShapeDtypeStruct`s).

    None takes "ragged" on TPUs and "blocks" on CPUs; on GPUs "gpu" where it can do the call: Hopper, 16-bit numbers,
    jax from 0.11 on. Other calls on a GPU take "ragged", which multiplies all rows by all E matrices there: E times the
    FLOPs, and an array of E x M x K numbers. The platform is that of the mesh in context, else of the default device.

    Raises:
      TypeError, ValueError: the arrays do not fit, the name is unknown, or it cannot do the call; with the remedy.
    """
    _check(lhs, rhs)
    if implementation is None:
        platform = tuning.platform()
        if platform == "gpu":
            return "gpu" if _unsupported(lhs, rhs) is None else "ragged"
        return "ragged" if platform == "tpu" else "blocks"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown: use one of {IMPLEMENTATIONS}, or None to choose."
        )
    problem = _unsupported(lhs, rhs) if implementation == "gpu" else None
    if problem is not None:
        raise ValueError(f"implementation='gpu' cannot do this call: {problem}. None chooses one that can.")
    return implementation


def _check(lhs: Any, rhs: Any) -> None:
    if len(lhs.shape) != 2 or len(rhs.shape) != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"lhs must be [M, K] and rhs [E, K, N], got {lhs.shape} and {rhs.shape}.")
    if lhs.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise TypeError(f"lhs must be float16, bfloat16 or float32, got {lhs.dtype}.")
    if rhs.dtype not in (lhs.dtype, jnp.float32):
        raise TypeError(f"rhs must have lhs's dtype {lhs.dtype} or be float32, got {rhs.dtype}.")


def _unsupported(lhs: Any, rhs: Any) -> str | None:
    return _gpu().unsupported(lhs, rhs)


def _gpu() -> Any:
    """The module of the GPU kernel, which may import only where Pallas has that device."""
    return importlib.import_module("gattn.kernels.grouped_gpu")


class _Methods(NamedTuple):
    """The two products of an implementation, as hashable functions."""

    rows: Callable[..., Array]
    """(lhs [M, K], rhs [E, K, N], sizes, transposed) -> [M, N] in lhs's dtype; transposed, rhs is [E, N, K]."""
    matrices: Callable[..., Array]
    """(lhs [M, K], dout [M, N], sizes, dtype) -> [E, K, N]: lhs^T dout over the rows of each group."""
    in_turn: bool = False
    """Whether the two gradients must not be computed side by side."""


# Cached, because jit's cache knows functions by identity.
@cache
def _methods(name: str, interpret: Any) -> _Methods:
    if name == "ragged":
        return _Methods(_ragged_rows, _ragged_matrices)
    if name == "gpu":
        return _Methods(partial(_gpu().rows, interpret=interpret), partial(_gpu().matrices, interpret=interpret))
    return _Methods(_block_rows, _block_matrices, in_turn=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(methods: _Methods, lhs: Array, rhs: Array, sizes: Array) -> Array:
    return methods.rows(lhs, rhs, sizes, False)


def _grouped_dot_forward(methods: _Methods, lhs: Any, rhs: Any, sizes: Any) -> Any:
    # What is wanted must be known before it is traced: None where it is not.
    wanted = tuple(() if x.perturbed else None for x in (lhs, rhs))
    lhs, rhs, sizes = lhs.value, rhs.value, sizes.value
    return methods.rows(lhs, rhs, sizes, False), (lhs, rhs, sizes, wanted)


def _grouped_dot_backward(methods: _Methods, residuals: Any, dout: Any) -> tuple[Array | None, Array | None, None]:
    lhs, rhs, sizes, wanted = residuals
    if isinstance(dout, SymbolicZero):
        return None, None, None
    dlhs = drhs = None
    if wanted[1] is not None:
        drhs = methods.matrices(lhs, dout, sizes, rhs.dtype)
        if methods.in_turn:
            # XLA runs loops that are independent side by side, and on a CPU they then fight for its caches. No size is
            # negative, but XLA cannot know.
            sizes = jnp.where(sizes[0] < 0, sizes + drhs[0, 0, 0].astype(jnp.int32), sizes)
    if wanted[0] is not None:
        dlhs = methods.rows(dout, rhs, sizes, True)
    return dlhs, drhs, None


_grouped_dot.defvjp(_grouped_dot_forward, _grouped_dot_backward, symbolic_zeros=True)


# ---- ragged: XLA's own -------------------------------------------------------------------------------------------


def _ragged_rows(lhs: Array, rhs: Array, sizes: Array, transposed: bool) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    out = _ragged(lhs, rhs.astype(lhs.dtype), sizes, numbers, lhs.dtype)
    # On TPUs, what lies beyond the groups is not written at all.
    return jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 0)


def _ragged_matrices(lhs: Array, dout: Array, sizes: Array, dtype: Any) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return _ragged(lhs, dout, sizes, numbers, dtype)


def _ragged(lhs: Array, rhs: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, dtype: Any) -> Array:
    """TPUs' kernels sum in float32 whatever the result's dtype, and a float32 result would be an array more."""
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers, precision=precision, preferred_element_type=dtype)


# ---- blocks: a loop for CPUs -------------------------------------------------------------------------------------


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


def _block_rows(lhs: Array, rhs: Array, sizes: Array, transposed: bool) -> Array:
    """Carries the group's matrix along: slicing it out for every block would take longer than the product."""
    columns = rhs.shape[1 if transposed else 2]
    contract = ((1,), (1 if transposed else 0,)), ((), ())

    def step(carry: tuple[Array, Array], block: _Block, size: int) -> tuple[Array, Array]:
        out, matrix = carry
        matrix = lax.cond(block.first, lambda _: _take(rhs, block.group, lhs.dtype), lambda matrix: matrix, matrix)

        def product(matrix: Array) -> Array:
            rows = _rows_at(lhs, block, size).astype(jnp.float32)
            return lax.dot_general(rows, matrix, contract, precision=lax.Precision.HIGHEST).astype(out.dtype)

        def nothing(_: Array) -> Array:
            return jnp.zeros((size, columns), out.dtype)

        new = lax.cond(block.stop > block.start, product, nothing, matrix)
        new = jnp.where(_belongs(block, size), new, _rows_at(out, block, size))
        return lax.dynamic_update_slice_in_dim(out, new, block.at, 0), matrix

    start = _zeros((lhs.shape[0], columns), lhs.dtype, sizes, lhs, rhs), jnp.zeros(rhs.shape[1:], jnp.float32)
    return _over_blocks(lhs.shape[0], sizes, step, start)[0]


def _block_matrices(lhs: Array, dout: Array, sizes: Array, dtype: Any) -> Array:
    """Carries the sum of the group along, and writes it once."""
    shape = lhs.shape[1], dout.shape[1]

    def step(carry: tuple[Array, Array], block: _Block, size: int) -> tuple[Array, Array]:
        out, total = carry

        def add(total: Array) -> Array:
            mine = _belongs(block, size)
            left, right = (jnp.where(mine, _rows_at(x, block, size), 0).astype(jnp.float32) for x in (lhs, dout))
            product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
            return jnp.where(block.first, 0, total) + product

        def write(out: Array) -> Array:
            return lax.dynamic_update_index_in_dim(out, total.astype(dtype), block.group, 0)

        total = lax.cond(block.stop > block.start, add, lambda total: total, total)
        return lax.cond(block.last, write, lambda out: out, out), total

    start = _zeros((sizes.shape[0], *shape), dtype, sizes, lhs, dout), jnp.zeros(shape, jnp.float32)
    return _over_blocks(lhs.shape[0], sizes, step, start)[0]


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
