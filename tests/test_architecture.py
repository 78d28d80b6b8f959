"""The house rules of the layout: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file of gattn imports only from rows above its own.
ROWS = [
    ["gattn", "gattn.schema", "gattn.hlo"],
    ["gattn.hlo_cost"],
    ["gattn.roofline"],
    ["gattn.architecture"],
    ["gattn.config"],
    ["gattn.files"],
    ["gattn.sharding", "gattn.guard"],
    ["gattn.kernels", "gattn.kernels.masks"],
    ["gattn.kernels.tuning"],
    ["gattn.kernels.reference"],
    ["gattn.kernels.chunked", "gattn.kernels.tpu", "gattn.kernels.gpu"],
    ["gattn.kernels.grouped_cpu", "gattn.kernels.grouped_gpu"],
    ["gattn.kernels.grouped"],
    ["gattn.kernels.vjp", "gattn.kernels.sharded"],
    ["gattn.kernels.arguments"],
    ["gattn.kernels.cudnn"],
    ["gattn.kernels.api"],
    ["gattn.gates", "gattn.rope", "gattn.probes"],
    ["gattn.exchange"],
    ["gattn.moe"],
    ["gattn.layers"],
    ["gattn.model"],
    ["gattn.data", "gattn.data.corpus"],
    ["gattn.data.tokenizer"],
    ["gattn.data.records", "gattn.data.documents"],
    ["gattn.data.plan"],
    ["gattn.data.prepare"],
    ["gattn.data.loader"],
    ["gattn.loss"],
    ["gattn.optim"],
    ["gattn.step"],
    ["gattn.distributed"],
    ["gattn.checkpoint"],
    ["gattn.metrics"],
    ["gattn.page"],
    ["gattn.interop", "gattn.interop.tensors", "gattn.interop.hf_config"],
    ["gattn.interop.hf"],
    ["gattn.resume"],
    ["gattn.train"],
    ["gattn.aot"],
    ["gattn.compile_report"],
    ["gattn.inspection", "gattn.generate"],
    ["gattn.ruler"],
    ["gattn.evaluate"],
    ["gattn.__main__"],
]
LEVEL = {name: level for level, row in enumerate(ROWS) for name in row}


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path):
    """Modules a file imports, except under `if TYPE_CHECKING`; `from a import b` counts as a.b if that is one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in LEVEL else node.module for name in inner}
    return names


@pytest.mark.parametrize("path", files("gattn"), ids=module_name)
def test_gattn_imports_only_from_rows_above(path):
    name = module_name(path)
    ours = {other for other in imported(path) if other.split(".")[0] == "gattn"}
    assert {other for other in ours if LEVEL[other] >= LEVEL[name] and other != "gattn"} == set()


@pytest.mark.parametrize("path", files("gattn"), ids=module_name)
def test_gattn_imports_neither_configs_nor_experiments(path):
    """With one exception: the command line looks presets and variants up."""
    outside = {
        name for name in imported(path) if name.split(".")[0] in ("configs", "experiments", "benchmarks", "tests")
    }
    assert outside == ({"configs.models", "configs.variants"} if path.name == "__main__.py" else set())


@pytest.mark.parametrize("path", files("configs"), ids=module_name)
def test_presets_import_only_the_config(path):
    ours = {name for name in imported(path) if name.split(".")[0] in ("gattn", "experiments", "jax", "flax")}
    assert ours <= {"gattn.config"}


def test_config_needs_no_jax_and_one_module_knows_orbax():
    for path in [ROOT / f"gattn/{name}.py" for name in ("schema", "architecture", "config")]:
        assert not {name for name in imported(path) if name.split(".")[0] in ("jax", "flax", "numpy")}
    knowing = {module_name(p) for p in files("gattn") if any(n.startswith("orbax") for n in imported(p))}
    assert knowing == {"gattn.checkpoint"}


def test_nothing_needs_torch():
    """But the script that writes what torch says of small models, which runs in an environment of its own."""
    apart = {ROOT / "tests" / "golden" / "make.py"}
    for package in ("gattn", "configs", "experiments", "benchmarks", "tests"):
        for path in set(files(package)) - apart:
            assert not {name for name in imported(path) if name.split(".")[0] in ("torch", "transformers")}, path
