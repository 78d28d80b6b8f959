"""Studies: stages, starts, scales; Table 2's settings and appendix A.7's runs."""

import io
import json

import pytest
from rich.console import Console

from experiments import continued, report, study, table2
from experiments.study import ScaledArgs
from gattn.config import ConfigError
from gattn.files import home
from tests.test_report import fake_result


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def pod(module):
    return module.build(ScaledArgs(scale="pod", dry_run=True, seeds=1))


def by_setting(one):
    """Setting of the paper -> its part."""
    return dict(zip(table2.SETTINGS, one.parts, strict=True))


def test_table_2_at_the_pod_is_the_papers():
    """Learning rate, batch, tokens and depth of every published row; A.6 at 300 and 100."""
    parts = by_setting(pod(table2))
    for row in report.paper_rows("table2"):
        part = parts[row["setting"]]
        (line,) = [line for line in part.lines if line.paper == ("table2", row["row"])]
        (run,) = part.runs([line.label])
        config, words = run.config, row["setting"].split(", ")
        assert config.optim.learning_rate == pytest.approx(row["max_lr"])
        assert config.model.num_layers == int(words[0].removesuffix("L"))
        assert config.data.batch_size == int(words[2].removeprefix("batch "))
        tokens = config.train.steps * config.data.batch_size * config.data.seq_len
        published = float(words[1].split("T")[0]) * 1e12 if "T " in words[1] else 4e11
        assert tokens == pytest.approx(published, rel=0.05 if published == 4e11 else 1e-4)
        assert config.model.sandwich_norm == ("sandwich" in row["method"])
        assert bool(config.model.gates) == ("SDPA" in row["method"])
    clipped = [run.config for run in parts[table2.DEEP].runs([f"{name}, LR 0.008" for name in table2.CLIPPED])]
    assert [config.model.clip_outputs for config in clipped] == [300.0, 100.0]
    assert {config.optim.learning_rate for config in clipped} == {0.008}


def test_table_2_on_a_cpu_does_to_its_models_what_the_paper_does_to_its_own():
    """The same ratios of learning rates and batches; equal tokens; two models of one size, one deeper."""
    small, large = (by_setting(module) for module in (table2.build(ScaledArgs(seeds=1)), pod(table2)))
    tokens = set()
    for setting, part in small.items():
        for line, other in zip(part.lines, large[setting].lines, strict=True):
            (run,), (theirs,) = part.runs([line.label]), large[setting].runs([other.label])
            for value in (lambda c: c.optim.learning_rate, lambda c: c.data.batch_size):
                first, their_first = (next(iter(p.values())).base for p in (small, large))
                assert value(run.config) / value(first) == pytest.approx(value(theirs.config) / value(their_first))
            tokens.add(run.config.train.steps * run.config.data.batch_size * run.config.data.seq_len)
    assert len(tokens) == 1
    shallow, deep = (small[name].base.model for name in ("28L, 400B tokens, batch 1024", table2.DEEP))
    assert deep.num_layers > shallow.num_layers
    assert deep.d_model < shallow.d_model


def test_what_is_started_from_is_trained_first_and_once():
    """Ten rows, three seeds: eight of them start from three runs, those of the first row."""
    one = continued.build(ScaledArgs())
    first, rest = one.stages()
    assert len(first) == 3
    baseline = {run.seed: run for run in rest if run.label.endswith(": baseline")}
    assert {run.folder for run in first} == {run.folder for run in baseline.values()}
    later = [run for run in rest if run.config.train.start_from]
    assert len(later) == 8 * 3
    for run in later:
        assert run.config.train.start_from == baseline[run.seed - 1000].folder.name
        assert run.config.train.steps == baseline[0].config.train.steps // 2
    assert len({run.folder for run in rest}) == len(rest)


def test_a_later_stage_waits_for_the_first(tmp_path):
    """The commands printed are those of the runs to start from; once these are there, those of the others."""
    args = ScaledArgs(seeds=1, launcher="print")
    one = continued.build(args)
    first, rest = one.stages()

    def printed():
        study.run(one, args, Console(file=(screen := io.StringIO()), width=500))
        return [run for run in one.runs() if str(run.folder) in screen.getvalue()]

    assert printed() == [run for run in one.runs() if run.folder == first[0].folder]
    first[0].folder.mkdir(parents=True, exist_ok=True)
    (first[0].folder / "result.json").write_text(json.dumps(fake_result(first[0], 0.3)))
    assert {run.folder for run in printed()} == {run.folder for run in rest} - {first[0].folder}


@pytest.mark.parametrize("scale", ["chip", "pod"])
def test_a_bench_takes_no_source_and_the_larger_scales_need_one(scale):
    with pytest.raises(ConfigError, match="leave it out"):
        continued.build(ScaledArgs(source="/data/text"))
    with pytest.raises(ConfigError, match="python -m gattn prepare"):
        continued.build(ScaledArgs(scale=scale))
    one = continued.build(ScaledArgs(scale=scale, source="/data/my text", steps=20, seeds=2))
    assert one.command == (
        f"python -m experiments.continued --source '/data/my text' --scale {scale} --seeds 2 --steps 20"
    )
    assert {run.config.data.source for run in one.runs()} == {"/data/my text"}
    assert max(run.config.train.steps for run in one.runs()) == 20


def test_a_run_that_was_not_finite_stands_in_the_report():
    """With the share of seeds, and without numbers that it does not have."""
    one = table2.build(ScaledArgs(seeds=2))
    part = one.parts[2]
    for label in ("baseline, LR 0.004", "baseline, LR 0.008"):
        for run in part.runs([label]):
            result = fake_result(run, 0.1, bayes=None)
            if label.endswith("0.008") and run.seed == 1:
                del result["probes"]
                result["eval"] = {"initial_loss": 8.3}
                result["diverged"] = {"step": 7, "reason": "step 8: the loss is nan"}
            run.folder.mkdir(parents=True)
            (run.folder / "result.json").write_text(json.dumps(result))
    report.write(one.table(), Console(file=io.StringIO()))
    text = (home() / "runs" / "table2-cpu" / "report.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| baseline, LR 0.008 |")][:1]
    assert "| 0.50 (0.00–1.00) |" in line
    assert "4.53" in line
