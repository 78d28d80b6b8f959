"""What breaks in the field, for every implementation; those of devices run in Pallas' interpreters."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gattn import gated_dot_product_attention, model
from gattn.config import GateSpec, ModelConfig
from gattn.kernels import api, vjp
from tests.attention import (
    SETTINGS,
    assert_close,
    attend,
    exact,
    forward,
    interpreted,
    normal,
    qkv,
    quick,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(params=SETTINGS)
def setting(request):
    yield from interpreted(request.param)


@pytest.fixture(params=[name for name in SETTINGS if name != "reference"])
def kernel(request):
    yield from interpreted(request.param)


@pytest.fixture(params=["tpu", "gpu"])
def device(request):
    yield from interpreted(request.param)


def test_halves_of_the_keys_merge_into_the_whole(setting):
    """As ring attention does it: each half with its own offset, weighted by its lse, gradients included."""
    arguments = setting.qkv(batch=1) | {"gate": setting.gate(batch=1)}
    half = setting.length // 2
    attention = partial(gated_dot_product_attention, is_causal=True, implementation=setting.name, return_residual=True)

    def halves(arrays):
        parts = []
        for start in (0, half):
            cut = {x: arrays[x][:, start : start + half] for x in ("key", "value")}
            parts.append(attention(**arrays | cut, query_offset=-start))
        (out, lse), (more, more_lse) = parts
        total = jnp.logaddexp(lse, more_lse)
        return jnp.exp(lse - total)[..., None] * out + jnp.exp(more_lse - total)[..., None] * more, total

    weight = normal(5, *arguments["query"].shape)

    def value_and_grads(function):
        def loss(arrays):
            out, lse = function(arrays)
            return (out * weight).sum() + jnp.sin(lse).sum(), (out, lse)

        grads, (out, lse) = quick(jax.grad(loss, has_aux=True))(arguments)
        return {"out": out, "lse": lse, **grads}

    merged = value_and_grads(halves)
    assert merged["lse"].dtype == jnp.float32
    assert_close(merged, value_and_grads(lambda arrays: attention(**arrays)), setting.tolerance)


def empty_beginnings(length):
    rows = np.arange(length)
    return {
        "query_offset": {"query_offset": -7, "is_causal": True},
        "key_value_seq_lengths": {"key_value_seq_lengths": np.array([length, 0])},
        "segment_ids": {"segment_ids": np.where(rows < 7, -1, 0)[None].repeat(2, 0)},
        "mask": {"mask": rows[None, None, :, None] >= 7},
        "bias": {"bias": jnp.where(rows[:, None] < 7, -jnp.inf, 0.0)[None, None]},
    }


@pytest.mark.parametrize("name", empty_beginnings(0))
def test_rows_with_nothing_to_attend_to(setting, name):
    """Output 0, lse -inf, every gradient of theirs 0, nothing NaN."""
    arguments = setting.qkv() | {"gate": setting.gate()} | empty_beginnings(setting.length)[name]
    if setting.refuses(name, arguments):
        return
    empty = (1,) if name == "key_value_seq_lengths" else (slice(None), slice(0, 7))
    got = attend(arguments, setting.name)
    np.testing.assert_array_equal(got["lse"] == -jnp.inf, jnp.zeros(got["lse"].shape, bool).at[empty].set(True))
    for name in ("out", "dquery", "dgate"):
        np.testing.assert_array_equal(got[name][empty], 0.0, err_msg=name)
    for name in got.keys() - {"lse"}:
        assert np.isfinite(got[name]).all(), name


def test_rows_with_nothing_but_a_sink(setting):
    arguments = setting.qkv(batch=1) | {"sinks": normal(5, setting.heads), "query_offset": -7, "is_causal": True}
    got = attend(arguments, setting.name)
    np.testing.assert_array_equal(got["out"][:, :7], 0.0)
    lse = np.broadcast_to(arguments["sinks"], (1, 7, setting.heads))
    np.testing.assert_allclose(got["lse"][:, :7], lse, atol=1e-6)
    for name in ("dquery", "dkey", "dvalue", "dsinks"):
        assert np.isfinite(got[name]).all(), name
    np.testing.assert_array_equal(got["dquery"][:, :7], 0.0)


def test_garbage_beyond_the_lengths_is_never_seen(setting):
    """Lengths that are no multiple of a block, NaN beyond them: as if the arrays ended there."""
    rows, keys = setting.length - 9, setting.length - 4
    ends = {"query": rows, "gate": rows, "key": keys, "value": keys}
    arrays = setting.qkv(length=rows + 6, key_length=keys + 6) | {"gate": setting.gate(length=rows + 6)}
    dirty = {x: y.at[:, ends[x] :].set(jnp.nan) for x, y in arrays.items()}
    clean = {x: y[:, : ends[x]] for x, y in arrays.items()}

    def grads(arrays, lengths):
        attention = partial(gated_dot_product_attention, is_causal=True, implementation=setting.name, **lengths)

        def out_and_grads(arrays):
            out, pullback = jax.vjp(lambda arrays: attention(**arrays), arrays)
            # The cotangent of padding rows may be garbage as well.
            real = jnp.arange(out.shape[1])[:, None, None] < rows
            return {"out": out, **pullback(jnp.where(real, jnp.cos(out), jnp.nan))[0]}

        return quick(out_and_grads)(arrays)

    lengths = {"query_seq_lengths": np.array([rows] * 2), "key_value_seq_lengths": np.array([keys] * 2)}
    got, expected = grads(dirty, lengths), grads(clean, {})
    for name, y in expected.items():
        np.testing.assert_array_equal(got[name][:, y.shape[1] :], 0.0, err_msg=name)
    assert_close({x: y[:, : expected[x].shape[1]] for x, y in got.items()}, expected, setting.tolerance)


def test_negative_segments_match_nothing(setting):
    last = setting.length - 9
    ids = np.array([[0] * 12 + [-1] * 9 + [1] * (last - 21) + [-2] * 9])
    arguments = setting.qkv(batch=1) | {"segment_ids": ids}
    got = attend(arguments, setting.name)
    padding = ids[0] < 0
    np.testing.assert_array_equal(got["out"][:, padding], 0.0)
    for name in ("dquery", "dkey", "dvalue"):
        np.testing.assert_array_equal(got[name][:, padding], 0.0, err_msg=name)
    alone = exact({x: arguments[x][:, 21:last] for x in ("query", "key", "value")})
    assert_close({"out": got["out"][:, 21:last]}, {"out": forward(alone, "reference")[0]}, setting.tolerance)


def test_window_does_not_count_the_query_itself(setting):
    """(left, right) spans left + 1 + right keys; Hugging Face's causal window W spans W, so it is (W - 1, 0)."""
    arguments = setting.qkv(batch=1, heads=1, kv_heads=1)
    equal_logits = arguments | {"query": jnp.zeros_like(arguments["query"])}
    counted = jnp.exp(forward(equal_logits, setting.name, local_window_size=(3, 2))[1])[0, :, 0]
    assert counted[20] == pytest.approx(6)
    assert counted[0] == pytest.approx(3)
    rows, keys = np.ogrid[: setting.length, : setting.length]
    hugging_face = (keys <= rows) & (keys > rows - 8)
    got = forward(arguments, setting.name, local_window_size=(7, 0))
    expected = forward(exact(arguments), "reference", mask=hugging_face[None, None])
    assert_close(
        dict(zip(("out", "lse"), got, strict=True)), dict(zip(("out", "lse"), expected, strict=True)), setting.tolerance
    )


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_saturated_gates(setting, granularity):
    arguments = setting.qkv(batch=1) | {"is_causal": True}
    gate = jnp.zeros_like(setting.gate(1 if granularity == "headwise" else None, batch=1))
    ungated = attend(arguments, setting.name)
    opened = attend(arguments | {"gate": gate + 30}, setting.name)
    dgate = opened.pop("dgate")
    assert_close(opened, ungated, setting.tolerance)
    assert np.abs(dgate).max() < 1e-5
    closed = attend(arguments | {"gate": gate - 30}, setting.name)
    assert 0 < np.abs(closed["out"]).max() < 1e-12
    # d out / d gate = O * sigma (1 - sigma), which is tiny but not lost.
    weights = jnp.cos(jnp.arange(closed["out"].size)).reshape(closed["out"].shape)
    expected = np.asarray(ungated["out"] * weights, np.float64) / (1 + math.exp(30))
    expected = expected.sum(-1, keepdims=True) if granularity == "headwise" else expected
    assert relative_error(closed["dgate"], expected) < setting.tolerance


