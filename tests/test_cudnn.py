"""cuDNN's path, which runs on NVIDIA GPUs only: what it refuses, and what it hands to jax.nn.

Here jax.nn computes with XLA what it would hand to cuDNN, which by its contract means the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn import choose_implementation, gated_dot_product_attention
from gattn.kernels import cudnn
from tests.attention import assert_close, attend, normal, qkv, quick

WHOLE = jax.nn.dot_product_attention


@pytest.fixture
def xla_for_cudnn(monkeypatch):
    asked = []

    def stand_in(*arrays, implementation, **arguments):
        asked.append(implementation)
        # All that cuDNN has of windows.
        assert arguments["local_window_size"] is None or (
            arguments["is_causal"] and not arguments["local_window_size"][1]
        )
        return WHOLE(*arrays, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    yield
    assert set(asked) == {"cudnn"}


CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "causal window": {"is_causal": True, "local_window_size": (7, 2)},
    "window that does not look ahead": {"local_window_size": (7, 0)},
    "lengths": {"query_seq_lengths": np.array([40, 13]), "key_value_seq_lengths": np.array([0, 21])},
    "causal, lengths": {"is_causal": True, "key_value_seq_lengths": np.array([33, 9])},
    "headwise": {"gate": normal(4, 2, 40, 4, 1, dtype=jnp.bfloat16), "gate_activation": "ns_sigmoid"},
}


@pytest.mark.usefixtures("xla_for_cudnn")
@pytest.mark.parametrize("name", CALLS)
def test_means_what_the_reference_means(name):
    arguments = qkv(dtype=jnp.bfloat16) | {"gate": normal(4, 2, 40, 4, 8, dtype=jnp.bfloat16)} | CALLS[name]
    exact = {
        x: y.astype(jnp.float32) if hasattr(y, "dtype") and y.dtype == jnp.bfloat16 else y for x, y in arguments.items()
    }
    got, expected = attend(arguments, "cudnn"), attend(exact, "reference")
    assert got["out"].dtype == jnp.bfloat16
    assert got["lse"].dtype == jnp.float32
    assert_close({"lse": got.pop("lse")}, {"lse": expected.pop("lse")}, 2e-6)
    assert_close(got, expected, 2e-2)


@pytest.mark.usefixtures("xla_for_cudnn")
def test_the_log_sum_exp_costs_nothing_where_it_is_not_used():
    """jax.nn would round it to the output's dtype; computing it takes a loop over the keys."""
    arguments = qkv(batch=1, length=520, key_length=520, heads=1, kv_heads=1, dtype=jnp.bfloat16)

    def loops(uses_lse):
        def loss(arrays):
            out, lse = gated_dot_product_attention(**arrays, implementation="cudnn", return_residual=True)
            return out.sum(dtype=jnp.float32) + (lse.sum() if uses_lse else 0.0)

        compiled = quick(jax.grad(loss)).lower(arguments).compile().as_text()
        return compiled.count(" while(")

    assert loops(uses_lse=True) > 0
    assert loops(uses_lse=False) == 0


BFLOAT16 = qkv(dtype=jnp.bfloat16)
REFUSED = [
    ("query", qkv()),
    ("head_dim", qkv(head_dim=12, dtype=jnp.bfloat16)),
    ("head_dim", qkv(head_dim=264, dtype=jnp.bfloat16)),
    ("bias", BFLOAT16 | {"bias": normal(4, 1, 1, 40, 40)}),
    ("mask", BFLOAT16 | {"mask": np.ones((1, 1, 40, 40), bool)}),
    ("segment_ids", BFLOAT16 | {"segment_ids": np.zeros((2, 40), int)}),
    ("query_offset", BFLOAT16 | {"query_offset": 3}),
    ("sinks", BFLOAT16 | {"sinks": jnp.zeros(4)}),
    ("alibi_slopes", BFLOAT16 | {"alibi_slopes": jnp.zeros(4)}),
    ("logits_soft_cap", BFLOAT16 | {"logits_soft_cap": 5.0}),
    ("local_window_size", BFLOAT16 | {"local_window_size": (3, 1)}),
    ("local_window_size", BFLOAT16 | {"local_window_size": (3, 0), "query_seq_lengths": np.array([3, 4])}),
    ("local_window_size", qkv(length=45, dtype=jnp.bfloat16) | {"local_window_size": (4, 0)}),
]


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_what_cudnn_cannot_do_is_named(name, arguments):
    with pytest.raises(ValueError, match=f"cudnn.*{name}"):
        gated_dot_product_attention(**arguments, implementation="cudnn")
    with pytest.raises(ValueError, match=name):
        choose_implementation(**arguments, implementation="cudnn")


def test_head_dims_of_the_device():
    """256 on Hopper and later, 128 on Ampere; jax's own limits."""

    class Device:
        compute_capability: str

    def largest(capability):
        with pytest.MonkeyPatch.context() as patch:
            Device.compute_capability = capability
            patch.setattr(jax, "devices", lambda: [Device()])
            return cudnn._largest_head_dim()

    assert [largest(x) for x in ("7.5", "8.0", "9.0", "10.0", "gfx942")] == [0, 128, 256, 256, 0]
