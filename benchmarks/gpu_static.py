"""What the compiler makes of the GPU kernels for an H200: ours, and jax's own attention for Hopper beside them.

    make test-aot                                     # once: .venv-aot, with the GPU compiler
    .venv-aot/bin/python -m benchmarks.gpu_static [--head-dims 128 --parts forward,dq] [--json FILE]

No GPU is needed and nothing is timed. Everything is read from the PTX, ptxas' report and the launch of a kernel that is
compiled for T = S = 4096, one program per kernel: registers, spills, stack, shared memory, CTAs that fit on an SM, and
the products that wgmma instructions do.

A step of a CTA is one block of scores, and its work the products on it: 2 in the forward pass, 3 for dq, 4 for dkv (3
and 2 where dk and dv have a kernel each). Every loop of the PTX with wgmma in it must do exactly that in one turn, and
what stands outside of loops exactly one step more (a pipeline's first and last) or nothing: so no product is missing,
done twice or done on padding. The rows (or keys) that a CTA owns are taken from the number of CTAs launched.

A row that spills, whose wgmma are serialised, or whose work is another, is marked; if it is ours, the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gattn import aot
from gattn.kernels import gpu, masks, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH, HEADS, KV_HEADS = 4096, 4, 2
HEAD_DIMS = (64, 128, 256)
# Products on a block of scores, by kernel.
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "dk": 3, "dv": 2}
# Of one SM of an H200.
SHARED_MEMORY, REGISTERS, THREADS = 233472, 65536, 2048
# What a CTA takes beside its own shared memory.
RESERVED = 1024
# Keys of a block in attention_mgpu's forward pass: as in its own benchmark, the most that fit. Backward takes 64 x 64.
THEIR_KEYS = {64: 256, 128: 128, 256: 64}


class Program(NamedTuple):
    """One kernel: "gattn" or "attention_mgpu", and what it is compiled for."""

    kernel: str
    part: str
    head_dim: int
    causal: bool
    gate: str = "none"
    consumers: int = 2
    """Warpgroups that compute, where that is a choice: in attention_mgpu's backward pass."""


class Step(NamedTuple):
    """What the CTAs of a kernel share out (rows or keys of all heads), and what one sees of the other in a step."""

    shared_out: int
    block: int


def programs() -> list[Program]:
    """All that can be asked for; jax's has no gate, and no causal mask in its backward pass."""
    both = (True, False)
    ours = [
        Program("gattn", "forward", head_dim, causal, gate)
        for head_dim, causal, gate in itertools.product(HEAD_DIMS, both, ("none", "headwise", "elementwise"))
    ]
    # The gate's part of the backward pass is done before these kernels.
    ours += [
        Program("gattn", part, head_dim, causal)
        for head_dim, causal in itertools.product(HEAD_DIMS, both)
        for part in (("dq", "dkv") if head_dim <= 128 else ("dq", "dk", "dv"))
    ]
    theirs = [Program("attention_mgpu", "forward", *more) for more in itertools.product(HEAD_DIMS, both)]
    theirs += [
        Program("attention_mgpu", part, head_dim, False, consumers=consumers)
        for part, head_dim, consumers in itertools.product(("dq", "dkv"), HEAD_DIMS, (1, 2))
        if head_dim <= 128 or consumers == 1
    ]
    return ours + theirs