def test_each_gate_score_acts_on_its_own_output_alone(setting):
    arguments = setting.qkv() | {"gate": setting.gate()}
    before, _ = forward(arguments, setting.name)
    after, _ = forward(arguments | {"gate": arguments["gate"].at[1, 17, 1, 5].add(1.0)}, setting.name)
    assert np.argwhere(np.asarray(before != after)).tolist() == [[1, 17, 1, 5]]
    half_open = forward(arguments | {"gate": jnp.zeros_like(setting.gate(1))}, setting.name)
    ungated = forward({x: y for x, y in arguments.items() if x != "gate"}, setting.name)
    np.testing.assert_array_equal(2 * half_open[0], ungated[0])
    np.testing.assert_array_equal(half_open[1], ungated[1])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(kernel, head_dim):
    arguments = kernel.qkv(batch=1, length=24, heads=2, kv_heads=1, head_dim=head_dim) | {"is_causal": True}
    arguments["gate"] = kernel.gate(batch=1, length=24, heads=2, kv_heads=1, head_dim=head_dim)
    if kernel.name == "gpu" and head_dim not in (64, 128, 256):
        with pytest.raises(ValueError, match=f"query has head_dim {head_dim}"):
            attend(arguments, "gpu")
        return
    assert_close(attend(arguments, kernel.name), attend(exact(arguments), "reference"), kernel.tolerance)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1)])
