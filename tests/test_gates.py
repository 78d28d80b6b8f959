"""Gates: every variant equals its equation written in NumPy, depends on its input, and can be made to vanish."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.variants import VARIANTS
from gattn import gates, layers
from gattn import model as decoder
from gattn.config import GateSpec, ModelConfig
from gattn.rope import rope_table

MODEL = ModelConfig(vocab_size=300, num_layers=1, d_model=24, num_heads=4, num_kv_heads=2, head_dim=6, ffn_dim=64)
EXTRA = {
    "g1+g2": {"gates": (GateSpec("g1", "headwise"), GateSpec("g2"))},
    "all five": {"gates": tuple(GateSpec(p) for p in ("g1", "g2", "g3", "g4", "g5"))},
    "two_sigmoid with bias": {"gates": (GateSpec("g1", activation="two_sigmoid", bias=True, bias_init=0.7),)},
    "shared ns headwise": {"gates": (GateSpec("g1", "headwise", "shared", activation="ns_sigmoid"),)},
    "g3 additive shared": {"gates": (GateSpec("g3", sharing="shared", op="add", activation="silu"),)},
    "gate over rmsnorm": {"gates": (GateSpec("g1"),), "sdpa_transform": "rmsnorm"},
    "independent g2": {"gates": (GateSpec("g2", source="independent"),)},
    "no qk_norm": {"gates": (GateSpec("g1"), GateSpec("g4")), "qk_norm": False},
    "no rope": {"gates": (GateSpec("g1", "headwise"),), "qk_norm": False, "position": "learned"},
    "headwise sink": {"gates": (GateSpec("g1", "headwise"),), "softmax": "sink_logit"},
}
CASES = VARIANTS | EXTRA


def attention(fields):
    """A module with random parameters (gains, sinks and independent scores too), and an input."""
    model = dataclasses.replace(MODEL, **fields)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: layers.Attention(model, nnx.Rngs(params=0))))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32), shapes)
    return model, graph, state, jnp.asarray(rng.standard_normal((2, 7, model.d_model)), jnp.float32)


def context(model, segment_ids=None, starts=None):
    rope = rope_table(7, model.head_dim, model.rope_theta) if model.position == "rope" else None
    return layers.Context(segment_ids, starts, rope)


def run(graph, state, x, model):
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x, context(model))[0])(state, x)


# ---- the paper's equations, in NumPy, one token and one head at a time ---------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "sigmoid": sigmoid,
    "ns_sigmoid": lambda x: (1 + sigmoid(x)) / 2,
    "two_sigmoid": lambda x: 2 * sigmoid(x),
    "silu": lambda x: x * sigmoid(x),
    "identity": lambda x: x,
}


def norm(x, gain=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_eps) * gain


def gated_numpy(model, p, position, y, x):
    """y: [heads, width] of one token (g5: [D]); x: [D]."""
    for spec in model.gates:
        if spec.position == position:
            weights = p["gates"][position]
            if spec.source == "independent":
                score = weights["score"]
            else:
                score = np.einsum("d,d...->...", x, weights["kernel"]) + weights.get("bias", 0.0)
            value = ACTIVATIONS[spec.activation](score)
            if spec.sharing == "shared":
                value = value.mean(axis=0)
            y = y * value if spec.op == "multiply" else y + value
    return y


def rotate(vector, position):
    half = len(vector) // 2
    out = np.empty_like(vector)
    for i in range(half):
        angle = position * MODEL.rope_theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def switched_numpy(model, p, name, x):
    """One token's heads: with switch heads the sum over the best choices of each, weighted by their sigmoid scores."""
    heads = np.tensordot(x, p[name]["kernel"], 1)
    if heads.ndim == 2:
        return heads
    scores = sigmoid(np.tensordot(x, p["switch"]["kernel"], 1))
    best = np.argsort(-scores)[:, : model.switch_top_k]
    return np.array([sum(scores[k, e] * heads[k, e] for e in best[k]) for k in range(len(heads))])


def attention_numpy(model, p, x):
    """x: [T, D] float64 of one sequence."""
    q, k, v = [], [], []
    for t, token in enumerate(x):
        heads = {n: switched_numpy(model, p, n, token) for n in ("query", "key", "value")}
        query = gated_numpy(model, p, "g4", heads["query"], token)
        key = gated_numpy(model, p, "g3", heads["key"], token)
        if model.qk_norm:
            query, key = norm(query, p["query_norm"]["gain"]), norm(key, p["key_norm"]["gain"])
        place = t if model.position == "rope" else 0
        q.append([rotate(head, place) for head in query])
        k.append([rotate(head, place) for head in key])
        v.append(gated_numpy(model, p, "g2", heads["value"], token))
    outputs = []
    for t, token in enumerate(x):
        heads = []
        for n in range(model.num_heads):
            kv = n // (model.num_heads // model.num_kv_heads)
            weights = np.exp([q[t][n] @ k[s][kv] / np.sqrt(model.head_dim) for s in range(t + 1)])
            extra = {"standard": 0.0, "off_by_one": 1.0, "sink_logit": np.exp(p["sink"][n]) if "sink" in p else 0.0}
            weights = weights / (weights.sum() + extra[model.softmax])
            heads.append(sum(w * v[s][kv] for s, w in enumerate(weights)))
        heads = np.array(heads)
        if model.sdpa_transform == "rmsnorm":
            heads = norm(heads)
        elif model.sdpa_transform == "silu":
            heads = heads * sigmoid(heads)
        heads = gated_numpy(model, p, "g1", heads, token)
        outputs.append(gated_numpy(model, p, "g5", heads.reshape(-1) @ p["out"]["kernel"], token))
    return np.array(outputs)


