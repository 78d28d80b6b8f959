"""The grouped product for NVIDIA Hopper in Pallas Mosaic GPU: wgmma, TMA, specialised warpgroups.

A tile of the result belongs to one CUDA block, whose producer warpgroup copies slices of both operands by TMA into a
ring in shared memory; each of its two consumer warpgroups owns 64 of the tile's rows. Two kernels: rows times their
group's matrix, and the sum over a group's rows. Nothing is added atomically, so two runs agree bit for bit.

Tiles of rows lie at multiples of their size. One in which several groups meet is visited once for each of them, and
each visit stores its own rows only. The rows after the last group are one more group, of zeros.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gattn.kernels import gpu
from gattn.kernels.gpu import HOPPER, MATRIX, PRODUCER_REGISTERS, ROWS, TILE

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CONSUMERS = 2
# TMA reads rows of whole 16 bytes.
ALIGNED = 8


class Tile(NamedTuple):
    """Tiles of 128 rows (of the result) by so many columns, a multiple of 64, and slots of the ring."""

    columns: int
    stages: int


# By width; a thread's accumulator has columns / 2 registers, a slot is 8 KB for the rows and 128 bytes a column.
WIDE, NARROW = Tile(256, 3), Tile(128, 4)


def tile_for(columns: int) -> Tile:
    """The wide one if it pads no more than the narrow one."""
    return WIDE if -columns % WIDE.columns == -columns % NARROW.columns else NARROW


def unsupported(lhs: Any, rhs: Any) -> str | None:
    """Why the kernels cannot multiply these, lhs [M, K] and rhs [E, K, N]; None if they can."""
    if jax.__version_info__ < (0, 11):
        return f"Mosaic GPU is that of jax {jax.__version__}; the GPU kernel needs 0.11"
    capability = getattr(jax.devices()[0], "compute_capability", HOPPER)
    if capability != HOPPER:
        return f"this GPU has compute capability {capability}; the GPU kernel is for Hopper, {HOPPER}"
    if lhs.dtype not in (jnp.bfloat16, jnp.float16):
        return f"lhs has dtype {lhs.dtype}; the GPU kernel takes bfloat16 and float16"
    if any(width % ALIGNED for width in rhs.shape[1:]):
        return f"rhs has shape {rhs.shape}; the GPU kernel wants K and N to be multiples of {ALIGNED}"
    return None


def rows(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "E K N"],
    sizes: Int[Array, " E"],
    transposed: bool,
    *,
    tile: Tile | None = None,
    interpret: Any = False,
) -> Float[Array, "M N"]:
    """Each group's rows times its matrix, in lhs's dtype; `transposed` if rhs is [E, N, K].

    `interpret` (True, or `plgpu.InterpretGPUParams`) runs it on a CPU.
    """
    rhs = rhs.astype(lhs.dtype)
    columns = rhs.shape[1 if transposed else 2]
    tile = tile or tile_for(columns)
    block = CONSUMERS * ROWS
    visits = _visits(lhs.shape[0], sizes, block)
    right = (tile.columns, TILE) if transposed else (TILE, tile.columns)
    return _launch(
        partial(_rows_kernel, transposed=transposed, tile=tile),
        f"grouped_rows{'_transposed' * transposed}",
        (visits, lhs, rhs),
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], columns), lhs.dtype),
        scratch={
            "ring": _ring(tile, [(block, TILE), right], lhs.dtype),
            "staging": _staging(lhs.dtype),
            "loose": plgpu.SMEM((CONSUMERS, ROWS, TILE), lhs.dtype),
        },
        grid=(pl.cdiv(columns, tile.columns), visits.shape[0]),
        names=("column", "visit"),
        interpret=interpret,
    )


def matrices(
    lhs: Float[Array, "M K"],
    dout: Float[Array, "M N"],
    sizes: Int[Array, " E"],
    dtype: Any,
    *,
    tile: Tile | None = None,
    interpret: Any = False,
) -> Float[Array, "E K N"]:
    """lhs^T dout over the rows of each group, summed in float32; `interpret` as in `rows`."""
    height, columns = lhs.shape[1], dout.shape[1]
    tile = tile or tile_for(columns)
    block = CONSUMERS * ROWS
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    return _launch(
        partial(_matrices_kernel, tile=tile),
        "grouped_matrices",
        (jnp.stack([stops - sizes, stops], axis=1), lhs, dout),
        out_type=jax.ShapeDtypeStruct((sizes.shape[0], height, columns), dtype),
        scratch={
            "ring": _ring(tile, [(TILE, block), (TILE, tile.columns)], lhs.dtype),
            "staging": _staging(dtype),
            "cleared": plgpu.Barrier(num_arrivals=CONSUMERS),
        },
        grid=(pl.cdiv(columns, tile.columns), pl.cdiv(height, block), sizes.shape[0]),
        names=("column", "row", "group"),
        interpret=interpret,
    )


def _rows_kernel(visits, lhs, rhs, out, *, ring, staging, loose, transposed, tile):
    visit, column = lax.axis_index("visit"), lax.axis_index("column") * tile.columns
    group, row, start, stop = (visits[visit, i] for i in range(4))
    row = pl.multiple_of(row, CONSUMERS * ROWS)
    # The rows after the last group have no products.
    steps = jnp.where((group < rhs.shape[0]) & (stop > start), pl.cdiv(lhs.shape[1], TILE), 0)

    def produce():
        columns = pl.ds(column, tile.columns)

        @pl.loop(jnp.int32(0), steps)
        def _(step):
            inner = pl.ds(step * TILE, TILE)
            right = rhs.at[group, columns, inner] if transposed else rhs.at[group, inner, columns]
            ring.fill(step, lhs.at[pl.ds(row, CONSUMERS * ROWS), inner], right)

        ring.drain(steps)

    def product(step, sums):
        left, right = ring.take(step)
        left = left.at[pl.ds(gpu.warpgroup_index() * ROWS, ROWS)]
        plgpu.wgmma(sums, left, right.transpose((1, 0)) if transposed else right)

    def store(sums):
        warpgroup = lax.axis_index("warpgroup")
        first = row + warpgroup * ROWS
        low, high = (jnp.clip(x - first, 0, ROWS) for x in (start, stop))

        @pl.when(high - low == ROWS)
        def _():
            _store(sums, staging.at[warpgroup], out.at[pl.ds(first, ROWS)], column)

        # The row of the other visits to this tile are theirs: copies of 32, 16, ... 1 rows, as the number has bits.
        @pl.when((high > low) & (high - low < ROWS))
        def _():
            for part in range(0, tile.columns, TILE):

                @pl.when(column + part < out.shape[1])
                def _(part=part):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    loose[warpgroup] = sums[:, part : part + TILE].astype(loose.dtype)
                    plgpu.commit_smem()
                    at, size = low, ROWS // 2
                    while size:
                        take = (high - low) & size

                        @pl.when(take > 0)
                        def _(at=at, size=size):
                            target = out.at[pl.ds(first + at, size), pl.ds(column + part, TILE)]
                            plgpu.copy_smem_to_gmem(loose.at[warpgroup, pl.ds(at, size)], target)

                        at, size = at + take, size // 2

    _run(produce, product, store, steps, ring, tile)


def _matrices_kernel(bounds, lhs, dout, out, *, ring, staging, cleared, tile):
    group = lax.axis_index("group")
    row, column = lax.axis_index("row") * CONSUMERS * ROWS, lax.axis_index("column") * tile.columns
    start, stop = bounds[group, 0], bounds[group, 1]
    # Swizzled copies begin at multiples of 8 rows.
    base = pl.multiple_of(lax.div(start, 8) * 8, 8)
    steps = jnp.where(stop > start, lax.div(stop - base + TILE - 1, TILE), 0)

    def produce():
        @pl.loop(jnp.int32(0), steps)
        def _(step):
            inner = pl.ds(pl.multiple_of(base + step * TILE, 8), TILE)
            ring.fill(step, lhs.at[inner, pl.ds(row, CONSUMERS * ROWS)], dout.at[inner, pl.ds(column, tile.columns)])

        ring.drain(steps)

    def product(step, sums):
        left, right = ring.take(step)
        warpgroup = gpu.warpgroup_index()
        left = left.at[:, pl.ds(warpgroup * ROWS, ROWS)]
        low, high = start - base - step * TILE, stop - base - step * TILE

        # Rows of other groups, and what is after all groups may be NaN: both operands are cleared of them, and each
        # consumer does its share.
        @pl.when((low > 0) | (high < TILE))
        def _():
            share = tile.columns // CONSUMERS
            _clear(left, low, high)
            for part in range(0, share, TILE):
                _clear(right.at[:, pl.ds(warpgroup * share + part, TILE)], low, high)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

        plgpu.wgmma(sums, left.transpose((1, 0)), right)

    def store(sums):
        warpgroup = lax.axis_index("warpgroup")
        _store(sums, staging.at[warpgroup], out.at[group, pl.ds(row + warpgroup * ROWS, ROWS)], column)

    _run(produce, product, store, steps, ring, tile)


def _run(produce, product, store, steps, ring, tile):
    """One warpgroup produces; the others add up the products of all steps, the next one begun before the last is in."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.take_registers(CONSUMERS)

        def add_up(sums):
            @pl.loop(jnp.int32(0), steps)
            def _(step):
                ring.wait(step)
                product(step, sums)
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: ring.release(step - 1))

            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: ring.release(steps - 1))
            return sums[...]

        store(pl.run_scoped(add_up, plgpu.ACC((ROWS, tile.columns), jnp.float32)))
        plgpu.wait_smem_to_gmem(0)


