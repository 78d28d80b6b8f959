"""Reads a compiled program, XLA's optimised HLO as text: its computations, loops and arrays. No jax."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_NAME = re.compile(r"%([^\s,(){}]+)")
_INTEGER = re.compile(r"-?\d+")

# Move nothing by themselves.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "domain", "while", "conditional", "call", "add-dependency"),
}


class Shape(NamedTuple):
    """One array's type."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0
    """Memory space: 0 is the device's main memory (HBM); others are on the chip."""

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.size * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def _bits(dtype: str) -> int:
    found = re.match(r"[a-z]+(\d+)", dtype)
    return _BITS.get(dtype, int(found[1]) if found else 0)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """Of the result; several where it is a tuple."""
    operands: tuple[str, ...]
    attributes: str
    argument: str
    """What stands between the parentheses: a parameter's number, a constant's value."""
    root: bool

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """A computation, a number or a name after `name=`."""
        found = re.search(rf"\b{name}=%?([^\s,}}]+)", self.attributes)
        return found[1] if found else None

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs as a part of the program (not the operation of a reduction)."""
        names = [self.attribute(name) for name in ("calls", "to_apply", "called_computation")]
        return tuple(name for name in names if name)


@dataclass(eq=False)
class Computation:
    """A function of the program; instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(x for x in reversed(self.instructions.values()) if x.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.argument): x for x in self.instructions.values() if x.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        users = defaultdict(list)
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users[name].append(instruction)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclass
class Program:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: Computation
    unknown_loops: set[str] = field(default_factory=set)
    """Loops whose trip count could not be told: counted once."""

    def branches(self, conditional: Instruction) -> list[Computation]:
        """The computations of which a conditional runs one."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
        if listed:
            names = _NAME.findall(listed[1])
        else:
            names = [conditional.attribute(f"{which}_computation") or "" for which in ("true", "false")]
        return [self.computations[name] for name in names]

    def trip_count(self, loop: Instruction, computation: Computation) -> int:
        """How often a loop's body runs: as XLA says, or from a condition `counter < constant` and the start."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations[loop.attribute("condition") or ""]
        compare = condition.root
        sides = [passed(condition, name) for name in compare.operands]
        if compare.opcode == "fusion":  # the comparison alone
            inner = self.computations[compare.called[0]]
            numbers = [passed(inner, name) for name in inner.root.operands]
            if inner.root.opcode == "compare" and all(x.opcode == "parameter" for x in numbers):
                sides, compare = [sides[int(x.argument)] for x in numbers], inner.root
        limits = [int(x.argument) for x in sides if x.opcode == "constant" and _INTEGER.fullmatch(x.argument)]
        counters = [x for x in sides if x.opcode == "get-tuple-element"]
        if compare.opcode == "compare" and len(limits) == len(counters) == 1:
            index = int(counters[0].attribute("index") or 0)
            start = self._start(loop, computation, index)
            if start is not None:
                return max(limits[0] - start, 0)
        self.unknown_loops.add(loop.name)
        return 1

    def _start(self, loop: Instruction, computation: Computation, index: int) -> int | None:
        """The constant with which a loop's counter starts."""
        start = passed(computation, loop.operands[0])
        if start.opcode != "tuple":
            return None
        value = passed(computation, start.operands[index])
        return int(value.argument) if value.opcode == "constant" and _INTEGER.fullmatch(value.argument) else None

    def arrays(self) -> Iterator[tuple[Shape, Instruction]]:
        """Every array that any instruction makes, fused or not, whichever branch it is in."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for shape in instruction.shapes:
                    yield shape, instruction

    def arrays_of(self, *dims: int) -> list[Instruction]:
        """Instructions with a result of these dimensions in any order, dimensions of length 1 aside."""
        wanted = sorted(n for n in dims if n != 1)
        return [made for shape, made in self.arrays() if sorted(n for n in shape.dims if n != 1) == wanted]

    def largest(self, count: int = 8) -> list[tuple[Shape, str]]:
        """The largest arrays in main memory and where they come from, each shape and origin once."""
        fused = {name for x in self._all() if x.opcode == "fusion" for name in x.called}
        sizes: dict[tuple[Shape, str], None] = {}
        for computation in self.computations.values():
            if computation.name in fused:
                continue
            for instruction in computation.instructions.values():
                if instruction.opcode in FREE - {"constant"} or instruction.opcode.endswith("-done"):
                    continue
                for shape in instruction.shapes:
                    if shape.memory == 0:
                        sizes[shape, instruction.op_name or instruction.name] = None
        return sorted(sizes, key=lambda x: -x[0].bytes)[:count]

    def _all(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()


def passed(computation: Computation, name: str) -> Instruction:
    """The instruction that makes a value, behind what passes it on unchanged."""
    return behind(computation, computation.instructions[name])


def behind(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("bitcast", "copy", "copy-done", "copy-start", "convert") and instruction.operands:
        if instruction.opcode == "convert" and instruction.shapes[0].dims:
            break
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


# ---- replica groups ------------------------------------------------------------------------------------------------


@functools.lru_cache(4096)
def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    if text.startswith("{"):
        parts = re.findall(r"\{([\d,]+)\}", text)
        return tuple(tuple(map(int, part.split(","))) for part in parts)
    if text.startswith("mesh["):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", text))
        sizes = {name: int(size) for name, size in axes.items()}
        over = re.findall(r"'([^']+)'", text.rpartition("{")[2])
        devices = np.arange(math.prod(sizes.values()))
        given = re.search(r"device_ids=\(?\[?([\d,]+)", text)
        if given:
            devices = np.array(list(map(int, given[1].split(","))))
        grid = devices.reshape(tuple(sizes.values()))
        order = [i for i, name in enumerate(sizes) if name not in over] + [list(sizes).index(name) for name in over]
        rows = grid.transpose(order).reshape(-1, math.prod(sizes[name] for name in over))
        return tuple(tuple(map(int, row)) for row in rows)
    found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"replica groups {text!r} are in a format that is not known here")
    shape, reshaped = ([*map(int, part.split(","))] for part in found.groups()[:2])
    grid = np.arange(math.prod(reshaped)).reshape(reshaped)
    if found[3]:
        grid = grid.transpose([*map(int, found[3].split(","))])
    return tuple(tuple(map(int, row)) for row in grid.reshape(shape))


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that communicate, in any of HLO's notations; the pairs of a permutation. Empty: all."""
    found = re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes)
    found = found or re.search(
        r"replica_groups=(\{\{.*?\}\}|mesh\[[^\]]*\][^{]*\{[^}]*\}|\[[^\s]*\](?:T\([\d,]+\))?)", attributes
    )
    return _groups(found[1]) if found else ()


