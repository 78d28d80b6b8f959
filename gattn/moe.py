"""Mixture of experts: a softmax router, SwiGLU experts of any load, and the losses that keep all of them busy.

A token's output is the sum, over its k most probable experts, of the router's probability times the expert's output
(paper Sec. 3.1: 128 experts, top-8). Rows are sorted by expert, so that an expert's product is one block of a grouped
product. On a mesh whose axis `expert` has n devices, device i holds experts i E/n to (i + 1) E/n - 1, and rows travel
to them and back by a ragged all-to-all. No token is ever dropped.

B batch, T tokens (on one device: all of its sequences), D model, E experts, F width of one, k experts per token,
L layers; A = T k assignments, R rows of the buffer in which a device receives them, n devices along axis `expert`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from gattn import sharding
from gattn.config import Config, ModelConfig
from gattn.exchange import AXIS, Ways, exchange, ways
from gattn.gates import normal
from gattn.kernels import grouped_cpu, tuning
from gattn.kernels.grouped import grouped_dot

TOKENS = (*sharding.BATCH, "context")  # axes that cut the tokens
KERNELS = tuple(sharding.spec(f"experts.{name}") for name in ("gate", "up", "down"))
Sums = dict[str, Array]
Kernels = tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]]


class Experts(nnx.Module):
    """The expert layer: `router` [D, E], `gate` and `up` [E, D, F], `down` [E, F, D]."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.model = model
        experts, size, width = model.num_experts, model.d_model, model.expert_dim
        self.router = normal(rngs, (size, experts), model.init_std)
        self.gate = normal(rngs, (experts, size, width), model.init_std)
        self.up = normal(rngs, (experts, size, width), model.init_std)
        self.down = normal(rngs, (experts, width, size), model.init_std)

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Sums]:
        """The layer's output, and float32 sums over all tokens on all devices.

        Sums: `counts` [E], assignments; `probabilities` [E] of the router; `z`, squared log-partition of its logits;
        `entropy` of its distribution, nats; `tokens`; `overflow`, 1 if rows did not fit into some device's buffer.
        `probabilities` and `z` have gradients.
        """
        router = self.router[...]
        kernels = (self.gate[...].astype(x.dtype), self.up[...].astype(x.dtype), self.down[...].astype(x.dtype))
        layer = functools.partial(_layer, self.model)
        if sharding.is_split():
            cut = PartitionSpec(sharding.BATCH, "context", None)
            # Every device's own sums are put side by side and added outside: the gradient of that communicates nothing.
            layer = jax.shard_map(
                functools.partial(_part, self.model),
                in_specs=(cut, PartitionSpec(), KERNELS),
                out_specs=(cut, PartitionSpec(TOKENS), PartitionSpec()),
                check_vma=False,
            )
        y, sums, overflow = layer(x, router, kernels)
        sums = {name: value.sum(axis=0) for name, value in sums.items()}
        sums["tokens"], sums["overflow"] = jnp.float32(x.shape[0] * x.shape[1]), overflow.astype(jnp.float32)
        return y, sums


def _part(model: ModelConfig, x: Array, router: Array, kernels: Kernels) -> tuple[Array, Sums, Array]:
    """`_layer` inside shard_map.

    Kernels are put together over `fsdp` here, so that their gradients are cut up as they are summed over it, and summed
    over other axes in pieces. A device with a part of the experts' width has a part of every sum over it.
    """
    whole = (
        jax.lax.all_gather(kernel, "fsdp", axis=tuple(axes).index("fsdp"), tiled=True)
        for kernel, axes in zip(kernels, KERNELS, strict=True)
    )
    kernels = tuple(checkpoint_name(kernel, sharding.GATHERED) for kernel in whole)
    y, sums, overflow = _layer(model, x, router, kernels)
    return _sum_over_tensor(y), sums, overflow


