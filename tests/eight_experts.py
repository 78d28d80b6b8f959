"""Experts on meshes of 8 CPU devices, in a process of its own: `python -m tests.eight_experts` prints what it found.

tests/test_moe.py runs it once and has a test for each property; it also takes problems and the loop over tokens from
here.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from gattn import exchange, moe, sharding
from gattn.config import MeshConfig, ModelConfig
from tests.attention import quick
from tests.eight import print_all

MESHES = {
    "expert=8": 1.5,
    "data=2,expert=4": 1.5,
    "fsdp=2,expert=2,tensor=2": 1.5,
    "context=2,expert=4": 4.0,
    "data=2,fsdp=2,tensor=2": 1.0,
}
"""Mesh -> buffer_factor. At 1.5 the even problem has room and that of two experts for all tokens has not; at 4 one
buffer has room for anything; without the axis `expert` there is none."""
LOADS = ("even", "two experts", "one without")


def config(**fields):
    base = {"vocab_size": 300, "num_layers": 1, "d_model": 16, "match_params": False, "num_experts": 8}
    return ModelConfig(**{**base, "experts_per_token": 2, "expert_dim": 8, **fields})


def problem(model, load="even", batch=8, length=16, seed=3):
    """Parameters and tokens. But for the even load the first feature is 1 everywhere, and its row of the router is what
    decides; it favours the last experts, so that a buffer overflows somewhere else than on the first device."""
    rng, size, width = np.random.default_rng(seed), model.d_model, model.expert_dim
    x = rng.standard_normal((batch, length, size))
    router = rng.standard_normal((size, model.num_experts))
    favours = {"even": [], "two experts": [30, 29], "one expert": [30], "one without": [-30]}[load]
    if favours:
        x[..., 0], router[0] = 1.0, 0.0
        router[0, -len(favours) :] = favours
    shapes = {"gate": (size, width), "up": (size, width), "down": (width, size)}
    kernels = {name: 0.4 * rng.standard_normal((model.num_experts, *shape)) for name, shape in shapes.items()}
    as_floats = partial(jax.tree.map, lambda array: jnp.asarray(array, jnp.float32))
    return as_floats({"router": router, **kernels}), as_floats(x)


def by_token(model, params, x):
    """The layer's output and sums, one token after the other, as the paper has it."""

    def token(x):
        logits = x @ params["router"]
        probabilities = jax.nn.softmax(logits)
        chosen = jnp.argsort(-probabilities)[: model.experts_per_token]
        weights = probabilities[chosen]
        if model.norm_topk_prob:
            weights = weights / weights.sum()
        y = jnp.zeros_like(x)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up, down = (params[name][expert] for name in ("gate", "up", "down"))
            y += weight * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
        counts = jnp.zeros(model.num_experts).at[chosen].set(1.0)
        entropy = -jnp.sum(probabilities * jnp.log(probabilities + 1e-30))
        z = jnp.square(jax.nn.logsumexp(logits))
        return y, {"counts": counts, "probabilities": probabilities, "z": z, "entropy": entropy, "tokens": 1.0}

    y, sums = jax.vmap(token)(x.reshape(-1, x.shape[-1]))
    return y.reshape(x.shape), jax.tree.map(lambda value: value.sum(axis=0), sums)


