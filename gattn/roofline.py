"""How long a machine takes at least: work over the peak rate of what does it. Chips, and their networks.

Matrix units at their peak, main memory and links at full rate. Reality is slower.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gattn import hlo

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from gattn.hlo_cost import Collective

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device; rates in bytes per second and direction. FLOP/s are those of `gattn.metrics.PEAK_FLOPS`."""

    memory: int
    """Bytes that a program may use."""
    hbm: float
    link: float
    """Of one link to a neighbour in the torus (TPU), or to all GPUs of the host together (NVLink)."""
    torus: int
    """Dimensions of the torus, 0 for GPUs."""
    wraps_from: int
    """Length from which on, in its multiples, a dimension of the torus is closed to a ring."""
    host: float = 0.0
    """Of a GPU's own network card, to other hosts."""


# TPU: cloud.google.com/tpu/docs/v5e, v5p, v6e: HBM bandwidth, interconnect per chip in both directions (400, 1200 and
# 800 GB/s over 4, 6 and 4 links); the memory is what the compiler says is available. H200: NVIDIA's data sheet (141 GB,
# 4.8 TB/s, NVLink 900 GB/s in both directions) and DGX H200's eight 400 Gb/s cards; of its memory 0.9, which takes
# XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.
CHIPS = {
    "TPU v5 lite": Chip(int(15.75 * GIB), 819e9, 50e9, 2, 16),
    "TPU v5": Chip(int(95.73 * GIB), 2765e9, 100e9, 3, 4),
    "TPU v6 lite": Chip(int(31.24 * GIB), 1640e9, 100e9, 2, 16),
    "NVIDIA H200": Chip(int(0.9 * 151_397_597_184), 4800e9, 450e9, 0, 0, 50e9),
}


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over the same axes, per device and step."""

    kind: str
    axes: tuple[str, ...]
    size: int
    """Devices of a group."""
    calls: int
    bytes: float
    """What a device has of them before or after, whichever is more."""
    seconds: float


def network(collectives: list[Collective], mesh: Mesh, chip: Chip) -> list[Traffic]:
    """Communication by kind and axes, the slowest first."""
    devices, shape = list(mesh.devices.flat), dict(mesh.shape)
    seconds = _torus_seconds if chip.torus else _gpu_seconds
    found: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one in collectives:
        groups = one.groups or (tuple(range(mesh.size)),)
        if max(map(len, groups)) == 1:
            continue
        total = found[one.kind, hlo.axes(groups, shape), max(map(len, groups))]
        total[0] += one.times
        total[1] += one.bytes * one.times
        total[2] += seconds(one, groups, devices, chip) * one.times
    rows = [
        Traffic(kind, over, members, int(calls), size, took)
        for (kind, over, members), (calls, size, took) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


class _Ring(NamedTuple):
    """A group of devices along one dimension of the torus."""

    length: int
    """Its members."""
    stride: int
    """Neighbours in the group are this far apart, and share links with the groups between them."""
    closed: bool


def _torus_seconds(one: Collective, groups: Any, devices: list[jax.Device], chip: Chip) -> float:
    """All links that the group's dimensions have, both directions of a closed ring, carry at once.

    A ring of n: gathering or scattering V bytes takes V (n-1)/n over 2 links; all-to-all of p bytes a device p n/8 over
    one, since a byte travels n/4 steps on average and 2 links leave each device. Open ends halve both.
    """
    rings = _rings(groups[0], devices, chip)
    if one.kind == "collective-permute" or not rings:
        return one.sent / chip.link
    if one.kind.endswith("all-to-all"):
        return max(one.bytes * r.length * r.stride / ((8 if r.closed else 4) * chip.link) for r in rings)
    links = sum((2 if ring.closed else 1) / ring.stride for ring in rings)
    return one.sent / (links * chip.link)


def _rings(group: tuple[int, ...], devices: list[jax.Device], chip: Chip) -> list[_Ring]:
    every = np.array([device.coords[: chip.torus] for device in devices])
    places = np.array([devices[i].coords[: chip.torus] for i in group])
    rings = []
    for dimension in range(chip.torus):
        used, whole = np.unique(places[:, dimension]), every[:, dimension].max() + 1
        if len(used) > 1:
            stride = int(np.diff(used).min())
            closed = len(used) * stride == whole and whole % chip.wraps_from == 0
            rings.append(_Ring(len(used), stride, bool(closed)))
    return rings


def _gpu_seconds(one: Collective, groups: Any, devices: list[jax.Device], chip: Chip) -> float:
    """NVLink within a host and the cards between hosts work at the same time, and the slower one counts."""
    hosts = [[devices[i].process_index for i in group] for group in groups]
    if one.kind == "collective-permute":
        return one.sent / (chip.host if any(len(set(pair)) > 1 for pair in hosts) else chip.link)
    size, there = len(hosts[0]), len(set(hosts[0]))
    here = size // there
    if one.kind.endswith("all-to-all"):
        inside, outside = one.bytes * (here - 1) / size, one.bytes * (size - here) / size
        return max(inside / chip.link, outside / chip.host)
    twice = 2 if one.kind == "all-reduce" else 1
    inside = one.bytes * (size - 1) / size if here > 1 else 0.0
    outside = one.bytes * (there - 1) / there / here
    return twice * max(inside / chip.link, outside / chip.host)
