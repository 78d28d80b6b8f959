"""What breaks in the field, for every implementation."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn import gated_dot_product_attention
from tests.attention import BOTH, assert_close, attend, forward, normal, qkv, quick, relative_error

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("implementation", BOTH)
def test_halves_of_the_keys_merge_into_the_whole(implementation):
    """As ring attention does it: each half with its own offset, weighted by its lse, gradients included."""
    arguments = qkv(key_length=40) | {"gate": normal(4, 2, 40, 4, 8)}

    def whole(arrays):
        return gated_dot_product_attention(
            **arrays, is_causal=True, implementation=implementation, return_residual=True
        )

    def halves(arrays):
        parts = []
        for start in (0, 20):
            cut = {x: arrays[x][:, start : start + 20] for x in ("key", "value")}
            parts.append(
                gated_dot_product_attention(
                    **arrays | cut,
                    is_causal=True,
                    query_offset=-start,
                    implementation=implementation,
                    return_residual=True,
                )
            )
        (out, lse), (more, more_lse) = parts
        total = jnp.logaddexp(lse, more_lse)
        return jnp.exp(lse - total)[..., None] * out + jnp.exp(more_lse - total)[..., None] * more, total

    weight = normal(5, 2, 40, 4, 8)

    def value_and_grads(function):
        def loss(arrays):
            out, lse = function(arrays)
            return (out * weight).sum() + jnp.sin(lse).sum(), (out, lse)

        grads, (out, lse) = quick(jax.grad(loss, has_aux=True))(arguments)
        return {"out": out, "lse": lse, **grads}

    merged = value_and_grads(halves)
    assert merged["lse"].dtype == jnp.float32
    assert_close(merged, value_and_grads(whole))


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    "arguments",
    [
        {"query_offset": -7, "is_causal": True},
        {"key_value_seq_lengths": np.array([40, 0])},
        {"mask": np.arange(40)[None, None, :, None] >= 7},
        {"segment_ids": np.where(np.arange(40) < 7, -1, 0)[None].repeat(2, 0)},
        {"bias": jnp.where(jnp.arange(40)[:, None] < 7, -jnp.inf, 0.0)[None, None]},
    ],
    ids=["causal", "lengths", "mask", "segments", "bias"],
)
def test_rows_with_nothing_to_attend_to(implementation, arguments):
    """Output 0, lse -inf, every gradient of theirs 0, nothing NaN."""
    arguments = qkv() | {"gate": normal(4, 2, 40, 4, 8)} | arguments
    empty = (1,) if "key_value_seq_lengths" in arguments else (slice(None), slice(0, 7))
    got = attend(arguments, implementation)
    np.testing.assert_array_equal(got["lse"] == -jnp.inf, jnp.zeros(got["lse"].shape, bool).at[empty].set(True))
    for name in ("out", "dquery", "dgate"):
        np.testing.assert_array_equal(got[name][empty], 0.0, err_msg=name)
    for name in got.keys() - {"lse"}:
        assert np.isfinite(got[name]).all(), name


@pytest.mark.parametrize("implementation", BOTH)
def test_rows_with_nothing_but_a_sink(implementation):
    arguments = qkv() | {"sinks": normal(5, 4), "query_offset": -7, "is_causal": True}
    got = attend(arguments, implementation)
    np.testing.assert_array_equal(got["out"][:, :7], 0.0)
    np.testing.assert_allclose(got["lse"][:, :7], np.broadcast_to(arguments["sinks"], (2, 7, 4)), atol=1e-6)
    for name in ("dquery", "dkey", "dvalue", "dsinks"):
        assert np.isfinite(got[name]).all(), name
    np.testing.assert_array_equal(got["dquery"][:, :7], 0.0)


@pytest.mark.parametrize("implementation", BOTH)
def test_garbage_beyond_the_lengths_is_never_seen(implementation):
    """Lengths that are no multiple of a block, NaN beyond them: as if the arrays ended there."""
    arguments = qkv(length=37, key_length=45) | {"gate": normal(4, 2, 37, 4, 8), "is_causal": True}
    dirty = {
        x: y if isinstance(y, bool) else y.at[:, 21 if y.shape[1] == 37 else 30 :].set(jnp.nan)
        for x, y in arguments.items()
    }
    clean = {x: y if isinstance(y, bool) else y[:, : 21 if y.shape[1] == 37 else 30] for x, y in arguments.items()}

    def grads(arguments, lengths):
        arrays = {x: y for x, y in arguments.items() if x != "is_causal"}

        def apply(arrays):
            return gated_dot_product_attention(**arrays, is_causal=True, **lengths, implementation=implementation)

        def out_and_grads(arrays):
            out, pullback = jax.vjp(apply, arrays)
            # The cotangent of padding rows may be garbage as well.
            rows = jnp.arange(out.shape[1])[:, None, None]
            return {"out": out, **pullback(jnp.where(rows < 21, jnp.cos(out), jnp.nan))[0]}

        return quick(out_and_grads)(arrays)

    lengths = {"query_seq_lengths": np.array([21, 21]), "key_value_seq_lengths": np.array([30, 30])}
    got, expected = grads(dirty, lengths), grads(clean, {})
    for name, y in expected.items():
        np.testing.assert_allclose(got[name][:, : y.shape[1]], y, atol=2e-6, err_msg=name)
        np.testing.assert_array_equal(got[name][:, y.shape[1] :], 0.0, err_msg=name)


@pytest.mark.parametrize("implementation", BOTH)
def test_negative_segments_match_nothing(implementation):
    ids = np.array([[0] * 12 + [-1] * 9 + [1] * 10 + [-2] * 9])
    arguments = qkv(batch=1) | {"segment_ids": ids}
    got = attend(arguments, implementation)
    padding = ids[0] < 0
    np.testing.assert_array_equal(got["out"][:, padding], 0.0)
    for name in ("dquery", "dkey", "dvalue"):
        np.testing.assert_array_equal(got[name][:, padding], 0.0, err_msg=name)
    alone = {x: arguments[x][:, 21:31] for x in ("query", "key", "value")}
    np.testing.assert_allclose(got["out"][:, 21:31], forward(alone, "reference")[0], atol=1e-6)


@pytest.mark.parametrize("implementation", BOTH)
def test_window_does_not_count_the_query_itself(implementation):
    """(left, right) spans left + 1 + right keys; Hugging Face's causal window W spans W, so it is (W - 1, 0)."""
    arguments = qkv(batch=1, heads=1, kv_heads=1)
    equal_logits = arguments | {"query": jnp.zeros_like(arguments["query"])}
    counted = jnp.exp(forward(equal_logits, implementation, local_window_size=(3, 2))[1])[0, :, 0]
    assert counted[20] == pytest.approx(6)
    assert counted[0] == pytest.approx(3)
    rows, keys = np.ogrid[:40, :40]
    hugging_face = (keys <= rows) & (keys > rows - 8)
    out, lse = forward(arguments, implementation, local_window_size=(7, 0))
    expected_out, expected_lse = forward(arguments, "reference", mask=hugging_face[None, None])
    assert_close({"out": out, "lse": lse}, {"out": expected_out, "lse": expected_lse}, 1e-6)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("width", [1, 8])
