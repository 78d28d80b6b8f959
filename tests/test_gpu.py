"""The GPU kernels in Pallas' interpreter, which hands out memory full of NaN, checks barriers and watches for races."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from gattn.kernels import gpu, masks, reference, vjp
from tests.attention import assert_close, normal, quick, relative_error

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs Mosaic GPU, and its interpreter, of jax 0.11"
)


class Case(NamedTuple):
    """One call: arrays of these sizes, a mask, a gate of this width (None: no gate)."""

    batch: int = 1
    length: int = 256
    key_length: int = 256
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    width: int | None = 64
    activation: str = "sigmoid"
    sinks: bool = False
    scale: float | None = None
    dtype: Any = jnp.bfloat16
    mask: dict[str, Any] | None = None

    def inputs(self):
        make = partial(normal, dtype=self.dtype)
        return reference.Inputs(
            make(1, self.batch, self.length, self.heads, self.head_dim),
            make(2, self.batch, self.key_length, self.kv_heads, self.head_dim),
            make(3, self.batch, self.key_length, self.kv_heads, self.head_dim),
            gate=make(4, self.batch, self.length, self.heads, self.width) if self.width else None,
            sinks=normal(5, self.heads) if self.sinks else None,
        )

    def options(self):
        return reference.Options(self.scale or self.head_dim**-0.5, gate_activation=self.activation)

    def function(self, attention):
        """Output, lse and gradients, for random cotangents of both, as a compiled function of the inputs."""

        def run(inputs):
            mask = masks.make_mask(self.length, self.key_length, **self.mask or {})
            call = partial(attention, mask=mask, options=self.options())
            (out, lse), pullback = jax.vjp(lambda inputs: call(inputs=inputs), inputs)
            dout = normal(6, *out.shape, dtype=self.dtype).astype(out.dtype)
            grads = pullback((dout, normal(7, *lse.shape)))[0]
            return {name: x for name, x in ({"out": out, "lse": lse} | grads._asdict()).items() if x is not None}

        return quick(run)

    def ours(self):
        params = plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=True)
        kernel = vjp.Kernel(partial(gpu.forward, interpret=params), partial(gpu.backward, interpret=params))
        return self.function(partial(vjp.attend, kernel))

    def exact(self):
        """The oracle's results, on the same numbers in float32."""
        return self.function(reference.attend)(jax.tree.map(lambda x: x.astype(jnp.float32), self.inputs()))


def packed(*lengths):
    """Segment ids, a negative one for padding."""
    return np.repeat([length[0] for length in lengths], [length[1] for length in lengths])


