"""The fused gated attention kernel for TPU (Pallas Mosaic): forward with the gate in its epilogue, and backward.

One grid step is one pair of a block of query rows and a block of keys. The pairs that a mask needs are listed before
the kernel starts (`_list`) and prefetched as scalars; the grid runs over that list, so a block nobody attends in is
neither computed nor fetched, and blocks that everybody attends in are not masked.

Every number per query row that crosses HBM (lse, delta, intervals, segment ids, headwise gates) is lane-major,
[1, rows]. The forward keeps queries in sublanes: row sums stay spread over 128 lanes until the end, and the scores of
the next strip of rows are issued before the softmax of this one, so that the matrix unit does not wait for the
exponentials. The backward keeps keys in sublanes and makes dq transposed: lse and delta broadcast for free, and what is
transposed is a block of dq once a row. Measured by `python -m benchmarks.tpu_static`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gattn.kernels import masks, tuning
from gattn.kernels.reference import Inputs, Options, gate_log_slope, gate_multiplier

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Bool, Float, Int

LANES = 128
# Rows of queries whose scores are in flight at once.
STRIP = 512
# The fused backward keeps the gradients of all keys of a head in VMEM, 16 bytes a number; beyond this, two kernels run.
FUSED_VMEM = 32 * 2**20
VMEM_LIMIT = 100 * 2**20
OLD_CHIPS = ("TPU v2", "TPU v3", "TPU v4 lite", "TPU v4")
# Scalar memory is 1 MB; a list of steps may take half.
LONGEST_LIST = 2**17
LOG2_E = math.log2(math.e)
# Starts the running maximum: below every logit, but finite, so that the difference of two of them is 0 and not NaN.
LOWEST = -1e30

# A step of the list is one integer: the block whose results it adds to, the block it runs over, and what it does there.
_FIRST, _LAST, _RUN, _MASKED = 1, 2, 4, 8
_FLAG_BITS, _BLOCK_BITS = 4, 13


class Blocks(NamedTuple):
    """Query rows and keys of one grid step: multiples of 128, or the whole length."""

    rows: int = 1024
    keys: int = 2048


def unsupported(inputs: Inputs, mask: masks.Mask, options: Options) -> str | None:
    """The first argument of `gated_dot_product_attention` that this kernel cannot do, and why; None if it can all."""
    head_dim = inputs.query.shape[-1]
    if inputs.query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"query has dtype {inputs.query.dtype}; the TPU kernel takes bfloat16 and float32"
    if not 64 <= head_dim <= 256 or head_dim % 16:
        return f"query has head_dim {head_dim}; the TPU kernel takes multiples of 16 from 64 to 256"
    if inputs.gate is not None and inputs.gate.dtype not in (jnp.bfloat16, jnp.float32):
        return f"gate has dtype {inputs.gate.dtype}; the TPU kernel takes bfloat16 and float32"
    for name, x in (("bias", inputs.bias), ("mask", mask.dense), ("alibi_slopes", inputs.alibi_slopes)):
        if x is not None:
            return f"{name} is not implemented in the TPU kernel"
    if tuning.kind() in OLD_CHIPS:
        return f"a {tuning.kind()} has too little VMEM for the TPU kernel, which is for v5e and later"
    return None


def forward(
    inputs: Inputs, mask: masks.Mask, options: Options, *, blocks: Blocks | None = None, interpret: Any = False
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gated output in the query's dtype and the float32 log-sum-exp, sinks included; the contract is `vjp.Kernel`."""
    # Under vmap a loop over its axis: operands that stay in HBM or scalar memory, gates and sinks, take no batch axis.
    leaves, tree = jax.tree.flatten((inputs, mask))
    known = [x if isinstance(x, np.ndarray) else None for x in leaves]

    @jax.custom_batching.sequential_vmap
    def run(*traced: Array) -> tuple[Array, Array]:
        remaining = iter(traced)
        inputs, mask = jax.tree.unflatten(tree, [next(remaining) if x is None else x for x in known])
        return _forward(inputs, mask, options, blocks, interpret)

    return run(*(x for x in leaves if not isinstance(x, np.ndarray)))


