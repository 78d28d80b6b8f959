"""Attention: the reference against NumPy and jax.nn, chunked against the reference, and what breaks in the field."""

from __future__ import annotations

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn import attention_maps, gated_dot_product_attention
from gattn.kernels import api, chunked, masks, vjp

BOTH = ("reference", "chunked")
# Blocks small enough that a test's short sequences are several of them.
SMALL_BLOCKS = vjp.Kernel(partial(chunked.forward, block=16), partial(chunked.backward, block=16))
# Compilation dominates these tests, and LLVM's optimisations dominate compilation.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
DIFFERENTIABLE = ("query", "key", "value", "gate", "bias", "sinks", "alibi_slopes")


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(api._KERNELS, "chunked", SMALL_BLOCKS)
        yield


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(batch=2, length=40, key_length=40, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32):
    return {
        "query": normal(1, batch, length, heads, head_dim, dtype=dtype),
        "key": normal(2, batch, key_length, kv_heads, head_dim, dtype=dtype),
        "value": normal(3, batch, key_length, kv_heads, head_dim, dtype=dtype),
    }


def quick(function):
    return jax.jit(function, compiler_options=QUICK)


def call(function, arguments, **more):
    """`function(**arguments)`, compiled once per set of static arguments and shapes."""
    arguments = arguments | more
    arrays = {
        name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray) or name == "segment_ids"
    }
    static = tuple((name, x) for name, x in arguments.items() if name not in arrays)
    return _compiled(function, static)(arrays)


@cache
def _compiled(function, static):
    return quick(lambda arrays: function(**arrays, **dict(static)))


def forward(arguments, implementation, **more):
    """Output and lse alone."""
    more |= {"implementation": implementation, "return_residual": True}
    return call(gated_dot_product_attention, arguments, **more)


def attend(arguments, implementation, **more):
    """Output, lse, and the gradients of a loss of both by every differentiable argument there is."""
    return call(_out_and_grads, arguments, implementation=implementation, **more)


def _out_and_grads(**arguments):
    fixed = {name: x for name, x in arguments.items() if name not in DIFFERENTIABLE}

    def loss(arrays):
        out, lse = gated_dot_product_attention(**arrays, **fixed, return_residual=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        # An empty row's lse is -inf, and the cotangent it gets here NaN: no gradient may notice.
        return (out.astype(jnp.float32) * weights).sum() + jnp.sin(3 * lse).sum(), (out, lse)

    arrays = {name: x for name, x in arguments.items() if name in DIFFERENTIABLE}
    grads, (out, lse) = jax.grad(loss, has_aux=True)(arrays)
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}


def assert_close(actual, expected, tolerance=2e-5):
    """Every entry agrees up to `tolerance` of the largest finite one."""
    assert actual.keys() == expected.keys()
    for name in expected:
        x, y = np.asarray(actual[name], np.float64), np.asarray(expected[name], np.float64)
        assert x.shape == y.shape, name
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=name)
        finite = np.isfinite(y)
        size = max(1.0, np.abs(y[finite]).max(initial=0.0))
        np.testing.assert_allclose(x[finite] / size, y[finite] / size, rtol=0, atol=tolerance, err_msg=name)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


# --- the reference against a transcription of the equations -----------------------------------------------------------


