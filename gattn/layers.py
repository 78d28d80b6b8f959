"""Layers of the decoder: norm, SwiGLU, and attention with gates at any of the five positions.

B batch, T query length, S key length, D model, N query heads, K kv heads, H head_dim, F ffn, V vocabulary. Modules hold
float32 parameters and nothing else; every call is a pure function of them. Compute happens in `ModelConfig.dtype`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gattn import gates, probes, sharding
from gattn.config import GateSpec, ModelConfig
from gattn.gates import Gate, multiply, normal, project
from gattn.kernels.api import attention_maps, gated_dot_product_attention
from gattn.moe import Experts
from gattn.rope import alibi_slopes, apply_rope

MAP_LENGTH = 48  # tokens of the attention maps that probes return


Rope = tuple[Array, Array]
"""cos and sin, [T, H / 2] or [B, T, H / 2]."""
Memory = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]
"""Keys (normed and rotated) and values of one layer's past, by position; what lies beyond it may be anything finite."""


class Context(NamedTuple):
    """What all layers share in one forward pass."""

    segment_ids: Int[Array, "B T"] | None
    queries: probes.Queries | None
    """The queries that probes count; None unless probing."""
    rope: Rope | None
    """cos and sin at the tokens' positions."""
    kept_rope: Rope | None = None
    """With `kept_first`, those at the queries' places in the cache."""
    start: Int[Array, "B"] | None = None
    """Positions of the first tokens here, with a memory; None: 0."""


def rms_norm(x: Float[Array, "*b C"], gain: Float[Array, "C"] | None, eps: float) -> Float[Array, "*b C"]:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis, in float32; returns x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed if gain is None else normed * gain).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a gain that starts at one."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.gain = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "*b C"]) -> Float[Array, "*b C"]:
        return rms_norm(x, self.gain[...], self.eps)


class Linear(nnx.Module):
    """A matrix without bias over the last axis; `features` may have several axes (heads, head_dim)."""

    def __init__(self, inputs: int, features: tuple[int, ...], model: ModelConfig, rngs: nnx.Rngs):
        self.kernel = normal(rngs, (inputs, *features), model.init_std)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T *features"]:
        return project(x, {"": self.kernel[...]})[""]


