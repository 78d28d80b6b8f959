"""Sweeps: nothing starts with a wrong config, nothing is trained twice, nothing one run does stops the others.

The trainer of most tests is a stand-in of a few lines that keeps the contract of `gattn train` (lock, metrics, result)
and takes no seconds to start; what is under test, the scheduling of real processes, is real.
"""

import dataclasses
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from experiments import report, runner
from experiments.runner import Run, run_all, sweep
from gattn.config import Config, ConfigError, GateSpec

ROOT = Path(__file__).parents[1]
GATED = {"model.gates": (GateSpec("g1", "headwise"),)}

# python stand_in.py FOLDER BEHAVIOUR: sleeps for the seconds given, or fails.
STAND_IN = """
import fcntl, json, os, signal, sys, time
from gattn.config import Config, from_dict
folder, behaviour = sys.argv[1:]
lock = open(folder + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
signal.signal(signal.SIGTERM, lambda *_: (print("checkpoint", flush=True), sys.exit(143)))
with open(folder + "/times", "a") as times:
    print("begin", time.time(), file=times, flush=True)
    print(os.environ["NPROC"], os.environ["JAX_PLATFORMS"])
    if behaviour == "fail":
        raise RuntimeError("no such data")
    with open(folder + "/metrics.jsonl", "a") as metrics:
        print(json.dumps({"step": 1, "loss": 2.0, "tokens_per_s": 1000.0}), file=metrics)
    time.sleep(float(behaviour))
    config = from_dict(Config, json.load(open(folder + "/config.json")))
    with open(folder + "/part", "w") as part:
        json.dump({"fingerprint": config.fingerprint()}, part)
    os.replace(folder + "/part", folder + "/result.json")
    print("end", time.time(), file=times)
"""

# The runner as a process, to be killed: two seeds of two labels, two at a time.
SWEEPER = """
import sys
sys.path.insert(0, {tests!r})
from test_runner import quick, sweep_of
from experiments.runner import run_all
print([outcome.state for outcome in run_all(sweep_of("a", "b"), 2, command=quick({seconds}))])
"""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def quick(behaviour: float | dict[str, str | float] = 0.0):
    """The stand-in's command: one behaviour for all, or one by label."""

    def command(run: Run) -> list[str]:
        chosen = behaviour.get(run.label, 0.0) if isinstance(behaviour, dict) else behaviour
        return [sys.executable, "-c", STAND_IN, str(run.folder), str(chosen)]

    return command


def sweep_of(*labels: str, seeds: int = 2) -> list[Run]:
    return sweep(Config(), {label: {"train.steps": 100 + ord(label)} for label in labels}, range(seeds))


def go(runs, workers=2, **options) -> tuple[list[str], str]:
    """Their states and what the user saw."""
    screen = io.StringIO()
    outcomes = run_all(runs, workers, console=Console(file=screen, width=200), **options)
    assert [outcome.run for outcome in outcomes] == list(runs)
    return [outcome.state for outcome in outcomes], screen.getvalue()


def starts(run: Run) -> int:
    return (run.folder / "log.txt").read_text().count(" start: ")


def spans(runs) -> list[tuple[float, float]]:
    """Begin and end of each run's training."""
    words = [(run.folder / "times").read_text().split() for run in runs]
    return [(float(line[1]), float(line[3])) for line in words]


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def start_sweeper(seconds: float) -> subprocess.Popen:
    code = SWEEPER.format(tests=str(ROOT / "tests"), seconds=seconds)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_sweep_is_every_overlay_with_every_seed():
    runs = sweep(Config(), {"wide": {"model.ffn_dim": 1024}, "deep": {"model.num_layers": 8}}, (0, 5))
    assert [(run.label, run.seed, run.config.train.seed) for run in runs] == [
        ("wide", 0, 0),
        ("wide", 5, 5),
        ("deep", 0, 0),
        ("deep", 5, 5),
    ]
    assert runs[0].config.model.ffn_dim == 1024
    assert len({run.folder for run in runs}) == 4


