"""What the tests of attention share: inputs, calls compiled once, outputs with gradients, comparison."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn import gated_dot_product_attention
from gattn.kernels import api

# Compilation dominates these tests, and LLVM's optimisations dominate compilation.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}


DIFFERENTIABLE = ("query", "key", "value", "gate", "bias", "sinks", "alibi_slopes")


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(batch=2, length=40, key_length=40, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32):
    return {
        "query": normal(1, batch, length, heads, head_dim, dtype=dtype),
        "key": normal(2, batch, key_length, kv_heads, head_dim, dtype=dtype),
        "value": normal(3, batch, key_length, kv_heads, head_dim, dtype=dtype),
    }


class Setting(NamedTuple):
    """An implementation, and the smallest problem that is several blocks and several heads of a kv head to it."""

    name: str
    batch: int = 2
    length: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: Any = jnp.float32
    tolerance: float = 2e-5
    lacks: tuple[str, ...] = ()
    """Arguments that it cannot do."""

    def qkv(self, **changes):
        mine = {name: getattr(self, name) for name in ("batch", "length", "heads", "kv_heads", "head_dim", "dtype")}
        return qkv(**mine | {"key_length": changes.get("length", self.length)} | changes)

    def gate(self, width=None, **changes):
        query = self.qkv(**changes)["query"]
        return normal(4, *query.shape[:3], width or query.shape[3], dtype=query.dtype)

    def refuses(self, name, arguments):
        """Whether argument `name` is beyond this implementation; then the error says so."""
        if name in self.lacks:
            with pytest.raises(ValueError, match=name):
                gated_dot_product_attention(**arguments, implementation=self.name)
        return name in self.lacks


SETTINGS = {
    "reference": Setting("reference"),
    "chunked": Setting("chunked"),
    "tpu": Setting("tpu", length=136, head_dim=64, lacks=("bias", "mask", "alibi_slopes")),
    "gpu": Setting(
        "gpu",
        length=72,
        heads=2,
        kv_heads=1,
        head_dim=64,
        dtype=jnp.bfloat16,
        tolerance=2e-2,
        lacks=("bias", "mask", "alibi_slopes", "logits_soft_cap"),
    ),
}


def interpreted(name):
    """The setting of an implementation, whose kernels then run in Pallas' interpreters; to be iterated by a fixture."""
    if name == "gpu" and jax.__version_info__ < (0, 11):
        pytest.skip(f"the GPU kernel needs jax 0.11, and its interpreter; this is {jax.__version__}")
    with api.interpreting(name in ("tpu", "gpu")):
        yield SETTINGS[name]


def exact(arguments):
    """The same numbers in float32, for the reference."""
    return {
        x: y.astype(jnp.float32) if getattr(y, "dtype", None) in (jnp.bfloat16, jnp.float16) else y
        for x, y in arguments.items()
    }


def quick(function):
    return jax.jit(function, compiler_options=QUICK)


def call(function, arguments, **more):
    """`function(**arguments)`, compiled once per set of static arguments and shapes."""
    arguments = arguments | more
    arrays = {
        name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray) or name == "segment_ids"
    }
    static = tuple((name, x) for name, x in arguments.items() if name not in arrays)
    return _compiled(function, static)(arrays)


@cache
def _compiled(function, static):
    return quick(lambda arrays: function(**arrays, **dict(static)))


def forward(arguments, implementation, **more):
    """Output and lse alone."""
    more |= {"implementation": implementation, "return_residual": True}
    return call(gated_dot_product_attention, arguments, **more)


def attend(arguments, implementation, **more):
    """Output, lse, and the gradients of a loss of both by every differentiable argument there is."""
    return call(_out_and_grads, arguments, implementation=implementation, **more)


def _out_and_grads(**arguments):
    fixed = {name: x for name, x in arguments.items() if name not in DIFFERENTIABLE}

    def loss(arrays):
        out, lse = gated_dot_product_attention(**arrays, **fixed, return_residual=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        # An empty row's lse is -inf, and the cotangent it gets here NaN: no gradient may notice.
        return (out.astype(jnp.float32) * weights).sum() + jnp.sin(3 * lse).sum(), (out, lse)

    arrays = {name: x for name, x in arguments.items() if name in DIFFERENTIABLE}
    grads, (out, lse) = jax.grad(loss, has_aux=True)(arrays)
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}


def assert_close(actual, expected, tolerance=2e-5):
    """Every entry agrees up to `tolerance` of the largest finite one."""
    assert actual.keys() == expected.keys()
    for name in expected:
        x, y = np.asarray(actual[name], np.float64), np.asarray(expected[name], np.float64)
        assert x.shape == y.shape, name
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=name)
        finite = np.isfinite(y)
        size = max(1.0, np.abs(y[finite]).max(initial=0.0))
        np.testing.assert_allclose(x[finite] / size, y[finite] / size, rtol=0, atol=tolerance, err_msg=name)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def primitives(jaxpr):
    """The equations of a jaxpr and of everything inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from primitives(getattr(inner, "jaxpr", inner))
