"""The command line: help, dry runs, and a hundred broken configs."""

import importlib.util
import json
import random

import pytest

from configs.models import PRESETS, tiny
from configs.variants import VARIANTS
from gattn.__main__ import main
from gattn.config import to_json

FIELDS = ("--dry-run", "--model.num-kv-heads", "--optim.b2", "--mesh STR", "--mesh.fsdp", "--distributed")


def run(capsys, *argv):
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_shows_every_variant_preset_and_field(capsys):
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    assert all(name in words for name in (*VARIANTS, *PRESETS, *FIELDS))


@pytest.mark.parametrize(
    ("gate", "params"),
    [("baseline", "1,720,837,120"), ("g1_headwise", "1,721,754,624"), ("g1_elementwise", "1,728,177,152")],
)
def test_dry_run_of_the_dense_model(capsys, gate, params):
    argv = ["--preset", "dense_1p7b_28l", "--model.vocab-size", "152064", "--gate", gate, "--dry-run"]
    code, out, _ = run(capsys, "train", *argv)
    assert code == 0
    assert params in out
    assert ("FFN 5504" in out) == (gate == "g1_elementwise")
    assert "blocks.attention.query.kernel" in out


def test_overrides_reach_the_config(capsys):
    code, out, _ = run(capsys, "train", "--gate", "g1_headwise", "--model.num-layers", "7", "--dry-run")
    assert code == 0
    assert "(7, 128, 4, 1)" in out


def test_dry_run_of_a_mesh(capsys):
    """Of machines that are not here; fsdp and tensor cut parameters and moments up, data does not."""
    sizes = {}
    for mesh in ("data=4", "fsdp=4", "fsdp=2,tensor=2"):
        code, out, _ = run(capsys, "train", "--preset", "dense_1p7b_28l", "--mesh", mesh, "--dry-run")
        assert code == 0
        assert f"{mesh}: 4 devices" in out
        sizes[mesh] = float(out.rpartition("each of them")[2].split()[0])
    assert sizes["fsdp=4"] == pytest.approx(sizes["data=4"] / 4, rel=0.01)
    assert sizes["fsdp=2,tensor=2"] == pytest.approx(sizes["data=4"] / 4, rel=0.2)
    one = run(capsys, "train", "--mesh.fsdp", "4", "--dry-run")
    assert one == run(capsys, "train", "--mesh", "fsdp=4", "--dry-run")
    code, out, err = run(capsys, "train", "--mesh", "fsdp=3", "--dry-run")
    assert (code, out) == (2, "")
    assert "data.batch_size = 8: must be a multiple of 3" in err


def test_a_config_file_is_a_preset(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(to_json(tiny()))
    assert run(capsys, "train", "--config", str(path), "--dry-run")[1] == run(capsys, "train", "--dry-run")[1]
    assert (
        run(capsys, "train", "--preset", "configs.models:tiny", "--dry-run")[1] == run(capsys, "train", "--dry-run")[1]
    )


def broken(rng):
    """A config that cannot work: one or more fields of a good one misspelt, of the wrong type, or out of range."""
    values = json.loads(to_json(tiny()))
    section = rng.choice(list(values))
    name = rng.choice([n for n, v in values[section].items() if type(v) in (int, float)])
    kind = rng.randrange(5)
    if kind == 0:
        values[section][name] = rng.choice([-7, "many", None, [], {}, True, float("nan"), -0.5])
    elif kind == 1:
        values[section][name[:-1]] = values[section].pop(name)
    elif kind == 2:
        texts = [(s, n) for s in values for n, v in values[s].items() if isinstance(v, str) and v]  # "" may be right
        section, name = rng.choice(texts)
        values[section][name] = rng.choice(["", "Float32", 3, None, "no:such module"])
    elif kind == 3:
        first, second = rng.choice(
            [
                ({"num_heads": 6, "num_kv_heads": 4}, {}),
                ({"head_dim": 33}, {}),
                ({"position": "learned", "max_seq_len": 100}, {}),
                ({"ffn_dim": 12, "gates": [{}]}, {}),
                ({}, {"warmup_steps": 10_000}),
                ({}, {"final_learning_rate": 1.0}),
            ]
        )
        values["model"] |= first
        values["optim"] |= second
    else:
        values["model"]["gates"] = rng.choice(
            [
                "g1",
                [{"position": "g7"}],
                [{"position": "g1"}, {"position": "g1"}],
                [{"position": "g5", "granularity": "headwise"}],
                [{"bias_init": 2.0}],
                [{"kind": "g1"}],
                [3],
            ]
        )
    return values


@pytest.mark.parametrize("seed", range(100))
def test_broken_configs_give_clear_errors(capsys, tmp_path, seed):
    """One line that names a field and what to do; nothing is compiled, nothing written."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(broken(random.Random(seed))))
    code, out, err = run(capsys, "train", "--config", str(path), "--dir", str(tmp_path / "run"))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert " = " in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model.num-kv-heads", "3"], "num_kv_heads"),
        (["--model.num-layer", "3"], "--model.num-layers"),
        (["--model.dtype", "float8"], "bfloat16"),
        (["--gate", "g9"], "g1_headwise"),
        (["--preset", "huge"], "tiny"),
        (["--preset", "no.such:thing"], "imported"),
        (["--preset", ":x"], "tiny"),
        (["--preset", "json:dumps"], "called"),
        (["--preset", "os:getcwd"], "returns str"),
        (["--config", "/nowhere.json"], "readable"),
        (["--train.steps", "20"], "warmup_steps"),
        (["--data.source", "builtins:repr"], "Source"),
        (["--mesh", "fsdp=3"], "needs 3 devices"),
        (["--mesh", "data=2,fsdp"], "data=2,fsdp=4"),
        (["--mesh", "data=2,heads=2"], "mesh.heads"),
        (["--distributed", "somewhere"], "HOST:PORT,COUNT,INDEX"),
    ],
)
def test_wrong_arguments_are_explained(capsys, tmp_path, argv, says):
    code, out, err = run(capsys, "train", *argv, "--dir", str(tmp_path / "run"))
    assert code == 2
    assert says in " ".join(err.replace("│", " ").split()) + out
    assert "Traceback" not in err + out


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_bucket_without_what_it_needs_names_the_extra(capsys):
    argv = ["train", "--preset", "experiments.sinkbench:sinkbench_config", "--dir", "gs://bucket/run"]
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert ".[gcs]" in err
    assert len(err.splitlines()) == 1


def test_unknown_command(capsys):
    code, _, err = run(capsys, "tarin")
    assert code == 2
    assert "train" in err
