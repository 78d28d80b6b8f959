"""The mesh: its axes, what lies where on it, and the one table from a parameter's path to its PartitionSpec.

`dcn_data`, `data`, `fsdp` and `expert` cut the batch, `context` the sequences, `tensor` heads and FFN. Parameters and
what the optimiser keeps of them are cut over `fsdp` and `expert` too, and put together where a layer computes with
them; only experts stay apart over `expert`. The mesh in context (`jax.set_mesh`) is the one that counts; without one,
or with a single device, everything here is the identity.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from gattn.config import Config, ConfigError, MeshConfig

AXES = ("dcn_data", "data", "fsdp", "expert", "context", "tensor")  # neighbours in the last ones are nearest
BATCH = ("dcn_data", "data", "fsdp", "expert")
SHARDS = ("fsdp", "expert")
STACKED = "blocks"  # parameters below this name carry a leading layer axis
GATHERED = "gathered"  # name of parameters put together, so that no remat policy saves them

# Path of a parameter (without `blocks` and the layer axis) -> its axes; the first pattern that matches counts.
TABLE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r"embedding|positions", (None, SHARDS)),
    (r"output", (SHARDS, None)),
    (r"attention\.(query|key|value)\.kernel", (SHARDS, "tensor")),
    (r"attention\.out\.kernel", ("tensor", SHARDS)),
    (r"attention\.gates\.g5\.kernel", (SHARDS, None)),
    (r"attention\.gates\.g[1-4]\.kernel", (SHARDS, "tensor")),
    (r"attention\.gates\.g\d\.(bias|score)", ()),
    (r"attention\.switch\.kernel", (SHARDS, "tensor")),
    (r"attention\.sink", ()),
    (r"mlp\.(gate|up)\.kernel", (SHARDS, "tensor")),
    (r"mlp\.down\.kernel", ("tensor", SHARDS)),
    (r"experts\.(gate|up)", ("expert", "fsdp", "tensor")),
    (r"experts\.down", ("expert", "tensor", "fsdp")),
    (r"experts\.router", ()),
    (r"([\w.]*_)?norm\.gain", ()),
)


def spec(path: str) -> PartitionSpec:
    """How the parameter of this dotted path ("blocks.mlp.up.kernel") lies on the mesh.

    Raises:
      KeyError: no line of `TABLE` is for it.
    """
    name = path.removeprefix(STACKED + ".")
    for pattern, axes in TABLE:
        if re.fullmatch(pattern, name):
            return PartitionSpec(*((None, *axes) if name != path else axes))
    raise KeyError(f"{path}: gattn.sharding.TABLE has no line for this parameter")


def layer_spec(path: str) -> PartitionSpec:
    """`spec` of one layer's part of a stacked parameter."""
    return PartitionSpec(*spec(path)[1:])


def parameter_path(keys: tuple[Any, ...]) -> str:
    """The dotted path of a parameter within a state, whatever holds it (parameters, moments, average); "" if none."""
    names = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
    return ".".join(map(str, names))


def specs(state: Any) -> Any:
    """A PartitionSpec for every leaf of a training state, or of parameters."""

    def one(keys, leaf):
        path = parameter_path(keys)
        return spec(path) if path else PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, state)


