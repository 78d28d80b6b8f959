"""What the paper measures inside a model, as pure functions: F-Attn, sink rate, M-Act, gate statistics.

Each probe of a layer returns *sums* (and the number of things summed), so that batches and hosts simply add up;
`summarise` turns the totals into the numbers of a report. Definitions (paper Sec. 4.3, Table 4):

* F-Attn: attention that a query pays to the first token of its segment, mean over heads, then layers. The first query
  of a segment is left out (it sees nothing else). exp(q . k_first * scale - lse) gives it exactly from the log-sum-exp,
  without a map. Floor: the mean of 1 / (visible keys) over the same queries, what uniform attention would give.
* Sink rate: share of heads whose F-Attn exceeds 0.3.
* M-Act: maximum |h| over tokens and channels of a block's output, mean over sequences, then over layers.
* Gate score: mean activated gate value over tokens, heads and channels, then layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SINK_THRESHOLD = 0.3
SPARSE_THRESHOLD = 0.1
HISTOGRAM_BINS = 20
HISTOGRAM_RANGES = {"sigmoid": (0.0, 1.0), "ns_sigmoid": (0.0, 1.0), "two_sigmoid": (0.0, 2.0)}  # others: (-2, 2)

Sums = dict[str, Any]


class Queries(NamedTuple):
    """Where each query's segment begins, and which queries F-Attn counts."""

    starts: Int[Array, "B T"]
    counted: Bool[Array, "B T"]


def find_queries(segment_ids: Int[Array, "B T"]) -> Queries:
    """Segments are contiguous; their first query and padding (negative ids) are not counted."""
    positions = jnp.arange(segment_ids.shape[1])
    new = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    starts = jax.lax.cummax(jnp.where(new, positions, 0), axis=1)
    return Queries(starts, (positions > starts) & (segment_ids >= 0))


def query_floor(queries: Queries) -> Sums:
    """Sums over counted queries of 1 / visible keys (`floor`) and their number (`queries`), and sequences."""
    visible = jnp.arange(queries.starts.shape[1]) - queries.starts + 1
    return {
        "floor": jnp.sum(jnp.where(queries.counted, 1.0 / visible, 0.0)),
        "queries": jnp.sum(queries.counted).astype(jnp.float32),
        "sequences": jnp.float32(visible.shape[0]),
    }


def first_token_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    starts: Int[Array, "B T"],
    scale: float,
) -> Float[Array, "B T N"]:
    """Probability each query gives to the first key of its segment, exactly, from the log-sum-exp of its logits."""
    batch, length, heads, dim = query.shape
    first = jnp.take_along_axis(key, starts[:, :, None, None], axis=1).astype(jnp.float32)
    grouped = query.reshape(batch, length, key.shape[2], -1, dim).astype(jnp.float32)
    logits = scale * jnp.einsum("btkgh,btkh->btkg", grouped, first, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(logits.reshape(batch, length, heads) - lse)


def attention_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    sinks: Float[Array, "N"] | None,
    queries: Queries,
    scale: float,
) -> Sums:
    """Per head F-Attn and the mass a sink logit absorbs; the first token's value norm, alone and over the others'."""
    counted = queries.counted[:, :, None]
    first = first_token_attention(query, key, lse, queries.starts, scale)
    norms = jnp.linalg.norm(value.astype(jnp.float32), axis=-1).mean(axis=-1)
    sums = {
        "f_attn": jnp.sum(jnp.where(counted, first, 0.0), axis=(0, 1)),
        "value_norm_first": norms[:, 0].sum(),
        "value_norm_ratio": _first_to_others(norms),
    }
    if sinks is not None:
        sums["absorbed"] = jnp.sum(jnp.where(counted, jnp.exp(sinks - lse), 0.0), axis=(0, 1))
    return sums


def hidden_sums(hidden: Float[Array, "B T D"]) -> Sums:
    """Largest |h| per sequence (`m_act`), and the first token's largest |h| over the median of the others'."""
    largest = jnp.abs(hidden.astype(jnp.float32)).max(axis=-1)
    return {"m_act": largest.max(axis=1).sum(), "first_token_ratio": _first_to_others(largest)}


def gate_sums(values: Float[Array, "B T heads width"], activation: str) -> Sums:
    """Activated gate values: mean per head, share below 0.1, histogram (values outside its range join the end bins)."""
    low, high = histogram_range(activation)
    bins = jnp.clip((values - low) / (high - low) * HISTOGRAM_BINS, 0, HISTOGRAM_BINS - 1).astype(jnp.int32)
    edges = jnp.arange(HISTOGRAM_BINS)
    return {
        "by_head": values.mean(axis=(1, 3)).sum(axis=0),
        "sparse": jnp.mean(values < SPARSE_THRESHOLD) * values.shape[0],
        "histogram": jax.vmap(lambda edge: jnp.mean(bins == edge))(edges) * values.shape[0],
    }


def histogram_range(activation: str) -> tuple[float, float]:
    """The range that `gate_sums` divides into bins."""
    return HISTOGRAM_RANGES.get(activation, (-2.0, 2.0))


def _first_to_others(per_token: Float[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(per_token[:, 0] / jnp.median(per_token[:, 1:], axis=1))


def summarise(sums: Mapping[str, Any], activations: Mapping[Any, str]) -> dict[str, Any]:
    """Plain numbers from totals: `query_floor`'s entries and `layers`, whose leaves have a leading layer axis.

    Args:
      sums: totals over all batches, as numpy.
      activations: gate position -> activation, for the histogram's edges.
    """
    layers, queries, sequences = sums["layers"], sums["queries"], sums["sequences"]
    by_head = layers["f_attn"] / queries
    return {
        "f_attn": float(by_head.mean()),
        "f_attn_floor": float(sums["floor"] / queries),
        "f_attn_by_layer": _rounded(by_head.mean(axis=1)),
        "f_attn_by_head": _rounded(by_head),
        "sink_rate": float((by_head > SINK_THRESHOLD).mean()),
        "absorbed": float((layers["absorbed"] / queries).mean()) if "absorbed" in layers else None,
        "m_act": float(layers["m_act"].mean() / sequences),
        "m_act_by_layer": _rounded(layers["m_act"] / sequences),
        "first_token_ratio_by_layer": _rounded(layers["first_token_ratio"] / sequences),
        "value_norm_first_by_layer": _rounded(layers["value_norm_first"] / sequences),
        "value_norm_ratio_by_layer": _rounded(layers["value_norm_ratio"] / sequences),
        "gates": {p: _gate_summary(gate, sequences, activations[p]) for p, gate in layers["gates"].items()},
    }


def _gate_summary(gate: Mapping[str, Any], sequences: float, activation: str) -> dict[str, Any]:
    by_head = gate["by_head"] / sequences
    low, high = histogram_range(activation)
    return {
        "mean": float(by_head.mean()),
        "mean_by_layer": _rounded(by_head.mean(axis=1)),
        "mean_by_head": _rounded(by_head),
        "share_below_0.1": float(gate["sparse"].mean() / sequences),
        "histogram": {
            "edges": _rounded(np.linspace(low, high, HISTOGRAM_BINS + 1)),
            "shares": _rounded(gate["histogram"] / sequences),
        },
    }


def _rounded(values: np.ndarray) -> Sequence[Any]:
    return np.round(np.asarray(values, np.float64), 6).tolist()
