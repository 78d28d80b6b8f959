"""`python -m gattn compile`: what a train step needs and takes on a machine that is not there.

Nothing is measured. Memory is the compiler's; FLOPs, memory traffic and communication are read from the optimised
program (`gattn.hlo_cost`), and times are a roofline (`gattn.roofline`).
"""

import dataclasses
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from gattn import aot, hlo, model
from gattn.config import Config, ConfigError
from gattn.hlo_cost import Costs, KernelFlops, read_costs
from gattn.kernels.api import KERNEL_FROM
from gattn.metrics import PEAK_FLOPS
from gattn.roofline import CHIPS, GIB, Chip, Traffic, network

# Products of T x S x H over a head that our attention kernels do, by their names.
_ATTENTION = {
    "gattn_forward": 2,
    "gattn_preprocess": 0,
    "gattn_backward_dq_dkv": 5,
    "gattn_backward_dq": 3,
    "gattn_backward_dkv": 4,
    "gated_attention_forward": 2,
    "gated_attention_query_gradient": 3,
    "gated_attention_key_value_gradient": 4,
    "gated_attention_key_gradient": 3,
    "gated_attention_value_gradient": 2,
}
_GROUPED = re.compile(r"ragged[-_]dot|grouped_(rows|matrices)")


@dataclass(frozen=True)
class Report:
    """What a train step needs and takes, per device and step. Bytes, FLOPs and seconds."""

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    batch: tuple[int, int]
    """Sequences and their length."""
    accumulation: int
    remat: str
    fits: bool
    memory: dict[str, int]
    """By kind; `needed` and `limit` are the whole."""
    largest: list[tuple[str, int, str]]
    """The largest arrays: shape, bytes, where it comes from."""
    model_flops: float
    """6 x parameters x tokens and causal attention (`gattn.model.flops_per_token`): what MFU counts."""
    compiled_flops: float
    """Of all matrix products that run, rows of experts by a balanced load."""
    full_buffer_flops: float
    """The same with every row of the experts' buffers in use, and the costlier branch of each conditional."""
    hbm_bytes: float
    collectives: list[Traffic]
    seconds: dict[str, float]
    """`compute`, `hbm`, `network` by themselves; `overlapped`: the longest of them; `exposed`: the longer of compute
    and HBM, and then all communication; `serial`: their sum."""
    mfu: dict[str, float]
    """Model FLOPs over peak, for the last three."""
    compile_seconds: float
    """By the clock; `compile_cpu_seconds` of all cores."""
    compile_cpu_seconds: float
    notes: list[str]

    @property
    def recompute(self) -> float:
        """Compiled over model FLOPs."""
        return self.compiled_flops / self.model_flops


def compile_report(config: Config, topology: str) -> Report:
    """Compiles the train step of `config` for a machine, and reads the program.

    Raises:
      ConfigError: the mesh does not divide something, or attention is one that cannot be compiled here.
      RuntimeError: the machine's compiler is not installed.
      ValueError: there is no such machine.
    """
    _check_attention(config, topology)
    return read(aot.compile_step(config, topology), config, topology)


def read(compiled: aot.Compiled, config: Config, topology: str) -> Report:
    """The report of a compiled train step."""
    mesh, kind = compiled.mesh, compiled.mesh.devices.flat[0].device_kind
    chip, shape = CHIPS[kind], dict(compiled.mesh.shape)
    fill = 1 / config.model.buffer_factor if shape["expert"] > 1 else 1.0
    costs = read_costs(compiled.text, kernel_flops(fill))
    full = dataclasses.replace(costs, kernel_flops=kernel_flops(1.0))
    traffic = network(costs.collectives(), mesh, chip)
    memory = _memory(compiled, costs, config, chip)
    tokens = config.data.batch_size * config.data.seq_len / mesh.size
    flops, work = costs.flops(), model.flops_per_token(config.model, config.data.seq_len) * tokens
    hbm_bytes, peak = costs.traffic(), PEAK_FLOPS[kind]
    seconds = _seconds(flops / peak, hbm_bytes / chip.hbm, sum(x.seconds for x in traffic))
    return Report(
        topology=topology,
        device_kind=kind,
        devices=mesh.size,
        mesh={axis: size for axis, size in shape.items() if size > 1},
        batch=(config.data.batch_size, config.data.seq_len),
        accumulation=config.train.accumulation,
        remat=config.model.remat,
        fits=not compiled.problem and memory["needed"] <= memory["limit"],
        memory=memory,
        largest=[(str(array), array.bytes, origin) for array, origin in costs.program.largest()],
        model_flops=work,
        compiled_flops=flops,
        full_buffer_flops=full.flops(most=True),
        hbm_bytes=hbm_bytes,
        collectives=traffic,
        seconds=seconds,
        mfu={name: work / peak / seconds[name] for name in ("overlapped", "exposed", "serial")},
        compile_seconds=compiled.seconds,
        compile_cpu_seconds=compiled.cpu_seconds,
        notes=_notes(config, costs.program, shape),
    )