def ours(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...], Step]:
    """One of our kernels, with the blocks it would take on an H200."""

    def array(heads: int, width: int = program.head_dim) -> Any:
        return jax.ShapeDtypeStruct((1, LENGTH, heads, width), jnp.bfloat16)

    widths = {"headwise": 1, "elementwise": program.head_dim}
    gate = array(HEADS, widths[program.gate]) if program.gate in widths else None
    inputs = reference.Inputs(array(HEADS), array(KV_HEADS), array(KV_HEADS), gate=gate)
    options = reference.Options(program.head_dim**-0.5)
    vector = jax.ShapeDtypeStruct((1, LENGTH, HEADS), jnp.float32)
    with aot.h200_mesh():
        blocks = gpu._tuned("gpu.forward" if program.part == "forward" else "gpu.backward", inputs)

    def mask() -> masks.Mask:
        return masks.make_mask(LENGTH, LENGTH, is_causal=program.causal)

    if program.part == "forward":
        step = Step(LENGTH * HEADS, blocks.forward.keys)
        return lambda inputs: gpu.forward(inputs, mask(), options, blocks=blocks), (inputs,), step

    def backward(inputs, lse, dout, delta):
        grads = gpu.backward(inputs, mask(), options, lse, dout, delta, blocks=blocks)
        names = {"dq": ["query"], "dkv": ["key", "value"], "dk": ["key"], "dv": ["value"]}[program.part]
        return [getattr(grads, name) for name in names]

    if program.part == "dq":
        step = Step(LENGTH * HEADS, blocks.query_gradient.keys)
    else:
        step = Step(LENGTH * KV_HEADS, blocks.key_value_gradient.rows)
    return backward, (inputs, vector, inputs.query, vector), step


