"""The rows at the paper's scale are the paper's, their commands make them, and no number of theirs is made up."""

import dataclasses
import io
import json
import re
import types
from pathlib import Path

import pytest
from rich.console import Console

from experiments import parameters, pod, study, table1, table2, table5
from gattn import __main__ as command_line
from gattn import sharding
from gattn.config import GateSpec, override

# Read here and not from the presets, which are what is under test.
PAPER = json.loads((Path(__file__).parents[1] / "experiments" / "paper_tables.json").read_text())
FIELDS = {
    **{"layers": "num_layers", "d_model": "d_model", "head_dim": "head_dim", "ffn": "ffn_dim"},
    **{"q_heads": "num_heads", "kv_heads": "num_kv_heads", "experts": "num_experts", "top_k": "experts_per_token"},
    **{"expert_ffn": "expert_dim", "tied_embeddings": "tied_embeddings", "qk_norm": "qk_norm"},
}
ROWS = {table: [row for row in pod.rows([table]) if "clipped" not in row.label] for table in pod.TABLES}
EVERY = [(table, i) for table, rows in ROWS.items() for i in range(len(rows))]
each_row = pytest.mark.parametrize(("table", "i"), EVERY, ids=[f"{t}-{ROWS[t][i].label}" for t, i in EVERY])


def published(table: str) -> list[dict]:
    return [dict(zip(PAPER[table]["columns"], line, strict=True)) for line in PAPER[table]["rows"]]


def row_of(table: str, i: int) -> dict:
    """The published line of a row; Table 5 has rows for both of its stages."""
    lines = published(table)
    return lines[i % len(lines)]


def architecture(table: str, line: dict) -> dict:
    """That of the table's model, with what the row's name says of it."""
    if table == "table2":
        name = f"dense_1p7b_{line['setting'][:3].lower()}"
    else:
        name = PAPER[table]["model"].split(",")[0].lower().replace("dense 1.7b ", "dense_1p7b_")
    out = dict(PAPER["architectures"][name])
    if found := re.fullmatch(r"(kv_heads|q_heads)=(\d+)", line["method"]):
        out[found[1]] = int(found[2])
    if line["method"] == "+4 experts":
        out |= {"experts": out["experts"] + 4, "top_k": out["top_k"] + 4}
    return out


def gates(line: dict) -> tuple[GateSpec, ...]:
    """The row's gates by its columns, or else by its name."""
    words = line["method"]
    kind = re.match(r"(SDPA|value|key|query|dense output)", words)
    if not kind or "no gate" in words or "no parameters" in words:
        return ()
    by_name = {"SDPA": "g1", "value": "g2", "key": "g3", "query": "g4", "dense output": "g5"}[kind[1]]
    by_columns = (line.get("position") or by_name).lower()
    assert by_columns == by_name
    sharing = line.get("sharing") or ("shared" if "head-shared" in words else "specific")
    op = line.get("op") or ("add" if "additive" in words else "multiply")
    return (
        GateSpec(
            position=by_name,
            granularity=line.get("granularity") or ("headwise" if "headwise" in words else "elementwise"),
            sharing="specific" if sharing == "-" else sharing,
            op=op,
            activation=line.get("activation") or "sigmoid",
            source="independent" if "input-independent" in words else "input",
        ),
    )


@each_row
def test_architecture_is_the_published_one(table, i):
    line, config = row_of(table, i), ROWS[table][i].config
    model, expected = config.model, architecture(table, line)
    assert {name: getattr(model, FIELDS[name]) for name in expected if name in FIELDS} == {
        name: value for name, value in expected.items() if name in FIELDS
    }
    assert model.gates == gates(line)
    transforms = {"SDPA GroupNorm": "rmsnorm", "SDPA SiLU": "silu"}
    assert model.sdpa_transform == next((transforms[k] for k in transforms if line["method"].startswith(k)), "none")
    assert model.sandwich_norm == ("sandwich norm" in line["method"])
    switch = re.match(r"switch (k?v), (\d) top (\d)", line["method"])
    found = ("kv" if model.switch_keys else "v", str(model.switch_heads), str(model.switch_top_k))
    assert found == (switch.groups() if switch else ("v", "0", "0"))
    assert bool(config.train.balance_loss) == ("balance_loss" in expected)
    assert bool(config.train.router_z_loss) == expected.get("z_loss", False)