def _layer(
    model: ModelConfig, x: Float[Array, "B T D"], router: Float[Array, "D E"], kernels: Kernels
) -> tuple[Float[Array, "B T D"], Sums, Bool[Array, ""]]:
    """`Experts.__call__` for one device's tokens and experts; its sums have a leading axis of length one."""
    rows = x.reshape(-1, x.shape[-1])
    weights, experts, sums = route(rows, router, model.experts_per_token, normalise=model.norm_topk_prob)
    routing = arrange(experts, model.num_experts)
    parts = model.num_experts // kernels[0].shape[0]
    if parts == 1:
        y, overflow = _here(routing, rows, weights, kernels), jnp.bool_(False)
    else:
        y, overflow = _distributed(model.buffer_factor, routing, rows, weights, kernels)
    sums["counts"] = routing.counts.astype(jnp.float32)
    return y.reshape(x.shape), {name: value[None] for name, value in sums.items()}, overflow


# ---- router -----------------------------------------------------------------------------------------------------


def route(
    x: Float[Array, "T D"], router: Float[Array, "D E"], experts_per_token: int, *, normalise: bool
) -> tuple[Float[Array, "T k"], Int[Array, "T k"], Sums]:
    """Weights of the k most probable experts of every token, which experts they are, and the router's sums, in float32.

    p = softmax(x W) over all E experts; the weights are those of the chosen ones, with `normalise` over their sum.
    Sums over the T tokens: `probabilities` [E], `z`, `entropy`.
    """
    logits = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    log_probabilities = jax.nn.log_softmax(logits)
    probabilities = jnp.exp(log_probabilities)
    weights, experts = _top_k(probabilities, experts_per_token)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum()
    entropy = jax.lax.stop_gradient(-(probabilities * log_probabilities).sum())
    sums = {"probabilities": probabilities.sum(axis=0), "z": z, "entropy": entropy}
    return weights, experts, sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _top_k(x: Float[Array, "T E"], k: int) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    values, chosen = jax.lax.top_k(x, k)
    return values, chosen


def _top_k_backward(k, residuals, cotangents):
    """By comparison with every expert instead of the scatter that autodiff would make of it."""
    chosen, like = residuals
    expert = jnp.arange(like.shape[1])
    terms = (jnp.where(chosen[:, j, None] == expert, cotangents[0][:, j, None], 0.0) for j in range(k))
    return (functools.reduce(jnp.add, terms),)


def _top_k_forward(x, k):
    values, chosen = _top_k(x, k)
    return (values, chosen), (chosen, jnp.zeros((0, x.shape[1]), x.dtype))


_top_k.defvjp(_top_k_forward, _top_k_backward)


# ---- what a device does with rows that it has ---------------------------------------------------------------------


class Routing(NamedTuple):
    """Where one device's assignments go; assignment t k + j is token t's to its j-th expert."""

    order: Int[Array, "A"]
    """Assignments sorted by expert."""
    inverse: Int[Array, "A"]
    """Where in that order each assignment is."""
    counts: Int[Array, "E"]


def arrange(experts: Int[Array, "T k"], num_experts: int) -> Routing:
    """Sorts assignments by expert, and within one by token: one sort of one array of numbers, where they fit."""
    flat = experts.reshape(-1)
    position = jnp.arange(flat.size, dtype=jnp.int32)
    if flat.size * num_experts < 2**31:
        order = jax.lax.sort(flat * flat.size + position, is_stable=False) % flat.size
    else:
        order = jnp.argsort(flat)
    inverse = jnp.zeros_like(position).at[order].set(position, unique_indices=True)
    expert = jnp.arange(num_experts)
    chosen = (experts[:, j, None] == expert for j in range(experts.shape[1]))
    counts = functools.reduce(jnp.add, (one.sum(axis=0) for one in chosen))
    return Routing(order, inverse, counts)


def _here(routing: Routing, x: Array, weights: Array, kernels: Kernels) -> Float[Array, "T D"]:
    """All experts on this device."""
    if tuning.platform() == "cpu":
        return _looped(routing, x, weights, kernels)
    order, inverse, counts = routing
    rows, scales = _spread(x, order, inverse, weights.shape[1]), _permute(weights.reshape(-1), order, inverse)
    return _combine(_swiglu(rows, scales, kernels, counts), order, inverse, weights.shape[1])