def test_saturated_gates(implementation, width):
    arguments = qkv() | {"is_causal": True}
    ungated = attend(arguments, implementation)
    opened = attend(arguments | {"gate": jnp.full((2, 40, 4, width), 30.0)}, implementation)
    dgate = opened.pop("dgate")
    assert_close(opened, ungated)
    assert np.abs(dgate).max() < 1e-5
    closed = attend(arguments | {"gate": jnp.full((2, 40, 4, width), -30.0)}, implementation)
    assert 0 < np.abs(closed["out"]).max() < 1e-12
    # d out / d gate = O * sigma (1 - sigma), which is tiny but not lost.
    weights = jnp.cos(jnp.arange(closed["out"].size)).reshape(closed["out"].shape)
    expected = np.asarray(ungated["out"] * weights, np.float64) / (1 + math.exp(30))
    expected = expected if width == 8 else expected.sum(-1, keepdims=True)
    assert relative_error(closed["dgate"], expected) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
def test_each_gate_score_acts_on_its_own_output_alone(implementation):
    arguments = qkv() | {"gate": normal(4, 2, 40, 4, 8)}
    before, _ = forward(arguments, implementation)
    after, _ = forward(arguments | {"gate": arguments["gate"].at[1, 17, 2, 5].add(1.0)}, implementation)
    assert np.argwhere(np.asarray(before != after)).tolist() == [[1, 17, 2, 5]]
    half_open = forward(arguments | {"gate": jnp.zeros((2, 40, 4, 1))}, implementation)
    ungated = forward({x: y for x, y in arguments.items() if x != "gate"}, implementation)
    np.testing.assert_array_equal(2 * half_open[0], ungated[0])
    np.testing.assert_array_equal(half_open[1], ungated[1])


def unfused(query, key, value, gate):
    """Attention, then a gate, in the precision of the inputs (softmax in float32), as one writes it by hand."""
    scores = (
        jnp.einsum("BTNH,BSNH->BNTS", query, jnp.repeat(key, 2, axis=2)).astype(jnp.float32) * query.shape[-1] ** -0.5
    )
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    out = jnp.einsum("BNTS,BSNH->BTNH", weights, jnp.repeat(value, 2, axis=2))
    return out * jax.nn.sigmoid(gate), jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_good_as_unfused(dtype):
    """Against float32 on the same rounded numbers, no more error than the unfused computation has."""
    arguments = qkv(batch=1, length=64, key_length=64, head_dim=64, dtype=dtype)
    arguments |= {"gate": normal(4, 1, 64, 4, 64, dtype=dtype)}
    cotangent = normal(5, 1, 64, 4, 64, dtype=dtype)

    def run(function, dtype):
        def out_and_grads(arrays):
            (out, lse), pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
            return {"out": out, "lse": lse, **pullback((cotangent.astype(dtype), jnp.zeros_like(lse)))[0]}

        return quick(out_and_grads)({x: y.astype(dtype) for x, y in arguments.items()})

    ours = partial(gated_dot_product_attention, is_causal=True, return_residual=True)
    exact = run(partial(ours, implementation="reference"), jnp.float32)
    plain = run(unfused, dtype)
    for implementation in BOTH:
        got = run(partial(ours, implementation=implementation), dtype)
        lse = got.pop("lse")
        assert lse.dtype == jnp.float32
        assert relative_error(lse, exact["lse"]) < 1e-6
        for name, x in got.items():
            assert x.dtype == dtype
            assert relative_error(x, exact[name]) < 1.1 * relative_error(plain[name], exact[name]), name


