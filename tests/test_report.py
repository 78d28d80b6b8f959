"""The report says what is in result.json, in three forms, and nothing else."""

import dataclasses
import html.parser
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from experiments import report, study, table1, table3, table4, table6
from experiments.report import Row, Section, Table
from experiments.runner import Run, sweep
from gattn.config import Config, ConfigError, GateSpec, override
from gattn.files import home

# What each fake run measured, by label and seed.
F_ATTN = {"baseline": (0.6, 0.7, 0.5), "gated": (0.02, 0.03, 0.01)}
GATED = {"model.gates": (GateSpec("g1", "headwise"),)}
SOURCE = {"chip": "/data/text"}
COLUMNS = (*report.ATTENTION_COLUMNS, report.ABSORBED, report.EXCESS)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def fake_result(run: Run, f_attn: float, gate: float = 0.2, bayes: float | None = 1.5) -> dict:
    """A result.json of the real structure, with these numbers in it."""
    layers, config, rng = run.config.model.num_layers, run.config, np.random.default_rng(run.seed)
    heads, length, steps = config.model.num_heads, 16, np.arange(10, 1201, 10)
    loss = 1.6 + 2.4 * np.exp(-steps / 150) + 0.05 * rng.random(len(steps))
    maps = np.tril(rng.random((layers, length, length))) + 1e-9
    maps[:, :, 0] += f_attn * 10
    spread = np.clip(rng.normal(gate, 0.1, (layers, 500)), 0, 1)
    shares = [(np.histogram(scores, 20, (0, 1))[0] / 500).tolist() for scores in spread]
    gates = {
        spec.position: {
            "mean": gate,
            "mean_by_layer": [gate] * layers,
            "mean_by_head": [[gate] * heads] * layers,
            "share_below_0.1": 0.5,
            "histogram": {"edges": np.linspace(0, 1, 21).tolist(), "shares": shares},
        }
        for spec in config.model.gates
    }
    return {
        "schema": 1,
        "run": config.run_name,
        "fingerprint": config.fingerprint(),
        "label": config.model.label,
        "seed": run.seed,
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "model": {
            "params": 1_234_567,
            "active_params": 1_100_000,
            "non_embedding_params": 1_000_000,
            "gate_params": config.model.gate_params,
            "ffn_width": config.model.ffn_width,
            "flops_per_token": 6e6,
        },
        "data": {"source": config.data.source, "fingerprint": "feedbeef", "tokens": 2_457_600, "vocab_size": 65},
        "environment": {
            "python": "3.12.1",
            "jax": "0.12.0",
            "platform": "cpu",
            "device_kind": "cpu",
            "attention": "reference",
            "dtype": "float32",
            "cpu": "Linux x86_64",
        },
        "time": {"total_s": 45.0, "train_s": 40.0, "tokens_per_s": 61_440.0},
        "eval": {
            "loss": 1.51,
            "perplexity": 4.53,
            "bits_per_byte": None if bayes else 1.7,
            "bayes_loss": bayes,
            "initial_loss": 4.17,
            "tokens": 16_384,
        },
        "probes": {
            "f_attn": f_attn,
            "f_attn_floor": 0.05,
            "f_attn_by_layer": np.linspace(f_attn * 0.5, f_attn * 1.5, layers).tolist() if layers > 1 else [f_attn],
            "f_attn_by_head": [[f_attn] * heads] * layers,
            "sink_rate": float(f_attn > 0.3),
            "absorbed": None,
            "m_act": 12.5,
            "m_act_by_layer": np.linspace(8, 17, layers).tolist(),
            "first_token_ratio_by_layer": [1.5] * layers,
            "value_norm_ratio_by_layer": [0.9] * layers,
            "gates": gates,
            "attention_map": {
                "tokens": ["BOS", *map(str, range(length - 1))],
                "by_layer": (maps / maps.sum(-1, keepdims=True)).tolist(),
            },
        },
        "curve": {"step": steps.tolist(), "loss": loss.tolist()},
        "evals": {"step": [0, 250, 500, 1200], "loss": [4.17, 2.2, 1.8, 1.51]},
    }


