"""Several processes train as one does: by the command line, on 8 CPU devices in one process or in two of four."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.sinkbench import sinkbench_config
from gattn import distributed, resume
from gattn.checkpoint import Checkpoints
from gattn.config import ConfigError, override, to_json
from gattn.metrics import read_metrics
from gattn.step import abstract_state

ROOT = Path(__file__).parents[1]
STEPS, EVERY, STOP_AT = 36, 12, 16
CONFIG = override(
    sinkbench_config(),
    {
        "model.d_model": 32,
        "model.head_dim": 16,
        "model.ffn_dim": 32,
        "data.batch_size": 16,
        "data.eval_sequences": 40,  # the last batch is smaller
        "optim.warmup_steps": 5,
        "train.steps": STEPS,
        "train.log_every": 5,
        "train.eval_every": EVERY,
        "train.checkpoint_every": EVERY,
        "train.keep_last": 9,
        "train.ema_decay": 0.9,
        "train.tensorboard": False,
    },
)
MESH = "data=2,fsdp=4"
pytestmark = [
    pytest.mark.slow,
    # Orbax leaves event loops behind when a checkpoint cannot be read.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]


def started(*arguments, devices, processes):
    """`python -m tests.train_apart ...` in several processes; exit code, stdout and stderr of each.

    Into files: processes wait for each other, and one that had filled a pipe would wait for its reader.
    """
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices // processes), "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"] for _ in range(processes)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.train_apart", *map(str, words)],
                stdout=out,
                stderr=err,
                text=True,
                env=env,
            )
            for words, (out, err) in zip(arguments, files, strict=True)
        ]
        codes = [process.wait(timeout=500) for process in running]
        return [(code, *map(_whole, both)) for code, both in zip(codes, files, strict=True)]


def _whole(file):
    file.seek(0)
    return file.read()


def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def command(directory, *, mesh=MESH, devices=8, processes=1, stops=None):
    """Trains the run in `directory`; the process that `stops` gets a SIGTERM on the way."""
    directory.mkdir(exist_ok=True)
    file = directory.parent / "config.json"
    file.write_text(to_json(CONFIG))
    words, at = ["--config", file, "--dir", directory, "--mesh", mesh], address()
    more = [["--distributed", f"{at},{processes},{i}"] if processes > 1 else [] for i in range(processes)]
    stop = [STOP_AT if i == stops else -1 for i in range(processes)]
    arguments = [[directory.parent, stop[i], *words, *more[i]] for i in range(processes)]
    return started(*arguments, devices=devices, processes=processes)


def losses(directory):
    return np.array([loss for line in read_metrics(directory) for loss in line.get("losses", ())])


def result(directory):
    return json.loads((directory / "result.json").read_text())


def cut(run, directory, step):
    """The run as it was when it had just written the checkpoint of `step`."""
    shutil.copytree(run, directory)
    (directory / "result.json").unlink()
    for later in (directory / "checkpoints").iterdir():
        if int(later.name) > step:
            shutil.rmtree(later)
    return directory


def says_nothing(_, out, err):
    """As all processes but the first. (Gloo reports its connections, in lines that may be torn.)"""
    return err == "" and not any(word in out for word in ("sinkbench", "loss", "step", "parameters"))


def assert_same_bits(file, other):
    """Of every array of a state."""
    with np.load(file) as one, np.load(other) as two:
        assert len(one.files) == len(two.files) == len(jax.tree.leaves(abstract_state(CONFIG)))
        for name in one.files:
            assert one[name].dtype == two[name].dtype
            np.testing.assert_array_equal(one[name], two[name])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """An uninterrupted run in one process."""
    directory = tmp_path_factory.mktemp("one") / "run"
    ended = command(directory)
    assert [code for code, *_ in ended] == [0], ended
    return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same in two processes, of which the second got a SIGTERM on the way; ended by the same command."""
    directory = tmp_path_factory.mktemp("two") / "run"
    stopped = command(directory, processes=2, stops=1)
    steps, seen = Checkpoints(directory / "checkpoints").steps, len(losses(directory))
    return directory, stopped, steps, seen, command(directory, processes=2)


def test_a_signal_to_any_process_stops_all_at_one_step(two):
    """It comes with batch 16, travels with that step, and is read while the next is computed."""
    _, stopped, steps, seen, _ = two
    assert [code for code, *_ in stopped] == [143, 143], stopped
    assert steps == [EVERY, seen]
    assert seen == STOP_AT + 2
    assert f"stopped at step {seen}: the same command goes on from here" in stopped[0][1]
    assert says_nothing(*stopped[1])


