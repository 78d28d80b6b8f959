"""Decoding on meshes of 8 CPU devices, in a process of its own: `python -m tests.eight_generate`.

tests/test_generate.py runs it once and has a test for each mesh.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import numpy as np

from gattn import model, sharding
from gattn.config import Config, DataConfig, GateSpec, MeshConfig, ModelConfig
from gattn.generate import Generator, Sampling
from tests.eight import print_all

MESHES = {"data": "data=8", "mixed": "fsdp=2,tensor=2"}
EXPERTS = {"expert": "data=2,expert=4"}
DENSE = ModelConfig(
    **{"vocab_size": 300, "num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    **{"ffn_dim": 64, "match_params": False, "gates": (GateSpec("g1", "headwise"), GateSpec("g2")), "init_std": 0.3},
)
MIXTURE = dataclasses.replace(DENSE, num_experts=8, experts_per_token=2, expert_dim=16)


def compare(shape: ModelConfig, mesh: str) -> dict[str, object]:
    """The tokens of a mesh and of one device, and over how many devices weights lie."""
    config = Config(model=shape, data=DataConfig(seq_len=64))
    params = model.init(shape, 0)
    prompts = [np.arange(1, length, dtype=np.int32) for length in (4, 20, 9)]
    sampling, made, pieces = Sampling(max_new_tokens=8, temperature=1.0, top_k=9), [], 1
    for devices in (None, sharding.make_mesh(MeshConfig.parse(mesh))):
        placed = params if devices is None else jax.device_put(params, sharding.shardings(devices, params))
        generator = Generator(config, placed, 0, devices)
        matrix = generator.params["blocks"][0]["attention"]["query"]["kernel"][...]
        pieces = len({str(index) for index in matrix.sharding.devices_indices_map(matrix.shape).values()})
        made.append(np.stack(list(generator.tokens(prompts, sampling)), axis=1).tolist())
    return {"equal": made[0] == made[1], "pieces": pieces}


if __name__ == "__main__":
    checks = {name: partial(compare, DENSE, mesh) for name, mesh in MESHES.items()}
    print_all(checks | {name: partial(compare, MIXTURE, mesh) for name, mesh in EXPERTS.items()})