def shardings(mesh: Mesh, state: Any) -> Any:
    """A NamedSharding for every leaf of a training state, or of parameters."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, axes), specs(state))


def keep(state: Any) -> Any:
    """A training state, or parameters or their gradients, laid out by the table."""
    return jax.lax.with_sharding_constraint(state, specs(state)) if is_split() else state


# ---- meshes -----------------------------------------------------------------------------------------------------


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices, or of `devices`; neighbours on it are neighbours on the machine.

    On a TPU's torus the devices along `expert` are a cube of neighbours where they can be: a ragged all-to-all then has
    the links of all three dimensions, and along a ring those of one.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    sizes = tuple(shape.values())
    if config.dcn_data > 1 and len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, *sizes[1:]), (config.dcn_data, *(1 for _ in sizes[1:])), devices, allow_split_physical_axes=True
        )
    elif (cubes := _cubes(devices, sizes)) is not None:
        grid = cubes
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _cubes(devices: list[jax.Device], sizes: tuple[int, ...]) -> np.ndarray | None:
    """Devices in the order of a mesh whose axis `expert` has sides as equal as they can be in every dimension; None if
    they are no whole torus of TPUs (GPUs have coordinates too, of host and slot), or if the axis is not alone among the
    last, or no power of two that fits."""
    *_, expert, context, tensor = sizes
    if devices[0].platform != "tpu":
        return None
    places = {tuple(getattr(device, "coords", ())): device for device in devices}
    shape = tuple(1 + max(axis) for axis in zip(*places, strict=True))
    if expert == 1 or context * tensor > 1 or not shape or not len(places) == math.prod(shape) == len(devices):
        return None
    sides = [1] * len(shape)
    while math.prod(sides) < expert:
        even = [i for i, size in enumerate(shape) if size % (2 * sides[i]) == 0]
        if not even:
            return None
        sides[min(even, key=lambda i: (sides[i], -shape[i]))] *= 2
    if math.prod(sides) != expert:
        return None
    grid = np.empty(shape, object)
    for place, device in places.items():
        grid[place] = device
    split = grid.reshape([part for size, side in zip(shape, sides, strict=True) for part in (size // side, side)])
    order = [*range(0, split.ndim, 2), *range(1, split.ndim, 2)]
    return split.transpose(order).reshape(sizes)


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """Axis -> its devices, `data` filled up to the number of devices.

    Raises:
      ConfigError: they do not multiply to it.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    sizes["data"] = config.data or devices // others
    if sizes["data"] * others != devices:
        needs = f"{others} devices, or a multiple" if not config.data else f"{config.data * others} devices"
        raise ConfigError("mesh", str(config), f"needs {needs}, and there are {devices}")
    return sizes


def check(config: Config, shape: dict[str, int]) -> None:
    """Refuses what a mesh of this shape cannot divide.

    Raises:
      ConfigError: naming the field and the axes.
    """
    model, data = config.model, config.data
    heads = {"model.num_heads": model.num_heads, "model.num_kv_heads": model.num_kv_heads}
    whole: list[tuple[str, int, tuple[str, ...]]] = [
        ("data.eval_sequences", data.eval_sequences, BATCH),
        ("data.seq_len", data.seq_len, ("context", "tensor")),
        ("model.d_model", model.d_model, SHARDS),
        *((name, size, ("tensor",)) for name, size in heads.items()),
    ]
    if model.num_experts:
        whole += [("model.num_experts", model.num_experts, ("expert",))]
        whole += [("model.expert_dim", model.expert_dim, ("tensor",))]
    else:
        whole += [("model.ffn_dim", model.ffn_width, ("tensor",))]
        if shape["expert"] > 1:
            raise ConfigError("mesh.expert", shape["expert"], "a dense model has no experts to distribute: use fsdp")
    part = data.batch_size // config.train.accumulation
    name = "data.batch_size" if config.train.accumulation == 1 else "data.batch_size / train.accumulation"
    for field, size, axes in ((name, part, BATCH), *whole):
        parts = math.prod(shape[axis] for axis in axes)
        if size % parts:
            over = " x ".join(f"{axis}={shape[axis]}" for axis in axes if shape[axis] > 1)
            raise ConfigError(field, size, f"must be a multiple of {parts}, into which the mesh cuts it ({over})")


