"""Probes: F-Attn from the log-sum-exp equals F-Attn from the map; floors, norms and histograms by definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gattn import model, probes
from gattn.config import GateSpec, ModelConfig
from gattn.kernels.api import attention_maps, gated_dot_product_attention
from gattn.layers import Context
from gattn.rope import rope_table
from gattn.train import add_sums

IDS = jnp.array([[0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5]])
MODEL = ModelConfig(vocab_size=300, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)


def test_queries_of_segments_and_padding():
    queries = probes.find_queries(IDS)
    assert queries.starts.tolist() == [[0, 0, 0, 0, 0, 5, 5, 5, 8, 9, 9, 9], [0] * 11 + [11]]
    assert queries.counted[0].tolist() == [False, *[True] * 4, False, True, True, False, False, True, True]
    padded = probes.find_queries(jnp.array([[3, 3, 3, -1, -1]]))
    assert padded.counted[0].tolist() == [False, True, True, False, False]
    assert float(probes.query_floor(padded)["floor"]) == pytest.approx(1 / 2 + 1 / 3)


@pytest.mark.parametrize("sinks", [None, jnp.array([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_first_token_attention_from_lse_equals_the_map(sinks, implementation):
    query = 2 * jax.random.normal(jax.random.key(0), (2, 12, 4, 8))
    key, value = 2 * jax.random.normal(jax.random.key(1), (2, 2, 12, 2, 8))
    options = {"is_causal": True, "segment_ids": IDS, "sinks": sinks}
    _, lse = gated_dot_product_attention(
        query, key, value, **options, implementation=implementation, return_residual=True
    )
    maps = attention_maps(query, key, **options)
    queries = probes.find_queries(IDS)
    starts = queries.starts
    expected = jnp.take_along_axis(maps, starts[:, None, :, None], axis=-1)[..., 0].transpose(0, 2, 1)
    ours = probes.first_token_attention(query, key, lse, starts, 8**-0.5)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)

    sums = probes.attention_sums(query, key, value, lse, sinks, queries, 8**-0.5)
    counted = np.asarray(queries.counted)
    np.testing.assert_allclose(sums["f_attn"], (expected * counted[..., None]).sum((0, 1)), rtol=1e-5)
    if sinks is not None:
        absorbed = (1 - maps.sum(-1)).transpose(0, 2, 1)
        np.testing.assert_allclose(sums["absorbed"], (absorbed * counted[..., None]).sum((0, 1)), rtol=1e-4)


def test_floor_is_what_uniform_attention_measures():
    """Zero queries attend uniformly; plain causal without the first query: (H_T - 1) / (T - 1)."""
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 12, 2, 8))
    for ids in (IDS, jnp.zeros((2, 12), jnp.int32)):
        query, queries = jnp.zeros((2, 12, 4, 8)), probes.find_queries(ids)
        _, lse = gated_dot_product_attention(query, key, value, is_causal=True, segment_ids=ids, return_residual=True)
        sums, floor = probes.attention_sums(query, key, value, lse, None, queries, 1.0), probes.query_floor(queries)
        np.testing.assert_allclose(sums["f_attn"], np.full(4, floor["floor"]), rtol=1e-5)
    harmonic = sum(1 / i for i in range(1, 13))
    assert float(floor["floor"] / floor["queries"]) == pytest.approx((harmonic - 1) / 11, rel=1e-5)


def test_hidden_state_measures():
    hidden = np.zeros((2, 5, 4), np.float32)
    hidden[0, 0, 2], hidden[0, 1:, 0] = -50.0, [1, 2, 3, 4]
    hidden[1, 0, 1], hidden[1, 1:, 3] = 3.0, [-10, 10, 2, 2]
    sums = probes.hidden_sums(jnp.array(hidden))
    assert float(sums["m_act"]) == 60.0
    assert float(sums["first_token_ratio"]) == 50 / 2.5 + 3 / 6


@pytest.mark.parametrize(("activation", "low", "high"), [("sigmoid", 0, 1), ("two_sigmoid", 0, 2), ("silu", -2, 2)])
def test_gate_measures(activation, low, high):
    values = np.random.default_rng(0).uniform(low, high, (3, 7, 4, 6)).astype(np.float32)
    sums = probes.gate_sums(jnp.array(values), activation)
    np.testing.assert_allclose(sums["by_head"] / 3, values.mean((0, 1, 3)), rtol=1e-5)
    np.testing.assert_allclose(sums["sparse"] / 3, (values < 0.1).mean(), rtol=1e-5)
    expected = np.histogram(values, probes.HISTOGRAM_BINS, (low, high))[0] / values.size
    np.testing.assert_allclose(sums["histogram"] / 3, expected, atol=2 / values.size)


def test_sums_of_batches_are_the_sums_of_their_union():
    spec = GateSpec("g1", "headwise"), GateSpec("g5")
    config = dataclasses.replace(MODEL, gates=spec, softmax="sink_logit")
    rng = np.random.default_rng(0)
    graph, shapes = model.abstract(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape), jnp.float32), shapes)
    tokens = jnp.asarray(rng.integers(0, 300, (2, 12)))

    @jax.jit
    def probe(tokens, ids):
        return nnx.merge(graph, params)(tokens, ids, probe=True)[1]

    whole = jax.device_get(probe(tokens, IDS))
    parts = add_sums(*(jax.device_get(probe(tokens[i : i + 1], IDS[i : i + 1])) for i in range(2)))
    activations = {gate.position: gate.activation for gate in spec}
    together, apart = probes.summarise(whole, activations), probes.summarise(parts, activations)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    np.testing.assert_allclose(flat(together), flat(apart), rtol=1e-4, atol=2e-6)
    assert np.shape(together["f_attn_by_head"]) == (3, 4)
    assert np.shape(together["gates"]["g5"]["mean_by_head"]) == (3, 1)
    np.testing.assert_allclose(whole["layers"]["map"], parts["layers"]["map"], rtol=1e-5)
    np.testing.assert_allclose(np.sum(together["gates"]["g1"]["histogram"]["shares"], axis=1), 1.0, rtol=1e-4)


def test_the_model_probes_what_it_computes():
    """M-Act after the whole block, gate values and value norms of the right layer: recomputed layer by layer."""
    config = dataclasses.replace(MODEL, gates=(GateSpec("g1"), GateSpec("g2", "headwise")), qk_norm=False)
    rng = np.random.default_rng(0)
    graph, shapes = model.abstract(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32), shapes)
    tokens = jnp.asarray(rng.integers(0, 300, (2, 12)))
    decoder = nnx.merge(graph, params)
    measured = probes.summarise(jax.device_get(decoder(tokens, probe=True)[1]), {"g1": "sigmoid", "g2": "sigmoid"})

    block_graph, stacked = nnx.split(decoder.blocks)
    hidden = decoder.embedding[...][tokens]
    context = Context(None, None, rope_table(12, config.head_dim, config.rope_theta))
    for layer in range(config.num_layers):
        block = nnx.merge(block_graph, jax.tree.map(lambda leaf, i=layer: leaf[i], stacked))
        x = block.attention_norm(hidden)
        hidden, _ = block(hidden, context)
        gates = {
            p: jax.nn.sigmoid(jnp.einsum("btd,dnh->btnh", x, g.kernel[...])) for p, g in block.attention.gates.items()
        }
        value = gates["g2"] * jnp.einsum("btd,dnh->btnh", x, block.attention.value.kernel[...])
        norms = jnp.linalg.norm(value, axis=-1).mean(axis=-1)
        expected = {
            "m_act_by_layer": jnp.abs(hidden).max(axis=(1, 2)).mean(),
            "value_norm_first_by_layer": norms[:, 0].mean(),
            "value_norm_ratio_by_layer": (norms[:, 0] / jnp.median(norms[:, 1:], axis=1)).mean(),
        }
        for name, number in expected.items():
            assert measured[name][layer] == pytest.approx(float(number), rel=1e-3), name
        for position, values in gates.items():
            by_head = measured["gates"][position]["mean_by_head"][layer]
            np.testing.assert_allclose(by_head, values.mean(axis=(0, 1, 3)), rtol=1e-3)


def test_sink_rate_counts_heads_above_the_threshold():
    layers = {name: np.ones(2) for name in ("m_act", "first_token_ratio", "value_norm_ratio", "value_norm_first")}
    layers |= {"f_attn": np.array([[31.0, 29.0], [90.0, 1.0]]), "gates": {}}
    measured = probes.summarise({"floor": 5.0, "queries": 100.0, "sequences": 1.0, "layers": layers}, {})
    assert measured["sink_rate"] == 0.5
    assert measured["f_attn"] == pytest.approx(np.mean([0.31, 0.29, 0.9, 0.01]))
    assert measured["f_attn_floor"] == 0.05