def _check_attention(config: Config, topology: str) -> None:
    asked = config.model.attention
    if topology.startswith("h200") and asked in ("auto", "cudnn") and config.data.seq_len >= KERNEL_FROM:
        remedy = "takes cuDNN on an H200, which cannot be compiled without the card: --model.attention gpu"
        raise ConfigError("model.attention", asked, remedy)


def _seconds(compute: float, hbm: float, communication: float) -> dict[str, float]:
    parts = {"compute": compute, "hbm": hbm, "network": communication}
    together = {"overlapped": max(parts.values()), "exposed": max(compute, hbm) + communication}
    return parts | together | {"serial": sum(parts.values())}


def _notes(config: Config, program: hlo.Program, shape: dict[str, int]) -> list[str]:
    notes = ["attention is counted as causal over whole sequences: document borders would save some of it"]
    if shape["context"] > 1:
        notes.append("attention is that of the device with the last part of the sequences, which sees most keys")
    if shape["expert"] > 1:
        notes.append("experts are counted with a balanced load; overflow takes another branch (see full buffers)")
    if program.unknown_loops:
        notes.append(f"counted once, for want of a trip count: {', '.join(sorted(program.unknown_loops))}")
    return notes


# ---- kernels -----------------------------------------------------------------------------------------------------


def kernel_flops(fill: float) -> KernelFlops:
    """Prices our kernels and XLA's ragged products; `fill` is the share of an expert buffer's rows that are in use."""

    def price(instruction: hlo.Instruction, computation: hlo.Computation) -> float | None:
        name = f"{instruction.op_name}/{instruction.name}"
        given = (shape for x in computation.operands(instruction) for shape in x.shapes[:1])
        arrays = [shape.dims for shape in given if shape.dtype[0] in "bf"]  # no tables of integers
        for kernel, products in _ATTENTION.items():
            if re.search(rf"\b{kernel}\b", instruction.op_name):
                return products * _attention_flops([dims for dims in arrays if len(dims) == 4], kernel)
        if _GROUPED.search(name) and instruction.opcode == "custom-call":
            matrices = [dims for dims in arrays if len(dims) == 2]
            result = instruction.shapes[0].dims
            if not matrices:
                return None
            rows, width = matrices[0]
            return 2.0 * rows * fill * (width * result[1] if len(result) == 2 else math.prod(result[1:]))
        return None

    return price


def _attention_flops(arrays: list[tuple[int, ...]], kernel: str) -> float:
    """One product over the pairs that causality leaves to the last rows of the keys' sequence: 2 B N H pairs."""
    (batch, a, b, width), key = arrays[:2]
    heads, rows, keys = (a, b, key[2]) if kernel.startswith("gattn") else (b, a, key[1])
    return 2.0 * batch * heads * width * rows * (keys - (rows - 1) / 2)


# ---- memory ------------------------------------------------------------------------------------------------------


def _memory(compiled: aot.Compiled, costs: Costs, config: Config, chip: Chip) -> dict[str, int]:
    state, stats = compiled.state, compiled.memory
    kinds = {
        "parameters": _bytes_on_one(state.params),
        "optimizer": _bytes_on_one(state.optimizer),
        "average": _bytes_on_one(state.average),
        "batch": _bytes_on_one(compiled.batch),
    }
    kinds = {name: size for name, size in kinds.items() if size or name != "average"}
    saved = max((sum(x.bytes for x in shapes) for shapes in _saved(costs, config)), default=0)
    if stats is None:
        needed = _gibibytes(compiled.problem) + sum(kinds.values())
        return kinds | {"activations": saved, "needed": needed, "limit": chip.memory}
    arguments = stats.argument_size_in_bytes
    kinds["padding"] = max(arguments - sum(kinds.values()), 0)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    saved = min(saved, stats.temp_size_in_bytes)
    kinds |= {"activations": saved, "temporaries": stats.temp_size_in_bytes - saved}
    kinds |= {"outputs": max(outputs, 0), "code": stats.generated_code_size_in_bytes}
    return kinds | {"needed": sum(kinds.values()), "limit": chip.memory}


def _saved(costs: Costs, config: Config) -> list[list[hlo.Shape]]:
    """What the layers' forward loop writes for backward, in each loop that may be it."""
    if not config.model.scan_layers:
        return []
    loops = costs.stacked(config.model.num_layers)
    return [shapes for origin, shapes in loops if "transpose" not in origin and "jvp" in origin]


def _gibibytes(problem: str) -> int:
    """What the compiler's message says is required."""
    found = re.search(r"required[^()]*\(([\d.]+)([KMGT])\)", problem)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]]) if found else 0


