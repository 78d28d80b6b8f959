"""Where numbers come from: the links lead to the very runs, and a page without them still holds their configs."""

import dataclasses
import json
import re
from urllib.parse import unquote

import pytest

from experiments import provenance
from gattn.config import to_json
from gattn.files import home
from tests.test_report import F_ATTN, elements, small_table, written


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def test_every_number_of_ours_leads_to_the_seeds_it_is_of_and_these_to_folder_and_config():
    """And no number of the paper does; links are followed as a browser would, from the report's folder."""
    table = small_table({"baseline": (0.6, 0.7, 0.5), "gated": (0.02, 0.03)})
    page = written(table)[1]
    folder = home() / "runs" / "a-table"
    numbers, *_, runs = re.findall(r"<table.*?</table>", page, flags=re.DOTALL)
    titles = [text for tag, found, text in elements(numbers) if tag == "th" and found.get("scope") == "col"]
    groups = dict(re.findall(r'<tbody id="(.*?)">(.*?)</tbody>', runs, flags=re.DOTALL))
    for row, line in zip(table.sections[0].rows, re.findall(r"<tr><th scope=.row.*?</tr>", numbers), strict=True):
        done = [run for run in row.runs if run.result()]
        for title, cell in zip(titles[1:], re.findall(r"<td>(.*?)</td>", line), strict=True):
            if title.endswith("paper") or cell == "–":
                assert "<a" not in cell
                continue
            group = groups[re.fullmatch(r'<a href="#(.*?)">[\d./]+( \(.*\))?</a>', cell)[1]]
            hrefs = [found["href"] for tag, found, _ in elements(group) if tag == "a"]
            assert re.search(rf'rowspan="{len(done)}"><a href="#config-.*?">{row.label}</a>', group)
            paths = [(folder / unquote(href)).resolve() for href in hrefs if not href.startswith("#")]
            assert paths == [path for run in done for path in (run.folder / "config.json", run.folder)]
    assert len(groups) == 2


def test_the_runs_show_each_seeds_own_values():
    markdown = written(small_table())[0]
    runs = markdown[markdown.index("### Runs") :]
    lines = [re.sub(r"<a.*?</a>", "", line).split(" | ") for line in runs.splitlines() if line.startswith("| ")]
    column = lines[0].index("F-Attn")
    values = [float(line[column]) for line in lines[2:]]
    assert values == [*F_ATTN["baseline"], *F_ATTN["gated"]]


@pytest.mark.parametrize("odd", [None, 0, 1, 3, 4])
def test_the_page_alone_gives_every_config(odd):
    """Put together from the page's text, without the runs' folders, each config is that of the run, field by field.

    Also where one run is unlike the others of its row, the first of all included, in a field and by lacking one.
    """
    table = small_table()
    runs = [run for row in table.sections[0].rows for run in row.runs]
    if odd is not None:
        path = runs[odd].folder / "result.json"
        result = json.loads(path.read_text())
        result["config"]["train"]["steps"] = 7
        del result["config"]["model"]["dtype"]
        path.write_text(json.dumps(result))
    expected = {run.folder.name: (run.config.fingerprint(), provenance.flat(run.result()["config"])) for run in runs}
    base, *others = [json.loads(text) for tag, _, text in elements(written(table)[1]) if tag == "code"]
    rebuilt = {}
    for code in others:
        for folder, own in code.pop("runs").items():
            fingerprint = own.pop("fingerprint")
            fields = provenance.flat(base) | code | own
            rebuilt[folder] = (fingerprint, {key: value for key, value in fields.items() if value is not None})
    assert rebuilt == expected
    assert odd is not None or expected[runs[4].folder.name][1] == provenance.flat(json.loads(to_json(runs[4].config)))


def test_many_runs_are_not_a_large_page():
    """90 runs in three sections: pictures are to be the larger part of the 3 MB that a page may have."""
    one = small_table().sections[0]
    labels = [f"row {number}" for number in range(10)]
    rows = tuple(dataclasses.replace(row, label=label) for label, row in zip(labels, one.rows * 5, strict=True))
    sections = [dataclasses.replace(one, name=f"s{n}", rows=rows) for n in range(3)]
    page = written(dataclasses.replace(small_table({}), sections=tuple(sections)))[1]
    assert len(page.encode()) < 3e5
    found = [attributes["id"] for _, attributes, _ in elements(page) if "id" in attributes]
    assert len(found) == len(set(found)), "anchors of several sections do not clash"
    assert sum(bool(re.fullmatch(r"(runs|config)-s\d-\d+", anchor)) for anchor in found) == 2 * 30
