"""Metrics on a disk and in a bucket, loss spikes, MFU."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gattn import metrics
from gattn.files import as_path
from gattn.metrics import MetricsLog, SpikeCounter, flops_utilisation, read_metrics
from tests.bucket import bucket


def curve(length: int, seed: int = 0) -> np.ndarray:
    """A training curve: a power law and noise."""
    return 6.0 * np.arange(1, length + 1) ** -0.2 + np.random.default_rng(seed).normal(0, 0.05, length)


@pytest.mark.parametrize("seed", range(5))
def test_a_calm_curve_has_no_spikes(seed):
    assert SpikeCounter(curve(3000, seed).tolist()).summary() == {"count": 0, "steps": [], "share": 0.0}


def test_planted_spikes_are_counted_where_they_begin():
    """Jumps that decay over some steps, each one event; two close ones are one, two apart are two."""
    losses = curve(2000)
    for begin in (300, 700, 705, 1500):
        losses[begin - 1 : begin + 5] += np.array([3.0, 2.5, 2.0, 1.5, 1.0, 0.8])
    found = SpikeCounter(losses.tolist())
    assert found.begins == [300, 700, 1500]
    assert found.summary()["share"] == pytest.approx(23 / 2000)


def test_a_loss_that_never_comes_back_is_one_spike():
    losses = curve(1000)
    losses[600:] = 9.0
    assert SpikeCounter(losses.tolist()).summary() == {"count": 1, "steps": [601], "share": 0.4}


def test_a_drop_and_noise_that_grows_slowly_are_no_spikes():
    rng = np.random.default_rng(0)
    drop = curve(1000) - 1.5 * (np.arange(1000) >= 500)
    growing = 3.0 + rng.normal(0, 1, 2000) * np.linspace(0.01, 0.3, 2000)
    assert SpikeCounter(drop.tolist()).begins == []
    assert SpikeCounter(growing.tolist()).begins == []


def test_nothing_is_called_a_spike_before_there_is_a_curve_but_nan_is():
    early = [5.0] * 10 + [50.0] + [5.0] * 10
    assert SpikeCounter(early).begins == []
    assert SpikeCounter([*early, math.nan, *early]).begins == [22]


@given(st.lists(st.floats(0, 20), max_size=300), st.integers(0, 300))
def test_a_resumed_count_is_the_count(losses, cut):
    whole, resumed = SpikeCounter(losses), SpikeCounter(losses[:cut])
    for loss in losses[cut:]:
        resumed.add(loss)
    assert resumed.summary() == whole.summary()


def test_flops_utilisation():
    assert flops_utilisation(6e9, 50_000, "TPU v5 lite", 1) == pytest.approx(3e14 / 197e12)
    assert flops_utilisation(6e9, 50_000, "TPU v5 lite", 8) == pytest.approx(3e14 / 197e12 / 8)
    assert flops_utilisation(6e9, 50_000, "cpu", 1) is None


def test_log_drops_what_will_be_redone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "losses": [2.0]}\n{"step": 5, "losses": [1.0]}\n{"step": 7, "lo'
    )
    log = MetricsLog(tmp_path, 4)
    log.write(6, [float("nan")], loss=float("nan"))
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == read_metrics(tmp_path)
    assert read_metrics(tmp_path) == [{"step": 1, "losses": [2.0]}, {"step": 6, "losses": [None], "loss": None}]
    again = MetricsLog(tmp_path, 6)
    assert again.losses[0] == 2.0
    assert math.isnan(again.losses[1])


def write_some(log, steps, rng):
    for step in steps:
        log.write(step, [float(step)], loss=float(step), eval_loss=1.0 if step % 7 == 0 else 2.0)
        if rng.random() < 0.2:
            log.flush()


@pytest.mark.parametrize("seed", range(3))
def test_parts_in_a_bucket_hold_what_one_file_would(tmp_path, monkeypatch, seed):
    """Nothing is appended or renamed (the stand-in refuses both); a run that is cut loses only what was not flushed,
    which is beyond its last checkpoint, and goes on in order."""
    monkeypatch.setattr(metrics, "PART_LINES", 10)
    rng = random.Random(seed)
    with bucket(tmp_path / "bucket") as objects:
        places = [tmp_path / "disk", as_path("gs://bucket/run")]
        places[0].mkdir()
        for place in places:
            rng = random.Random(seed)
            log = MetricsLog(place, 0)
            write_some(log, range(1, 38), rng)
            log.flush()  # a checkpoint at 37
            write_some(log, range(38, 45), rng)  # and then the process is gone
            del log
            log = MetricsLog(place, 37)
            assert log.losses == [float(step) for step in range(1, 38)]
            write_some(log, range(38, 60), rng)
            log.close()
        assert read_metrics(places[0]) == read_metrics(places[1])
        assert [line["step"] for line in read_metrics(places[1])] == list(range(1, 60))
        assert len([name for name in objects.names() if "metrics-" in name]) > 1


def test_a_crash_while_parts_are_joined_repeats_no_line(tmp_path, monkeypatch):
    """The joined part is written before the old ones go: both may be there."""
    monkeypatch.setattr(metrics, "PART_LINES", 5)
    with bucket(tmp_path / "bucket") as objects:
        place = as_path("gs://bucket/run")
        log = MetricsLog(place, 0)
        for step in range(1, 18):
            log.write(step, [1.0])
            log.flush()
        log.close()
        before = {name: objects.read(name)[0] for name in objects.names()}
        MetricsLog(place, 17).close()
        for name, content in before.items():
            if name not in objects.names():
                objects.write(name, content)
        assert [line["step"] for line in read_metrics(place)] == list(range(1, 18))


def test_tensorboard_events_can_be_read_back(tmp_path):
    """With the reader of the same library's record format: every number, and after a restart nothing twice."""
    from tensorboardX.proto.event_pb2 import Event

    for begun, steps in ((0, (1, 2)), (1, (2,))):
        sink = metrics.TensorBoard(tmp_path, begun)
        for step in steps:
            sink.write(step, {"loss": 4.0 - step})
        sink.close()
    events = []
    for path in sorted(tmp_path.glob("events*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert (1, "loss", 3.0) in values
    assert values.count((2, "loss", 2.0)) == 2
    assert [e.step for e in events if e.session_log.status] == [1, 2]  # what is redone begins at step 2