def _forward(
    inputs: Inputs, mask: masks.Mask, options: Options, blocks: Blocks | None, interpret: Any
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    task = _Task(inputs, mask, blocks or _tuned("tpu.forward", inputs))
    visits = task.visits(by_rows=True)
    scratch = [
        pltpu.VMEM((task.rows, LANES), jnp.float32),
        pltpu.VMEM((task.rows, LANES), jnp.float32),
        pltpu.VMEM((task.rows, task.head_dim), jnp.float32),
    ]
    gate = inputs.gate
    if gate is not None:
        headwise = gate.shape[-1] == 1
        gate = _row_vectors(gate[..., 0], task.length) if headwise else _by_heads(gate, task.length)
        scratch += [
            pltpu.VMEM((1, task.rows) if headwise else (task.rows, task.head_dim), gate.dtype),
            pltpu.SemaphoreType.DMA,
        ]
    out, lse = pl.pallas_call(
        partial(_forward_kernel, visits, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=visits.grid(task),
            in_specs=[
                task.row_spec(visits),
                task.key_spec(visits),
                task.key_spec(visits),
                None if gate is None else pl.BlockSpec(memory_space=pl.ANY),
                None if inputs.sinks is None else pl.BlockSpec(memory_space=pltpu.SMEM),
                *task.mask_specs(visits),
            ],
            out_specs=[task.row_spec(visits), task.row_vector_spec(visits)],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(task.query.shape, task.query.dtype),
            jax.ShapeDtypeStruct((task.batch, task.heads, 1, task.length), jnp.float32),
        ],
        compiler_params=_parameters("parallel", "parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="gattn_forward",
    )(
        visits.table,
        task.query,
        task.key,
        task.value,
        gate,
        None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        *task.mask_arrays,
    )
    length = inputs.query.shape[1]
    return _from_heads(out, length), _from_row_vectors(lse, length)


def preprocess(
    gate: Float[Array, "B T N #H"],
    options: Options,
    out: Float[Array, "B T N H"],
    dout: Float[Array, "B T N H"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N #H"]]:
    """The cotangent of the ungated output, delta = rowsum(dout * out) and the gate's gradient, in one pass.

    XLA would read dout and out twice, once for the sums of rows and once for the rest.
    """
    batch, length, heads, head_dim = out.shape
    rows, padded = _split(length, 1024, whole=16)
    headwise = gate.shape[-1] == 1
    wide = pl.BlockSpec((None, None, rows, head_dim), lambda batch, head, row: (batch, head, row, 0))
    vector = pl.BlockSpec((None, None, 1, rows), lambda batch, head, row: (batch, head, 0, row))
    gate = _row_vectors(gate[..., 0], padded) if headwise else _by_heads(gate, padded)
    gate_spec = vector if headwise else wide
    dungated, delta, dgate = pl.pallas_call(
        partial(_preprocess_kernel, options.gate_activation),
        grid=(batch, heads, padded // rows),
        in_specs=[gate_spec, wide, wide],
        out_specs=[wide, vector, gate_spec],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, padded, head_dim), dout.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, padded), jnp.float32),
            jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        ],
        compiler_params=_parameters("parallel", "parallel", "parallel"),
        interpret=interpret,
        name="gattn_preprocess",
    )(gate, _by_heads(out, padded), _by_heads(dout, padded))
    delta = _from_row_vectors(delta, length)
    dgate = _from_row_vectors(dgate, length)[..., None] if headwise else _from_heads(dgate, length)
    return _from_heads(dungated, length), delta, dgate


def backward(
    inputs: Inputs,
    mask: masks.Mask,
    options: Options,
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    delta: Float[Array, "B T N"],
    *,
    blocks: Blocks | None = None,
    fused: bool | None = None,
    interpret: Any = False,
) -> Inputs:
    """Gradients of query, key and value; the contract is `vjp.Kernel`.

    One kernel makes all three where the gradients of a head's keys fit into VMEM (`fused=None` decides), with five
    products a pair of blocks; else one makes dq and one dk and dv, with seven. Both add in a fixed order.
    """
    task = _Task(inputs, mask, blocks or _tuned("tpu.backward", inputs))
    if fused is None:
        fused = 16 * task.key_length * max(task.head_dim, LANES) <= FUSED_VMEM
    operands = (
        task.query,
        task.key,
        task.value,
        _by_heads(dout, task.length),
        _row_vectors(lse, task.length, math.inf),
        _row_vectors(delta, task.length),
        *task.mask_arrays,
    )
    query_shape, key_shape = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (task.query, task.key))

    def run(by_rows: bool, dq: bool, dkv: bool) -> list[Array]:
        visits = task.visits(by_rows)
        held = task.key_length if by_rows else task.keys
        key_gradient = task.whole_key_spec() if by_rows else task.key_spec(visits)
        scratch = [pltpu.VMEM((task.head_dim, task.rows), jnp.float32)] * dq
        scratch += [pltpu.VMEM((held, task.head_dim), jnp.float32)] * (2 * dkv)
        return pl.pallas_call(
            partial(_backward_kernel, visits, options, dq, dkv),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=visits.grid(task),
                in_specs=[
                    task.row_spec(visits),
                    task.key_spec(visits),
                    task.key_spec(visits),
                    task.row_spec(visits),
                    task.row_vector_spec(visits),
                    task.row_vector_spec(visits),
                    *task.mask_specs(visits),
                ],
                out_specs=[task.row_spec(visits)] * dq + [key_gradient] * (2 * dkv),
                scratch_shapes=scratch,
            ),
            out_shape=[query_shape] * dq + [key_shape] * (2 * dkv),
            compiler_params=_parameters("parallel", "parallel", "arbitrary" if dkv else "parallel", "arbitrary"),
            interpret=interpret,
            name="gattn_backward" + "_dq" * dq + "_dkv" * dkv,
        )(visits.table, *operands)

    if fused:
        dquery, dkey, dvalue = run(by_rows=True, dq=True, dkv=True)
    else:
        (dquery,) = run(by_rows=True, dq=True, dkv=False)
        dkey, dvalue = run(by_rows=False, dq=False, dkv=True)
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    return Inputs(_from_heads(dquery, length), _from_heads(dkey, key_length), _from_heads(dvalue, key_length))