def test_table_5_has_the_published_stages():
    """3.5T tokens at 4k, then 80B at 32k with another base of RoPE, by the table's caption; all else stays."""
    stated = re.search(
        r"([\d.]+)T tokens; RoPE base (\d+)k -> (\d)M, (\d+)B more tokens at length (\d+)k", PAPER["table5"]["model"]
    )
    first, base, later_base, second, length = (float(number) for number in stated.groups())
    wanted = [(first * 1e12, base * 1e3, 4096)] * 2 + [(second * 1e9, later_base * 1e6, length * 1024)] * 2
    assert len(ROWS["table5"]) == 4
    for row, (tokens, theta, seq_len) in zip(ROWS["table5"], wanted, strict=True):
        data, per_step = row.config.data, row.config.data.batch_size * row.config.data.seq_len
        assert (row.config.model.rope_theta, data.seq_len, per_step) == (theta, seq_len, 2048 * 4096)
        assert abs(row.config.train.steps * per_step - tokens) <= per_step
    whole = table5.build(table5.Args(scale="pod", source="data/web"))
    early, late = (pod.rows_of(whole, part) for part in whole.parts)
    for before, after in zip(early, late, strict=True):
        assert before.config.optim.learning_rate == published("table2")[2]["max_lr"]
        assert after.config.train.start_from == before.runs[0].folder.name


@pytest.mark.parametrize(("table", "i"), [one for one in EVERY if one[0] != "table5"])
def test_training_is_the_published_one(table, i):
    line, config = published(table)[i], ROWS[table][i].config
    stated = PAPER["training"]["moe_15a2b"]
    if table == "table2":
        tokens, batch = re.search(r"([\d.]+[BT]) tokens, batch (\d+)", line["setting"]).groups()
        stated = {"tokens": tokens, "batch_sequences": int(batch), "max_lr": line["max_lr"]}
    per_step = config.data.batch_size * config.data.seq_len
    wanted = float(stated["tokens"][:-1]) * {"B": 1e9, "T": 1e12}[stated["tokens"][-1]]
    assert config.data.seq_len == PAPER["training"]["common"]["seq_len"]
    assert config.data.batch_size == stated["batch_sequences"]
    assert config.optim.learning_rate == stated["max_lr"]
    if "400B" in stated["tokens"]:  # beside which the paper has 100,000 steps
        assert config.train.steps == PAPER["training"]["moe_15a2b"]["steps"]
        assert config.train.steps * per_step == pytest.approx(wanted, rel=0.05)
    else:
        assert abs(config.train.steps * per_step - wanted) <= per_step
    if table != "table2":  # of the dense runs they are not stated
        assert config.optim.final_learning_rate == stated["final_lr"]
        assert config.optim.warmup_steps == stated["warmup_steps"]
        assert config.optim.schedule == stated["schedule"]
    assert config.train.accumulation == 1  # that of the whole batch is what the balance loss is defined by


@pytest.mark.parametrize("table", ["table1", "table6"])
def test_rows_add_what_is_printed_but_where_the_paper_contradicts_itself(table):
    """`experiments.parameters` documents those: four experts' 453M of 400M, and the switch heads of Table 6."""
    first = pod.counts(ROWS[table][0].config.model)["params"]
    differing = []
    for row, line in zip(ROWS[table], published(table), strict=True):
        added, printed = (pod.counts(row.config.model)["params"] - first) / 1e6, line["added_params_m"]
        digit = 1 if printed == int(printed) else 0.1
        if not -digit / 2 <= added - printed < digit:  # rounded, or cut off
            assert row.variant in parameters.REMARKS
            differing.append(line["row"])
        if line["method"] == "+4 experts":  # and their columns of the router
            moe = PAPER["architectures"]["moe_15a2b"]
            assert added == pytest.approx(4 * moe["layers"] * moe["d_model"] * (3 * moe["expert_ffn"] + 1) / 1e6)
    assert differing == {"table1": [4], "table6": [2, 3, 4, 5, 6]}[table]


def test_a_gated_dense_model_has_as_many_parameters():
    """To half a step of 128 in the FFN's width."""
    for row in ROWS["table2"]:
        plain = override(row.config, {"model.gates": ()})
        assert plain.model.ffn_width == plain.model.ffn_dim
        size, without = (pod.counts(config.model)["params"] for config in (row.config, plain))
        half = row.config.model.num_layers * 3 * row.config.model.d_model * 128 // 2
        assert abs(size - without) <= (0 if row.config.model == plain.model else half)
        assert (row.config.model.ffn_width < row.config.model.ffn_dim) == ("SDPA elementwise" in row.label)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", pod.rows(), ids=lambda row: f"{row.table}-{row.label}-{row.key[:4]}")
