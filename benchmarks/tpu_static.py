"""Static cost of the TPU kernels, from the compiler's own bundles: ours against jax's splash attention.

    make test-aot                                    # once: .venv-aot, with the TPU compiler
    .venv-aot/bin/python -m benchmarks.tpu_static [--chips v5p --passes forward --blocks 512/512/512] [--json FILE]

No TPU is needed and nothing is timed, so the numbers carry no noise. One head, S = 4096, head_dim 128, bfloat16, no
mask.

Cost of a pass = over its kernels, bundles of the step body x grid steps + bundles of what runs once per row (or column)
of blocks x how often it does; plus the bundles of XLA's operations around them; divided by S^2: cycles per (query, key)
pair. The regions are told apart by compiling again with one of them left out. Since code is counted and not run, a
rolled loop would look cheap: a kernel with fewer matrix instructions than its block's products take is refused.

Splash's rows are kept in cache/, by the versions of jax and libtpu. A last table counts the blocks that our kernels
visit under masks against those that the mask needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.tpu_bundles import grids, measure
from benchmarks.tpu_programs import DQ_TRANSPOSED, HEAD_DIM, KERNELS, LENGTH, PRODUCTS, Program, kernel_name, one_pass
from gattn import aot
from gattn.kernels import masks

# Query rows, keys, and keys computed at once.
EQUAL = ((512, 512, 512), (1024, 1024, 1024))
# What else is tried for the best: what came out of a wider search, each over a dozen sizes on v5p and v6e.
MORE = {
    ("gattn", "forward"): ((1024, 2048, 2048), (2048, 2048, 2048)),
    ("gattn", "backward"): ((1024, 2048, 2048),),
    ("splash", "forward"): ((1024, 2048, 1024), (2048, 4096, 1024)),
    ("splash", "backward"): ((1024, 2048, 512), (1024, 4096, 1024)),
}
CACHE = Path("cache/tpu_static.json")

# A matrix unit multiplies by a square tile of this size, and takes this many rows in a cycle.
TILE = {"v5e": (128, 1), "v5p": (128, 1), "v6e": (256, 2)}
# HBM bytes in a cycle of one core: 819, 2765 (for two) and 1640 GB/s at 1.5, 1.75 and 1.75 GHz.
HBM = {"v5e": 546, "v5p": 790, "v6e": 937}


def price(program: Program, full: dict[str, Any], without: dict[str, tuple[dict[str, Any], ...]]) -> dict[str, Any]:
    """The row of a program, from what was measured of it, and of its kernels with and without a region."""
    row = {"chip": program.chip, "pass": program.direction, "kernel": program.kernel, "variant": program.variant}
    row |= {"blocks": list(program.blocks), "best": False, "cycles_per_pair": None}
    refused = [result["refused"] for result in (full, *itertools.chain(*without.values())) if "refused" in result]
    if refused:
        return row | {"refused": refused[0]}
    unknown = {*full["branches"]} - {*program.regions, "run"}
    if unknown:
        raise RuntimeError(f"{program.kernel} has branches {sorted(unknown)} that REGIONS does not know")

    kernels = {kernel_name(name): kernel for name, kernel in sorted(full["kernels"].items())}
    steps = {kernel_name(name): count for name, count in full["steps"].items()}
    regions: dict[str, dict[str, Any]] = {name: {} for name in kernels}
    for region, pair in without.items():
        for other, kernel in itertools.chain.from_iterable(result["kernels"].items() for result in pair):
            regions[kernel_name(other)].setdefault(region, []).append(kernel)
    kernels = {
        name: price_kernel(program, name, steps[name], kernel, regions[name]) for name, kernel in kernels.items()
    }
    cycles = sum(operation["cycles"] for operation in full["outside"])
    moved = sum(operation["bytes"] for operation in full["outside"])
    row |= {
        "kernels": kernels,
        "kernel_bytes": sum(kernel["bytes"] for kernel in full["kernels"].values()),
        "outside": full["outside"],
        "outside_bytes": moved,
        "outside_cycles_per_pair": cycles / LENGTH**2,
        "outside_hbm_cycles_per_pair": moved / HBM[program.chip] / LENGTH**2,
        "temporary_bytes": full["temporary_bytes"],
    }
    for name, kernel in kernels.items():
        if kernel["matmul_rows"] < kernel["matmul_work"]:
            said = "{0} has a rolled loop: {matmul_rows} rows x tiles of {matmul_work}".format(name, **kernel)
            return row | {"refused": said}
    return row | {"cycles_per_pair": total(row)}


def total(row: dict[str, Any]) -> float:
    """Cycles per pair of all kernels and of what XLA does around them."""
    return row["outside_cycles_per_pair"] + sum(kernel["cycles_per_pair"] for kernel in row["kernels"].values())


def price_kernel(
    program: Program, name: str, steps: int, kernel: dict[str, Any], without: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """One kernel: its bundles by region, what its step body uses, and its cycles per pair."""
    rows, keys, _ = program.blocks
    regions, once, slots = {}, 0, dict(kernel["slots"])
    for region, (whole, rest) in without.items():
        size = whole["bundles"] - rest["bundles"]
        if size > 0:
            by_keys = region.endswith("_keys") or name == "splash_mha_dkv_no_residuals"
            regions[region] = size
            once += size * (LENGTH // (keys if by_keys else rows))
            slots = {unit: used - whole["slots"][unit] + rest["slots"][unit] for unit, used in slots.items()}
    body = kernel["bundles"] - sum(regions.values())
    products = PRODUCTS[name] + (program.family == "splash" and program.variant == "fused")
    tile, rows_per_cycle = TILE[program.chip]
    wide = rows * keys * math.ceil(HEAD_DIM / tile) // tile
    work = products * wide
    if name in DQ_TRANSPOSED:
        work += HEAD_DIM * rows * keys // tile**2 - wide
    return {
        "steps": steps,
        "body": body,
        "regions": regions,
        "matmul_rows": kernel["matmul_rows"],
        "matmul_work": work,
        "matmul_slots": slots["MATMUL"] / (body * kernel["capacity"]["MATMUL"]),
        # Above 1 the compiler has scheduled more than the units' rate: the body then takes longer than its bundles.
        "matmul_peak": work / (body * kernel["capacity"]["MATMUL"] * rows_per_cycle),
        "fills": slots["VLOAD:FILL"],
        "spills": slots["VSTORE:SPILL"],
        "cycles_per_pair": (body * steps + once) / LENGTH**2,
    }


def needs(program: Program) -> list[tuple[Program, str | None]]:
    """What has to be compiled for a row: the program, and its kernels with everything and without each region."""
    return [(program, None), *((program.ungated, region) for region in (None, *program.regions))]


def run(programs: list[Program], jobs: int) -> list[dict[str, Any]]:
    """The rows of these programs; splash's come from the cache where it has them."""
    versions = [importlib.metadata.version(package) for package in ("jax", "libtpu")]
    keys = {program: " ".join(map(str, (*versions, *program))) for program in programs}
    kept = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    rows = {program: kept[key] for program, key in keys.items() if key in kept}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:

        @cache
        def measured(program: Program, region: str | None):
            return pool.submit(measure, program.chip, partial(one_pass, program), region)

        waiting = [program for program in programs if program not in rows]
        for program in waiting:
            for of, region in needs(program):
                measured(of, region)
        try:
            for program in waiting:
                full, whole, *rests = (measured(*need).result() for need in needs(program))
                without = {region: (whole, rest) for region, rest in zip(program.regions, rests, strict=True)}
                rows[program] = price(program, full, without)
                print(".", end="", file=sys.stderr, flush=True)
                if program.family == "splash":
                    kept[keys[program]] = rows[program]
                    CACHE.parent.mkdir(exist_ok=True)
                    CACHE.write_text(json.dumps(kept))
        finally:
            pool.shutdown(cancel_futures=True)
    print(file=sys.stderr)
    result = [rows[program] for program in programs]
    return result + mixed(result)


