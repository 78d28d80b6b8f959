"""The grouped product against one row at a time, by every implementation that runs here."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.grouped import Sizes, layer_pairs, pairs, product_flops
from gattn.kernels import tuning
from gattn.kernels.grouped import choose_grouped, grouped_dot

ROWS, GROUPS, INNER, COLUMNS = 40, 4, 6, 5


def by_row(lhs, rhs, sizes, dout):
    """Value and gradients in float64, one row after the other; what is after the groups is not looked at."""
    lhs, rhs, dout = (np.asarray(x, np.float64) for x in (lhs, rhs, dout))
    out, dlhs, drhs = np.zeros(dout.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    for m, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        out[m], dlhs[m] = lhs[m] @ rhs[e], rhs[e] @ dout[m]
        drhs[e] += np.outer(lhs[m], dout[m])
    return out, dlhs, drhs


def arrays(rows, groups, inner, columns, sizes, dtypes=(jnp.float32, jnp.float32)):
    """lhs, rhs and dout, with NaN in the rows after the groups."""
    rng = np.random.default_rng(3)
    lhs, rhs, dout = (
        rng.standard_normal(shape) for shape in ((rows, inner), (groups, inner, columns), (rows, columns))
    )
    lhs[sum(sizes) :] = dout[sum(sizes) :] = np.nan
    return jnp.asarray(lhs, dtypes[0]), jnp.asarray(rhs, dtypes[1]), jnp.asarray(dout, dtypes[0])


@partial(jax.jit, static_argnums=0)
def results(implementation, lhs, rhs, sizes, dout):
    out, pullback = jax.vjp(lambda *operands: grouped_dot(*operands, sizes, implementation=implementation), lhs, rhs)
    return out, *pullback(dout)


def assert_right(implementation, lhs, rhs, sizes, dout, tolerance):
    got = results(implementation, lhs, rhs, jnp.asarray(sizes, jnp.int32), dout)
    assert [x.dtype for x in got] == [lhs.dtype, lhs.dtype, rhs.dtype]
    for name, x, y in zip(("out", "dlhs", "drhs"), got, by_row(lhs, rhs, sizes, dout), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance, err_msg=name)
    # Exactly zero, not nearly.
    for x in got[:2]:
        np.testing.assert_array_equal(np.asarray(x[sum(sizes) :], np.float32), 0)


@st.composite
def group_sizes(draw):
    """Often with empty groups, all rows in one, or rows left over."""
    cuts = draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
    total = draw(st.sampled_from([ROWS, max(cuts)]))
    bounds = [0, *sorted(min(cut, total) for cut in cuts[1:]), total]
    return [int(size) for size in np.diff(bounds)]


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@settings(max_examples=20)
@given(sizes=group_sizes())
def test_values_and_gradients_are_those_of_a_loop_over_rows(implementation, sizes):
    lhs, rhs, dout = arrays(ROWS, GROUPS, INNER, COLUMNS, sizes)
    assert_right(implementation, lhs, rhs, sizes, dout, 1e-5)


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [0, 1]),
        (3, [1, 1, 1, 0, 0, 0]),
        (400, [7, 380]),
        (379, [0, 379]),
    ],
)
def test_few_rows_and_blocks_of_any_size(implementation, rows, sizes):
    lhs, rhs, dout = arrays(rows, len(sizes), INNER, COLUMNS, sizes)
    assert_right(implementation, lhs, rhs, sizes, dout, 2e-5)


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("matrices", [jnp.bfloat16, jnp.float32])
def test_sixteen_bits_round_only_operands_and_results(implementation, matrices):
    sizes = [200, 0, 90]
    lhs, rhs, dout = arrays(300, 3, 64, 24, sizes, (jnp.bfloat16, matrices))
    rounded = rhs.astype(jnp.bfloat16)
    got = results(implementation, lhs, rhs, jnp.asarray(sizes), dout)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16, matrices]
    for x, y in zip(got, by_row(lhs, rounded, sizes, dout), strict=True):
        # One rounding is 2^-9; float32 sums leave no more than that.
        tolerance = 2.0**-8 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=1e-4)


needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs Mosaic GPU, and its interpreter, of jax 0.11"
)


@needs_mosaic
@pytest.mark.parametrize("sizes", [[40, 0, 90, 31], [0, 200, 0, 0], [0, 0, 0, 0]], ids=str)
def test_gpu_kernel_in_the_interpreter(sizes):
    """Which hands out memory full of NaN, checks barriers and watches for races. Tiles are of 128 rows."""
    lhs, rhs, dout = arrays(200, 4, 72, 80, sizes, (jnp.bfloat16, jnp.float32))
    rounded = rhs.astype(jnp.bfloat16)
    with tuning.interpreting(plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=True)):
        got = results("gpu", lhs, rhs, jnp.asarray(sizes), dout)
    for x, y in zip(got, by_row(lhs, rounded, sizes, dout), strict=True):
        tolerance = 2.0**-8 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=1e-4)


@needs_mosaic
def test_gpu_kernel_visits_every_row_of_every_group_once():
    from gattn.kernels.grouped_gpu import _visits

    for sizes in ([40, 0, 90, 31], [0, 300, 0, 0], [128, 128, 44, 0], [0, 0, 0, 0], [1, 1, 1, 1]):
        seen = np.full(300, -1)
        for group, row, start, stop in np.asarray(_visits(300, jnp.asarray(sizes, jnp.int32), 128)):
            assert row % 128 == 0
            assert row <= start <= stop <= row + 128 or start == stop == 0
            assert (seen[start:stop] == -1).all()
            seen[start:stop] = group
        np.testing.assert_array_equal(seen, np.repeat(np.arange(5), [*sizes, 300 - sum(sizes)]))


@pytest.mark.parametrize("top_k", [2, 8])
def test_blocks_do_hardly_more_than_the_rows_need(top_k):
    """64 experts, 8192 tokens: at most a tenth more, counting loops by their trips and empty blocks as full."""
    sizes = Sizes(top_k=top_k, d_model=32, width=16)
    product, *_, swiglu = pairs(sizes, "blocks")
    for pair in (product, swiglu):
        work = product_flops(pair.grouped[0], *pair.grouped[1])
        assert pair.flops <= work <= 1.1 * pair.flops
        assert product_flops(pair.dense[0], *pair.dense[1]) == pair.flops


def test_an_expert_layer_does_hardly_more_than_its_experts_need():
    """Router and blocks: at most a tenth, forward and with gradients."""
    for pair in layer_pairs(Sizes(d_model=32, width=384)):
        work = product_flops(pair.grouped[0], *pair.grouped[1])
        assert pair.flops < work <= 1.1 * pair.flops


def test_blocks_keep_no_copy_of_the_rows():
    """Temporaries of value and gradients are matrices and blocks; each result is made in place."""
    rows, struct = 16384, jax.ShapeDtypeStruct
    lhs, rhs, sizes = struct((rows, 64), jnp.float32), struct((8, 64, 64), jnp.float32), struct((8,), jnp.int32)
    program = results.lower("blocks", lhs, rhs, sizes, lhs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.3 * rows * 64 * 4


def test_only_wanted_gradients_are_computed():
    """Frozen experts cost no gradient of their own, and neither do inputs that nothing is asked of."""
    sizes = jnp.array([30, 0, 9])
    lhs, rhs, dout = arrays(40, 3, 8, 8, [40])

    def product(lhs, rhs):
        return grouped_dot(lhs, rhs, sizes, implementation="blocks")

    one = product_flops(product, lhs, rhs)
    both = jax.vjp(product, lhs, rhs)[1](dout)
    for which, alone in enumerate((lambda x: product(x, rhs), lambda x: product(lhs, x))):
        gradient = lambda dout, alone=alone, which=which: jax.vjp(alone, (lhs, rhs)[which])[1](dout)[0]  # noqa: E731
        assert product_flops(gradient, dout) == one
        np.testing.assert_array_equal(gradient(dout), both[which])


def test_the_choice_is_by_platform_and_said(monkeypatch):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    sixteen, thirty_two = (struct(64, 16, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    rhs, odd = struct(2, 16, 8, dtype=jnp.float32), struct(2, 16, 9, dtype=jnp.float32)
    assert choose_grouped(sixteen, rhs) == "blocks"
    monkeypatch.setattr(tuning, "platform", lambda: "tpu")
    assert choose_grouped(sixteen, rhs) == "ragged"
    monkeypatch.setattr(tuning, "platform", lambda: "gpu")
    kernel = "gpu" if jax.__version_info__ >= (0, 11) else "ragged"
    assert [choose_grouped(sixteen, x) for x in (rhs, odd)] == [kernel, "ragged"]
    assert choose_grouped(thirty_two, rhs) == "ragged"
    with pytest.raises(ValueError, match="GPU kernel"):
        choose_grouped(thirty_two, rhs, implementation="gpu")


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "error", "words"),
    [
        ((4, 3), (2, 5, 6), np.zeros(2, int), ValueError, r"\[M, K\]"),
        ((4, 3), (2, 3, 6), np.zeros(3, int), ValueError, "group_sizes"),
        ((4, 3), (2, 3, 6), np.zeros(2), ValueError, "group_sizes"),
        ((4, 3), (2, 3, 6), np.zeros(2, int), TypeError, "lhs's dtype"),
    ],
)
def test_what_cannot_work_is_named(lhs, rhs, sizes, error, words):
    dtype = jnp.float16 if error is TypeError else jnp.float32
    with pytest.raises(error, match=words):
        grouped_dot(jnp.zeros(lhs), jnp.zeros(rhs, dtype), sizes)
    with pytest.raises(ValueError, match="unknown"):
        grouped_dot(jnp.zeros((4, 3)), jnp.zeros((2, 3, 6)), np.zeros(2, int), implementation="dense")


def test_nothing_to_multiply():
    for lhs, rhs in (((0, 3), (2, 3, 4)), ((5, 0), (2, 0, 4)), ((5, 3), (2, 3, 0)), ((5, 3), (0, 3, 4))):
        out = grouped_dot(jnp.ones(lhs), jnp.ones(rhs), np.zeros(rhs[0], int))
        np.testing.assert_array_equal(out, np.zeros((lhs[0], rhs[2])))
