"""Starting from another run's weights; a run that diverges and says so in its result."""

import shutil

import numpy as np
import pytest
from flax import nnx

from gattn import resume, train
from gattn.checkpoint import Checkpoints
from gattn.config import ConfigError, GateSpec, override
from gattn.files import home
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
    """Stopped before its first step: the checkpoint holds the old weights and the gate of a run that starts afresh."""
    config = continued(old)
    taken = flat(resume.take_over(fresh_params(config), old, make_mesh(config.mesh), print))
    theirs, fresh = flat(final_state(old, PLAIN)[1].params), flat(fresh_params(config))
    assert set(theirs) < set(taken) == set(fresh)
    for path, value in taken.items():
        np.testing.assert_array_equal(value, theirs.get(path, fresh[path]))
    gates = [path for path in taken if path not in theirs]
    assert gates and all("gates" in path for path in gates)  # noqa: PT018
    assert np.any(taken[gates[0]])


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


def test_a_run_of_home_is_found_by_its_name(tmp_path):
    """And the fingerprint tells runs with different starts apart."""
    train.train(PLAIN)
    config = override(SHORT, {"train.start_from": PLAIN.run_name})
    assert resume.starting_point(config) == home() / "runs" / PLAIN.run_name
    assert config.fingerprint() != SHORT.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.start_from": "nowhere"}, "no run there"),
        ({"model.d_model": 64}, r"key.kernel is \(1, 32, 2, 16\), here \(1, 64, 2, 16\)"),
        ({"model.match_params": True, "model.gates": (GateSpec(),)}, "match_params narrows the FFN"),
        ({"model.num_layers": 2}, "models must agree"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_anything_is_written(old, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train.train(continued(old, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_without_a_checkpoint_is_no_start(old, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(old / "config.json", empty)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        train.train(continued(empty), tmp_path / "new")


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
