"""The table of added parameters: ours are the paper's wherever it agrees with itself, and are flagged where not."""

import io

import pytest
from rich.console import Console

from configs.variants import PAPER
from experiments import parameters, report
from experiments.render import terminal


def test_every_row_of_both_tables_has_a_variant():
    for table in parameters.TABLES:
        rows = PAPER[table]
        assert [row["row"] for row in report.paper_rows(table)] == list(rows)
        assert len(set(rows.values())) == len(rows)


def test_table_1_adds_what_is_printed_but_for_row_4():
    """In millions: four more experts of the paper's own width are 453, printed is 400."""
    rows = {a.row: a for a in parameters.added("table1")}
    assert [row for row, a in rows.items() if not a.agrees] == [4]
    assert rows[4].ours == pytest.approx(453.2, abs=0.05)
    assert "453M" in rows[4].remarks[0]


def test_table_6_is_flagged_throughout():
    rows = {a.row: a for a in parameters.added("table6")}
    assert [row for row, a in rows.items() if a.agrees] == [1]
    assert all(a.remarks for a in rows.values() if not a.agrees)
    headwise = next(a for a in parameters.added("table1") if a.variant == "g2_headwise")
    assert rows[6].ours == headwise.ours


@pytest.mark.parametrize(
    ("ours", "printed", "agrees"),
    [
        *((100.66, 100, True), (201.3, 201, True), (1.573, 1.6, True), (0.1966, 0.2, True), (0, 0, True)),
        *((453.2, 400, False), (101.0, 100, False), (99.4, 100, False), (1.5, 1.6, False)),
    ],
)
def test_what_is_printed_may_be_rounded_or_cut_off(ours, printed, agrees):
    assert parameters.Added(1, "", "experts_plus4", ours, printed).agrees == agrees


def test_the_report_prints_both_and_says_so():
    console = Console(width=120, record=True, file=io.StringIO())
    terminal(parameters.blocks(), console)
    words = " ".join(console.export_text().split())
    for part in (
        "453.2 400 differs",
        "201.3 201",
        "15.58B parameters (paper: 15B)",
        "1.99B (paper: 2.54B)",
        "Row 6: the",
    ):
        assert part in words