def test_kv_head_ratios(kernel, heads, kv_heads):
    changes = {"batch": 1, "length": 24, "heads": heads, "kv_heads": kv_heads}
    arguments = kernel.qkv(**changes) | {"gate": kernel.gate(1, **changes), "is_causal": True}
    assert_close(attend(arguments, kernel.name), attend(exact(arguments), "reference"), kernel.tolerance)


def test_everything_at_once(kernel):
    """Causal window, offset, packed segments, lengths, sinks, soft cap and an NS-sigmoid gate, over many blocks."""
    length, key_length = 2 * kernel.length, 3 * kernel.length
    arguments = kernel.qkv(length=length, key_length=key_length)
    arguments |= {"gate": kernel.gate(length=length), "gate_activation": "ns_sigmoid", "sinks": normal(5, kernel.heads)}
    rng = np.random.default_rng(6)
    arguments |= {
        "segment_ids": tuple(np.sort(rng.integers(-1, 3, (2, n))) for n in (length, key_length)),
        "query_seq_lengths": np.array([length, length - 9]),
        "key_value_seq_lengths": np.array([key_length - 40, key_length]),
        "query_offset": np.array([key_length - length, 11]),
        "local_window_size": (kernel.length, 3),
        "logits_soft_cap": 2.0,
    }
    if kernel.refuses("logits_soft_cap", arguments):
        del arguments["logits_soft_cap"]
    assert_close(attend(arguments, kernel.name), attend(exact(arguments), "reference"), kernel.tolerance)


DECODED = {
    "one query": (1, {}),
    "eight queries": (8, {"is_causal": True}),
    "headwise, window": (3, {"granularity": "headwise", "local_window_size": (30, 0)}),
    "sinks, lengths": (2, {"is_causal": True, "sinks": True, "key_value_seq_lengths": np.array([0, 55])}),
}


@pytest.mark.parametrize("name", DECODED)
def test_decoding(setting, name):
    """A few queries at the end of a KV cache, each sequence somewhere else; gradients too."""
    length, extras = DECODED[name]
    extras = {"query_offset": np.array([61, 20])} | extras
    changes = {"length": length, "heads": 4, "kv_heads": 2}
    arguments = setting.qkv(key_length=70, **changes)
    arguments["gate"] = setting.gate(1 if extras.pop("granularity", None) else None, **changes)
    if extras.pop("sinks", None):
        extras["sinks"] = normal(5, 4)
    arguments |= extras
    assert_close(attend(arguments, setting.name), attend(exact(arguments), "reference"), setting.tolerance)


