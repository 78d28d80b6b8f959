"""Questions to finished runs: asked once, of real runs by the real command; tables read the answers where they lie."""

import dataclasses
import io

import pytest
from rich.console import Console

from experiments import questions, report, streaming, study, table5
from experiments.longcontext import longcontext_config
from experiments.runner import Run
from gattn import train
from gattn.config import override
from gattn.evaluate import Evaluation, reading


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def answered(run, evaluations, value):
    """A result.json's evaluations as `gattn eval` names them; `value(task, length, read)` are the fields measured."""
    out = {}
    for evaluation in evaluations:
        read = reading(run.config, evaluation)[1]
        for task in evaluation.each_task():
            for length in evaluation.each_length():
                made = {"sequences": evaluation.sequences, "samples": evaluation.samples}
                fields = {"task": task, "length": length, "read": read, **made, **value(task, length, read)}
                out[f"{task} {length} {read}"] = fields
    return {"config": {}, "evaluations": out}


def test_a_run_is_asked_once_and_its_answers_are_found():
    config = override(longcontext_config(), {"train.steps": 2, "optim.warmup_steps": 1, "data.eval_sequences": 4})
    config = override(config, {"train.checkpoint_every": 2, "train.eval_every": 2})
    run = Run("row", 0, config)
    train.train(config)
    asked = Evaluation("ppl,mini_single", "64,96", sequences=2, samples=2, rope="yarn", factor=2.0)
    never = Run("not trained", 0, override(config, {"train.seed": 9}))
    said = io.StringIO()
    assert questions.ask({run: [asked], never: [asked]}, 1, Console(file=said)) == []
    assert "1 runs to evaluate" in said.getvalue()
    result = run.result()
    assert questions.answer(result, "mini_single", 96, "yarn x2")["samples"] == 2
    assert questions.answer(result, "ppl", 64, "yarn x2")["bayes_loss"] == 0
    with pytest.raises(KeyError):
        questions.answer(result, "mini_single", 96)
    assert questions.is_answered(run, asked)
    assert not questions.is_answered(run, dataclasses.replace(asked, samples=3))
    assert not questions.is_answered(run, dataclasses.replace(asked, sequences=3))
    assert not questions.is_answered(run, dataclasses.replace(asked, lengths="64,96,128"))
    before = (run.folder / "result.json").read_bytes()
    assert questions.ask({run: [asked], dataclasses.replace(run, label="too"): [asked]}, 1, Console(file=said)) == []
    assert said.getvalue().count("evaluated:") == 1
    [failure] = questions.ask({run: [Evaluation("mini_multikey", "32", samples=2)]}, 1, Console(file=said))
    assert failure.startswith("row, seed 0: ")
    assert "too short" in failure
    both = questions.left({run: [Evaluation("ppl")], dataclasses.replace(run, label="too"): [Evaluation("mini_vt")]})
    assert [one.tasks for one in both[run]] == ["ppl", "mini_vt"]
    questions.tell({never: [asked]}, Console(file=said, width=40))
    assert said.getvalue().splitlines()[-1] == (
        f"python -m gattn eval {never.folder} --tasks ppl,mini_single --lengths 64,96 --sequences 2 --samples 2 "
        "--rope yarn --factor 2.0"
    )
    assert (run.folder / "result.json").read_bytes() == before