def _bytes_on_one(tree: Any) -> int:
    """Bytes of one device's part of laid-out arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


# ---- the command -------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The report as text."""
    r, memory = report, dict(report.memory)
    needed, limit = memory.pop("needed"), memory.pop("limit")
    tokens = r.batch[0] * r.batch[1]
    mesh = ",".join(f"{axis}={size}" for axis, size in r.mesh.items()) or "one device"
    lines = [
        f"{r.topology}: {r.devices} x {r.device_kind}, mesh {mesh}",
        f"batch                 {r.batch[0]:,} x {r.batch[1]:,} = {tokens:,} tokens, accumulated over "
        f"{r.accumulation}, remat {r.remat}",
        f"compile time          {r.compile_seconds:.0f} s ({r.compile_cpu_seconds:.0f} s of CPU)",
        "",
        f"memory, each device   {needed / GIB:.2f} GiB of {limit / GIB:.2f} GiB",
        *(f"  {name:19} {size / GIB:.2f} GiB" for name, size in memory.items()),
        "",
        f"model FLOPs           {r.model_flops:.3e} a device and step",
        f"compiled FLOPs        {r.compiled_flops:.3e}, recompute factor {r.recompute:.2f}"
        f" (full buffers and costlier branches: {r.full_buffer_flops / r.model_flops:.2f})",
        f"memory traffic        {r.hbm_bytes / GIB:,.0f} GiB",
        "collectives           GiB on a device, over its group; ms",
    ]
    for x in r.collectives:
        if x.bytes >= 2**20 or x.seconds >= 1e-4:
            over = f"{'+'.join(x.axes)} ({x.size})"
            took = f"{x.calls:,} calls, {1e3 * x.seconds:.1f} ms"
            lines.append(f"  {x.kind:19} {x.bytes / GIB:8.3f} over {over}, {took}")
    s, m = r.seconds, r.mfu
    lines += [
        "",
        f"roofline              compute {s['compute']:.3f} s, HBM {s['hbm']:.3f} s, network {s['network']:.3f} s",
        f"MFU, headline         {m['exposed']:.1%} at {s['exposed']:.3f} s a step: compute and HBM overlap, "
        "communication does not",
        f"  all overlap         {m['overlapped']:.1%} at {s['overlapped']:.3f} s",
        f"  nothing overlaps    {m['serial']:.1%} at {s['serial']:.3f} s",
        f"  tokens a second     {tokens / s['exposed']:,.0f} (headline)",
        *(f"note: {note}" for note in r.notes),
    ]
    return "\n".join(lines)


def failure(report: Report, config: Config) -> str:
    """What to say of a step that does not fit: how much is missing, what is large, what to change."""
    needed, limit = report.memory["needed"], report.memory["limit"]
    kinds = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in report.memory.items() if name not in ("needed", "limit")
    )
    lines = [f"out of memory: a step needs {needed / GIB:.1f} GiB of a device's {limit / GIB:.1f} GiB ({kinds})"]
    lines += [f"  {size / GIB:6.2f} GiB  {shape}  {origin}" for shape, size, origin in report.largest]
    states = sum(report.memory.get(name, 0) for name in ("parameters", "optimizer", "average"))
    parts = math.prod(report.mesh.get(axis, 1) for axis in ("dcn_data", "data", "fsdp", "expert"))
    rows = config.data.batch_size // config.train.accumulation // parts
    advice = []
    if rows > 1:
        advice.append(
            f"--train.accumulation {2 * config.train.accumulation} (now {rows} sequences at a time on a device)"
        )
    if config.model.remat != "full":
        advice.append(f"--model.remat full (now {config.model.remat})")
    if states > 0.3 * limit:
        advice.append("more fsdp, or more devices: the state alone takes that much")
    if rows <= 1 or config.data.seq_len > 8192:
        advice.append("more context: it cuts sequences")
    if config.model.num_experts and config.model.buffer_factor > 1:
        advice.append(f"a smaller --model.buffer-factor (now {config.model.buffer_factor:g})")
    return "\n".join((*lines, "what helps: " + "; ".join(advice)))


def command(config: Config, argv: list[str]) -> int:
    """`python -m gattn compile` of a chosen config, of which `argv` may override fields; returns the exit code: 1 where
    the step does not fit or the compiler is missing."""
    import tyro

    @dataclass(frozen=True)
    class Compile:
        """Compiles a train step for a machine that is not there: memory, FLOPs, collectives, time by a roofline."""

        config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
        topology: Annotated[str, tyro.conf.arg(help="v5e, v5p or v6e with a torus, as v5p:8x8x8; or h200:64")]
        preset: Annotated[str, tyro.conf.arg(help="As for train")] = "tiny"
        config_file: Annotated[str, tyro.conf.arg(name="config", help="A config.json, instead of a preset")] = ""
        gate: Annotated[str, tyro.conf.arg(help="As for train")] = "baseline"
        mesh: Annotated[str, tyro.conf.arg(help="All axes of the mesh at once: fsdp=64,expert=8")] = ""
        json: Annotated[str, tyro.conf.arg(help="Also write the report into this file")] = ""
        hlo: Annotated[str, tyro.conf.arg(help="Also write the compiled program into this file")] = ""

    given = tyro.cli(Compile, default=Compile(config, "v5p"), args=argv, prog="python -m gattn compile")
    aot.prepare()
    config = given.config
    _check_attention(config, given.topology)
    try:
        compiled = aot.compile_step(config, given.topology)
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if given.hlo:
        Path(given.hlo).write_text(compiled.text, encoding="utf-8")
    report = read(compiled, config, given.topology)
    if given.json:
        Path(given.json).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
    if not report.fits:
        print(failure(report, config), file=sys.stderr)
        return 1
    print(render(report))
    return 0