def _forward_kernel(
    visits: _Visits,
    options: Options,
    table,
    query,
    key,
    value,
    gate,
    sinks,
    limits,
    query_ids,
    key_ids,
    out,
    lse,
    peak,
    total,
    sums,
    gate_block=None,
    arrival=None,
):
    """peak: the running maximum of the logits before `factor`, in every lane; total: sums of exponentials by lane.

    The gate is not one of the pipeline's operands, which are watched at every step: it is fetched once, while the row's
    keys are visited.
    """
    at = visits.here(table)
    rows, head_dim = query.shape
    keys = key.shape[0]
    factor = _base_2_factor(options)

    def fetch():
        return pltpu.make_async_copy(at.rows_of(gate, gate_block.shape), gate_block, arrival)

    @pl.when(at.does(_FIRST))
    def init():
        if gate is not None:
            fetch().start()
        if sinks is None:
            peak[...] = jnp.full_like(peak, LOWEST)
            total[...] = jnp.zeros_like(total)
        else:
            # The sink is a logit that was seen before all others: one lane of the sums counts it.
            sink = sinks[at.head]
            counts = (jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) == 0) & (sink > LOWEST)
            peak[...] = jnp.full_like(peak, jnp.maximum(sink * (LOG2_E / factor), LOWEST))
            total[...] = jnp.where(counts, 1.0, 0.0)
        sums[...] = jnp.zeros_like(sums)

    def softmax(strip: pl.Slice, logits: Array, masked: bool) -> None:
        logits = _transform(logits, options)
        if masked:
            allowed = _allowed(limits, query_ids, key_ids, at.key * keys, logits.shape, strip, keys_axis=1)
            logits = jnp.where(allowed, logits, -jnp.inf)
        old = peak[strip, :]
        new = jnp.maximum(old, logits.max(axis=1, keepdims=True))
        decay = jnp.exp2((old - new) * factor)
        weights = jnp.exp2(logits * factor - _across(new * factor, keys))
        peak[strip, :] = new
        total[strip, :] = total[strip, :] * decay + sum(
            weights[:, lane : lane + LANES] for lane in range(0, keys, LANES)
        )
        product = _dot(weights.astype(value.dtype), value[...], ((1,), (0,)))
        sums[strip, :] = sums[strip, :] * _across(decay, head_dim) + product

    def run(masked: bool) -> None:
        strips = _strips(rows, STRIP)
        dots = _dot(query[strips[0], :], key[...], ((1,), (1,)))
        for strip, following in zip(strips, [*strips[1:], None], strict=True):
            ahead = dots if following is None else _dot(query[following, :], key[...], ((1,), (1,)))
            softmax(strip, dots, masked)
            dots = ahead

    visits.run(at, run)

    @pl.when(at.does(_LAST))
    def finish():
        if gate is not None:
            fetch().wait()
        # A few rows at a time, whose numbers stay in registers.
        for strip in _strips(rows, LANES):
            weight = jnp.broadcast_to(total[strip, :].sum(axis=1, keepdims=True), (strip.size, LANES))
            norm = jnp.where(weight == 0, 1.0, weight)
            result = sums[strip, :]
            if gate is not None and gate_block.shape == out.shape:
                # The sigmoid's division and the softmax's are one.
                decay = jnp.exp(-gate_block[strip, :].astype(jnp.float32))
                if options.gate_activation == "ns_sigmoid":
                    # Its limit is 0.5 where the sigmoid's is 0: infinity by infinity must not come up.
                    decay = jnp.minimum(decay, 1e30)
                    result = result * (1 + 0.5 * decay)
                norm = _across(norm, head_dim) * (1 + decay)
            elif gate is not None:
                norm = norm / _columns(gate_multiplier(gate_block[:, strip], options.gate_activation), LANES)
            out[strip, :] = (result * _across(1 / norm, head_dim)).astype(out.dtype)
            weight = _lanes(weight)
            logits = _lanes(peak[strip, :]) * (factor / LOG2_E) + jnp.log(weight)
            lse[:, strip] = jnp.where(weight == 0, -jnp.inf, logits)