def test_decoding_packs_the_query_heads_of_a_kv_head(device):
    """8 queries of 6 heads over 2 kv heads are 24 rows of 2 heads: each block of the cache is read once for all."""
    seen = []

    def spy(inputs, mask, options):
        seen.append((inputs.query.shape, inputs.gate.shape, mask.positions.shape))
        return inputs.query, jnp.zeros(inputs.query.shape[:3])

    arguments = device.qkv(batch=1, length=8, key_length=40, heads=6, kv_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_kernel", lambda *_: vjp.Kernel(spy, spy))
        out = gated_dot_product_attention(**arguments, gate=normal(4, 1, 8, 6, 1), implementation=device.name)
        longer = device.qkv(batch=1, length=9, key_length=40, heads=6, kv_heads=2)
        gated_dot_product_attention(**longer, gate=normal(4, 1, 9, 6, 1), implementation=device.name)
    assert seen == [
        ((1, 24, 2, 64), (1, 24, 2, 1), (1, 24)),
        ((1, 9, 6, 64), (1, 9, 6, 1), (1, 9)),
    ]
    np.testing.assert_array_equal(out, arguments["query"])


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
def test_half_precision_is_as_good_as_unfused(setting, dtype):
    """Against float32 on the same rounded numbers: at most 1.5 x the unfused error, in the mean and in the tail."""
    arguments = qkv(batch=1, length=64, key_length=64, heads=2, kv_heads=1, head_dim=64, dtype=dtype)
    arguments |= {"gate": normal(4, 1, 64, 2, 64, dtype=dtype)}
    if setting.name == "tpu" and dtype == jnp.float16:
        with pytest.raises(ValueError, match="query has dtype float16"):
            gated_dot_product_attention(**arguments, implementation="tpu")
        return
    cotangent = normal(5, 1, 64, 2, 64, dtype=dtype)

    def run(function, arguments, dtype):
        def out_and_grads(arrays):
            (out, lse), pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
            return {"out": out, "lse": lse, **pullback((cotangent.astype(dtype), jnp.zeros_like(lse)))[0]}

        return quick(out_and_grads)(arguments)

    ours = partial(gated_dot_product_attention, is_causal=True, return_residual=True)
    oracle = run(partial(ours, implementation="reference"), exact(arguments), jnp.float32)
    plain = run(unfused, arguments, dtype)
    got = run(partial(ours, implementation=setting.name), arguments, dtype)
    lse = got.pop("lse")
    assert lse.dtype == jnp.float32
    assert relative_error(lse, oracle["lse"]) < 1e-6

    def tail(x, expected):
        return np.quantile(np.abs(np.asarray(x, np.float64) - np.asarray(expected, np.float64)), 0.999)

    for name, x in got.items():
        assert x.dtype == dtype
        assert relative_error(x, oracle[name]) < 1.5 * relative_error(plain[name], oracle[name]), name
        assert tail(x, oracle[name]) < 1.5 * tail(plain[name], oracle[name]), name


def test_float16_keeps_what_a_closed_gate_would_underflow(kernel):
    """With sigma near 6e-6, the gated output has two digits left in float16; gradients must not be made of those."""
    changes = {"batch": 1, "length": 32, "head_dim": max(32, kernel.head_dim), "dtype": jnp.float16}
    arguments = kernel.qkv(**changes)
    arguments |= {"gate": jnp.full_like(kernel.gate(1, **changes), -12.0), "sinks": jnp.zeros(kernel.heads)}
    if kernel.name == "tpu":
        pytest.skip("the TPU kernel does not take float16")

    def gradient(arguments, implementation):
        def loss(arrays):
            # A loss scale, as float16 training has it.
            out = gated_dot_product_attention(**arrays, implementation=implementation)
            return out.astype(jnp.float32).sum() * 2.0**14

        return quick(jax.grad(loss))(arguments)

    got, expected = gradient(arguments, kernel.name), gradient(exact(arguments), "reference")
    for name in ("gate", "sinks"):
        assert relative_error(got[name], expected[name]) < 1e-3, name


def test_sink_gradients_are_float32_sums(kernel):
    """Over 256 rows that all pull one way; a bfloat16 sum is off by 1%."""
    changes = {"length": 128, "head_dim": max(32, kernel.head_dim), "dtype": jnp.bfloat16}
    arguments = kernel.qkv(**changes) | {"sinks": normal(5, kernel.heads), "gate": kernel.gate(**changes)}

    def gradient(arguments, implementation):
        def loss(sinks):
            out = gated_dot_product_attention(**arguments | {"sinks": sinks}, implementation=implementation)
            return jnp.square(out.astype(jnp.float32)).sum()

        return quick(jax.grad(loss))(arguments["sinks"])

    got, expected = gradient(arguments, kernel.name), gradient(exact(arguments), "reference")
    assert relative_error(got, expected) < 1e-3


def test_shards_of_the_queries_are_the_whole(setting):
    arguments = setting.qkv() | {"gate": setting.gate()}
    if "alibi_slopes" not in setting.lacks:
        arguments["alibi_slopes"] = jnp.array([0.5, 0.2, 0.1, 0.0])
    limits = {"is_causal": True, "local_window_size": (11, 0)}
    attention = partial(gated_dot_product_attention, implementation=setting.name, return_residual=True, **limits)
    whole = quick(lambda arrays: attention(**arrays))(arguments)
    starts = range(0, setting.length, setting.length // 4)

    def cut(arrays, start):
        return {x: arrays[x][:, start : start + setting.length // 4] for x in ("query", "gate")}

    def shards(arrays):
        results = [attention(**arrays | cut(arrays, start), query_offset=start) for start in starts]
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *results)

    for part, full in zip(quick(shards)(arguments), whole, strict=True):
        assert_close({"": part}, {"": full}, setting.tolerance)
    # One offset per sequence: every sequence of the batch may stand somewhere else.
    offsets = starts[0], starts[2]
    rows = jax.tree.map(lambda x, y: jnp.stack([x[0], y[0]]), *(cut(arguments, start) for start in offsets))
    rows |= {x: arguments[x][:1].repeat(2, 0) for x in ("key", "value")}
    out = quick(lambda arrays: attention(**arrays, query_offset=jnp.array(offsets))[0])(arguments | rows)
    expected = jnp.stack([whole[0][0, start : start + setting.length // 4] for start in offsets])
    assert_close({"out": out}, {"out": expected}, setting.tolerance)


def test_two_runs_agree_bit_for_bit(setting):
    arguments = setting.qkv(batch=1) | {
        "gate": setting.gate(batch=1),
        "sinks": normal(5, setting.heads),
        "is_causal": True,
    }
    first, second = (attend(arguments, setting.name) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_transformations(setting):
    """vmap, remat and scan around attention and its gradient change nothing."""
    changes = {"batch": 1, "length": 24}
    stacked = {x: jnp.stack([y, 2 * y]) for x, y in setting.qkv(**changes).items()}
    stacked |= {"gate": jnp.stack([setting.gate(**changes)] * 2), "query_offset": jnp.array([[3], [-2]])}

    def grads(arguments, implementation=setting.name, wrap=lambda f: f):
        offset = arguments["query_offset"]
        limits = {"query_offset": offset, "is_causal": True, "implementation": implementation}

        def loss(arrays):
            return jnp.sin(gated_dot_product_attention(**arrays, **limits)).sum(dtype=jnp.float32)

        return jax.grad(wrap(loss))({x: y for x, y in arguments.items() if x != "query_offset"})

    oracle = quick(partial(grads, implementation="reference"))
    one_by_one = [oracle(exact({x: y[i] for x, y in stacked.items()})) for i in range(2)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    # The interpreter of GPU kernels has side effects, which JAX takes into neither.
    if setting.name != "gpu":
        assert_close(quick(jax.vmap(partial(grads, wrap=jax.checkpoint)))(stacked), expected, setting.tolerance)
    scanned = quick(lambda stacked: jax.lax.scan(lambda _, x: (None, grads(x)), None, stacked)[1])(stacked)
    assert_close(scanned, expected, setting.tolerance)


def test_a_model_with_the_tpu_kernel_is_the_reference_model():
    """Two layers under scan and remat, a fused gate, packed documents: loss and every parameter's gradient."""
    config = ModelConfig(
        vocab_size=50,
        num_layers=2,
        d_model=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        ffn_dim=32,
        match_params=False,
    )
    config = dataclasses.replace(config, gates=(GateSpec(),), softmax="sink_logit", remat="full")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), jnp.float32), model.abstract(config)[1]
    )
    tokens = jnp.asarray(rng.integers(0, 50, (2, 24)))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, 24))))

    def loss_and_grads(implementation):
        graph = model.abstract(dataclasses.replace(config, attention=implementation))[0]

        def loss(params):
            hidden, _ = nnx.merge(graph, params)(tokens, ids)
            return jnp.sin(hidden).sum()

        return quick(jax.value_and_grad(loss))(params)

    with api.interpreting(True):
        got = loss_and_grads("tpu")
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(loss_and_grads("reference")), strict=True):
        assert relative_error(x, y) < 2e-5, jax.tree_util.keystr(path)
