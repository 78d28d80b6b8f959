"""What the one custom_vjp promises: what is saved, what is run again, and what a kernel is told."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn import gated_dot_product_attention
from gattn.kernels import api, chunked, reference, vjp
from tests.attention import normal, primitives, qkv, quick

LENGTH, HEADS, HEAD_DIM = 256, 2, 64
WIDTH = HEADS * HEAD_DIM


def bytes_per_layer(attention):
    """What one more layer of a scan keeps for its gradient, in passes over [T, N, H] (U), by the compiled program."""

    def layer(x, weights):
        inner, out = weights
        query, key, value, gate = jnp.einsum("BTD,PDNH->PBTNH", x, inner)
        # Over both axes at once: a reshape of the attention's output would be saved beside it.
        return jnp.einsum("BTNH,NHD->BTD", attention(query, key, value, gate), out), None

    def temporary(layers):
        weights = jnp.zeros((layers, 4, WIDTH, HEADS, HEAD_DIM)), jnp.zeros((layers, HEADS, HEAD_DIM, WIDTH))
        function = jax.grad(lambda x, weights: jax.lax.scan(layer, x, weights)[0].sum(), argnums=(0, 1))
        compiled = quick(function).lower(jnp.zeros((1, LENGTH, WIDTH)), weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return (temporary(12) - temporary(4)) / 8 / (LENGTH * WIDTH * 4)


def test_a_gate_costs_one_residual():
    """The layer's input, query, key and value, then 2 U: the gate, and the output that W_O's gradient needs anyway."""
    attend = partial(gated_dot_product_attention, is_causal=True, implementation="chunked")
    lse = 1 / HEAD_DIM
    fused = bytes_per_layer(lambda query, key, value, gate: attend(query, key, value, gate=gate))
    assert fused == pytest.approx(4 + 2 + lse, abs=0.01)
    ungated = bytes_per_layer(lambda query, key, value, gate: attend(query, key, value))
    assert ungated == pytest.approx(4 + 1 + lse, abs=0.01)
    unfused = bytes_per_layer(lambda query, key, value, gate: attend(query, key, value) * jax.nn.sigmoid(gate))
    assert unfused >= 4 + 3 + lse


@pytest.mark.parametrize(("implementation", "kernel"), [("chunked", "scan"), ("tpu", "gattn_forward")])
def test_saved_names_spare_the_second_forward(implementation, kernel):
    arguments = qkv(batch=1, head_dim=64) | {"gate": normal(4, 1, 40, 4, 64)}

    def count(policy):
        @partial(jax.checkpoint, policy=policy)
        def block(arrays):
            return gated_dot_product_attention(**arrays, implementation=implementation)

        jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda arrays: jnp.sin(block(arrays)).sum()))(arguments).jaxpr
        jaxpr = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
        names = [equation.params.get("name", equation.primitive.name) for equation in primitives(jaxpr)]
        return names.count(kernel)

    policies = jax.checkpoint_policies
    backward = 1 if kernel == "scan" else 0
    assert count(policies.nothing_saveable) == 2 + backward
    assert count(policies.save_only_these_names(*vjp.CHECKPOINT_NAMES)) == 1 + backward


def test_a_mask_known_when_tracing_is_known_to_the_kernel_forward_and_backward():
    """Through jit, remat and scan: what a kernel lays out by the mask is laid out before it runs."""
    seen = []

    def forward(inputs, mask, options):
        seen.append(("forward", isinstance(mask.interval[1], np.ndarray)))
        return chunked.forward(inputs, mask, options)

    def backward(inputs, mask, options, *rest):
        seen.append(("backward", isinstance(mask.interval[1], np.ndarray)))
        return chunked.backward(inputs, mask, options, *rest)

    kernel = vjp.Kernel(forward, backward)

    def grads(**limits):
        seen.clear()

        @jax.checkpoint
        def layer(carry, _):
            out = gated_dot_product_attention(**arrays | {"query": carry}, **limits, implementation="chunked")
            return out, None

        def loss(query):
            return jnp.sin(jax.lax.scan(layer, query, None, length=2)[0]).sum()

        got = quick(jax.grad(loss))(arrays["query"])
        return {name for name, known in seen}, {known for name, known in seen}, got

    arrays = qkv()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_kernel", lambda *_: kernel)
        passes, known, got = grads(is_causal=True)
        assert (passes, known) == ({"forward", "backward"}, {True})
        passes, known, again = grads(is_causal=True, query_offset=jnp.zeros((), int))
        assert (passes, known) == ({"forward", "backward"}, {False})
        assert grads(is_causal=True, key_value_seq_lengths=jnp.array([40, 40]))[1] == {False}
    np.testing.assert_allclose(got, again, atol=1e-6)


def test_each_gradient_has_the_dtype_of_its_input():
    arguments = qkv(batch=1, dtype=jnp.bfloat16)
    arguments |= {"gate": normal(4, 1, 40, 4, 8), "sinks": normal(5, 4, dtype=jnp.float16)}
    grads = quick(jax.grad(lambda x: gated_dot_product_attention(**x, implementation="chunked").sum(dtype=float)))(
        arguments
    )
    assert {name: x.dtype for name, x in grads.items()} == {name: x.dtype for name, x in arguments.items()}


@pytest.mark.parametrize("activation", ["sigmoid", "ns_sigmoid"])
@pytest.mark.parametrize("width", [1, HEAD_DIM])
def test_the_gates_gradient_needs_no_ungated_output(activation, width):
    """Against the derivative in float64, also at gates where 1 - sigma of a float32 sigma would be 0."""
    gate = np.array([-20.0, -2.0, 0.0, 3.0, 17.0, 20.0])
    ungated = np.random.default_rng(0).standard_normal((1, 6, 1, HEAD_DIM))
    cotangent = np.random.default_rng(1).standard_normal((1, 6, 1, HEAD_DIM))
    scores = np.broadcast_to(gate[None, :, None, None], (1, 6, 1, width))

    share = 0.5 if activation == "ns_sigmoid" else 1.0
    sigma, rest = 1 / (1 + np.exp(-scores)), 1 / (1 + np.exp(scores))
    gated = jnp.asarray(ungated * (1 - share + share * sigma), jnp.float32)
    slope = cotangent * ungated * share * sigma * rest
    expected = slope if width > 1 else slope.sum(-1, keepdims=True)
    kernel = vjp.Kernel(
        lambda inputs, mask, options: (gated, jnp.zeros((1, 6, 1))),
        lambda inputs, mask, options, lse, dout, delta: inputs._replace(gate=None, sinks=None),
    )
    options = reference.Options(1.0, gate_activation=activation)
    x = jnp.zeros((1, 6, 1, HEAD_DIM))
    mask = api.make_mask(reference.Inputs(x, x, x), api.Limits(*(None,) * 5), options)
    inputs = reference.Inputs(x, x, x, gate=jnp.asarray(scores, jnp.float32))
    _, pullback = jax.vjp(lambda inputs: vjp.attend(kernel, options, inputs, mask)[0], inputs)
    got = pullback(jnp.asarray(cotangent, jnp.float32))[0].gate
    np.testing.assert_allclose(got, expected, rtol=2e-5)