def _preprocess_kernel(activation: str, gate, out, dout, dungated, delta, dgate):
    for strip in _strips(out.shape[0], LANES):
        cotangent = dout[strip, :].astype(jnp.float32)
        product = cotangent * out[strip, :].astype(jnp.float32)
        sums = _lanes(jnp.broadcast_to(product.sum(axis=1, keepdims=True), (strip.size, LANES)))
        delta[:, strip] = sums
        if gate.shape == out.shape:
            scores = gate[strip, :].astype(jnp.float32)
            multiplier = gate_multiplier(scores, activation)
            dgate[strip, :] = (product * gate_log_slope(scores, activation)).astype(dgate.dtype)
        else:
            scores = gate[:, strip].astype(jnp.float32)
            multiplier = _columns(gate_multiplier(scores, activation), out.shape[1])
            dgate[:, strip] = (sums * gate_log_slope(scores, activation)).astype(dgate.dtype)
        dungated[strip, :] = (cotangent * multiplier).astype(dungated.dtype)


def _backward_kernel(
    visits: _Visits, options: Options, dq: bool, dkv: bool, table, query, key, value, dout, lse, delta, *refs
):
    """Everything is [keys, rows]. The gradients of keys are held for the block, or for all keys when going by rows."""
    limits, query_ids, key_ids, *rest = refs
    results, sums = rest[: dq + 2 * dkv], rest[dq + 2 * dkv :]
    dquery, dquery_sums = results[0], sums[0]
    (dkey, dvalue), (dkey_sums, dvalue_sums) = (results[-2:], sums[-2:]) if dkv else ([dquery] * 2, [dquery_sums] * 2)
    at = visits.here(table)
    rows, keys = query.shape[0], key.shape[0]
    factor = _base_2_factor(options)
    whole = dkv and visits.by_rows
    block = pl.ds(pl.multiple_of(at.key * keys, keys), keys) if whole else slice(None)

    if dq:

        @pl.when(at.does(_FIRST))
        def init():
            dquery_sums[...] = jnp.zeros_like(dquery_sums)

    if dkv:

        @pl.when(at.begins_keys)
        def init_keys():
            def zero(part: pl.Slice) -> None:
                for sums in (dkey_sums, dvalue_sums):
                    sums[part, :] = jnp.zeros((keys, sums.shape[1]), sums.dtype)

            _by_blocks(keys, zero, dkey_sums)

    def run(masked: bool) -> None:
        lse_2 = lse[...] * LOG2_E
        logits = _transform(_dot(key[...], query[...], ((1,), (1,))), options)
        capped = logits
        if masked:
            allowed = _allowed(limits, query_ids, key_ids, at.key * keys, logits.shape, pl.ds(0, rows), keys_axis=0)
            logits = jnp.where(allowed, logits, -jnp.inf)
        weights = jnp.exp2(logits * factor - lse_2)
        dweights = _dot(value[...], dout[...], ((1,), (1,)))
        ddots = weights * (dweights - delta[...])
        if options.logits_soft_cap is not None:
            ddots = ddots * (1 - (capped / options.logits_soft_cap) ** 2)
        ddots = ddots.astype(query.dtype)
        if dkv:
            dvalue_sums[block, :] += _dot(weights.astype(query.dtype), dout[...], ((1,), (0,)))
            dkey_sums[block, :] += _dot(ddots, query[...], ((1,), (0,)))
        if dq:
            dquery_sums[...] += _dot(key[...], ddots, ((0,), (0,)))

    visits.run(at, run)

    if dq:

        @pl.when(at.does(_LAST))
        def finish():
            dquery[...] = (dquery_sums[...] * options.scale).T.astype(dquery.dtype)

    if dkv:

        @pl.when(at.ends_keys)
        def finish_keys():
            def write(part: pl.Slice) -> None:
                dkey[part, :] = (dkey_sums[part, :] * options.scale).astype(dkey.dtype)
                dvalue[part, :] = dvalue_sums[part, :].astype(dvalue.dtype)

            _by_blocks(keys, write, dkey_sums)


