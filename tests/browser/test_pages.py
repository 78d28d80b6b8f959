"""The committed pages and freshly made ones in Chromium, on a desktop, on a phone, in the dark and on paper.

That the checks see what they look for is in test_checks.py; that links lead to the right files in tests/test_report.py.
"""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments import figures, render, report, top
from experiments.report import Row, Section
from experiments.runner import sweep
from experiments.study import ScaledArgs
from gattn import page
from gattn.config import Config, override
from tests import test_figures, test_page
from tests.browser.checks import DARK, DESKTOP, PAPER, PHONE, SCREENS, print_problems, problems
from tests.browser.chromium import Page
from tests.test_report import finish, small_table

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(ROOT.glob("experiments/reports/**/*.html"))
MADE = ("pictures", "one layer", "wide", "empty", "top", "figures", "every block", "probe")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Pages from synthetic results, by name."""
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        out = {}
        for name, table in {
            "pictures": lambda: small_table(pictures=True, findings=[report.loss_fall]),
            "one layer": lambda: small_table(pictures=True, layers=1),
            "wide": wide_table,
            "empty": lambda: small_table({}),
        }.items():
            patch.setenv("GATTN_HOME", str(root / name))
            out[name] = report.write(table(), Console(file=io.StringIO())) / "report.html"
        patch.setenv("GATTN_HOME", str(root / "top"))
        top.main(top.Args(), Console(file=io.StringIO()))
        out["top"] = root / "top" / "runs" / "top" / "report.html"
        patch.setenv("GATTN_HOME", str(root / "figures"))
        out["figures"] = figures.write(drawn_figures(), Console(file=io.StringIO())) / "figures.html"
    render.save(root, "blocks", "Every block", every_block(out["pictures"]))
    (root / "probe.html").write_text(page.render(test_page.measured()), encoding="utf-8")
    return out | {"every block": root / "blocks.html", "probe": root / "probe.html"}


def drawn_figures():
    """Every figure, from two seeds of every row."""
    one = figures.build(ScaledArgs(seeds=2))
    for run in one.runs():
        test_figures.put(run, test_figures.measured(run, run.seed))
    return one


def wide_table():
    """As many columns as the widest table of the paper has, labels as long as its longest, a range in every cell."""
    rows = []
    for number in range(1, 16):
        label = f"SDPA elementwise head-shared, number {number}"
        runs = sweep(override(Config(), {"train.steps": 1000 + number}), {label: {}}, range(3))
        for run in runs:
            spread = 1 + run.seed / 100
            result = finish(run, f_attn=0.1 * spread, bayes=None)
            measures = {"loss": 4.8, "initial_loss": 8.5, "perplexity": 123.45, "bits_per_byte": 1.7}
            result["eval"] |= {name: value * spread for name, value in measures.items()}
            result["probes"] |= {"m_act": 1234.5 * spread, "sink_rate": 0.5 * spread}
            result["probes"]["gates"] = {"g1": {"mean": 0.2 * spread}}
            result["benchmarks"] = {name: 25.0 * spread for name in ("hellaswag", "mmlu", "gsm8k", "ceval")}
            (run.folder / "result.json").write_text(json.dumps(result))
        rows.append(Row(label, tuple(runs), report.paper_row("table1", number)))
    columns = (report.PERPLEXITY, report.BITS, report.LOSS, report.FALL, *report.ATTENTION_COLUMNS, *report.BENCHMARKS)
    section = Section("wide", "Wide: a heading of several words, as reports have them", "A note.", columns, tuple(rows))
    return dataclasses.replace(small_table(), sections=(section,))


def every_block(pictures: Path) -> list[render.Block]:
    """What a page can be made of, with words that no line can hold."""
    long = "g1_elementwise_head_shared_" * 12
    link = render.Link(long, "#code")
    grid = render.Grid(("row", "words", "number"), (("a", (link, long), "1"), ("b", "short", "2")), prose=(1,))
    groups = render.Grid(("row", "seed", "number"), (("a", "0", "1"), ("a", "1", "2")), groups=(("both", 2),))
    image = render.Image("a.png", next(pictures.parent.glob("*.png")).read_bytes(), long, long, data=(grid,))
    blocks = (render.Text((long, link)), render.Bullets((long, link)), grid, groups, image, render.Code(long * 9))
    inside = render.Details(long, (render.Code(long), grid), "code")
    sections = [render.Heading(2, "Blocks"), *blocks, render.Heading(2, "Blocks"), inside, render.Heading(2, long)]
    return [render.Heading(1, long), render.Text(long), *sections]


def described(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.name)
@pytest.mark.parametrize("name", MADE)
def test_a_made_page(browser, made, name, screen):
    assert problems(browser, made[name], screen) == []


@pytest.mark.parametrize("name", MADE)
def test_a_made_page_prints(browser, made, name):
    assert print_problems(browser, made[name]) == []


def test_there_are_committed_pages():
    assert COMMITTED


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=lambda screen: screen.name)
@pytest.mark.parametrize("path", COMMITTED, ids=described)
def test_a_committed_page(browser, path, screen):
    assert problems(browser, path, screen) == []


@pytest.mark.parametrize("path", COMMITTED, ids=described)
def test_a_committed_page_on_paper_and_in_the_dark(browser, path):
    assert print_problems(browser, path) == []
    if "@media print" in path.read_text(encoding="utf-8"):  # older pages know of neither
        assert [problems(browser, path, screen) for screen in (PAPER, DARK)] == [[], []]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=lambda screen: screen.name)
def test_a_number_leads_to_its_runs_and_these_to_their_config(browser, made, screen):
    """Follows the links as a reader would."""
    shown = Page(browser, made["pictures"].as_uri(), screen)
    try:
        row = "[...document.querySelectorAll('table:first-of-type tbody tr')].find(r => r.innerText.includes('gated'))"
        shown.value(f"{row}.querySelector('td a').click()")
        target = "document.querySelector(':target')"
        values = shown.value(f"[...{target}.rows].map(r => r.querySelectorAll('td')[1].innerText)")
        assert values == ["0.020", "0.030", "0.010"]
        assert shown.value(f"{target}.rows[0].cells[0].innerText") == "gated"
        place = f"{target}.getBoundingClientRect()"
        assert shown.value(f"{place}.top >= 0 && {place}.bottom <= {screen.height}")
        shown.value(f"{target}.rows[0].cells[0].querySelector('a').click()")
        shown.value(f"{target}.open = true")
        assert "g1" in shown.value(f"{target}.innerText")
    finally:
        shown.close()


@pytest.mark.parametrize("place", ["#runs-one-2", "#config-one-2"])
@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.name)
def test_where_a_link_led_is_as_readable_as_the_rest(browser, made, screen, place):
    assert problems(browser, made["pictures"], screen, place) == []


def test_a_keyboard_skips_to_the_content_first(browser, made):
    shown = Page(browser, made["pictures"].as_uri(), DESKTOP)
    try:
        for kind in ("keyDown", "keyUp"):
            shown.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        assert shown.value("document.activeElement.hash") == "#content"
        assert shown.value("document.activeElement.getBoundingClientRect().top") >= 0
    finally:
        shown.close()