def finish(run: Run, pictures: bool = False, **numbers) -> dict:
    """Puts a fake result where the run's own would be; without what only pictures need, to save their time."""
    result = fake_result(run, **numbers)
    if not pictures:
        result["probes"] |= {"gates": {name: {"mean": g["mean"]} for name, g in result["probes"]["gates"].items()}}
        for name in ("f_attn_by_layer", "m_act_by_layer", "attention_map"):
            del result["probes"][name]
        del result["curve"], result["evals"]
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps(result))
    return result


def small_table(
    measured: dict[str, tuple[float, ...]] = F_ATTN, findings=(), layers: int = 4, pictures: bool = False
) -> Table:
    """Baseline and a gated row over three seeds, beside the paper's rows 1 and 3; results where `measured` has them."""
    rows, base = [], override(Config(), {"model.num_layers": layers})
    for label, number in (("baseline", 1), ("gated", 3)):
        runs = sweep(base, {label: GATED if label == "gated" else {}}, range(3))
        for run, f_attn in zip(runs, measured.get(label, ()), strict=False):
            finish(run, pictures, f_attn=f_attn)
        rows.append(Row(label, tuple(runs), report.paper_row("table4", number)))
    section = Section("one", "One", "A note.", COLUMNS, tuple(rows), tuple(findings))
    return Table("a-table", "A table", "About it.", "python -m something", (section,))


def written(table: Table) -> tuple[str, str, str]:
    """report.md, report.html and the terminal's text."""
    screen = io.StringIO()
    folder = report.write(table, Console(file=screen, width=200))
    return (folder / "report.md").read_text(), (folder / "report.html").read_text(), screen.getvalue()


def cells(markdown: str, label: str) -> dict[str, str]:
    """One row of the first table, by column, links as their words."""
    words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown)
    lines = [line.strip("|").split("|") for line in words.splitlines() if line.startswith("|")]
    row = next(line for line in lines if line[0].strip() == label)
    return {title.strip(): cell.strip() for title, cell in zip(lines[0], row, strict=True)}


def elements(page: str) -> list[tuple[str, dict[str, str], str]]:
    """The page's elements in order: tag, attributes, text."""
    found: list[list] = []
    open_: list[list] = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append([tag, dict(attributes), ""])
            if tag not in ("meta", "img"):
                open_.append(found[-1])

        def handle_endtag(self, tag):
            assert open_.pop()[0] == tag, "elements are closed in turn"

        def handle_data(self, data):
            for element in open_:
                element[2] += data

    Parser().feed(page)
    assert not open_
    return [(tag, attributes, text) for tag, attributes, text in found]


def test_means_and_ranges_over_seeds_with_the_papers_value_beside():
    markdown, _, screen = written(small_table())
    row = cells(markdown, "baseline")
    assert row["F-Attn"] == "0.600 (0.500–0.700)"
    assert row["F-Attn, paper"] == "0.467"
    assert row["floor"] == "0.050"
    assert row["F-Attn / floor"] == "12.00 (10.00–14.00)"
    assert row["M-Act, paper"] == "1053"
    assert row["loss - Bayes"].startswith("0.0100")
    assert row["gate score"] == "–", "an ungated model has no gate score, which is not the same as a missing one"
    assert row["seeds"] == "3/3"
    assert cells(markdown, "gated")["gate score, paper"] == "0.172"
    assert re.search(r"baseline +0\.600 +0\.467 +0\.050 +12\.00", screen)
    assert "absorbed" not in markdown, "a column that applies to no row is left out"


def test_what_is_not_there_prints_as_missing_and_never_as_a_number():
    table = small_table({"baseline": (0.6,)})
    path = table.sections[0].rows[0].runs[0].folder / "result.json"
    result = json.loads(path.read_text())
    del result["probes"]["m_act"]
    for removed in ("time", "environment", "data"):
        result[removed] = {}
    path.write_text(json.dumps(result))
    markdown, _, screen = written(table)
    gated = cells(markdown, "gated")
    assert {gated[title] for title in ("F-Attn", "floor", "gate score", "M-Act", "loss - Bayes")} == {"missing"}
    assert gated["seeds"] == "0/3"
    baseline = cells(markdown, "baseline")
    assert baseline["F-Attn"] == "0.600"
    assert baseline["M-Act"] == "missing"
    assert baseline["seeds"] == "1/3"
    assert re.search(r"training time \| 1 runs.*: missing", markdown)
    assert "missing" in screen