def _tuned(kernel: str, inputs: Inputs) -> Blocks:
    """The table's blocks, or those that cost least by `benchmarks.tpu_static`; fewer keys where they are large."""
    query = inputs.query
    measured = tuning.blocks(kernel, query.dtype, query.shape[-1], query.shape[1])
    large = query.shape[-1] > LANES or query.dtype == jnp.float32
    return Blocks(*measured) if measured else Blocks(keys=1024 if large else 2048)


class _Here(NamedTuple):
    """Where a grid step is, and what it does there."""

    batch: Any
    head: Any
    row: Any
    key: Any
    flags: Any
    begins_keys: Any
    ends_keys: Any

    def rows_of(self, x, shape: tuple[int, int]):
        """The block, [rows, H] or [1, rows], of [B, N, T, H] or [B, N, 1, T] that this step's rows are."""
        x_rows, rows = (x.shape[3], shape[1]) if shape[0] == 1 else (x.shape[2], shape[0])
        if x_rows == rows:
            return x.at[self.batch, self.head]
        strip = pl.ds(pl.multiple_of(self.row * rows, rows), rows)
        return x.at[self.batch, self.head, :, strip] if shape[0] == 1 else x.at[self.batch, self.head, strip]

    def does(self, flag: int) -> Bool[Array, ""]:
        return (self.flags & flag) != 0


