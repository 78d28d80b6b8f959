"""What starts the runs of a sweep: `print` names exactly what is missing, Slurm is asked for what was said and nothing
twice, a job that was cut comes back, and the scripts say to every worker what they were told.

The cluster of these tests is a few lines of shell that keep Slurm's manners; `make test-slurm` takes a real one.
"""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import launchers, study, table4
from experiments.launchers import SlurmOptions, launch
from experiments.runner import Run, sweep
from gattn.config import Config, ConfigError, from_dict

ROOT = Path(__file__).parents[1]

# What they are told and the numbers of jobs lie in $CLUSTER; so does `queue`, what squeue says of all jobs.
PROGRAMS = {
    "sbatch": """
test -z "$REFUSE" || { echo "sbatch: error: $REFUSE" >&2; exit 1; }
echo x >>$CLUSTER/count
number=$(wc -l <$CLUSTER/count)
echo "$number PENDING" >>$CLUSTER/queue
echo "Submitted batch job $number"
""",
    "squeue": """
test -z "$DOWN" || { echo "no controller" >&2; exit 1; }
case "$*" in *--job*) echo $STATE ;; *) test ! -e $CLUSTER/queue || cat $CLUSTER/queue ;; esac
""",
    "srun": 'printf "%s\\n" "$@" >$CLUSTER/srun; env >$CLUSTER/env; exit ${CODE:-0}',
    "scontrol": 'echo "$@" >>$CLUSTER/scontrol',
    "gcloud": 'printf "%s\\0" "$@" >>$CLUSTER/gcloud; echo >>$CLUSTER/gcloud',
}


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    """Stand-ins for the programs of Slurm and of Google's cloud; a folder with what they were told."""
    folder, programs = tmp_path / "cluster", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text("#!/bin/bash\n" + text)
        (programs / name).chmod(0o755)
    for name, value in {"GATTN_HOME": tmp_path / "home", "CLUSTER": folder}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(launchers, "POLL_S", 0.01)
    return folder


def runs_of(*labels: str, seeds: int = 2) -> list[Run]:
    return sweep(Config(), {label: {"train.steps": 100 + ord(label)} for label in labels}, range(seeds))


def finish(run: Run) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "result.json").write_text(json.dumps({"fingerprint": run.config.fingerprint()}))


def go(runs, launcher="slurm", **options) -> tuple[list[str], str]:
    screen = io.StringIO()
    slurm = SlurmOptions(**options) if launcher == "slurm" else None
    outcomes = launch(runs, launcher, slurm=slurm, console=Console(file=screen, width=250))
    return [outcome.state for outcome in outcomes], screen.getvalue()


def scripts(run: Run) -> list[str]:
    return [path.read_text() for path in sorted((run.folder / "slurm").glob("*_submission.sh"))]


def sbatch_options(script: str) -> dict[str, str]:
    words = [shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name.removeprefix("--"): value for name, _, value in (word.partition("=") for word in words)}


def test_print_names_exactly_what_is_missing_and_trains_nothing(tmp_path):
    runs = runs_of("a", "b")
    finish(runs[1])
    states, screen = go(runs, "print")
    assert states == ["waiting", "finished", "waiting", "waiting"]
    lines = [line for line in screen.splitlines() if not line.startswith("#")]
    printed = []
    for line in lines:
        words = shlex.split(line)
        assert words[:3] == ["cd", os.getcwd(), "&&"]
        assert f"GATTN_HOME={tmp_path / 'home'}" in words
        start = words.index(sys.executable)
        assert words[start : start + 5] == [sys.executable, "-m", "gattn", "train", "--config"]
        (config,) = words[start + 5 :]
        printed.append(from_dict(Config, json.loads(Path(config).read_text())))
        assert not (Path(config).parent / "log.txt").exists()
    assert printed == [run.config for run in runs if run is not runs[1]]