def test_float16_keeps_what_a_closed_gate_would_underflow():
    """With sigma near 6e-6, the gated output has two digits left in float16; gradients must not be made of those."""
    arguments = qkv(length=32, key_length=32, head_dim=32, dtype=jnp.float16)
    arguments |= {"gate": jnp.full((2, 32, 4, 1), -12.0, jnp.float16), "sinks": jnp.zeros(4)}

    def gradient(arguments, implementation):
        def loss(arrays):
            # A loss scale, as float16 training has it.
            out = gated_dot_product_attention(**arrays, implementation=implementation)
            return out.astype(jnp.float32).sum() * 2.0**14

        return quick(jax.grad(loss))(arguments)

    got = gradient(arguments, "chunked")
    exact = gradient({x: y.astype(jnp.float32) for x, y in arguments.items()}, "reference")
    for name in ("gate", "sinks"):
        assert relative_error(got[name], exact[name]) < 1e-3, name


def test_sink_gradients_are_float32_sums():
    arguments = qkv(batch=4, length=64, key_length=64, head_dim=32, dtype=jnp.bfloat16)
    arguments |= {"sinks": normal(5, 4), "gate": normal(4, 4, 64, 4, 32, dtype=jnp.bfloat16)}
    exact = attend({x: y.astype(jnp.float32) for x, y in arguments.items()}, "reference", is_causal=True)
    got = attend(arguments, "chunked", is_causal=True)
    assert relative_error(got["dsinks"], exact["dsinks"]) < 1e-3


@pytest.mark.parametrize("implementation", BOTH)
def test_shards_of_the_queries_are_the_whole(implementation):
    arguments = qkv() | {"gate": normal(4, 2, 40, 4, 8), "alibi_slopes": jnp.array([0.5, 0.2, 0.1, 0.0])}
    limits = {"is_causal": True, "local_window_size": (11, 0)}
    attention = partial(gated_dot_product_attention, implementation=implementation, return_residual=True, **limits)
    whole = quick(lambda arrays: attention(**arrays))(arguments)

    def shards(arrays):
        parts = [{x: arrays[x][:, start : start + 10] for x in ("query", "gate")} for start in (0, 10, 20, 30)]
        results = [attention(**arrays | part, query_offset=10 * i) for i, part in enumerate(parts)]
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *results)

    for part, full in zip(quick(shards)(arguments), whole, strict=True):
        np.testing.assert_allclose(part, full, atol=2e-6)
    # One offset per sequence: every sequence of the batch may stand somewhere else.
    rows = {x: jnp.stack([arguments[x][0, :10], arguments[x][0, 20:30]]) for x in ("query", "gate")}
    rows |= {x: arguments[x][:1].repeat(2, 0) for x in ("key", "value")}
    out = quick(lambda arrays: attention(**arrays, query_offset=jnp.array([0, 20]))[0])(arguments | rows)
    np.testing.assert_allclose(out, jnp.stack([whole[0][0, :10], whole[0][0, 20:30]]), atol=2e-6)


@pytest.mark.parametrize("implementation", BOTH)
def test_two_runs_agree_bit_for_bit(implementation):
    arguments = qkv() | {"gate": normal(4, 2, 40, 4, 8), "sinks": normal(5, 4), "is_causal": True}
    first, second = (attend(arguments, implementation) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("implementation", BOTH)
def test_transformations(implementation):
    """vmap, remat and scan around attention and its gradient change nothing."""
    stacked = {x: jnp.stack([y, 2 * y, 3 * y]) for x, y in qkv(batch=1, length=24, key_length=24).items()}
    stacked |= {"gate": normal(4, 3, 1, 24, 4, 8), "query_offset": jnp.array([[0], [3], [-2]])}

    def grads(arguments, implementation=implementation, wrap=lambda f: f):
        offset = arguments["query_offset"]
        limits = {"query_offset": offset, "is_causal": True, "implementation": implementation}

        def loss(arrays):
            return jnp.sin(gated_dot_product_attention(**arrays, **limits)).sum()

        return jax.grad(wrap(loss))({x: y for x, y in arguments.items() if x != "query_offset"})

    oracle = quick(partial(grads, implementation="reference"))
    one_by_one = [oracle({x: y[i] for x, y in stacked.items()}) for i in range(3)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    assert_close(quick(jax.vmap(grads))(stacked), expected)
    assert_close(quick(jax.vmap(partial(grads, wrap=jax.checkpoint)))(stacked), expected)
    scanned = quick(lambda stacked: jax.lax.scan(lambda _, x: (None, grads(x)), None, stacked)[1])(stacked)
    assert_close(scanned, expected)