def test_the_printed_command_makes_the_row(row, monkeypatch):
    """Read by the command line itself; and the mesh divides what it cuts."""
    monkeypatch.setattr(command_line, "_train", lambda *given: made.append(given) or 0)
    made = []
    words = row.command()
    assert words[:4] == ["python", "-m", "gattn", "train"]
    assert command_line.main(words[3:]) == 0
    [(config, directory, _, processes)] = made
    assert config.fingerprint() == row.config.fingerprint()
    assert config == row.config
    assert (directory, processes) == (None, "auto")
    sharding.check(config, sharding.mesh_shape(config.mesh, row.chips))


def test_with_its_data_a_row_is_the_studys_run():
    """The folder's name, and with it the run that reports read, depends on the data."""
    for module in (table1, table2):
        whole = module.build(study.ScaledArgs(scale="pod", source="data/web=0.7,data/code=0.3", seeds=2))
        for part in whole.parts:
            for row in pod.rows_of(whole, part):
                runs = part.runs([row.label])
                assert list(row.runs) == runs
                assert row.config.run_name == runs[0].config.run_name
                assert "--data.source" in row.command()


# ---- numbers ----------------------------------------------------------------------------------------------------


def compiled(row: pod.Row, seconds: float = 2.5) -> pod.Compiled:
    times = dict.fromkeys(("compute", "hbm", "network", "overlapped", "exposed", "serial"), seconds)
    mfu = {"overlapped": 0.75, "exposed": 0.43, "serial": 0.28}
    memory = {"needed": 16 << 30, "limit": 95 << 30}
    return pod.Compiled([row.label], row.topology, str(row.config.mesh), times, mfu, memory, True, 60.0, "", "today")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Takes the place of pod.json."""
    monkeypatch.setattr(pod, "FILE", tmp_path / "pod.json")
    return pod.FILE


def write(path: Path, entries: dict[str, pod.Compiled]) -> None:
    path.write_text(json.dumps({key: dataclasses.asdict(entry) for key, entry in entries.items()}))


def dry_run(module: types.ModuleType, home: Path, monkeypatch, **options) -> str:
    """What it prints; nothing may be started or written."""
    home.mkdir()
    monkeypatch.setenv("GATTN_HOME", str(home))
    monkeypatch.setattr(study, "launch", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(study.report, "write", lambda *_, **__: pytest.fail("a report was written"))
    args = study.ScaledArgs(scale="pod", dry_run=True, **options)
    screen = io.StringIO()
    assert study.run(module.build(args), args, Console(file=screen, width=160)) == 0
    assert list(home.iterdir()) == []
    return screen.getvalue()


def test_a_dry_run_says_what_every_row_is_and_writes_nothing(file, tmp_path, monkeypatch):
    row = ROWS["table1"][0]
    assert (row.chips, row.topology) == (512, "v5p:8x8x8")
    assert row.chip_hours(compiled(row)) == pytest.approx(2.5 * 100_000 * 512 / 3600)
    write(file, {row.key: compiled(row)})
    before = file.read_bytes()
    said = dry_run(table1, tmp_path / "home", monkeypatch)
    assert file.read_bytes() == before
    words = " ".join(said.split())
    size = "15.578B 1.988B 419.4B 100,000 1,024 x 4,096 0.002 to 3e-05, cosine, warm-up 1,000"
    assert f"baseline {size}" in words
    assert "15.779B 2.190B +201.3M" in words
    machine = "512 (v5p:8x8x8) fsdp=64,expert=8 2.50 43% (28–75) 35,556 16.0 of 95.0 yes 0/3 today"
    assert f"baseline {machine}" in words
    assert "106,667 chip-hours are the steps of all seeds (above, of one) of 1 of 15 rows" in words
    assert "are 419.4B; 400B would be 95,367 steps" in words
    assert "not a measurement" in words
    for thing in PAPER["training"]["not_stated"]:
        assert thing in words
    assert "--preset moe_15a2b --gate g1_headwise --data.source FOLDER --mesh fsdp=64,expert=8 --distributed" in words
    assert "python -m experiments.table1 --scale pod --source FOLDER --launcher slurm" in words


def test_what_was_not_compiled_has_no_number(file, tmp_path, monkeypatch):
    said = " ".join(dry_run(table2, tmp_path / "home", monkeypatch, source="data/web").split())
    assert said.count("– – – – – 0/3 not compiled") == 16
    assert "16 rows not compiled: python -m experiments.pod" in said
    assert "0 chip-hours are the steps of all seeds (above, of one) of 0 of 16 rows" in said
    assert "FOLDER" not in said


@pytest.mark.parametrize(
    "change",
    [
        *({"model.num_layers": 23}, {"model.gates": (GateSpec("g1", activation="silu"),)}, {"data.batch_size": 2048}),
        *({"model.remat": "attention"}, {"train.accumulation": 2}, {"optim.b2": 0.9}, {"model.buffer_factor": 1.5}),
        *({"train.balance_loss": 0.0}, {"data.seq_len": 8192}, {"model.clip_outputs": 100.0}),
    ],
    ids=str,
)
def test_an_entry_is_missing_once_its_config_has_changed(change, file):
    row = ROWS["table1"][4]
    write(file, {row.key: compiled(row)})
    changed = dataclasses.replace(row, runs=(dataclasses.replace(row.runs[0], config=override(row.config, change)),))
    assert row.key in pod.load()
    assert changed.key not in pod.load()


def test_another_machine_is_another_entry(monkeypatch):
    row = ROWS["table1"][0]
    keys = {row.key}
    for place in (("v5p:8x8x16", "fsdp=64,expert=8"), ("v5p:8x8x8", "data=2,fsdp=32,expert=8")):
        monkeypatch.setitem(pod.PLACES, row.preset, place)
        keys.add(dataclasses.replace(row).key)
    assert len(keys) == 3


@pytest.mark.parametrize(
    "change",
    [
        *({"optim.learning_rate": 0.008}, {"train.seed": 7}, {"train.steps": 400_000, "optim.warmup_steps": 4000}),
        *({"data.source": "data/web"}, {"train.eval_every": 10}, {"train.start_from": "a-run"}),
    ],
    ids=str,
)
def test_what_leaves_the_program_as_it_is_is_not_compiled_again(change):
    row = ROWS["table1"][4]
    changed = dataclasses.replace(row, runs=(dataclasses.replace(row.runs[0], config=override(row.config, change)),))
    assert changed.key == row.key


def test_compiling_goes_on_where_it_stopped(file, capsys):
    """Each program once, whatever number of rows it has; what failed is tried again."""
    asked, broken = [], {"table1: kv_heads=8"}

    def compiler(config, topology):
        asked.append((config.model.label, config.model.num_kv_heads, topology))
        if config.model.num_kv_heads == 8 and broken:
            raise RuntimeError("out of luck")
        return {**dataclasses.asdict(compiled(ROWS["table1"][0])), "versions": "jax 1 libtpu 1", "batch": [1024, 4096]}

    same = [ROWS["table1"][0], ROWS["table1"][1], ROWS["table3"][0], ROWS["table4"][0]]
    assert pod.compile_rows(same, compiler, file) == 1
    assert asked == [("baseline", 4, "v5p:8x8x8"), ("baseline", 8, "v5p:8x8x8")]
    assert "failed: table1: kv_heads=8: out of luck\n" in capsys.readouterr().out
    [entry] = pod.load().values()
    assert entry.labels == ["table1: baseline", "table3: baseline", "table4: baseline"]
    assert entry.versions == "jax 1 libtpu 1"
    broken.clear()
    assert pod.compile_rows(same, compiler, file) == 0
    assert asked[2:] == [("baseline", 8, "v5p:8x8x8")]
    assert pod.load().keys() == {row.key for row in same}


def test_without_compilers_it_says_so(tmp_path):
    """The report comes from another interpreter; its last words are the reason where there is none."""
    deaf = tmp_path / "python"
    deaf.write_text("#!/bin/sh\necho first >&2\necho 'error: libtpu is not installed' >&2\nexit 1\n")
    deaf.chmod(0o755)
    row = ROWS["table1"][0]
    with pytest.raises(RuntimeError, match=r"^error: libtpu is not installed$"):
        pod.compile_apart(row.config, row.topology, str(deaf))


def test_float32_has_no_price(file):
    row = ROWS["table2"][0]
    slow = override(row.config, {"model.dtype": "float32"})
    row = dataclasses.replace(row, runs=(dataclasses.replace(row.runs[0], config=slow),))
    assert pod.compile_rows([row], lambda *_: pytest.fail("compiled"), file) == 0
    assert not file.exists()


def test_every_row_was_compiled():
    """`python -m experiments.pod` compiles what is missing."""
    found = pod.load()
    assert [f"{row.table}: {row.label}" for row in pod.rows() if row.key not in found] == []


def test_rows_that_were_compiled_fit():
    """On the machine and mesh of the row, by numbers that agree with each other."""
    found = pod.load()
    compiled = [(row, found[row.key]) for row in pod.rows() if row.key in found]
    assert compiled
    for row, one in compiled:
        assert one.fits, row.label
        assert one.memory["needed"] < one.memory["limit"]
        assert (one.topology, one.mesh) == (row.topology, str(row.config.mesh))
        assert 0 < one.mfu["serial"] <= one.mfu["exposed"] <= one.mfu["overlapped"] < 1