@pytest.mark.parametrize(
    ("overlay", "names"),
    [
        ({"model.num_layer": 8}, "model.num_layer"),
        ({"num_layers": 8}, "num_layers"),
        ({"model.num_heads": 3}, "num_kv_heads"),
        ({"train.seed": 1}, "train.seed"),
    ],
)
def test_a_wrong_overlay_is_an_error_before_anything_starts(overlay, names, tmp_path):
    with pytest.raises(ConfigError, match=names):
        sweep(Config(), {"good": {}, "bad": overlay}, range(2))
    assert not list(tmp_path.iterdir())


def test_two_configs_with_one_name_are_an_error_before_anything_starts(tmp_path):
    runs = [*sweep_of("a", seeds=1), *sweep(Config(), {"a": {}}, [0])]
    with pytest.raises(ValueError, match="both called 'a, seed 0'"):
        run_all(runs, command=quick())
    assert not list(tmp_path.iterdir())


def test_everything_finishes_and_is_not_started_again():
    runs = sweep_of("a", "b")
    assert go(runs, command=quick())[0] == ["finished"] * 4
    before = [(run.folder / "result.json").stat().st_ino for run in runs]
    states, screen = go([*runs, *sweep_of("c")], command=quick())
    assert states == ["finished"] * 6
    assert "6 runs, 4 finished before" in screen
    assert [(run.folder / "result.json").stat().st_ino for run in runs] == before
    assert [starts(run) for run in runs] == [1] * 4


def test_equal_configs_are_trained_once():
    runs = sweep_of("a", seeds=1)
    twins = [*runs, dataclasses.replace(runs[0], label="another table's name")]
    assert go(twins, command=quick())[0] == ["finished"] * 2
    assert starts(runs[0]) == 1


def test_a_failed_run_is_reported_and_the_rest_finish():
    runs = sweep_of("a", "b", seeds=1)
    outcomes = run_all(runs, 1, command=quick({"a": "fail"}), console=Console(file=(screen := io.StringIO())))
    assert [outcome.state for outcome in outcomes] == ["failed", "finished"]
    assert "RuntimeError: no such data\nexit code 1" in outcomes[0].tail
    assert "RuntimeError: no such data" in screen.getvalue()
    assert go(runs, command=quick())[0] == ["finished"] * 2, "and it can be tried again"


def test_a_trainer_that_ends_without_a_result_has_failed():
    run = sweep_of("a", seeds=1)
    assert go(run, command=lambda _: [sys.executable, "-c", "print('done')"])[0] == ["failed"]


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_runs_at_a_time_than_workers(workers):
    runs = sweep_of("a", "b")
    go(runs, workers, command=quick(0.4))
    times = spans(runs)
    together = max(sum(begin <= moment < end for begin, end in times) for moment, _ in times)
    assert together == workers


def test_first_seeds_come_first_so_that_others_find_their_program_compiled():
    runs = sweep_of("a", "b")
    go(runs, 1, command=quick())
    order = [run.name for _, run in sorted(zip(spans(runs), runs, strict=True), key=lambda pair: pair[0])]
    assert order == ["a, seed 0", "b, seed 0", "a, seed 1", "b, seed 1"]


def test_trainers_have_one_thread_on_a_cpu():
    run = sweep_of("a", seeds=1)[0]
    go([run], command=quick())
    assert "1 cpu" in (run.folder / "log.txt").read_text()


@pytest.mark.parametrize("name", ["lock", "log.txt"])
def test_a_run_that_someone_else_trains_is_awaited_and_occupies_a_worker(name):
    held, other = sweep_of("a", "b", seeds=1)
    held.folder.mkdir(parents=True)
    seconds = 1.5
    code = (
        "import fcntl, sys, time\n"
        "folder, name, seconds, result = sys.argv[1:]\n"
        "file = open(f'{folder}/{name}', 'a')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(float(seconds))\n"
        "open(f'{folder}/result.json', 'w').write(result)\n"
    )
    result = json.dumps({"fingerprint": held.config.fingerprint()})
    words = [sys.executable, "-c", code, str(held.folder), name, str(seconds), result]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE)
    holder.stdout.readline()
    began = time.time()
    states, screen = go([other, held], 1, command=quick())
    holder.wait()
    assert states == ["finished"] * 2
    assert "running elsewhere: a" in screen
    assert not (held.folder / "times").exists(), "started although someone else trained it"
    assert spans([other])[0][0] > began + seconds * 0.8, "started although the only worker was taken"


