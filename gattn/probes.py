"""What the paper measures inside a model, as pure functions: F-Attn, sinks, activations, gates, the SDPA output.

Each probe of a layer returns *sums* (and the number of things summed), so that batches and hosts simply add up;
`summarise` turns the totals into the numbers of a report. Padding (negative segment ids), which follows a sequence's
text, is counted nowhere, and a sequence of nothing else is no sequence. Definitions (paper Sec. 4.3, Table 4):

* F-Attn: attention that a query pays to the first token of its segment, mean over heads, then layers. The first query
  of a segment is left out (it sees nothing else). exp(q . k_first * scale - lse) gives it exactly from the log-sum-exp,
  without a map; it is 0 where a window hides that token. Floor: the mean of 1 / (visible keys), or of 0 where it is
  hidden, over the same queries, what uniform attention would give.
* Sink rate: share of heads whose F-Attn exceeds 0.3.
* M-Act: maximum |h| over tokens and channels of a block's output, mean over sequences, then over layers.
* Kurtosis: E[(h - mean)^4] / var^2 over the D channels of one token's block output, mean over tokens. 3 for normally
  distributed channels, D for a token with one channel that outweighs all others.
* Gate score: mean activated gate value over tokens, heads and channels, then layers.
* SDPA output (paper Fig. 5): mean |y| and the share of |y| below 1e-2 and 1e-3, `before` the g1 gate (what it gets) and
  `after` it (what W_O gets). `before_times_mean_score`: y before, times the layer's mean gate score over all tokens,
  heads and channels: what a gate would do that scales everything alike; only where g1 multiplies.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SINK_THRESHOLD = 0.3
SPARSE_THRESHOLD = 0.1
SDPA_THRESHOLDS = {"below_1e-2": 1e-2, "below_1e-3": 1e-3}
HISTOGRAM_BINS = 20
HISTOGRAM_RANGES = {"sigmoid": (0.0, 1.0), "ns_sigmoid": (0.0, 1.0), "two_sigmoid": (0.0, 2.0)}  # others: (-2, 2)
# Bins of log10 |y|: the mean score is known after the last batch only, and |y| * mean < t is |y| < t / mean.
MAGNITUDE_RANGE, MAGNITUDES_PER_DECADE = (-4, 2), 40

Sums = dict[str, Any]


class Queries(NamedTuple):
    """Where each query's segment begins, which queries F-Attn counts, which are tokens rather than padding, how far
    behind its query that segment's first token is, and whether a window still shows it."""

    starts: Int[Array, "B T"]
    counted: Bool[Array, "B T"]
    tokens: Bool[Array, "B T"]
    distance: Int[Array, "B T"]
    shown: Bool[Array, "B T"]


def find_queries(segment_ids: Int[Array, "B T"], window: int = 0) -> Queries:
    """Segments are contiguous; their first query and padding (negative ids) are not counted. `window`: keys that a
    query sees, 0 for all."""
    positions = jnp.arange(segment_ids.shape[1])
    new = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    starts = jax.lax.cummax(jnp.where(new, positions, 0), axis=1)
    tokens = segment_ids >= 0
    distance = positions - starts
    shown = distance < window if window else jnp.ones_like(tokens)
    return Queries(starts, (positions > starts) & tokens, tokens, distance, shown)


def query_floor(queries: Queries) -> Sums:
    """Sum over counted queries of 1 / visible keys (`floor`), and what the other sums are divided by: `queries`,
    `tokens`, `sequences`, and those with a second token (`longer_sequences`)."""
    length = queries.tokens.sum(axis=1)
    return {
        "floor": jnp.sum(jnp.where(queries.counted & queries.shown, 1.0 / (queries.distance + 1), 0.0)),
        "queries": jnp.sum(queries.counted).astype(jnp.float32),
        "tokens": jnp.sum(length).astype(jnp.float32),
        "sequences": jnp.sum(length > 0).astype(jnp.float32),
        "longer_sequences": jnp.sum(length > 1).astype(jnp.float32),
    }


def first_token_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    queries: Queries,
    scale: float,
    alibi_slopes: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N"]:
    """Probability each query gives to the first key of its segment, exactly, from the log-sum-exp of its logits."""
    batch, length, heads, dim = query.shape
    first = jnp.take_along_axis(key, queries.starts[:, :, None, None], axis=1).astype(jnp.float32)
    grouped = query.reshape(batch, length, key.shape[2], -1, dim).astype(jnp.float32)
    logits = scale * jnp.einsum("btkgh,btkh->btkg", grouped, first, precision=jax.lax.Precision.HIGHEST)
    logits = logits.reshape(batch, length, heads)
    if alibi_slopes is not None:
        logits = logits - alibi_slopes * queries.distance[:, :, None]
    return jnp.where(queries.shown[:, :, None], jnp.exp(logits - lse), 0.0)