class _Visits(NamedTuple):
    """The list of steps, flat: `batches` (1, or B if masks differ) times `width` steps, `bound` of which are run.

    The grid is (B, K, G, steps) by rows: all of a block of rows, then the next, head after head; and (B, K, steps, G)
    by keys, where the G query heads of a kv head add to one block of keys. `kinds` are the flags _RUN and _MASKED that
    occur; None where every step runs, without a mask.
    """

    table: Int[Array, " steps"]
    batches: int
    width: int
    bound: int | Int[Array, ""]
    by_rows: bool
    group: int
    kinds: int | None

    def grid(self, task: _Task) -> tuple[Any, ...]:
        inner = (self.group, self.bound) if self.by_rows else (self.bound, self.group)
        return (task.batch, task.kv_heads, *inner)

    def find(self, batch, kv_head, third, fourth, table) -> tuple[Any, Any, Any, Any]:
        """(query head, block of rows, block of keys, flags) of a grid step."""
        group, step = (third, fourth) if self.by_rows else (fourth, third)
        code = table[step if self.batches == 1 else batch * self.width + step]
        outer = code >> (_FLAG_BITS + _BLOCK_BITS)
        inner = (code >> _FLAG_BITS) & (2**_BLOCK_BITS - 1)
        row, key = (outer, inner) if self.by_rows else (inner, outer)
        return kv_head * self.group + group, row, key, code

    def here(self, table) -> _Here:
        batch, kv_head, third, fourth = (pl.program_id(axis) for axis in range(4))
        head, row, key, flags = self.find(batch, kv_head, third, fourth, table)
        if self.by_rows:
            begins = (third == 0) & (fourth == 0)
            ends = (third == self.group - 1) & (fourth == pl.num_programs(3) - 1)
        else:
            begins = ((flags & _FIRST) != 0) & (fourth == 0)
            ends = ((flags & _LAST) != 0) & (fourth == self.group - 1)
        return _Here(batch, head, row, key, flags, begins, ends)

    def run(self, at: _Here, body: Callable[[bool], None]) -> None:
        """`body(masked)` where the list says so."""
        if self.kinds is None:
            body(False)
            return
        for flag in (_RUN, _MASKED):
            if self.kinds & flag:
                pl.when(at.does(flag))(partial(body, flag == _MASKED))


def _list(
    needed: Bool[Array, "b outer inner"],
    full: Bool[Array, "b outer inner"],
    *,
    by_rows: bool,
    group: int,
    trivial: bool,
) -> _Visits:
    """Lists the needed blocks, those of one outer block after each other.

    An outer block that needs none is visited once, for its results (zeros) to be written. NumPy maps give a list of
    the right length; otherwise the grid's bound is computed, and a sequence with fewer steps than others ends in
    repetitions that do nothing and fetch nothing.
    """
    xp = np if isinstance(needed, np.ndarray) else jnp
    batches, outer, inner = needed.shape
    if inner >= 2**_BLOCK_BITS or outer >= 2**_BLOCK_BITS or needed.size > LONGEST_LIST:
        raise ValueError(
            f"{batches} x {outer} x {inner} blocks are too many for the TPU kernel: at most {LONGEST_LIST} in all and "
            f"{2**_BLOCK_BITS} along one length. Larger blocks, or the sequence sharded, are fewer."
        )
    nothing = ~needed.any(axis=-1, keepdims=True)
    visited = needed | (nothing & (np.arange(inner) == 0))
    flags = xp.where(needed, xp.where(full, _RUN, _MASKED), 0).astype(np.int32)
    first, stop = (x[..., None] for x in masks.visited_range(visited))
    flags = flags + _FIRST * (np.arange(inner) == first) + _LAST * (np.arange(inner) == stop - 1)
    code = (np.arange(outer)[:, None] << (_FLAG_BITS + _BLOCK_BITS)) + (np.arange(inner) << _FLAG_BITS) + flags
    code, visited = (x.reshape(batches, outer * inner) for x in (code.astype(np.int32), visited))
    order = xp.argsort(~visited, axis=1, stable=True)
    code = xp.take_along_axis(code, order, axis=1)
    counts = visited.sum(axis=1, keepdims=True)
    last = xp.take_along_axis(code, counts - 1, axis=1) & ~(2**_FLAG_BITS - 1)
    table = xp.where(np.arange(outer * inner) < counts, code, last)
    bound: Any = counts.max()
    kinds = _RUN | _MASKED
    if xp is np:
        bound = int(bound)
        table = table[:, :bound]
        kinds &= int(np.bitwise_or.reduce(table, axis=None))
    steps = jnp.asarray(table.reshape(-1))
    return _Visits(steps, batches, table.shape[1], bound, by_rows, group, None if trivial else kinds)


