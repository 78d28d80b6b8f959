"""Training: resume equals uninterrupted, learning happens, folders are guarded, results are complete."""

import dataclasses
import importlib
import importlib.util
import io
import json
import math
import os
import random
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
from rich.console import Console

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model, resume, train
from gattn.checkpoint import Checkpoints
from gattn.config import Config, ConfigError, GateSpec, from_dict, override, to_json
from gattn.data.loader import Source, open_source
from gattn.files import run_directory
from gattn.layers import MLP, Block
from gattn.metrics import read_metrics
from gattn.step import abstract_state, new_state, train_step
from tests.bucket import bucket

# Orbax leaves event loops and futures behind when a checkpoint cannot be written or read, which is what is tested here.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"
)

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
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.steps[-1], checkpoints.restore(checkpoints.steps[-1], abstract_state(config)).state


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
    assert result["curve"]["step"] == list(range(1, 13))
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
    tokens = np.concatenate([b["inputs"] for b in sinkbench(SHORT).held_out["held-out"]()])
    targets = np.concatenate([b["targets"] for b in sinkbench(SHORT).held_out["held-out"]()])
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


def until(config, folder, when, name="SIGTERM"):
    """Trains in another process, which gets the signal at that moment (tests/train_until.py); the finished process."""
    folder.mkdir(exist_ok=True)
    config_file = folder / "asked.json"
    config_file.write_text(to_json(config))
    command = [sys.executable, "-m", "tests.train_until", str(config_file), str(folder), when, name]
    root = str(Path(__file__).parents[1])
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False)


def assert_same_run(folder, result, finished):
    """Bit for bit the same parameters, and the same numbers, as the run that nothing interrupted."""
    directory, expected = finished
    config = from_dict(Config, expected["config"])
    assert final_state(folder, config)[0] == config.train.steps
    assert equal(final_state(folder, config)[1], final_state(directory, config)[1])
    for part in ("curve", "evals", "probes", "eval", "spikes"):
        assert result[part] == expected[part], part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("in:jax/_src/compiler.py:compile_or_get_cached:-1", "SIGTERM"),
        ("in:gattn/step.py:new_state:-1", "SIGTERM"),
        ("batch:6", "SIGTERM"),
        ("batch:9+0.01", "SIGINT"),
        ("in:gattn/checkpoint.py:save:3", "SIGTERM"),
        ("in:gattn/train.py:evaluate:-1", "SIGINT"),
        ("in:gattn/train.py:evaluate:7", "SIGTERM"),
        ("in:gattn/train.py:evaluate:11", "SIGTERM"),
    ],
)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_is_the_same(finished, tmp_path, when, name):
    """Inside a compilation, a step, a checkpoint, an evaluation, the start: exit code 143 or 130, and no step is lost
    that was made."""
    stopped = until(SHORT, tmp_path / "run", when, name)
    assert stopped.returncode == {"SIGTERM": 143, "SIGINT": 130}[name], stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "the same command goes on from here" in stopped.stdout
    at = Checkpoints(tmp_path / "run" / "checkpoints").steps[-1]
    assert f"stopped at step {at}:" in stopped.stdout
    assert not (tmp_path / "run" / "result.json").exists()
    assert_same_run(tmp_path / "run", train.train(SHORT, tmp_path / "run"), finished)


LONG = override(
    SHORT,
    {"train.steps": 60, "train.checkpoint_every": 3, "train.eval_every": 3, "train.log_every": 7}
    | {"train.ema_decay": 0.9, "train.accumulation": 2, "train.keep_best": True, "optim.schedule": "linear"},
)


