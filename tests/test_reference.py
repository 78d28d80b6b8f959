"""The reference against a NumPy transcription of the equations, its gradient against their slope."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from gattn import attention_maps
from tests.attention import assert_close, attend, call, forward, normal, qkv

pytestmark = pytest.mark.usefixtures("small_blocks")


def loops(query, key, value, *, gate=None, bias=None, sinks=None, alibi_slopes=None, sees, scale, cap=None, floor=0.0):
    """Attention in float64, one query row at a time; sees(b, n, t, s) says which keys count."""
    batch, length, heads, head_dim = query.shape
    group = heads // key.shape[2]
    out, lse = np.zeros((batch, length, heads, head_dim)), np.full((batch, length, heads), -np.inf)
    for b, t, n in np.ndindex(batch, length, heads):
        keys = [s for s in range(key.shape[1]) if sees(b, n, t, s)]
        logits = np.array([query[b, t, n] @ key[b, s, n // group] * scale for s in keys])
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        if bias is not None:
            full = np.broadcast_to(bias, (batch, heads, length, key.shape[1]))
            logits = logits + np.array([full[b, n, t, s] for s in keys])
        if alibi_slopes is not None:
            logits = logits - alibi_slopes[n] * np.array([abs(t + sees.offset - s) for s in keys])
        weights = np.exp(logits)
        total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[n]))
        if total == 0.0:
            continue
        lse[b, t, n] = math.log(total)
        for weight, s in zip(weights, keys, strict=True):
            out[b, t, n] += weight / total * value[b, s, n // group]
    if gate is not None:
        out = out * (floor + (1 - floor) / (1 + np.exp(-gate)))
    return out, lse


class Sees:
    """Who sees whom, straight from the words of the docstring."""

    def __init__(self, causal=False, window=None, lengths=None, key_lengths=None, segments=None, offset=0, mask=None):
        self.causal, self.window, self.lengths, self.key_lengths = causal, window, lengths, key_lengths
        self.segments, self.offset, self.mask = segments, offset, mask

    def __call__(self, b, n, t, s):
        position = t + self.offset
        return not (
            (self.causal and s > position)
            or (self.window is not None and not position - self.window[0] <= s <= position + self.window[1])
            or (self.lengths is not None and t >= self.lengths[b])
            or (self.key_lengths is not None and s >= self.key_lengths[b])
            or (self.segments is not None and not self.segments[0][b][t] == self.segments[1][b][s] >= 0)
            or (self.mask is not None and not self.mask[b, 0, t, s])
        )

    def arguments(self):
        found = {
            "is_causal": self.causal,
            "local_window_size": self.window,
            "query_seq_lengths": self.lengths,
            "key_value_seq_lengths": self.key_lengths,
            "segment_ids": self.segments and tuple(map(np.array, self.segments)),
            "query_offset": self.offset,
            "mask": self.mask,
        }
        return {name: np.array(x) if isinstance(x, list) else x for name, x in found.items()}


SEGMENTS = (
    [[0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 2, 2, 2]],
    [[0, 0, 0, 1, 1, 2, -1, -1, -1], [3, 3, 2, 2, 2, 2, 2, 2, 3]],
)


TRANSCRIBED = {
    "plain": (Sees(), {}),
    "causal, offset": (Sees(causal=True, offset=2), {"gate": "elementwise", "alibi_slopes": 0.3}),
    "negative offset": (Sees(causal=True, offset=-3), {"gate": "headwise", "alibi_slopes": 0.3}),
    "window": (Sees(window=(2, 1)), {"sinks": 0.5, "gate": "ns_sigmoid"}),
    "causal window, cap": (Sees(causal=True, window=(3, 3)), {"cap": 1.5, "bias": (1, 4, 7, 1)}),
    "lengths": (Sees(lengths=[7, 4], key_lengths=[0, 6]), {"bias": (2, 1, 1, 9)}),
    "lengths, sinks": (Sees(lengths=[7, 4], key_lengths=[0, 6]), {"sinks": 0.5, "cap": 2.0, "bias": (2, 4, 7, 9)}),
    "segments": (Sees(segments=SEGMENTS), {"gate": "elementwise", "scale": 0.2}),
    "mask": (Sees(mask=np.random.default_rng(0).random((2, 1, 7, 9)) < 0.3), {"sinks": -1.0}),
}


def transcribed_case(name):
    sees, extras = TRANSCRIBED[name]
    rng = np.random.default_rng(7)
    shapes = {"query": (2, 7, 4, 3), "key": (2, 9, 2, 3), "value": (2, 9, 2, 3)}
    if "gate" in extras:
        shapes["gate"] = (2, 7, 4, 1 if extras["gate"] == "headwise" else 3)
    if "bias" in extras:
        shapes["bias"] = extras["bias"]
    arrays = {argument: rng.standard_normal(shape) for argument, shape in shapes.items()}
    arrays |= {x: extras[x] * np.arange(1.0, 5.0) for x in ("sinks", "alibi_slopes") if x in extras}
    scale, cap, ns = extras.get("scale"), extras.get("cap"), extras.get("gate") == "ns_sigmoid"
    written_out = partial(loops, sees=sees, scale=3**-0.5 if scale is None else scale, cap=cap, floor=0.5 * ns)
    arguments = sees.arguments() | {"scale": scale, "logits_soft_cap": cap}
    return arrays, written_out, arguments | {"gate_activation": "ns_sigmoid" if ns else "sigmoid"}


@pytest.mark.parametrize("name", TRANSCRIBED)
def test_reference_is_the_equations_and_its_gradient_their_slope(name):
    arrays, written_out, arguments = transcribed_case(name)
    got = attend({x: jnp.asarray(y, jnp.float32) for x, y in arrays.items()} | arguments, "reference")
    out, lse = written_out(**arrays)
    assert_close({"out": got["out"], "lse": got["lse"]}, {"out": out, "lse": lse}, 2e-6)

    def loss(arrays):
        out, lse = written_out(**arrays)
        finite = np.where(lse == -np.inf, 0.0, lse)
        return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum() + np.sin(3 * finite).sum()

    rng, step = np.random.default_rng(8), 1e-5
    for argument, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ahead, behind = (loss(arrays | {argument: x + sign * step * direction}) for sign in (1, -1))
        slope = (np.asarray(got[f"d{argument}"], np.float64) * direction).sum()
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=2e-4, abs=2e-5), argument


def test_maps_are_the_weights_of_the_output():
    arguments = qkv() | {"is_causal": True, "local_window_size": (5, 0), "sinks": normal(4, 4), "query_offset": -2}
    maps = call(attention_maps, {x: y for x, y in arguments.items() if x != "value"})
    out, lse = forward(arguments, "reference")
    assert maps.shape == (2, 4, 40, 40)
    assert maps.dtype == jnp.float32
    grouped = maps.reshape(2, 2, 2, 40, 40)
    summed = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, arguments["value"], precision="highest").reshape(out.shape)
    np.testing.assert_allclose(summed, out, atol=2e-6)
    sink_share = jnp.exp(arguments["sinks"][:, None] - lse.transpose(0, 2, 1))
    np.testing.assert_allclose(maps.sum(-1) + sink_share, 1.0, atol=1e-5)
    np.testing.assert_array_equal(maps[:, :, :2], 0.0)
