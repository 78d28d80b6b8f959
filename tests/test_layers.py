"""Switch heads: what a kv head sums over, and how they relate to gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gattn.config import GateSpec, ModelConfig, override
from gattn.layers import Attention, Context

MODEL = ModelConfig(
    vocab_size=65, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=16, match_params=False
)
CONTEXT = Context(None, None, None)


def switched(heads, top_k, *, keys=False):
    config = override(MODEL, {"switch_heads": heads, "switch_top_k": top_k, "switch_keys": keys})
    return Attention(config, nnx.Rngs(params=1))


def hidden(tokens=6):
    return jax.random.normal(jax.random.key(0), (2, tokens, MODEL.d_model))


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(("heads", "top_k"), [(1, 1), (4, 4), (8, 2)])
def test_a_kv_head_sums_the_projections_its_router_chose(heads, top_k, keys):
    layer, x = switched(heads, top_k, keys=keys), hidden()
    _, key, value, _ = layer.projections(x)
    x = np.asarray(x, np.float64)
    scores = 1 / (1 + np.exp(-np.einsum("btd,dke->btke", x, layer.switch.kernel[...])))
    for found, kernel, is_switched in ((value, layer.value, True), (key, layer.key, keys)):
        if not is_switched:
            assert found.shape == (2, 6, 2, 8)
            continue
        for b, t, k in np.ndindex(*found.shape[:3]):
            chosen = np.argsort(-scores[b, t, k])[:top_k]
            expected = sum(scores[b, t, k, e] * (x[b, t] @ kernel.kernel[...][:, k, e]) for e in chosen)
            np.testing.assert_allclose(found[b, t, k], expected, rtol=1e-5, atol=1e-6)


def test_one_choice_is_the_headwise_value_gate():
    """The paper's Table 6, row 6: the same function of the same numbers, and the same gradients."""
    switch = switched(1, 1)
    gate = Attention(override(MODEL, {"gates": (GateSpec("g2", "headwise"),)}), nnx.Rngs(params=2))
    for name in ("query", "key", "out"):
        getattr(gate, name).kernel = nnx.Param(getattr(switch, name).kernel[...])
    gate.value.kernel = nnx.Param(switch.value.kernel[...][:, :, 0])
    gate.gates["g2"].kernel = nnx.Param(switch.switch.kernel[...])

    def taken(layer):
        def loss(layer, x):
            return jnp.sum(jnp.sin(3 * layer(x, CONTEXT)[0]))

        return nnx.grad(loss, argnums=(0, 1))(layer, hidden())

    (switch_grads, dx), (gate_grads, expected) = taken(switch), taken(gate)
    np.testing.assert_allclose(switch(hidden(), CONTEXT)[0], gate(hidden(), CONTEXT)[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-6)
    router = switch_grads["switch"]["kernel"][...], gate_grads["gates"]["g2"]["kernel"][...]
    np.testing.assert_allclose(*router, rtol=1e-4, atol=1e-6)
    value = switch_grads["value"]["kernel"][...][:, :, 0], gate_grads["value"]["kernel"][...]
    np.testing.assert_allclose(*value, rtol=1e-4, atol=1e-6)


def test_switches_depend_on_their_token():
    """What one token's router chooses does not change another's value."""
    layer, x = switched(4, 2), hidden()
    _, _, value, _ = layer.projections(x)
    _, _, changed, _ = layer.projections(x.at[:, 3].add(1.0))
    others = np.arange(6) != 3
    np.testing.assert_array_equal(value[:, others], changed[:, others])
    assert not np.allclose(value[:, 3], changed[:, 3])