def axes(groups: Iterable[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh (name -> size, outermost first) along which the members of these groups differ."""
    sizes, differing = list(mesh.values()), set()
    for group in itertools.islice(groups, 64):
        places = np.array(np.unravel_index(np.array(group), sizes))
        differing |= {name for name, row in zip(mesh, places, strict=True) if (row != row[0]).any()}
    return tuple(name for name in mesh if name in differing)


# ---- text ----------------------------------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """The program of `compiled.as_text()`.

    Raises:
      ValueError: it holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if current is not None and line.startswith("}"):
            current = None
        elif current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[1]] = Computation(header[1])
                entry = current if line.startswith("ENTRY") else entry
        else:
            instruction = _instruction(line)
            if instruction is not None:
                for name in instruction.operands:
                    _add_element(current, name)
                current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Program(computations, entry)


def _add_element(computation: Computation, name: str) -> None:
    """Dumps write `%state#1` for an element of a tuple, without an instruction that takes it."""
    of, _, index = name.rpartition("#")
    if of in computation.instructions and name not in computation.instructions:
        shapes = computation.instructions[of].shapes[int(index) : int(index) + 1]
        element = Instruction(name, "get-tuple-element", shapes, (of,), f"index={index}", "", False)
        computation.instructions[name] = element


def _instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    at = start.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    shapes = tuple(_shape(*found.groups()) for found in _SHAPE.finditer(line, at, end))
    opening = line.index("(", end)
    closing = _closing(line, opening)
    argument = line[opening + 1 : closing]
    opcode = line[end:opening].strip()
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(argument))
    return Instruction(start[2], opcode, shapes, operands, line[closing + 1 :], argument, bool(start[1]))


def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    memory = re.search(r"S\((\d+)\)", layout or "")
    sizes = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
    return Shape(dtype, sizes, int(memory[1]) if memory else 0)


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes; those in quotes do not count."""
    depth = 0
    for found in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, at):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in {text[at : at + 80]!r}")