def silu(x):
    return x * sigmoid(x)


@pytest.mark.parametrize(("sandwich", "limit"), [(False, 0.0), (True, 0.0), (False, 0.5), (True, 0.5)])
def test_decoder_equals_its_equation_in_numpy(sandwich, limit):
    """Embedding, learned positions, blocks, SwiGLU, sandwich norm, clipped outputs, final norm and untied output."""
    model = dataclasses.replace(
        MODEL,
        num_layers=2,
        position="learned",
        max_seq_len=9,
        tied_embeddings=False,
        sandwich_norm=sandwich,
        clip_outputs=limit,
        gates=(GateSpec("g1", "headwise"),),
    )
    graph, shapes = decoder.abstract(model)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32), shapes)
    tokens = rng.integers(0, 300, 7)
    module = nnx.merge(graph, state)
    logits = module.logits(module(jnp.asarray(tokens[None]))[0])[0]

    def clip(y):
        assert np.abs(y).max() > limit  # or nothing would be clipped
        return np.clip(y, -limit, limit) if limit else y

    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))
    h = params["embedding"][tokens] + params["positions"][:7]
    for i in range(2):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        y = attention_numpy(model, p["attention"], norm(h, p["attention_norm"]["gain"]))
        h = h + clip(norm(y, p["attention_out_norm"]["gain"]) if sandwich else y)
        x = norm(h, p["mlp_norm"]["gain"])
        y = (silu(x @ p["mlp"]["gate"]["kernel"]) * (x @ p["mlp"]["up"]["kernel"])) @ p["mlp"]["down"]["kernel"]
        h = h + clip(norm(y, p["mlp_out_norm"]["gain"]) if sandwich else y)
    expected = norm(h, params["final_norm"]["gain"]) @ params["output"]
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_equation_in_numpy(name):
    model, graph, state, x = attention(CASES[name])
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))
    expected = np.array([attention_numpy(model, params, np.asarray(seq, np.float64)) for seq in x])
    np.testing.assert_allclose(run(graph, state, x, model), expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", [n for n, fields in CASES.items() if fields.get("gates")])
def test_every_score_depends_on_its_token_and_on_nothing_else(name):
    """Except the input-independent gate's: a gate that ignores its input is the commonest silent mistake."""
    model, graph, state, x = attention(CASES[name])
    module = nnx.merge(graph, state)
    for spec in model.gates:
        values = lambda x, spec=spec: gates.activate(spec, module.projections(x)[3][spec.position])  # noqa: E731
        jacobian = jax.jacobian(lambda x: values(x).reshape(2, 7, -1))(x)  # noqa: B023 - used at once
        strength = jnp.abs(jacobian).max(axis=-1)  # [B, T, scores, B, T]
        same = jnp.eye(14).reshape(2, 7, 1, 2, 7).astype(bool)
        assert float(jnp.where(same, 0.0, strength).max()) == 0.0
        per_score = jnp.where(same, strength, 0.0).max(axis=(3, 4))
        if spec.source == "independent":
            assert float(per_score.max()) == 0.0
        else:
            assert float(per_score.min()) > 0.0


@pytest.mark.parametrize("position", ["g1", "g2", "g3", "g4", "g5"])
@pytest.mark.parametrize("activation", ["sigmoid", "ns_sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("sharing", ["specific", "shared"])
def test_a_multiplicative_gate_whose_scores_are_one_is_no_gate(position, activation, sharing):
    if position == "g5" and sharing == "shared":
        return
    bias = 0.0 if activation == "two_sigmoid" else 60.0
    spec = GateSpec(position, sharing=sharing, activation=activation, bias=True, bias_init=bias, init_scale=0.0)
    model = dataclasses.replace(MODEL, gates=(spec,))
    gated = layers.Attention(model, nnx.Rngs(params=0))
    plain = layers.Attention(MODEL, nnx.Rngs(params=0))
    for name in ("query", "key", "value", "out"):
        getattr(plain, name).kernel[...] = getattr(gated, name).kernel[...]
    x = jax.random.normal(jax.random.key(2), (2, 7, MODEL.d_model))
    np.testing.assert_allclose(gated(x, context(MODEL))[0], plain(x, context(MODEL))[0], rtol=1e-6, atol=1e-8)


def test_a_shared_score_is_the_mean_of_activated_scores():
    spec = GateSpec(sharing="shared")
    scores = jnp.array([[-4.0], [0.0], [4.0], [8.0]]).reshape(1, 1, 4, 1)
    expected = np.mean(sigmoid(np.array([-4.0, 0.0, 4.0, 8.0])))
    assert float(gates.activate(spec, scores)[0, 0, 0, 0]) == pytest.approx(expected, rel=1e-6)


def test_initial_values_are_as_specified():
    model = dataclasses.replace(MODEL, d_model=256)
    weights = gates.Gate(GateSpec(init_scale=3.0, bias=True, bias_init=-2.0), model, nnx.Rngs(params=0))
    assert float(weights.kernel[...].std()) == pytest.approx(3.0 * model.init_std, rel=0.03)
    assert set(np.unique(weights.bias[...])) == {-2.0}
    independent = gates.Gate(GateSpec(source="independent"), model, nnx.Rngs(params=0))
    assert not np.any(independent.score[...])


def test_additive_gate_at_zero_score_changes_nothing():
    spec = GateSpec(op="add", activation="silu")
    y = jax.random.normal(jax.random.key(0), (1, 2, 4, 6))
    assert jnp.array_equal(gates.apply(spec, y, jnp.zeros((1, 2, 4, 6))), y)