def test_table4_prints_the_commands_of_its_runs_and_no_report(tmp_path):
    args = table4.Args(launcher="print", seeds=1, steps=5)
    assert study.run(table4.build(args), args, Console(file=(screen := io.StringIO()), width=80)) == 0
    runs = table4.build(args).runs()
    assert screen.getvalue().count(" -m gattn train --config ") == len(runs) > 5
    for run in runs:
        finish(run)
    assert study.run(table4.build(args), args, Console(file=(screen := io.StringIO()), width=80)) == 0
    assert screen.getvalue() == f"# {len(runs)} runs, {len(runs)} finished before\n"
    assert not list((tmp_path / "home").rglob("report.md"))


def test_a_printed_line_is_a_command_of_the_shell(monkeypatch, tmp_path):
    """It runs anywhere, and its home is the sweep's, blanks and all."""
    monkeypatch.setenv("GATTN_HOME", str(tmp_path / "a home"))
    _, screen = go(runs_of("a", seeds=1), "print")
    line = screen.splitlines()[-1].replace("-m gattn train", '-c "import os; print(os.environ[\\"GATTN_HOME\\"])"')
    answer = subprocess.run(["sh", "-c", line], cwd="/", capture_output=True, text=True)
    assert answer.stdout == f"{tmp_path / 'a home'}\n", answer.stderr


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"minutes": 3}, "minutes = 3"),
        ({"nodes": 0}, "nodes = 0"),
        ({"cpus_per_task": "4"}, "cpus_per_task = '4'"),
        ({"nodes": 2, "gpus_per_node": 8}, "tasks_per_node = 1.*gpus_per_node = 8"),
        ({"mesh": "data=2,fdsp=2"}, "fdsp"),
        ({"extra": ("time=5",)}, "extra = 'time=5'"),
        ({"extra": ("--reservation=x",)}, "extra = '--reservation=x'"),
        ({"extra": ("gpus-per-node=1",)}, "extra = 'gpus-per-node=1'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, names):
    with pytest.raises(ConfigError, match=names):
        SlurmOptions(**options)


def test_options_of_another_launcher_are_refused(tmp_path):
    runs = runs_of("a")
    with pytest.raises(ConfigError, match="workers = 2"):
        launch(runs, "print", workers=2)
    with pytest.raises(ConfigError, match="launcher = 'local'"):
        launch(runs, slurm=SlurmOptions(nodes=2))
    assert not (tmp_path / "home").exists()


def test_slurm_is_asked_for_what_was_said(tmp_path):
    (run,) = runs_of("a", seeds=1)
    options = {"partition": "gpu", "account": "me", "qos": "high", "nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8}
    options |= {"cpus_per_task": 6, "mem_gb": 200, "minutes": 90, "setup": ("module load cuda",)}
    options |= {"extra": ("exclude=node7", "exclusive"), "mesh": "data=4,fsdp=4"}
    assert go([run], wait=False, **options)[0] == ["waiting"]
    (script,) = scripts(run)
    wanted = {"partition": "gpu", "account": "me", "qos": "high", "nodes": "2", "ntasks-per-node": "8"}
    wanted |= {"gpus-per-node": "8", "cpus-per-task": "6", "mem": "200GB", "time": "90", "exclude": "node7"}
    wanted |= {"signal": "TERM@120", "requeue": "", "open-mode": "append", "exclusive": "", "job-name": run.folder.name}
    assert sbatch_options(script).items() >= wanted.items()
    lines = script.splitlines()
    assert lines.index("module load cuda") > lines.index(f"export GATTN_HOME={tmp_path / 'home'}")
    assert from_dict(Config, json.loads((run.folder / "config.json").read_text())) == run.config


def test_what_was_not_said_is_left_to_the_cluster():
    (run,) = runs_of("a", seeds=1)
    go([run], wait=False)
    assert not {"partition", "account", "qos", "gpus-per-node", "mem"} & set(sbatch_options(scripts(run)[0]))


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, []), ({"tasks_per_node": 2, "mesh": "data=2"}, ["--mesh", "data=2", "--distributed", "auto"])],
)
def test_each_process_of_a_job_becomes_the_trainer(options, more, monkeypatch):
    """By submitit's own entry point, as Slurm's task calls it; the trainer is a shell that says what it was told."""
    (run,) = runs_of("a", seeds=1)
    words = SlurmOptions(**options).command(run)
    assert words == [sys.executable, "-m", "gattn", "train", "--config", str(run.folder / "config.json"), *more]
    stand_in = ["/bin/sh", "-c", 'echo "$@"; kill -TERM $$', "sh", "trained"]
    monkeypatch.setattr(launchers, "train_command", lambda run: stand_in)
    go([run], wait=False, **options)
    task = [sys.executable, "-m", "submitit.core._submit", str(run.folder / "slurm")]
    env = os.environ | {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "1"}
    answer = subprocess.run(task, env=env, capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == " ".join(["trained", *more]), answer.stderr
    assert answer.returncode == -15, "the signal was not the trainer's"


def test_nothing_is_submitted_twice(cluster):
    runs = runs_of("a", "b")
    finish(runs[0])
    assert go(runs, wait=False)[0] == ["finished", *["waiting"] * 3]
    (cluster / "queue").write_text("1 PENDING\n3 RUNNING\n")  # 2 has ended without a result
    _, screen = go(runs, wait=False)
    assert screen.count("there already") == 2
    assert sorted(len(scripts(run)) for run in runs) == [0, 1, 1, 2]


def test_waiting_ends_with_results_and_with_the_log_of_a_job_that_failed(cluster, monkeypatch):
    good, bad = runs_of("a", "b", seeds=1)
    go([good, bad], wait=False)
    (bad.folder / "slurm" / "2_0_log.out").write_text("RuntimeError: no such data")
    told = [{"1": "RUNNING", "2": "RUNNING"}] * 5 + [{"1": "RUNNING"}] * 2

    def queue():
        if not told:
            finish(good)
        return told.pop(0) if told else {}

    monkeypatch.setattr(launchers, "_queue", queue)
    states, screen = go([good, bad])
    assert states == ["finished", "failed"]
    assert f"({bad.folder / 'slurm'})\n    RuntimeError: no such data" in screen


def test_a_controller_that_is_away_for_a_moment_is_asked_again(monkeypatch):
    (run,) = runs_of("a", seeds=1)
    asked = []
    real = launchers._queue

    def queue():
        asked.append(1)
        monkeypatch.setenv("DOWN", "1" if 3 < len(asked) < 6 else "")
        if len(asked) == 8:
            finish(run)
        return real()

    monkeypatch.setattr(launchers, "_queue", queue)
    states, screen = go([run])
    assert states == ["finished"]
    assert screen.count("asking again: squeue: no controller") == 2


def test_what_slurm_refuses_is_one_error(monkeypatch):
    runs = runs_of("a")
    monkeypatch.setenv("REFUSE", "invalid partition specified: gpuu")
    with pytest.raises(ConfigError, match="invalid partition specified: gpuu"):
        go(runs, partition="gpuu")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no Slurm here"):
        go(runs)


@pytest.mark.parametrize("which", ["submitted", "slurm.sbatch"])
@pytest.mark.parametrize(
    ("code", "state", "again"),
    [(143, "RUNNING", True), (143, "COMPLETING", False), (0, "RUNNING", False), (1, "RUNNING", False)],
)
def test_a_job_queues_again_only_if_it_was_stopped_and_not_cancelled(cluster, which, code, state, again):
    if which == "submitted":
        (run,) = runs_of("a", seeds=1)
        go([run], wait=False)
        words = ["bash", "-c", scripts(run)[0]]
    else:
        words = ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "--preset", "tiny"]
    env = os.environ | {"CODE": str(code), "STATE": state, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
    assert subprocess.run(words, env=env).returncode == code
    told = cluster / "scontrol"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if again else "")