class _Task:
    """Operands as the kernels want them: [B, N, L, H], lengths padded to whole blocks.

    Inside a jitted model XLA makes the transpose a choice of layout, and no copy: what produces queries, keys and
    values writes them so. (A head as a block of lanes of [B, L, N * H] needs no transpose but four copies, because the
    tiles of [L, N * H] are no layout of [L, N, H].)
    """

    def __init__(self, inputs: Inputs, mask: masks.Mask, blocks: Blocks) -> None:
        self.batch, length, self.heads, self.head_dim = inputs.query.shape
        key_length, self.kv_heads = inputs.key.shape[1:3]
        self.rows, self.length = _split(length, blocks.rows, whole=16)
        self.keys, self.key_length = _split(key_length, blocks.keys, whole=LANES)
        self.trivial = (
            mask.interval is None and mask.segments is None and (self.length, self.key_length) == (length, key_length)
        )
        self.mask = masks.pad(mask, length, key_length, self.length, self.key_length)
        self.query = _by_heads(inputs.query, self.length)
        self.key, self.value = (_by_heads(x, self.key_length) for x in (inputs.key, inputs.value))
        limits = None
        if self.mask.interval is not None:
            xp = np if isinstance(self.mask.interval[0], np.ndarray) else jnp
            limits = xp.stack(self.mask.interval, axis=1)
        ids = (None, None) if self.mask.segments is None else self.mask.segments
        self.mask_arrays = (limits, *(None if x is None else x[:, None].astype(jnp.int32) for x in ids))

    def visits(self, by_rows: bool) -> _Visits:
        maps = masks.block_map(self.mask, self.rows, self.key_length, self.keys)
        if not by_rows:
            maps = maps[0].swapaxes(1, 2), maps[1].swapaxes(1, 2)
        return _list(*maps, by_rows=by_rows, group=self.heads // self.kv_heads, trivial=self.trivial)

    def row_spec(self, visits: _Visits) -> pl.BlockSpec:
        """Query rows of a head: queries, outputs, their cotangents."""

        def place(*step):
            head, row, *_ = visits.find(*step)
            return step[0], head, row, 0

        return pl.BlockSpec((None, None, self.rows, self.head_dim), place)

    def key_spec(self, visits: _Visits) -> pl.BlockSpec:
        def place(*step):
            _, _, key, _ = visits.find(*step)
            return step[0], step[1], key, 0

        return pl.BlockSpec((None, None, self.keys, self.head_dim), place)

    def whole_key_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, self.key_length, self.head_dim), lambda batch, kv_head, *_: (batch, kv_head, 0, 0)
        )

    def row_vector_spec(self, visits: _Visits) -> pl.BlockSpec:
        def place(*step):
            head, row, *_ = visits.find(*step)
            return step[0], head, 0, row

        return pl.BlockSpec((None, None, 1, self.rows), place)

    def mask_specs(self, visits: _Visits) -> list[pl.BlockSpec | None]:
        """Of the intervals [#B, 2, T], the query ids [B, 1, T] and the key ids [B, 1, S]."""

        def place(array: Array, of_rows: bool, *step):
            _, row, key, _ = visits.find(*step)
            return step[0] if array.shape[0] > 1 else 0, 0, row if of_rows else key

        return [
            None if x is None else pl.BlockSpec((None, x.shape[1], size), partial(place, x, of_rows))
            for x, size, of_rows in zip(
                self.mask_arrays, (self.rows, self.rows, self.keys), (True, True, False), strict=True
            )
        ]


def _by_heads(x: Float[Array, "B L N H"], length: int) -> Float[Array, "B N length H"]:
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))) if length != x.shape[1] else x
    return x.transpose(0, 2, 1, 3)


def _from_heads(x: Float[Array, "B N padded H"], length: int) -> Float[Array, "B L N H"]:
    return x[:, :, :length].transpose(0, 2, 1, 3)


