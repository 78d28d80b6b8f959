"""Starting from another run's weights; a run that diverges and says so in its result."""

import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from gattn import resume, train
from gattn.checkpoint import Checkpoints
from gattn.config import ConfigError, GateSpec, override
from gattn.guard import DivergenceError
from gattn.sharding import make_mesh
from tests.test_train import SHORT, final_state

PLAIN = override(SHORT, {"model.gates": ()})


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The folder of a finished run of PLAIN."""
    directory = tmp_path_factory.mktemp("old")
    train.train(PLAIN, directory)
    return directory


def continued(old, **changes):
    return override(SHORT, {"train.start_from": str(old), "train.seed": 1, **changes})


def test_a_gate_that_is_the_identity_starts_where_the_old_run_ended(old, tmp_path):
    """two_sigmoid at score 0: the same held-out loss before the first step, and another after the last."""
    before = train.train(PLAIN, old)["eval"]["loss"]
    gate = GateSpec(activation="two_sigmoid", init_scale=0.0)
    after = train.train(continued(old, **{"model.gates": (gate,)}), tmp_path / "new")
    np.testing.assert_allclose(after["eval"]["initial_loss"], before, rtol=1e-6)
    assert after["eval"]["loss"] != pytest.approx(before, rel=1e-4)


def test_what_the_old_run_has_is_taken_and_the_rest_is_drawn(old, tmp_path):
    """Every old weight, and the gate of a run that starts afresh."""
    config = continued(old)
    taken = flat(resume.take_over(fresh_params(config), old, make_mesh(config.mesh)))
    theirs, fresh = flat(final_state(old, PLAIN)[1].params), flat(fresh_params(config))
    assert set(theirs) < set(taken) == set(fresh)
    for path, value in taken.items():
        np.testing.assert_array_equal(value, theirs.get(path, fresh[path]))
    gates = [path for path in taken if path not in theirs]
    assert gates and all("gates" in path for path in gates)  # noqa: PT018
    assert np.any(taken[gates[0]])


def test_a_second_stage_has_another_base_of_rope_and_the_same_weights(old, tmp_path):
    before = train.train(PLAIN, old)["eval"]["loss"]
    stage = {"model.gates": (), "model.rope_theta": 1e6}
    theirs = flat(final_state(old, PLAIN)[1].params)
    config = continued(old, **stage)
    taken = flat(resume.take_over(fresh_params(config), old, make_mesh(config.mesh)))
    for path, value in theirs.items():
        np.testing.assert_array_equal(taken[path], value)
    same = train.train(continued(old, **stage | {"model.rope_theta": PLAIN.model.rope_theta}), tmp_path / "same")
    other = train.train(config, tmp_path / "other")
    assert other["eval"]["initial_loss"] != pytest.approx(same["eval"]["initial_loss"], rel=1e-6)
    assert other["eval"]["initial_loss"] == pytest.approx(before, rel=0.2)  # and not that of drawn weights


def fresh_params(config):
    return train.new_state(config).params


def flat(params):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def test_it_goes_on_without_the_run_it_started_from(old, tmp_path, monkeypatch):
    """Cut after its first checkpoint and with the old run gone, it ends as if neither had happened."""
    gone = tmp_path / "gone"
    shutil.copytree(old, gone)
    config = continued(gone)
    whole = train.train(config, tmp_path / "whole")

    def stop(self, real=train._Run.pause):
        if self.step == 6:
            raise KeyboardInterrupt
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(train._Run, "pause", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / "cut")
    shutil.rmtree(gone)
    assert Checkpoints(tmp_path / "cut" / "checkpoints").steps == [4]
    assert train.train(config, tmp_path / "cut")["evals"] == whole["evals"]


def test_a_finished_run_needs_neither_its_checkpoints_nor_its_start(old, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(old, gone)
    config = continued(gone)
    result = train.train(config, tmp_path / "run")
    shutil.rmtree(gone)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert train.train(config, tmp_path / "run") == result


def test_a_run_of_home_is_found_by_its_name(old, tmp_path, monkeypatch):
    """And the fingerprint tells runs with different starts apart."""
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    shutil.copytree(old, tmp_path / "runs" / PLAIN.run_name)
    config = override(SHORT, {"train.start_from": PLAIN.run_name})
    assert resume.starting_point(config, tmp_path / "new") == tmp_path / "runs" / PLAIN.run_name
    assert config.fingerprint() != SHORT.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.start_from": "nowhere"}, "nowhere is no run to start from"),
        ({"model.d_model": 64}, "model.d_model is 32 there and 64 here"),
        ({"model.position": "alibi"}, "model.position is 'rope' there and 'alibi' here"),
        ({"model.tied_embeddings": True}, "model.tied_embeddings is False there"),
        ({"model.match_params": True, "model.gates": (GateSpec(),)}, "set model.match_params to False"),
        ({"data.source": "experiments.sinkbench:sinkbench_heads"}, "data.source is"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_anything_is_written(old, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        train.train(continued(old, **changes), tmp_path / "new")
    assert error.value.field == "train.start_from"
    assert not (tmp_path / "new").exists()


def test_a_gate_is_not_lost(old, tmp_path):
    """The old run has a gate that the new one would drop."""
    train.train(SHORT, tmp_path / "gated")
    with pytest.raises(ConfigError, match="its gate g1_headwise is not here"):
        train.train(override(PLAIN, {"train.start_from": str(tmp_path / "gated")}), tmp_path / "new")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "result.json").unlink(), "is not finished, or diverged"),
        (
            lambda folder: (folder / "result.json").write_text('{"diverged": {"step": 3}}'),
            "is not finished, or diverged",
        ),
        (lambda folder: shutil.rmtree(folder / "checkpoints" / "12"), "its last checkpoint, 12, is gone"),
    ],
)
def test_only_the_end_of_a_finished_run_is_a_start(old, tmp_path, spoil, message):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(old, spoilt)
    spoil(spoilt)
    with pytest.raises(ConfigError, match=message):
        train.train(continued(spoilt), tmp_path / "new")


def test_divergence_is_a_result_where_it_is_asked_for(tmp_path):
    """The result says at which step and why, holds no final loss, and the run is not repeated."""
    wild = override(PLAIN, {"optim.learning_rate": 1e38, "optim.clip_norm": 1e38})
    config = override(wild, {"train.divergence_is_a_result": True})
    result = train.train(config, tmp_path / "run")
    step = result["diverged"]["step"]
    assert f"step {step + 1}: the loss is" in result["diverged"]["reason"]
    assert set(result["eval"]) == {"initial_loss"}
    assert "probes" not in result
    assert len(result["curve"]["loss"]) == step < config.train.steps
    assert train.train(config, tmp_path / "run") == result
    with pytest.raises(DivergenceError):
        train.train(wild, tmp_path / "other")
    assert config.fingerprint() == wild.fingerprint()


def test_a_start_that_gives_no_finite_loss_is_a_result_too(old, tmp_path):
    """Diverged before the first held-out loss was known."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(old, poisoned)
    config = override(continued(poisoned), {"train.divergence_is_a_result": True, "optim.learning_rate": 1e-3})
    real = train.take_over
    with pytest.MonkeyPatch.context() as patch:
        nan = lambda *given: jax.tree.map(lambda leaf: leaf * np.nan, real(*given))  # noqa: E731
        patch.setattr(train, "take_over", nan)
        result = train.train(config, tmp_path / "new")
    assert result["eval"] == {}
    assert result["diverged"]["step"] == 0
    assert "the held-out loss is nan" in result["diverged"]["reason"]