def loops(query, key, value, *, gate=None, bias=None, sinks=None, alibi_slopes=None, sees, scale, cap=None, floor=0.0):
    """Attention in float64, one query row at a time; sees(b, n, t, s) says which keys count."""
    batch, length, heads, head_dim = query.shape
    group = heads // key.shape[2]
    out, lse = np.zeros((batch, length, heads, head_dim)), np.full((batch, length, heads), -np.inf)
    for b, t, n in np.ndindex(batch, length, heads):
        keys = [s for s in range(key.shape[1]) if sees(b, n, t, s)]
        logits = np.array([query[b, t, n] @ key[b, s, n // group] * scale for s in keys])
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        if bias is not None:
            full = np.broadcast_to(bias, (batch, heads, length, key.shape[1]))
            logits = logits + np.array([full[b, n, t, s] for s in keys])
        if alibi_slopes is not None:
            logits = logits - alibi_slopes[n] * np.array([abs(t + sees.offset - s) for s in keys])
        weights = np.exp(logits)
        total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[n]))
        if total == 0.0:
            continue
        lse[b, t, n] = math.log(total)
        for weight, s in zip(weights, keys, strict=True):
            out[b, t, n] += weight / total * value[b, s, n // group]
    if gate is not None:
        out = out * (floor + (1 - floor) / (1 + np.exp(-gate)))
    return out, lse


class Sees:
    """Who sees whom, straight from the words of the docstring."""

    def __init__(self, causal=False, window=None, lengths=None, key_lengths=None, segments=None, offset=0, mask=None):
        self.causal, self.window, self.lengths, self.key_lengths = causal, window, lengths, key_lengths
        self.segments, self.offset, self.mask = segments, offset, mask

    def __call__(self, b, n, t, s):
        position = t + self.offset
        return not (
            (self.causal and s > position)
            or (self.window is not None and not position - self.window[0] <= s <= position + self.window[1])
            or (self.lengths is not None and t >= self.lengths[b])
            or (self.key_lengths is not None and s >= self.key_lengths[b])
            or (self.segments is not None and not self.segments[0][b][t] == self.segments[1][b][s] >= 0)
            or (self.mask is not None and not self.mask[b, 0, t, s])
        )

    def arguments(self):
        found = {
            "is_causal": self.causal,
            "local_window_size": self.window,
            "query_seq_lengths": self.lengths,
            "key_value_seq_lengths": self.key_lengths,
            "segment_ids": self.segments and tuple(map(np.array, self.segments)),
            "query_offset": self.offset,
            "mask": self.mask,
        }
        return {name: np.array(x) if isinstance(x, list) else x for name, x in found.items()}


SEGMENTS = (
    [[0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 2, 2, 2]],
    [[0, 0, 0, 1, 1, 2, -1, -1, -1], [3, 3, 2, 2, 2, 2, 2, 2, 3]],
)
TRANSCRIBED = {
    "plain": (Sees(), {}),
    "causal, offset": (Sees(causal=True, offset=2), {"gate": "elementwise", "alibi_slopes": 0.3}),
    "negative offset": (Sees(causal=True, offset=-3), {"gate": "headwise", "alibi_slopes": 0.3}),
    "window": (Sees(window=(2, 1)), {"sinks": 0.5, "gate": "ns_sigmoid"}),
    "causal window, cap": (Sees(causal=True, window=(3, 3)), {"cap": 1.5, "bias": (1, 4, 7, 1)}),
    "lengths": (Sees(lengths=[7, 4], key_lengths=[0, 6]), {"bias": (2, 1, 1, 9)}),
    "lengths, sinks": (Sees(lengths=[7, 4], key_lengths=[0, 6]), {"sinks": 0.5, "cap": 2.0, "bias": (2, 4, 7, 9)}),
    "segments": (Sees(segments=SEGMENTS), {"gate": "elementwise", "scale": 0.2}),
    "mask": (Sees(mask=np.random.default_rng(0).random((2, 1, 7, 9)) < 0.3), {"sinks": -1.0}),
}


def transcribed_case(name):
    sees, extras = TRANSCRIBED[name]
    rng = np.random.default_rng(7)
    shapes = {"query": (2, 7, 4, 3), "key": (2, 9, 2, 3), "value": (2, 9, 2, 3)}
    if "gate" in extras:
        shapes["gate"] = (2, 7, 4, 1 if extras["gate"] == "headwise" else 3)
    if "bias" in extras:
        shapes["bias"] = extras["bias"]
    arrays = {argument: rng.standard_normal(shape) for argument, shape in shapes.items()}
    arrays |= {x: extras[x] * np.arange(1.0, 5.0) for x in ("sinks", "alibi_slopes") if x in extras}
    scale, cap, ns = extras.get("scale"), extras.get("cap"), extras.get("gate") == "ns_sigmoid"
    written_out = partial(loops, sees=sees, scale=3**-0.5 if scale is None else scale, cap=cap, floor=0.5 * ns)
    arguments = sees.arguments() | {"scale": scale, "logits_soft_cap": cap}
    return arrays, written_out, arguments | {"gate_activation": "ns_sigmoid" if ns else "sigmoid"}


@pytest.mark.parametrize("name", TRANSCRIBED)
def test_reference_is_the_equations_and_its_gradient_their_slope(name):
    arrays, written_out, arguments = transcribed_case(name)
    got = attend({x: jnp.asarray(y, jnp.float32) for x, y in arrays.items()} | arguments, "reference")
    out, lse = written_out(**arrays)
    assert_close({"out": got["out"], "lse": got["lse"]}, {"out": out, "lse": lse}, 2e-6)

    def loss(arrays):
        out, lse = written_out(**arrays)
        finite = np.where(lse == -np.inf, 0.0, lse)
        return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum() + np.sin(3 * finite).sum()

    rng, step = np.random.default_rng(8), 1e-5
    for argument, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ahead, behind = (loss(arrays | {argument: x + sign * step * direction}) for sign in (1, -1))
        slope = (np.asarray(got[f"d{argument}"], np.float64) * direction).sum()
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=2e-4, abs=2e-5), argument


def test_maps_are_the_weights_of_the_output():
    arguments = qkv() | {"is_causal": True, "local_window_size": (5, 0), "sinks": normal(4, 4), "query_offset": -2}
    maps = call(attention_maps, {x: y for x, y in arguments.items() if x != "value"})
    out, lse = forward(arguments, "reference")
    assert maps.shape == (2, 4, 40, 40)
    assert maps.dtype == jnp.float32
    grouped = maps.reshape(2, 2, 2, 40, 40)
    summed = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, arguments["value"], precision="highest").reshape(out.shape)
    np.testing.assert_allclose(summed, out, atol=2e-6)
    sink_share = jnp.exp(arguments["sinks"][:, None] - lse.transpose(0, 2, 1))
    np.testing.assert_allclose(maps.sum(-1) + sink_share, 1.0, atol=1e-5)
    np.testing.assert_array_equal(maps[:, :, :2], 0.0)


