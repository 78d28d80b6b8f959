"""The mesh: every parameter has its place, what `check` lets through divides, and rows go where they belong."""

import math

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AbstractMesh, PartitionSpec

from configs.models import PRESETS
from configs.variants import VARIANTS, apply
from gattn import sharding
from gattn.config import Config, ConfigError, MeshConfig, override
from gattn.step import abstract_state

CONFIGS = {name: preset() for name, preset in PRESETS.items()}
SIZES = st.sampled_from([1, 2, 3, 4, 8])


def parts_of(entry, shape):
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(shape[name] for name in names)


def refused(config, shape):
    try:
        sharding.check(config, shape)
    except ConfigError as error:
        return str(error)


def leaves(config):
    """Path, shape and spec of every array of the training state."""
    state = abstract_state(config)
    specs = jax.tree.leaves(sharding.specs(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [(sharding.parameter_path(keys), leaf.shape, spec) for (keys, leaf), spec in zip(paths, specs, strict=True)]


@pytest.mark.parametrize("preset", CONFIGS)
def test_every_parameter_and_moment_of_every_preset_has_a_place(preset):
    """A parameter that no line of the table is for is a KeyError; a moment lies as its parameter does."""
    config = CONFIGS[preset]
    found = {}
    for path, shape, spec in leaves(config):
        assert len(spec) <= len(shape), path
        if path:
            assert found.setdefault(path, spec) == spec
    large = {path for path, shape, spec in leaves(config) if math.prod(shape) > 2 * config.model.num_layers * 4096}
    assert all(any(entry is not None for entry in found[path]) for path in large if "router" not in path)


def test_every_variant_has_a_place():
    for variant in VARIANTS:
        assert leaves(override(apply(CONFIGS["moe_15a2b"], variant), {"train.ema_decay": 0.9}))


@settings(max_examples=60)
@given(st.data())
def test_a_mesh_that_passes_divides_every_array(data):
    """What `check` lets through is cut into equal parts everywhere: parameters, moments, batches, logits' positions."""
    base = CONFIGS[data.draw(st.sampled_from(["tiny", "moe_tiny"]))]
    variant = data.draw(st.sampled_from(["baseline", "g1_elementwise", "g1_headwise", "g2_headwise", "g5_elementwise"]))
    heads = data.draw(st.sampled_from([(4, 2), (6, 3), (8, 8)]))
    config = override(
        apply(base, variant),
        {
            "model.d_model": data.draw(st.sampled_from([24, 96, 128])),
            "model.num_heads": heads[0],
            "model.num_kv_heads": heads[1],
            "data.batch_size": data.draw(st.sampled_from([8, 24, 32])),
            "train.accumulation": data.draw(st.sampled_from([1, 2])),
            "data.eval_sequences": data.draw(st.sampled_from([32, 96])),
        },
    )
    mesh = MeshConfig(**{axis: data.draw(SIZES) for axis in sharding.AXES})
    shape = sharding.mesh_shape(mesh, math.prod(getattr(mesh, axis) for axis in sharding.AXES))
    if problem := refused(config, shape):
        assert any(f"{axis}={shape[axis]}" in problem or f"mesh.{axis}" in problem for axis in sharding.AXES)
        return
    for path, sizes, spec in leaves(config):
        for size, entry in zip(sizes, spec, strict=False):
            assert size % parts_of(entry, shape) == 0, path
    rows, length = sharding.batch_spec()
    assert config.data.batch_size // config.train.accumulation % parts_of(rows, shape) == 0
    assert config.data.eval_sequences % parts_of(rows, shape) == 0
    assert config.data.seq_len % (parts_of(length, shape) * shape["tensor"]) == 0
    if config.model.num_experts:
        assert config.model.num_experts % shape["expert"] == 0


@given(st.tuples(*(SIZES for _ in sharding.AXES)), st.integers(1, 64))
def test_data_takes_the_devices_that_are_left(sizes, devices):
    config = MeshConfig(**dict(zip(sharding.AXES, sizes, strict=True)) | {"data": 0})
    others = math.prod(sizes) // sizes[1]
    if devices % others:
        with pytest.raises(ConfigError, match=f"{others} devices, or a multiple"):
            sharding.mesh_shape(config, devices)
    else:
        assert sharding.mesh_shape(config, devices)["data"] == devices // others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.batch_size": 12}, r"data.batch_size = 12: must be a multiple of 8.*\(data=2 x fsdp=4\)"),
        ({"train.accumulation": 2}, r"data.batch_size / train.accumulation = 4: must be a multiple of 8"),
        ({"data.eval_sequences": 12}, "data.eval_sequences = 12"),
        ({"data.seq_len": 250, "mesh.context": 4}, "data.seq_len = 250: must be a multiple of 4"),
        ({"mesh.tensor": 4}, r"model.num_kv_heads = 2: must be a multiple of 4.*\(tensor=4\)"),
        ({"model.d_model": 126}, r"model.d_model = 126.*\(fsdp=4\)"),
        ({"mesh.expert": 2}, "mesh.expert = 2: a dense model"),
    ],
)
def test_what_does_not_divide_is_named(changes, message):
    config = override(CONFIGS["tiny"], {"mesh.data": 2, "mesh.fsdp": 4, **changes})
    shape = sharding.mesh_shape(config.mesh, 8 * config.mesh.context * config.mesh.tensor * config.mesh.expert)
    with pytest.raises(ConfigError, match=message):
        sharding.check(config, shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,data=4", "each axis once"),
        ("data", "each axis once"),
        ("fsdp=two", "each axis once"),
        ("model=2", "mesh.model = 2: no such field"),
        ("fsdp=0", "mesh.fsdp = 0: must be at least 1"),
    ],
)
def test_a_mesh_is_spelled_by_its_axes(text, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig.parse(text)
    assert MeshConfig.parse("data=2,fsdp=4") == MeshConfig(data=2, fsdp=4)
    assert MeshConfig.parse(str(MeshConfig(data=2, expert=4, tensor=3))) == MeshConfig(data=2, expert=4, tensor=3)


def test_a_mesh_is_no_part_of_what_is_trained():
    config = Config()
    assert override(config, {"mesh.fsdp": 4, "mesh.data": 2}).fingerprint() == config.fingerprint()


def test_on_one_device_nothing_is_spread():
    x = np.ones((2, 4, 8), np.float32)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        assert not sharding.is_split()
        assert sharding.attention_layout() is None
        assert sharding.constrain(x, sharding.BATCH, "context") is x
        assert sharding.gather({"blocks": x}, "bfloat16")["blocks"] is x
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",))):
        assert not sharding.is_split(), "a mesh of somebody else's"


def test_rows_are_placed_as_they_are():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    batch = {"inputs": np.arange(24, dtype=np.int32).reshape(4, 6)}
    placed = sharding.place(mesh, batch, 4)
    assert np.array_equal(placed["inputs"], batch["inputs"])
    assert np.array_equal(sharding.my_rows(mesh, 4), np.arange(4))


class Chip:
    """A TPU by its place on the torus."""

    platform, device_kind, process_index = "tpu", "TPU v5", 0

    def __init__(self, *coords):
        self.coords = coords


@pytest.mark.parametrize(("shape", "expert", "sides"), [((4, 4, 4), 8, (2, 2, 2)), ((4, 8), 4, (2, 2))])
def test_experts_lie_in_cubes_of_neighbours(shape, expert, sides):
    """Every device once; those along `expert` fill a box of these sides."""
    chips = [Chip(*place) for place in np.ndindex(*shape)]
    sizes = (1, 2, len(chips) // expert // 2, expert, 1, 1)
    grid = sharding._cubes(chips, sizes)
    assert grid.shape == sizes
    assert {id(chip) for chip in grid.flat} == {id(chip) for chip in chips}
    for group in np.moveaxis(grid, 3, -1).reshape(-1, expert):
        places = np.array([chip.coords for chip in group])
        assert tuple(1 + places.max(axis=0) - places.min(axis=0)) == sides
        assert len(set(map(tuple, places))) == expert


def test_what_is_no_torus_has_no_cubes():
    chips = [Chip(*place) for place in np.ndindex(3, 3, 3)]
    assert sharding._cubes(chips, (1, 1, 9, 3, 1, 1)) is None, "no power of two"
    assert sharding._cubes(chips[:8], (1, 1, 1, 8, 1, 1)) is None, "a part of a torus"
    assert sharding._cubes(jax.devices()[:1], (1, 1, 1, 1, 1, 1)) is None