def test_an_empty_sweep_still_gives_a_report():
    markdown, page, _ = written(
        small_table({}, findings=[report.loss_fall, report.ordering(report.F_ATTN, "gated", "x")])
    )
    assert cells(markdown, "baseline")["F-Attn"] == "missing"
    assert "not measured" in markdown
    assert "<img" not in page
    assert "Configs" not in markdown
    assert "href" not in page.replace('href="#content"', "")


def test_a_result_of_another_config_is_refused():
    table = small_table()
    run = table.sections[0].rows[0].runs[0]
    (run.folder / "result.json").write_text(json.dumps({"fingerprint": "0" * 16}))
    with pytest.raises(ValueError, match="belongs to another config"):
        report.write(table)


@pytest.mark.parametrize(
    ("finding", "says"),
    [
        (report.ordering(report.F_ATTN, "gated", "baseline"), "gated < baseline: holds; measured 0.020, 0.600."),
        (report.ordering(report.F_ATTN, "baseline", "gated"), "does not hold"),
        (report.ordering(report.M_ACT, "baseline", "gated"), "does not hold"),
        (report.ordering(report.F_ATTN, "gated", "absent"), "not measured (absent missing)"),
        (report.bound(report.RATIO, ["baseline"], above=7), "above 7: holds; measured 12.00 (10.00–14.00)."),
        (report.bound(report.RATIO, ["baseline"], above=12.1), "does not hold"),
        (report.bound(report.F_ATTN, ["gated", "baseline"], below=0.1), "does not hold"),
        (report.bound(report.F_ATTN, ["gated"], below=0.1), "holds; measured 0.020 (0.010–0.030)."),
        (report.same_order_as_paper(report.F_ATTN), "1 of 1 pairs"),
        (report.same_order_as_paper(report.GATE), "too few rows"),
        (report.change(report.F_ATTN, "baseline", "gated"), "is lower than baseline's: 0.020"),
        (report.change(report.LOSS, "baseline", "gated"), "is equal to baseline's"),
        (report.apart(report.F_ATTN), "F-Attn, against the baseline: lower: gated."),
        (report.apart(report.LOSS), "against the baseline: overlaps: gated."),
        (report.loss_fall, "from 4.170 to 1.510 (by 2.660) for baseline"),
    ],
)
def test_findings_are_decided_by_the_numbers(finding, says):
    assert says in written(small_table(findings=[finding]))[0]


def test_overlapping_seeds_are_admitted():
    table = small_table({"baseline": (0.6, 0.7, 0.2), "gated": (0.1, 0.3, 0.1)})
    text = report.ordering(report.F_ATTN, "gated", "baseline")(report.Measured(table.sections[0]))
    assert "holds; measured 0.167, 0.500 in the mean, with overlapping ranges of seeds." in text