def _row_vectors(x: Float[Array, "B T N"], length: int, fill: float = 0.0) -> Float[Array, "B N 1 length"]:
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)), constant_values=fill)
    return x.transpose(0, 2, 1)[:, :, None]


def _from_row_vectors(x: Float[Array, "B N 1 padded"], length: int) -> Float[Array, "B T N"]:
    return x[:, :, 0, :length].transpose(0, 2, 1)


def _split(length: int, most: int, whole: int) -> tuple[int, int]:
    """Block size and padded length: one block if that suffices, else a divisor of the length, else little padding."""
    if length <= most:
        size = _round_up(length, LANES if length > LANES else whole)
        return size, size
    for size in range(most, most // 2, -LANES):
        if length % size == 0:
            return size, length
    blocks = -(-length // most)
    size = _round_up(-(-length // blocks), LANES)
    return size, blocks * size


def _round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def _parameters(*semantics: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True)


def _dot(x: Array, y: Array, contracted: tuple[tuple[int], tuple[int]]) -> Float[Array, "rows columns"]:
    """A float32 product of the full precision that the inputs have."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _base_2_factor(options: Options) -> float:
    """What turns the result of `_transform` into logits of base 2: exponentials are exp2(factor * logits).

    The scale meets float32 logits here: folded into a bfloat16 query, its rounding costs four times the error of dq.
    """
    return (options.scale if _is_plain(options) else 1.0) * LOG2_E


def _transform(dots: Float[Array, "rows keys"], options: Options) -> Float[Array, "rows keys"]:
    """Logits up to the positive factor of `_base_2_factor`, which maxima commute with."""
    if options.logits_soft_cap is not None:
        return options.logits_soft_cap * jnp.tanh(dots * (options.scale / options.logits_soft_cap))
    return dots if _is_plain(options) else dots * options.scale


def _is_plain(options: Options) -> bool:
    return options.logits_soft_cap is None and options.scale > 0


def _allowed(
    limits, query_ids, key_ids, first_key: Int[Array, ""], shape: tuple[int, ...], strip: pl.Slice, *, keys_axis: int
) -> Bool[Array, "rows keys"]:
    """Who sees whom among a strip of the rows and all keys of a block; [keys, rows] for keys_axis 0."""

    def of_rows(x):
        return x if keys_axis == 0 else _columns(x, shape[1])

    allowed: Any = True
    if limits is not None:
        index = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, keys_axis)
        allowed = (index >= of_rows(limits[:1, strip])) & (index < of_rows(limits[1:, strip]))
    if query_ids is not None:
        ids = of_rows(query_ids[:, strip])
        same = (ids == (key_ids[...] if keys_axis == 1 else _columns(key_ids[...], shape[1]))) & (ids >= 0)
        allowed = same & allowed
    return allowed


def _columns(x: Array, width: int) -> Array:
    """[1, n], lane-major, as n rows of equal numbers: [n, width]."""
    return _across(jnp.broadcast_to(x, (LANES, x.shape[1])).T, width)


def _lanes(x: Float[Array, "n lanes"]) -> Float[Array, "1 n"]:
    """Up to 128 rows of equal numbers, lane-major: their diagonal, which costs less than a transpose."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.where(row == lane, x, 0).sum(axis=0, keepdims=True)[:, : x.shape[0]]


def _across(x: Float[Array, "n lanes"], width: int) -> Float[Array, "n width"]:
    """Rows of equal numbers, made wider or narrower."""
    return x if x.shape[1] == width else jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def _strips(rows: int, size: int) -> list[pl.Slice]:
    return [pl.ds(start, min(size, rows - start)) for start in range(0, rows, size)]


def _by_blocks(size: int, function: Callable[[pl.Slice], None], ref) -> None:
    """`function` of every `size` rows of `ref`, in a loop: all of them at once would be a long program."""
    if ref.shape[0] == size:
        function(pl.ds(0, size))
    else:
        jax.lax.fori_loop(
            0, ref.shape[0] // size, lambda i, _: function(pl.ds(pl.multiple_of(i * size, size), size)), None
        )
