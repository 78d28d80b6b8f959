"""The rows of the paper's tables at its own scale: what each is, what it would take of a pod, how it is started.

`python -m experiments.table1 --scale pod --dry-run` (table2 to table6) prints it, with times and memory
from pod.json beside this file. `python -m experiments.pod` writes that: it compiles every row's train step for its
machine, one to four minutes of CPU each, and goes on where it was stopped. No chip has confirmed a number.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.models import PRESETS
from configs.variants import apply
from experiments import report
from experiments.runner import Run
from experiments.study import Part, ScaledArgs, Study
from gattn import model
from gattn.config import Config, MeshConfig, ModelConfig, differences, override, to_json
from gattn.files import write_atomically
from gattn.roofline import GIB

FILE = Path(__file__).with_name("pod.json")
PYTHON = ".venv-aot/bin/python"
VERSIONS = "from importlib.metadata import version; print(*(f'{x} {version(x)}' for x in ('jax', 'libtpu')))"
TABLES = ("table1", "table2", "table3", "table4", "table5", "table6")
FOLDER = "FOLDER"  # the data of a command, where none were named

# Preset -> topology and mesh; the second one is for 132 experts, which are no multiple of 8.
PLACES = {
    "moe_15a2b": ("v5p:8x8x8", "fsdp=64,expert=8", "fsdp=128,expert=4"),
    "dense_1p7b_28l": ("v5p:4x4x4", "data=4,fsdp=16"),
    "dense_1p7b_48l": ("v5p:4x4x4", "data=4,fsdp=16"),
}

# Fields of a run's fingerprint that change nothing but constants of the compiled program.
NEUTRAL: dict[str, Any] = {
    **{"data.source": "corpus", "data.tokenizer": "bpe", "data.eval_sequences": 1},
    **{"optim.learning_rate": 1.0, "optim.final_learning_rate": 0.0, "optim.warmup_steps": 0},
    **{"optim.schedule": "cosine", "optim.decay_steps": 0},
    **{"train.steps": 1, "train.seed": 0, "train.start_from": ""},
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler and the roofline say of rows' train step, as `gattn.compile_report.Report` has it."""

    labels: list[str]
    topology: str
    mesh: str
    seconds: dict[str, float]
    """Of a step: `compute`, `hbm` and `network` by themselves, `overlapped`, `exposed` (the headline), `serial`."""
    mfu: dict[str, float]
    memory: dict[str, int]
    """Bytes of a device; `needed` and `limit` are the whole."""
    fits: bool
    compile_seconds: float
    versions: str
    date: str


@dataclass(frozen=True)
class Row:
    """A row of a table with its seeds, on its machine."""

    label: str
    table: str
    variant: str
    preset: str
    """Of `configs.models`, that it is made from."""
    runs: tuple[Run, ...]

    @cached_property
    def config(self) -> Config:
        """Of the first seed, with its mesh."""
        run, (_, *meshes) = self.runs[0].config, PLACES[self.preset]
        mesh = next(mesh for mesh in map(MeshConfig.parse, meshes) if run.model.num_experts % mesh.expert == 0)
        return dataclasses.replace(run, mesh=mesh)

    @property
    def topology(self) -> str:
        return PLACES[self.preset][0]

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def is_priced(self) -> bool:
        """Whether the roofline knows the peak: float32 is several passes of bfloat16."""
        return self.config.model.dtype == "bfloat16"

    @cached_property
    def key(self) -> str:
        """16 hex digits of what fixes the compiled program: the config but for `NEUTRAL`, and the machine."""
        clips = {"model.clip_outputs": float(self.config.model.clip_outputs > 0)}
        same = override(self.config, NEUTRAL | clips).fingerprint()
        parts = [same, self.topology, str(self.config.mesh), self.config.model.buffer_factor]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def chip_hours(self, compiled: Compiled) -> float:
        """Of one seed's steps, by the roofline."""
        return compiled.seconds["exposed"] * self.config.train.steps * self.chips / 3600

    def command(self) -> list[str]:
        """Trains the first seed: everything in which the row differs from its preset with its variant."""
        words = ["python", "-m", "gattn", "train", "--preset", self.preset, "--gate", self.variant]
        mathematical, cosmetic = differences(apply(PRESETS[self.preset](), self.variant), self.config)
        for path, (_, value) in (mathematical | cosmetic).items():
            words += [] if path.startswith("mesh.") else [f"--{path.replace('_', '-')}", str(value)]
        return [*words, "--mesh", str(self.config.mesh), "--distributed", "auto"]


