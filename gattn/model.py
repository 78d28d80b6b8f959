"""The decoder: embedding, blocks scanned over depth, final norm, output matrix; and its parameter and FLOP counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from gattn import probes, sharding
from gattn.config import ConfigError, ModelConfig, override
from gattn.gates import normal
from gattn.kernels.vjp import CHECKPOINT_NAMES
from gattn.layers import Block, Context, Memory, RMSNorm, Rope
from gattn.rope import rope_table

REMAT = {
    "none": jax.checkpoint_policies.save_anything_except_these_names(sharding.GATHERED),
    "attention": jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Decoder(nnx.Module):
    """A decoder-only transformer. `blocks` holds every layer's parameters with a leading axis of length L, or, where
    they are not `stacked` (see `unstack`), layer after layer."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, *, stacked: bool = True):
        self.model = model
        self.embedding = normal(rngs, (model.vocab_size, model.d_model), model.init_std)
        if model.position == "learned":
            self.positions = normal(rngs, (model.max_seq_len, model.d_model), model.init_std)
        self.blocks: Any
        if stacked:
            self.blocks = nnx.split_rngs(splits=model.num_layers)(nnx.vmap(lambda rngs: Block(model, rngs)))(rngs)
        else:
            self.blocks = nnx.List(Block(model, rngs) for _ in range(model.num_layers))
        self.final_norm = RMSNorm(model.d_model, model.norm_eps)
        if not model.tied_embeddings:
            self.output = normal(rngs, (model.d_model, model.vocab_size), model.init_std)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        probe: bool = False,
    ) -> tuple[Float[Array, "B T D"], probes.Sums]:
        """Final hidden states (normalised, before the output matrix) and, with `probe`, the sums of every probe.

        The probes' `layers` also hold `map` [L, N, M, M]: attention of the first sequence's first M tokens, per head.
        Of experts, with `probe` or without, the routers' sums by layer stand under `moe` (`gattn.moe.Experts`).
        """
        model, length = self.model, tokens.shape[1]
        hidden = sharding.embed(self.embedding[...], tokens, model.dtype)
        if model.position == "learned":
            hidden = hidden + self.positions[:length].astype(model.dtype)
        queries = None
        if probe and model.kept_first:
            raise ConfigError("model.kept_first", model.kept_first, "probes read a model without it: set it to 0")
        if probe:
            ids = jnp.zeros_like(tokens) if segment_ids is None else segment_ids
            queries = probes.find_queries(ids, model.window)
        ropes = _ropes(model, length, np.arange(length))
        hidden, layers = self._run_blocks(hidden, Context(segment_ids, queries, *ropes))
        aux = {"moe": layers.pop("moe")} if model.num_experts else {}
        if queries is not None:
            aux |= {**probes.query_floor(queries), "layers": layers}
        return self.final_norm(hidden), aux

    def extend(
        self, tokens: Int[Array, "B T"], memory: tuple[Memory, ...], start: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T D"], tuple[Memory, ...]]:
        """Final hidden states of tokens that follow `start` others, which `memory` (of `new_memory`) holds; and the
        memory with them in it. Only of a decoder whose layers are not stacked.

        Of a row that has fewer tokens than T the rest may be anything: what it leaves in memory stands behind the row's
        text, is seen by none of it, and is written over when the row goes on.
        """
        model, length = self.model, memory[0][0].shape[1]
        hidden = sharding.embed_rows(self.embedding[...], tokens, model.dtype)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        if model.position == "learned":
            hidden = hidden + self.positions[...][positions].astype(model.dtype)
        context = Context(None, None, *_ropes(model, length, positions), start)
        grown: list[Memory] = []
        for block, past in zip(self.blocks, memory, strict=True):
            graph, state = nnx.split(block)
            whole = nnx.merge(graph, sharding.gather(state, model.dtype))
            hidden, aux = whole(sharding.constrain(hidden, sharding.BATCH), context, past)
            key, value = (sharding.constrain(x, sharding.BATCH, None, "tensor") for x in aux["memory"])
            grown.append((key, value))
        return self.final_norm(hidden), tuple(grown)

    def output_matrix(self) -> Float[Array, "D V"]:
        """The matrix from final hidden states to logits."""
        return self.embedding[...].T if self.model.tied_embeddings else self.output[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of all positions at once: for short inputs; training goes through `gattn.loss`."""
        matrix = self.output_matrix().astype(hidden.dtype)
        return jnp.matmul(hidden, matrix, preferred_element_type=jnp.float32)

    def _run_blocks(self, hidden: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T D"], Any]:
        graph, stacked = nnx.split(self.blocks)

        def layer(hidden, state):
            block = nnx.merge(graph, sharding.gather(state, self.model.dtype))
            hidden, aux = block(sharding.constrain(hidden, sharding.BATCH, "context"), context)
            return sharding.constrain(hidden, sharding.BATCH, "context"), aux

        if self.model.remat != "none" or sharding.parts(*sharding.SHARDS) > 1:
            layer = jax.checkpoint(layer, policy=REMAT[self.model.remat])
        if self.model.scan_layers:
            return jax.lax.scan(layer, hidden, stacked)
        aux = []
        for i in range(self.model.num_layers):
            hidden, layer_aux = layer(hidden, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            aux.append(layer_aux)
        return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *aux)


def _ropes(model: ModelConfig, length: int, positions: Any) -> tuple[Rope | None, Rope | None]:
    """RoPE's tables, of `length` positions, at these ones; and with `kept_first` at the places in the cache that
    queries there have."""
    if model.position != "rope":
        return None, None
    scaling = model.rope_scaling, model.rope_factor, model.rope_original_length
    cos, sin = rope_table(length, model.head_dim, model.rope_theta, *scaling)

    def at(places: Any) -> Rope:
        if isinstance(places, np.ndarray):  # then they stay constants
            return cos[places], sin[places]  # type: ignore[return-value]
        return jnp.asarray(cos)[places], jnp.asarray(sin)[places]

    if not model.kept_first:
        return at(positions), None
    xp = np if isinstance(positions, np.ndarray) else jnp
    return at(positions), at(xp.minimum(positions, model.kept_first + model.window - 1))


def unstack(model: ModelConfig, params: nnx.State) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder for `Decoder.extend`: its layers apart, so that no step copies them out of a stack, and its matrices in
    the dtype that they are used in."""
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(params=0), stacked=False)))[0]

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        used_in_float32 = leaf.ndim < 2 or path[-1] in ("router", "score", "bias")
        return leaf if used_in_float32 else leaf.astype(model.dtype)

    @jax.jit
    def apart(params):
        out = []
        for path, leaf in nnx.to_flat_state(params):
            if path[0] != "blocks":
                out.append((path, leaf.replace(cast(path, leaf[...]))))
                continue
            for i in range(model.num_layers):
                piece = cast(path, leaf[...][i])
                if sharding.is_split():
                    piece = jax.lax.with_sharding_constraint(piece, sharding.layer_spec(".".join(map(str, path))))
                out.append((("blocks", i, *path[1:]), leaf.replace(piece)))
        return nnx.from_flat_state(out)

    return graph, apart(params)


