"""What the TPU compiler makes of the grouped product for a v5p, and ptxas of its GPU kernels for an H200."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gattn import aot
from gattn.kernels import grouped_gpu
from gattn.kernels.grouped import choose_grouped, grouped_dot

ROWS, GROUPS, INNER, COLUMNS = 16384, 64, 1024, 768
IDEAL = 2 * ROWS * INNER * COLUMNS


def structs(dtype, matrices=None):
    """lhs, rhs, sizes and dout."""
    return (
        jax.ShapeDtypeStruct((ROWS, INNER), dtype),
        jax.ShapeDtypeStruct((GROUPS, INNER, COLUMNS), matrices or dtype),
        jax.ShapeDtypeStruct((GROUPS,), jnp.int32),
        jax.ShapeDtypeStruct((ROWS, COLUMNS), dtype),
    )


def run(part, implementation, lhs, rhs, sizes, dout):
    """The product, or one of its gradients."""
    product = partial(grouped_dot, group_sizes=sizes, implementation=implementation)
    if part == "forward":
        return product(lhs, rhs)
    return jax.vjp(product, lhs, rhs)[1](dout)[["dlhs", "drhs"].index(part)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("part", ["forward", "dlhs", "drhs"])
def test_tpu_does_the_flops_of_the_rows_and_keeps_nothing_dense(part, dtype):
    (device, *_) = aot.tpu_devices("v5p")
    arrays = structs(dtype)
    compiled = aot.compile_for(device, partial(run, part, "ragged"), *arrays)
    assert IDEAL <= compiled.cost_analysis()["flops"] < 1.01 * IDEAL
    # No transposed matrices, masked operands or float32 result: at most the result before its last rows are cleared.
    result = {"forward": arrays[3], "dlhs": arrays[0], "drhs": arrays[2]}[part]
    assert compiled.memory_analysis().temp_size_in_bytes <= result.size * result.dtype.itemsize + 2**20


def test_tpu_inside_shard_map():
    """Experts over the devices of a host, rows already where they belong; value and gradients."""
    devices = aot.tpu_devices("v5p")
    mesh = jax.make_mesh((len(devices),), ("expert",), devices=devices)
    split = NamedSharding(mesh, P("expert"))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in structs(jnp.bfloat16, jnp.float32)]

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("expert"),) * 4, out_specs=P("expert"), check_vma=False)
    def both(lhs, rhs, sizes, dout):
        assert choose_grouped(lhs, rhs) == "ragged"
        out, pullback = jax.vjp(lambda lhs, rhs: grouped_dot(lhs, rhs, sizes), lhs, rhs)
        return out, pullback(dout)

    with jax.set_mesh(mesh):
        compiled = jax.jit(both).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert compiled.cost_analysis()["flops"] < 1.05 * 3 * IDEAL / len(devices)
    assert "all-" not in compiled.as_text()


@pytest.mark.parametrize("columns", [128, 256])
def test_gpu_kernels_do_their_products_and_nothing_slows_them(columns, tmp_path, monkeypatch):
    for name in ("TO", "PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", str(tmp_path) if name == "TO" else "1")
    tiles = {grouped_gpu.WIDE.columns: grouped_gpu.WIDE, grouped_gpu.NARROW.columns: grouped_gpu.NARROW}
    monkeypatch.setattr(grouped_gpu, "tile_for", lambda _: tiles[columns])
    (device,) = aot.h200_devices()
    arrays = structs(jnp.bfloat16, jnp.float32)

    def both(lhs, rhs, sizes, dout):
        assert choose_grouped(lhs, rhs) == "gpu"
        out, pullback = jax.vjp(lambda lhs, rhs: grouped_dot(lhs, rhs, sizes, implementation="gpu"), lhs, rhs)
        return out, pullback(dout)

    compiled = aot.compile_for(device, both, *arrays)
    # The matrices in bfloat16, and nothing else.
    assert compiled.memory_analysis().temp_size_in_bytes <= GROUPS * INNER * COLUMNS * 2 + 2**20
    kernels = set()
    for ptx in tmp_path.glob("*.ptx"):
        kernel = re.fullmatch(r"grouped_(\w+)_\d+", ptx.stem)[1]
        kernels.add(kernel)
        code, report = ptx.read_text(), ptx.with_suffix(".ptxas").read_text()
        # One step: 64 rows of each consumer by 64 by all columns.
        products = Counter(int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", code))
        assert products == {columns: 4}, kernel
        assert "0 bytes spill stores, 0 bytes spill loads" in report, kernel
        assert "Potential Performance Loss" not in report, kernel
        assert re.search(r"\.maxntid 384\b", code), kernel
    assert kernels == {"rows", "rows_transposed", "matrices"}


def test_wide_tiles_are_taken_where_they_pad_no_more():
    chosen = {columns: grouped_gpu.tile_for(columns) for columns in (64, 128, 256, 384, 768, 1000)}
    wide = [columns for columns, tile in chosen.items() if tile == grouped_gpu.WIDE]
    assert wide == [256, 768, 1000]
