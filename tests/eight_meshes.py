"""One optimiser step on meshes of 1 to 8 CPU devices, in a process of its own: `python -m tests.eight_meshes`.

tests/test_step.py runs it once and has a test for each mesh.
"""

from __future__ import annotations

import json

import jax
import numpy as np

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model, sharding
from gattn.config import MeshConfig, override
from gattn.step import eval_step, metric_names, new_state, train_step

MESHES = {
    "dense": {"data": "data=2", "fsdp": "fsdp=4", "tensor": "data=1,tensor=2", "context": "data=1,context=4"}
    | {"fsdp, context, tensor": "fsdp=2,context=2,tensor=2", "slices": "dcn_data=2,data=2,fsdp=2"},
    "untied": {"fsdp": "fsdp=8", "context and tensor": "data=1,context=2,tensor=2"},
    "experts": {"fsdp": "fsdp=2", "data and expert": "data=2,expert=4", "context and expert": "context=2,expert=4"}
    | {"fsdp, expert, tensor": "fsdp=2,expert=2,tensor=2"},
}
PROBED = ("fsdp, context, tensor", "data and expert")  # where evaluation with all probes is compared too
SMALL = {
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 64,
    "model.num_layers": 2,
    "model.match_params": False,
    "model.remat": "full",
    "model.vocab_size": 65,
    "train.steps": 50,
    "train.log_every": 1,
    "train.loss_chunk": 24,
    "train.z_loss": 1e-3,
    "optim.warmup_steps": 0,
    "optim.clip_norm": 1e9,
    "data.batch_size": 16,
}
BASE = override(apply(sinkbench_config(), "g1_elementwise"), SMALL)
MODELS = {
    "dense": override(BASE, {"train.accumulation": 2}),
    "untied": override(BASE, {"model.tied_embeddings": False, "model.remat": "none", "model.attention": "chunked"}),
    "experts": override(
        BASE,
        {
            "model.num_experts": 8,
            "model.experts_per_token": 2,
            "model.expert_dim": 16,
            "train.balance_loss": 0.1,
            "train.router_z_loss": 0.01,
            "train.accumulation": 2,
        },
    ),
}


def batch() -> dict[str, np.ndarray]:
    """Random tokens in documents, with targets that do not count."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 65, (16, 33), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    targets[np.arange(32) >= np.linspace(8, 40, 16)[:, None]] = -1
    segments = 1 + np.arange(32, dtype=np.int32)[None].repeat(16, 0) // 20
    return {"inputs": tokens[:, :-1], "targets": targets, "segment_ids": segments}


def one_step(config, mesh_text, *, probe):
    """Metrics, gradients (of Adam's first moment), held-out sums and where parameters lie, on a mesh."""
    mesh = MeshConfig.parse(mesh_text)
    count = int(np.prod([max(1, getattr(mesh, axis)) for axis in sharding.AXES]))
    mesh = sharding.make_mesh(mesh, jax.devices()[:count])
    sharding.check(config, dict(mesh.shape))
    graph = model.abstract(config.model)[0]
    with jax.set_mesh(mesh):
        state = new_state(config, mesh)
        rows = sharding.place(mesh, batch(), 16)
        evaluated = jax.device_get(eval_step(graph, config, probe=True)(state.params, rows)) if probe else ()
        stop = jax.device_put(np.arange(count, dtype=np.int32), jax.NamedSharding(mesh, jax.P(sharding.AXES)))
        new, metrics = train_step(graph, config)(state, np.int32(0), rows | {"stop": stop})
    expected = sharding.shardings(mesh, new)
    stays = jax.tree.map(lambda leaf, where: bool(leaf.sharding.is_equivalent_to(where, leaf.ndim)), new, expected)
    gradients = [np.asarray(leaf) / 0.1 for leaf in jax.tree.leaves(new.optimizer[1][0].mu)]
    return np.asarray(metrics), gradients, jax.tree.leaves(evaluated), all(jax.tree.leaves(stays)), count


def difference(actual, expected):
    """The largest, over the largest expected."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def main():
    found = {}
    for name, config in MODELS.items():
        names = [*metric_names(config), "stop", "updates"]
        first = one_step(config, "data=1", probe=name != "untied")
        for mesh, text in MESHES[name].items():
            metrics, gradients, evaluated, stays, devices = one_step(config, text, probe=mesh in PROBED)
            pairs = zip(names, metrics, first[0], strict=True)
            found[f"{name}: {mesh}"] = {
                "metrics": {key: [float(a), float(b)] for key, a, b in pairs},
                "gradients": max(map(difference, gradients, first[1])),
                "evaluated": max(map(difference, evaluated, first[2])) if evaluated else 0.0,
                "stays": stays,
                "devices": devices,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
