"""Attention over the mesh in context: what one device holds of batch, query rows and heads is attention by itself.

XLA cannot split a device kernel, so the kernels run inside `shard_map`; gate and sinks go with the heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from gattn.kernels.masks import Mask
from gattn.kernels.reference import Inputs, Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float


def layout(query: Float[Array, "B T N H"], asked: PartitionSpec | None) -> PartitionSpec | None:
    """How query is laid out over the mesh in context: as asked, else as its type says (explicit axes).

    None if no axis of the mesh is left to be split over, or if nothing says how.

    Raises:
      ValueError: `asked` names axes that are not there, or splits head_dim.
    """
    free = free_axes()
    if asked is None:
        return jax.typeof(query).sharding.spec if AxisType.Explicit in free.values() else None
    spec = PartitionSpec(*asked, *(None,) * (4 - len(asked)))
    if len(spec) != 4 or spec[3] is not None:
        raise ValueError(f"sharding={asked} must be that of query's [B, T, N, H], with head_dim whole.")
    if not {name for entry in spec for name in _names(entry)} <= free.keys():
        raise ValueError(
            f"sharding={asked} names axes that are not there: the mesh in context (jax.set_mesh) has {tuple(free)} to "
            "split over. Inside of shard_map arrays are a device's own, and sharding is None."
        )
    return spec


def free_axes() -> dict[str, AxisType]:
    """Axes of the mesh in context over which arrays are still global: all but those of a surrounding shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: kind for name, kind in kinds if kind != AxisType.Manual}


def attend(
    attention: Callable[..., tuple[Array, Array]],
    spec: PartitionSpec,
    inputs: Inputs,
    mask: Mask,
    lengths: tuple[Array | None, Array | None],
    options: Options,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`attention(inputs, mask, lengths, options)` of every device's part of query, laid out as `spec`.

    Every device gets the keys and values of its heads in full length. Where there are fewer kv heads than parts,
    several parts hold the same one.

    Raises:
      ValueError: sequences, rows or heads are no multiple of the parts.
    """
    batch, rows, heads, _ = spec
    for what, size, entry in zip(("sequences", "rows", "heads"), inputs.query.shape, spec, strict=False):
        if size % _parts(entry):
            raise ValueError(f"query has {size} {what}, must be a multiple of the {_parts(entry)} parts of {entry!r}.")
    inputs = _spread_kv_heads(inputs, batch, heads)
    if rows is not None:
        mask = jax.tree.map(jnp.asarray, mask)
    # What is known when tracing stays known: it goes around shard_map, not through it.
    is_known = isinstance(mask.positions, np.ndarray)
    known: dict[str, Any] = {"positions": mask.positions, "interval": mask.interval} if is_known else {}
    arrays = (inputs._asdict(), mask._asdict() | dict.fromkeys(known), lengths)
    axes = (
        {
            "query": (batch, rows, heads),
            "key": (batch, None, heads),
            "value": (batch, None, heads),
            "gate": (batch, rows, heads),
            "sinks": (heads,),
            "bias": (batch, heads, rows),
            "alibi_slopes": (heads,),
        },
        {
            "positions": (batch, rows),
            "interval": ((batch, rows), (batch, rows)),
            "segments": ((batch, rows), (batch,)),
            "dense": (batch, heads, rows),
        },
        ((batch,), (batch,)),
    )
    specs = jax.tree.map(_broadcasting, arrays, axes, is_leaf=lambda x: x is None)

    def part(inputs: dict[str, Any], mask: dict[str, Any], lengths: tuple[Array | None, Array | None]) -> Any:
        return attention(Inputs(**inputs), Mask(**mask | known), lengths, options)

    split = jax.shard_map(
        part,
        in_specs=specs,
        out_specs=(PartitionSpec(batch, rows, heads), PartitionSpec(batch, rows, heads)),
        axis_names=set(free_axes()),
        # Kernels do not say over which axes their results vary. Without the check, what enters in one piece (the sinks
        # along batch axes, keys along rows) still gets its gradient summed over the parts.
        check_vma=False,
    )
    return split(*jax.tree.map(_place, arrays, specs))


def _spread_kv_heads(inputs: Inputs, batch: Any, heads: Any) -> Inputs:
    """Keys and values with a kv head for every part of the heads, if there are fewer."""
    kv_heads, parts = inputs.key.shape[2], _parts(heads)
    if kv_heads % parts == 0:
        return inputs
    if parts % kv_heads:
        raise ValueError(
            f"key has {kv_heads} heads, which {parts} parts of {heads!r} cannot share: one must be a multiple of the "
            "other."
        )
    key, value = (
        jnp.repeat(_place(x, PartitionSpec(batch)), parts // kv_heads, axis=2) for x in (inputs.key, inputs.value)
    )
    return inputs._replace(key=key, value=value)


def _broadcasting(x: Array | None, axes: tuple[Any, ...]) -> PartitionSpec | None:
    """The spec of an array whose dimensions of size 1 broadcast."""
    if x is None:
        return None
    return PartitionSpec(*(entry if size > 1 else None for size, entry in zip(x.shape, axes, strict=False)))


def _place(x: Array, spec: PartitionSpec) -> Array:
    """x laid out as `spec` over the explicit axes; automatic ones are XLA's."""
    explicit = {name for name, kind in free_axes().items() if kind == AxisType.Explicit}
    if not explicit:
        return x
    kept = (tuple(name for name in _names(entry) if name in explicit) for entry in spec)
    return jax.sharding.reshard(x, PartitionSpec(*(names or None for names in kept)))


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _parts(entry: Any) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in _names(entry))