def mixed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Splash's split backward at the best blocks of dq and the best of dkv, which are set apart, where they differ."""
    split = [row for row in rows if row["kernel"].startswith("splash") and row["variant"] == "split"]
    split = [row for row in split if row["cycles_per_pair"] is not None]
    more = []
    for _, group in itertools.groupby(sorted(split, key=config), config):
        group = list(group)
        parts = {
            name: min(group, key=lambda row: row["kernels"][name]["cycles_per_pair"]) for name in group[0]["kernels"]
        }
        first, second = parts.values()
        if first is not second:
            kernels = {name: row["kernels"][name] for name, row in parts.items()}
            row = second | {"blocks": [row["blocks"] for row in parts.values()], "kernels": kernels}
            more.append(row | {"cycles_per_pair": total(row)})
    return more


def config(row: dict[str, Any]) -> tuple[str, str, str]:
    """What a best row is the best of."""
    return row["chip"], row["pass"], row["kernel"]


def mark_best(rows: list[dict[str, Any]]) -> None:
    priced = [row for row in rows if row["cycles_per_pair"] is not None]
    for _, group in itertools.groupby(sorted(priced, key=config), config):
        min(group, key=lambda row: row["cycles_per_pair"])["best"] = True


def label(row: dict[str, Any]) -> str:
    blocks = row["blocks"] if isinstance(row["blocks"][0], list) else [row["blocks"]]
    return " + ".join("/".join(map(str, sizes)) for sizes in blocks)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        "cycles per 1000 pairs, and of these outside the kernels | per kernel: bundles of a step + of what runs once\n"
        "per row or column of blocks, MATMUL slots in use, share of the peak matmul rate, fills + spills | MiB in and\n"
        "out of kernels, of other operations, and temporary"
    )
    for row in sorted(rows, key=lambda row: (row["chip"], row["pass"], row["cycles_per_pair"] or math.inf)):
        best = "*" if row["best"] else " "
        print(f"{row['chip']} {row['pass']:8} {row['kernel']:13} {row['variant']:5} {label(row):14}{best}", end=" ")
        if "refused" in row:
            print("refused:", row["refused"])
            continue
        kernels = ", ".join(
            f"{kernel['body']}+{sum(kernel['regions'].values())} "
            f"{kernel['matmul_slots']:.0%} {kernel['matmul_peak']:.0%} "
            f"{kernel['fills']}+{kernel['spills']}"
            for kernel in row["kernels"].values()
        )
        mebibytes = " ".join(f"{row[k] / 2**20:.2f}" for k in ("kernel_bytes", "outside_bytes", "temporary_bytes"))
        total_cycles, outside_cycles = (1000 * row[k] for k in ("cycles_per_pair", "outside_cycles_per_pair"))
        print(f"{total_cycles:6.3f} {outside_cycles:.3f} | {kernels} | {mebibytes}")


