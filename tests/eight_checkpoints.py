"""Checkpoints read onto meshes of 8 CPU devices, in a process of their own: `python -m tests.eight_checkpoints`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import numpy as np

from gattn import sharding
from gattn.config import MeshConfig
from gattn.interop import hf
from tests.eight import print_all

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    ("official_headwise", "data=2,fsdp=2,tensor=2"): "fsdp and tensor",
    ("qwen3_moe", "data=1,fsdp=2,expert=4"): "experts",
}


def compare(family: str, text: str) -> dict[str, object]:
    """Whether the values are those without a mesh, and whether they lie where the table of a mesh puts them."""
    mesh = sharding.make_mesh(MeshConfig.parse(text))
    (_, plain), (_, split) = hf.load(GOLDEN / family), hf.load(GOLDEN / family, mesh)
    pairs = list(zip(jax.tree.leaves(plain), jax.tree.leaves(split), strict=True))
    wanted = jax.tree.leaves(sharding.shardings(mesh, plain))
    parts = [leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(split)]
    return {
        "equal": all(np.array_equal(a, b) for a, b in pairs),
        "placed": all(b.sharding.is_equivalent_to(s, b.ndim) for (_, b), s in zip(pairs, wanted, strict=True)),
        "split": sum(parts),
    }


if __name__ == "__main__":
    print_all({name: partial(compare, *case) for case, name in CASES.items()})
