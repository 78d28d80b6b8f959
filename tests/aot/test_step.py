"""What the compilers for TPU and H200 make of whole train steps: experts stay where they are, and everything fits."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.models import PRESETS
from gattn import aot, compile_report, hlo, moe, sharding
from gattn.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, override
from gattn.hlo_cost import read_costs

EXPERTS, TOP_K, SIZE, WIDTH, LENGTH, BUFFER = 32, 2, 256, 384, 512, 2.0
MODEL = ModelConfig(
    vocab_size=1024,
    num_layers=2,
    d_model=SIZE,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    match_params=False,
    dtype="bfloat16",
    remat="full",
    num_experts=EXPERTS,
    experts_per_token=TOP_K,
    expert_dim=WIDTH,  # no other dimension is as wide
    buffer_factor=BUFFER,
)


def small(mesh: str, batch_size: int = 8, **model) -> Config:
    model = dataclasses.replace(MODEL, **model)
    weights = {"balance_loss": 0.01, "router_z_loss": 1e-3} if model.num_experts else {}
    return Config(
        model=model,
        data=DataConfig(seq_len=LENGTH, batch_size=batch_size, eval_sequences=8),
        optim=OptimConfig(warmup_steps=1),
        train=TrainConfig(steps=10, loss_chunk=512, **weights),
        mesh=MeshConfig.parse(mesh),
    )


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "h200:8"])
def test_a_step_on_eight_devices(topology):
    """One compilation, and all that is to be seen in it: it takes half a minute."""
    config = small("fsdp=2,expert=4", attention="gpu" if topology.startswith("h200") else "auto")
    compiled = aot.compile_step(config, topology)
    costs = read_costs(compiled.text, compile_report.kernel_flops(1 / BUFFER))
    assert not costs.program.unknown_loops
    expert_weights_stay_on_their_devices(compiled, costs)
    no_array_is_as_large_as_tokens_times_experts_times_width(config, compiled, costs)
    the_report_adds_up(compile_report.read(compiled, config, topology), config)


def expert_weights_stay_on_their_devices(compiled, costs):
    """Nothing as wide as an expert travels along `expert`, whatever the collective is called; tokens do."""
    shape, over = dict(compiled.mesh.shape), []
    for one in costs.collectives(most=True):
        if "expert" in hlo.axes(one.groups, shape):
            over.append(one.kind)
            assert not any(array.dims[-1:] == (width,) for array in one.shapes for width in (WIDTH, 2 * WIDTH)), one
    assert over.count("ragged-all-to-all") >= 5  # rows there and back, forward and backward
    assert costs.program.arrays_of(EXPERTS // 4, SIZE, WIDTH)  # gathered over fsdp alone
    for size, width in itertools.product((SIZE, SIZE // 2), (WIDTH, 2 * WIDTH)):  # fsdp cuts SIZE; gate and up are one
        assert not costs.program.arrays_of(EXPERTS, size, width)


def no_array_is_as_large_as_tokens_times_experts_times_width(config, compiled, costs):
    """Not even in the branch with room for all rows that could ever arrive."""
    tokens = config.data.batch_size * LENGTH // compiled.mesh.size
    arrays = (one for one in costs.program.arrays() if one[0].dtype != "s8")  # cuBLAS' room for its own use
    shape, made = max(arrays, key=lambda one: one[0].size)
    assert shape.size < tokens * EXPERTS * min(SIZE, WIDTH), (shape, made.op_name)


def the_report_adds_up(report, config):
    assert report.fits
    # Backward takes forward again: 4/3 of what the model's FLOPs count.
    assert 1.1 < report.recompute < 1.6
    hidden = config.data.batch_size * LENGTH * SIZE * 2 // report.devices
    assert report.memory["activations"] >= MODEL.num_layers * hidden
    assert report.memory["parameters"] * 2 <= report.memory["optimizer"] <= report.memory["parameters"] * 2 + 64
    kinds = {(row.kind, row.axes) for row in report.collectives}
    assert ("ragged-all-to-all", ("expert",)) in kinds
    assert all(row.seconds > 0 for row in report.collectives)
    assert 0 < report.mfu["serial"] <= report.mfu["exposed"] <= report.mfu["overlapped"] < 1
    assert "MFU, headline" in compile_report.render(report)


ROWS = 4
PRODUCTS = ROWS * LENGTH * TOP_K * 2.0 * SIZE * WIDTH  # one product of every token with its experts


def layer(model: ModelConfig):
    """An expert layer's gradient, and its arguments' shapes."""
    graph, params = nnx.split(nnx.eval_shape(lambda: moe.Experts(model, nnx.Rngs(params=0))))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, SIZE), jnp.bfloat16)

    def forward(params, x):
        return nnx.merge(graph, params)(x)[0]

    def gradient(params, x):
        return jax.grad(lambda *inputs: jnp.square(forward(*inputs).astype(jnp.float32)).sum(), (0, 1))(params, x)

    return gradient, params, x


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_on_one_device_an_expert_layer_costs_its_top_k_products(platform):
    """3 products forward, 6 backward."""
    function, params, x = layer(MODEL)
    if platform == "cpu":
        text = jax.jit(function).lower(params, x).compile().as_text()
    else:
        device = aot.tpu_devices("v5p")[0]
        mesh = sharding.make_mesh(MeshConfig(), [device])
        with jax.set_mesh(mesh):
            text = aot.compile_for(device, function, params, x).as_text()
    flops = read_costs(text, compile_report.kernel_flops(1.0)).flops(most=True)
    assert 9 * PRODUCTS <= flops <= 1.1 * 9 * PRODUCTS


def test_sharded_an_expert_layer_costs_at_most_its_buffers():
    """3 products forward, and 9 backward, which takes the forward ones again: autodiff would keep the arrays of both
    branches."""
    mesh = sharding.make_mesh(MeshConfig(expert=4), aot.tpu_devices("v5p"))
    function, params, x = layer(MODEL)

    def put(struct, spec):
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    def place(keys, leaf):
        return put(leaf, sharding.spec(f"experts.{keys[0].key}"))

    params = jax.tree_util.tree_map_with_path(place, params)
    x = put(jax.ShapeDtypeStruct((4 * ROWS, *x.shape[1:]), x.dtype), jax.sharding.PartitionSpec(sharding.BATCH))
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).trace(params, x).lower(lowering_platforms=("tpu",))
        text = lowered.compile().as_text()
    flops = read_costs(text, compile_report.kernel_flops(1.0)).flops()
    assert 12 * PRODUCTS <= flops <= 1.02 * BUFFER * 12 * PRODUCTS


def test_what_does_not_fit_says_what_is_large_and_what_to_change(capfd):
    """1,024 sequences of a small model at once on a chip with 16 GiB."""

    model = {"num_experts": 0, "experts_per_token": 0, "expert_dim": 0, "remat": "none"}
    config = small("data=4", **model)
    losses = dataclasses.replace(config.train, balance_loss=0.0, router_z_loss=0.0)
    config = dataclasses.replace(config, train=losses, data=dataclasses.replace(config.data, batch_size=4096))
    assert compile_report.command(config, ["--topology", "v5e"]) == 1
    said = capfd.readouterr().err
    assert "out of memory: a step needs" in said
    assert "of a device's 15.8 GiB" in said
    assert "bf16[" in said  # the largest arrays, with where they come from
    assert "--train.accumulation 2 (now 1024 sequences at a time on a device); --model.remat full" in said


def test_attention_that_cannot_be_compiled_here_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"--model\.attention gpu"):
        compile_report.command(small("data=8"), ["--topology", "h200:8"])


# Topology, mesh, and what the preset's docstring changes on such chips.
MACHINES = {
    "tiny": ("v5p", "data=4", {}),
    "small": ("v5e", "data=4", {"model.dtype": "bfloat16"}),
    "base": ("v5e:4x4", "fsdp=16", {}),
    "dense_1p7b_28l": ("v5p:4x4x4", "data=4,fsdp=16", {}),
    "dense_1p7b_48l": ("v6e:16x16", "data=4,fsdp=64", {}),
    "moe_tiny": ("v5p", "expert=4", {}),
    "moe_small": ("v5p", "expert=4", {}),
    "moe_15a2b": ("v5p:8x8x8", "fsdp=64,expert=8", {}),
}
# The others take one to three minutes of CPU each: GATTN_COMPILE=all.
QUICK = ("tiny", "moe_tiny")


def test_every_preset_has_a_machine():
    assert MACHINES.keys() == PRESETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES if os.environ.get("GATTN_COMPILE") == "all" else QUICK)
def test_presets_fit(name):
    topology, mesh, changes = MACHINES[name]
    config = dataclasses.replace(override(PRESETS[name](), changes), mesh=MeshConfig.parse(mesh))
    report = compile_report.compile_report(config, topology)
    assert report.fits
    assert report.memory["needed"] < report.memory["limit"]


def test_experts_of_gpus_are_distributed_within_a_host():
    """NVLink connects eight; the cards between hosts are nine times as slow."""
    mesh = sharding.make_mesh(MeshConfig.parse("fsdp=2,expert=8"), aot.devices("h200:16"))
    for host in mesh.devices.reshape(2, 8):
        assert len({device.process_index for device in host}) == 1
