"""Fused gated attention for NVIDIA Hopper in Pallas Mosaic GPU: wgmma, TMA, specialised warpgroups.

A block of the result belongs to one CUDA block. Its producer warpgroup copies what the others need by TMA into rings of
shared memory; each of its consumer warpgroups owns 64 rows. Three kernels: the forward pass and the query's gradient,
which go over key blocks, and the gradients of key and value, which go over blocks of query rows and over the query
heads of a kv head. Nothing is added atomically, so two runs agree bit for bit.

Consumers take turns in issuing products, so that one computes exponentials while the tensor cores work for another,
and the forward pass computes the next block's scores ahead of the current block's weighted sum: the schedule of
FlashAttention-3 (arXiv 2407.08608, section 3).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gattn.kernels import masks, tuning
from gattn.kernels.reference import Inputs, Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Bool, Float, Int

# Rows of a warpgroup's accumulator and columns of a swizzled tile of 16-bit numbers.
ROWS = TILE = 64
MATRIX, BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
# The arrangement of shared memory that wgmma reads and TMA writes.
SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
LOG2_E = math.log2(math.e)
HOPPER = "9.0"
# Below every logit, and finite: differences are numbers even in rows that have seen nothing.
LOWEST = float(np.finfo(np.float32).min)
# Per thread; the consumers share what the producer leaves of 65536.
PRODUCER_REGISTERS = 32
# What the heads that run side by side read should stay in the L2 cache (50 MB on H100 and H200).
L2_BYTES = 2**25


class Tile(NamedTuple):
    """Blocks of one kernel: query rows, keys, and how many slots its two rings have.

    The rings hold keys and values; in the kernel of the gradients of those, query and dout. What stays (the rows; the
    keys there) is split over one consumer warpgroup per 64. Rows and keys are multiples of 64.
    """

    rows: int
    keys: int
    stages: tuple[int, int] = (2, 2)


class Blocks(NamedTuple):
    """The blocks of the three kernels. The same blocks give bit-equal results.

    `check` raises a ValueError for blocks that would deadlock: a consumer waits for the next slot of one ring before it
    releases the last, and the forward pass needs slots for all of its gate at once.
    """

    forward: Tile
    query_gradient: Tile
    key_value_gradient: Tile

    def check(self) -> None:
        for name, (rows, keys, stages) in self._asdict().items():
            if rows % ROWS or keys % ROWS or rows < ROWS or keys < ROWS or min(stages) < 1:
                raise ValueError(f"blocks.{name}={rows, keys, stages}: rows and keys must be multiples of {ROWS}.")
            ring, waits = (1, "values") if name == "forward" else (0, "keys or queries")
            if stages[ring] < 2:
                raise ValueError(f"blocks.{name}={rows, keys, stages}: the ring of {waits} needs 2 slots.")
        rows, keys, stages = self.forward
        slab = min(rows, keys)
        if rows % slab or rows // slab > stages[0]:
            raise ValueError(
                f"blocks.forward={rows, keys, stages}: the gate's rows must fill whole slots of the keys, no more than "
                "there are."
            )


# By head_dim, where `tuning` has no row. Limits are 232448 bytes of shared memory and 240 registers a thread.
BLOCKS = {
    64: Blocks(Tile(128, 128), Tile(128, 128), Tile(64, 128)),
    128: Blocks(Tile(128, 128), Tile(128, 128), Tile(64, 128)),
    256: Blocks(Tile(128, 64), Tile(128, 64, (2, 1)), Tile(64, 128, (2, 1))),
}


def unsupported(inputs: Inputs, mask: masks.Mask, options: Options) -> str | None:
    """The first argument of `gated_dot_product_attention` that these kernels cannot do, and why; None for none."""
    dtype, head_dim = inputs.query.dtype, inputs.query.shape[-1]
    if jax.__version_info__ < (0, 11):
        return f"Mosaic GPU is that of jax {jax.__version__}; the GPU kernel needs 0.11"
    capability = getattr(jax.devices()[0], "compute_capability", HOPPER)
    if capability != HOPPER:
        return f"this GPU has compute capability {capability}; the GPU kernel is for Hopper, {HOPPER}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"query has dtype {dtype}; the GPU kernel takes bfloat16 and float16"
    if head_dim not in BLOCKS:
        return f"query has head_dim {head_dim}; the GPU kernel takes {', '.join(map(str, BLOCKS))}"
    for name, x in (
        ("bias", inputs.bias),
        ("mask", mask.dense),
        ("alibi_slopes", inputs.alibi_slopes),
        ("logits_soft_cap", options.logits_soft_cap),
    ):
        if x is not None:
            return f"{name} is not implemented in the GPU kernel"
    if inputs.gate is not None and inputs.gate.shape[-1] > 1 and inputs.gate.dtype != dtype:
        return f"gate has dtype {inputs.gate.dtype}; elementwise, the GPU kernel wants the query's, {dtype}"
    return None


def forward(
    inputs: Inputs, mask: masks.Mask, options: Options, *, blocks: Blocks | None = None, interpret: Any = False
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated output in the query's dtype and the float32 log-sum-exp, sinks included; the contract is `vjp.Kernel`.

    `interpret` (True, or `plgpu.InterpretGPUParams`) runs it on a CPU. ValueError for what `unsupported` names.
    """
    shape = _check(inputs, mask, options)
    blocks = blocks or _tuned("gpu.forward", inputs)
    blocks.check()
    tile = blocks.forward
    padded = _round_up(shape.length, tile.rows)
    gate, head_gate = inputs.gate, None
    if gate is not None and gate.shape[-1] == 1:
        head_gate, gate = _by_head(gate[..., 0], padded), None
    operands = _ForwardOperands(
        inputs.query,
        inputs.key,
        inputs.value,
        visits=_visits(mask, shape, tile),
        gate=gate,
        head_gate=head_gate,
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32) * LOG2_E,
    )
    consumers, dtype = tile.rows // ROWS, inputs.query.dtype
    own, key = Buffer((ROWS, shape.head_dim), dtype), Buffer((tile.keys, shape.head_dim), dtype)
    out, lse = _launch(
        partial(_forward_kernel, shape=shape, options=options, tile=tile),
        "gated_attention_forward",
        operands,
        out_type=(
            jax.ShapeDtypeStruct(inputs.query.shape, dtype),
            jax.ShapeDtypeStruct((shape.batch, shape.heads, padded), jnp.float32),
        ),
        scratch={
            "own": Ring.types(consumers, [own]),
            "keys": Ring.types(tile.stages[0], [key], consumers),
            "values": Ring.types(tile.stages[1], [key], consumers),
            "lse_smem": plgpu.SMEM((consumers, ROWS), jnp.float32),
        },
        left=Buffer((ROWS, tile.keys), dtype),
        grid=_grid(shape, shape.heads, padded // tile.rows),
        consumers=consumers,
        interpret=interpret,
    )
    return out, lse[..., : shape.length].transpose(0, 2, 1)


def backward(
    inputs: Inputs,
    mask: masks.Mask,
    options: Options,
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    delta: Float[Array, "B T N"],
    *,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> Inputs:
    """Gradients of query, key and value, summed in float32; the contract is `vjp.Kernel`.

    `interpret` as in `forward`. ValueError for what `unsupported` names.
    """
    shape = _check(inputs, mask, options)
    blocks = blocks or _tuned("gpu.backward", inputs)
    blocks.check()
    _, query_tile, key_value_tile = blocks
    arrays = inputs, mask, options, lse * LOG2_E, dout, delta
    dquery = _query_gradient(*arrays, shape=shape, tile=query_tile, interpret=interpret)
    others = partial(_key_value_gradients, *arrays, shape=shape, tile=key_value_tile, interpret=interpret)
    if shape.head_dim <= 128:
        dkey, dvalue = others(("key", "value"))
    else:
        # Registers hold one of the two sums: a kernel for each, and the scores computed twice.
        (dkey,), (dvalue,) = others(("key",)), others(("value",))
    return Inputs(dquery, dkey, dvalue)


def _query_gradient(inputs, mask, options, lse, dout, delta, *, shape, tile, interpret):
    padded, consumers, dtype = _round_up(shape.length, tile.rows), tile.rows // ROWS, dout.dtype
    own, key = Buffer((ROWS, shape.head_dim), dtype), Buffer((tile.keys, shape.head_dim), dtype)
    number = Buffer((ROWS,), jnp.float32)
    return _launch(
        partial(_query_gradient_kernel, shape=shape, options=options, tile=tile),
        "gated_attention_query_gradient",
        _backward_operands(inputs, _visits(mask, shape, tile), lse, dout, delta, padded),
        out_type=jax.ShapeDtypeStruct(inputs.query.shape, dtype),
        scratch={
            "own": Ring.types(consumers, [own, own, number, number]),
            "keys": Ring.types(tile.stages[0], [key], consumers),
            "values": Ring.types(tile.stages[1], [key], consumers),
        },
        left=Buffer((ROWS, tile.keys), dtype),
        grid=_grid(shape, shape.heads, padded // tile.rows),
        consumers=consumers,
        interpret=interpret,
    )


def _key_value_gradients(inputs, mask, options, lse, dout, delta, wanted, *, shape, tile, interpret):
    """Gradients of "key", "value" or both."""
    padded, consumers, dtype = _round_up(shape.length, tile.rows), tile.keys // ROWS, dout.dtype
    own, row = Buffer((ROWS, shape.head_dim), dtype), Buffer((tile.rows, shape.head_dim), dtype)
    number = Buffer((tile.rows,), jnp.float32)
    return _launch(
        partial(_key_value_gradients_kernel, shape=shape, options=options, tile=tile, wanted=wanted),
        f"gated_attention_{'_'.join(wanted)}_gradient",
        _backward_operands(inputs, _visits(mask, shape, tile, of_keys=True), lse, dout, delta, padded),
        out_type=[jax.ShapeDtypeStruct(inputs.key.shape, dtype)] * len(wanted),
        scratch={
            "own": Ring.types(consumers, [own, own]),
            "queries": Ring.types(tile.stages[0], [row, number], consumers),
            "douts": Ring.types(tile.stages[1], [row, number], consumers),
        },
        left=Buffer((ROWS, tile.rows), dtype),
        grid=_grid(shape, shape.kv_heads, -(-shape.key_length // tile.keys)),
        consumers=consumers,
        interpret=interpret,
    )


def _tuned(kernel: str, inputs: Inputs) -> Blocks:
    measured = tuning.blocks(kernel, inputs.query.dtype, inputs.query.shape[-1], inputs.query.shape[1])
    return Blocks(*(Tile(*tile) for tile in measured)) if measured else BLOCKS[inputs.query.shape[-1]]


def _backward_operands(inputs, visits, lse, dout, delta, padded):
    lse, delta = _by_head(lse, padded, np.inf), _by_head(delta, padded)
    return _BackwardOperands(inputs.query, inputs.key, inputs.value, visits, dout, lse, delta)


def _forward_kernel(operands, out_ref, lse_ref, *, own, keys, values, lse_smem, turns, left, shape, options, tile):
    task = _task(operands.visits, shape, shape.heads, tile.rows, shape.length, tile.keys, shape.key_length)
    batch, head, count = task.batch, task.head, task.count
    kv_head, row = lax.div(head, shape.group), task.block * tile.rows
    warpgroup, consumers = turns.warpgroup, turns.consumers
    slab = min(tile.rows, tile.keys)
    slabs = 0 if operands.gate is None else tile.rows // slab

    def keys_of(step):
        return pl.ds((task.first + step) * tile.keys, tile.keys)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        for i in range(consumers):
            own.fill(i, operands.query.at[batch, pl.ds(row + i * ROWS, ROWS), head])

        @pl.loop(jnp.int32(0), count)
        def _(step):
            keys.fill(step, operands.key.at[batch, keys_of(step), kv_head])
            values.fill(step, operands.value.at[batch, keys_of(step), kv_head])

        @pl.when(count > 0)
        def _():
            # The gate takes the place of keys as those run out.
            for i in range(slabs):
                keys.fill(count + i, operands.gate.at[batch, pl.ds(row + i * slab, slab), head])
            keys.drain(count + slabs)
            values.drain(count)

    @pl.when(warpgroup < consumers)
    def _consume():
        take_registers(consumers)
        mine = pl.ds(row + warpgroup * ROWS, ROWS)
        (query,) = own.take(warpgroup)
        own.wait(warpgroup)
        scores = plgpu.ACC((ROWS, tile.keys), jnp.float32)
        no_sum = _full((ROWS, shape.head_dim), 0, MATRIX)
        nothing = _full((ROWS,), LOWEST, BY_ROW), _full((ROWS,), 0, BY_ROW)

        def softmax(step, s, peak, total):
            s, factor = _base2(s, options.scale)
            s = task.hide(s, task.first + step, mine, keys_of(step), key_axis=1)
            new_peak = jnp.maximum(peak, s.max(axis=1) * factor)
            decay = jnp.exp2(peak - new_peak)
            p = jnp.exp2(s * factor - _spread(new_peak, s, 0))
            return p, new_peak, total * decay + p.sum(axis=1), decay

        def attend():
            def first_scores(s_ref):
                plgpu.wgmma(s_ref, query, keys.take(0)[0].transpose((1, 0)))
                return s_ref[...]

            def advance(step, carry):
                acc, p, peak, total = carry
                keys.wait(step)
                turns.wait()

                def products(acc_ref):
                    def ahead(s_ref):
                        plgpu.wgmma(s_ref, query, keys.take(step)[0].transpose((1, 0)))
                        plgpu.wgmma(acc_ref, left.operand(p), values.take(step - 1)[0])
                        turns.pass_on()
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        keys.release(step)
                        results = lax.optimization_barrier(softmax(step, s, peak, total))
                        # ptxas moves nothing over this wait, which thus keeps the exponentials beside the sum that is
                        # still under way.
                        values.wait(step)
                        return results

                    return pl.run_scoped(ahead, scores)

                acc, (p, peak, total, decay) = left.accumulate(products, acc)
                values.release(step - 1)
                # Rounded only now: registers that a running wgmma reads must not be written.
                return acc * _spread(decay, acc, 0), p.astype(query.dtype), peak, total

            turns.start()
            keys.wait(0)
            s = pl.run_scoped(first_scores, scores)
            keys.release(0)
            p, peak, total, _ = softmax(0, s, *nothing)
            values.wait(0)
            acc, p, peak, total = lax.fori_loop(
                jnp.int32(1), count, advance, (no_sum, p.astype(query.dtype), peak, total)
            )
            turns.finish()
            last = values.take(count - 1)[0]
            acc, _ = left.accumulate(lambda acc_ref: plgpu.wgmma(acc_ref, left.operand(p), last), acc)
            values.release(count - 1)
            return acc, peak, total

        def finish(acc, peak, total, gate):
            decay: Any = 1.0
            if operands.sinks is not None:
                sink = operands.sinks[head]
                with_sink = jnp.maximum(peak, sink)
                decay = jnp.exp2(peak - with_sink)
                peak, total = with_sink, total * decay + jnp.exp2(sink - with_sink)
            seen = total > 0
            weight = decay / jnp.where(seen, total, 1.0)
            if operands.head_gate is not None:
                head_gate = plgpu.load(operands.head_gate.at[batch, head, mine], layout=BY_ROW, optimized=False)
                weight *= _multiplier(head_gate, options)
            lse_smem[warpgroup] = jnp.where(seen, peak / LOG2_E + jnp.log(total), -jnp.inf)
            for column in range(0, shape.head_dim, TILE):
                part = acc[:, column : column + TILE]
                part *= _spread(weight, part, 0)
                if gate is not None:
                    part *= _multiplier(plgpu.load(gate.at[:, pl.ds(column, TILE)], layout=MATRIX), options)
                query[:, pl.ds(column, TILE)] = part.astype(query.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query, out_ref.at[batch, mine, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[batch, head, mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(count > 0)
        def _():
            acc, peak, total = attend()
            gate = None
            if slabs:
                gate = keys.take(count + lax.div(warpgroup, slab // ROWS))[0]
                gate = gate.at[pl.ds(lax.rem(warpgroup, slab // ROWS) * ROWS, ROWS)]
            for i in range(slabs):
                keys.wait(count + i)
            finish(acc, peak, total, gate)
            for i in range(slabs):
                keys.release(count + i)

        pl.when(count == 0)(lambda: finish(no_sum, *nothing, gate=None))


def _query_gradient_kernel(operands, dquery_ref, *, own, keys, values, turns, left, shape, options, tile):
    task = _task(operands.visits, shape, shape.heads, tile.rows, shape.length, tile.keys, shape.key_length)
    batch, head, count = task.batch, task.head, task.count
    kv_head, row = lax.div(head, shape.group), task.block * tile.rows
    warpgroup, consumers = turns.warpgroup, turns.consumers

    def keys_of(step):
        return pl.ds((task.first + step) * tile.keys, tile.keys)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        for i in range(consumers):
            rows = pl.ds(row + i * ROWS, ROWS)
            matrices = operands.query.at[batch, rows, head], operands.dout.at[batch, rows, head]
            own.fill(i, *matrices, operands.lse.at[batch, head, rows], operands.delta.at[batch, head, rows])

        @pl.loop(jnp.int32(0), count)
        def _(step):
            keys.fill(step, operands.key.at[batch, keys_of(step), kv_head])
            values.fill(step, operands.value.at[batch, keys_of(step), kv_head])

        keys.drain(count)
        values.drain(count)

    @pl.when(warpgroup < consumers)
    def _consume():
        take_registers(consumers)
        mine = pl.ds(row + warpgroup * ROWS, ROWS)
        own.wait(warpgroup)

        def add_up(dquery_ref):
            turns.start()
            pl.when(count > 0)(lambda: keys.wait(0))

            @pl.loop(jnp.int32(0), count)
            def _(step):
                query, dout, lse, delta = own.take(warpgroup_index())
                (key,), (value,) = keys.take(step), values.take(step)
                values.wait(step)
                _, ds = _score_gradients(
                    (query, key),
                    (dout, value),
                    lse,
                    delta,
                    0,
                    lambda s: task.hide(s, task.first + step, mine, keys_of(step), key_axis=1),
                    lambda: pl.when(step + 1 < count)(lambda: keys.wait(step + 1)),
                    options,
                    turns,
                    left,
                )
                values.release(step)
                plgpu.wgmma(dquery_ref, left.operand(ds.astype(query.dtype)), key)
                plgpu.wgmma_wait(0)
                keys.release(step)

            turns.finish()
            return dquery_ref[...]

        dquery = pl.run_scoped(add_up, plgpu.ACC((ROWS, shape.head_dim), jnp.float32))
        _store(dquery * options.scale, own.take(warpgroup)[0], dquery_ref.at[batch, mine, head])
        plgpu.wait_smem_to_gmem(0)


def _key_value_gradients_kernel(operands, *outs, own, queries, douts, turns, left, shape, options, tile, wanted):
    """Everything transposed, keys by rows: so the left operands stay in registers here, too."""
    # Early keys have the longest columns of a causal mask; the forward pass has its long rows at the end.
    task = _task(operands.visits, shape, shape.kv_heads, tile.keys, shape.key_length, tile.rows, shape.length, True)
    batch, kv_head, first_key = task.batch, task.head, task.block * tile.keys
    count = task.count * shape.group
    warpgroup, consumers = turns.warpgroup, turns.consumers

    def block_of(step):
        return task.first + lax.rem(step, task.count)

    def rows_of(step):
        return pl.ds(block_of(step) * tile.rows, tile.rows)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        for i in range(consumers):
            at = batch, pl.ds(first_key + i * ROWS, ROWS), kv_head
            own.fill(i, operands.key.at[at], operands.value.at[at])

        @pl.loop(jnp.int32(0), count)
        def _(step):
            head, rows = kv_head * shape.group + lax.div(step, task.count), rows_of(step)
            queries.fill(step, operands.query.at[batch, rows, head], operands.lse.at[batch, head, rows])
            douts.fill(step, operands.dout.at[batch, rows, head], operands.delta.at[batch, head, rows])

        queries.drain(count)
        douts.drain(count)

    @pl.when(warpgroup < consumers)
    def _consume():
        take_registers(consumers)
        mine = pl.ds(first_key + warpgroup * ROWS, ROWS)
        own.wait(warpgroup)

        def add_up(*refs):
            sums = dict(zip(wanted, refs, strict=True))
            turns.start()
            pl.when(count > 0)(lambda: queries.wait(0))

            @pl.loop(jnp.int32(0), count)
            def _(step):
                key, value = own.take(warpgroup_index())
                (query, lse), (dout, delta) = queries.take(step), douts.take(step)
                douts.wait(step)
                p, ds = _score_gradients(
                    (key, query),
                    (value, dout) if "key" in wanted else None,
                    lse,
                    delta,
                    1,
                    lambda s: task.hide(s, block_of(step), rows_of(step), mine, key_axis=0),
                    lambda: pl.when(step + 1 < count)(lambda: queries.wait(step + 1)),
                    options,
                    turns,
                    left,
                )
                if "value" in wanted:
                    plgpu.wgmma(sums["value"], left.operand(p.astype(dout.dtype)), dout)
                if "key" in wanted:
                    plgpu.wgmma(sums["key"], left.operand(ds.astype(query.dtype)), query)
                plgpu.wgmma_wait(0)
                # lse and delta were read by plain loads, which TMA must not overtake.
                plgpu.commit_smem()
                queries.release(step)
                douts.release(step)

            turns.finish()
            return [ref[...] for ref in refs]

        sums = pl.run_scoped(add_up, *[plgpu.ACC((ROWS, shape.head_dim), jnp.float32)] * len(wanted))
        buffers = dict(zip(("key", "value"), own.take(warpgroup), strict=True))
        for name, x, out in zip(wanted, sums, outs, strict=True):
            _store(x * options.scale if name == "key" else x, buffers[name], out.at[batch, mine, kv_head])
        plgpu.wait_smem_to_gmem(0)


def _score_gradients(of_scores, of_dp, lse, delta, axis, hide, meanwhile, options, turns, left):
    """Probabilities p of one block and the gradients p * (dp - delta) of its scores, not rounded.

    `of_scores` and `of_dp` are pairs (x, y) of x y^T; without `of_dp` only p is wanted. lse, in base 2, and delta vary
    along `axis`. `meanwhile` waits for something, between the two results.
    """

    def spread(ref):
        return _spread(plgpu.load(ref, layout=(BY_ROW, BY_COLUMN)[axis]), scores, axis)

    def probabilities(dp_ref=None):
        def scope(s_ref):
            plgpu.wgmma(s_ref, of_scores[0], of_scores[1].transpose((1, 0)))
            if of_dp is not None:
                plgpu.wgmma(dp_ref, of_dp[0], of_dp[1].transpose((1, 0)))
            turns.pass_on()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if of_dp is None else 1)
            s, factor = _base2(s, options.scale)
            p = lax.optimization_barrier(jnp.exp2(hide(s) * factor - spread(lse)))
            # As in the forward pass, to have the exponentials beside the second product.
            meanwhile()
            return p

        return pl.run_scoped(scope, scores)

    scores = plgpu.ACC((of_scores[0].shape[0], of_scores[1].shape[0]), jnp.float32)
    turns.wait()
    if of_dp is None:
        return probabilities(), None
    # Starting from -delta spares the registers for delta beside the product.
    dp_less_delta, p = left.accumulate(probabilities, plgpu.layout_cast(-spread(delta), MATRIX))
    return p, p * dp_less_delta


class _Shape(NamedTuple):
    batch: int
    length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class _Visits(NamedTuple):
    """Who sees whom, lengths padded to blocks.

    A block (of rows, or of keys) visits the blocks [first, stop) of the other axis; no mask is needed in those of
    [full_first, full_stop). `bounds` holds first, full_first, full_stop, stop. `row_limits` holds first key, key to
    stop before and, with segments, id of each row.
    """

    bounds: Int[Array, "#B blocks 4"]
    row_limits: Int[Array, "#B limits T"]
    key_ids: Int[Array, "B S"] | None


class _ForwardOperands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    visits: _Visits | None
    gate: Float[Array, "B T N H"] | None
    head_gate: Float[Array, "B N T"] | None
    sinks: Float[Array, " N"] | None


class _BackwardOperands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    visits: _Visits | None
    dout: Float[Array, "B T N H"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]


class _Task(NamedTuple):
    """Inside of a kernel: what one CUDA block makes, and which blocks of the other axis it visits for that."""

    batch: Any
    head: Any
    block: Any
    first: Any
    full_first: Any
    full_stop: Any
    stop: Any
    visits: _Visits | None

    @property
    def count(self) -> Any:
        return self.stop - self.first

    def hide(self, s: Any, other: Any, rows: Any, keys: Any, key_axis: int) -> Any:
        """-inf for the scores that do not count; `rows` and `keys` are the slices of this piece of block `other`.

        Limits are loaded where they are wanted and each test has its own branch: no registers are left to hold them.
        """
        visits = self.visits
        if visits is None:
            return s

        def row_limit(i):
            return limit(visits.row_limits, (i, rows), 1 - key_axis)

        def limit(ref, at, axis):
            at = self.batch if ref.shape[0] > 1 else 0, *at
            return _spread(plgpu.load(ref.at[at], layout=(BY_ROW, BY_COLUMN)[axis], optimized=False), s, axis)

        def hide(test, s):
            key = keys.start + plgpu.broadcasted_iota(jnp.int32, s.shape, key_axis, layout=MATRIX)
            return jnp.where(test(key), s, -jnp.inf)

        tests = [lambda key: key >= row_limit(0), lambda key: key < row_limit(1)]
        if visits.key_ids is not None:
            tests.append(lambda _: row_limit(2) == limit(visits.key_ids, (keys,), key_axis))
        for test in tests:
            s = lax.cond((other < self.full_first) | (other >= self.full_stop), partial(hide, test), lambda s: s, s)
        return s


class Buffer(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any

    def times(self, slots: int) -> Any:
        """The type of an array of buffers in shared memory; matrices lie as wgmma and TMA want them."""
        return plgpu.SMEM((slots, *self.shape), self.dtype, transforms=SWIZZLED if len(self.shape) > 1 else ())


class Ring(NamedTuple):
    """Slots in shared memory that the producer fills by TMA, one after the other; a slot may be several buffers."""

    buffers: tuple[Any, ...]
    ready: Any
    free: Any

    @classmethod
    def types(cls, slots: int, buffers: list[Buffer], consumers: int = 1) -> Ring:
        return cls(
            tuple(buffer.times(slots) for buffer in buffers),
            ready=plgpu.Barrier(num_barriers=slots, num_arrivals=len(buffers)),
            free=plgpu.Barrier(num_barriers=slots, num_arrivals=consumers),
        )

    def fill(self, step: Any, *sources: Any) -> None:
        """Copies the sources, which may have fewer rows than the buffers, once all consumers have released the slot."""
        slot = self._slot(step)
        pl.when(step >= self.buffers[0].shape[0])(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot, pl.ds(0, source.shape[0])], self.ready.at[slot])

    def wait(self, step: Any) -> None:
        plgpu.barrier_wait(self.ready.at[self._slot(step)])

    def take(self, step: Any) -> list[Any]:
        return [buffer.at[self._slot(step)] for buffer in self.buffers]

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self._slot(step)])

    def drain(self, steps: Any) -> None:
        """Waits until the consumers have released all there was."""
        for i in range(self.buffers[0].shape[0]):
            slot = self._slot(steps - 1 - i)
            pl.when(steps > i)(partial(plgpu.barrier_wait, self.free.at[slot]))

    def _slot(self, step: Any) -> Any:
        return lax.rem(jnp.int32(step), jnp.int32(self.buffers[0].shape[0]))


class _Turns(NamedTuple):
    """Whose turn it is to issue products: the consumers in a circle, beginning with the first."""

    barriers: Any
    warpgroup: Any
    consumers: int

    def start(self) -> None:
        pl.when(self.warpgroup == self.consumers - 1)(self.pass_on)

    def wait(self) -> None:
        plgpu.barrier_wait(self.barriers.at[self.warpgroup])

    def pass_on(self) -> None:
        plgpu.barrier_arrive(self.barriers.at[lax.rem(self.warpgroup + 1, self.consumers)])

    def finish(self) -> None:
        """The last turn passed on is nobody's."""
        pl.when(self.warpgroup == 0)(self.wait)


class _Left(NamedTuple):
    """Left operands of wgmma in registers, and accumulators with a start value: all that the interpreter cannot do.

    It has a place for the operand in shared memory, `staging`, which is None when compiled.
    """

    staging: Any
    warpgroup: Any

    def operand(self, x: Array) -> Any:
        if self.staging is None:
            return x
        self.staging[self.warpgroup] = x
        return self.staging.at[self.warpgroup]

    def accumulate(self, body: Callable[[Any], Any], start: Array) -> tuple[Array, Any]:
        """`start` and the products that `body` adds to the accumulator it is given; second, what it returns."""

        def scope(ref):
            if self.staging is None:
                ref[...] = start
            result = body(ref)
            return (ref[...] if self.staging is None else start + ref[...]), result

        return pl.run_scoped(scope, plgpu.ACC((start.shape[0], start.shape[1]), jnp.float32))


def _launch(kernel, name, operands, *, out_type, scratch, left, grid, consumers, interpret):
    """The one call of Mosaic GPU, for every version of jax from 0.11 on."""
    scratch = scratch | {"turns": plgpu.Barrier(num_barriers=consumers)}
    if interpret:
        scratch["staging"] = plgpu.SMEM((consumers, *left.shape), left.dtype)

    def body(*refs, turns, staging=None, **scratch):
        warpgroup = warpgroup_index()
        kernel(*refs, turns=_Turns(turns, warpgroup, consumers), left=_Left(staging, warpgroup), **scratch)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("unit", "block", "section"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )(operands)


def _grid(shape: _Shape, heads: int, blocks: int) -> tuple[int, int, int]:
    """(heads side by side, blocks, sections of heads): as many side by side as leave what they read in the L2 cache.

    The first axis runs fastest. `heads` is the number of query heads or of kv heads.
    """
    units, per_unit = shape.batch * shape.kv_heads, 4 * shape.head_dim * max(shape.length, shape.key_length)
    fitting = [x for x in range(1, units + 1) if units % x == 0 and x * per_unit <= L2_BYTES]
    side_by_side = max(fitting, default=1) * (heads // shape.kv_heads)
    return side_by_side, blocks, shape.batch * heads // side_by_side


def _task(visits, shape, heads, size, length, other_size, other_length, ascending=False):
    """What this CUDA block makes. Blocks are taken in descending order unless `ascending`: long ones go first."""
    side_by_side, blocks, _ = _grid(shape, heads, -(-length // size))
    unit = lax.axis_index("section") * side_by_side + lax.axis_index("unit")
    block = lax.axis_index("block") if ascending else blocks - 1 - lax.axis_index("block")
    batch, others = lax.div(unit, heads), -(-other_length // other_size)
    bounds: Any = jnp.int32(0), 0, others, jnp.int32(others)
    if visits is not None:
        bounds = (visits.bounds[batch if visits.bounds.shape[0] > 1 else 0, block, i] for i in range(4))
    first, full_first, full_stop, stop = bounds
    return _Task(batch, lax.rem(unit, heads), block, first, full_first, full_stop, stop, visits)


def warpgroup_index():
    """This warpgroup's index. A loop asks for it anew, to find its own shared memory:

    with one from before the loop, LLVM makes the descriptors of all products there, which fill the registers.
    """
    return lax.axis_index("warpgroup")


def take_registers(consumers):
    # A single consumer is launched with as many as a thread can have.
    if consumers > 1:
        plgpu.set_max_registers(min(240, (512 - PRODUCER_REGISTERS) // consumers // 8 * 8), action="increase")


def _base2(s, scale):
    """Scores and the positive factor that makes them logits in base 2: the exponent's FMA multiplies by it for free."""
    return (s, scale * LOG2_E) if scale > 0 else (s * (scale * LOG2_E), 1.0)


def _multiplier(gate, options):
    """`reference.gate_multiplier` in what Mosaic has: no logistic."""
    sigma = 1 / (1 + jnp.exp2(gate.astype(jnp.float32) * -LOG2_E))
    return 0.5 + 0.5 * sigma if options.gate_activation == "ns_sigmoid" else sigma


def _store(x, buffer, target):
    buffer[...] = x.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def _spread(x, like, axis):
    return lax.broadcast_in_dim(x, like.shape, [axis])


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _check(inputs: Inputs, mask: masks.Mask, options: Options) -> _Shape:
    reason = unsupported(inputs, mask, options)
    if reason is not None:
        raise ValueError(f"{reason}.")
    (batch, length, heads, head_dim), (_, key_length, kv_heads, _) = inputs.query.shape, inputs.key.shape
    return _Shape(batch, length, key_length, heads, kv_heads, head_dim)


def _visits(mask: masks.Mask, shape: _Shape, tile: Tile, of_keys: bool = False) -> _Visits | None:
    """The visits of row blocks (of key blocks, if asked for), or None if all see all."""
    if mask.interval is None and mask.segments is None and not shape.key_length % tile.keys:
        return None
    padded_keys = _round_up(shape.key_length, tile.keys)
    mask = masks.pad(mask, shape.length, shape.key_length, _round_up(shape.length, tile.rows), padded_keys)
    needed, full = masks.block_map(mask, tile.rows, padded_keys, tile.keys)
    if of_keys:
        needed, full = needed.swapaxes(1, 2), full.swapaxes(1, 2)
    limits = list(mask.interval or (0 * mask.positions, 0 * mask.positions + shape.key_length))
    key_ids = None
    if mask.segments is not None:
        row_ids, key_ids = (x.astype(jnp.int32) for x in mask.segments)
        # A padding row sees nothing, so that ids need only be compared.
        limits[1] = jnp.where(row_ids < 0, 0, limits[1])
        limits = list(jnp.broadcast_arrays(*limits, row_ids))
    return _Visits(_bounds(needed, full), jnp.stack(limits, axis=1).astype(jnp.int32), key_ids)


def _bounds(needed: Bool[Array, "#B X Y"], full: Bool[Array, "#B X Y"]) -> Int[Array, "#B X 4"]:
    """first, full_first, full_stop, stop of each block X: what it visits, and the first run of full blocks in there."""
    xp = np if isinstance(needed, np.ndarray) else jnp
    first, stop = masks.visited_range(needed)
    full_first = xp.where(full.any(-1), xp.argmax(full, -1), stop)
    ended = ~full & (np.arange(full.shape[-1]) > full_first[..., None])
    full_stop = xp.where(ended.any(-1), xp.argmax(ended, -1), full.shape[-1])
    return jnp.asarray(xp.stack([first, full_first, full_stop, stop], axis=-1).astype(np.int32))


def _by_head(x: Float[Array, "B T N"], length: int, fill: float = 0.0) -> Float[Array, "B N T"]:
    """float32 with the rows contiguous, padded to whole blocks."""
    x = x.astype(jnp.float32).transpose(0, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2])), constant_values=fill)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