def attention_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    sinks: Float[Array, "N"] | None,
    queries: Queries,
    scale: float,
    alibi_slopes: Float[Array, "N"] | None = None,
) -> Sums:
    """Per head F-Attn and the mass a sink logit absorbs; the first token's value norm, alone and over the others'."""
    counted = queries.counted[:, :, None]
    first = first_token_attention(query, key, lse, queries, scale, alibi_slopes)
    norms = jnp.linalg.norm(value.astype(jnp.float32), axis=-1).mean(axis=-1)
    sums = {
        "f_attn": jnp.sum(jnp.where(counted, first, 0.0), axis=(0, 1)),
        "value_norm_first": jnp.sum(jnp.where(queries.tokens[:, 0], norms[:, 0], 0.0)),
        "value_norm_ratio": _first_to_others(norms, queries.tokens),
    }
    if sinks is not None:
        sums["absorbed"] = jnp.sum(jnp.where(counted, jnp.exp(sinks - lse), 0.0), axis=(0, 1))
    return sums


def hidden_sums(hidden: Float[Array, "B T D"], tokens: Bool[Array, "B T"]) -> Sums:
    """Largest |h| per sequence (`m_act`), the first token's largest |h| over the median of the others', kurtosis."""
    h = hidden.astype(jnp.float32)
    largest = jnp.abs(h).max(axis=-1)
    return {
        "m_act": jnp.where(tokens, largest, 0.0).max(axis=1).sum(),
        "first_token_ratio": _first_to_others(largest, tokens),
        "kurtosis": jnp.sum(jnp.where(tokens, _kurtosis(h), 0.0)),
    }


def gate_sums(values: Float[Array, "B T heads width"], activation: str, tokens: Bool[Array, "B T"]) -> Sums:
    """Activated gate values: mean per head, share below 0.1, histogram (values outside its range join the end bins)."""
    low, high = histogram_range(activation)
    bins = jnp.clip((values - low) / (high - low) * HISTOGRAM_BINS, 0, HISTOGRAM_BINS - 1).astype(jnp.int32)
    edges = jnp.arange(HISTOGRAM_BINS)
    return {
        "by_head": jnp.sum(jnp.where(tokens[:, :, None], values.mean(axis=3), 0.0), axis=(0, 1)),
        "sparse": _sum_of_shares(values < SPARSE_THRESHOLD, tokens),
        "histogram": jax.vmap(lambda edge: _sum_of_shares(bins == edge, tokens))(edges),
    }


def sdpa_sums(
    before: Float[Array, "B T N H"], after: Float[Array, "B T N H"], tokens: Bool[Array, "B T"], *, scaled: bool
) -> Sums:
    """Mean |y| and shares of small |y| before and after the g1 gate; with `scaled` the bins of log10 |y| before it."""
    sums: Sums = {}
    for name, output in (("before", before), ("after", after)):
        size = jnp.abs(output.astype(jnp.float32))
        sums[name] = {"mean_abs": _sum_of_shares(size, tokens)}
        sums[name] |= {key: _sum_of_shares(size < limit, tokens) for key, limit in SDPA_THRESHOLDS.items()}
    if scaled:
        low, high = MAGNITUDE_RANGE
        count = (high - low) * MAGNITUDES_PER_DECADE
        size = jnp.abs(before.astype(jnp.float32))
        place = jnp.ceil((jnp.log10(size) - low) * MAGNITUDES_PER_DECADE)  # bin 0: all up to 10^low; last: all beyond
        bins = jnp.clip(place, 0, count + 1).astype(jnp.int32)
        counted = jnp.broadcast_to(tokens[:, :, None, None], size.shape).astype(jnp.int32)
        counts = jnp.zeros(count + 2, jnp.int32).at[bins.ravel()].add(counted.ravel())
        sums["magnitudes"] = counts / (size.shape[2] * size.shape[3])
    return sums


def histogram_range(activation: str) -> tuple[float, float]:
    """The range that `gate_sums` divides into bins."""
    return HISTOGRAM_RANGES.get(activation, (-2.0, 2.0))


def _first_to_others(per_token: Float[Array, "B T"], tokens: Bool[Array, "B T"]) -> Float[Array, ""]:
    others = jnp.nanmedian(jnp.where(tokens, per_token, jnp.nan)[:, 1:], axis=1)
    return jnp.sum(jnp.where(tokens.sum(axis=1) > 1, per_token[:, 0] / others, 0.0))


