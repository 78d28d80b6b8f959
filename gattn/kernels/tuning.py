"""What a kernel traced now is for, and its block sizes: measured ones, by device kind, dtype, head_dim and length.

The table is `blocks.json` beside this file, written by `python -m benchmarks.tune` on the device itself.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLE = Path(__file__).with_name("blocks.json")

# `with interpreting(True):` runs the Pallas kernels in Pallas' interpreters, on any machine; instead of True, the
# parameters of one (`pltpu.InterpretParams(...)`). It is a part of every jit's cache key.
interpreting = jax.make_user_context(False)


class Row(NamedTuple):
    """One measurement of the table: the fastest blocks that `benchmarks.tune` found."""

    kernel: str
    """Module and pass: "tpu.forward", "gpu.backward", ..."""
    device_kind: str
    """As `jax.Device.device_kind` spells it."""
    dtype: str
    head_dim: int
    length: int
    """Of queries and keys."""
    blocks: tuple
    """The fields of the module's own `Blocks`, tuples in tuples."""
    microseconds: float
    date: str


def blocks(kernel: str, dtype: Any, head_dim: int, length: int, device_kind: str | None = None) -> tuple | None:
    """The blocks of `kernel` ("tpu.forward", ...) in the row of the nearest length, in ratio; None without a row.

    Device kind, dtype and head_dim have to be those of a row. The kind is that of the mesh in context, whose devices
    need not be here, else of the first device.
    """
    wanted = kernel, device_kind or kind(), np.dtype(dtype).name, head_dim
    rows = [row for row in read(TABLE) if row[:4] == wanted]
    return min(rows, key=lambda row: abs(math.log(row.length / length))).blocks if rows else None


def kind() -> str:
    """The kind of the device that a kernel traced now is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind


def platform() -> str:
    """That of the mesh in context, whose devices need not be here, else of the default device: "tpu", "gpu", "cpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    platform = getattr(device, "platform", device)
    return "gpu" if platform == "cuda" else platform


@cache
def read(path: Path) -> tuple[Row, ...]:
    """The rows of a table; none if there is no such file."""
    if not path.exists():
        return ()
    rows = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Row(**row | {"blocks": _tuples(row["blocks"])}) for row in rows)


def write(rows: Iterable[Row], path: Path) -> None:
    """Adds rows to a table, each in place of one of the same kernel, device kind, dtype, head_dim and length."""
    newest = {row[:5]: row for row in (*read(path), *rows)}
    lines = ",\n".join("  " + json.dumps(newest[key]._asdict()) for key in sorted(newest))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    read.cache_clear()


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