@pytest.mark.parametrize("scale", ["cpu", "chip", "pod"])
def test_table_5_trains_longer_from_its_first_stage_and_reads_what_it_asked(scale):
    """Scores are those of the column's length and reading; the paper's stand beside the lengths that are theirs."""
    made = table5.build(table5.Args(scale=scale, dry_run=True, samples=7))
    first, second, *grid = made.parts
    published = report.paper_rows("table5")
    for line in second.lines:
        for run, start in zip(second.runs([line.label]), first.runs([line.label]), strict=True):
            assert run.config.train.start_from == start.folder.name
            assert start.folder in {one.folder for one in made.stages()[0]}
            assert (start.config.model.rope_theta, run.config.model.rope_theta) == (10_000, 1_000_000)
            assert run.config.data.seq_len >= 4 * start.config.data.seq_len
            tokens = [c.data.batch_size * c.data.seq_len for c in (run.config, start.config)]
            assert scale != "pod" or tokens == [2048 * 4096] * 2
    run = second.runs([second.lines[0].label])[0]
    native = run.config.data.seq_len
    assert all(evaluation.samples == 7 for evaluation in made.questions[run])
    result = answered(
        run,
        made.questions[run],
        lambda task, length, read: {"score": length + (0.5 if read else 0.0), "loss": 1.0},
    )
    lengths = {"4k": 8, "8k": 4, "16k": 2, "32k": 1, "64k": 0.5, "128k": 0.25}
    seen = set()
    for column in second.columns:
        if column.paper and column.paper.startswith(("native_", "yarn_")):
            assert column.paper in published[0]
            kind, name = column.paper.split("_")
            length = native / lengths[name]
            assert column.title == f"{int(length):,} {'YaRN' if kind == 'yarn' else 'native'}"
            assert column.value(result) == length + (0.5 if kind == "yarn" else 0.0)
            seen.add(column.paper)
    assert {f"yarn_{name}" for name in ("32k", "64k", "128k")} | {"native_32k"} <= seen
    assert scale != "pod" or seen == {name for name in published[0] if "_" in name}
    (lost,) = [column for column in second.columns if column.title.startswith("lost")]
    assert lost.value(result) == -0.5
    for part in grid:
        positions = {run.config.model.position for run in part.runs(part.needed)}
        assert positions == {"rope", "alibi", "none"}
        rope = [line.label for line in part.lines if line.label.startswith("RoPE")]
        assert {run.folder for run in part.runs(rope)} <= {run.folder for run in second.runs(second.needed)}


def test_streaming_reads_what_it_asked():
    """Each column its length and number of kept tokens; what is missed is the difference."""
    made = streaming.build(streaming.Args(seeds=1))
    for bench, part in zip(streaming.BENCHES, made.parts, strict=True):
        (run, *_) = part.runs(part.needed)
        assert [e.window for e in made.questions[run]] == [bench.window] * 3
        assert bench.lengths == [4 * bench.window, 8 * bench.window, 16 * bench.window]
        assert min(bench.lengths) >= run.config.data.seq_len
        kept = {f"window {bench.window}": 0.3, f"window {bench.window}, kept 1": 0.2}
        result = answered(
            run,
            made.questions[run],
            lambda task, length, read, kept=kept: {"loss": 2 + kept.get(read, 0.1) + length, "bayes_loss": length},
        )
        values = [column.value(result) for column in bench.columns()]
        assert values == pytest.approx([2.3, 2.2, 2.1] * 3)
        assert bench.missed().value(result) == pytest.approx(0.2)


@pytest.mark.parametrize("loss", [1.0, None])
def test_what_was_not_asked_so_or_is_not_finite_is_missing(loss):
    """And the rest of the row is there; a number of other prompts is another question."""
    made = streaming.build(streaming.Args(seeds=1))
    bench, part = streaming.BENCHES[0], made.parts[0]
    (run, *_) = part.runs(part.needed)
    result = answered(run, made.questions[run][:1], lambda *_: {"loss": loss, "bayes_loss": 0.5})
    found = [report.stat([result], column) for column in bench.columns()]
    assert [one.values for one in found] == ([(0.5,), (), ()] * 3 if loss else [()] * 9)
    assert [one.text(".1f") for one in found][1] == report.MISSING
    scale = table5.scales()["cpu"]
    (native, *_) = scale.asked(longcontext_config(), 7)
    scores = answered(Run("", 0, longcontext_config()), [native], lambda *_: {"score": 50.0})
    assert table5.score(scale, 7, 256, "")(scores) == 50
    with pytest.raises(KeyError):
        table5.score(scale, 8, 256, "")(scores)


def test_a_study_says_how_it_was_made():
    for module, words in (
        (table5, "table5 --scale cpu --seeds 1 --steps 9"),
        (streaming, "streaming --seeds 1 --steps 9"),
    ):
        made = module.build(module.Args(seeds=1, steps=9))
        assert made.command == f"python -m experiments.{words}"
        assert "the numbers mean nothing" in made.note


@pytest.mark.parametrize("launcher", ["slurm", "print"])
def test_where_jobs_are_started_nothing_is_evaluated(launcher, monkeypatch):
    """The commands are printed instead."""
    args = streaming.Args(seeds=1, launcher=launcher)
    monkeypatch.setattr(study, "launch", lambda *_, **__: [])
    monkeypatch.setattr(questions.subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    said = io.StringIO()
    assert study.run(streaming.build(args), args, Console(file=said)) == 0
    assert said.getvalue().count("python -m gattn eval ") == 2 * 3 * 3