def layer(model, params, x):
    graph, state = nnx.split(nnx.eval_shape(lambda: moe.Experts(model, nnx.Rngs(params=0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(x)


def everything(apply, model, params, x):
    """Output, sums, and the gradients of a function of the output and of both losses."""

    def objective(params, x):
        y, sums = apply(model, params, x)
        tokens, counts = jnp.float32(x[..., 0].size), jax.lax.stop_gradient(sums["counts"])
        balance = moe.balance_loss(counts, sums["probabilities"], tokens, model.experts_per_token)
        wave = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
        return (y * wave).sum() + 10 * balance + 0.01 * sums["z"], (y, sums)

    (_, (y, sums)), gradients = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(params, x)
    return {"y": y, "x": gradients[1], **gradients[0]}, sums


def wrong(got, expected, limit=1e-5):
    """Names of what differs, relative to the largest number of each."""
    pairs = {name: (np.asarray(got[name]), np.asarray(x)) for name, x in expected.items()}
    worst = {name: float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-6)) for name, (x, y) in pairs.items()}
    return [f"{name}: {error:.1e}" for name, error in worst.items() if not error <= limit]


@cache
def compiled(mesh, model):
    return quick(partial(everything, layer, model))


@cache
def expected(model, load):
    return quick(partial(everything, by_token, model))(*problem(model, load))


def on(mesh):
    return jax.set_mesh(sharding.make_mesh(MeshConfig.parse(mesh)))


def differs(mesh, load):
    """What is not as the loop over tokens has it, and whether the largest buffer was needed."""
    model = config(buffer_factor=MESHES[mesh])
    with on(mesh):
        got, sums = compiled(mesh, model)(*problem(model, load))
        assert got["y"].sharding.spec[0] == sharding.activations(sharding.BATCH)[0], got["y"].sharding
    outputs, of_sums = expected(model, load)
    return wrong(got, outputs) + wrong(sums, of_sums), float(sums["overflow"])


def scanned(mesh, load):
    """Two layers in a rematerialised scan against the same two layers on one device."""
    model = config(buffer_factor=MESHES[mesh])
    params, x = problem(model, load)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), params)

    def gradients(params, x):
        def step(x, params):
            y, sums = layer(model, params, x)
            return x + y, sums["overflow"]

        def objective(params, x):
            x, overflow = jax.lax.scan(jax.checkpoint(step), x, params)
            return jnp.square(x).sum(), overflow

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)

    one, _ = quick(gradients)(params, x)
    with on(mesh):
        got, overflow = quick(gradients)(params, x)
    return wrong({"x": got[1], **got[0]}, {"x": one[1], **one[0]}), overflow.tolist()


def largest_residual(mesh):
    """Elements of the largest array that forward keeps for backward, and of all devices' largest buffers."""
    model = config(buffer_factor=MESHES[mesh])
    params, x = problem(model)
    with on(mesh):
        kept = jax.eval_shape(lambda *inputs: jax.vjp(partial(layer, model), *inputs)[1], params, x)
        parts = sharding.parts("expert")
    return max(leaf.size for leaf in jax.tree.leaves(kept)), parts * x.size


def moved(mesh, experts=8, rows=12):
    """Rows that the exchange takes to other places than the operands say, and back."""
    n, rng = MeshConfig.parse(mesh).expert, np.random.default_rng(0)
    counts = np.stack([rng.multinomial(rows, rng.dirichlet(np.ones(experts))) for _ in range(n)])
    buffer = n * rows
    tags = np.arange(n * rows, dtype=np.float32).reshape(n * rows, 1) + 1

    def there_and_back(x):
        there, back = exchange.ways(jnp.asarray(counts), jax.lax.axis_index("expert"))
        away, give_back = jax.vjp(lambda x: exchange.exchange(x, (rows, buffer), there, back), x)
        return away, exchange.exchange(away, (buffer, rows), back, there), give_back(jnp.square(away))[0]

    with on(mesh):
        cut = PartitionSpec("expert")
        split = jax.shard_map(there_and_back, in_specs=cut, out_specs=(cut, cut, cut), check_vma=False)
        away, home, gradient = map(np.asarray, quick(split)(tags))
    begins = np.cumsum(counts, axis=1) - counts
    want = np.zeros((n, buffer, 1), np.float32)
    for device, theirs in enumerate(np.split(np.arange(experts), n)):
        blocks = [tags[s * rows + begins[s, e] :][: counts[s, e]] for e in theirs for s in range(n)]
        mine = np.concatenate(blocks)
        want[device, : len(mine)] = mine
    checks = {"away": (away, want.reshape(-1, 1)), "home": (home, tags), "gradient": (gradient, np.square(tags))}
    return [name for name, (got, wanted) in checks.items() if not np.array_equal(got, wanted)]


CHECKS = {
    **{f"{mesh}, {load}": partial(differs, mesh, load) for mesh in MESHES for load in LOADS},
    "scanned": partial(scanned, "data=2,expert=4", "even"),
    "largest residual": partial(largest_residual, "expert=8"),
    **{f"moved, {mesh}": partial(moved, mesh) for mesh in ("expert=8", "data=2,expert=4", "expert=2,tensor=4")},
}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print_all(CHECKS)