def new_memory(model: ModelConfig, batch: int, length: int) -> tuple[Memory, ...]:
    """An empty memory of `length` positions for each of `batch` rows, layer by layer."""
    shape = (batch, length, model.num_kv_heads, model.head_dim)
    return tuple((jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)) for _ in range(model.num_layers))


def init(model: ModelConfig, seed: int, mesh: Mesh | None = None) -> nnx.State:
    """The decoder's float32 parameters drawn from `jax.random.key(seed)`, made under one jit; the same on any mesh."""

    def draw(key):
        return nnx.split(Decoder(model, nnx.Rngs(params=key)))[1]

    # Runs once: on a CPU, optimising the random generator of every shape makes compiling take 5 s instead of 1.5.
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    where = None if mesh is None else sharding.shardings(mesh, abstract(model)[1])
    return jax.jit(draw, compiler_options=options, out_shardings=where)(jax.random.key(seed))


def abstract(model: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure, and its parameters as `jax.ShapeDtypeStruct`s; allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(params=0))))


def param_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters: `params` in all, `non_embedding_params`, `active_params` (of which a token uses every one: of the
    experts, those it goes to), `gate_params`, and `param_difference` to the plain model.

    Counted on the model itself, without allocating it. Embeddings are the token table, learned positions and an untied
    output matrix.
    """
    shapes = nnx.to_pure_dict(abstract(model)[1])
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    embeddings = sum(shapes[name].size for name in ("embedding", "positions", "output") if name in shapes)
    gate = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]["attention"].get("gates", {})))
    experts = sum(shapes["blocks"]["experts"][name].size for name in ("gate", "up", "down")) if model.num_experts else 0
    idle = experts - experts * model.experts_per_token // model.num_experts if experts else 0
    plain = override(
        model, {"gates": (), "softmax": "standard", "switch_heads": 0, "switch_top_k": 0, "switch_keys": False}
    )
    difference = total - param_counts(plain)["params"] if plain != model else 0
    return {
        "params": total,
        "non_embedding_params": total - embeddings,
        "active_params": total - idle,
        "gate_params": gate,
        "param_difference": difference,
    }


def param_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's dotted path and shape; those of `blocks` have a leading layer axis."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(abstract(model)[1]))
    return {".".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Training FLOPs per token: 6 per parameter of a matrix product (the output matrix included, the lookups not; of
    the experts those a token goes to), and 12 L N H times the mean number of visible keys, (T + 1) / 2, for causal
    attention. Recomputation is not counted."""
    counts = param_counts(model)
    idle = counts["params"] - counts["active_params"]
    products = counts["non_embedding_params"] - idle + model.vocab_size * model.d_model
    attention = model.num_layers * model.num_heads * model.head_dim * (seq_len + 1) / 2
    return 6.0 * products + 12.0 * attention