# --- chunked against the reference ------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Any combination of what the signature offers, over a few shapes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    batch, (heads, kv_heads) = 2, draw(st.sampled_from([(4, 4), (4, 2), (8, 1)]))
    length, key_length = draw(st.sampled_from([(40, 40), (33, 50), (16, 7)]))
    causal, offset = draw(st.booleans()), draw(st.sampled_from([0, 5, -9, "each"]))
    arguments = {
        "query": rng.standard_normal((batch, length, heads, 8)),
        "key": rng.standard_normal((batch, key_length, kv_heads, 8)),
        "value": rng.standard_normal((batch, key_length, kv_heads, 8)),
        "gate": rng.standard_normal((batch, length, heads, draw(st.sampled_from([1, 8])))),
        "sinks": draw(st.sampled_from([None, rng.standard_normal(heads)])),
        "alibi_slopes": draw(st.sampled_from([None, rng.random(heads) / 4])),
    }
    if draw(st.booleans()):
        arguments["bias"] = rng.standard_normal(
            [draw(st.sampled_from([1, size])) for size in (batch, heads, length, key_length)]
        )
    arguments = {x: jnp.asarray(y, jnp.float32) for x, y in arguments.items() if y is not None}
    if draw(st.booleans()):
        arguments["segment_ids"] = tuple(np.sort(rng.integers(-1, 3, (batch, n))) for n in (length, key_length))
    if draw(st.booleans()):
        arguments["query_seq_lengths"] = rng.integers(0, length + 1, batch)
        arguments["key_value_seq_lengths"] = rng.integers(0, key_length + 1, batch)
    if draw(st.integers(0, 3)) == 0:
        arguments["mask"] = rng.random((batch, 1, length, key_length)) < 0.5
    return arguments | {
        "gate_activation": draw(st.sampled_from(api.GATE_ACTIVATIONS)),
        "is_causal": causal,
        "query_offset": rng.integers(-9, 9, batch) if offset == "each" else offset,
        "local_window_size": draw(st.sampled_from([None, None, (6, 3), 20, (0, 0)])),
        "logits_soft_cap": draw(st.sampled_from([None, 2.0])),
    }


@settings(deadline=None, max_examples=6, derandomize=True, database=None)
@given(problems())
def test_chunked_is_the_reference(arguments):
    assert_close(attend(arguments, "chunked"), attend(arguments, "reference"))