def test_two_processes_are_one(one, two):
    directory, _, _, seen, ended = two
    assert [code for code, *_ in ended] == [0, 0], ended
    assert f"from step {seen}" in ended[0][1]
    assert_same_bits(directory.parent / f"saved-{seen}.npz", directory.parent / f"restored-{seen}.npz")
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(directory), losses(one), rtol=0, atol=1e-5)
    there, here = result(directory), result(one)
    assert losses(one)[-1] < losses(one)[0] - 0.5
    for measure in ("loss", "initial_loss"):
        assert there["eval"][measure] == pytest.approx(here["eval"][measure], abs=1e-5)
    assert there["evals"]["step"] == here["evals"]["step"] == [0, EVERY, 2 * EVERY, STEPS]
    assert there["probes"]["f_attn"] == pytest.approx(here["probes"]["f_attn"], abs=1e-5)
    for found, processes in ((here, 1), (there, 2)):
        environment = found["environment"]
        assert environment["mesh"] == dict(dcn_data=1, data=2, fsdp=4, expert=1, context=1, tensor=1)
        assert (environment["devices"], environment["processes"]) == (8, processes)
    assert says_nothing(*ended[1])


def test_a_run_goes_on_in_two_processes_on_another_mesh(one, tmp_path):
    """And sets a checkpoint aside of which a part is damaged. What 8 devices saved is read bit for bit."""
    directory = cut(one, tmp_path / "run", 2 * EVERY)
    (data,) = (directory / "checkpoints" / str(2 * EVERY) / "state" / "d").iterdir()
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    ended = command(directory, mesh="fsdp=2,tensor=2", devices=4, processes=2)
    assert [code for code, *_ in ended] == [0, 0], ended
    assert f"{directory / f'damaged-checkpoint-{2 * EVERY}'}" in ended[0][1]
    assert "mesh.fsdp = 4 and not 2" in ended[0][1]
    assert_same_bits(one.parent / f"saved-{EVERY}.npz", tmp_path / f"restored-{EVERY}.npz")
    np.testing.assert_allclose(losses(directory), losses(one), rtol=0, atol=1e-5)
    assert result(directory)["environment"]["mesh"]["tensor"] == 2


def test_one_device_reads_what_eight_saved(one, tmp_path):
    for step in (EVERY, STEPS):
        restored = Checkpoints(one / "checkpoints").restore(step, abstract_state(CONFIG)).state
        np.savez(tmp_path / "restored.npz", *map(np.asarray, jax.tree.leaves(restored)))
        assert_same_bits(one.parent / f"saved-{step}.npz", tmp_path / "restored.npz")
    loaded = resume.load(one)
    assert loaded.step == STEPS
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, restored.average))


def test_what_one_process_refuses_ends_all(one, tmp_path):
    """With its words and its exit code."""
    other, config, rest = tmp_path / "other.json", tmp_path / "config.json", cut(one, tmp_path / "run", EVERY)
    other.write_text(to_json(override(CONFIG, {"train.seed": 1})))
    config.write_text(to_json(CONFIG))
    at = address()
    arguments = [["refused", f"{at},2,{i}", tmp_path, config, other, one, rest] for i in range(2)]
    ended = started(*arguments, devices=8, processes=2)
    assert [code for code, *_ in ended] == [0, 0], ended
    first, second = (json.loads((tmp_path / f"outcomes-{i}.json").read_text()) for i in range(2))
    for name, code, said in (
        ("other config", 1, "train.seed = 0 and not 1"),
        ("no data", 2, "not on this machine"),
        ("locked", 1, "is being trained by another process"),
    ):
        assert first[name] == second[name], name
        assert first[name][0] == code
        assert said in first[name][1]
    assert first["finished"][0] == second["finished"][0] == 0
    assert "finished before" in first["finished"][1]
    assert second["finished"][1] == ""


@pytest.mark.parametrize(
    "how", ["1234", "host,2,0", "host:12,2", "host:12,2,2", "host:port,2,0", "host:1,two,0", "a:1,0,0"]
)
def test_a_start_that_cannot_be_is_explained(how):
    with pytest.raises(ConfigError, match=r"distributed = "):
        distributed.initialize(how)
