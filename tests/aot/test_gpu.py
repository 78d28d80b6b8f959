"""What ptxas makes of the GPU kernels for an H200."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from gattn import aot
from gattn.kernels import gpu, masks, reference

LENGTH = 4096


def causal(ids):
    return masks.make_mask(LENGTH, LENGTH, is_causal=True)


def packed(ids):
    return masks.make_mask(LENGTH, LENGTH, is_causal=True, window=(1000, 0), segments=(ids, ids))


def forward(mask, ids, sinks, *arrays):
    return gpu.forward(reference.Inputs(*arrays, sinks), mask(ids), reference.Options(scale=0.1))


def backward(mask, ids, query, key, value, *more):
    return gpu.backward(reference.Inputs(query, key, value), mask(ids), reference.Options(scale=0.1), *more)


def expected_products(kernel, head_dim):
    """wgmma instructions by (n, how many): each multiplies 64 x 16 by 16 x n, and a consumer warpgroup owns 64 rows."""
    blocks, deep = gpu.BLOCKS[head_dim], head_dim // 16
    rows, keys, _ = getattr(blocks, {"forward": "forward", "query": "query_gradient"}.get(kernel, "key_value_gradient"))
    if kernel == "forward":
        # The first scores come before the loop over key blocks, the last weighted sum after it.
        return Counter({keys: 2 * deep}) + Counter({head_dim: 2 * keys // 16})
    if kernel == "query":
        return Counter({keys: 2 * deep}) + Counter({head_dim: keys // 16})
    gradients = kernel.split("_")
    return Counter({rows: deep * (1 + ("key" in gradients))}) + Counter({head_dim: len(gradients) * rows // 16})


@pytest.mark.parametrize("mask", [causal, packed])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_do_their_products_and_nothing_slows_them(head_dim, mask, tmp_path, monkeypatch):
    for name in ("TO", "PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", str(tmp_path) if name == "TO" else "1")
    query = jax.ShapeDtypeStruct((1, LENGTH, 8, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, LENGTH, 2, head_dim), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((1, LENGTH, 8), jnp.float32)
    ids, sinks = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    (device,) = aot.h200_devices()
    aot.compile_for(device, partial(forward, mask), ids, sinks, query, key, key, query)
    aot.compile_for(device, partial(backward, mask), ids, query, key, key, number, query, number)

    kernels = set()
    for ptx in tmp_path.glob("*.ptx"):
        kernel = re.fullmatch(r"gated_attention_(\w+?)(?:_gradient)?_\d+", ptx.stem)[1]
        kernels.add(kernel)
        code, report = ptx.read_text(), ptx.with_suffix(".ptxas").read_text()
        products = Counter(int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", code))
        assert products == expected_products(kernel, head_dim), kernel
        assert "0 bytes spill stores, 0 bytes spill loads" in report, kernel
        # ptxas says so where it has to let products wait for each other.
        assert "Potential Performance Loss" not in report, kernel
        # Two consumer warpgroups of 64 rows each, and the producer.
        assert re.search(r"\.maxntid 384\b", code), kernel
    assert kernels == {"forward", "query"} | ({"key_value"} if head_dim <= 128 else {"key", "value"})
    assert gpu.BLOCKS[head_dim].forward.rows == 128