@pytest.mark.parametrize(
    ("tasks", "per_node", "distributed", "devices"),
    [(1, 1, False, None), (16, 8, True, None), (2, 1, True, "0,1,2,3,4,5,6,7")],
)
def test_the_batch_script_starts_a_process_per_gpu_or_per_node(cluster, tasks, per_node, distributed, devices):
    words = ["--preset", "tiny", "--mesh", "data=2,fsdp=8", "--optim.learning-rate", "1e-3"]
    env = os.environ | {"SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(per_node), "SLURM_GPUS_ON_NODE": "8"}
    subprocess.run(["bash", ROOT / "scripts" / "slurm.sbatch", *words], env=env | {"PYTHON": "py"}, check=True)
    started = (cluster / "srun").read_text().splitlines()
    assert started[1:] == ["py", "-m", "gattn", "train", *words, *(["--distributed", "auto"] if distributed else [])]
    seen = dict(line.split("=", 1) for line in (cluster / "env").read_text().splitlines() if "=" in line)
    assert seen.get("JAX_LOCAL_DEVICE_IDS") == devices


def pod(*words: str, **env: str) -> subprocess.CompletedProcess:
    env = {"TPU": "pod", "ZONE": "us-east5-a", "GATTN_HOME": "gs://bucket/me"} | env
    command = ["bash", str(ROOT / "scripts" / "tpu_pod.sh"), *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=20)


def told_gcloud(cluster) -> list[list[str]]:
    return [call.split("\0") for call in (cluster / "gcloud").read_text().removesuffix("\0\n").split("\0\n")]


def test_every_worker_of_a_pod_gets_the_same_command_and_a_second_call_starts_nothing(cluster, tmp_path):
    """The workers are folders here: their commands run in them, with a trainer that says what it was told."""
    words = ["--preset", "tiny", "--mesh", "data=4", "--train.wandb", "it's mine"]
    answer = pod("train", *words, PROJECT="mine")
    assert answer.returncode == 0, answer.stderr
    start, watch = told_gcloud(cluster)
    for call, which in ((start, "all"), (watch, "0")):
        assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod"]
        assert {"--zone=us-east5-a", "--project=mine", f"--worker={which}"} <= set(call)
    python = tmp_path / "worker" / "gattn" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/bash\ntrap "echo checkpoint; exit 143" TERM\nprintf "%s\\n" "$GATTN_HOME" "$@" end\n'
        "for _ in {1..100}; do sleep 0.1; done\n"
    )
    python.chmod(0o755)
    assert pod("stop").returncode == 0
    stop = told_gcloud(cluster)[-1]

    def worker(call):
        command = call[-1].removeprefix("--command=")
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path / "worker", capture_output=True, text=True, timeout=9
        )

    for _ in range(2):
        assert worker(start).returncode == 0
    assert worker(stop).stdout == ""
    assert worker(watch).returncode == 0  # ends with the trainer
    said = (python.parents[2] / "train.log").read_text().splitlines()
    assert said == ["gs://bucket/me", "-m", "gattn", "train", *words, "--distributed", "auto", "end", "checkpoint"]
    assert worker(stop).stdout == "nothing to stop\n"


@pytest.mark.parametrize(
    ("words", "env", "names"),
    [
        ((), {}, "setup, train or stop"),
        (("train",), {}, "--preset"),
        (("train", "--preset", "tiny"), {"TPU": ""}, "TPU"),
        (("train", "--preset", "tiny"), {"GATTN_HOME": "/disk"}, "GATTN_HOME = '/disk'"),
    ],
)
def test_a_pod_is_not_started_wrongly(cluster, words, env, names):
    answer = pod(*words, **env)
    assert answer.returncode == 2
    assert names in answer.stderr
    assert not (cluster / "gcloud").exists()
