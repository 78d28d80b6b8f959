"""gated_dot_product_attention as a drop-in: jax.nn's meaning, clear errors, no import but jax and numpy."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import PartitionSpec

from gattn import attention_maps, choose_implementation, gated_dot_product_attention
from gattn.kernels import api
from tests.attention import attend, qkv

# Compilation dominates these tests, and LLVM's optimisations dominate compilation.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
RNG = np.random.default_rng(0)
QUERY, GATE = (RNG.standard_normal((2, 12, 4, 8), np.float32) for _ in range(2))
KEY, VALUE = (RNG.standard_normal((2, 16, 2, 8), np.float32) for _ in range(2))

SHARED_WITH_JAX = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "window": {"local_window_size": 3},
    "causal window": {"local_window_size": (4, 1), "is_causal": True},
    "lengths": {"query_seq_lengths": np.array([12, 5], np.int32), "key_value_seq_lengths": np.array([9, 16], np.int32)},
    "mask": {"mask": RNG.random((2, 1, 12, 16)) < 0.8},
    "bias": {"bias": RNG.standard_normal((1, 4, 12, 16), np.float32)},
    "NTS bias": {"bias": RNG.standard_normal((4, 12, 16), np.float32), "is_causal": True},
}


@pytest.mark.parametrize("name", SHARED_WITH_JAX)
def test_means_what_jax_nn_means(name):
    arguments = SHARED_WITH_JAX[name] | {"return_residual": True}
    ours = partial(gated_dot_product_attention, implementation="reference", **arguments)
    theirs = partial(jax.nn.dot_product_attention, **arguments)
    out, lse = jax.jit(ours, compiler_options=QUICK)(QUERY, KEY, VALUE)
    expected, expected_lse = jax.jit(theirs, compiler_options=QUICK)(QUERY, KEY, VALUE)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    # jax.nn gives a large negative number where there is nothing to attend to.
    np.testing.assert_allclose(lse, np.where(expected_lse < -1e30, -np.inf, expected_lse), atol=2e-6)


def test_a_sequence_without_a_batch():
    ids = np.array([0] * 6 + [1] * 6)
    arguments = {"is_causal": True, "return_residual": True}
    out, lse = gated_dot_product_attention(
        QUERY[0], QUERY[0], GATE[0], gate=GATE[0], segment_ids=ids[None], **arguments
    )
    assert out.shape == (12, 4, 8)
    assert lse.shape == (12, 4)
    batched = gated_dot_product_attention(
        QUERY[:1], QUERY[:1], GATE[:1], gate=GATE[:1], segment_ids=ids[None], **arguments
    )
    np.testing.assert_array_equal(out, batched[0][0])
    np.testing.assert_array_equal(lse, batched[1][0])
    assert attention_maps(QUERY[0], KEY[0]).shape == (4, 12, 16)


def shaped(length, dtype=jnp.bfloat16, head_dim=64):
    return jax.ShapeDtypeStruct((1, length, 2, head_dim), dtype)


def test_long_sequences_go_to_chunked_and_a_named_one_is_never_replaced():
    def chosen(length, implementation=None):
        return choose_implementation(*(shaped(length),) * 3, implementation=implementation)

    assert [chosen(511), chosen(512), chosen(32768, "reference")] == ["reference", "chunked", "reference"]
    assert chosen(8, "chunked") == "chunked"
    assert choose_implementation(shaped(1), shaped(32768), shaped(32768)) == "reference"

    def scans(length, implementation=None):
        call = partial(gated_dot_product_attention, implementation=implementation)
        return "scan" in str(jax.make_jaxpr(call)(*(shaped(length),) * 3))

    assert [scans(511), scans(512), scans(512, "reference"), scans(16, "chunked")] == [False, True, False, True]


IDS = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
CHOICES = [
    ("tpu", {}, "tpu"),
    ("tpu", {"gate": shaped(4096), "is_causal": True, "segment_ids": IDS, "logits_soft_cap": 20.0}, "tpu"),
    ("tpu", {"query": shaped(1)}, "tpu"),
    ("tpu", dict.fromkeys(("query", "key", "value"), shaped(256)), "reference"),
    ("tpu", {"bias": jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.bfloat16)}, "chunked"),
    ("gpu", {}, "cudnn"),
    ("gpu", {"segment_ids": (IDS, IDS)}, "chunked"),
    ("cpu", {}, "chunked"),
]


@pytest.mark.parametrize(("platform", "arguments", "expected"), CHOICES)
def test_the_best_that_fits_device_and_arguments(platform, arguments, expected):
    """The platform of the mesh in context decides, so that a program can be made for devices that are not here."""
    arguments = dict.fromkeys(("query", "key", "value"), shaped(4096)) | arguments
    device = AbstractDevice(device_kind="some", num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        assert choose_implementation(**arguments) == expected
        jaxpr = jax.make_jaxpr(lambda arrays: gated_dot_product_attention(**arguments | arrays))
        if expected == "tpu":
            arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
            assert "gattn_forward" in str(jaxpr(arrays))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


BROKEN = [
    ({"query": zeros(12, 8)}, ValueError, "query"),
    ({"query": zeros(2, 0, 4, 8)}, ValueError, "query"),
    ({"query": zeros(2, 12, 4, 8, dtype=np.int32)}, TypeError, "query"),
    ({"query": "text"}, TypeError, "query"),
    ({"query": zeros(2, 12, 3, 8)}, ValueError, "multiple"),
    ({"key": zeros(3, 16, 2, 8)}, ValueError, "key"),
    ({"key": zeros(2, 16, 2, 4)}, ValueError, "key"),
    ({"key": zeros(16, 2, 8)}, ValueError, "key"),
    ({"key": None}, TypeError, "key"),
    ({"value": zeros(2, 15, 2, 8)}, ValueError, "value"),
    ({"value": jnp.zeros((2, 16, 2, 8), jnp.bfloat16)}, TypeError, "value"),
    ({"bias": zeros(2, 4, 12, 15)}, ValueError, "bias"),
    ({"bias": zeros(1, 2, 4, 12, 16)}, ValueError, "bias"),
    ({"bias": zeros(1, 1, 12, 16, dtype=bool)}, TypeError, "bias"),
    ({"mask": zeros(1, 1, 12, 16)}, TypeError, "additive mask goes into bias"),
    ({"mask": zeros(2, 3, 12, 16, dtype=bool)}, ValueError, "mask"),
    ({"gate": zeros(2, 12, 2, 8)}, ValueError, "headwise"),
    ({"gate": zeros(2, 12, 4)}, ValueError, "gate"),
    ({"gate": zeros(2, 12, 4, 8, dtype=np.int32)}, TypeError, "gate"),
    ({"gate_activation": "silu"}, ValueError, "outside"),
    ({"scale": "big"}, TypeError, "scale"),
    ({"scale": np.nan}, ValueError, "scale"),
    ({"scale": True}, TypeError, "scale"),
    ({"is_causal": 1}, TypeError, "is_causal"),
    ({"query_seq_lengths": np.array([1, 2, 3])}, ValueError, "query_seq_lengths"),
    ({"key_value_seq_lengths": np.array([1.0, 2.0])}, TypeError, "key_value_seq_lengths"),
    ({"local_window_size": -1}, ValueError, "local_window_size"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size"),
    ({"local_window_size": (1.5, 2)}, ValueError, "local_window_size"),
    ({"local_window_size": "wide"}, ValueError, "local_window_size"),
    ({"segment_ids": zeros(2, 16, dtype=np.int32)}, ValueError, "query ids, key ids"),
    ({"segment_ids": (zeros(2, 16, dtype=np.int32),) * 2}, ValueError, "segment_ids"),
    ({"segment_ids": (zeros(2, 12), zeros(2, 16))}, TypeError, "segment_ids"),
    ({"segment_ids": (zeros(2, 12, dtype=np.int32),)}, ValueError, "segment_ids"),
    ({"query_offset": 1.5}, TypeError, "query_offset"),
    ({"query_offset": np.array([1, 2, 3])}, ValueError, "query_offset"),
    ({"sinks": zeros(2)}, ValueError, "sinks"),
    ({"sinks": zeros(4, dtype=np.int32)}, TypeError, "sinks"),
    ({"alibi_slopes": zeros(1, 4)}, ValueError, "alibi_slopes"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap"),
    ({"logits_soft_cap": jnp.ones(())}, TypeError, "logits_soft_cap"),
    ({"implementation": "flash"}, ValueError, "implementation"),
    ({"implementation": "tpu"}, ValueError, "query has head_dim 8"),
    ({"implementation": "gpu"}, ValueError, "implementation='gpu' cannot do this call"),
    ({"sharding": PartitionSpec("data")}, ValueError, "jax.set_mesh"),
]


@pytest.mark.parametrize(
    ("broken", "error", "words"), BROKEN, ids=[f"{i}-{next(iter(x[0]))}" for i, x in enumerate(BROKEN)]
)
def test_errors_name_the_argument_and_the_remedy(broken, error, words):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | broken
    with pytest.raises(error, match=words):
        gated_dot_product_attention(**arguments)


def test_the_attention_function_imports_jax_and_numpy_only():
    """A drop-in for anybody: with everything else made unimportable, it still runs."""
    script = """
