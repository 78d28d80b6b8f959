"""Experts equal a loop over tokens, for any load, on one device and on meshes; their losses equal their definitions.

What happens on 8 devices runs in one process, tests/eight_experts.py.
"""

from __future__ import annotations

import math
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from configs.models import moe_tiny
from gattn import moe
from gattn.config import override
from tests.attention import primitives, quick
from tests.eight import found_by
from tests.eight_experts import LOADS, MESHES, by_token, config, everything, layer, problem, wrong

RUN = quick(partial(layer, config()))


def compare(model, params, x):
    """The layer's sums, once all is as the loop over tokens has it."""
    got, sums = quick(partial(everything, layer, model))(params, x)
    outputs, of_sums = quick(partial(everything, by_token, model))(params, x)
    assert wrong(got, outputs) + wrong(sums, of_sums) == []
    assert sums["overflow"] == 0
    return sums


# ---- one device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
def test_experts_are_a_loop_over_tokens(load):
    """In value, in the router's sums, and in the gradients of x and all parameters."""
    compare(config(), *problem(config(), load))


def test_all_tokens_to_one_expert_and_none_to_the_others():
    model = config(experts_per_token=1, norm_topk_prob=False)
    params, x = problem(model, "one expert")
    sums = compare(model, params, x)
    assert sums["counts"].tolist() == [*(0,) * 7, x.size / model.d_model]


@given(data=st.data())
@settings(max_examples=4)
def test_any_sizes(data):
    experts = data.draw(st.integers(1, 9))
    model = config(
        num_experts=experts,
        experts_per_token=data.draw(st.integers(1, experts)),
        expert_dim=data.draw(st.integers(1, 9)),
        norm_topk_prob=data.draw(st.booleans()),
    )
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 13))
    compare(model, *problem(model, batch=batch, length=length))


def test_tokens_do_not_see_each_other_and_experts_have_no_order():
    model = config()
    params, x = problem(model)
    y, sums = RUN(params, x)
    rng = np.random.default_rng(1)
    tokens, experts = rng.permutation(x.shape[0] * x.shape[1]), rng.permutation(model.num_experts)

    flat = x.reshape(-1, model.d_model)[tokens].reshape(x.shape)
    mixed, same = RUN(params, flat)
    assert wrong({"y": mixed.reshape(flat.shape)}, {"y": y.reshape(-1, model.d_model)[tokens].reshape(x.shape)}) == []
    assert wrong(same, sums) == []

    renamed = {name: leaf[:, experts] if name == "router" else leaf[experts] for name, leaf in params.items()}
    again, moved = RUN(renamed, x)
    assert wrong({"y": again}, {"y": y}) == []
    assert moved["counts"].tolist() == sums["counts"][experts].tolist()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loop_for_cpus_is_what_other_platforms_compute(monkeypatch, dtype, load):
    """Which spread rows, multiply them by group, and add them up; to one rounding of the layer's dtype."""
    model = config(dtype=dtype)
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), problem(model, load))

    def found():
        return jax.jit(partial(everything, layer, model))(params, x)

    ours = found()
    monkeypatch.setattr(moe.tuning, "platform", lambda: "tpu")
    theirs = found()
    for path, one in jax.tree.leaves_with_path(ours):
        other = dict(jax.tree.leaves_with_path(theirs))[path]
        one, other = (np.asarray(leaf, np.float64) for leaf in (one, other))
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max(), err_msg=str(path))


def test_what_is_not_finite_stays_with_its_expert():
    """One assignment's weight is NaN; the kernels of other experts get the gradients that they had."""
    model = config()
    params, x = problem(model)
    rows = x.reshape(-1, model.d_model)
    weights, experts, _ = moe.route(rows, params["router"], model.experts_per_token, normalise=True)
    routing, kernels = moe.arrange(experts, model.num_experts), tuple(params[name] for name in ("gate", "up", "down"))

    def gradients(weights):
        return jax.grad(lambda *kernels: moe._looped(routing, rows, weights, kernels).sum(), (0, 1, 2))(*kernels)

    for broken, whole in zip(gradients(weights.at[0, 0].set(jnp.nan)), gradients(weights), strict=True):
        others = np.arange(model.num_experts) != experts[0, 0]
        np.testing.assert_array_equal(broken[others], whole[others])
        assert np.isnan(broken[~others]).any()


def test_no_array_holds_every_token_for_every_expert():
    """Forward or backward: of tokens times experts there are probabilities, nothing of the experts' width or D."""
    model = config(num_experts=32, experts_per_token=1, expert_dim=16, d_model=16)
    params, x = problem(model, length=128)
    jaxpr = jax.make_jaxpr(partial(everything, layer, model))(params, x).jaxpr
    sizes = {math.prod(out.aval.shape) for equation in primitives(jaxpr) for out in equation.outvars}
    tokens = x.size // model.d_model
    assert max(sizes) == tokens * model.num_experts


