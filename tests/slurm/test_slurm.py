"""Sweeps on a real Slurm cluster of this machine alone: its daemons start here and stop at the end (`make test-slurm`).

It needs the programs of Debian's slurm-wlm and munge, no systemd, no cgroups, no accounting, and any user.
"""

import getpass
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from experiments import launchers
from experiments.launchers import SlurmOptions, launch
from experiments.runner import Run, sweep
from experiments.sinkbench import sinkbench_config

ROOT = Path(__file__).parents[2]
CORES = 4  # as far as Slurm knows, however many there are
SMALL = {"optim.warmup_steps": 1, "data.eval_sequences": 8, "data.batch_size": 4, "train.log_every": 5}
CONF = """
ClusterName=gattn
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    """munged, slurmctld and slurmd as our own children, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="gattn-slurm-") as name:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")
        missing = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(program)]
        if missing:
            pytest.fail(f"{', '.join(missing)}: not installed; apt-get install slurm-wlm munge")
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        for part in ("state", "spool"):
            (folder / part).mkdir()
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=free_ports(2), cores=CORES))
        patch.setenv("SLURM_CONF", str(conf))
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        commands = (
            ["munged", "--foreground", "--force", *(f"--{o}={folder}/munge.{end}" for o, end in munge.items())],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D"],
        )
        daemons = []
        try:
            for words in commands:
                with open(folder / f"{words[0]}.out", "w") as output:
                    daemons.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
            try:
                wait_for(lambda: "idle" in slurm("sinfo", "--noheader", "--format", "%T", check=False))
            except AssertionError:
                pytest.fail("\n".join(path.read_text() for path in sorted(folder.glob("*.out"))))
            yield
            slurm("scancel", "--user", getpass.getuser())
            wait_for(lambda: not slurm("squeue", "--noheader"))
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    monkeypatch.setattr(launchers, "POLL_S", 0.5)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def slurm(*words: str, check: bool = True) -> str:
    answer = subprocess.run(words, capture_output=True, text=True)
    assert not check or answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def state(job: str) -> str:
    """Empty once it has left the queue."""
    return slurm("squeue", "--noheader", "--job", job, "--format", "%T", check=False)


def small_runs(steps: int, seeds: int = 1) -> list[Run]:
    return sweep(sinkbench_config(), {"small": SMALL | {"train.steps": steps}}, range(seeds))


def go(runs: list[Run], **options) -> tuple[list[str], str]:
    """How they ended and what the user saw."""
    screen = io.StringIO()
    outcomes = launch(runs, "slurm", slurm=SlurmOptions(**options), console=Console(file=screen, width=200))
    return [outcome.state for outcome in outcomes], screen.getvalue()


def jobs(run: Run) -> list[str]:
    """Numbers of all jobs ever submitted for it."""
    return sorted(path.name.split("_")[0] for path in (run.folder / "slurm").glob("*_submission.sh"))


def log(run: Run) -> str:
    return "".join(path.read_text() for path in sorted((run.folder / "slurm").glob("*_log.out")))


def submit_and_let_train(run: Run) -> str:
    """A job that has taken some steps."""
    assert go([run], wait=False)[0] == ["waiting"]
    (job,) = jobs(run)
    metrics = run.folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"losses"') > 2, 120)
    return job


def start_now(job: str) -> None:
    """Slurm lets a job that was put back wait for two minutes; some seconds let the end of its first part arrive."""
    wait_for(lambda: state(job) == "PENDING")
    time.sleep(4)
    slurm("scontrol", "update", f"jobid={job}", "starttime=now")


def test_a_sweep_becomes_a_job_per_run_and_is_not_repeated():
    runs = small_runs(steps=5, seeds=2)
    states, screen = go(runs)
    assert states == ["finished"] * 2, screen + log(runs[0])
    results = [run.result() for run in runs]
    assert results[0]["eval"]["loss"] != results[1]["eval"]["loss"]
    assert [len(jobs(run)) for run in runs] == [1, 1]
    assert go(runs)[0] == ["finished"] * 2
    assert [len(jobs(run)) for run in runs] == [1, 1], "submitted again although finished"


def test_a_job_that_is_told_to_stop_queues_again_and_goes_on():
    """SIGTERM is what it gets before its time is up and before it is preempted."""
    (run,) = small_runs(steps=1000)
    job = submit_and_let_train(run)
    slurm("scancel", "--signal=TERM", job)
    start_now(job)
    assert "stopped at step" in log(run)
    states, screen = go([run])
    assert states == ["finished"], screen + log(run)
    assert "there already" in screen
    assert jobs(run) == [job], "a second job although the first was in the queue"
    assert "from step" in log(run)


def test_a_job_that_its_owner_cancels_stays_away_until_the_sweep_is_called_again():
    (run,) = small_runs(steps=1001)
    job = submit_and_let_train(run)
    slurm("scancel", job)
    wait_for(lambda: not state(job))
    time.sleep(2)
    assert not state(job), "it came back"
    states, screen = go([run])
    assert states == ["finished"], screen + log(run)
    assert len(jobs(run)) == 2
    assert "from step" in log(run)


def test_a_job_that_fails_is_reported_with_the_end_of_its_log():
    bad = sweep(sinkbench_config(), {"bad": SMALL | {"data.source": "tests.slurm.test_slurm:no_source"}}, [0])
    states, screen = go(bad)
    assert states == ["failed"]
    assert "the disk with the data is away" in screen
    assert f"{bad[0].folder / 'slurm'})" in screen


def no_source(config):
    """A data source that cannot be opened."""
    raise RuntimeError("the disk with the data is away")


def test_the_batch_script_goes_on_as_well(tmp_path):
    words = ["--preset", "experiments.sinkbench:sinkbench_config", "--train.steps", "1002", "--dir", f"{tmp_path}/run"]
    words += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options = ["--parsable", f"--chdir={ROOT}", f"--output={tmp_path}/log", "--nodes=1", "--ntasks-per-node=1"]
    options += ["--gpus-per-node=0", "--cpus-per-task=1", f"--export=ALL,PYTHON={sys.executable}"]
    job = slurm("sbatch", *options, str(ROOT / "scripts" / "slurm.sbatch"), *words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"losses"') > 2, 120)
    slurm("scancel", "--signal=TERM", job)
    start_now(job)
    wait_for(lambda: not state(job), 240)
    text = (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "result.json").exists(), text
    assert "from step" in text


def test_a_job_of_two_processes_ends_as_one_run():
    """Two processes with a CPU each; collectives by gloo. After SIGTERM both stop at the same step."""
    (run,) = small_runs(steps=300)
    two = {"tasks_per_node": 2, "mesh": "data=2"}
    assert go([run], wait=False, **two)[0] == ["waiting"]
    (job,) = jobs(run)
    metrics = run.folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"losses"') > 2, 180)
    slurm("scancel", "--signal=TERM", job)
    start_now(job)
    states, screen = go([run], **two)
    assert states == ["finished"], screen + log(run)
    assert "from step" in log(run)
    assert jobs(run) == [job]