@pytest.mark.slow
def test_kill_9_at_twenty_moments_changes_nothing(tmp_path):
    """Seventeen moments at random (four of them counted from the start: loading, compiling, resuming), three inside the
    writing of a checkpoint; the state at the end, with its average of the weights, is bit for bit that of a run that
    nothing interrupted, and so are its numbers and its best checkpoint."""
    rng = random.Random(0)
    steps = sorted(rng.sample(range(56), 20))
    inside, early = {6, 12, 18}, {1, 8, 13, 17}
    for index, step in enumerate(steps):
        when = f"batch:{step}+{rng.uniform(0, 0.06):.4f}"
        when = f"file:checkpoints/*tmp*:{step}" if index in inside else when
        when = f"start+{rng.uniform(0, 1.5):.4f}" if index in early else when
        stopped = until(LONG, tmp_path / "killed", when, "SIGKILL")
        assert stopped.returncode == -signal.SIGKILL, (when, stopped.stderr)
        if index in inside:
            assert list((tmp_path / "killed" / "checkpoints").glob("*tmp*"))
    result = train.train(LONG, tmp_path / "killed")
    expected = train.train(LONG, tmp_path / "whole")
    assert_same_run(tmp_path / "killed", result, (tmp_path / "whole", expected))
    assert result["best_checkpoint"] == expected["best_checkpoint"]