def rows_of(study: Study, part: Part) -> list[Row]:
    """The rows of a study's part; data that were not named are `FOLDER`."""
    preset = min(PLACES, key=lambda name: sum(map(len, differences(PRESETS[name](), part.base))))
    table = study.command.split()[2].rpartition(".")[2]
    if part.base.data.source == "corpus":
        part = dataclasses.replace(part, base=override(part.base, {"data.source": FOLDER}))
    lines = [line for line in part.lines if line.label in part.needed]
    return [Row(line.label, table, line.variant, preset, tuple(part.runs([line.label]))) for line in lines]


def rows(tables: Sequence[str] = TABLES) -> list[Row]:
    """All rows of tables (modules of `experiments`) at the paper's scale."""
    modules = [importlib.import_module(f"experiments.{table}") for table in tables]
    studies = [module.build(getattr(module, "Args", ScaledArgs)(scale="pod", dry_run=True)) for module in modules]
    return [row for study in studies for part in study.parts for row in rows_of(study, part)]


def load(path: Path | None = None) -> dict[str, Compiled]:
    """Row.key -> what was compiled."""
    path = path or FILE
    return {key: Compiled(**entry) for key, entry in json.loads(path.read_text()).items()} if path.exists() else {}


# ---- what a dry run prints --------------------------------------------------------------------------------------


def show(study: Study, console: Console) -> None:
    """Every row of a study at the scale `pod`: its run, its machine, its command."""
    compiled, every = load(), []
    for part in study.parts:
        every += (own := rows_of(study, part))
        console.print(Text(f"\n{part.heading}", style="bold"), soft_wrap=True)
        console.print(_runs(own))
        console.print(_machines(own, compiled))
        for row in own:
            starts = row.config.train.start_from
            line = "with --launcher print: each seed starts from another run" if starts else shlex.join(row.command())
            console.print(Text(f"{row.label}\n  {line}"), soft_wrap=True)
    named = "--source" in study.command
    sweep = study.command if named else f"{study.command} --source {FOLDER}"
    gpus = "--slurm.nodes N --slurm.gpus-per-node 8 --slurm.tasks-per-node 8 --slurm.mesh MESH"
    for line in ("\nall rows and seeds", f"  {sweep} --launcher print", f"  {sweep} --launcher slurm {gpus}"):
        console.print(Text(line), soft_wrap=True)
    for remark in remarks(every, compiled, named):
        console.print(Text(f"- {remark}"))


def remarks(every: Sequence[Row], compiled: Mapping[str, Compiled], named: bool) -> list[str]:
    """What has to be known to read the numbers; `named`: whether the data were."""
    known = [row for row in every if row.key in compiled]
    total = sum(row.chip_hours(compiled[row.key]) * len(row.runs) for row in known)
    steps, data = every[0].config.train.steps, every[0].config.data
    per_step = data.batch_size * data.seq_len
    stated = (
        f"{steps:,} steps of {per_step:,} tokens are {steps * per_step / 1e9:.1f}B; 400B would be "
        f"{400e9 / per_step:,.0f} steps. The paper states both, 100,000 steps and 400B tokens."
    )
    out = [
        f"{total:,.0f} chip-hours are the steps of all seeds (above, of one) of {len(known)} of {len(every)} rows; "
        "evaluation, checkpoints and restarts are not in it.",
        "Step, MFU and chip-hours are a roofline of the compiled program, not a measurement. A step is the longer of "
        "computing (at the bfloat16 peak) and memory traffic, and then all communication; in brackets, MFU where "
        "nothing overlaps and where everything does.",
        *([stated] if steps == 100_000 else []),
        f"Not stated in the paper: {'; '.join(report.paper()['training']['not_stated'])}. The docstrings in "
        "configs/models.py say what stands there; the dense runs have warm-up and final LR of those with experts.",
        "A command trains seed 0, --train.seed another. On a Cloud TPU slice `scripts/tpu_pod.sh train` takes what "
        "follows `train`, without --distributed. N nodes and their MESH are those of your GPUs.",
    ]
    if missing := [row for row in every if row.key not in compiled and row.is_priced]:
        tables = "" if missing[0].table in TABLES else f" {missing[0].table}"
        out.append(f"{len(missing)} rows not compiled: python -m experiments.pod{tables}")
    if any(str(row.config.mesh) != PLACES[row.preset][1] for row in every):
        out.append("132 experts are no multiple of 8: their row has a mesh of its own.")
    return out if named else [*out, f"{FOLDER} is what `python -m gattn prepare` has made; --source names it."]


