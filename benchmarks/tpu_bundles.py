"""What the TPU compiler says about one function: bundles and slots of its kernels and of XLA's operations around them.

A bundle is what a core issues in one cycle, so the bundles of a stretch of code are its cycles, stalls aside.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import subjaxprs

from gattn import aot

if TYPE_CHECKING:
    from collections.abc import Callable

# XLA would park the few arrays of one head in VMEM, which no real batch fits into. (vf: v5, gf: v6)
_IN_HBM = "--xla_vf_vmem_memory_space_assignment=false --xla_gf_vmem_memory_space_assignment=false"
_TABLE = "-final_hlo-static-per-bundle-utilization.txt"


def measure(
    chip: str, build: Callable[[], tuple[Callable[..., Any], Any]], without: str | None = None
) -> dict[str, Any]:
    """Compiles `function, arguments = build()` for a chip, leaving out the `pl.when` branches named `without`.

    To be run in a process of its own, since libtpu reads its flags once and JAX keeps what it traced. Returns
      kernels: by the name XLA gives it, "bundles", "slots" used by unit and their "capacity" in a bundle, "matmul_rows"
        (rows that matrix instructions multiply by a tile), "bytes" of operands and results;
      outside: other operations that run code, with "name", "cycles" over all cores, and "bytes";
      steps: grid steps of each kernel by its own name; branches: the names that `pl.when` met;
      temporary_bytes: what the program needs beside arguments and results;
    or only "refused", the compiler's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {_IN_HBM}"
        aot.prepare()
        branches = _leave_out(without)
        function, arguments = build()
        steps = grids(jax.make_jaxpr(function)(*arguments).jaxpr)
        try:
            compiled = aot.compile_for(aot.tpu_devices(chip)[0], function, *arguments)
        except jax.errors.JaxRuntimeError as error:
            return {"refused": str(error).strip().splitlines()[0][:200]}
        kernels, outside = _read(Path(folder), compiled.as_text())
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return {
            "kernels": kernels,
            "outside": outside,
            "steps": steps,
            "branches": sorted(branches),
            "temporary_bytes": temporary,
        }


def grids(jaxpr: Any) -> dict[str, int]:
    """The grid steps of the Pallas kernels in a jaxpr, by name."""
    steps = {
        equation.params["name"]: math.prod(equation.params["grid_mapping"].grid)
        for equation in jaxpr.eqns
        if equation.primitive.name == "pallas_call"
    }
    for inner in subjaxprs(jaxpr):
        steps |= grids(inner)
    return steps


def _leave_out(name: str | None) -> set[str]:
    """From now on `pl.when` drops the branches of this name. The set fills with all names while tracing."""
    when, met = pl.when, set()

    def filtered(condition):
        def decorate(branch):
            branch_name = getattr(branch, "__name__", "run")
            met.add(branch_name)
            return None if branch_name == name else when(condition)(branch)

        return decorate

    pl.when = filtered
    return met


def _read(dump: Path, hlo: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tables = {re.sub(r"^\d+-|-\d+$", "", path.name.removesuffix(_TABLE)): path for path in dump.glob(f"*{_TABLE}")}
    kernels, outside = {}, []
    sizes: dict[str, int] = {}
    instruction = re.compile(r"^  (?:ROOT )?%(\S+) = (.+?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)$", re.MULTILINE)
    for name, shape, operation, operands, attributes in instruction.findall(hlo, hlo.index("\nENTRY")):
        sizes[name] = sum(
            math.prod(map(int, filter(None, dimensions.split(",")))) * int(bits) // 8
            for bits, dimensions in re.findall(r"\b(?:bf|f|s|u)(\d+)\[([\d,]*)\]", shape)
        )
        if name not in tables:
            continue
        (path,) = dump.glob(f"*-{name}-*[0-9]-final_bundles.txt")
        code = path.read_text()
        moved = sizes[name] + sum(sizes[operand] for operand in re.findall(r"%([^\s,]+)", operands))
        if operation == "custom-call" and "tpu_custom_call" in attributes:
            # A register holds 8 rows, of bfloat16 twice as many.
            products = re.findall(r"= vmatmul\.[a-z0-9.]*?(bf16|f32)", code)
            rows = sum({"bf16": 16, "f32": 8}[dtype] for dtype in products)
            kernels[name] = _bundles(tables[name]) | {"matmul_rows": rows, "bytes": moved}
        else:
            outside.append({"name": name, "cycles": _cycles(code), "bytes": moved})
    return kernels, outside


def _bundles(path: Path) -> dict[str, Any]:
    """Of a per-bundle-utilization file: names of units, their slots in a bundle, and what each bundle uses."""
    _, names, capacities, _, *rows = path.read_text().splitlines()
    columns = [name.strip() for name in names.split(",")]
    used = np.array([row.split() for row in rows], int).sum(axis=0).tolist()
    capacity = map(int, capacities.split())
    return {
        "bundles": len(rows),
        "slots": dict(zip(columns, used, strict=True)),
        "capacity": dict(zip(columns, capacity, strict=True)),
    }


def _cycles(code: str) -> int:
    """Bundles that one of XLA's operations issues over all cores: those in its loop as often as the loop runs."""
    lines = re.findall(r"^ +(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: (>?)", code, re.MULTILINE)
    loop = lines.count(">")
    # Noted beside each transfer: units of the array, units moved at once, and how often one core does that.
    base, window, iterations = (
        [math.prod(map(int, sizes.split(","))) for sizes in re.findall(rf"\n{kind}_bounds: \(([\d, ]+)\)", code)]
        for kind in ("base", "window", "iteration")
    )
    cores = max((-(-b // (w * i)) for b, w, i in zip(base, window, iterations, strict=True)), default=1)
    return cores * (len(lines) - loop + loop * max(iterations, default=1))
