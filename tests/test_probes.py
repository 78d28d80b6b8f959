"""Probes: F-Attn from the log-sum-exp equals F-Attn from the map; floors, norms and histograms by definition."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.variants import VARIANTS
from gattn import layers, model, probes
from gattn.config import GateSpec, ModelConfig
from gattn.kernels.api import attention_maps, gated_dot_product_attention
from gattn.layers import Context
from gattn.probes import add
from gattn.rope import rope_table

IDS = jnp.array([[0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5]])
SLOPES = jnp.array([0.5, 0.25, 0.125, 2.0])
MODEL = ModelConfig(vocab_size=300, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)
FITTING = [name for name in VARIANTS if not name.startswith("switch")]


def test_queries_of_segments_and_padding():
    queries = probes.find_queries(IDS)
    assert queries.starts.tolist() == [[0, 0, 0, 0, 0, 5, 5, 5, 8, 9, 9, 9], [0] * 11 + [11]]
    assert queries.counted[0].tolist() == [False, *[True] * 4, False, True, True, False, False, True, True]
    padded = probes.find_queries(jnp.array([[3, 3, 3, -1, -1]]))
    assert padded.counted[0].tolist() == [False, True, True, False, False]
    assert float(probes.query_floor(padded)["floor"]) == pytest.approx(1 / 2 + 1 / 3)


@pytest.mark.parametrize("sinks", [None, jnp.array([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize(("window", "slopes"), [(0, None), (3, None), (0, SLOPES), (2, SLOPES)])
def test_first_token_attention_from_lse_equals_the_map(sinks, implementation, window, slopes):
    query = 2 * jax.random.normal(jax.random.key(0), (2, 12, 4, 8))
    key, value = 2 * jax.random.normal(jax.random.key(1), (2, 2, 12, 2, 8))
    options = {"is_causal": True, "segment_ids": IDS, "sinks": sinks, "alibi_slopes": slopes}
    options["local_window_size"] = (window - 1, 0) if window else None
    _, lse = gated_dot_product_attention(
        query, key, value, **options, implementation=implementation, return_residual=True
    )
    maps = attention_maps(query, key, **options)
    queries = probes.find_queries(IDS, window)
    expected = jnp.take_along_axis(maps, queries.starts[:, None, :, None], axis=-1)[..., 0].transpose(0, 2, 1)
    ours = probes.first_token_attention(query, key, lse, queries, 8**-0.5, slopes)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)

    sums = probes.attention_sums(query, key, value, lse, sinks, queries, 8**-0.5, slopes)
    counted = np.asarray(queries.counted)
    np.testing.assert_allclose(sums["f_attn"], (expected * counted[..., None]).sum((0, 1)), rtol=1e-5)
    if sinks is not None:
        absorbed = (1 - maps.sum(-1)).transpose(0, 2, 1)
        np.testing.assert_allclose(sums["absorbed"], (absorbed * counted[..., None]).sum((0, 1)), rtol=1e-4)


def test_floor_is_what_uniform_attention_measures():
    """Zero queries attend uniformly; plain causal without the first query: (H_T - 1) / (T - 1)."""
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 12, 2, 8))
    for window, ids in itertools.product((3, 0), (IDS, jnp.zeros((2, 12), jnp.int32))):
        query, queries = jnp.zeros((2, 12, 4, 8)), probes.find_queries(ids, window)
        options = {"is_causal": True, "local_window_size": (window - 1, 0) if window else None, "segment_ids": ids}
        _, lse = gated_dot_product_attention(query, key, value, **options, return_residual=True)
        sums, floor = probes.attention_sums(query, key, value, lse, None, queries, 1.0), probes.query_floor(queries)
        np.testing.assert_allclose(sums["f_attn"], np.full(4, floor["floor"]), rtol=1e-5)
    harmonic = sum(1 / i for i in range(1, 13))
    assert float(floor["floor"] / floor["queries"]) == pytest.approx((harmonic - 1) / 11, rel=1e-5)


def test_padding_is_no_query_no_token_and_no_sequence():
    queries = probes.find_queries(jnp.array([[3, 3, 3, -1, -1], [1, -1, -1, -1, -1], [-1] * 5]))
    sums = {name: float(value) for name, value in probes.query_floor(queries).items()}
    assert sums == {"floor": pytest.approx(5 / 6), "queries": 2, "tokens": 4, "sequences": 2, "longer_sequences": 1}


def test_hidden_state_measures():
    hidden = np.zeros((2, 5, 4), np.float32)
    hidden[0, 0, 2], hidden[0, 1:, 0] = -50.0, [1, 2, 3, 4]
    hidden[1, 0, 1], hidden[1, 1:, 3] = 3.0, [-10, 10, 2, 2]
    everything = jnp.ones((2, 5), bool)
    sums = probes.hidden_sums(jnp.array(hidden), everything)
    assert float(sums["m_act"]) == 60.0
    assert float(sums["first_token_ratio"]) == 50 / 2.5 + 3 / 6
    padded = probes.hidden_sums(jnp.array(hidden), everything.at[0, 3:].set(False).at[1, 1:].set(False))
    assert float(padded["m_act"]) == 53.0
    assert float(padded["first_token_ratio"]) == pytest.approx(50 / 1.5), "a sequence of one token has no others"


def test_kurtosis_of_each_tokens_channels():
    rng = np.random.default_rng(0)
    hidden = (rng.standard_t(5, (2, 5, 64)) + 3).astype(np.float32)
    hidden[0, 2], hidden[1, 0, 7], hidden[1, 4] = 5.0, 1e12, 1e-12 * hidden[1, 4]
    apart = hidden.astype(np.float64) - hidden.mean(-1, keepdims=True, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num((apart**4).mean(-1) / (apart**2).mean(-1) ** 2, nan=0.0)  # all channels equal: 0
    assert expected[1, 0] == pytest.approx(64, rel=0.05)
    tokens = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]], bool)
    sums = probes.hidden_sums(jnp.array(hidden), jnp.array(tokens))
    np.testing.assert_allclose(sums["kurtosis"], expected[tokens].sum(), rtol=1e-4)


@pytest.mark.parametrize(("activation", "low", "high"), [("sigmoid", 0, 1), ("two_sigmoid", 0, 2), ("silu", -2, 2)])
def test_gate_measures(activation, low, high):
    values = np.random.default_rng(0).uniform(low, high, (3, 7, 4, 6)).astype(np.float32)
    tokens = np.arange(7) < np.array([7, 4, 0])[:, None]
    sums, counted = probes.gate_sums(jnp.array(values), activation, jnp.array(tokens)), values[tokens]
    np.testing.assert_allclose(sums["by_head"] / 11, counted.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(sums["sparse"] / 11, (counted < 0.1).mean(), rtol=1e-5)
    expected = np.histogram(counted, probes.HISTOGRAM_BINS, (low, high))[0] / counted.size
    np.testing.assert_allclose(sums["histogram"] / 11, expected, atol=2 / counted.size)


def sdpa_by_hand(block, x, context):
    """What the g1 gate gets, what it makes of it, and its mean score; the projections are multiplied by hand."""
    attention, config = block.attention, block.model
    gates = {spec.position: spec for spec in config.gates}
    project = lambda kernel: np.einsum("btd,d...->bt...", x, np.asarray(kernel, np.float64))  # noqa: E731
    sigmoid = lambda s: 1 / (1 + np.exp(-s))  # noqa: E731
    activate = {
        "sigmoid": sigmoid,
        "ns_sigmoid": lambda s: 0.5 + 0.5 * sigmoid(s),
        "two_sigmoid": lambda s: 2 * sigmoid(s),
        "silu": lambda s: s * sigmoid(s),
        "identity": lambda s: s,
    }

    def gated(position, y):
        if position not in gates:
            return y, None
        spec, gate = gates[position], attention.gates[position]
        independent = spec.source == "independent"
        score = activate[spec.activation](np.asarray(gate.score[...]) if independent else project(gate.kernel[...]))
        score = np.broadcast_to(score, (*x.shape[:2], *score.shape[-2:]))
        score = score.mean(axis=2, keepdims=True) if spec.sharing == "shared" else score
        return (y * score if spec.op == "multiply" else y + score), score

    query, key, value = (
        gated(position, project(getattr(attention, name).kernel[...]))[0]
        for position, name in (("g4", "query"), ("g3", "key"), ("g2", "value"))
    )
    query, key = (layers.rms_norm(jnp.asarray(y), None, config.norm_eps) for y in (query, key))
    query, key = (layers.apply_rope(y.astype(jnp.float32), *context.rope) for y in (query, key))
    options = {"is_causal": True, "segment_ids": context.segment_ids, "sinks": attention.sinks()}
    maps = np.asarray(attention_maps(query, key, **options), np.float64)
    before = np.einsum("bnts,bsnh->btnh", maps, np.repeat(value, config.num_heads // config.num_kv_heads, axis=2))
    if config.sdpa_transform == "rmsnorm":
        before = before / np.sqrt((before**2).mean(-1, keepdims=True) + config.norm_eps)
    elif config.sdpa_transform == "silu":
        before = before * sigmoid(before)
    return before, *gated("g1", before)


@pytest.mark.parametrize("name", FITTING)
def test_sdpa_output_before_and_after_the_gate(name):
    """For every variant, padding left out, and over two batches of which one is half padding."""
    config = dataclasses.replace(MODEL, num_layers=1, **VARIANTS[name])
    graph, shapes = model.abstract(config)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        scale = 0.01 if "value" in str(path) else 0.1
        drawn = 1.0 if "norm" in str(path) else scale * rng.standard_normal(leaf.shape)
        return jnp.full(leaf.shape, drawn, jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    tokens, ids = jnp.asarray(rng.integers(0, 300, (4, 12))), jnp.concatenate([IDS, IDS]).at[0, 7:].set(-1)
    ids = ids.at[3].set(-1)
    decoder = nnx.merge(graph, params)
    probe = jax.jit(lambda params, t, i: nnx.merge(graph, params)(t, i, probe=True)[1])
    sums = add(*(jax.device_get(probe(params, tokens[p], ids[p])) for p in (slice(0, 2), slice(2, 4))))
    activations = {spec.position: spec.activation for spec in config.gates}
    measured = probes.summarise(sums, activations)["sdpa"]

    block_graph, stacked = nnx.split(decoder.blocks)
    block = nnx.merge(block_graph, jax.tree.map(lambda leaf: leaf[0], stacked))
    x = np.asarray(block.attention_norm(decoder.embedding[...][tokens]), np.float64)
    context = Context(ids, None, rope_table(12, config.head_dim, config.rope_theta))
    before, after, score = sdpa_by_hand(block, x, context)
    expected = {"before": (before, 1.0), "after": (after, 1.0)}
    multiplies = any(spec.position == "g1" and spec.op == "multiply" for spec in config.gates)
    if multiplies:
        expected["before_times_mean_score"] = before, abs(score[np.asarray(ids) >= 0].mean())
    assert (measured["before_times_mean_score"] is None) == (not multiplies)
    for key, (output, factor) in expected.items():
        size = np.abs(output[np.asarray(ids) >= 0]) * factor
        assert measured[key]["mean_abs_by_layer"][0] == pytest.approx(size.mean(), rel=1e-3)
        # Of what is multiplied by the mean score, only the bin of log10 |y| is known: a 40th of a decade.
        slack = 10 ** (1 / probes.MAGNITUDES_PER_DECADE) if factor != 1.0 else 1 + 1e-4
        for limit, share in ((1e-2, "below_1e-2_by_layer"), (1e-3, "below_1e-3_by_layer")):
            low, high = (size < limit / slack).mean(), (size < limit * slack).mean()
            assert low - 1e-6 <= measured[key][share][0] <= high + 1e-6, (key, share)
        assert (size < 1e-2).mean() > 0.01 or key != "before" or config.sdpa_transform == "rmsnorm"


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
    parts = add(*(jax.device_get(probe(tokens[i : i + 1], IDS[i : i + 1])) for i in range(2)))
    activations = {gate.position: gate.activation for gate in spec}
    together, apart = probes.summarise(whole, activations), probes.summarise(parts, activations)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    np.testing.assert_allclose(flat(together), flat(apart), rtol=1e-4, atol=2e-6)
    assert np.shape(together["f_attn_by_head"]) == (3, 4)
    assert np.shape(together["gates"]["g5"]["mean_by_head"]) == (3, 1)
    assert whole["layers"]["map"].shape == (3, 4, 12, 12)
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
            "kurtosis_by_layer": (
                ((hidden - hidden.mean(-1, keepdims=True)) / hidden.std(-1, keepdims=True)) ** 4
            ).mean(),
            "first_token_ratio_by_layer": _first_to_others(jnp.abs(hidden).max(axis=-1)),
            "value_norm_first_by_layer": norms[:, 0].mean(),
            "value_norm_ratio_by_layer": _first_to_others(norms),
        }
        for name, number in expected.items():
            assert measured[name][layer] == pytest.approx(float(number), rel=1e-3), name
        for position, values in gates.items():
            by_head = measured["gates"][position]["mean_by_head"][layer]
            np.testing.assert_allclose(by_head, values.mean(axis=(0, 1, 3)), rtol=1e-3)


def _first_to_others(per_token):
    return (per_token[:, 0] / jnp.median(per_token[:, 1:], axis=1)).mean()


def test_sink_rate_counts_heads_above_the_threshold():
    names = ("m_act", "kurtosis", "first_token_ratio", "value_norm_ratio", "value_norm_first")
    sdpa = {name: {k: np.ones(2) for k in ("mean_abs", *probes.SDPA_THRESHOLDS)} for name in ("before", "after")}
    by_head = np.array([[31.0, 29.0], [90.0, 95.0]])
    sums = {"layers": {name: np.ones(2) for name in names} | {"f_attn": by_head, "gates": {}, "sdpa": sdpa}}
    counts = {"queries": 100.0, "tokens": 101.0, "sequences": 1.0, "longer_sequences": 1.0}
    measured = probes.summarise({"floor": 5.0, **counts, **sums}, {})
    assert measured["sink_rate"] == 0.75
    assert measured["sink_rate_by_layer"] == [0.5, 1.0]
    assert measured["f_attn"] == pytest.approx(np.mean([0.31, 0.29, 0.9, 0.95]))
    assert measured["f_attn_floor"] == 0.05
