"""Several processes train as one does: by the command line, on 8 CPU devices in one process or in two of four."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.sinkbench import sinkbench_config
from gattn import distributed
from gattn.checkpoint import Checkpoints
from gattn.config import ConfigError, override, to_json
from gattn.metrics import read_metrics
from gattn.step import abstract_state

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY = 60, 20
CONFIG = override(
    sinkbench_config(),
    {
        "model.d_model": 32,
        "model.head_dim": 16,
        "model.match_params": False,
        "model.num_experts": 8,
        "model.experts_per_token": 2,
        "model.expert_dim": 16,
        "data.batch_size": 16,
        "data.eval_sequences": 16,
        "optim.warmup_steps": 5,
        "train.steps": STEPS,
        "train.log_every": 1,
        "train.eval_every": EVERY,
        "train.checkpoint_every": EVERY,
        "train.keep_every": EVERY,
        "train.balance_loss": 0.01,
        "train.tensorboard": False,
    },
)
MESH = "data=2,expert=4"
pytestmark = pytest.mark.slow


class Started:
    """The processes of one training command."""

    def __init__(self, directory, *more, mesh=MESH, devices=8, processes=1, config=CONFIG):
        directory.mkdir(exist_ok=True)
        file = directory.parent / f"{directory.name}-{config.train.seed}.json"
        file.write_text(to_json(config))
        words = [sys.executable, "-m", "gattn", "train", "--config", str(file), "--dir", str(directory), "--mesh", mesh]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices // processes), "PYTHONPATH": str(ROOT)}
        several = [["--distributed", f"{address},{processes},{i}"] for i in range(processes)] if processes > 1 else [[]]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
        self.processes = [subprocess.Popen([*words, *more, *which], **pipe) for which in several]

    def ended(self):
        """(exit code, what it said) of each process."""
        said = [process.communicate(timeout=300) for process in self.processes]
        return [(p.returncode, out + err) for p, (out, err) in zip(self.processes, said, strict=True)]


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


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """An uninterrupted run in one process."""
    directory = tmp_path_factory.mktemp("one") / "run"
    ended = Started(directory).ended()
    assert [code for code, _ in ended] == [0], ended
    return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same in two processes, of which the second got a SIGTERM on the way; ended by the same command."""
    directory = tmp_path_factory.mktemp("two") / "run"
    started = Started(directory, processes=2)
    deadline = time.monotonic() + 200
    while len(losses(directory)) < 3 and time.monotonic() < deadline and started.processes[0].poll() is None:
        os.sched_yield()
    started.processes[1].send_signal(signal.SIGTERM)
    stopped = started.ended()
    steps = Checkpoints(directory / "checkpoints").steps
    seen = len(losses(directory))
    return directory, stopped, steps, seen, Started(directory, processes=2).ended()


def test_a_signal_to_any_process_stops_all_at_one_step(two):
    _, stopped, steps, seen, _ = two
    assert [code for code, _ in stopped] == [143, 143], stopped
    assert steps[-1] == seen < STEPS, "the checkpoint is that of the last step that was logged"
    assert f"stopped at step {seen}" in stopped[0][1]
    assert "step" not in stopped[1][1], "only the first process speaks"


def test_two_processes_are_one(one, two):
    directory, *_, ended = two
    assert [code for code, _ in ended] == [0, 0], ended
    np.testing.assert_allclose(losses(directory), losses(one), atol=1e-5)
    assert len(losses(one)) == STEPS
    there, here = result(directory), result(one)
    assert there["eval"]["loss"] == pytest.approx(here["eval"]["loss"], abs=1e-5)
    assert there["probes"]["f_attn"] == pytest.approx(here["probes"]["f_attn"], abs=1e-5)
    assert np.array(there["probes"]["experts"]["load"]).sum() == pytest.approx(8, abs=1e-2)
    assert (there["environment"]["processes"], here["environment"]["processes"]) == (2, 1)
    assert there["environment"]["mesh"]["expert"] == 4


@pytest.mark.parametrize(("mesh", "devices", "processes"), [("fsdp=2,tensor=2", 4, 2), ("data=1", 1, 1)])
def test_a_run_goes_on_on_another_mesh(one, tmp_path, mesh, devices, processes):
    """Its checkpoint, written by 8 devices, is read by others bit for bit: it is refused if its checksum differs."""
    directory = cut(one, tmp_path / "run", EVERY)
    before = (directory / "metrics.jsonl").read_text().splitlines()
    ended = Started(directory, mesh=mesh, devices=devices, processes=processes).ended()
    assert [code for code, _ in ended] == [0] * processes, ended
    assert f"from step {EVERY}" in ended[0][1]
    assert (directory / "metrics.jsonl").read_text().splitlines()[:EVERY] == before[:EVERY]
    np.testing.assert_allclose(losses(directory), losses(one), atol=1e-5)
    assert result(directory)["environment"]["mesh"]["tensor"] == (2 if "tensor" in mesh else 1)


def test_a_checkpoint_of_eight_devices_is_the_same_bits_on_one(one):
    checkpoints = Checkpoints(one / "checkpoints")
    restored = checkpoints.restore(EVERY, abstract_state(CONFIG))
    assert restored.step == EVERY == int(restored.state.step)


def test_what_the_first_process_refuses_ends_all(one):
    """With its words: another config in the folder, and a run that is finished."""
    other = override(CONFIG, {"train.seed": 1})
    ended = Started(one, processes=2, config=other).ended()
    assert [code for code, _ in ended] == [1, 1], ended
    assert all("train.seed = 0 and not 1" in said for _, said in ended), ended
    ended = Started(one, processes=2).ended()
    assert [code for code, _ in ended] == [0, 0], ended
    assert "finished before" in ended[0][1]


@pytest.mark.parametrize("how", ["1234", "host,2,0", "host:12,2", "host:12,2,2", "host:port,2,0", "host:1,two,0"])
def test_a_start_that_cannot_be_is_explained(how):
    with pytest.raises(ConfigError, match=r"distributed = "):
        distributed.initialize(how)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    ((code, said),) = Started(tmp_path / "run", "--train.seed", "3", mesh="fsdp=3", devices=6).ended()
    assert code == 2
    assert "data.batch_size = 16: must be a multiple of 6" in said
    assert not list((tmp_path / "run").iterdir())