def test_cut_between_the_last_evaluation_and_the_result(finished, tmp_path):
    directory, result = finished
    shutil.copytree(directory, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = train.train(SHORT, tmp_path / "run")
    assert {**again, "time": 0} == {**json.loads(json.dumps(result)), "time": 0}


def test_a_reader_that_goes_away_does_not_stop_the_run(finished, tmp_path):
    """`| head -1`: the run falls silent and finishes."""
    (tmp_path / "asked.json").write_text(to_json(SHORT))
    command = [
        sys.executable,
        "-m",
        "gattn",
        "train",
        "--config",
        str(tmp_path / "asked.json"),
        "--dir",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0, process.stderr.read()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert_same_run(tmp_path / "run", json.loads((tmp_path / "run" / "result.json").read_text()), finished)


def test_the_seed_changes_the_run(finished, tmp_path):
    other = override(SHORT, {"train.seed": 1})
    assert train.train(other, tmp_path)["curve"] != finished[1]["curve"]


def test_two_processes_cannot_train_one_run(finished):
    directory, _ = finished
    with train.lock(directory), pytest.raises(train.TrainingError, match="another process"):
        train.train(SHORT, directory)


def test_a_folder_of_another_run_is_refused(finished):
    directory, _ = finished
    with pytest.raises(train.TrainingError) as error:
        train.train(override(SHORT, {"train.seed": 5, "optim.b2": 0.9, "train.log_every": 3}), directory)
    for said in (r"train.seed = 0 and not 5", "optim.b2 = 0.95 and not 0.9", "another folder"):
        assert said in str(error.value)
    assert "log_every" not in str(error.value)


def test_what_does_not_change_the_mathematics_may_change(finished, tmp_path):
    """A run that goes on with other intervals says so, and ends in the same parameters."""
    stopped = until(SHORT, tmp_path / "run", "batch:7")
    assert stopped.returncode == 143
    other = override(
        SHORT, {"train.log_every": 5, "train.checkpoint_every": 6, "train.probe_every": 3, "data.workers": 3}
    )
    console = Console(file=io.StringIO(), width=300)
    train.train(other, tmp_path / "run", console)
    said = console.file.getvalue()
    assert "train.log_every = 2 and not 5" in said
    assert "data.workers = 1 and not 3" in said
    assert equal(final_state(tmp_path / "run", SHORT)[1], final_state(finished[0], SHORT)[1])
    probed = [line["step"] for line in read_metrics(tmp_path / "run") if "probe/f_attn" in line]
    assert probed == [9]


@pytest.mark.parametrize("broken", ["newest", "newest, not even listed", "both", "both, not even listed"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(finished, tmp_path, broken):
    run = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (run / "result.json").unlink()
    damage = {8, 12} if "both" in broken else {12}
    for step in damage:
        files = [p for p in (run / "checkpoints" / str(step)).rglob("*") if p.is_file()]
        path = max(files, key=lambda p: p.stat().st_size)
        if "listed" in broken:
            path = run / "checkpoints" / str(step) / "_CHECKPOINT_METADATA"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    console = Console(file=io.StringIO(), width=1000)
    said = []
    if "both" not in broken:
        assert resume.load(run, note=said.append).step == 8
        assert "checkpoints/12 cannot be read" in said[0]
    if "both" in broken:
        for _ in range(2):  # it does not begin from nothing the second time
            with pytest.raises(train.TrainingError, match="None is left to go on from"):
                train.train(SHORT, run, console)
        return
    result = train.train(SHORT, run, console)
    assert "damaged-checkpoint-12" in console.file.getvalue()
    assert "from step 8" in console.file.getvalue()
    assert (run / "damaged-checkpoint-12").exists()
    assert_same_run(run, result, finished)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, signalled):
    """The system refuses to let any file grow (a stand-in for a full disk), when the checkpoint of step 8 is due, or
    when a signal asks for one: exit code 1 and one line, not the promise that there is a checkpoint."""
    program = (
        "import os, resource, signal, sys\n"
        "from gattn import train\n"
        "from gattn.__main__ import main\n"
        "from gattn.train import _Run\n"
        "real = _Run.pause\n"
        "def pause(self):\n"
        "    if self.step == 6:\n"
        "        self.checkpoints.wait()\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))\n"
        "        if sys.argv[3] == 'True':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "    real(self)\n"
        "_Run.pause = pause\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "sys.exit(main(['train', '--config', sys.argv[1], '--dir', sys.argv[2]]))\n"
    )
    (tmp_path / "config.json").write_text(to_json(SHORT))
    run = tmp_path / ("deep" * 50) / "run"  # a long path leaves room for the reason
    command = [sys.executable, "-c", program, str(tmp_path / "config.json"), str(run), str(signalled)]
    no_cache = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # which could not be written either
    done = subprocess.run(command, env=no_cache, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "File too large" in done.stderr
    assert "goes on from here" not in done.stdout
    assert Checkpoints(run / "checkpoints").steps == [4]
    assert train.train(SHORT, run)["evals"]["step"] == [0, 4, 8, 12]


def bad_at(step: int):
    """The sink bench with the batch of one step marked: segment ids of 7 instead of 1."""

    def source(config: Config) -> Source:
        inner = open_source(override(config, {"data.source": "experiments.sinkbench:sinkbench"}))

        def marked(batches, first):
            for index, batch in enumerate(batches, first):
                yield {**batch, "segment_ids": np.full_like(batch["inputs"], 7 if index == step else 1)}

        return dataclasses.replace(
            inner,
            train=lambda step, rows=slice(None): marked(inner.train(step, rows), step),
            held_out={"held-out": lambda: marked(inner.held_out["held-out"](), 100)},
        )

    return source


@pytest.mark.parametrize(
    ("layer", "step", "changes"),
    [(0, 5, {}), (2, 7, {"train.accumulation": 4, "train.ema_decay": 0.5}), (1, 0, {}), (2, 11, {})],
)
def test_a_nan_is_found_at_its_step_and_layer_and_the_state_before_is_kept(tmp_path, monkeypatch, layer, step, changes):
    """Planted in the MLP of one layer for one batch: of any step, the first, the one before a checkpoint, the last."""
    calls = [0]

    def block(self, hidden, context, real=Block.__call__):
        planted[0] = calls[0] % 3 == layer, context.segment_ids
        calls[0] += 1
        return real(self, hidden, context)

    def mlp(self, x, real=MLP.__call__):
        here, segments = planted[0]
        return real(self, x) + (jnp.where(jnp.any(segments == 7, axis=1)[:, None, None], jnp.nan, 0.0) if here else 0.0)

    planted = [None]
    monkeypatch.setattr(Block, "__call__", block)
    monkeypatch.setattr(MLP, "__call__", mlp)
    monkeypatch.setattr(train, "open_source", bad_at(step))
    config = override(SHORT, {"model.num_layers": 3, "model.scan_layers": False, **changes})
    with pytest.raises(train.TrainingError) as error:
        train.train(config, tmp_path)
    said = f"step {step + 1}: the loss is nan, the gradient norm nan. First layer that is not finite: "
    assert str(error.value).startswith(f"{said}layer {layer} of 0 to 2")
    assert f"kept as checkpoint {step};" in str(error.value)
    last, state = final_state(tmp_path, config)
    assert last == state.step == step
    before, function = new_state(config), train_step(model.abstract(config.model)[0], config)
    for index, batch in zip(range(step), bad_at(step)(config).train(0), strict=False):
        before, _ = function(before, np.int32(index), batch)
    assert equal(state, before)
    losses = [x for line in read_metrics(tmp_path) for x in line.get("losses", [])]
    assert len(losses) == step
    assert np.isfinite(losses).all()


def test_a_gradient_that_alone_is_not_finite_stops_the_run_too(tmp_path, monkeypatch):
    """The loss is fine; the message names the layer with the largest activations."""

    @jax.custom_vjp
    def poison(x, segments):
        return x

    poison.defvjp(
        lambda x, segments: (x, segments),
        lambda segments, g: (jnp.where(jnp.any(segments == 7), jnp.nan, g), None),
    )

    def block(self, hidden, context, real=Block.__call__):
        out, aux = real(self, hidden, context)
        return poison(out, context.segment_ids), aux

    monkeypatch.setattr(Block, "__call__", block)
    monkeypatch.setattr(train, "open_source", bad_at(3))
    config = override(SHORT, {"model.num_layers": 2})
    with pytest.raises(
        train.TrainingError, match=r"step 4: the loss is [34]\.\d+, the gradient norm nan\. Largest acti.*: layer 1"
    ):
        train.train(config, tmp_path)
    assert final_state(tmp_path, config)[0] == 3


@pytest.mark.parametrize("asked", [(3, 5), (10, 100)])
def test_a_profile_is_written_for_the_steps_asked_for(tmp_path, asked):
    """Also beyond the last."""
    console = Console(file=io.StringIO(), width=1000)
    train.train(SHORT, tmp_path, console, profile=asked)
    assert f"profile up to step {min(asked[1], 12)}:" in console.file.getvalue()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


WANDB = """
import json
calls = []
def init(**kwargs):
    calls.append(["init", kwargs])
    return Run()
class Run:
    def log(self, values, step):
        calls.append(["log", step, values])
    def finish(self):
        calls.append(["finish"])
"""


def test_numbers_go_to_wandb_when_asked(tmp_path, monkeypatch):
    """Against a module that notes what it is told; without any, the run is refused before anything is written."""
    config = override(SHORT, {"train.wandb": "gates"})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ConfigError, match="pip install wandb"):
            train.train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    importlib.invalidate_caches()
    train.train(config, tmp_path / "run")
    calls = sys.modules.pop("wandb").calls
    assert calls[0][1]["project"] == "gates"
    assert calls[0][1]["id"] == SHORT.run_name
    assert calls[-1] == ["finish"]
    logged = [(step, values["eval_loss"]) for kind, step, values in calls[1:-1] if "eval_loss" in values]
    assert [step for step, _ in logged] == [0, 4, 8, 12]
    assert all(math.isfinite(x) for _, _, values in calls[1:-1] for x in values.values())


def stopping_at(step: int, config: Config) -> Source:
    """The sink bench; this process gets a SIGTERM with the batch of that step."""
    source = open_source(override(config, {"data.source": "experiments.sinkbench:sinkbench"}))

    def batches(first, rows=slice(None)):
        for index, batch in enumerate(source.train(first, rows), first):
            if index == step:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    return dataclasses.replace(source, train=batches)


def test_a_run_lives_in_a_bucket(finished, tmp_path, monkeypatch):
    """Stopped, resumed and read again where nothing can be appended or renamed: the bits and numbers of a local run."""
    with bucket(tmp_path / "bucket") as objects:
        monkeypatch.setenv("GATTN_HOME", "gs://bucket/home")
        monkeypatch.setattr(train, "open_source", lambda config: stopping_at(7, config))
        with pytest.raises(SystemExit) as stopped:
            train.train(SHORT)
        assert stopped.value.code == 143
        monkeypatch.undo()
        monkeypatch.setenv("GATTN_HOME", "gs://bucket/home")
        result = train.train(SHORT)
        place = run_directory(SHORT)
        assert str(place) == f"gs://bucket/home/runs/{SHORT.run_name}"
        assert_same_run(place, result, finished)
        assert train.train(SHORT) == json.loads(json.dumps(result))
        assert resume.load(place).step == 12
        damaged = max((n for n in objects.names() if "checkpoints/12/" in n), key=lambda n: len(objects.read(n)[0]))
        objects.write(damaged, objects.read(damaged)[0][:500])
        objects.delete(f"home/runs/{SHORT.run_name}/result.json")
        again = train.train(SHORT)
        assert any("damaged-checkpoint-12/" in name for name in objects.names())
        assert_same_run(place, again, finished)
    assert list(Path.cwd().glob("gs:*")) == []


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