class MLP(nnx.Module):
    """SwiGLU: (silu(x W_gate) * x W_up) W_down, of width `ModelConfig.ffn_width`."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.gate = Linear(model.d_model, (model.ffn_width,), model, rngs)
        self.up = Linear(model.d_model, (model.ffn_width,), model, rngs)
        self.down = Linear(model.ffn_width, (model.d_model,), model, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Causal grouped-query attention with gates.

    Order (paper Fig. 1): projections, g4 / g3 / g2 on query / key / value, QK-norm, RoPE, softmax attention, its
    parameter-free transform, g1, W_O, g5. All scores are computed from the block's normalised input x. With
    `switch_heads` (paper Table 6) a kv head's value, and key, is a sum over the projections that its router chose.
    """

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.model = model
        choices = (model.switch_heads,) if model.switch_heads else ()
        key_choices = choices if model.switch_keys else ()
        self.query = Linear(model.d_model, (model.num_heads, model.head_dim), model, rngs)
        self.key = Linear(model.d_model, (model.num_kv_heads, *key_choices, model.head_dim), model, rngs)
        self.value = Linear(model.d_model, (model.num_kv_heads, *choices, model.head_dim), model, rngs)
        if model.switch_heads:
            self.switch = Linear(model.d_model, (model.num_kv_heads, model.switch_heads), model, rngs)
        self.out = Linear(model.num_heads * model.head_dim, (model.d_model,), model, rngs)
        if model.qk_norm:
            self.query_norm = RMSNorm(model.head_dim, model.norm_eps)
            self.key_norm = RMSNorm(model.head_dim, model.norm_eps)
        if model.softmax == "sink_logit":
            self.sink = nnx.Param(jnp.zeros((model.num_heads,), jnp.float32))
        self.gates = nnx.Dict({spec.position: Gate(spec, model, rngs) for spec in model.gates})

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, memory: Memory | None = None
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """The sublayer's output; with `context.queries` its probes' sums; and the `memory`, if there is one, with x in
        it."""
        model = self.model
        query, key, value, scores = self.projections(x)
        query = self._gated("g4", query, scores)
        key = self._gated("g3", key, scores)
        value = self._gated("g2", value, scores)
        if model.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        unrotated = query
        if context.rope is not None:
            query, key = apply_rope(query, *context.rope), apply_rope(key, *context.rope)
        aux: dict[str, Any] = {}
        if memory is not None:
            key, value = aux["memory"] = remember(memory, (key, value), self._start(context, len(x)))

        spec = self._spec("g1")
        beyond = 0 < model.kept_first < key.shape[1]  # there is something that is not kept for good
        fused = spec is not None and gates.fuses(spec) and model.sdpa_transform == "none" and not beyond
        if beyond:
            kept_query = unrotated if context.kept_rope is None else apply_rope(unrotated, *context.kept_rope)
            attended, lse = self._attend_kept(query, kept_query, key, value, context)
        else:
            attended, lse = self._attend(query, key, value, context, scores["g1"] if fused else None)
        if model.sdpa_transform == "rmsnorm":
            attended = rms_norm(attended, None, model.norm_eps)
        elif model.sdpa_transform == "silu":
            attended = jax.nn.silu(attended)
        gated = attended if fused else self._gated("g1", attended, scores)
        out = self._gated("g5", multiply(gated, self.out.kernel[...], 2), scores)

        if context.queries is not None:
            aux |= self._probe(query, key, value, lse, scores, context.queries, context.segment_ids)
            # A fused gate leaves no ungated output behind: only probes pay for computing it again.
            before = self._attend(query, key, value, context, None)[0] if fused else attended
            scaled = spec is not None and spec.op == "multiply"
            aux["sdpa"] = probes.sdpa_sums(before, gated, context.queries.tokens, scaled=scaled)
        return out, aux

    def _attend(self, query, key, value, context: Context, gate: Array | None) -> tuple[Array, Array]:
        """Softmax attention and its log-sum-exp, with the g1 gate in it where it is fused."""
        spec = self._spec("g1")
        attended, lse = gated_dot_product_attention(
            query,
            key,
            value,
            gate=gate,
            gate_activation="sigmoid" if spec is None or gate is None else spec.activation,
            query_offset=0 if context.start is None else context.start,
            segment_ids=context.segment_ids,
            implementation=None if self.model.attention == "auto" else self.model.attention,
            sharding=self._layout(context),
            return_residual=True,
            **self._softmax(),
        )
        return attended, lse

    def _softmax(self) -> dict[str, Any]:
        """What shapes the softmax beside queries and keys."""
        window = self.model.window
        return {
            "is_causal": True,
            "local_window_size": (window - 1, 0) if window else None,
            "sinks": self.sinks(),
            "alibi_slopes": self.slopes(),
        }

    def _start(self, context: Context, batch: int) -> Int[Array, "B"]:
        return jnp.zeros(batch, jnp.int32) if context.start is None else context.start

    def _layout(self, context: Context) -> PartitionSpec | None:
        layout = sharding.attention_layout()
        return layout if layout is None or context.start is None else PartitionSpec(layout[0], None, layout[2])

    def _attend_kept(self, query, kept_query, key, value, context: Context) -> tuple[Array, Array]:
        """`_attend` without a gate over a window, and beside it the first `kept_first` keys, which `kept_query` sees
        from its place in the cache: two softmaxes, put together by their log-sum-exp."""
        count, batch, rows = self.model.kept_first, query.shape[0], jnp.arange(query.shape[1])
        start = self._start(context, batch)
        place = jnp.minimum(start[:, None] + rows, count + self.model.window - 1)
        bias, ids = None, context.segment_ids
        shared: dict[str, Any] = {"sharding": self._layout(context), "return_residual": True}
        if (slopes := self.slopes()) is not None:
            bias = -slopes[:, None, None] * (place[:, None, :, None] - jnp.arange(count))
        first, first_lse = gated_dot_product_attention(
            kept_query,
            key[:, :count],
            value[:, :count],
            bias,
            is_causal=True,
            query_offset=start,
            segment_ids=None if ids is None else (ids, ids[:, :count]),
            sinks=self.sinks(),
            **shared,
        )
        rest, rest_lse = gated_dot_product_attention(
            query,
            key[:, count:],
            value[:, count:],
            query_offset=start - count,
            segment_ids=None if ids is None else (ids, ids[:, count:]),
            **self._softmax() | {"sinks": None},
            **shared,
        )
        lse = jnp.logaddexp(first_lse, rest_lse)
        finite = jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]
        parts = ((first, first_lse), (rest, rest_lse))
        attended = sum((out * jnp.exp(part[..., None] - finite) for out, part in parts), jnp.float32(0))
        return attended.astype(query.dtype), lse

    def projections(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, dict[str, Array]]:
        """Query, key and value before gates and norms, and each gate's scores by position."""
        names = ("query", "key", "value", *(("switch",) if self.model.switch_heads else ()))
        kernels = {name: getattr(self, name).kernel[...] for name in names}
        kernels |= {p: gate.kernel[...] for p, gate in self.gates.items() if gate.spec.source == "input"}
        products = project(x, kernels)
        scores = {position: gate.scores(x, products.get(position)) for position, gate in self.gates.items()}
        key, value = products["key"], products["value"]
        if self.model.switch_heads:
            weights = switch(products["switch"], self.model.switch_top_k).astype(x.dtype)
            value = jnp.einsum("btke,btkeh->btkh", weights, value)
            key = jnp.einsum("btke,btkeh->btkh", weights, key) if self.model.switch_keys else key
        return products["query"], key, value, scores

    def sinks(self) -> Float[Array, "N"] | None:
        """Logits that only the softmax denominator sees: zeros for off-by-one, learned, or none."""
        if self.model.softmax == "standard":
            return None
        return self.sink[...] if self.model.softmax == "sink_logit" else jnp.zeros(self.model.num_heads, jnp.float32)

    def slopes(self) -> Float[Array, "N"] | None:
        """ALiBi's, where it tells the positions."""
        return jnp.asarray(alibi_slopes(self.model.num_heads)) if self.model.position == "alibi" else None

    def _spec(self, position: str) -> GateSpec | None:
        return next((spec for spec in self.model.gates if spec.position == position), None)

    def _gated(self, position: str, y: Array, scores: dict[str, Array]) -> Array:
        spec = self._spec(position)
        return y if spec is None else gates.apply(spec, y, scores[position])

    def _probe(self, query, key, value, lse, scores, queries: probes.Queries, segment_ids) -> probes.Sums:
        scale = self.model.head_dim**-0.5
        aux = probes.attention_sums(query, key, value, lse, self.sinks(), queries, scale, self.slopes())
        aux["gates"] = {}
        for spec in self.model.gates:
            values = gates.activate(spec, scores[spec.position])
            values = values[:, :, None] if spec.position == "g5" else values
            aux["gates"][spec.position] = probes.gate_sums(values, spec.activation, queries.tokens)
        one = slice(1), slice(MAP_LENGTH)  # causal, so the map of a sequence's beginning needs its beginning only
        segment_ids = None if segment_ids is None else segment_ids[one]
        maps = attention_maps(query[one], key[one], segment_ids=segment_ids, **self._softmax())
        aux["map"] = maps[0]
        return aux


