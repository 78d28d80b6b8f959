"""Changes of a trained gate: each is what its name says, on the model itself."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from configs.variants import apply
from experiments import interventions
from experiments.interventions import INTERVENTIONS, PLACES, attention_to, gate_means, mean_map, with_bias
from experiments.sinkbench import BOS
from gattn import model, resume
from gattn.config import override
from gattn.data.loader import open_source
from tests.test_train import SHORT

BASE = override(SHORT, {"model.num_layers": 2, "model.gates": ()})


def loaded(variant):
    """A bench model with random weights, as if it had been trained."""
    config = apply(BASE, variant)
    graph, shapes = model.abstract(config.model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32), shapes)
    return resume.Loaded(config, graph, params, open_source(config), 0)


@pytest.fixture(scope="module", params=["g1_elementwise", "g1_headwise"])
def gated(request):
    run = loaded(request.param)
    return run, with_bias(run)


def hidden(config, params, tokens):
    return nnx.merge(model.abstract(config.model)[0], params)(tokens)[0]


def changed(gated, name, tokens):
    return hidden(gated.config, INTERVENTIONS[name](gated), tokens)


@pytest.fixture(scope="module")
def tokens(gated):
    return next(gated[0].source.held_out["held-out"]())["inputs"][:4]


def test_as_trained_is_the_trained_model(gated, tokens):
    run, changeable = gated
    np.testing.assert_allclose(
        changed(changeable, "as trained", tokens), hidden(run.config, run.params, tokens), rtol=1e-5, atol=1e-5
    )


def test_open_is_the_model_without_its_gate(gated, tokens):
    run, changeable = gated
    plain = override(run.config, {"model.gates": ()})
    flat = [(path, leaf) for path, leaf in nnx.to_flat_state(run.params) if "gates" not in path]
    expected = hidden(plain, nnx.from_flat_state(flat), tokens)
    np.testing.assert_allclose(changed(changeable, "open", tokens), expected, rtol=1e-5, atol=1e-5)


def first_layer_gates(config, params, tokens):
    """Activated gates [B, T, N, H or 1] of the first layer, from their equation."""
    flat = {".".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(params)}
    x = flat["embedding"][tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.model.norm_eps) * flat["blocks.attention_norm.gain"][0]
    scores = np.einsum("btd,dnh->btnh", x, flat["blocks.attention.gates.g1.kernel"][0])
    if "blocks.attention.gates.g1.bias" in flat:
        scores = scores + flat["blocks.attention.gates.g1.bias"][0]
    return 1 / (1 + np.exp(-scores))


def test_what_each_change_makes_of_the_gates(gated, tokens):
    run, changeable = gated
    before = first_layer_gates(run.config, run.params, tokens)
    after = {name: first_layer_gates(run.config, change(changeable), tokens) for name, change in INTERVENTIONS.items()}
    whole = np.concatenate([b["inputs"] for b in run.source.held_out["held-out"]()])
    means = first_layer_gates(run.config, run.params, whole).mean(axis=(0, 1))
    np.testing.assert_allclose(after["by head and channel"], np.broadcast_to(means, before.shape), atol=1e-4)
    np.testing.assert_allclose(after["mean"], np.full(before.shape, means.mean()), atol=1e-4)
    np.testing.assert_allclose(after["swapped"], np.roll(before, 1, axis=2), atol=1e-5)
    odds = before / (1 - before)
    np.testing.assert_allclose(after["scores x 2"], odds**2 / (1 + odds**2), atol=1e-4)
    np.testing.assert_allclose(after["scores x 0.5"], odds**0.5 / (1 + odds**0.5), atol=1e-4)


def test_without_the_input_nothing_is_left_to_depend_on_it(gated, tokens):
    """Of the gate: a mean gate does the same to every token, whatever it is."""
    _, changeable = gated
    for name in ("mean", "by head and channel", "open"):
        found = first_layer_gates(changeable.config, INTERVENTIONS[name](changeable), tokens)
        assert np.ptp(found, axis=(0, 1)).max() < 1e-7


def test_the_means_are_those_of_every_layer(gated):
    """Against the probes' means by head, which come from the model's own forward pass."""
    run, _ = gated
    step = interventions.eval_step(run.graph, run.config, probe=True)
    found = interventions.evaluate_all(step, run.params, run.source.held_out["held-out"](), None)
    by_head = np.array(
        interventions.probes.summarise(found.probes, run.config.model.activations)["gates"]["g1"]["mean_by_head"]
    )
    means = gate_means(run.config, run.params, run.source.held_out["held-out"]())
    np.testing.assert_allclose(means.mean(axis=2), by_head, atol=1e-5)


def test_places_move_bos_and_keep_the_other_tokens_in_order():
    tokens = np.concatenate([np.full((3, 1), BOS), np.random.default_rng(0).integers(0, 64, (3, 11))], axis=1)
    for name, (change, moved) in PLACES.items():
        new = change(tokens)
        for before, after in zip(tokens, new, strict=True):
            kept = [token for token in after if token != BOS]
            assert len(kept) >= len(before) - 2
            assert kept == list(before[1:])[: len(kept)]
            assert (after[0] == BOS) == ("front" in name)
            assert (BOS in after[1:]) == moved


def test_attention_is_measured_where_bos_stands():
    """A model whose keys and queries make BOS the only thing worth attending to follows it into the middle."""
    run = loaded("baseline")
    flat = dict(nnx.to_flat_state(run.params))
    embedding = np.zeros(flat[("embedding",)].shape, np.float32)
    embedding[:, 0] = 1.0
    embedding[BOS] = 0.0
    embedding[BOS, 1] = 1.0
    changes = {("embedding",): embedding}
    for name, row in (("query", 0), ("key", 1)):
        path = ("blocks", "attention", name, "kernel")
        kernel = np.zeros(flat[path].shape, np.float32)
        kernel[:, row, :, -1] = 20.0  # the slowest rotation: hardly any position in it
        changes[path] = kernel
    for path in [("blocks", "attention", "out", "kernel"), ("blocks", "mlp", "down", "kernel")]:
        changes[path] = np.zeros(flat[path].shape, np.float32)
    changes["blocks", "attention_norm", "gain"] = np.ones(flat["blocks", "attention_norm", "gain"].shape, np.float32)
    for path, value in changes.items():
        flat[path] = flat[path].replace(jnp.asarray(value))
    run = run._replace(params=nnx.from_flat_state(list(flat.items())))
    maps = mean_map(run.graph)
    only = attention_to(run, "BOS in the middle alone", maps)
    assert only["moved"] > 0.4 > 0.1 > only["first"]
    assert attention_to(run, "BOS in front, as trained", maps)["first"] > 0.4
    both = attention_to(run, "BOS in front and in the middle", maps)
    assert both["first"] == pytest.approx(both["moved"], abs=0.1)
    assert attention_to(run, "no BOS", maps)["first"] == pytest.approx(only["uniform"], abs=0.05)


@pytest.mark.slow
def test_the_command_trains_measures_and_reports(tmp_path, monkeypatch):
    """Untrained within a few steps: a gate of small weights is nearly its own mean, and every number has its run."""
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    small = {"model.num_layers": 1, "train.steps": 4, "optim.warmup_steps": 1, "data.eval_sequences": 64}
    monkeypatch.setattr(interventions, "BENCHES", {"A": lambda: override(BASE, small)})
    assert interventions.main(interventions.Args(seeds=1), Console(file=io.StringIO())) == 0
    folder = tmp_path / "runs" / "interventions"
    found = json.loads((folder / "interventions.json").read_text())
    trained = found["gates"]["A: SDPA headwise"]["as trained"][0]
    (run,) = interventions.runs(interventions.Args(seeds=1))["A: SDPA headwise"]
    result = run.result()
    assert trained["f_attn"] == pytest.approx(result["probes"]["f_attn"], rel=1e-5)
    assert trained["excess"] == pytest.approx(result["eval"]["loss"] - result["eval"]["bayes_loss"], abs=1e-5)
    text = (folder / "report.md").read_text()
    assert f"../{run.folder.name}/config.json" in text
    assert "Command: python -m experiments.interventions --seeds 1" in text
    assert "A: baseline: without BOS the token that comes first gets" in text
