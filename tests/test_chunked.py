"""Chunked attention: equal to the reference, without a T x S array, without work that a mask rules out."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn import gated_dot_product_attention
from gattn.kernels import masks
from gattn.kernels.arguments import GATE_ACTIVATIONS
from tests.attention import assert_close, attend, forward, normal, primitives, qkv, quick

pytestmark = pytest.mark.usefixtures("small_blocks")


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
        "gate_activation": draw(st.sampled_from(GATE_ACTIVATIONS)),
        "is_causal": causal,
        "query_offset": rng.integers(-9, 9, batch) if offset == "each" else offset,
        "local_window_size": draw(st.sampled_from([None, None, (6, 3), 20, (0, 0)])),
        "logits_soft_cap": draw(st.sampled_from([None, 2.0])),
    }


@settings(deadline=None, max_examples=12, derandomize=True, database=None)
@given(problems())
def test_chunked_is_the_reference(arguments):
    assert_close(attend(arguments, "chunked"), attend(arguments, "reference"))


@pytest.mark.parametrize("shape", [(1, 4, 40, 1), (2, 1, 1, 40), (1, 1, 1, 1)])
def test_bias_gradients_of_every_broadcast(shape):
    arguments = qkv() | {"bias": normal(4, *shape), "is_causal": True}
    got = attend(arguments, "chunked")
    assert got["dbias"].shape == shape
    assert_close(got, attend(arguments, "reference"))


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (8, 1)])
def test_kv_head_ratios(heads, kv_heads):
    arguments = qkv(heads=heads, kv_heads=kv_heads) | {"gate": normal(4, 2, 40, heads, 1), "is_causal": True}
    grouped = attend(arguments, "chunked")
    assert_close(grouped, attend(arguments, "reference"))
    repeated = {x: jnp.repeat(arguments[x], heads // kv_heads, axis=2) for x in ("key", "value")}
    np.testing.assert_allclose(forward(arguments | repeated, "reference")[0], grouped["out"], atol=1e-6)


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
    allowed = masks.allowed(mask, 0, 24, 0, 24)
    allowed = np.ones((1, 1, 24, 24), bool) if allowed is None else np.asarray(allowed)
    blocks = allowed[:, 0].reshape(-1, 3, 8, 6, 4)
    needed, full = masks.block_map(mask, 8, 24, 4)
    assert not (blocks.any(axis=(2, 4)) & ~needed).any()
    assert not (~blocks.all(axis=(2, 4)) & full).any()
    for known, traced in zip((needed, full), masks.block_map(jax.tree.map(jnp.asarray, mask), 8, 24, 4), strict=True):
        np.testing.assert_array_equal(known, traced)


def test_a_mask_known_when_tracing_stays_known():
    mask = masks.pad(masks.make_mask(20, 24, is_causal=True, window=(5, 0), query_offset=4), 20, 24, 24, 24)
    assert all(isinstance(x, np.ndarray) for x in (*mask.interval, *masks.block_map(mask, 8, 24, 8)))


def test_work_is_skipped_where_it_can_be():
    def visited(**arguments):
        needed, full = masks.block_map(masks.make_mask(64, 64, **arguments), 8, 64, 8)
        whole.append(int(full.sum()))
        first, stop = masks.visited_range(needed.any(axis=0))
        return (np.asarray(stop) - np.asarray(first)).tolist()

    whole = []

    assert visited() == [8] * 8
    assert visited(is_causal=True) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert visited(is_causal=True, window=(7, 0)) == [1] + [2] * 7
    assert visited(key_lengths=jnp.array([16])) == [2] * 8
    assert visited(query_lengths=jnp.array([16])) == [8, 8] + [0] * 6
    packed = jnp.repeat(jnp.array([0, 1, 2, -1]), 16)[None]
    assert visited(segments=(packed, packed)) == [2] * 6 + [0] * 2
    # Blocks that need no mask: all; below the diagonal; none of a window as wide as a block; and so on.
    assert whole == [64, 28, 0, 16, 16, 12]


def test_a_window_may_be_wider_than_any_integer_that_counts_keys():
    mask = masks.make_mask(64, 64, window=(3, 2**31 - 1))
    np.testing.assert_array_equal(mask.interval[1], 64)