def _kurtosis(h: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """E[(h - mean)^4] / var^2 of each token, 0 where all channels are equal. Standardised first: h^4 would overflow."""
    apart = h - h.mean(axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(apart), axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.where(variance > 0, variance, jnp.inf))
    return jnp.mean((apart * scale) ** 4, axis=-1)


def _sum_of_shares(values: Float[Array, "B T heads width"], tokens: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean over heads and channels, summed over tokens."""
    return jnp.sum(jnp.where(tokens, values.mean(axis=(2, 3)), 0.0))


def add(total: Sums, more: Sums) -> Sums:
    """The sums of two sets of batches, as numpy; the map stays that of the first."""
    added = jax.tree.map(np.add, total, more)
    added["layers"]["map"] = total["layers"]["map"]
    return added


def summarise(sums: Mapping[str, Any], activations: Mapping[Any, str]) -> dict[str, Any]:
    """Plain numbers from totals: `query_floor`'s entries and `layers`, whose leaves have a leading layer axis.

    Args:
      sums: totals over all batches, as numpy.
      activations: gate position -> activation, for the histogram's edges.
    """
    layers, queries, tokens, sequences = sums["layers"], sums["queries"], sums["tokens"], sums["sequences"]
    by_head, longer = layers["f_attn"] / queries, sums["longer_sequences"]
    return {
        "f_attn": float(by_head.mean()),
        "f_attn_floor": float(sums["floor"] / queries),
        "f_attn_by_layer": _rounded(by_head.mean(axis=1)),
        "f_attn_by_head": _rounded(by_head),
        "sink_rate": float((by_head > SINK_THRESHOLD).mean()),
        "sink_rate_by_layer": _rounded((by_head > SINK_THRESHOLD).mean(axis=1)),
        "absorbed": float((layers["absorbed"] / queries).mean()) if "absorbed" in layers else None,
        "m_act": float(layers["m_act"].mean() / sequences),
        "m_act_by_layer": _rounded(layers["m_act"] / sequences),
        "kurtosis_by_layer": _rounded(layers["kurtosis"] / tokens),
        "first_token_ratio_by_layer": _rounded(layers["first_token_ratio"] / longer),
        "value_norm_first_by_layer": _rounded(layers["value_norm_first"] / sequences),
        "value_norm_ratio_by_layer": _rounded(layers["value_norm_ratio"] / longer),
        "gates": {p: _gate_summary(gate, tokens, activations[p]) for p, gate in layers["gates"].items()},
        "sdpa": _sdpa_summary(layers["sdpa"], layers["gates"].get("g1"), tokens),
    }


def _gate_summary(gate: Mapping[str, Any], tokens: float, activation: str) -> dict[str, Any]:
    by_head = gate["by_head"] / tokens
    low, high = histogram_range(activation)
    return {
        "mean": float(by_head.mean()),
        "mean_by_layer": _rounded(by_head.mean(axis=1)),
        "mean_by_head": _rounded(by_head),
        "share_below_0.1": float(gate["sparse"].mean() / tokens),
        "share_below_0.1_by_layer": _rounded(gate["sparse"] / tokens),
        "histogram": {
            "edges": _rounded(np.linspace(low, high, HISTOGRAM_BINS + 1)),
            "shares": _rounded(gate["histogram"] / tokens),
        },
    }


def _sdpa_summary(sdpa: Mapping[str, Any], gate: Mapping[str, Any] | None, tokens: float) -> dict[str, Any]:
    """Lists over layers; `before_times_mean_score` is None unless a g1 gate multiplies."""
    out: dict[str, Any] = {
        name: {
            "mean_abs_by_layer": _significant(sdpa[name]["mean_abs"] / tokens),
            **{f"{key}_by_layer": _rounded(sdpa[name][key] / tokens) for key in SDPA_THRESHOLDS},
        }
        for name in ("before", "after")
    }
    if gate is None or "magnitudes" not in sdpa:
        return {**out, "before_times_mean_score": None}
    score = np.abs(gate["by_head"].mean(axis=1) / tokens)
    edges = np.arange(MAGNITUDE_RANGE[0] * MAGNITUDES_PER_DECADE, MAGNITUDE_RANGE[1] * MAGNITUDES_PER_DECADE + 1)
    below = np.cumsum(sdpa["magnitudes"], axis=1)[:, :-1] / tokens  # share of |y| up to each edge
    scaled = {"mean_abs_by_layer": _significant(sdpa["before"]["mean_abs"] / tokens * score)}
    for key, limit in SDPA_THRESHOLDS.items():
        # A score of 0 takes every value below any limit.
        wanted = np.log10(limit / np.maximum(score, 1e-30)) * MAGNITUDES_PER_DECADE
        shares = [np.interp(w, edges, c, right=1.0) for w, c in zip(wanted, below, strict=True)]
        scaled[f"{key}_by_layer"] = _rounded(np.array(shares))
    return {**out, "before_times_mean_score": scaled}


def _significant(values: np.ndarray) -> Sequence[float]:
    return [float(f"{value:.6g}") for value in values]


def _rounded(values: np.ndarray) -> Sequence[Any]:
    return np.round(np.asarray(values, np.float64), 6).tolist()