@pytest.mark.parametrize("shape", [(1, 4, 40, 1), (2, 1, 1, 40), (1, 1, 1, 1)])
def test_bias_gradients_of_every_broadcast(shape):
    arguments = qkv() | {"bias": normal(4, *shape), "is_causal": True}
    got = attend(arguments, "chunked")
    assert got["dbias"].shape == shape
    assert_close(got, attend(arguments, "reference"))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim):
    arguments = qkv(batch=1, length=24, key_length=24, heads=2, kv_heads=2, head_dim=head_dim) | {"is_causal": True}
    arguments["gate"] = normal(4, 1, 24, 2, head_dim)
    assert_close(attend(arguments, "chunked"), attend(arguments, "reference"))


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (8, 1)])
def test_kv_head_ratios(heads, kv_heads):
    arguments = qkv(heads=heads, kv_heads=kv_heads) | {"gate": normal(4, 2, 40, heads, 1), "is_causal": True}
    grouped = attend(arguments, "chunked")
    assert_close(grouped, attend(arguments, "reference"))
    repeated = {x: jnp.repeat(arguments[x], heads // kv_heads, axis=2) for x in ("key", "value")}
    np.testing.assert_allclose(forward(arguments | repeated, "reference")[0], grouped["out"], atol=1e-6)


# --- what breaks in the field -----------------------------------------------------------------------------------------


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


def primitives(jaxpr):
    """The equations of a jaxpr and of everything inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from primitives(getattr(inner, "jaxpr", inner))


def test_saved_names_spare_the_second_forward():
    arguments = qkv() | {"gate": normal(4, 2, 40, 4, 8)}

    def loops_with(policy):
        @partial(jax.checkpoint, policy=policy)
        def block(arrays):
            return gated_dot_product_attention(**arrays, implementation="chunked")

        jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda arrays: jnp.sin(block(arrays)).sum()))(arguments).jaxpr
        jaxpr = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
        return sum(equation.primitive.name == "scan" for equation in primitives(jaxpr))

    policies = jax.checkpoint_policies
    assert loops_with(policies.nothing_saveable) == 3
    assert loops_with(policies.save_only_these_names(*vjp.CHECKPOINT_NAMES)) == 2


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


# --- memory and work --------------------------------------------------------------------------------------------------


def test_chunked_has_no_array_of_all_queries_by_all_keys():
    length = 640
    arguments = qkv(batch=1, length=length, key_length=length, heads=1, kv_heads=1, head_dim=8)
    arguments |= {"gate": normal(4, 1, length, 1, 8), "sinks": jnp.zeros(1), "alibi_slopes": jnp.ones(1)}
    limits = {"is_causal": True, "segment_ids": np.zeros((1, length), np.int32), "local_window_size": (300, 0)}

    def largest(implementation):
        def loss(arrays):
            return gated_dot_product_attention(**arrays, **limits, implementation=implementation).sum()

        function = jax.value_and_grad(loss)
        jaxpr = jax.make_jaxpr(function)(arguments).jaxpr
        traced = max(var.aval.size for equation in primitives(jaxpr) for var in equation.outvars)
        compiled = quick(function).lower(arguments).compile().as_text()
        shapes = re.findall(r"\b(?:f32|s32|pred|bf16)\[([\d,]+)\]", compiled)
        return traced, max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert min(largest("reference")) >= length * length
    # What is largest is an input: 640 x 8 numbers, not 640 x 640.
    assert max(largest("chunked")) <= length * 16


@settings(deadline=None, max_examples=15, derandomize=True, database=None)
@given(
    causal=st.booleans(),
    offset=st.integers(-20, 20),
    window=st.sampled_from([None, (5, 2), (0, 9)]),
    packed=st.sampled_from(["none", "sorted", "shuffled"]),
    lengths=st.booleans(),
    seed=st.integers(0, 99),
)
def test_skipped_blocks_hold_no_pair_that_attends(causal, offset, window, packed, lengths, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 4, (2, 24))
    mask = masks.make_mask(
        24,
        24,
        query_offset=offset,
        is_causal=causal,
        window=window,
        key_lengths=jnp.asarray(rng.integers(0, 25, 2)) if lengths else None,
        segments={"none": None, "sorted": (np.sort(ids),) * 2, "shuffled": (ids, ids)}[packed],
    )
    mask = masks.pad(jax.tree.map(jnp.asarray, mask), 24, 24, 24, 24)
    allowed = masks.allowed(mask, 0, 24, 0, 24)
    allowed = np.ones((24, 24), bool) if allowed is None else np.asarray(allowed).any(axis=(0, 1))
    first, stop = map(np.asarray, masks.key_block_bounds(mask, 8, 24, 4))
    for block in range(3):
        visited = np.zeros(24, bool)
        visited[4 * first[block] : 4 * stop[block]] = True
        assert not allowed[8 * block : 8 * block + 8, ~visited].any()


def test_work_is_skipped_where_it_can_be():
    def visited(**arguments):
        first, stop = masks.key_block_bounds(masks.make_mask(64, 64, **arguments), 8, 64, 8)
        return (np.asarray(stop) - np.asarray(first)).tolist()

    assert visited() == [8] * 8
    assert visited(is_causal=True) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert visited(is_causal=True, window=(7, 0)) == [1] + [2] * 7
    assert visited(key_lengths=jnp.array([16])) == [2] * 8
    assert visited(query_lengths=jnp.array([16])) == [8, 8] + [0] * 6
    packed = jnp.repeat(jnp.array([0, 1, 2, -1]), 16)[None]
    assert visited(segments=(packed, packed)) == [2] * 6 + [0] * 2
