"""What a compiled program costs one device: FLOPs, memory traffic, communication. No jax.

XLA's own cost analysis counts the body of a loop once; here everything is multiplied by the loops' trip counts. Of a
conditional one branch runs: the cheaper one, unless the other is asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gattn.hlo import FREE, Computation, Instruction, Program, Shape, behind, parse, passed, replica_groups

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_SLICES = ("dynamic-slice", "slice", "gather")
KernelFlops = Callable[[Instruction, Computation], float | None]


class Executed(NamedTuple):
    """An instruction that runs, and how often."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool
    """Inside of a fusion: what it reads and writes stays on the chip."""


class Collective(NamedTuple):
    """Communication that a program does."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    """Devices that communicate with each other, by their place in the mesh; pairs for a permutation."""
    bytes: int
    """What one device has of it before or after, whichever is more, once."""
    times: int
    shapes: tuple[Shape, ...]
    """Operands and results."""
    op_name: str

    @property
    def size(self) -> int:
        """Devices of a group."""
        return max(map(len, self.groups), default=1)

    @property
    def sent(self) -> float:
        """Bytes that leave a device each time, by the best algorithm: all but its own part, and twice that if they are
        summed and come back."""
        share = 1.0 if self.kind == "collective-permute" else (self.size - 1) / self.size
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Costs:
    """Of a program, whose custom calls `kernel_flops` prices where XLA does not know them (None: no price)."""

    program: Program
    kernel_flops: KernelFlops = lambda instruction, computation: None

    def executed(self, *, most: bool = False) -> list[Executed]:
        """Every instruction that runs. Of a conditional the cheaper branch by FLOPs, then bytes; `most`: the other."""
        return list(self._walk(self.program.entry, 1, False, most))

    def _walk(self, computation: Computation, times: int, fused: bool, most: bool) -> Iterator[Executed]:
        for instruction in computation.instructions.values():
            yield Executed(instruction, computation, times, fused)
            if instruction.opcode == "while":
                body, condition = (
                    self.program.computations[instruction.attribute(name) or ""] for name in ("body", "condition")
                )
                count = self.program.trip_count(instruction, computation)
                yield from self._walk(condition, times * (count + 1), fused, most)
                yield from self._walk(body, times * count, fused, most)
            elif instruction.opcode == "conditional":
                choice = max if most else min
                branches = self.program.branches(instruction)
                yield from self._walk(choice(branches, key=lambda x: self._weight(x, most)), times, fused, most)
            elif instruction.opcode in ("fusion", "fusion-start"):
                yield from self._walk(self.program.computations[instruction.called[0]], times, True, most)
            elif instruction.opcode in ("call", "async-start", "call-start"):
                yield from self._walk(self.program.computations[instruction.called[0]], times, fused, most)

    def _weight(self, computation: Computation, most: bool) -> tuple[float, float]:
        parts = list(self._walk(computation, 1, False, most))
        return self._flops(parts), self._bytes(parts)

    def flops(self, *, most: bool = False) -> float:
        """Of matrix products alone: dot, convolution (which is how a TPU writes dots), ragged dots, kernels."""
        return self._flops(self.executed(most=most))

    def _flops(self, parts: Iterable[Executed]) -> float:
        return sum(self.instruction_flops(x.instruction, x.computation) * x.times for x in parts)

    def custom_calls(self, *, most: bool = False) -> list[tuple[Executed, float]]:
        """Kernels and other custom calls that run, with their FLOPs each time."""
        parts = (x for x in self.executed(most=most) if x.instruction.opcode == "custom-call")
        return [(x, self.instruction_flops(x.instruction, x.computation)) for x in parts]

    def traffic(self, *, most: bool = False) -> float:
        """Bytes between the chip and its main memory: what every instruction reads and writes, fused ones not.

        Of an array that is sliced or updated in place only the piece counts. A kernel that reads an operand several
        times counts it once: a lower bound.
        """
        return self._bytes(self.executed(most=most))

    def _bytes(self, parts: Iterable[Executed]) -> float:
        return sum(
            instruction_bytes(self.program, x.instruction, x.computation) * x.times for x in parts if not x.fused
        )

    def instruction_flops(self, instruction: Instruction, computation: Computation) -> float:
        """FLOPs of one product, 0 for all else."""
        opcode = instruction.opcode
        if opcode == "dot":
            left = computation.operands(instruction)[0].shapes[0].dims
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
            inner = math.prod(left[int(i)] for i in contracted[1].split(",") if i) if contracted else 1
            return 2.0 * instruction.shapes[0].size * inner
        if opcode == "convolution":
            return _convolution_flops(instruction, *(x.shapes[0].dims for x in computation.operands(instruction)[:2]))
        if opcode == "custom-call":
            given = self.kernel_flops(instruction, computation)
            if given is not None:
                return given
            if (instruction.attribute("custom_call_target") or "").startswith(('"__cublas$', '"__cudnn$gemm')):
                return _gemm_flops(instruction, computation)
            estimate = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.attributes)
            return float(estimate[1]) if estimate else 0.0
        return 0.0

    def collectives(self, *, most: bool = False) -> list[Collective]:
        """All communication, those of one device counted once (start and done are one)."""
        found = []
        for instruction, computation, times, _ in self.executed(most=most):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            operands = [shape for x in computation.operands(instruction) for shape in x.shapes]
            if kind == "ragged-all-to-all":
                size = min(shape.bytes for shape in operands[:2])  # rows sent, and the buffer that they go to
            else:
                results = instruction.shapes
                if instruction.opcode.endswith("-start") and len(results) > len(operands):
                    results = results[len(operands) : 2 * len(operands)]
                size = max(sum(x.bytes for x in operands), sum(x.bytes for x in results))
            if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            if size:
                groups = replica_groups(instruction.attributes)
                shapes = (*operands, *instruction.shapes)
                found.append(Collective(kind, groups, size, times, shapes, instruction.op_name))
        return found

    def stacked(self, trips: int) -> list[tuple[str, list[Shape]]]:
        """Of every loop that runs `trips` times: its op_name, and the arrays that it writes a piece of each time.

        Those are the elements of its state with `trips` as leading dimension that do not come out as they went in.
        """
        found = []
        for part in self.executed():
            loop, computation = part.instruction, part.computation
            if loop.opcode != "while" or self.program.trip_count(loop, computation) != trips:
                continue
            body = self.program.computations[loop.attribute("body") or ""]
            shapes = []
            for index, (shape, name) in enumerate(zip(loop.shapes, body.root.operands, strict=False)):
                value = passed(body, name)
                same = value.opcode == "get-tuple-element" and value.attribute("index") == str(index)
                if not same and shape.dims[:1] == (trips,):
                    shapes.append(shape)
            found.append((loop.op_name, shapes))
        return found


def read_costs(text: str, kernel_flops: KernelFlops | None = None) -> Costs:
    """The costs of the program `compiled.as_text()`. ValueError if it is none."""
    return Costs(parse(text), *((kernel_flops,) if kernel_flops else ()))


# ---- memory traffic ------------------------------------------------------------------------------------------------


def instruction_bytes(program: Program, instruction: Instruction, computation: Computation) -> int:
    """Bytes of main memory that one instruction reads and writes."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")) or opcode in ("async-start", "call-start"):
        return 0
    read = [sum(map(_main, x.shapes)) for x in computation.operands(instruction)]
    written = sum(map(_main, instruction.shapes))
    if opcode == "copy-start":  # (to, from, context)
        return sum(map(_main, instruction.shapes[:2]))
    if opcode.startswith("ragged-all-to-all"):
        return 2 * min(read[:2])  # rows are read, and written into a buffer that is there
    if opcode.endswith("-start"):
        return sum(read) + max(written - sum(read), 0)  # its result names its operands again
    if opcode in _SLICES:
        return 2 * written + sum(read[1:])
    if opcode == "dynamic-update-slice":
        return 2 * read[1]
    if opcode == "scatter":
        return 2 * sum(read[-(len(read) // 2) :]) + sum(read[len(instruction.shapes) :][:1])
    if opcode == "fusion":
        return _fusion_bytes(program, instruction, read)
    return sum(read) + written


def _fusion_bytes(program: Program, fusion: Instruction, read: list[int]) -> int:
    inner = program.computations[fusion.called[0]]
    total = 0
    for number, size in enumerate(read):
        parameter = inner.parameters.get(number)
        pieces = None if parameter is None else _pieces(inner, parameter)
        total += size if pieces is None else min(size, pieces)
    root = inner.root
    results = [passed(inner, name) for name in root.operands] if root.opcode == "tuple" else [behind(inner, root)]
    for shape, result in itertools.zip_longest(fusion.shapes, results):
        if shape is None or not _main(shape):
            continue
        update = inner.operands(result)[1:2] if result is not None else []
        in_place = result is not None and result.opcode == "dynamic-update-slice" and update
        total += update[0].bytes if in_place else shape.bytes
    return total


def _main(shape: Shape) -> int:
    return shape.bytes if shape.memory == 0 else 0


def _pieces(computation: Computation, parameter: Instruction) -> int | None:
    """Bytes that are read of a parameter of a fusion of which only pieces are; None where all of it is."""
    total = 0
    for user in computation.users[parameter.name]:
        if user.opcode == "bitcast":
            inner = _pieces(computation, user)
            if inner is None:
                return None
            total += inner
        elif user.opcode in _SLICES and user.operands[0] == parameter.name:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue  # updated in place
        else:
            return None
    return total


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


@functools.cache
def _window_positions(size: int, window: int, out: int, stride: int, low: int, dilation: int, spread: int) -> int:
    """Pairs of a place in the output and one in the window that meet an input element, along one dimension."""
    reached = (size - 1) * spread + 1
    at = np.arange(out)[:, None] * stride - low + np.arange(window) * dilation
    return int(((at >= 0) & (at < reached) & (at % spread == 0)).sum())


def _convolution_flops(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """2 x batch x output features x input features of a group x pairs of window and output places without padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = int(instruction.attribute("batch_group_count") or 1)
    lhs, rhs, out = labels.groups()
    total = 2.0 * left[lhs.index("b")] / groups * right[rhs.index("o")] * right[rhs.index("i")]
    spatial = [x for x in lhs if x.isdigit()]
    for axis in sorted(spatial):
        number = int(axis)

        def entry(name: str, default: str, number: int = number) -> str:
            return given[name].split("x")[number] if name in given else default

        total *= _window_positions(
            left[lhs.index(axis)],
            int(entry("size", "1")),
            instruction.shapes[0].dims[out.index(axis)],
            int(entry("stride", "1")),
            int(entry("pad", "0_0").split("_")[0]),
            int(entry("rhs_dilate", "1")),
            int(entry("lhs_dilate", "1")),
        )
    return total


def _gemm_flops(instruction: Instruction, computation: Computation) -> float:
    """Of cuBLAS' matrix product; its dimension numbers stand in the call's config."""
    dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    if dims is None:
        return 0.0
    left = computation.operands(instruction)[0].shapes[0].dims
    inner = math.prod(left[int(i.strip('"'))] for i in dims[1].split(",") if i)
    return 2.0 * instruction.shapes[0].size * inner