TWO_PACKINGS = np.stack([packed((3, 60), (0, 90), (-1, 50)), packed((-2, 30), (1, 120), (5, 50))])
# The interpreter takes half a second for each CUDA block.
CASES = {
    "full": Case(length=128, heads=2, kv_heads=2, width=1, activation="ns_sigmoid", scale=-0.1),
    "causal": Case(length=200, key_length=200, head_dim=128, width=128, mask={"is_causal": True}),
    "one_kv_head": Case(length=70, key_length=333, heads=8, activation="ns_sigmoid"),
    "window": Case(length=384, key_length=384, width=1, sinks=True, mask={"window": (70, 5)}),
    "segments": Case(2, 200, 200, width=None, mask={"is_causal": True, "segments": (jnp.asarray(TWO_PACKINGS),) * 2}),
    "offset": Case(2, 100, head_dim=256, width=256, mask={"is_causal": True, "query_offset": jnp.array([-60, 150])}),
    "lengths": Case(
        batch=3,
        length=120,
        dtype=jnp.float16,
        mask={"query_lengths": jnp.array([120, 50, 9]), "key_lengths": jnp.array([130, 0, 256])},
    ),
    "sinks": Case(length=130, sinks=True, mask={"is_causal": True, "query_offset": jnp.array([-64])}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_oracle(name):
    case = CASES[name]
    function = case.ours()
    got, expected = function(case.inputs()), case.exact()
    assert_close({"lse": got["lse"]}, {"lse": expected["lse"]}, 1e-6)
    assert got.keys() == expected.keys()
    for array in got.keys() - {"lse"}:
        assert relative_error(got[array], expected[array]) < (1e-2 if array == "sinks" else 6e-3), array
    if name == "offset":
        # The first 60 rows of sequence 0 have nothing to attend to.
        np.testing.assert_array_equal(got["lse"][0, :60], -np.inf)
        for array in ("out", "query", "gate"):
            np.testing.assert_array_equal(got[array][0, :60], 0, err_msg=array)
    if name == "segments":
        for array, again in function(case.inputs()).items():
            np.testing.assert_array_equal(got[array], again, err_msg=f"{array} of a second run")


def unfused(inputs, mask, options):
    """Attention, then a gate, in the precision of the inputs (scores and softmax in float32), as one writes it."""
    query, key, value, gate, *_ = inputs
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32) * options.scale
    scores = jnp.where(masks.allowed(mask, 0, query.shape[1], 0, key.shape[1]), scores, -jnp.inf)
    out = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores).astype(value.dtype), value)
    return out * jax.nn.sigmoid(gate), jax.nn.logsumexp(scores, axis=-1).transpose(0, 2, 1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_errors_are_those_of_an_unfused_computation_or_smaller(head_dim):
    """On the average and at the 99.9th percentile, relative to float32 on the same numbers."""
    case = Case(length=300, key_length=300, head_dim=head_dim, width=head_dim, mask={"is_causal": True})
    got, exact, plain = case.ours()(case.inputs()), case.exact(), case.function(unfused)(case.inputs())
    for name in got.keys() - {"lse"}:
        ours, theirs = (np.abs(np.asarray(x[name], np.float64) - exact[name]) for x in (got, plain))
        assert np.sqrt(np.mean(ours**2)) < 1.5 * np.sqrt(np.mean(theirs**2)), name
        assert np.quantile(ours, 0.999) < 1.5 * np.quantile(theirs, 0.999), name


def test_blocks_that_nobody_sees_are_neither_computed_nor_read():
    """NaN in them would show: 0 * NaN is NaN."""
    case = Case(length=512, key_length=512, width=1, mask={"is_causal": True, "window": (60, 0)})
    inputs = case.inputs()
    function = case.ours()
    clean = function(inputs)
    # The rows of the first block see no key from 128 on, and the keys from 384 on are seen by no row of other blocks.
    dirty = function(
        inputs._replace(
            query=inputs.query.at[:, 384:].set(jnp.nan),
            key=inputs.key.at[:, 384:].set(jnp.nan),
            value=inputs.value.at[:, 384:].set(jnp.nan),
        )
    )
    for name in clean:
        np.testing.assert_array_equal(dirty[name][:, :256], clean[name][:, :256], err_msg=name)
    for name in ("out", "lse", "query", "gate"):
        np.testing.assert_array_equal(dirty[name][:, :384], clean[name][:, :384], err_msg=name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bias", {"bias": jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)}),
        ("alibi_slopes", {"alibi_slopes": jax.ShapeDtypeStruct((1,), jnp.float32)}),
        ("query has dtype float32", {"query": jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float32)}),
        ("query has head_dim 96", {"query": jax.ShapeDtypeStruct((1, 256, 1, 96), jnp.bfloat16)}),
        ("gate has dtype float32", {"gate": jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float32)}),
        ("logits_soft_cap", {"logits_soft_cap": 30.0}),
        ("mask", {"dense": np.ones((1, 1, 256, 256), bool)}),
    ],
)
def test_what_it_cannot_do_is_named(name, changes):
    inputs = jax.eval_shape(Case().inputs)
    inputs = inputs._replace(**{x: y for x, y in changes.items() if x in inputs._fields})
    options = Case().options()._replace(**{x: y for x, y in changes.items() if x == "logits_soft_cap"})
    mask = masks.make_mask(256, 256, dense=changes.get("dense"))
    assert gpu.unsupported(jax.eval_shape(Case().inputs), masks.make_mask(256, 256), Case().options()) is None
    assert gpu.unsupported(inputs, mask, options).startswith(name)
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(lambda inputs: gpu.forward(inputs, mask, options), inputs)


@pytest.mark.parametrize(
    "tile", [(128, 128, (2, 1)), (192, 64, (2, 2)), (192, 128, (2, 2)), (128, 96, (2, 2)), (128, 64, (1, 2))]
)
def test_blocks_that_would_deadlock_or_miss_rows_are_refused(tile):
    with pytest.raises(ValueError, match=r"blocks\.forward"):
        gpu.BLOCKS[64]._replace(forward=gpu.Tile(*tile)).check()
    for blocks in gpu.BLOCKS.values():
        blocks.check()