def _runs(own: Sequence[Row]) -> Table:
    table = _table("row", "parameters", "active", "to first", "tokens", "steps", "batch", "learning rate")
    first = counts(own[0].config.model)["params"]
    for row in own:
        size, optim, data, steps = counts(row.config.model), row.config.optim, row.config.data, row.config.train.steps
        table.add_row(
            row.label,
            f"{size['params'] / 1e9:.3f}B",
            f"{size['active_params'] / 1e9:.3f}B",
            f"{(size['params'] - first) / 1e6:+.1f}M" if row is not own[0] else "",
            f"{steps * data.batch_size * data.seq_len / 1e9:,.1f}B",
            f"{steps:,}",
            f"{data.batch_size:,} x {data.seq_len:,}",
            f"{optim.learning_rate:g} to {optim.final_learning_rate:g}, {optim.schedule}, "
            f"warm-up {optim.warmup_steps:,}",
        )
    return table


def _machines(own: Sequence[Row], compiled: Mapping[str, Compiled]) -> Table:
    table = _table("row", "chips", "mesh", "step s", "MFU", "chip-hours", "GiB a chip", "fits", "done", "compiled")
    for row in own:
        cells = ["–", "–", "–", "–", "–"]
        how = "not compiled" if row.is_priced else "float32: no peak known"
        if one := compiled.get(row.key):
            low, mid, high = (f"{100 * one.mfu[name]:.0f}" for name in ("serial", "exposed", "overlapped"))
            memory = " of ".join(f"{one.memory[name] / GIB:.1f}" for name in ("needed", "limit"))
            cells = [f"{one.seconds['exposed']:.2f}", f"{mid}% ({low}–{high})", f"{row.chip_hours(one):,.0f}", memory]
            cells, how = [*cells, "yes" if one.fits else "no"], one.date
        done = f"{sum(run.result() is not None for run in row.runs)}/{len(row.runs)}"
        table.add_row(row.label, f"{row.chips} ({row.topology})", str(row.config.mesh), *cells, done, how)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        words = title in ("row", "chips", "mesh", "learning rate", "compiled")
        table.add_column(title, justify="left" if words else "right", no_wrap=not words)
    return table


@cache
def counts(config: ModelConfig) -> dict[str, int]:
    """`gattn.model.param_counts`, once per model."""
    return model.param_counts(config)


# ---- compiling --------------------------------------------------------------------------------------------------


def compile_rows(every: Sequence[Row], compiler: Callable[[Config, str], dict[str, Any]], path: Path = FILE) -> int:
    """Compiles what is missing, and writes it down after each; the number of programs that could not be compiled."""
    programs: dict[str, list[Row]] = {}
    for row in (row for row in every if row.is_priced):
        programs.setdefault(row.key, []).append(row)
    missing, failed = [key for key in programs if key not in load(path)], 0
    print(f"{len(programs)} programs, {len(missing)} to compile", flush=True)
    for key in missing:
        row, labels = programs[key][0], [f"{row.table}: {row.label}" for row in programs[key]]
        try:
            made = compiler(row.config, row.topology)
        except (RuntimeError, OSError) as error:
            print(f"failed: {labels[0]}: {error}", flush=True)
            failed += 1
            continue
        made |= {"labels": labels, "mesh": str(row.config.mesh), "date": datetime.date.today().isoformat()}
        entry = Compiled(**{field.name: made[field.name] for field in dataclasses.fields(Compiled)})
        entries = {name: dataclasses.asdict(one) for name, one in (load(path) | {key: entry}).items()}
        write_atomically(path, json.dumps(entries, indent=1) + "\n")
        print(f"{entry.compile_seconds:5.0f} s  {labels[0]}: {entry.seconds['exposed']:.3f} s a step", flush=True)
    return failed


def compile_apart(config: Config, topology: str, python: str = PYTHON) -> dict[str, Any]:
    """The report of `python -m gattn compile`, and `versions`, by an interpreter that has the compilers.
    RuntimeError with its last words where it leaves none."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "config.json"), Path(folder, "report.json")
        given.write_text(to_json(config))
        words = [python, "-m", "gattn", "compile", "--config", str(given), "--topology", topology]
        done = subprocess.run([*words, "--json", str(made)], capture_output=True, text=True)
        if not made.exists():  # it is there where a step does not fit
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
        return json.loads(made.read_text()) | {"versions": versions.strip()}


def main(tables: Annotated[tuple[str, ...], tyro.conf.Positional] = TABLES, python: str = PYTHON) -> int:
    """Compiles what pod.json lacks of these tables' rows, by a `python` that has the compilers (`make test-aot`)."""
    return min(compile_rows(rows(tables), partial(compile_apart, python=python)), 1)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
