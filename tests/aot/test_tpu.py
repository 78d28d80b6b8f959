"""What the TPU's compiler takes, and how the kernel's operands lie in memory."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from gattn import aot, gated_dot_product_attention
from gattn.kernels import masks, reference, tpu


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_both(
    length=2048, key_length=None, heads=4, head_dim=128, gate=128, dtype=jnp.bfloat16, fused=None, chip="v5p", **more
):
    """Forward and backward of 2 kv heads, with whatever `more` adds to the call."""
    key_length = key_length or length
    query, key = struct(2, length, heads, head_dim, dtype=dtype), struct(2, key_length, 2, head_dim, dtype=dtype)
    inputs = reference.Inputs(query, key, key, gate=struct(2, length, heads, gate, dtype=dtype) if gate else None)
    if more.pop("sinks", False):
        inputs = inputs._replace(sinks=struct(heads, dtype=jnp.float32))
    options = reference.Options(scale=head_dim**-0.5, logits_soft_cap=more.pop("cap", None))
    lengths = struct(2, dtype=jnp.int32) if more.pop("lengths", False) else None
    ids = [struct(2, n, dtype=jnp.int32) for n in (length, key_length)] if more.pop("packed", False) else None
    vector = struct(2, length, heads, dtype=jnp.float32)

    def both(inputs, lengths, ids, lse, dout, delta):
        mask = masks.make_mask(
            length, key_length, key_lengths=lengths, segments=None if ids is None else tuple(ids), **more
        )
        grads = tpu.backward(inputs, mask, options, lse, dout, delta, fused=fused)
        return tpu.forward(inputs, mask, options), [x for x in grads if x is not None]

    return aot.compile_for(aot.tpu_devices(chip)[0], both, inputs, lengths, ids, vector, query, vector)


@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 80, "gate": 1, "is_causal": True},
        {"head_dim": 192, "gate": 192, "sinks": True},
        {"packed": True, "cap": 30.0, "sinks": True, "is_causal": True},
        {"lengths": True, "is_causal": True, "fused": False},
        {"length": 1000, "key_length": 1500, "is_causal": True, "query_offset": 500, "window": (300, 0)},
        {"dtype": jnp.float32, "is_causal": True},
        {"length": 8, "key_length": 8192, "lengths": True, "gate": 1},
        {"length": 3, "key_length": 8192, "lengths": True, "gate": 1, "chip": "v5e"},
        {"length": 8, "key_length": 4096, "lengths": True, "chip": "v6e"},
        {"length": 100, "key_length": 1500, "gate": 1, "is_causal": True, "query_offset": 1400, "chip": "v6e"},
        {"length": 32768, "gate": None, "is_causal": True},
    ],
    ids=["80", "192", "packed", "lengths", "ragged", "float32", "decode", "v5e", "v6e", "short", "32k"],
)
def test_it_compiles(case):
    text = compile_both(**case).as_text()
    assert "gattn_forward" in text
    assert "gattn_backward" in text


def test_log_sum_exps_are_not_padded():
    """One float32 number a row and head: a lane each, in tiles of one sublane."""
    text = compile_both().as_text()
    (lse,) = re.findall(r"%gattn_forward\S* = \(\S+ (f32\[\S+\]\{\S+\})", text)
    assert re.fullmatch(r"f32\[2,4,1,2048\]\{3,2,1,0:T\(1,128\).*\}", lse), lse


def test_a_model_copies_neither_queries_keys_values_nor_gates():
    """[B, T, N, H] of projections and rotations is written as the kernels read it."""

    def layer(x, weights, table):
        query, key, value, gate = (jnp.einsum("BTD,DNH->BTNH", x, w) for w in weights[:4])
        query, key = (jnp.roll(y, 32, axis=-1) * table for y in (query, key))
        attend = partial(gated_dot_product_attention, is_causal=True, implementation="tpu")
        return jnp.einsum("BTNH,NHD->BTD", attend(query, key, value, gate=gate), weights[4])

    weights = [struct(512, n, 128) for n in (4, 2, 2, 4)] + [struct(4, 128, 512)]
    compiled = aot.compile_for(
        aot.tpu_devices("v5p")[0], layer, struct(2, 2048, 512), weights, struct(2048, 1, 128)
    ).as_text()
    moved = re.findall(
        r"= bf16\[(2,(?:2048,[24]|[24],2048),128|2,2048,(?:512|256))\]\S* (?:copy|transpose)\(", compiled
    )
    assert not moved