@pytest.mark.parametrize("layers", [1, 4])
def test_the_page_is_whole_by_itself_and_every_picture_is_described(layers):
    table = small_table(layers=layers, pictures=True)
    markdown, page, _ = written(table)

    tags = [(tag, found) for tag, found, _ in elements(page)]
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe"}
    pictures = [found for tag, found in tags if tag == "img"]
    assert len(pictures) == 4
    assert all(len(image["alt"]) > 20 for image in pictures)
    assert all(image["src"].startswith("data:image/png;base64,") for image in pictures)
    assert not re.search(r"https?://|url\(|@import", page)
    anchors = {f"#{found['id']}" for _, found in tags if "id" in found}
    assert all(found["href"] in anchors or found["href"].startswith("../") for tag, found in tags if tag == "a")
    assert 'name="viewport"' in page
    assert page.count('<div class="scroll"') == page.count("<table") + len(pictures)
    names = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    folder = home() / "runs" / "a-table"
    assert sorted(names) == sorted(path.name for path in folder.glob("*.png"))
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_numbers_of_a_picture_stand_beside_it():
    """By layer, by bin and by step: what was put into the results, averaged over seeds."""
    page = written(small_table(pictures=True))[1]
    layers, activations, scores, losses = (
        re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", figure)
        for figure in re.findall(r"<details>.*?</details>", page, flags=re.DOTALL)
        for figure in re.findall(r"<table.*?</table>", figure, flags=re.DOTALL)
    )
    assert " ".join(layers) == "layer baseline gated 1 0.300 0.010 2 0.500 0.017 3 0.700 0.023 4 0.900 0.030"
    assert activations[-3:] == ["4", "17", "17"]
    assert scores[:2] == ["score", "gated"]
    assert sum(float(share.rstrip("%")) for share in scores[3::2]) == pytest.approx(100, abs=1)
    assert losses[3:6] == ["0", "2.6700", "2.6700"], "above the Bayes loss of 1.5"
    assert losses[-3:] == ["1200", "0.0100", "0.0100"]


