"""The jitted steps: one optimiser step over a batch, one evaluation of a batch; pure functions of pytrees."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from gattn import model, moe, optim, probes, sharding
from gattn.config import Config, ModelConfig
from gattn.loss import cross_entropy

METRICS = ("loss", "grad_norm", "update_ratio", "learning_rate", "z_loss")


class State(NamedTuple):
    """Everything that training changes."""

    step: Any
    """Updates made, int32."""
    params: Any
    optimizer: Any
    average: Any
    """Exponential moving average of the parameters, or None without `train.ema_decay`."""

    @property
    def weights(self) -> Any:
        """What is evaluated: the average where one is kept."""
        return self.params if self.average is None else self.average


def new_state(config: Config, mesh: Mesh | None = None, start: Callable[[Any], Any] = lambda fresh: fresh) -> State:
    """Parameters drawn from `train.seed`, or what `start` makes of them, and an optimiser that has seen nothing; over
    `mesh`."""
    params = start(model.init(config.model, config.train.seed, mesh))
    where = None if mesh is None else sharding.shardings(mesh, abstract_state(config))

    def rest(params):
        average = jax.tree.map(jnp.copy, params) if config.train.ema_decay else None
        return State(jnp.int32(0), params, optim.optimizer(config).init(params), average)

    return jax.jit(rest, out_shardings=where)(params)


def abstract_state(config: Config, mesh: Mesh | None = None) -> State:
    """The shapes of `new_state(config, mesh)`, without a mesh on the first device; allocates nothing."""
    params = model.abstract(config.model)[1]
    optimizer = jax.eval_shape(optim.optimizer(config).init, params)
    state = State(jax.ShapeDtypeStruct((), jnp.int32), params, optimizer, params if config.train.ema_decay else None)
    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        where: Any = jax.tree.map(lambda _: here, state)
    else:
        where = sharding.shardings(mesh, state)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, where)


def metric_names(config: Config) -> tuple[str, ...]:
    """The names of a step's metrics, in their order."""
    return METRICS + (moe.METRICS if config.model.num_experts else ())