def test_the_router_chooses_in_float32():
    """Logits that bfloat16 cannot tell apart are told apart, and the output comes back in bfloat16."""
    model = config(num_experts=4, experts_per_token=1, d_model=2, dtype="bfloat16")
    params, _ = problem(model)
    params["router"] = jnp.array([[1.0, 1.0002, 1.0001, 0.9], [0.0] * 4])
    y, sums = quick(partial(layer, model))(params, jnp.ones((1, 5, 2), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert sums["counts"].tolist() == [0, 5, 0, 0]


# ---- losses -------------------------------------------------------------------------------------------------------

SETTINGS = override(moe_tiny(), {"model.num_experts": 8, "model.experts_per_token": 2, "model.num_layers": 2})


def layers(seed):
    """Sums of two layers, and what they stand for: probabilities [L, T, E] and which experts were chosen."""
    sums, probabilities, chosen = [], [], []
    for index in range(2):
        params, x = problem(config(), seed=10 * seed + index)
        sums.append(RUN(params, x)[1])
        p = jax.nn.softmax(x.reshape(-1, x.shape[-1]) @ params["router"])
        probabilities.append(np.asarray(p, np.float64))
        chosen.append(np.argsort(-probabilities[-1])[:, :2])
    return jax.tree.map(lambda *values: jnp.stack(values), *sums), np.stack(probabilities), np.stack(chosen)


def defined(probabilities, chosen):
    """E sum_e f_e P_e, layer by layer."""
    experts = probabilities.shape[-1]
    share = np.stack([np.bincount(one.ravel(), minlength=experts) / one.size for one in chosen])
    return experts * (share * probabilities.mean(axis=1)).sum(axis=1)


def test_the_balance_loss_equals_its_definition_however_the_batch_is_split():
    halves = [layers(seed) for seed in (1, 2)]
    total = jax.tree.map(jnp.add, halves[0][0], halves[1][0])
    whole = defined(*(np.concatenate([half[i] for half in halves], axis=1) for i in (1, 2)))
    got = moe.balance_loss(total["counts"], total["probabilities"], total["tokens"], 2)
    np.testing.assert_allclose(got, whole, rtol=1e-5)
    assert float(np.mean([defined(*half[1:]) for half in halves])) != pytest.approx(whole.mean(), rel=1e-3)
    np.testing.assert_allclose(moe.report(total, SETTINGS)["moe/balance_loss"], whole.mean(), rtol=1e-5)


def test_the_balance_loss_is_one_in_balance_and_experts_over_top_k_at_worst():
    even, tokens = jnp.full((1, 8), 25.0), jnp.array([100.0])
    assert moe.balance_loss(even, jnp.full((1, 8), 12.5), tokens, 2) == pytest.approx(1)
    few = jnp.array([[100.0, 100, 0, 0, 0, 0, 0, 0]])
    assert moe.balance_loss(few, few / 2, tokens, 2) == pytest.approx(8 / 2)


def test_one_part_of_a_step_adds_the_weighted_losses():
    sums, _, _ = layers(1)
    metrics = moe.report(sums, SETTINGS)
    train = SETTINGS.train
    expected = train.balance_loss * metrics["moe/balance_loss"] + train.router_z_loss * metrics["moe/z"]
    assert moe.auxiliary(sums, sums["counts"], 128.0, SETTINGS) == pytest.approx(float(expected), rel=1e-6)


def test_parts_of_a_step_meet_the_frequencies_known_so_far():
    """The gradient of the last part's probabilities is that of the unsplit batch; counts themselves have none."""
    (first, _, _), (last, _, _) = layers(1), layers(2)
    total, tokens = jax.tree.map(jnp.add, first, last), 256.0

    def gradient(sums, counts):
        return jax.grad(lambda sums, counts: moe.auxiliary(sums, counts, tokens, SETTINGS), argnums=(0, 1))(
            sums, counts
        )

    unsplit, _ = gradient(total, total["counts"])
    ours, of_counts = gradient(last, first["counts"] + last["counts"])
    np.testing.assert_allclose(ours["probabilities"], unsplit["probabilities"], rtol=1e-6)
    np.testing.assert_allclose(ours["z"], unsplit["z"])
    early, _ = gradient(first, first["counts"])
    assert np.abs(early["probabilities"] - unsplit["probabilities"]).max() > 0.01 * unsplit["probabilities"].max()
    assert not of_counts.any()


def test_the_report_names_load_entropy_and_overflows():
    sums = {
        "counts": jnp.array([[100.0, 100, 0, 0], [50, 50, 50, 50]]),
        "probabilities": jnp.full((2, 4), 25.0),
        "z": jnp.array([200.0, 400]),
        "entropy": jnp.array([100 * math.log(4), 0]),
        "tokens": jnp.array([100.0, 100]),
        "overflow": jnp.array([3.0, 1]),
    }
    found = moe.report(sums, override(SETTINGS, {"model.num_experts": 4}))
    assert tuple(found) == moe.METRICS
    expected = {"balance_loss": 1, "entropy": math.log(4) / 2, "max_load": 2, "z": 3, "overflow": 4}
    assert {name.removeprefix("moe/"): float(value) for name, value in found.items()} == pytest.approx(expected)


# ---- meshes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return found_by("tests.eight_experts")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_no_value_and_no_gradient(found, mesh, load):
    """For loads that fit into the buffer, and for one that does not."""
    overflows = load == "two experts" and "expert=" in mesh and MESHES[mesh] < 2
    assert found[f"{mesh}, {load}"] == [[], float(overflows)]


def test_layers_in_a_rematerialised_scan_on_a_mesh(found):
    assert found["scanned"] == [[], [0.0, 0.0]]


def test_forward_keeps_nothing_of_the_largest_buffer(found):
    largest, buffer = found["largest residual"]
    assert 0 < largest < buffer / 4


@pytest.mark.parametrize("mesh", ["expert=8", "data=2,expert=4", "expert=2,tensor=4"])
def test_rows_arrive_by_expert_and_source_and_come_home(found, mesh):
    """By the operands of `jax.lax.ragged_all_to_all`; their gradients take the way back."""
    assert found[f"moved, {mesh}"] == []
