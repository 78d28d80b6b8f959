"""`gattn probe`: it measures what the run measured, text without its padding, and names mistakes."""

import dataclasses
import functools
import io
import json
import math
import shutil

import numpy as np
import pytest
from rich.console import Console

from experiments.sinkbench import BOS, sinkbench
from gattn import inspection, resume, train
from gattn.__main__ import main
from gattn.config import ConfigError, GateSpec, override
from gattn.files import home
from gattn.metrics import finite
from tests.bucket import bucket
from tests.test_train import SHORT

QUIET = override(SHORT, {"train.tensorboard": False})
TEXT = override(
    QUIET,
    {
        "data.source": "tests.test_inspection:letters",
        "data.batch_size": 4,
        "data.eval_sequences": 8,
        "train.steps": 4,
        "model.num_layers": 2,
        "model.softmax": "sink_logit",
        "model.gates": (GateSpec("g1", "headwise"), GateSpec("g5")),
    },
)


def letters(config):
    """The sink bench, with an encoder that takes text: a byte is a token, two bytes of text each."""

    def encode(text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) % 64

    return dataclasses.replace(sinkbench(config), encode=encode, bos_id=BOS, token_bytes=np.full(65, 2))


@pytest.fixture(scope="module", autouse=True)
def _compile_once():
    """One probe of a model is compiled once, not for every test."""
    cached = functools.cache(train.eval_step)
    with pytest.MonkeyPatch.context() as patch:
        for module in (train, inspection):
            patch.setattr(module, "eval_step", cached)
        yield