def theirs(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...], Step]:
    """One kernel of jax's attention_mgpu, which keeps float16 in shared memory whatever it is given."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, program.head_dim), jnp.float16)
    vector = jax.ShapeDtypeStruct((1, HEADS, LENGTH), jnp.float32)
    sides: Any = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=THEIR_KEYS[program.head_dim],
        max_concurrent_steps=2,
        causal=program.causal,
        compute_wgs_bwd=program.consumers,
        **sides,
    )
    if program.part == "forward":
        function = partial(attention_mgpu.attention, config=config, save_residuals=True)
        return function, (array,) * 3, Step(LENGTH * HEADS, config.block_kv)

    def backward(*residuals_and_dout):
        *residuals, dout = residuals_and_dout
        grads = attention_mgpu._attention_bwd(config, False, residuals, dout)
        return grads[0] if program.part == "dq" else grads[1:]

    return backward, (array, array, array, array, vector, array), Step(LENGTH * HEADS, 64)


def measure(program: Program) -> dict[str, Any]:
    """The row of a program; one that does not compile has "failed", the compiler's message, instead of numbers."""
    row = {**program._asdict(), "pass": "forward" if program.part == "forward" else "backward"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        function, arguments, step = (ours if program.kernel == "gattn" else theirs)(program)
        try:
            aot.compile_for(aot.h200_devices()[0], function, *arguments)
        except Exception as error:
            message = str(error).strip().splitlines()
            return row | {"failed": ": ".join([type(error).__name__, *(line[:200] for line in message[:1])])}
        (ptx,), (report,), (launch,) = (
            [path.read_text() for path in Path(folder).glob(f"*{name}")]
            for name in (".ptx", ".ptxas", ".before_layout_inference.txt")
        )
    return row | describe(program, step, ptx, report, launch)


def describe(program: Program, step: Step, ptx: str, report: str, launch: str) -> dict[str, Any]:
    """What the texts of a compiled kernel say: its PTX, ptxas' report, and the module that launches it."""
    ctas, threads, shared_memory = parse_launch(launch)
    own, rest = divmod(step.shared_out, ctas)
    if rest:
        raise RuntimeError(f"{program}: {step.shared_out} rows or keys are not shared out evenly over {ctas} CTAs")
    # All but the producer; and all of them run the same code.
    consumers = threads // 128 - 1
    loops, outside = products(ptx)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    stack, stores, loads = map(
        int, re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)[0]
    )
    block_flops = PRODUCTS[program.part] * 2 * own * step.block * program.head_dim
    rows, keys = (own, step.block) if program.part in ("forward", "dq") else (step.block, own)
    resident = ctas_per_sm(threads, registers, shared_memory)
    row = {
        "rows": rows,
        "keys": keys,
        "consumers": consumers,
        "threads": threads,
        "registers": registers,
        # Of the producer and of the consumers.
        "set_registers": sorted(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", ptx))),
        "spill_stores": stores,
        "spill_loads": loads,
        "stack": stack,
        "shared_memory": shared_memory,
        "ctas_per_sm": resident,
        "occupancy": resident * threads / THREADS,
        "wgmma": {
            shape: len(re.findall(rf"{shape}\.", ptx)) for shape in sorted({*re.findall(r"(m64n\d+k\d+)\.", ptx)})
        },
        "loop_flops": [flops * consumers for flops in loops],
        "outside_flops": outside * consumers,
        "block_flops": block_flops,
        "serialised": "wgmma.mma_async instructions are serialized" in report,
    }
    return row | {"problems": problems(row)}


def problems(row: dict[str, Any]) -> list[str]:
    found = []
    if row["spill_stores"] or row["spill_loads"]:
        found.append("spills")
    if row["serialised"]:
        found.append("wgmma serialised")
    work = row["block_flops"]
    if {*row["loop_flops"]} != {work} or row["outside_flops"] not in (0, work):
        found.append("wgmma work is not the block's")
    return found


def parse_launch(text: str) -> tuple[int, int, int]:
    """CTAs, threads of one, and bytes of its shared memory."""
    triple = r"\(\S+ = %c(\d+)\w*, \S+ = %c(\d+)\w*, \S+ = %c(\d+)\w*\)"
    pattern = rf"gpu\.launch .*blocks\(.*?\) in {triple} threads\(.*?\) in {triple} dynamic_shared_memory_size %c(\d+)"
    ((*sizes, shared_memory),) = re.findall(pattern, text)
    ctas, threads = math.prod(map(int, sizes[:3])), math.prod(map(int, sizes[3:]))
    return ctas, threads, int(shared_memory)


def ctas_per_sm(threads: int, registers: int, shared_memory: int) -> int:
    """How many CTAs an SM holds at once. A warp gets registers by the 256."""
    per_warp = math.ceil(registers * 32 / 256) * 256
    return min(THREADS // threads, REGISTERS // (per_warp * threads // 32), SHARED_MEMORY // (shared_memory + RESERVED))


def products(ptx: str) -> tuple[list[int], int]:
    """FLOPs of one warpgroup's wgmma: in each loop that has any, in one turn of it, and outside of loops.

    m64nNk16 multiplies 64 x 16 by 16 x N. Nested loops count as one.
    """
    flops, after = _basic_blocks(ptx)
    reach = after.copy()
    for middle in range(len(flops)):
        reach |= np.outer(reach[:, middle], reach[middle])
    looping = reach.diagonal()
    # Two blocks are in the same loop if each is reached from the other.
    loops = {tuple(np.flatnonzero(reach[i] & reach[:, i])) for i in np.flatnonzero(looping & (flops > 0))}
    return [int(flops[list(loop)].sum()) for loop in sorted(loops)], int(flops[~looping].sum())


def _basic_blocks(ptx: str) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of code that begin at a label or after a jump: FLOPs of each, and which one may follow which."""
    # Jumps inside of inline assembly, which wait for barriers, have labels of another kind.
    parts = re.split(r"^\s*(\$L__BB\d+_\d+):|^\s*(@\S+\s+)?(bra|bra\.uni|ret)\b\s*(\$L__BB\d+_\d+)?;", ptx, flags=re.M)
    blocks: list[str] = [parts[0]]
    labels, jumps, falls = {}, [], []
    for label, predicate, jump, target, code in zip(*(parts[i::5] for i in range(1, 6)), strict=True):
        here = len(blocks) - 1
        if label:
            labels[label] = here + 1
        elif jump != "ret":
            jumps.append((here, target))
        if label or predicate:
            falls.append((here, here + 1))
        blocks.append(code)
    after = np.zeros((len(blocks), len(blocks)), bool)
    for here, there in falls + [(here, labels[target]) for here, target in jumps]:
        after[here, there] = True
    shape = re.compile(r"wgmma\.mma_async\.\S*?\.m64n(\d+)k(\d+)\.")
    flops = [sum(2 * 64 * int(n) * int(k) for n, k in shape.findall(code)) for code in blocks]
    return np.array(flops), after


def run(chosen: list[Program], jobs: int) -> Iterator[dict[str, Any]]:
    """The rows. Each is compiled in a new process, since a kernel that was compiled before is not dumped again."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=aot.prepare, max_tasks_per_child=1) as pool:
        for row in pool.map(measure, chosen):
            print(".", end="", file=sys.stderr, flush=True)
            yield row
    print(file=sys.stderr)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        "H200. Per CTA: rows x keys of a step, consumer warpgroups, KiB of shared memory | CTAs on an SM, share of\n"
        "its threads | registers at the launch and, set later, of producer/consumers; spilled bytes (stores + loads),\n"
        "stack | wgmma instructions; MFLOP of a step: by wgmma in each loop (+ outside of loops) = of the block\n"
    )
    previous = None
    parts = list(PRODUCTS)
    for row in sorted(rows, key=lambda row: (row["head_dim"], parts.index(row["part"]), row["causal"], row["kernel"])):
        if row["head_dim"] != previous:
            print(
                f"{'head_dim ' + str(row['head_dim']):37}| {'step':9} wg  KiB | CTAs  thr | registers        spill st"
            )
        previous = row["head_dim"]
        mask = "causal" if row["causal"] else "full"
        print(f"{row['kernel']:14} {row['part']:7} {mask:6} {row['gate'][:4]:4}   |", end=" ")
        if "failed" in row:
            print("FAILED:", row["failed"])
            continue
        wanted = "/".join(map(str, row["set_registers"]))
        spilled, work = f"{row['spill_stores']}+{row['spill_loads']}", row["block_flops"]
        loops = " ".join(f"{flops / 1e6:.2f}" for flops in row["loop_flops"])
        outside = f" (+{row['outside_flops'] / 1e6:.2f})" if row["outside_flops"] else ""
        equal = "!=" if "wgmma work is not the block's" in row["problems"] else "="
        print(
            f"{row['rows']:4}x{row['keys']:<4} {row['consumers']:2} {row['shared_memory'] / 1024:4.0f} | "
            f"{row['ctas_per_sm']:4} {row['occupancy']:4.0%} | {row['registers']:3} {wanted:7} {spilled:>9} "
            f"{row['stack']:4} | {sum(row['wgmma'].values()):3}: {loops}{outside} {equal} {work / 1e6:.2f}"
            + "".join(f"  <-- {problem}" for problem in row["problems"])
        )


def main() -> None:
    def items(allowed):
        def parse(text: str) -> list[Any]:
            known = {str(x): x for x in allowed}
            if not {*text.split(",")} <= {*known}:
                raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {', '.join(known)}")
            return [known[x] for x in text.split(",")]

        return parse

    kernels = ("gattn", "attention_mgpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=items(kernels), default=kernels)
    parser.add_argument("--parts", type=items(PRODUCTS), default=tuple(PRODUCTS))
    parser.add_argument("--head-dims", type=items(HEAD_DIMS), default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    aot.prepare()
    # Where the compiler is missing, this says so at once.
    aot.h200_devices()

    chosen = [
        program
        for program in programs()
        if program.kernel in arguments.kernels
        and program.part in arguments.parts
        and program.head_dim in arguments.head_dims
    ]
    rows = list(run(chosen, arguments.jobs))
    print_rows(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    bad = [row for row in rows if row["kernel"] == "gattn" and row.get("problems", True)]
    if bad:
        raise SystemExit(f"\n{len(bad)} of our kernels failed, spill, or do not do their block's work: see the marks.")


if __name__ == "__main__":
    main()
