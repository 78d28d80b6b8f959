"""The figures show what is in result.json, on paper and on the page, and name what is not there."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from experiments import drawings, figures, interactive, study, table4
from experiments.drawings import FIGURES, VARIANTS
from experiments.runner import Outcome
from experiments.study import ScaledArgs
from gattn.files import home
from tests.test_page import NASTY
from tests.test_report import elements, fake_result

ARGS = ScaledArgs(seeds=2)
LAYERS, LENGTH, STEPS = 3, 6, 60
BY_LAYER = ("f_attn_by_layer", "f_attn_by_head", "m_act_by_layer")
NAMES = [wanted.name for wanted in FIGURES]


def measured(run, position: int) -> dict:
    """A result of few layers and short maps, whose numbers are those of no other run."""
    rng = np.random.default_rng([position, run.seed])
    result = fake_result(run, f_attn=float(rng.uniform(0.05, 0.6)), bayes=None)
    probes = result["probes"]
    probes |= {name: rng.uniform(0.01, 0.9, LAYERS).tolist() for name in BY_LAYER}
    maps = np.tril(rng.uniform(0.01, 1, (LAYERS, LENGTH, LENGTH)))
    maps = np.round(maps / maps.sum(axis=2, keepdims=True), 4)
    probes["attention_map"] = {"tokens": ["BOS", *"abcde"], "by_layer": maps.tolist()}
    for gate in probes["gates"].values():
        shares = rng.dirichlet(np.ones(20), LAYERS)
        gate |= {"mean": float(rng.uniform()), "histogram": gate["histogram"] | {"shares": shares.tolist()}}
    names = ("mean_abs_by_layer", "below_1e-2_by_layer", "below_1e-3_by_layer")
    scaled = "before_times_mean_score"
    probes["sdpa"] = {
        when: {n: rng.uniform(size=LAYERS).tolist() for n in names} for when in ("before", "after", scaled)
    }
    if "g1" not in probes["gates"]:
        probes["sdpa"] |= {"after": probes["sdpa"]["before"], scaled: None}
    steps = np.arange(10, 10 * STEPS + 1, 10)
    result["curve"] = {
        "step": steps.tolist(),
        "loss": (2 + 3 * np.exp(-steps / 200) + rng.normal(0, 0.1, STEPS)).tolist(),
    }
    return result


def put(run, result: dict) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps(result))


def written(one) -> dict[str, str]:
    """The files of text that a study's figures become, and the terminal's text."""
    screen = io.StringIO()
    folder = figures.write(one, Console(file=screen, width=200))
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".png"}
    return texts | {"screen": screen.getvalue()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everything measured: the study, the results by part, label and seed, and the texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATTN_HOME", str(tmp_path_factory.mktemp("home")))
        one = figures.build(ARGS)
        results = {}
        for position, run in enumerate(one.runs()):
            part, label = run.label.split(": ")
            put(run, result := measured(run, position))
            results.setdefault((part, label), []).append(result)
        texts = written(one)
        yield one, results, texts, home() / "runs" / "figures-cpu"


@pytest.fixture
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def outline(page: str) -> list[tuple[str, str, dict[str, str], str]]:
    """Every element of the page that lies in an interactive figure: the number of the figure, tag, attributes, text."""
    out, number = [], -1
    for tag, found, text in elements(page):
        number += found.get("class") == "interactive"
        out.append((number, tag, found, text))
    return out


def spread(values, form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{np.mean(values):{form}}" + (f" ({low}–{high})" if low != high else "")


def titles(page: str) -> list[str]:
    return [text for tag, _, text in elements(page) if tag == "title"]


# ---- what is drawn ----------------------------------------------------------------------------------------------


def test_every_figure_is_there_with_a_picture_and_its_words(whole):
    _, _, texts, folder = whole
    assert sorted(path.stem for path in folder.glob("*.png")) == NAMES
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in NAMES)
    alts = dict(re.findall(r"!\[(.*?)\]\((.*?)\.png\)", texts["report.md"]))
    assert list(alts.values()) == NAMES
    page = elements(texts["figures.html"])
    drawn = [found for tag, found, _ in page if tag == "svg" and found.get("role") == "img"]
    said = [found["aria-label"] for found in drawn]
    assert all(len(alt) > 30 and re.search(r"\d\.\d", alt) for alt in said)
    assert " ".join(said) == " ".join(alts), "the page's panels say together what the pictures say"
    shown = [text for tag, _, text in elements(texts["report.html"]) if tag == "figcaption"]
    for number, caption in enumerate(shown, 1):
        assert caption.startswith(f"After Fig. {number}")
        assert caption in [text for tag, _, text in page if tag == "figcaption"]
    assert len(shown) == len(NAMES)
    assert "missing" not in texts["screen"]


def test_pictures_say_the_numbers_of_the_results(whole):
    _, results, texts, _ = whole
    alts = {name: alt for alt, name in re.findall(r"!\[(.*?)\]\((.*?)\.png\)", texts["report.md"])}
    for label in ("baseline", "SDPA elementwise"):
        each = [result["probes"]["f_attn_by_layer"] for result in results["deep", label]]
        words = ", ".join(spread(column, ".3f") for column in zip(*each, strict=True))
        overall = spread([np.mean(one) for one in each], ".3f")
        assert f"{label} {words}, on average {overall}" in alts["fig-2"]
        assert f"{label} {words}, on average {overall}" in alts["fig-6"]
    gate = [result["probes"]["gates"]["g2"]["mean"] for result in results["deep", "value elementwise"]]
    assert f"value elementwise gate scores: mean {spread(gate, '.3f')}" in alts["fig-3"]
    before = [result["probes"]["sdpa"]["before"]["mean_abs_by_layer"] for result in results["deep", "SDPA elementwise"]]
    assert f"before the gate {', '.join(spread(c, '.3g') for c in zip(*before, strict=True))}," in alts["fig-4"]


def test_the_map_beside_f_attn_is_that_of_the_layer_with_the_largest_sink(whole):
    _, results, texts, _ = whole
    layer = int(np.argmax(results["deep", "baseline"][0]["probes"]["f_attn_by_layer"]))
    alts = {name: alt for alt, name in re.findall(r"!\[(.*?)\]\((.*?)\.png\)", texts["report.md"])}
    for label in ("baseline", "SDPA elementwise"):
        first = np.array(results["deep", label][0]["probes"]["attention_map"]["by_layer"][layer])[1:, 0].mean()
        assert f"Attention map of {label}, layer {layer + 1}: {first:.3f} to the first token" in alts["fig-2"]


def test_smoothing_is_a_mean_that_forgets():
    losses = np.array([5.0, 3.0, 4.0])
    assert drawings.smoothed(np.full(9, 2.5)) == pytest.approx(np.full(9, 2.5)), "unbiased from the first step on"
    expected = [5, (0.9 * 5 + 3) / 1.9, (0.81 * 5 + 0.9 * 3 + 4) / 2.71]
    assert drawings.smoothed(losses) == pytest.approx(expected)


# ---- the page ---------------------------------------------------------------------------------------------------


def test_the_page_is_whole_by_itself(whole):
    page = whole[2]["figures.html"]
    assert not {tag for tag, _, _ in elements(page)} & {"script", "link", "iframe", "metadata"}
    assert not re.search(r"https?://|@import|xmlns", page)
    assert all(
        name.startswith(("#", "data:image/png")) for name in re.findall(r'<(?:use|image)[^>]* href="(.*?)"', page)
    )
    assert [tag for tag, _, _ in elements(page)].count("style") == 1, "one within a drawing would be the whole page's"
    assert len(page) < 3e6


def test_ids_are_unique_and_references_lead_somewhere(whole):
    page = whole[2]["figures.html"]
    ids = [found["id"] for _, found, _ in elements(page) if "id" in found]
    assert len(ids) == len(set(ids))
    references = re.findall(r'<use[^>]* href="#(.*?)"', page) + re.findall(r"url\(#(.*?)\)", page)
    assert references
    assert set(references) <= set(ids)


def test_every_checkbox_and_radio_button_controls_something_and_everything_is_controlled(whole):
    page = whole[2]["figures.html"]
    kinds = {"show": "series", "pick": "choice"}
    controls, controlled = set(), set()
    for number, tag, found, _ in outline(page):
        for name in found.get("class", "").split():
            if match := re.fullmatch(r"(show|pick|series|choice)-(\d+)", name):
                (controls if tag == "input" else controlled).add((number, kinds.get(match[1], match[1]), match[2]))
    assert controls == controlled
    assert {number for number, _, _ in controls} == set(range(len(NAMES)))
    for _, kind, n in controls:
        name = {value: key for key, value in kinds.items()}[kind]
        assert re.search(rf"\.{name}-{n}:(not\(:)?checked\)+ \S*{kind}-{n}\)? {{ display: none; }}", page)
    boxes = [found for _, tag, found, _ in outline(page) if tag == "input"]
    assert all("checked" in box for box in boxes if box["type"] == "checkbox"), "all is shown at first"
    assert len([box for box in boxes if box["type"] == "radio" and "checked" in box]) == 1
    assert all(text.strip() for _, tag, _, text in outline(page) if tag == "label")


def test_markers_and_bars_tell_the_values_of_the_results(whole):
    _, results, texts, _ = whole
    told, expected = titles(texts["figures.html"]), []
    for label in ("baseline", "SDPA elementwise", "value elementwise"):
        for name, form, key in (("F-Attn", ".3f", "f_attn_by_layer"), ("M-Act", ".3g", "m_act_by_layer")):
            each = [result["probes"][key] for result in results["deep", label]]
            for layer, values in enumerate(zip(*each, strict=True), 1):
                expected.append(f"{label}, layer {layer}: {name} {spread(values, form)}")
    gated = [result["probes"]["sdpa"] for result in results["deep", "SDPA elementwise"]]
    for when, key in drawings.SDPA.items():
        for limit in ("1e-2", "1e-3"):
            for layer, values in enumerate(
                zip(*(one[key][f"below_{limit}_by_layer"] for one in gated), strict=True), 1
            ):
                text = spread(values, ".1%")
                expected.append(f"{when}, layer {layer}: share of |SDPA output| below {limit} {text}")
    for label, found in ((table4.ELEMENTWISE, "g1"), (table4.VALUE, "g2"), (table4.NS, "g1")):
        gates = [result["probes"]["gates"][found]["histogram"] for result in results["deep", label]]
        means = [np.mean(gate["shares"], axis=0) for gate in gates]
        for low, high, *values in zip(gates[0]["edges"], gates[0]["edges"][1:], *means, strict=False):
            expected.append(f"{label}: {spread(values, '.1%')} of scores in {low:g}–{high:g}")
    for label in ("baseline", "SDPA elementwise"):
        losses = [drawings.smoothed(np.array(result["curve"]["loss"]))[-1] for result in results["text", label]]
        expected.append(f"{label}, step {10 * STEPS}: {spread(losses, '.4f')}")
    assert len(expected) > 90
    assert not set(expected) - set(told)


def test_rows_of_maps_tell_probabilities_of_the_results(whole):
    _, results, texts, _ = whole
    panels = [(found, text) for tag, found, text in elements(texts["figures.html"]) if tag == "figure"]
    maps = [text for found, text in panels if "choice-" in found["class"]]
    assert len(maps) == 2 * LAYERS
    for text in maps:
        label, layer = re.search(r"^\s*(.*?), layer (\d)", text).groups()
        weights = results["deep", label][0]["probes"]["attention_map"]["by_layer"][int(layer) - 1]
        rows = re.findall(r"query (\d) “.*?”: (.*?”)(?=query|\D*$|BOS)", text)
        assert len(rows) == LENGTH
        for query, keys in rows:
            found = {int(key): float(share) for share, key in re.findall(r"([\d.]+) to key (\d+)", keys)}
            row = weights[int(query)]
            assert found == {key: pytest.approx(row[key], abs=6e-4) for key in found}
            assert min(found.values()) >= sorted(row)[-3] - 6e-4, "the largest three"


def test_what_is_drawn_twice_is_the_same(whole):
    one, _, texts, folder = whole
    for found in figures.find(one.parts):
        if found.wanted.name in ("fig-2", "fig-3"):
            assert interactive.fragment(found.drawing) in texts["figures.html"]
            assert interactive.image(found.drawing).png == (folder / f"{found.wanted.name}.png").read_bytes()


def test_no_token_becomes_markup():
    nasty = ["<b>$$\x1b\u202e and more", "".join(NASTY), *NASTY]
    weights = np.tril(np.full((len(nasty), len(nasty)), 0.1))
    panel = interactive.Panel("t", nasty[1], lambda pen: pen.map("a", weights, nasty), series="a", small=True)
    plain = interactive.Panel("t", "t", lambda pen: pen.map("a", weights, ["t"] * len(nasty)), series="a", small=True)
    both = [interactive.Drawing("x", "t", (one,), {"a": {}}, "t", (), 1) for one in (panel, plain)]
    pages = [interactive.page("t", [one]) for one in both]
    assert [tag for tag, _, _ in elements(pages[0])] == [tag for tag, _, _ in elements(pages[1])]
    assert all(c.isprintable() or c == "\n" for c in pages[0])
    assert interactive.image(both[0]).png.startswith(b"\x89PNG")


# ---- what is missing --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_home")
def test_without_results_everything_is_named_and_nothing_drawn():
    texts = written(figures.build(ARGS))
    for name in ("report.md", "report.html", "figures.html"):
        assert texts[name].count("missing: ") == len(FIGURES)
        assert "<img" not in texts[name]
        assert "<svg" not in texts[name]
    assert "missing: SDPA elementwise (seed 0 not trained, seed 1 not trained)" in texts["screen"]
    assert [path.name for path in (home() / "runs" / "figures-cpu").glob("*.png")] == []


@pytest.mark.usefixtures("_home")
def test_what_was_not_measured_is_named_and_the_rest_is_drawn():
    one = figures.build(ARGS)
    for position, run in enumerate(one.runs()):
        result = measured(run, position)
        match run.label, run.seed:
            case "deep: value elementwise", _:
                continue
            case "deep: SDPA headwise", 1:
                continue
            case "deep: SDPA elementwise", 0:
                del result["probes"]["sdpa"]["before_times_mean_score"]
            case "deep: SDPA elementwise", 1:
                result["probes"]["sdpa"]["before"] = {}
        put(run, result)
    found = {one.wanted.name: one for one in figures.find(one.parts)}
    lacks = "SDPA elementwise (no probes.sdpa.before_times_mean_score.below_1e-2_by_layer in seed 0, "
    assert found["fig-5"].drawing is None
    assert found["fig-5"].missing == (f"{lacks}no probes.sdpa.before.below_1e-2_by_layer in seed 1)",)
    assert found["fig-4"].missing == ("SDPA elementwise (no probes.sdpa.before.mean_abs_by_layer in seed 1)",)
    assert list(found["fig-4"].drawing.looks) == ["baseline", "before the gate", "after the gate"]
    absent = "value elementwise (seed 0 not trained, seed 1 not trained)"
    assert found["fig-3"].missing == ("SDPA headwise (seed 1 not trained)", absent)
    assert len(found["fig-3"].drawing.panels) == 5
    assert found["fig-6"].missing == (absent,)
    assert "value elementwise" not in found["fig-6"].drawing.alt
    assert {name for name, one in found.items() if not one.missing} == {"fig-1", "fig-2", "fig-7"}


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "count"), [("cpu", 9), ("chip", 7), ("pod", 7)])
def test_runs_are_those_of_table_4(scale, count):
    args = ScaledArgs(scale=scale, source=None if scale == "cpu" else "/data/text", seeds=2)
    table = table4.build(table4.Args(scale=scale, source=args.source, seeds=2))
    folders = {run.folder for run in figures.build(args).runs()}
    assert len(folders) == 2 * count
    assert folders <= {run.folder for run in table.runs()}
    assert {line.variant for line in figures.build(args).parts[0].lines} == set(VARIANTS)


@pytest.mark.usefixtures("_home")
def test_the_command_trains_what_it_draws_and_reports_even_where_a_run_failed(monkeypatch):
    asked = []

    def launch(runs, launcher, **_):
        asked.extend(runs)
        return [Outcome(run, "failed" if run is runs[-1] else "finished") for run in runs]

    monkeypatch.setattr(study, "launch", launch)
    args = ScaledArgs(seeds=1, steps=50)
    screen = Console(file=io.StringIO(), width=200)
    assert study.run(figures.build(args), args, screen, figures.write) == 1
    assert {run.config.train.steps for run in asked} == {50}
    assert len(asked) == 9
    folder = home() / "runs" / "figures-cpu-50-steps"
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.html", "figures.html"}
    report_text = (folder / "report.md").read_text()
    assert "Command: python -m experiments.figures --scale cpu --seeds 1 --steps 50" in report_text
    assert "the numbers mean nothing" in report_text
    assert f"failed: {asked[-1].name}" in screen.file.getvalue()
    args = ScaledArgs(seeds=1, steps=50, report_only=True)
    assert study.run(figures.build(args), args, screen, figures.write) == 0
    assert len(asked) == 9


def test_the_report_prints_command_machine_time_and_runs(whole):
    one, _, texts, _ = whole
    for name in ("report.md", "report.html", "figures.html"):
        assert one.command in texts[name]
        assert "Linux x86_64" in texts[name]
        assert f"{7 * 2} runs, one process each: {7 * 2 * 40:,} s in all" in texts[name]
        assert all(f"../{run.folder.name}/config.json" in texts[name] for run in one.runs())