def test_a_run_that_was_abandoned_elsewhere_is_taken_over():
    (run,) = sweep_of("a", seeds=1)
    run.folder.mkdir(parents=True)
    with open(run.folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        job = runner.Job(run)
        job.start(quick(), {})
        assert job.state == "elsewhere"
        job.poll()
        assert job.state == "elsewhere"
    job.poll()
    assert job.state == "waiting"
    assert go([run], command=quick())[0] == ["finished"]


def test_after_kill_9_of_the_runner_nothing_is_repeated_and_orphans_are_awaited():
    runs = sweep_of("a", "b")
    sweeper = start_sweeper(seconds=1.5)
    wait_for(lambda: sum((run.folder / "times").exists() for run in runs) == 4 and runs[0].result())
    sweeper.kill()
    sweeper.wait()
    done = [run for run in runs if run.result()]
    before = [(run.folder / "result.json").stat().st_ino for run in done]
    assert 0 < len(done) < 4, "the kill came too late to test anything"
    states, screen = go(runs, command=quick(1.5))
    assert states == ["finished"] * 4
    assert "running elsewhere" in screen
    assert [starts(run) for run in runs] == [1] * 4, "a run was started twice"
    assert [(run.folder / "result.json").stat().st_ino for run in done] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_stopped_runner_stops_its_trainers_and_the_same_sweep_goes_on(number, code):
    runs = sweep_of("a", "b")
    sweeper = start_sweeper(seconds=30)
    wait_for(lambda: sum((run.folder / "times").exists() for run in runs) == 2)
    sweeper.send_signal(number)
    assert sweeper.wait(60) == code
    logs = [path.read_text() for path in Path(os.environ["GATTN_HOME"]).glob("runs/*/log.txt")]
    assert len(logs) == 2
    assert all("checkpoint" in log for log in logs), "a trainer was not asked to stop"
    assert not any(runner._held(run.folder / "lock") for run in runs), "a trainer still runs"
    assert go(runs, command=quick())[0] == ["finished"] * 4


def test_a_result_of_another_config_is_refused():
    (run,) = sweep_of("a", seeds=1)
    run.folder.mkdir(parents=True)
    for text in ('{"fingerprint": "0"}', "{"):
        (run.folder / "result.json").write_text(text)
        with pytest.raises(ValueError, match=r"result\.json"):
            run_all([run], command=quick())


def raising_source(config):
    """A data source that cannot be opened."""
    raise RuntimeError("the disk with the data is away")


@pytest.mark.slow
def test_the_real_trainer_end_to_end(monkeypatch):
    """Two short runs of the sink bench finish and make a whole report; one without data fails with its reason."""
    from experiments.sinkbench import sinkbench_config

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    short = {"train.steps": 5, "optim.warmup_steps": 1, "data.eval_sequences": 8, "data.batch_size": 4}
    bad = short | {"data.source": "test_runner:raising_source"}
    runs = [
        *sweep(sinkbench_config(), {"good": short | GATED}, range(2)),
        *sweep(sinkbench_config(), {"bad": bad}, [0]),
    ]
    outcomes = run_all(runs, 2, console=Console(file=io.StringIO()))
    assert [outcome.state for outcome in outcomes] == ["finished", "finished", "failed"], [o.tail for o in outcomes]
    assert "the disk with the data is away" in outcomes[2].tail
    columns = (*report.ATTENTION_COLUMNS, report.EXCESS)
    section = report.Section("real", "Real", "", columns, (report.Row("good", tuple(runs[:2])),))
    table = report.Table("real", "Real", "", "pytest", (section,))
    text = (report.write(table, Console(file=io.StringIO())) / "report.md").read_text()
    assert text.count("![") == 4, "what training writes is not what the report reads"
    assert "| missing" not in text
    results = [run.result() for run in runs[:2]]
    assert results[0]["probes"]["f_attn_floor"] == pytest.approx(0.0595, abs=1e-3)
    assert results[0]["eval"]["loss"] != results[1]["eval"]["loss"], "seeds make no difference"
    assert run_all(runs[:2])[0].state == "finished"
    assert starts(runs[0]) == 1