def print_comparison(rows: list[dict[str, Any]]) -> None:
    """Ours, gated, as a multiple of splash without a gate, the better of its two backward passes."""
    print("\ngattn, gated, x splash without a gate")
    for chip, direction in sorted({(row["chip"], row["pass"]) for row in rows}):

        def cheapest(kernel: str, blocks: str | None, chip=chip, direction=direction) -> float:
            costs = [
                row["cycles_per_pair"] or math.inf
                for row in rows
                if config(row) == (chip, direction, kernel) and blocks in (None, label(row))
            ]
            return min(costs, default=math.nan)

        for blocks in (*("/".join(map(str, sizes)) for sizes in EQUAL), None):
            ours, theirs = cheapest("gattn", blocks), cheapest("splash", blocks)
            if not math.isnan(ours / theirs):
                print(f"{chip} {direction:8} {blocks or 'best':14} {ours / theirs:.3f}")


def visits() -> list[dict[str, Any]]:
    """Blocks that our kernels visit under masks (the steps of their grids), and those with a pair that may attend."""
    at = np.arange(LENGTH)
    documents = np.searchsorted([700, 1500, 3300], at, side="right").astype(np.int32)[None]
    behind = at[:, None] - at
    cases = {
        "causal": ({"is_causal": True}, behind >= 0),
        "causal, window 1024": ({"is_causal": True, "window": (1023, 0)}, (behind >= 0) & (behind < 1024)),
        "window 256 + 256": ({"window": (256, 256)}, abs(behind) <= 256),
        "4 documents, causal": (
            {"is_causal": True, "segments": (documents, documents)},
            (behind >= 0) & (documents == documents.T),
        ),
    }
    rows = []
    for (name, (limits, allowed)), blocks in itertools.product(cases.items(), EQUAL):
        needed = allowed.reshape(LENGTH // blocks[0], blocks[0], -1, blocks[1]).any(axis=(1, 3)).sum()
        steps = {}
        for direction, variant in (("forward", ""), ("backward", "fused"), ("backward", "split")):
            program = Program("v5p", direction, "gattn", variant, blocks)
            function, arguments = one_pass(program, masks.make_mask(LENGTH, LENGTH, **limits))
            visited = grids(jax.make_jaxpr(function)(*arguments).jaxpr)
            steps |= {name: count for name, count in visited.items() if PRODUCTS[kernel_name(name)]}
        rows.append({"mask": name, "blocks": list(blocks), "needed": int(needed), "visited": steps})
    return rows


def print_visits(rows: list[dict[str, Any]]) -> None:
    print("\nblocks needed, and visited by each kernel")
    for row in rows:
        visited = ", ".join(f"{kernel_name(name)} {count}" for name, count in row["visited"].items())
        print(f"{row['mask']:20} {label(row):14} {row['needed']:3} needed | {visited}")


def main() -> None:
    def names(allowed):
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if not {*chosen} <= {*allowed}:
                raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {', '.join(allowed)}")
            return chosen

        return parse

    def sizes(text: str) -> list[tuple[int, ...]]:
        return [tuple(map(int, blocks.split("/"))) for blocks in text.split(",")]

    passes = ("forward", "backward")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=names(aot.TPU_HOSTS), default=list(aot.TPU_HOSTS))
    parser.add_argument("--passes", type=names(passes), default=passes)
    parser.add_argument("--kernels", type=names(KERNELS), default=KERNELS)
    parser.add_argument("--blocks", type=sizes, help="rows/keys/keys computed at once, comma-separated; default: many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    aot.prepare()
    # Where libtpu is missing, this says so at once.
    aot.tpu_devices(arguments.chips[0])

    programs = [
        Program(chip, direction, kernel, variant, blocks)
        for chip, direction, kernel in itertools.product(arguments.chips, arguments.passes, arguments.kernels)
        for blocks in arguments.blocks or EQUAL + MORE[kernel.split("_")[0], direction]
        # Two kernels with seven products are not the best where one with five fits.
        for variant in {"forward": ("",), "backward": ("fused", "split")[: 1 + (blocks in EQUAL)]}[direction]
    ]
    rows = run(programs, arguments.jobs)
    mark_best(rows)
    print_rows(rows)
    print_comparison(rows)
    visited = visits()
    print_visits(visited)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "visits": visited}, indent=1) + "\n")


if __name__ == "__main__":
    main()