@pytest.fixture(scope="module")
def finished():
    """A finished run at home, and its result."""
    return home() / "runs" / QUIET.run_name, train.train(QUIET, console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A run on text, and what `resume.load` gives of it."""
    directory = tmp_path_factory.mktemp("reader")
    train.train(TEXT, directory, Console(file=io.StringIO()))
    return directory, resume.load(directory)


def written(run, **options):
    """The numbers and the page that `inspect` writes, and what it prints."""
    screen = io.StringIO()
    path = inspection.inspect(run, console=Console(file=screen, width=80), **options)
    return json.loads(path.with_suffix(".json").read_text()), path.read_text(), screen.getvalue()


def test_held_out_numbers_are_those_of_the_result(finished):
    directory, result = finished
    measured, page, screen = written(directory)
    shown = result["probes"].pop("attention_map")
    assert measured["probes"] == result["probes"]
    assert all(result["eval"][name] == value for name, value in measured["eval"].items())
    assert measured["step"] == 12
    assert measured["data"] == {"name": "held-out", "sequences": 64, "tokens": 64 * 64}
    assert measured["maps"]["tokens"] == shown["tokens"]
    np.testing.assert_allclose(np.mean(measured["maps"]["by_head"], axis=1), shown["by_layer"], atol=1e-4)
    for text in (page, screen):
        assert f"{result['probes']['f_attn']:.4f}" in text
        assert f"{result['eval']['loss']:.4f}" in text
    assert max(map(len, screen.splitlines())) <= 80


def test_another_checkpoint_can_be_chosen(finished):
    directory, result = finished
    measured, _, _ = written(directory, step=8)
    losses = dict(zip(result["evals"]["step"], result["evals"]["loss"], strict=True))
    assert measured["step"] == 8
    assert measured["eval"]["loss"] == pytest.approx(losses[8], rel=1e-6)


def test_text_is_cut_into_windows_that_begin_with_bos():
    ids = np.arange(1, 12, dtype=np.int32)
    batches = list(inspection.windows(ids, bos_id=99, seq_len=4, batch_size=2))
    assert [batch["targets"].shape for batch in batches] == [(2, 4), (2, 4)]
    targets = np.concatenate([batch["targets"] for batch in batches])
    assert targets[targets >= 0].tolist() == ids.tolist()
    assert batches[0]["inputs"].tolist() == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert batches[1]["targets"].tolist() == [[9, 10, 11, -1], [-1] * 4]
    assert batches[1]["inputs"][0, :3].tolist() == [99, 9, 10]
    assert batches[1]["segment_ids"].tolist() == [[1, 1, 1, -1], [-1] * 4]


def test_padding_changes_nothing(reader):
    """The same whatever batches and padding windows the text comes in, and for whole windows the same as without."""
    _, loaded = reader
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, 64 * 6 + 9).astype(np.int32)
    cut = [list(inspection.windows(ids, BOS, 64, size)) for size in (4, 7)]
    padding = {name: np.full_like(value, -1 if name != "inputs" else 5) for name, value in cut[0][0].items()}
    cut.append([*cut[0], padding, padding])
    flat = [_flat(inspection.measure(loaded, batches, "text")) for batches in cut]
    for other in flat[1:]:
        np.testing.assert_allclose(other, flat[0], rtol=2e-5, atol=2e-6)

    (padded,) = inspection.windows(ids[: 64 * 4], BOS, 64, 7)
    whole = {name: padded[name][:4] for name in ("inputs", "targets")}
    ones = [_flat(inspection.measure(loaded, [batch], "text")) for batch in (padded, whole)]
    np.testing.assert_allclose(*ones, rtol=2e-5, atol=2e-6)
    assert ones[0].shape == flat[0].shape
    assert not np.allclose(ones[0], flat[0], rtol=2e-5, atol=2e-6)


def test_every_number_is_a_mean_over_what_was_counted(reader):
    """A long and a short window together: means over their tokens, over both, or over those with a second token."""
    _, loaded = reader
    ids = np.random.default_rng(0).integers(0, 64, 64 + 1).astype(np.int32)

    def numbers(ids):
        found = inspection.measure(loaded, inspection.windows(ids, BOS, 64, 4), "text")["probes"]
        gate, before = found["gates"]["g1"], found["sdpa"]["before"]
        by_token = [found["kurtosis_by_layer"], gate["mean_by_layer"], before["mean_abs_by_layer"]]
        by_token += [gate["histogram"]["shares"][0][:2], before["below_1e-2_by_layer"]]
        by_sequence = [found["m_act_by_layer"], found["value_norm_first_by_layer"]]
        by_longer = [found["first_token_ratio_by_layer"], found["value_norm_ratio_by_layer"]]
        by_longer += found["f_attn_by_head"]
        return np.array(by_token), np.array(by_sequence), np.array(by_longer)

    together, long = numbers(ids), numbers(ids[:64])
    with np.errstate(invalid="ignore"):  # alone, it has no second token to divide by
        short = numbers(ids[64:])
    np.testing.assert_allclose(together[0], (64 * long[0] + short[0]) / 65, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(together[1], (long[1] + short[1]) / 2, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(together[2], long[2], rtol=1e-4, atol=2e-6)


def _flat(measured):
    """Every number; those of single values that may round differently are given to few digits already."""
    if isinstance(measured, dict):
        return np.concatenate([_flat(value) for value in measured.values()])
    if isinstance(measured, list):
        return np.concatenate([_flat(value) for value in measured]) if measured else np.zeros(0)
    return np.zeros(0) if isinstance(measured, str) or measured is None else np.array([measured], float)


def test_a_text_file_is_measured_as_one_document(reader, tmp_path):
    directory, _ = reader
    text = "The gate opens, the gate closes.\n" * 5
    (tmp_path / "gates & more.txt").write_text(text)
    measured, page, screen = written(directory, text=tmp_path / "gates & more.txt", layers=[1])
    assert {p.name for p in directory.glob("probe*")} == {"probe-gates & more.txt.html", "probe-gates & more.txt.json"}
    assert measured["data"] == {"name": "gates & more.txt", "sequences": 3, "tokens": len(text)}
    assert measured["eval"]["tokens"] == len(text)
    assert measured["eval"]["bits_per_byte"] == pytest.approx(measured["eval"]["loss"] / math.log(2) / 2)
    assert measured["eval"]["bayes_loss"] is None
    assert measured["maps"]["layers"] == [1]
    assert measured["maps"]["tokens"][0] == "BOS"
    np.testing.assert_array_less(np.sum(measured["maps"]["by_head"], axis=-1), 1.0)  # the sink logit takes the rest
    assert measured["probes"]["absorbed"] > 0
    assert "gates &amp; more.txt" in page
    assert "gates & more.txt" in screen
    # F-Attn's floor, by hand: windows of 64, 64 and the rest.
    rest = len(text) - 128
    visible = np.concatenate([np.arange(2, n + 1) for n in (64, 64, rest)])
    assert measured["probes"]["f_attn_floor"] == pytest.approx((1 / visible).mean(), rel=1e-5)


def test_a_short_text_shows_only_its_tokens(reader, tmp_path):
    (tmp_path / "short").write_text("ab")
    measured, _, _ = written(reader[0], text=tmp_path / "short")
    assert np.shape(measured["maps"]["by_head"]) == (2, 2, 2, 2)
    assert measured["probes"]["f_attn_floor"] == 0.5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"a", "only 1 token"),
        (b"caf\xe9", "not UTF-8 from byte 3"),
    ],
)
def test_wrong_texts_are_explained(reader, tmp_path, content, says):
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        inspection.inspect(reader[0], text=path)
    assert error.value.field == "text"


def test_text_needs_a_run_on_text(finished, tmp_path):
    (tmp_path / "file.txt").write_text("some text")
    with pytest.raises(ConfigError, match="no text"):
        inspection.inspect(finished[0], text=tmp_path / "file.txt")


@pytest.mark.parametrize("layer", [-1, 1])
def test_layers_out_of_range_are_refused(finished, layer):
    with pytest.raises(ConfigError, match="0 to 0") as error:
        inspection.inspect(finished[0], layers=[layer])
    assert error.value.field == "layers"


def test_a_run_without_a_checkpoint_is_refused(finished, tmp_path):
    (tmp_path / "config.json").write_text((finished[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="checkpoint"):
        inspection.inspect(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint") as error:
        inspection.inspect(finished[0], step=5)
    assert error.value.field == "step"


def test_runs_are_found_by_folder_and_by_name(finished):
    directory, _ = finished
    assert resume.find_run(str(directory)) == directory
    assert resume.find_run(QUIET.run_name) == directory
    assert resume.find_run(QUIET.run_name[:-3]) == directory  # its beginning is enough
    for misspelt in (QUIET.run_name[:-1] + "x", f"runs/{QUIET.run_name[2:]}"):
        with pytest.raises(ConfigError, match=f"did you mean .*{QUIET.run_name}") as error:
            resume.find_run(misspelt)
        assert error.value.field == "run"


def test_a_beginning_that_several_runs_share_names_them(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    for name in ("mine-a", "mine-b", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="2 runs begin so: mine-a, mine-b"):
        resume.find_run("mine")
    assert resume.find_run("oth").name == "other"


def test_a_run_in_a_bucket_is_measured_there(finished, tmp_path, monkeypatch):
    directory, _ = finished
    shutil.copytree(directory, tmp_path / "bucket" / "runs" / QUIET.run_name)
    monkeypatch.setenv("GATTN_HOME", "gs://bucket")
    with bucket(tmp_path / "bucket"):
        run = resume.find_run(QUIET.run_name)
        measured, page, _ = written(run)
        assert str(run / "probe.html") == f"gs://bucket/runs/{QUIET.run_name}/probe.html"
        assert (tmp_path / "bucket" / "runs" / QUIET.run_name / "probe.html").read_text() == page
        with pytest.raises(ConfigError, match="did you mean"):
            resume.find_run(QUIET.run_name[:-2] + "x")
    assert measured["probes"] == written(directory)[0]["probes"]


def test_numbers_that_are_not_finite_become_null():
    assert finite({"a": [1.0, math.nan, (math.inf, 2)], "b": "nan"}) == {
        "a": [1.0, None, [None, 2]],
        "b": "nan",
    }


def test_the_command(finished, capsys):
    assert main(["probe", QUIET.run_name, "--layers", "0"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(finished[0] / "probe.html")
    assert "F-Attn" in out
    assert main(["probe", "no-such-run"]) == 2
    assert "no-such-run" in capsys.readouterr().err


def test_maps_know_where_each_querys_segment_begins(reader):
    maps = np.arange(2 * 1 * 6 * 6).reshape(2, 1, 6, 6)
    batch = {"inputs": np.arange(12).reshape(2, 6), "segment_ids": np.array([[1, 1, 3, 3, 3, -1], [1] * 6])}
    found = inspection._maps({"layers": {"map": maps}}, batch, reader[1].source, [1])
    assert found["segment_starts"] == [0, 0, 2, 2, 2]
    assert len(found["tokens"]) == 5
    assert found["layers"] == [1]
    assert found["by_head"] == [maps[1, :, :5, :5].tolist()]
    unpacked = inspection._maps({"layers": {"map": maps}}, {"inputs": batch["inputs"]}, reader[1].source, [0])
    assert unpacked["segment_starts"] == [0] * 6