def _current() -> jax.sharding.AbstractMesh | None:
    """The mesh in context, if it has axes of ours that are not a surrounding shard_map's, and several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or set(mesh.axis_names) != set(AXES) or mesh.manual_axes:
        return None
    return mesh


def is_split() -> bool:
    """Whether arrays are spread over several devices here: a mesh is in context, outside of shard_map."""
    return _current() is not None


def parts(*axes: str) -> int:
    """Into how many parts these axes of the mesh in context cut, 1 where nothing is spread."""
    mesh = _current()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def activations(*dimensions: Any) -> PartitionSpec:
    """A spec from one entry per dimension (axes, or None), of which only axes with several devices are left."""
    mesh = _current()

    def kept(entry: Any) -> Any:
        names: tuple[str, ...] = () if entry is None else (entry,) if isinstance(entry, str) else entry
        names = tuple(name for name in names if mesh is not None and mesh.shape[name] > 1)
        return names if len(names) > 1 else (names[0] if names else None)

    return PartitionSpec(*map(kept, dimensions))


def attention_layout() -> PartitionSpec | None:
    """How query [B, T, N, H] lies on the mesh; None where nothing is spread."""
    return activations(BATCH, "context", "tensor") if is_split() else None


def constrain(x: Array, *dimensions: Any) -> Array:
    """x laid out by one entry per dimension; the rest of its dimensions whole."""
    return jax.lax.with_sharding_constraint(x, activations(*dimensions)) if is_split() else x


# ---- batches ----------------------------------------------------------------------------------------------------


def batch_spec() -> PartitionSpec:
    """How [B, T] lies on the mesh."""
    return PartitionSpec(BATCH, "context")


def my_rows(mesh: Mesh, batch_size: int) -> Int[np.ndarray, " R"]:
    """The rows of a batch that devices of this process hold, ascending."""
    where = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((batch_size,))
    rows = {row for index in where.values() if index for row in range(batch_size)[index[0]]}
    return np.array(sorted(rows))


def place(mesh: Mesh, batch: dict[str, np.ndarray], batch_size: int) -> dict[str, Any]:
    """A batch of `batch_size` sequences on the mesh, of which `batch` holds those of `my_rows`, or all."""
    if mesh.size == 1:
        return dict(batch)
    whole = len(next(iter(batch.values()))) == batch_size
    rows = np.arange(batch_size) if whole else my_rows(mesh, batch_size)
    where = NamedSharding(mesh, batch_spec())

    def one(array):
        def part(index):
            wanted = np.arange(batch_size)[index[0]]
            return array[np.searchsorted(rows, wanted)][:, *index[1:]]

        return jax.make_array_from_callback((batch_size, *array.shape[1:]), where, part)

    return {name: one(array) for name, array in batch.items()}


# ---- parameters put together where they are used ------------------------------------------------------------------


def gather(parameters: Any, dtype: Any) -> Any:
    """One layer's parameters (without the layer axis) as its computation takes them: those that are cut up are cast to
    `dtype` and put together; experts stay as they are (`gattn.moe`). Gradients go back in pieces, summed in `dtype`."""
    if parts(*SHARDS) == 1:
        return parameters

    def one(keys, leaf):
        axes = spec(parameter_path(keys))
        if SHARDS not in axes:
            return leaf
        kept = (None if entry == SHARDS else entry for entry in axes)
        return checkpoint_name(_gather(leaf.astype(dtype), activations(*axes), activations(*kept)), GATHERED)

    return jax.tree_util.tree_map_with_path(one, parameters)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, cut: PartitionSpec, whole: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, whole)


def _scatter(cut, whole, _, cotangent):
    return (jax.lax.with_sharding_constraint(cotangent, cut),)


_gather.defvjp(lambda x, cut, whole: (_gather(x, cut, whole), None), _scatter)


def embed_rows(table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """`embed` where no gradient is wanted and T need not be a multiple of anything."""
    return constrain(table[tokens].astype(dtype), BATCH)


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Rows of a table in `dtype`; their gradient is summed in float32, in which a frequent token's would else stall."""
    if not is_split():
        return table[tokens].astype(dtype)
    return _embed(table.shape[0], dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed(vocab_size: int, dtype: Any, table: Float[Array, "V D"], tokens: Int[Array, "B T"]):
    def part(table, tokens):
        return jax.lax.all_gather(table.astype(dtype), SHARDS, axis=1, tiled=True)[tokens]

    return _on_devices(part, (spec("embedding"), batch_spec()), batch_spec())(table, tokens)


def _embed_backward(vocab_size, dtype, tokens, cotangent):
    def part(tokens, cotangent):
        sums = jnp.zeros((vocab_size, cotangent.shape[-1]), jnp.float32)
        return sum_pieces(sums.at[tokens].add(cotangent.astype(jnp.float32)), 1, (*BATCH, "context"))

    return _on_devices(part, (batch_spec(), batch_spec()), spec("embedding"))(tokens, cotangent), None


_embed.defvjp(lambda *arguments: (_embed(*arguments), arguments[-1]), _embed_backward)


def _on_devices(part: Callable[..., Array], in_specs: Any, out_specs: Any) -> Callable[..., Array]:
    return jax.shard_map(part, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_pieces(x: Array, dimension: int, axes: tuple[str, ...]) -> Array:
    """Inside shard_map: the sum of x over `axes`, of which each device keeps its piece of a dimension over `SHARDS`."""
    x = jax.lax.psum_scatter(x, SHARDS, scatter_dimension=dimension, tiled=True)
    return jax.lax.psum(x, tuple(axis for axis in axes if axis not in SHARDS))