def test_tables_in_markdown_have_as_many_cells_in_every_row():
    blocks = [block.splitlines() for block in written(small_table())[0].split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    for lines in blocks:
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_a_smaller_report_leaves_no_stale_picture():
    table = small_table(pictures=True)
    written(table)
    only_numbers = dataclasses.replace(table, sections=())
    folder = report.write(only_numbers, Console(file=io.StringIO()))
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.md"]


def test_every_row_of_table_4_prints_the_published_numbers():
    args = table4.Args(scale="cpu", seeds=1)
    markdown, _, _ = written(table4.build(args).table())
    bench_a = markdown.split("## ")[1]
    published = report.paper()["table4"]
    for line, label in zip(published["rows"], table4.PAPER_ROWS, strict=True):
        expected = dict(zip(published["columns"], line, strict=True))
        row = cells(bench_a, label)
        for title, name in (("F-Attn", "f_attn"), ("gate score", "gate_score"), ("M-Act", "m_act")):
            assert row[f"{title}, paper"] == ("–" if expected[name] is None else f"{expected[name]:g}")
            assert row[title] == "missing"
    assert published["rows"][1][3:7] == [0.116, 94, 0.048, 5.761]


@pytest.mark.parametrize("module", [table1, table3, table6], ids=["table1", "table3", "table6"])
@pytest.mark.parametrize("scale", ["cpu", "chip"])
def test_every_row_of_a_table_of_perplexities_prints_the_published_numbers(module, scale):
    name = module.__name__.rpartition(".")[2]
    markdown, _, _ = written(module.build(study.ScaledArgs(scale=scale, seeds=1, source=SOURCE.get(scale))).table())
    published = report.paper()[name]
    lines = study.paper_lines(name)
    assert len({line.label for line in lines}) == len(lines) == len(published["rows"])
    for line, numbers in zip(lines, published["rows"], strict=True):
        expected, row = dict(zip(published["columns"], numbers, strict=True)), cells(markdown, line.label)
        for title, key in (("perplexity", "ppl"), ("MMLU", "mmlu"), ("C-eval", "ceval")):
            assert (row[f"{title}, paper"], row[title]) == (f"{expected[key]:g}", "missing")


@pytest.mark.parametrize(
    ("module", "count"), [(table1, 2), (table3, 3), (table6, 2)], ids=["table1", "table3", "table6"]
)
def test_findings_name_rows_that_are_there(module, count):
    one = module.build(study.ScaledArgs(seeds=2))
    for number, run in enumerate(one.runs()):
        finish(run, f_attn=0.1 + 0.01 * number)
    findings = [finding(report.Measured(one.table().sections[0])) for finding in one.parts[0].findings]
    assert len(findings) == count
    assert not [text for text in findings if any(words in text for words in ("not measured", "too few", "not trained"))]


def test_a_chip_needs_a_text_of_its_own_and_the_report_says_how_it_was_called(tmp_path):
    with pytest.raises(ConfigError, match=r"--source.*prepare"):
        table1.build(study.ScaledArgs(scale="chip"))
    one = table1.build(study.ScaledArgs(scale="chip", source="/data/my text", steps=7))
    assert one.command == "python -m experiments.table1 --source '/data/my text' --scale chip --steps 7"
    assert {run.config.data.source for run in one.runs()} == {"/data/my text"}
    assert f"{7 * 128 * 2048:,} tokens a run" in one.parts[0].heading


def test_tables_share_their_runs():
    folders = [
        {run.folder for run in module.build(study.ScaledArgs(seeds=1)).runs()} for module in (table1, table3, table6)
    ]
    assert [len(one) for one in folders] == [2 * 15, 2 * 7, 2 * 6]  # as language models and on the capability bench
    assert len(folders[0] & folders[1]) == 2 * 4
    assert len(folders[0] & folders[2]) == 2 * 1


def test_capabilities_stand_beside_perplexity_with_their_chance():
    """At the scale of a CPU only; the numbers of the held-out sets of the same names, over seeds."""
    (_, part) = table3.build(study.ScaledArgs()).parts
    assert len(table3.build(study.ScaledArgs(scale="chip", source="/data/text")).parts) == 1
    for label, values in {"baseline": (0.3, 0.4, 0.5), "SDPA elementwise gate": (0.1, 0.2, 0.45)}.items():
        for run, value in zip(part.runs([label]), values, strict=True):
            run.folder.mkdir(parents=True)
            sets = {
                task: {"loss": value + i} for i, task in enumerate(("induction", "recall", "arithmetic", "brackets"))
            }
            (run.folder / "result.json").write_text(json.dumps({**fake_result(run, 0.1), "eval": {"sets": sets}}))
    section = part.section()
    measured = report.Measured(section)
    assert [column.title for column in section.columns] == [
        "induction (chance 3.466)",
        "recall (chance 2.773)",
        "arithmetic (chance 2.833)",
        "brackets (chance 1.946)",
    ]
    texts = [measured.stat("SDPA elementwise gate", column).text(".2f") for column in section.columns]
    assert texts == ["0.25 (0.10–0.45)", "1.25 (1.10–1.45)", "2.25 (2.10–2.45)", "3.25 (3.10–3.45)"]
    assert section.findings[1](measured).startswith("Recall (chance 2.773), against the baseline: overlaps: SDPA elem")


def test_what_a_row_costs_stands_beside_the_first(tmp_path):
    table = small_table()
    runs = {row.label: row.runs for row in table.sections[0].rows}
    bigger = runs["gated"][0].folder / "result.json"
    result = json.loads(bigger.read_text())
    result["model"]["params"] += 1_000
    bigger.write_text(json.dumps(result))
    markdown = written(table)[0]
    trained = markdown[markdown.index("What was trained") :]
    row = cells(trained, "gated")
    assert (row["against baseline"], row["tokens"], row["active"]) == ("+1,000", "2,457,600", "1,100,000")
    assert float(row["training FLOPs"]) == pytest.approx(6e6 * 2_457_600, rel=1e-2)


def test_the_demo_shows_rows_of_the_full_scale_once_they_are_trained():
    args = table4.Args(scale="demo", seeds=1)
    bench_a, bench_b = table4.build(args).parts[:2]
    assert "sink logit" not in written(table4.build(args).table())[0].split("## ")[1]
    assert "sink logit" in table4.build(args).note
    finish(bench_a.runs(["sink logit"])[0], f_attn=0.01)
    finish(bench_b.runs(["baseline"])[0], f_attn=0.6)
    assert cells(written(table4.build(args).table())[0], "sink logit")["F-Attn"] == "0.010"


def test_the_demo_is_a_part_of_the_full_table():
    demo, full = (table4.build(table4.Args(scale=scale)).parts for scale in ("demo", "cpu"))
    runs = [{run.folder for part in parts[:2] for run in part.runs(part.needed)} for parts in (demo, full)]
    assert runs[0] < runs[1]
    assert len(runs[0]) == 7 * 3 + 3 * 3
    short = next(part for part in demo if part.name == "text short")
    assert len(short.runs(short.needed)) == 2
