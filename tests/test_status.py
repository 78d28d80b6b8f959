"""`experiments.status` tells runs that train, ended, stopped or cannot be read, and touches none of them."""

from __future__ import annotations

import fcntl
import io
import json

import pytest
from rich.console import Console

from experiments import status
from experiments.runner import Run
from gattn.config import Config, ConfigError, override, to_json


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def run_of(seed, log="", step=None):
    run = Run("a run", seed, override(Config(), {"train.seed": seed}))
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(to_json(run.config))
    if log:
        (run.folder / "log.txt").write_text(log)
    if step is not None:
        tokens = run.config.data.batch_size * run.config.data.seq_len
        record = {"step": step, "loss": 2.5, "tokens_per_s": tokens}  # one step a second
        (run.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return run


def shown(**args):
    screen = io.StringIO()
    assert status.main(status.Args(**args), Console(file=screen, width=200)) == 0
    return screen.getvalue()


def row(text, run):
    return next(line.split() for line in text.splitlines() if line.startswith(f"{run.folder.name} "))


def test_each_state_is_told_from_the_others():
    cut = run_of(0, log="some\nlines\nand the last one\n", step=50)
    trains = run_of(1, log="busy\n", step=Config().train.steps - 90)
    done = run_of(2)
    (done.folder / "result.json").write_text(json.dumps({"fingerprint": done.config.fingerprint()}))
    foreign = run_of(3)
    (foreign.folder / "config.json").write_text(to_json(cut.config))
    with open(trains.folder / "log.txt", "a") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        text = shown()
        assert row(text, trains)[1:] == [
            f"{Config().train.steps - 90}/{Config().train.steps}",
            "2.500",
            "1:30",
            "running",
        ]
    assert row(text, cut)[1:] == [f"50/{Config().train.steps}", "2.500", "-", "stopped"]
    assert "1 running, 1 stopped, 1 unreadable, 1 finished" in text
    assert "and the last one" in text
    assert f"belongs to {cut.folder.name}" in text
    assert f"{done.folder.name} " not in text
    assert row(shown(finished=True), done)[-1] == "finished"
    assert row(shown(), trains)[-1] == "stopped", "the lock is gone"
    assert "and the last one" not in shown(failures=False)


def test_a_broken_config_hides_no_other_run():
    broken, cut = run_of(0), run_of(1)
    (broken.folder / "config.json").write_text("{")
    text = shown()
    assert row(text, broken)[-1] == "unreadable"
    assert row(text, cut)[-1] == "stopped"


def test_no_runs_and_no_bucket(monkeypatch):
    assert "no runs" in shown()
    monkeypatch.setenv("GATTN_HOME", "gs://somewhere/else")
    with pytest.raises(ConfigError, match="GATTN_HOME"):
        shown()