def remember(memory: Memory, new: Memory, start: Int[Array, "B"]) -> Memory:
    """Keys and values with new ones [B, T, K, H] written from each row's start on."""

    def write(rows, more, first):
        return jax.lax.dynamic_update_slice_in_dim(rows, more.astype(rows.dtype), first, 0)

    key, value = (jax.vmap(write)(old, more, start) for old, more in zip(memory, new, strict=True))
    return key, value


def switch(scores: Float[Array, "B T K E"], top_k: int) -> Float[Array, "B T K E"]:
    """Sigmoid of the `top_k` largest scores, 0 for the others, in float32: weights that need not sum to one, after
    SwitchHead (arXiv 2312.07987). With one choice it is the headwise value gate."""
    weights = jax.nn.sigmoid(scores.astype(jnp.float32))
    _, chosen = jax.lax.top_k(weights, top_k)
    return weights * jax.nn.one_hot(chosen, scores.shape[-1]).sum(axis=-2)


class Block(nnx.Module):
    """One pre-norm layer: h + attention(norm(h)), then h + MLP(norm(h)), or experts in place of the MLP; sandwich norm
    normalises what is added too."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.model = model
        self.attention_norm = RMSNorm(model.d_model, model.norm_eps)
        self.attention = Attention(model, rngs)
        self.mlp_norm = RMSNorm(model.d_model, model.norm_eps)
        if model.num_experts:
            self.experts = Experts(model, rngs)
        else:
            self.mlp = MLP(model, rngs)
        if model.sandwich_norm:
            self.attention_out_norm = RMSNorm(model.d_model, model.norm_eps)
            self.mlp_out_norm = RMSNorm(model.d_model, model.norm_eps)

    def __call__(
        self, hidden: Float[Array, "B T D"], context: Context, memory: Memory | None = None
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """The layer's output; what attention returns beside its own; and of experts, under `moe`, their sums."""
        attended, aux = self.attention(self.attention_norm(hidden), context, memory)
        hidden = hidden + self._clipped(self.attention_out_norm(attended) if self.model.sandwich_norm else attended)
        if self.model.num_experts:
            transformed, aux["moe"] = self.experts(self.mlp_norm(hidden))
        else:
            transformed = self.mlp(self.mlp_norm(hidden))
        hidden = hidden + self._clipped(self.mlp_out_norm(transformed) if self.model.sandwich_norm else transformed)
        if context.queries is not None:
            aux |= probes.hidden_sums(hidden, context.queries.tokens)
        return hidden, aux

    def _clipped(self, out: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        limit = self.model.clip_outputs
        return jnp.clip(out, -limit, limit) if limit else out