@jax.custom_vjp
def _looped(routing: Routing, x: Array, weights: Array, kernels: Kernels) -> Float[Array, "T D"]:
    """What `_here` says, in one loop over blocks of rows: on a CPU the way of the rows costs as much as a product."""
    return _looped_keeping(routing, x, weights, kernels, keep=False)[0]


def _looped_keeping(routing, x, weights, kernels, keep=True):
    order, inverse, counts = routing
    per_token = weights.shape[1]
    scales = _permute(weights.reshape(-1), order, inverse)
    assigned = grouped_cpu.Assigned(x, order // per_token, scales, kernels, counts)
    rows, kept = grouped_cpu.experts(_activate, assigned, keep=keep)
    return _combine(rows, order, inverse, per_token), (routing, assigned, kept)


def _looped_backward(residuals, cotangent):
    (order, inverse, _), assigned, kept = residuals
    per_token = order.size // cotangent.shape[0]
    dx, dscales, dkernels = grouped_cpu.experts_gradients(_activate, assigned, kept, cotangent)
    dweights = _permute(dscales, inverse, order).reshape(-1, per_token)
    return None, _combine(dx, order, inverse, per_token), dweights, dkernels


_looped.defvjp(_looped_keeping, _looped_backward)


def _activate(both: Float[Array, "R 2F"], scales: Float[Array, "R"]) -> Float[Array, "R F"]:
    """scale * silu(x W_gate) * x W_up.

    Scaled before the last product: its result is then needed by no gradient, so that backward neither keeps it nor, on
    a mesh, has it sent home again.
    """
    width = both.shape[1] // 2
    return jax.nn.silu(both[:, :width]) * both[:, width:] * scales[:, None]


def _swiglu(
    rows: Float[Array, "R D"], scales: Float[Array, "R"], kernels: Kernels, sizes: Int[Array, "E"]
) -> Float[Array, "R D"]:
    """scale * (silu(x W_gate) * x W_up) W_down of rows sorted by expert, of which there are `sizes`; zeros after."""
    gate, up, down = kernels
    both = grouped_dot(rows, jnp.concatenate([gate, up], axis=2), sizes).astype(jnp.float32)
    return grouped_dot(_activate(both, scales).astype(rows.dtype), down, sizes)


@jax.custom_vjp
def _permute(rows: Float[Array, "R *D"], index: Int[Array, "R"], inverse: Int[Array, "R"]) -> Float[Array, "R *D"]:
    """rows[index] for a permutation; its gradient takes rows too instead of adding them up one by one."""
    return rows.at[index].get(mode="promise_in_bounds", unique_indices=True)


_permute.defvjp(
    lambda rows, index, inverse: (_permute(rows, index, inverse), (index, inverse)),
    lambda residuals, cotangent: (_permute(cotangent, *residuals[::-1]), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(
    x: Float[Array, "T D"], order: Int[Array, "A"], inverse: Int[Array, "A"], per_token: int
) -> Float[Array, "A D"]:
    """Each token's row once for each of its experts, sorted by expert."""
    return x.at[order // per_token].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _combine(
    rows: Float[Array, "A D"], order: Int[Array, "A"], inverse: Int[Array, "A"], per_token: int
) -> Float[Array, "T D"]:
    """The sum of each token's rows, in float32; the transpose of `_spread`.

    XLA fuses gathers into the sum on CPU and GPU (8 times as fast on a CPU) if there is one for each of them; for a TPU
    it would compile all of them one by one.
    """
    places = inverse.reshape(-1, per_token)
    if tuning.platform() == "tpu":
        rows = rows.at[places].get(mode="promise_in_bounds", unique_indices=True)
        return rows.sum(axis=1, dtype=jnp.float32).astype(rows.dtype)
    terms = (rows.at[place].get(mode="promise_in_bounds").astype(jnp.float32) for place in places.T)
    return functools.reduce(jnp.add, terms).astype(rows.dtype)


_spread.defvjp(
    lambda x, order, inverse, per_token: (_spread(x, order, inverse, per_token), (order, inverse)),
    lambda per_token, where, cotangent: (_combine(cotangent, *where, per_token), None, None),
)
_combine.defvjp(
    lambda rows, order, inverse, per_token: (_combine(rows, order, inverse, per_token), (order, inverse)),
    lambda per_token, where, cotangent: (_spread(cotangent, *where, per_token), None, None),
)


# ---- experts on several devices -----------------------------------------------------------------------------------


def _distributed(
    buffer_factor: float, routing: Routing, x: Float[Array, "T D"], weights: Float[Array, "T k"], kernels: Kernels
) -> tuple[Float[Array, "T D"], Bool[Array, ""]]:
    """Experts spread over the axis; also whether rows had to take the path with the largest buffer.

    A token goes to k different experts, so that a device of E/n of them gets at most min(k, E/n) rows of it.
    """
    parts, here = jax.lax.axis_size(AXIS), kernels[0].shape[0]
    counts = jax.lax.all_gather(routing.counts, AXIS)
    most = parts * x.shape[0] * min(weights.shape[1], here)
    room = min(math.ceil(buffer_factor * weights.size), most)
    loads = counts.sum(axis=0).reshape(parts, here)
    plan = Plan(routing, ways(counts, jax.lax.axis_index(AXIS)), loads[jax.lax.axis_index(AXIS)])
    if room == most:
        return _exchanged(room, plan, x, weights, kernels), jnp.bool_(False)
    # All devices of the mesh take the same path: they meet in its collectives.
    overflow = jax.lax.pmax(loads.sum(axis=1).max(), sharding.AXES) > room
    return _either(room, most, overflow, plan, x, weights, kernels), overflow


class Plan(NamedTuple):
    """All that is known before rows travel."""

    routing: Routing
    ways: Ways
    loads: Int[Array, "E/n"]
    """Rows that arrive here for each expert of this device."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _either(room: int, most: int, overflow: Bool[Array, ""], plan: Plan, x, weights, kernels) -> Float[Array, "T D"]:
    """`_exchanged` with a buffer of `room` rows, or with `most` where that overflows.

    One function for autodiff, whose backward chooses again and computes forward again: the gradient of `lax.cond` would
    keep the intermediate arrays of both branches, and those of the largest buffer must not exist in a step that does
    not need them. With a single buffer there is nothing to choose, and remat decides what is kept.
    """
    small, large = (functools.partial(_exchanged, rows) for rows in (room, most))
    return jax.lax.cond(overflow, large, small, plan, x, weights, kernels)


def _either_forward(room, most, overflow, plan, *inputs):
    return _either(room, most, overflow, plan, *inputs), (overflow, plan, inputs)


def _either_backward(room, most, residuals, cotangent):
    overflow, plan, inputs = residuals

    def gradients(rows):
        def back(plan, cotangent, *inputs):
            return jax.vjp(functools.partial(_exchanged, rows, plan), *inputs)[1](cotangent)

        return back

    chosen = jax.lax.cond(overflow, gradients(most), gradients(room), plan, cotangent, *inputs)
    return (None, None, *chosen)


_either.defvjp(_either_forward, _either_backward)


def _exchanged(
    buffer: int, plan: Plan, x: Float[Array, "T D"], weights: Float[Array, "T k"], kernels: Kernels
) -> Float[Array, "T D"]:
    """Rows to their experts' devices, through the experts, and back, with room for `buffer` of them."""
    order, inverse, _ = plan.routing
    per_token, sizes = weights.shape[1], (order.size, buffer)
    rows = exchange(_spread(x, order, inverse, per_token), sizes, *plan.ways)
    scales = exchange(_permute(weights.reshape(-1), order, inverse), sizes, *plan.ways)
    rows = _swiglu(rows, scales, kernels, plan.loads)
    return _combine(exchange(rows, sizes[::-1], *plan.ways[::-1]), order, inverse, per_token)


@jax.custom_vjp
def _sum_over_tensor(x: Array) -> Array:
    """The sum over the axis `tensor`. Its gradient is on every device already: shard_map hands each an equal share of
    it, because the result is the same on all of them, and the transpose of psum would communicate to undo that."""
    return jax.lax.psum(x, "tensor")


_sum_over_tensor.defvjp(
    lambda x: (_sum_over_tensor(x), None), lambda _, cotangent: (cotangent * jax.lax.axis_size("tensor"),)
)


# ---- losses and metrics -----------------------------------------------------------------------------------------


def balance_loss(
    counts: Float[Array, "*L E"],
    probabilities: Float[Array, "*L E"],
    tokens: Float[Array, "*L"],
    experts_per_token: int,
) -> Float[Array, "*L"]:
    """E sum_e f_e P_e of each layer: f_e the share of assignments that expert e gets, P_e its mean probability.

    1 where either is uniform, up to E/k where all tokens go to the same experts. The sums are those of the whole batch,
    on all devices and hosts: the global-batch balance loss (Qiu et al. 2025, arXiv 2501.11873; the paper's Sec. 3.1),
    under which experts may specialise on sequences as long as the batch as a whole uses them evenly.
    """
    share = counts / (tokens[..., None] * experts_per_token)
    return counts.shape[-1] * (share * probabilities / tokens[..., None]).sum(axis=-1)


def auxiliary(
    sums: Sums, running_counts: Float[Array, "L E"], total_tokens: float | Float[Array, ""], config: Config
) -> Float[Array, ""]:
    """What one micro-batch adds to the objective: weighted balance loss and router z-loss, means over layers.

    `sums` are the micro-batch's, `running_counts` those of it and of the step's earlier ones, `total_tokens` those of
    the whole step. With one micro-batch this is the loss by its definition. With several, the frequencies are the best
    known so far, as in Qiu et al.: probabilities of early micro-batches meet frequencies of a part of the batch. That
    turns the gradient of `moe_tiny`'s balance loss by 8 to 41% of its length, and the objective's by at most 0.3%
    (`python -m benchmarks.balance_accumulation`).
    """
    share = jax.lax.stop_gradient(running_counts / running_counts.sum(axis=-1, keepdims=True))
    balance = config.model.num_experts * (share * sums["probabilities"]).sum(axis=-1).mean() / total_tokens
    z = sums["z"].mean() / total_tokens
    return config.train.balance_loss * balance + config.train.router_z_loss * z


METRICS = ("moe/balance_loss", "moe/entropy", "moe/max_load", "moe/z", "moe/overflow")


def report(sums: Sums, config: Config) -> dict[str, Any]:
    """`METRICS` from a whole step's sums [L, ...], means over layers but where it says otherwise.

    `moe/balance_loss` by its definition; `moe/entropy` of the router's distribution, nats (ln E: undecided);
    `moe/max_load`, the busiest expert's load over a balanced one, largest over layers; `moe/z`, squared log-partition;
    `moe/overflow`, how many of the step's dispatches took the largest buffer.
    """
    load, balance, entropy = _by_layer(sums, config)
    z = (sums["z"] / sums["tokens"]).mean()
    values = (balance.mean(), entropy.mean(), load.max(), z, sums["overflow"].sum())
    return dict(zip(METRICS, values, strict=True))


def summarise(sums: Sums, config: Config) -> dict[str, Any]:
    """What evaluation found out about the experts, from its sums [L, ...]: by layer the load of every expert over a
    balanced one, the balance loss and the entropy of the router's distribution in nats."""
    load, balance, entropy = _by_layer(sums, config)
    return {
        "load": [[round(float(x), 4) for x in layer] for layer in load],
        "balance_loss": [round(float(x), 5) for x in balance],
        "entropy": [round(float(x), 4) for x in entropy],
    }


def _by_layer(sums: Sums, config: Config) -> tuple[Float[Array, "L E"], Float[Array, "L"], Float[Array, "L"]]:
    """Every expert's load over a balanced one, the balance loss, the router's entropy."""
    tokens, top_k = sums["tokens"], config.model.experts_per_token
    load = sums["counts"] * config.model.num_experts / (tokens[:, None] * top_k)
    return load, balance_loss(sums["counts"], sums["probabilities"], tokens, top_k), sums["entropy"] / tokens
