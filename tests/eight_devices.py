"""Attention on a mesh of 8 CPU devices, in a process of its own: `python -m tests.eight_devices` prints what it found.

tests/test_sharded.py runs it once and has a test for each property.
"""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gattn import gated_dot_product_attention
from gattn.kernels import api, vjp
from tests.attention import normal, primitives, qkv, quick, relative_error
from tests.eight import print_all

P = PartitionSpec
LAYOUTS = {
    "batch and heads": P("data", None, "tensor"),
    "rows and heads": P(None, "data", "tensor"),
    "batch over both": P(("data", "tensor")),
    "batch alone": P("data"),
    "not at all": P(),
}
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
LIMITS = {
    "is_causal": True,
    "query_seq_lengths": np.array([32, 20, 5, 0] * 2),
    "key_value_seq_lengths": np.array([32, 20, 5, 3] * 2),
    "segment_ids": np.arange(32)[None].repeat(8, 0) // 11,
}


def mesh(kind):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))


@cache
def problem(kv_heads, head_dim=8):
    arrays = qkv(batch=8, length=32, key_length=32, heads=8, kv_heads=kv_heads, head_dim=head_dim)
    return arrays | {"gate": normal(4, 8, 32, 8, head_dim), "sinks": normal(5, 8)}


def out_and_grads(arrays, **arguments):
    def loss(arrays):
        out, lse = gated_dot_product_attention(**arrays, **arguments, return_residual=True)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.sin(lse).sum(), (out, lse)

    grads, (out, lse) = jax.grad(loss, has_aux=True)(arrays)
    return {"out": out, "lse": lse, **grads}


def spread(arrays, layout):
    """Query and gate as `layout`; what goes into every part of it in one piece."""
    where = {"query": layout, "gate": layout}
    here = jax.sharding.get_mesh()
    return {name: jax.device_put(x, NamedSharding(here, where.get(name, P()))) for name, x in arrays.items()}


@cache
def whole(kv_heads, head_dim=8):
    return quick(partial(out_and_grads, **LIMITS, implementation="reference"))(problem(kv_heads, head_dim))


def differs(kind, layout, kv_heads, implementation="chunked", head_dim=8):
    """Names of outputs and gradients that are not those of one device."""
    with jax.set_mesh(mesh(kind)), api.interpreting(True):
        told = {} if kind == AxisType.Explicit else {"sharding": layout}
        split = quick(partial(out_and_grads, **LIMITS, implementation=implementation, **told))
        got = split(spread(problem(kv_heads, head_dim), layout))
    assert got["out"].sharding.is_equivalent_to(NamedSharding(mesh(kind), layout), 4), got["out"].sharding
    wrong = []
    for name, x in whole(kv_heads, head_dim).items():
        x, y, finite = np.asarray(x), np.asarray(got[name]), np.isfinite(x)
        if not np.array_equal(np.isfinite(y), finite) or relative_error(y[finite], x[finite]) > 2e-6:
            wrong.append(name)
    return wrong


def communicates():
    """Collectives in the forward pass of a split by batch and heads."""
    with jax.set_mesh(mesh(AxisType.Auto)):
        layout = LAYOUTS["batch and heads"]
        arrays = problem(4)
        where = {"key": layout, "value": layout, "query": layout, "gate": layout, "sinks": P("tensor")}
        arrays = {x: jax.device_put(y, NamedSharding(jax.sharding.get_mesh(), where[x])) for x, y in arrays.items()}
        call = partial(gated_dot_product_attention, is_causal=True, implementation="chunked", sharding=layout)
        text = quick(lambda arrays: call(**arrays)).lower(arrays).compile().as_text()
    return sorted(set(re.findall(r"all-\w+|collective-\w+|reduce-scatter", text)))


def loops(policy):
    """How often a layer's forward or backward loop runs under a remat policy."""
    with jax.set_mesh(mesh(AxisType.Auto)):

        @partial(jax.checkpoint, policy=policy)
        def block(arrays):
            return gated_dot_product_attention(**arrays, implementation="chunked", sharding=P("data", None, "tensor"))

        jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda arrays: jnp.sin(block(arrays)).sum()))(problem(4)).jaxpr
    jaxpr = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return sum(equation.primitive.name == "scan" for equation in primitives(jaxpr))


def inside_of_shard_map():
    """A device's own arrays are taken as they are, on any mesh and without `sharding`."""
    layout = LAYOUTS["batch and heads"]
    with jax.set_mesh(mesh(AxisType.Auto)), api.interpreting(True):
        call = partial(gated_dot_product_attention, is_causal=True, implementation="tpu")
        arrays = {x: problem(8, 64)[x] for x in ("query", "key", "value")}
        split = jax.shard_map(
            lambda arrays: call(**arrays),
            in_specs=layout,
            out_specs=layout,
            axis_names={"data", "tensor"},
            check_vma=False,
        )
        got = quick(split)(arrays)
    return relative_error(got, gated_dot_product_attention(**arrays, is_causal=True, implementation="reference"))


def message(kind=AxisType.Auto, implementation="chunked", heads=8, kv_heads=8, batch=8, **arguments):
    arrays = qkv(batch=batch, length=8, key_length=8, heads=heads, kv_heads=kv_heads, head_dim=64)
    with jax.set_mesh(mesh(kind)):
        try:
            gated_dot_product_attention(**arrays, implementation=implementation, **arguments)
        except ValueError as error:
            return str(error)
    return "no error"


CHECKS = {
    **{
        f"{how}, {name}, {kv_heads} kv heads": partial(differs, kind, layout, kv_heads)
        for how, kind in KINDS.items()
        for name, layout in LAYOUTS.items()
        for kv_heads in ((8, 1) if name == "batch and heads" else (2,))
    },
    "tpu": partial(differs, AxisType.Auto, LAYOUTS["batch and heads"], 2, "tpu", head_dim=64),
    "communicates": communicates,
    "loops saving nothing": partial(loops, jax.checkpoint_policies.nothing_saveable),
    "loops saving the names": partial(loops, jax.checkpoint_policies.save_only_these_names(*vjp.CHECKPOINT_NAMES)),
    "inside of shard_map": inside_of_shard_map,
    "message: batch": partial(message, batch=3, sharding=P("data")),
    "message: heads": partial(message, heads=6, kv_heads=6, sharding=P(None, None, "tensor")),
    "message: kv heads": partial(message, heads=12, kv_heads=3, sharding=P(None, None, "tensor")),
    "message: axes": partial(message, sharding=P("model")),
    "message: head_dim": partial(message, sharding=P(None, None, None, "tensor")),
    "message: automatic": partial(message, implementation="tpu"),
}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print_all(CHECKS)
