"""Training: resume equals uninterrupted, learning happens, folders are guarded, results are complete."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model, train
from gattn.checkpoint import Checkpoints
from gattn.config import Config, GateSpec, override, to_json
from gattn.data.loader import Source
from gattn.metrics import MetricsLog, read_lines

SHORT = override(
    sinkbench_config(),
    {
        "train.steps": 12,
        "train.eval_every": 4,
        "train.checkpoint_every": 4,
        "train.log_every": 2,
        "optim.warmup_steps": 2,
        "data.eval_sequences": 64,
        "model.d_model": 32,
        "model.head_dim": 16,
        "model.ffn_dim": 32,
        "model.gates": (GateSpec("g1", "headwise"),),
    },
)


def final_state(directory, config):
    shapes = model.abstract(config.model)[1]
    with Checkpoints(directory / "checkpoints") as checkpoints:
        like = train.State(shapes, jax.eval_shape(train.optim.optimizer(config).init, shapes))
        return checkpoints.latest, checkpoints.restore(checkpoints.latest, train.on_this_device(like))


def equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), one, other))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory, train.train(SHORT, directory)


def test_result_is_complete_and_strict_json(finished):
    directory, result = finished
    written = json.loads((directory / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert written == json.loads(json.dumps(result))
    assert result["fingerprint"] == SHORT.fingerprint()
    assert result["evals"]["step"] == [0, 4, 8, 12]
    assert result["curve"]["step"] == [2, 4, 6, 8, 10, 12]
    assert result["eval"]["loss"] == result["evals"]["loss"][-1] < result["eval"]["initial_loss"]
    assert result["eval"]["initial_loss"] == pytest.approx(math.log(65), abs=0.1)
    assert result["eval"]["bayes_loss"] == pytest.approx(1.67, abs=0.05)
    assert result["environment"]["attention"] == "reference"
    assert result["data"]["tokens"] == 12 * 32 * 64
    assert np.shape(result["probes"]["attention_map"]["by_layer"]) == (1, 48, 48)
    np.testing.assert_allclose(np.sum(result["probes"]["attention_map"]["by_layer"], axis=-1), 1.0, atol=0.01)
    assert 0 < result["probes"]["gates"]["g1"]["mean"] < 1


def test_measures_are_those_of_the_saved_parameters(finished):
    """F-Attn and loss in result.json equal what the checkpoint gives when computed another way."""
    from experiments.sinkbench import sinkbench
    from gattn.kernels.api import attention_maps

    directory, result = finished
    _, state = final_state(directory, SHORT)
    decoder = nnx.merge(model.abstract(SHORT.model)[0], state.params)
    tokens = np.concatenate([b["inputs"] for b in sinkbench(SHORT).held_out()])
    targets = np.concatenate([b["targets"] for b in sinkbench(SHORT).held_out()])
    hidden, _ = decoder(tokens)
    log_probs = jax.nn.log_softmax(decoder.logits(hidden))
    loss = -np.take_along_axis(np.asarray(log_probs), targets[..., None], -1).mean()
    assert result["eval"]["loss"] == pytest.approx(float(loss), rel=1e-5)

    block = nnx.merge(*_layer(decoder, 0))
    x = block.attention_norm(decoder.embedding[...][tokens])
    from gattn.rope import apply_rope, rope_table

    table = rope_table(64, SHORT.model.head_dim, SHORT.model.rope_theta)
    query, key = (apply_rope(getattr(block.attention, name)(x), *table) for name in ("query", "key"))
    maps = attention_maps(query, key, is_causal=True)
    assert result["probes"]["f_attn"] == pytest.approx(float(maps[:, :, 1:, 0].mean()), rel=1e-4)


def _layer(decoder, index):
    graph, stacked = nnx.split(decoder.blocks)
    return graph, jax.tree.map(lambda leaf: leaf[index], stacked)


def test_a_finished_run_is_not_trained_again(finished):
    directory, result = finished
    before = (directory / "result.json").stat().st_mtime_ns
    assert train.train(SHORT, directory) == json.loads(json.dumps(result))
    assert (directory / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize(("step", "kill"), [(3, False), (4, False), (7, False), (2, True), (6, True)])
def test_resumed_equals_uninterrupted_bit_for_bit(finished, tmp_path, step, kill):
    """Stopped by SIGTERM (before any evaluation, where one and a checkpoint are due, between log lines) or by kill -9
    (before the first checkpoint, between two), then started again."""
    directory, result = finished
    config_file = tmp_path / "config.json"
    config_file.write_text(to_json(SHORT))
    command = [sys.executable, "-m", "tests.train_until", str(config_file), str(tmp_path / "run"), str(step - 1)]
    stopped = subprocess.run(
        command + ["kill"] * kill,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert stopped.returncode == (-signal.SIGKILL if kill else 143), stopped.stderr
    assert not (tmp_path / "run" / "result.json").exists()
    resumed = train.train(SHORT, tmp_path / "run")
    last, state = final_state(tmp_path / "run", SHORT)
    assert last == 12
    assert equal(state, final_state(directory, SHORT)[1])
    for part in ("curve", "evals", "probes", "eval"):
        assert resumed[part] == result[part], part


def test_cut_between_the_last_evaluation_and_the_result(finished, tmp_path):
    directory, result = finished
    shutil.copytree(directory, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = train.train(SHORT, tmp_path / "run")
    assert {**again, "time": 0} == {**json.loads(json.dumps(result)), "time": 0}


def test_the_seed_changes_the_run(finished, tmp_path):
    other = override(SHORT, {"train.seed": 1})
    assert train.train(other, tmp_path)["curve"] != finished[1]["curve"]


def test_two_processes_cannot_train_one_run(finished):
    directory, _ = finished
    with train._lock(directory), pytest.raises(train.TrainingError, match="another process"):
        train.train(SHORT, directory)


def test_a_folder_of_another_run_is_refused(finished):
    directory, _ = finished
    with pytest.raises(train.TrainingError, match="another run"):
        train.train(override(SHORT, {"train.seed": 5}), directory)


def one_token_source(config: Config) -> Source:
    """The same token for ever."""
    batch = {"inputs": np.ones((2, 4), np.int32), "targets": np.ones((2, 4), np.int32)}
    forever = lambda step: iter(lambda: batch, None)  # noqa: E731
    return Source("fp", 65, forever, lambda: iter([batch]), None, None, lambda tokens: [str(t) for t in tokens])


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = override(SHORT, {"data.source": "tests.test_train:one_token_source", "model.init_std": 1e38})
    with pytest.raises(train.TrainingError, match="step 0: the loss is"):
        train.train(config, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_resuming_on_other_data_is_refused(tmp_path, monkeypatch):
    other = dataclasses.replace(one_token_source(SHORT), fingerprint="another fingerprint")
    config = override(SHORT, {"data.source": "tests.test_train:one_token_source"})
    train.train(config, tmp_path)
    (tmp_path / "result.json").unlink()
    monkeypatch.setattr(sys.modules["tests.test_train"], "one_token_source", lambda config: other)
    with pytest.raises(train.TrainingError, match="another fingerprint"):
        train.train(config, tmp_path)


def test_metrics_log_drops_what_will_be_redone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 5, "loss": 1.0}\n{"step": 7, "lo')
    log = MetricsLog(path, 4)
    log.write(step=6, loss=float("nan"))
    log.close()
    assert read_lines(path) == [{"step": 1, "loss": 2.0}, {"step": 6, "loss": None}]


@pytest.mark.slow
def test_a_language_model_learns_from_the_corpus(tmp_path):
    """In a few steps of the tiny preset, held-out loss falls by a lot; bits per byte are those of the same loss."""
    from configs.models import tiny

    config = override(
        apply(tiny(), "g1_headwise"),
        {
            "train.steps": 30,
            "optim.warmup_steps": 5,
            "data.eval_sequences": 8,
            "data.tokenizer": "bytes",
            "model.vocab_size": 257,
            "data.seq_len": 64,
        },
    )
    began = time.monotonic()
    result = train.train(config, tmp_path)
    assert result["eval"]["loss"] < result["eval"]["initial_loss"] - 1.5
    assert result["time"]["train_s"] < time.monotonic() - began
    # Bytes: one token is one byte, but for the BOS targets, which cost bits and stand for no byte.
    assert result["eval"]["bits_per_byte"] >= result["eval"]["loss"] / math.log(2)
    assert result["eval"]["bits_per_byte"] == pytest.approx(result["eval"]["loss"] / math.log(2), rel=0.05)
