"""Compile for machines that are not there: TPU chips and the H200, on any Linux x86-64 machine.

The compilers are large and come in an environment of their own (`make test-aot` makes it). What they produce is what
the chip would run: out-of-memory errors, memory and FLOP counts, kernels in assembly. Kernels alone need jax only;
`compile_step` compiles what training runs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from gattn.config import Config

# One host's worth of each chip: the smallest topologies that the compiler knows.
TPU_HOSTS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# GPUs that NVLink connects with each other, in one host.
GPUS_PER_HOST = 8

# libtpu would otherwise look for a cloud's metadata server, and refuse a second process on this machine.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Neither can be had without the card: autotuning measures, and Triton's products are chosen by it.
_XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

# NVIDIA's figures for the H200 SXM, as XLA's textproto `GpuTargetConfigProto`.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def prepare() -> None:
    """Makes this process one that runs on its CPU and compiles for others; before JAX is first asked for devices."""
    os.environ.update(_LIBTPU, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}")
    jax.config.update("jax_platforms", "cpu")
    # A program from the cache would not be compiled, and the compilers' dumps would be missing.
    jax.config.update("jax_enable_compilation_cache", False)


def tpu_devices(topology: str) -> list[jax.Device]:
    """Compile-only TPU devices, by chip ("v5p": those of one host) or by topology ("v5p:4x4x4"), after `prepare`.

    RuntimeError, with the remedy, if libtpu is not installed.
    """
    _require("libtpu")
    return topologies.get_topology_desc(topology_name=TPU_HOSTS.get(topology, topology), platform="tpu").devices


def h200_devices(count: int = 1) -> list[jax.Device]:
    """Compile-only H200s, after `prepare`: up to 8 in one host, more in hosts of 8 (`Device.process_index`).

    RuntimeError, with the remedy, if the CUDA plugin is not installed, or ptxas neither on the PATH nor by pip.
    ValueError for a count that does not fill its hosts.
    """
    _require("jax_cuda12_plugin")
    if shutil.which("ptxas") is None:
        _require("nvidia")
    if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        raise ValueError(f"{count} H200s do not fill hosts of {GPUS_PER_HOST}: give a multiple")
    hosts = max(count // GPUS_PER_HOST, 1)
    shape = f"1x{hosts}x{count // hosts}"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=_H200
    ).devices


def devices(topology: str) -> list[jax.Device]:
    """Compile-only devices of a machine: "v5p:8x8x8" (its torus), "h200:64" (64 GPUs in 8 hosts), "v5p" (one host).

    RuntimeError, with the remedy, if its compiler is not installed. ValueError for what is no machine.
    """
    kind, _, size = topology.partition(":")
    if kind == "h200" and (size or "1").isdecimal() and int(size or 1):
        return h200_devices(int(size or 1))
    if kind in TPU_HOSTS and re.fullmatch(r"|\d+x\d+(x\d+)?", size):
        try:
            return tpu_devices(topology)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"{topology}: {str(error).splitlines()[0]}") from error
    chips = ", ".join(TPU_HOSTS)
    raise ValueError(f"{topology!r} is no machine known here: give {chips} with a torus (v5p:4x4x4), or h200:64")


class Compiled(NamedTuple):
    """A train step for a machine that is not there."""

    text: str
    """The optimised HLO, of a step that does not fit too."""
    memory: Any
    """`memory_analysis()`; None where it does not fit."""
    problem: str
    """What the compiler says where it does not fit."""
    mesh: Mesh
    state: Any
    """The training state as laid-out `jax.ShapeDtypeStruct`s, and the batch."""
    batch: dict[str, jax.ShapeDtypeStruct]
    seconds: float
    """Tracing and compiling, by the clock."""
    cpu_seconds: float
    """The same, of all cores."""


def compile_step(config: Config, topology: str) -> Compiled:
    """The whole train step (model, loss, AdamW, collectives) on `config.mesh` of a machine, after `prepare`.

    What `devices` raises, and ConfigError for a mesh that does not divide something.
    """
    from gattn import model, sharding, step

    mesh = sharding.make_mesh(config.mesh, devices(topology))
    sharding.check(config, dict(mesh.shape))
    start, cpu_start = time.perf_counter(), time.process_time()

    def took():
        return time.perf_counter() - start, time.process_time() - cpu_start

    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as dump:
        state = step.abstract_state(config, mesh)
        tokens = (config.data.batch_size, config.data.seq_len), jnp.int32
        place = jax.sharding.NamedSharding(mesh, sharding.batch_spec())
        names = ("inputs", "targets", *(() if config.data.attend_across_documents else ("segment_ids",)))
        batch = {name: jax.ShapeDtypeStruct(*tokens, sharding=place) for name in names}
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        expected = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        jitted: Any = step.train_step(model.abstract(config.model)[0], config)
        traced = jitted.trace(state, expected, batch)
        is_tpu = mesh.devices.flat[0].platform == "tpu"
        lowered = traced.lower(lowering_platforms=("tpu" if is_tpu else "cuda",))
        # Where a program does not fit on a TPU, only the dump tells what it holds.
        options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if is_tpu else None
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            left = sorted(Path(dump).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
            if "RESOURCE_EXHAUSTED" not in str(error) or not left:
                raise
            problem = str(error).splitlines()[0]
            return Compiled(left[-1].read_text(), None, problem, mesh, state, batch, *took())
        return Compiled(compiled.as_text(), compiled.memory_analysis(), "", mesh, state, batch, *took())


def compile_for(device: jax.Device, function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """`function` compiled for one such device. Of the arguments, pytrees, only shapes and dtypes matter."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with nullcontext() if device.platform == "tpu" else h200_mesh():
        traced = jax.jit(function).trace(*structs)
        return traced.lower(lowering_platforms=("tpu" if device.platform == "tpu" else "cuda",)).compile()


def h200_mesh() -> Any:
    """The context in which Mosaic GPU kernels are traced where there is no GPU: they ask it for the kind of device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise RuntimeError(
            f"{package} is not installed. On Linux x86-64, `make test-aot` makes .venv-aot, whose python has all that "
            "compiles for other machines; or `pip install -r requirements-aot.txt` (1.8 GB)."
        )
