"""The decoder: causality, documents, scan, remat, counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.variants import VARIANTS
from gattn import model
from gattn.config import GateSpec, ModelConfig, override
from gattn.loss import cross_entropy

SMALL = ModelConfig(vocab_size=300, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)
SHAPES = {
    "learned positions": {"position": "learned", "max_seq_len": 16},
    "sandwich": {"sandwich_norm": True},
    "untied, no qk_norm": {"tied_embeddings": False, "qk_norm": False},
    "chunked": {"attention": "chunked"},
    "bfloat16": {"dtype": "bfloat16"},
}


def decoder(fields):
    """A decoder's config, and random parameters (gains, sinks and independent gates too)."""
    config = dataclasses.replace(SMALL, **fields)
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(0.2 * rng.standard_normal(shape.shape), jnp.float32)  # noqa: E731
    return config, jax.tree.map(draw, model.abstract(config)[1])


def forward(config, params, tokens, segment_ids=None, **options):
    return nnx.merge(model.abstract(config)[0], params)(tokens, segment_ids, **options)


def hidden_fn(config):
    return jax.jit(lambda params, tokens, ids=None: forward(config, params, tokens, ids)[0])


TOKENS = jax.random.randint(jax.random.key(3), (2, 12), 0, 300)


@pytest.mark.parametrize("name", VARIANTS | SHAPES)
def test_causality(name):
    """A later token changes nothing before it, bit for bit, and something at and after it."""
    config, params = decoder((VARIANTS | SHAPES)[name])
    run = hidden_fn(config)
    before, after = run(params, TOKENS), run(params, TOKENS.at[:, 7].add(1) % 300)
    assert jnp.array_equal(before[:, :7], after[:, :7])
    assert bool(jnp.all(jnp.any(before[:, 7:] != after[:, 7:], axis=-1)))


def test_documents_do_not_see_each_other():
    config, params = decoder({"gates": (GateSpec(), GateSpec("g2"))})
    ids = jnp.repeat(jnp.array([[0, 1, 2]]), jnp.array([5, 4, 3]), axis=1, total_repeat_length=12)
    packed = hidden_fn(config)(params, TOKENS[:1], ids)
    alone = hidden_fn(config)(params, TOKENS[:1, 5:9])
    np.testing.assert_allclose(packed[:, 5:9], alone, atol=2e-5)


@pytest.mark.parametrize("change", [{"scan_layers": False}, {"remat": "full"}, {"remat": "dots"}])
def test_scan_and_remat_change_nothing(change):
    config, params = decoder({"gates": (GateSpec("g1", "headwise"),), "softmax": "sink_logit"})

    def loss_and_gradient(config):
        def loss(params):
            decoder = nnx.merge(model.abstract(config)[0], params)
            hidden, aux = decoder(TOKENS, probe=True)
            return cross_entropy(hidden, decoder.output_matrix(), TOKENS, 5).objective, aux

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (loss, aux), gradient = loss_and_gradient(config)
    (loss2, aux2), gradient2 = loss_and_gradient(override(config, change))
    np.testing.assert_allclose(loss, loss2, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), (aux, gradient), (aux2, gradient2)
    )


def test_bfloat16_follows_float32():
    config, params = decoder({"gates": (GateSpec(),)})
    full = hidden_fn(config)(params, TOKENS)
    half = hidden_fn(override(config, {"dtype": "bfloat16"}))(params, TOKENS)
    assert half.dtype == jnp.bfloat16
    error = jnp.linalg.norm(half.astype(jnp.float32) - full) / jnp.linalg.norm(full)
    assert 1e-4 < float(error) < 0.05


def test_parameters_are_float32_and_drawn_from_the_seed():
    bf16 = override(SMALL, {"dtype": "bfloat16"})
    one, same, other = model.init(bf16, 0), model.init(bf16, 0), model.init(bf16, 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype("float32")}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, one, same))
    assert not jnp.array_equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])
    blocks = nnx.to_pure_dict(one)["blocks"]
    kernel = blocks["attention"]["query"]["kernel"]
    assert not jnp.array_equal(kernel[0], kernel[1]), "every layer is drawn separately"
    assert float(blocks["mlp"]["up"]["kernel"].std()) == pytest.approx(SMALL.init_std, rel=0.05)


def test_counts_are_those_of_the_arrays():
    config = override(SMALL, {"gates": (GateSpec(), GateSpec("g2", "headwise", bias=True)), "tied_embeddings": False})
    leaves = jax.tree.leaves(model.init(config, 0))
    counts = model.param_counts(config)
    assert counts["params"] == sum(leaf.size for leaf in leaves)
    assert counts["gate_params"] == config.num_layers * sum(gate.num_params(config) for gate in config.gates)
    assert counts["non_embedding_params"] == counts["params"] - 2 * 300 * 32


def test_flops_are_those_of_the_compiled_products():
    """Three times the forward products, attention counted over the keys a causal query sees."""
    config = override(SMALL, {"scan_layers": False, "gates": (GateSpec(),), "num_layers": 3, "ffn_dim": 512})
    params = model.init(config, 0)
    tokens = jnp.zeros((4, 16), jnp.int32)

    def forward_logits(params):
        decoder = nnx.merge(model.abstract(config)[0], params)
        return decoder.logits(decoder(tokens)[0])

    compiled = jax.jit(forward_logits).lower(params).compile().cost_analysis()["flops"]
    masked = config.num_layers * 4 * config.num_heads * config.head_dim * (16 - 17 / 2) * tokens.size
    assert 3 * (compiled - masked) == pytest.approx(model.flops_per_token(config, 16) * tokens.size, rel=0.08)


def test_logits_match_the_loss():
    config, params = decoder({})
    module = nnx.merge(model.abstract(config)[0], params)
    hidden, _ = module(TOKENS)
    total, _, count = cross_entropy(hidden, module.output_matrix(), TOKENS, 7)
    log_probs = jax.nn.log_softmax(module.logits(hidden))
    expected = -jnp.take_along_axis(log_probs, TOKENS[..., None], -1).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert int(count) == TOKENS.size
