"""The top page: ours against the baseline, the paper's beside it, and nothing that was not trained."""

import io
import json

import pytest
from rich.console import Console

from configs.variants import PAPER
from experiments import report, stability, table4, top
from experiments.render import Link, plain
from experiments.report import Stat
from experiments.study import ScaledArgs
from gattn.files import home
from tests.test_report import fake_result


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def stat(*values):
    return Stat(values, True)


@pytest.mark.parametrize(
    ("ours", "verdict", "text"),
    [
        (stat(0.1, 0.2), "lower", "0.30x (0.20x to 0.40x)"),
        (stat(0.6, 0.7), "higher", "1.30x (1.20x to 1.40x)"),
        (stat(0.4, 0.5), "overlaps", "0.90x (0.80x to 1.00x)"),
        (stat(0.1), "one seed", "0.20x"),
        (stat(), "", "not trained"),
    ],
)
def test_lower_means_that_no_seed_overlaps(ours, verdict, text):
    assert top.compare(ours, stat(0.45, 0.55), relative=False) == top.Answer(verdict, text)


def test_an_empty_home_is_said_to_be_empty_and_the_papers_answers_are_there():
    """Its ratios computed here from the published numbers."""
    page = top.blocks(top.Args())
    rows = {row[0]: list(map(plain, row[1:])) for row in page[2].rows}
    gated = rows["SDPA elementwise"]
    assert gated[0::2][:4] == ["not trained"] * 4
    assert gated[1] == f"{5.761 / 6.026 - 1:+.1%}"
    assert gated[3] == gated[5] == f"{0.048 / 0.467:.2f}x"
    assert gated[7] == f"{94 / 1053:.2f}x"
    assert rows["sandwich norm (no gate)"][-1] == "7.407 (baseline 9.195)"
    assert "Perplexity: not trained." in page[3].items
    assert not [part for row in page[2].rows for cell in row for part in cell if isinstance(part, Link)]
    assert not [item for item in page[5].items if isinstance(item[0], Link)]


def test_a_trained_part_is_told_with_its_spread_and_a_link():
    """Bench A: the gate lowers F-Attn, the value gate does not."""
    part = next(part for part in table4.build(table4.Args(scale="cpu")).parts if part.name == "A")
    for label, values in {"baseline": (0.6, 0.7, 0.8), "SDPA elementwise": (0.02, 0.04, 0.03)}.items():
        place(part.runs([label]), values)
    place(part.runs(["value elementwise"]), (0.5, 0.65, 0.9))
    report.write(table4.build(table4.Args(scale="cpu")).table(), Console(file=io.StringIO()))
    assert top.main(top.Args(), Console(file=io.StringIO())) == 0
    text = (home() / "runs" / "top" / "report.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| SDPA elementwise |")]
    assert "[0.04x (0.03x to 0.06x)](../table4-cpu/report.html) lower" in line
    assert "0.98x (0.71x to 1.29x)](../table4-cpu/report.html) overlaps" in text
    assert "Sink (F-Attn), bench A, against the baseline: lower: SDPA elementwise; overlaps: value elementwise." in text
    assert "Sink (F-Attn), deep bench: not trained." in text


def place(runs, values):
    for run, value in zip(runs, values, strict=True):
        write(run, fake_result(run, value))


def write(run, result):
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps(result))


def test_the_largest_stable_rates_are_those_of_the_stability_study():
    part = stability.build(ScaledArgs()).parts[0]
    rates = stability.scales()["cpu"].rates
    for rate in rates:
        for run in part.runs([f"baseline, LR {rate:g}"]):
            result = fake_result(run, 0.3)
            if rate == max(rates) or (rate == rates[1] and run.seed == 2):
                result["diverged"] = {"step": 1, "reason": "nan"}
            write(run, result)
    text = top.stable(part)
    assert text["baseline"] == f"{rates[0]:g} to {rates[1]:g}"
    assert text["g1_elementwise"] == "not trained"
    for rate in rates:
        for run in part.runs([f"sandwich norm, LR {rate:g}"]):
            write(run, fake_result(run, 0.3))
    assert top.stable(part)["sandwich_norm"] == f"at least {rates[2]:g}, wider"


def test_one_seed_tells_nothing_and_a_run_that_was_not_finite_is_counted():
    assert report.claim("sink", {"one seed": ["a"], "": ["b"]}) == "Sink: one seed tells nothing."
    lost = Stat((0.1, 0.2), True, diverged=1)
    assert top.compare(lost, stat(0.5, 0.6), relative=False).verdict == "1 not finite"
    assert top.compare(Stat((), True, diverged=3), stat(0.5), relative=False) == top.Answer("", "3 not finite")


def test_each_paper_answer_has_its_row():
    """Every published row of Tables 1 and 4 with one of these variants has its ratio, others have none."""
    first, sink, deep, act = top.questions(top.Args())
    for variant in top.ROWS:
        in_fourth = variant in PAPER["table4"].values()
        assert (top.cells(first, variant)[2] != "–") == (in_fourth or variant in PAPER["table1"].values())
        for one in (sink, deep, act):
            assert (top.cells(one, variant)[2] != "–") == in_fourth