def train_step(graph: nnx.GraphDef, config: Config) -> Callable[[State, Any, Any], tuple[State, jax.Array]]:
    """The jitted optimiser step: (state, steps expected, batch) -> (state, metrics). Donates the old state.

    The batch is taken in `train.accumulation` parts; the loss is the sum over all targets divided once by their number,
    so that every token weighs the same whatever part it stands in. The state comes back unchanged when loss or gradient
    norm is not finite, and from then on, because `state.step` is no longer what the caller expects: however late the
    caller looks, it finds the state before the bad step, and in `state.step` which one that was. On a mesh (in context)
    the state stays laid out by `gattn.sharding`.

    `batch` may hold `stop`, one number per device: the largest comes back in the metrics, to every process.

    metrics: float32, `metric_names(config)` in their order (`update_ratio`, |update| / |weights|, is NaN but where
    `train.log_every` asks for a line), then `stop`, and last the number of updates made after this step.
    """
    optimizer, schedule = optim.optimizer(config), optim.learning_rate(config)
    train = config.train

    def objective(params, part, counts, tokens, positions):
        decoder = nnx.merge(graph, params)
        hidden, aux = decoder(part["inputs"], part.get("segment_ids"))
        losses = cross_entropy(hidden, decoder.output_matrix(), part["targets"], train.loss_chunk, train.z_loss)
        total = losses.objective / tokens
        sums = (losses.nll / tokens, (losses.objective - losses.nll) / tokens, aux.get("moe"))
        if config.model.num_experts:
            # Frequencies of this and the earlier parts: those of the whole batch are not known before its last part.
            total += moe.auxiliary(aux["moe"], counts + aux["moe"]["counts"], positions, config)
        return total, jax.lax.stop_gradient(sums)

    def gradients(params, batch):
        tokens = jnp.sum(batch["targets"] >= 0).astype(jnp.float32)
        positions, counts = float(batch["targets"].size), jnp.float32(0)

        def take(part, counts):
            (total, sums), gradient = jax.value_and_grad(objective, has_aux=True)(
                params, part, counts, tokens, positions
            )
            return (total, *sums), sharding.keep(gradient)

        if train.accumulation == 1:
            return take(batch, counts)
        # Every device's rows stay with it: a part is every k-th row.
        parts = jax.tree.map(lambda x: x.reshape(-1, train.accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
        parts = jax.tree.map(lambda x: sharding.constrain(x, None, sharding.BATCH, "context"), parts)

        def add(total, part):
            counts = total[0][-1]["counts"] if config.model.num_experts else jnp.float32(0)
            return jax.tree.map(jnp.add, total, take(part, counts)), None

        one = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(take, one, counts)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, (zero[0], sharding.keep(zero[1])), parts)[0]

    def step(state: State, expected, batch):
        stop = jnp.max(batch["stop"]) if "stop" in batch else 0
        batch = {name: x for name, x in batch.items() if name != "stop"}
        (total, nll, z_loss, experts), gradient = gradients(state.params, batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        average = None if state.average is None else _average(state, params, train.ema_decay)
        norm = optax.tree.norm(gradient)
        due = (state.step + 1) % train.log_every == 0  # 3% of a small model's step on a CPU: only for the log
        ratio = jax.lax.cond(due, _ratio, lambda *_: jnp.float32(jnp.nan), updates, state.params)
        fine = jnp.isfinite(total) & jnp.isfinite(norm) & (state.step == expected)
        new = State(state.step + 1, params, optimizer_state, average)
        new = sharding.keep(jax.tree.map(lambda after, before: jnp.where(fine, after, before), new, state))
        values = (nll, norm, ratio, schedule(state.step), z_loss)
        values += tuple(moe.report(experts, config).values()) if config.model.num_experts else ()
        metrics = jnp.stack([jnp.asarray(value, jnp.float32) for value in (*values, stop, new.step)])
        return new, sharding.constrain(metrics)

    return jax.jit(precise(step, config.model), donate_argnums=0)


def eval_step(graph: nnx.GraphDef, config: Config, *, probe: bool = False) -> Callable:
    """The jitted evaluation: (params, batch) -> (summed loss, tokens, sums of the probes), whole in every process."""

    def step(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, aux = decoder(batch["inputs"], batch.get("segment_ids"), probe=probe)
        losses = cross_entropy(hidden, decoder.output_matrix(), batch["targets"], config.train.loss_chunk)
        return jax.tree.map(sharding.constrain, (losses.nll, losses.tokens, aux if probe else {}))

    return jax.jit(precise(step, config.model))


class Totals(NamedTuple):
    """Sums over batches."""

    loss: float
    """Nats."""
    tokens: int
    size: int
    """Bytes of text that the targets stand for, 0 where tokens are no text."""
    probes: Any
    """The probes' sums, empty where `evaluate` does not probe."""


def evaluate_all(
    evaluate: Callable, params: Any, batches: Iterable[Any], token_bytes: Int[np.ndarray, " V"] | None
) -> Totals:
    """What `evaluate` (of `eval_step`) sums up over all batches."""
    total, tokens, size, sums = 0.0, 0, 0, None
    for batch in batches:
        loss, count, aux = jax.device_get(evaluate(params, batch))
        total, tokens = total + float(loss), tokens + int(count)
        if token_bytes is not None:
            size += int(token_bytes[batch["targets"][batch["targets"] >= 0]].sum())
        sums = probes.add(sums, aux) if sums else aux
    return Totals(total, tokens, size, sums)


def describe_model(config: Config) -> dict[str, Any]:
    """Counts of the model as built, for result.json and `--dry-run`; `ffn_width` is that of all experts of a token."""
    routed = config.model.experts_per_token * config.model.expert_dim
    ffn = routed if config.model.num_experts else config.model.ffn_width
    return {
        **model.param_counts(config.model),
        "ffn_width": ffn,
        "flops_per_token": model.flops_per_token(config.model, config.data.seq_len),
    }


def memory_estimate(config: Config) -> dict[str, int]:
    """Bytes on one device, from shapes alone: `states` (parameters, gradients, two Adam moments, all float32) and
    `activations` (what forward keeps for backward at the full batch, before the compiler removes any)."""
    graph, params = model.abstract(config.model)
    tokens = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), jnp.int32)

    def forward(params, tokens):
        return nnx.merge(graph, params)(tokens)[0]

    kept = jax.eval_shape(lambda p, t: jax.vjp(lambda p: forward(p, t), p)[1], params, tokens)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    activations = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    return {"states": 16 * weights, "activations": activations}


def _ratio(updates: Any, params: Any) -> jax.Array:
    return optax.tree.norm(updates) / optax.tree.norm(params)


def _average(state: State, params: Any, decay: float) -> Any:
    """Early on the average follows faster, (1 + t) / (10 + t), so that it forgets the initial weights."""
    decay_now = jnp.minimum(decay, (1.0 + state.step) / (10.0 + state.step))
    return jax.tree.map(lambda old, new: decay_now * old + (1.0 - decay_now) * new, state.average, params)


def precise(function: Callable, config: ModelConfig) -> Callable:
    """Float32 means float32 on TPU and GPU too, where the default would round matrix products to bf16 or tf32."""

    def wrapped(*args):
        with jax.default_matmul_precision("highest" if config.dtype == "float32" else "default"):
            return function(*args)

    return wrapped