import sys
allowed = {"gattn", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy"} | sys.stdlib_module_names
class Only:
    def __init__(self, finders):
        self.finders = finders
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed or top.startswith("_sysconfigdata"):
            return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)
sys.meta_path[:] = [Only(list(sys.meta_path))]
from gattn import attention_maps, choose_implementation, gated_dot_product_attention
import numpy as np
x = np.ones((1, 4, 2, 8), np.float32)
for implementation in ("reference", "chunked"):
    out = gated_dot_product_attention(x, x, x, gate=x, is_causal=True, implementation=implementation)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-1.0)), rtol=1e-6)
assert not [name for name in sys.modules if "pallas" in name]
ours = sorted(name for name in sys.modules if name.partition(".")[0] == "gattn")
print(*ours)
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name == "gattn" or name.startswith("gattn.kernels") for name in done.stdout.split())


def test_interpreting_is_a_part_of_the_cache_key():
    """A function compiled for the interpreter is not what runs outside of it."""
    x = np.ones((1, 16, 1, 64), np.float32)
    function = jax.jit(partial(gated_dot_product_attention, implementation="tpu"), compiler_options=QUICK)
    with api.interpreting(True):
        np.testing.assert_allclose(function(x, x, x), 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="interpret mode"):
        function(x, x, x)


def test_a_sink_that_is_off_and_a_row_that_sees_nothing_are_zeros_when_heads_are_packed():
    """-inf and -inf: 0 in the output, -inf as the log-sum-exp, and no NaN in a gradient."""
    arguments = qkv(batch=1, length=2, key_length=128, heads=2, kv_heads=1, head_dim=64)
    arguments |= {"sinks": jnp.array([-jnp.inf, 0.5]), "key_value_seq_lengths": np.array([0])}
    with api.interpreting(True):
        got = attend(arguments, "tpu")
    np.testing.assert_array_equal(got["out"], 0.0)
    np.testing.assert_array_equal(got["lse"][0], [[-np.inf, 0.5]] * 2)
    for name in ("dquery", "dkey", "dvalue"):
        np.testing.assert_array_equal(got[name], 0.0, err_msg=name)