def _store(sums, staging, out, column):
    """A warpgroup's rows to `out` from `column` on, in parts that go through its two buffers in turn."""
    width = staging.shape[-1]
    for i in range(sums.shape[1] // width):

        @pl.when(column + i * width < out.shape[-1])
        def _(i=i):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer = staging.at[i % 2]
            buffer[...] = sums[:, i * width : (i + 1) * width].astype(staging.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[:, pl.ds(column + i * width, width)])


def _clear(ref, low, high):
    """Zeros in all but the rows from `low` to before `high`."""
    x = plgpu.load(ref, layout=MATRIX)
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=MATRIX)
    ref[...] = jnp.where((row >= low) & (row < high), x, jnp.zeros((), x.dtype))


def _ring(tile: Tile, shapes: list[tuple[int, int]], dtype: Any) -> Any:
    return gpu.Ring.types(tile.stages, [gpu.Buffer(shape, dtype) for shape in shapes], CONSUMERS)


def _staging(dtype: Any) -> Any:
    """Two buffers for each consumer, rows of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    transforms: Any = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    return plgpu.SMEM((CONSUMERS, 2, ROWS, width), dtype, transforms=transforms)


def _visits(rows: int, sizes: Int[Array, " E"], block: int) -> Int[Array, "visits 4"]:
    """Of each visit: group (E for what is after the groups), first row of the tile, and its rows [start, stop).

    As many as the sizes could ever need; those that they do not need have no rows.
    """
    groups = sizes.shape[0]
    stops = jnp.append(jnp.cumsum(sizes, dtype=jnp.int32), jnp.int32(rows))
    starts = jnp.append(jnp.int32(0), stops[:-1])
    first = starts // block
    past = jnp.cumsum(jnp.where(stops > starts, -(-stops // block) - first, 0))
    i = jnp.arange(pl.cdiv(rows, block) + groups, dtype=jnp.int32)
    group = (i[:, None] >= past).sum(axis=1, dtype=jnp.int32)
    exists = group <= groups
    group = jnp.minimum(group, groups)
    row = (stops[group] + block - 1) // block * block - (past[group] - i) * block
    start, stop = jnp.maximum(starts[group], row), jnp.minimum(stops[group], row + block)
    return jnp.where(exists[:, None], jnp.stack([group, row, start, stop], axis=1), 0)


def _launch(kernel, name, operands, *, out_type, scratch, grid, names, interpret):
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=names,
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )(*operands)
