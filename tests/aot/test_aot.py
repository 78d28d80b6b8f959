"""What the compilers for TPU and H200 make of the attention kernels."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from benchmarks.tpu_bundles import measure
from benchmarks.tpu_programs import HEAD_DIM, Program, one_pass
from benchmarks.tpu_static import price
from gattn import aot, gated_dot_product_attention

LENGTH = 4096
CHIPS = list(aot.TPU_HOSTS)


def structs(heads, kv_heads, head_dim):
    def array(n):
        return jax.ShapeDtypeStruct((1, LENGTH, n, head_dim), jnp.bfloat16)

    return array(heads), array(kv_heads), array(kv_heads), array(heads)


def forward_and_backward(implementation):
    def attend(query, key, value, gate):
        return gated_dot_product_attention(query, key, value, gate=gate, is_causal=True, implementation=implementation)

    def both(arrays, cotangent):
        out, pull = jax.vjp(attend, *arrays)
        return out, pull(cotangent)

    return both


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_and_backward_compile_for_tpu(chip, head_dim):
    arrays = structs(4, 2, head_dim)
    compiled = aot.compile_for(aot.tpu_devices(chip)[0], forward_and_backward("tpu"), arrays, arrays[0])
    names = re.findall(r"%\S*(gattn_\w+?)_*(?:\.\d+)* = .*custom_call_target=\"tpu_custom_call\"", compiled.as_text())
    assert "gattn_forward" in names
    assert any("dkv" in name for name in names)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward_and_backward_compile_for_h200_without_spills(head_dim, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays = structs(4, 2, head_dim)
    aot.compile_for(aot.h200_devices()[0], forward_and_backward("gpu"), arrays, arrays[0])
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(reports) >= 3
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report


def apart(*calls):
    """The results of functions, each called in a new process: libtpu reads its flags once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_the_gate_costs_the_forward_pass_one_read_of_the_gate():
    programs = [Program("v5p", "forward", kernel, "", (512, 512, 512)) for kernel in ("gattn", "gattn_ungated")]
    gated, ungated = apart(*(partial(measure, "v5p", partial(one_pass, program)) for program in programs))
    (with_gate,), (without,) = (x["kernels"].values() for x in (gated, ungated))
    assert with_gate["bytes"] - without["bytes"] == LENGTH * HEAD_DIM * 2
    assert not gated["outside"]


def rolled():
    """A forward pass whose keys are gone through in a loop."""

    def kernel(query, key, value, out):
        def body(i, total):
            rows = pl.ds(pl.multiple_of(i * 128, 128), 128)
            dots = jnp.dot(query[...], key[rows, :].T, preferred_element_type=jnp.float32)
            return total + jnp.dot(dots.astype(query.dtype), value[rows, :], preferred_element_type=jnp.float32)

        out[...] = jax.lax.fori_loop(0, 4, body, jnp.zeros(out.shape, jnp.float32)).astype(out.dtype)

    block = pl.BlockSpec((512, 128), lambda i, j: (i, 0))
    keys = pl.BlockSpec((512, 128), lambda i, j: (j, 0))
    array = jax.ShapeDtypeStruct((LENGTH, 128), jnp.bfloat16)
    call = pl.pallas_call(
        kernel, grid=(8, 8), in_specs=[block, keys, keys], out_specs=block, out_shape=array, name="gattn_forward"
    )
    return call, [array] * 3


def test_the_benchmark_refuses_a_rolled_loop_which_would_look_cheap():
    program = Program("v5p", "forward", "gattn", "", (512, 512, 512))
    (measured,) = apart(partial(measure, "v5p", rolled))
    row = price(program, measured, {})
    assert "rolled loop" in row["refused"]
    assert row["cycles_per_pair"] is None


def test_a_layer_saves_two_arrays_where_a_gate_outside_saves_three():
    """Beyond its input (the query here): gate and output, against gate, output before and output after the gate."""
    # Short, so that the kernels are small and compile soon; many, so that nothing stays in VMEM.
    array = jax.ShapeDtypeStruct((32, 256, 8, 128), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)
    attend = partial(gated_dot_product_attention, implementation="tpu")

    @jax.checkpoint
    def multiply(out, gate):
        return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)

    def layer(fused, x, key, value, weights):
        gate = x @ weights[0]
        out = attend(x, key, value, gate=gate) if fused else multiply(attend(x, key, value), gate)
        return out @ weights[1]

    def arrays_per_layer(fused):
        def temporaries(layers):
            def loss(x, key, value, weights):
                x, _ = jax.lax.scan(lambda x, _: (layer(fused, x, key, value, weights), None), x, length=layers)
                return x.astype(jnp.float32).sum()

            gradients = jax.grad(loss, (0, 3))
            compiled = aot.compile_for(aot.tpu_devices("v5p")[0], gradients, array, array, array, weights)
            return compiled.memory_analysis().temp_size_in_bytes

        return (temporaries(10) - temporaries(2)) / 8 / (array.size * 2) - 1

    assert arrays_per_layer(True) == pytest.approx(2, abs=0.1)
    assert arrays_per_layer(False) == pytest.approx(3, abs=0.1)
