"""The TPU kernel in Pallas' interpreter, which hands out memory full of NaN and watches for races."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from gattn.kernels import masks, reference, tpu, vjp
from tests.attention import assert_close, normal, quick, relative_error

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SMALL = tpu.Blocks(128, 128)


def inputs_of(batch=1, length=256, key_length=256, heads=4, kv_heads=2, head_dim=64, gate=64, sinks=False, dtype=None):
    make = partial(normal, dtype=dtype or jnp.float32)
    return reference.Inputs(
        make(1, batch, length, heads, head_dim),
        make(2, batch, key_length, kv_heads, head_dim),
        make(3, batch, key_length, kv_heads, head_dim),
        gate=make(4, batch, length, heads, gate) if gate else None,
        sinks=normal(5, heads) if sinks else None,
    )


@cache
def kernel(blocks=SMALL, fused=None, interpret=STRICT):
    more = {"blocks": blocks, "interpret": interpret}
    return vjp.Kernel(
        partial(tpu.forward, **more),
        partial(tpu.backward, **more, fused=fused),
        partial(tpu.preprocess, interpret=interpret),
    )


def out_and_grads(attention, inputs, mask, options):
    """Output, lse, and the gradients of a loss of both."""

    def loss(inputs):
        out, lse = attention(inputs=inputs, mask=mask, options=options)
        return (jnp.cos(out.astype(jnp.float32)) + 0.1 * out).sum() + jnp.sin(3 * lse).sum(), (out, lse)

    grads, (out, lse) = quick(jax.grad(loss, has_aux=True))(inputs)
    return {"out": out, "lse": lse} | {name: x for name, x in grads._asdict().items() if x is not None}


def both(inputs, mask, options=None, **more):
    options = options or reference.Options(scale=inputs.query.shape[-1] ** -0.5)
    interpret_pallas_call.reset_tpu_interpret_mode_state()
    got = out_and_grads(partial(vjp.attend, kernel(**more)), inputs, mask, options)
    jax.block_until_ready(got)
    races = interpret_pallas_call.races
    assert races is None or not races.races_found
    return got, out_and_grads(reference.attend, inputs, mask, options)


PACKED = np.array([[0] * 40 + [1] * 120 + [2] * 60 + [-1] * 36])


@pytest.mark.parametrize(
    ("inputs", "limits", "options"),
    [
        ({}, {}, {}),
        ({"gate": 1}, {"is_causal": True}, {"gate_activation": "ns_sigmoid"}),
        ({"head_dim": 128, "gate": 128}, {"is_causal": True, "window": (60, 0)}, {}),
        (
            {"length": 200, "key_length": 300, "sinks": True},
            {"is_causal": True, "query_offset": 100},
            {"gate_activation": "ns_sigmoid"},
        ),
        ({"heads": 8, "kv_heads": 1, "head_dim": 80, "gate": None}, {"segments": (PACKED, PACKED)}, {}),
        ({"sinks": True, "gate": 1}, {"segments": (PACKED, PACKED), "is_causal": True}, {"logits_soft_cap": 2.0}),
        ({"batch": 2}, {"key_lengths": jnp.array([100, 0])}, {"scale": -0.2}),
        ({"batch": 2, "gate": None}, {"query_offset": jnp.array([-150, 30]), "is_causal": True}, {}),
    ],
    ids=["full", "causal headwise", "window", "ragged sinks", "packed", "soft cap", "lengths", "offsets"],
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_values_and_gradients_are_the_references(inputs, limits, options, fused):
    inputs = inputs_of(**inputs)
    mask = masks.make_mask(inputs.query.shape[1], inputs.key.shape[1], **limits)
    options = reference.Options(**{"scale": inputs.query.shape[-1] ** -0.5} | options)
    assert tpu.unsupported(inputs, mask, options) is None
    got, expected = both(inputs, mask, options, fused=fused)
    # What an empty row's lse of -inf brings back is NaN in both; such rows get zeros.
    assert_close(got, expected, 1e-5)


def test_half_precision_is_as_good_as_unfused():
    """In bfloat16, at most 1.5 times the error of the unfused computation, also of the largest thousandth."""
    inputs = inputs_of(heads=2, kv_heads=1, gate=64, dtype=jnp.bfloat16)
    mask, options = masks.make_mask(256, 256, is_causal=True), reference.Options(scale=0.125)

    def unfused(inputs, mask, options):
        scores = jnp.einsum("BTNH,BSKH->BNTS", inputs.query, inputs.key).astype(jnp.float32) * options.scale
        scores = jnp.where(jnp.tri(256, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
        out = jnp.einsum("BNTS,BSKH->BTNH", weights, inputs.value) * jax.nn.sigmoid(inputs.gate)
        return out, jax.nn.logsumexp(scores, axis=-1).transpose(0, 2, 1)

    plain = out_and_grads(unfused, inputs, mask, options)
    got = out_and_grads(partial(vjp.attend, kernel()), inputs, mask, options)
    exact = out_and_grads(reference.attend, jax.tree.map(lambda x: x.astype(jnp.float32), inputs), mask, options)
    for name in exact:
        assert relative_error(got[name], exact[name]) < 1.5 * relative_error(plain[name], exact[name]), name
        largest, allowed = (
            np.quantile(np.abs(np.float64(x[name]) - np.float64(exact[name])), 0.999) for x in (got, plain)
        )
        assert largest < 1.5 * allowed, name


def test_blocks_nobody_sees_are_not_touched():
    """NaN in their keys and values would show: a weight of 0 does not hide it."""
    inputs = inputs_of(length=128, key_length=512, gate=1)
    hidden = jnp.zeros(512, bool).at[256:].set(True)[:, None, None]
    dirty = inputs._replace(**{x: jnp.where(hidden, jnp.nan, getattr(inputs, x)) for x in ("key", "value")})
    mask, options = masks.make_mask(128, 512, is_causal=True, query_offset=100), reference.Options(scale=0.125)
    for fused in (True, False):
        got = out_and_grads(partial(vjp.attend, kernel(fused=fused)), dirty, mask, options)
        clean = out_and_grads(partial(vjp.attend, kernel(fused=fused)), inputs, mask, options)
        for name in clean:
            np.testing.assert_array_equal(got[name], clean[name], err_msg=name)
        np.testing.assert_array_equal(got["key"][:, 256:], 0)


def test_runs_agree_bit_for_bit_and_blocks_only_round():
    inputs, mask = inputs_of(length=256, sinks=True), masks.make_mask(256, 256, is_causal=True)
    options = reference.Options(scale=0.125)
    runs = [out_and_grads(partial(vjp.attend, kernel(blocks)), inputs, mask, options) for blocks in (SMALL, SMALL)]
    for name, x in runs[0].items():
        np.testing.assert_array_equal(x, runs[1][name], err_msg=name)
    other = out_and_grads(partial(vjp.attend, kernel(tpu.Blocks(256, 128))), inputs, mask, options)
    assert_close(other, runs[0], 1e-5)


def test_few_queries_against_a_long_cache():
    """Decoding: 3 rows, a cache longer than what was written, of which each sequence holds another part."""
    inputs = inputs_of(batch=2, length=3, key_length=384, gate=1)
    lengths = jnp.array([200, 384])
    mask = masks.make_mask(3, 384, is_causal=True, query_offset=lengths - 3, key_lengths=lengths)
    assert_close(*both(inputs, mask), 1e-5)


@settings(max_examples=60)
@given(
    rows=st.sampled_from([4, 8]),
    keys=st.sampled_from([4, 6]),
    causal=st.booleans(),
    offset=st.integers(-20, 20),
    window=st.sampled_from([None, (5, 2), (0, 9)]),
    packed=st.booleans(),
    lengths=st.booleans(),
    by_rows=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_list_visits_what_the_mask_needs_and_nothing_else(
    rows, keys, causal, offset, window, packed, lengths, by_rows, seed
):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(-1, 4, (2, 24)))
    key_lengths = np.asarray(rng.integers(0, 25, 2)) if lengths else None
    mask = masks.make_mask(
        24,
        24,
        query_offset=offset,
        is_causal=causal,
        window=window,
        key_lengths=key_lengths,
        segments=(ids, ids) if packed else None,
    )
    needed, full = masks.block_map(mask, rows, 24, keys)
    if not by_rows:
        needed, full = needed.swapaxes(1, 2), full.swapaxes(1, 2)
    known = tpu._list(needed, full, by_rows=by_rows, group=1, trivial=False)
    traced = tpu._list(jnp.asarray(needed), jnp.asarray(full), by_rows=by_rows, group=1, trivial=False)
    assert known.bound == traced.bound == max(1, known.width)
    tables = [np.asarray(x.table).reshape(x.batches, -1)[:, : known.bound] for x in (known, traced)]
    np.testing.assert_array_equal(*tables)
    for batch in range(known.batches):
        steps = [
            known.find(batch, 0, *((0, step) if by_rows else (step, 0)), known.table) for step in range(known.bound)
        ]
        visits = [((row, key) if by_rows else (key, row), int(code) & 15) for _, row, key, code in steps]
        ran = [tuple(map(int, block)) for block, flags in visits if flags & (tpu._RUN | tpu._MASKED)]
        assert ran == [tuple(block) for block in np.argwhere(needed[batch]).tolist()]
        masked = {tuple(map(int, block)) for block, flags in visits if flags & tpu._MASKED}
        assert masked == {tuple(block) for block in np.argwhere(needed[batch] & ~full[batch]).tolist()}
        # Every outer block begins once and ends once, in turn.
        ends = [(int(block[0]), flag) for block, flags in visits for flag in (tpu._FIRST, tpu._LAST) if flags & flag]
        assert ends == [(i, flag) for i in range(needed.shape[1]) for flag in (tpu._FIRST, tpu._LAST)]


@pytest.mark.parametrize("activation", ["sigmoid", "ns_sigmoid"])
def test_gates_closed_beyond_what_exponentials_hold(activation):
    """exp(100) is no float32: the sigmoid is 0 there, and the non-sparse one a half."""
    inputs = inputs_of(heads=2, kv_heads=1, length=128, key_length=128)
    inputs = inputs._replace(gate=jnp.linspace(-100, 100, inputs.gate.size).reshape(inputs.gate.shape))
    assert_close(*both(inputs, masks.make_mask(128, 128), reference.Options(0.125, gate_activation=activation)), 1e-5)


def test_vmap_of_gates_and_sinks_lowers():
    """The interpreter takes what the lowering refuses: memory that is not fetched by blocks, with a batch axis."""
    inputs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), inputs_of(length=130, key_length=130, sinks=True))
    mask, options = masks.make_mask(130, 130, is_causal=True), reference.Options(0.125)

    def grads(inputs):
        attend = partial(vjp.attend, kernel(interpret=False), options)
        return jax.grad(lambda inputs: jnp.sin(attend(inputs, mask)[0]).sum())(inputs)

    lowered = jax.jit(jax.vmap(grads)).trace(inputs).lower(lowering_platforms=("tpu",))
    assert "gattn_forward" in lowered.as_text()


def test_what_it_cannot_do_is_named():
    inputs, mask = inputs_of(), masks.make_mask(256, 256)
    options = reference.Options(scale=1.0)
    for change, name in (
        ({"bias": jnp.zeros((1, 1, 256, 256))}, "bias"),
        ({"alibi_slopes": jnp.zeros(4)}, "alibi_slopes"),
        ({"query": inputs.query.astype(jnp.float16)}, "float16"),
        ({"query": inputs.query[..., :32]}, "head_dim 32"),
        ({"gate": inputs.gate.astype(jnp.float16)}, "gate"),
    ):
        assert name in tpu.unsupported(inputs._replace(**change), mask, options)
    assert "mask" in tpu.unsupported(inputs, mask._replace(dense=jnp.ones((1, 1, 256, 256), bool)), options)


def test_too_many_blocks_are_refused():
    needed = np.ones((1, 2, 2**14), bool)
    with pytest.raises(ValueError, match="too many"):
        tpu._list(needed, needed, by_rows=True, group=1, trivial=False)
