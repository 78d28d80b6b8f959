"""Grouped products on a CPU against dense ones of the same FLOPs, side by side in one process.

    python -m benchmarks.grouped [--tokens 8192 --experts 64 --top-k 8 --d-model 1024 --width 384 --rounds 7]

Experts of `width` columns each get rows of `d-model` numbers, `top-k` for each token, unevenly shared out. Against each
of their products stands the same product with one matrix for all rows; against the experts' whole SwiGLU, forward and
backward, a dense SwiGLU of top-k times the width on the tokens themselves. Last the model's own layers, `moe.Experts`,
its router and the way of the rows included, against `layers.MLP` of that width: forward, and forward and backward.

The two take turns; a time is a median over `rounds`, a ratio the median of the rounds' ratios. FLOPs are those of the
compiled program's products, a loop's counted once for each of its turns, over those that the rows need. `cores` is CPU
time over wall time: where it is below that of dense products on a quiet machine, others are at work there, and ratios
mean little.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import partial_eval as pe

from gattn.config import ModelConfig
from gattn.kernels.grouped import choose_grouped, grouped_dot
from gattn.layers import MLP
from gattn.moe import Experts

if TYPE_CHECKING:
    from collections.abc import Callable


class Sizes(NamedTuple):
    """What a layer is asked to do."""

    tokens: int = 8192
    experts: int = 64
    top_k: int = 8
    d_model: int = 1024
    width: int = 384

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


class Pair(NamedTuple):
    """Two functions that do the same FLOPs, and how many; each with its arguments."""

    name: str
    dense: tuple[Callable[..., Any], tuple[Any, ...]]
    grouped: tuple[Callable[..., Any], tuple[Any, ...]]
    flops: float


def pairs(sizes: Sizes, implementation: str | None = None) -> list[Pair]:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / math.sqrt(shape[-2]))

    # The busiest expert has about twice the mean.
    shares = rng.dirichlet(np.full(sizes.experts, 10.0))
    counts = jnp.asarray(rng.multinomial(sizes.rows, shares), jnp.int32)
    rows, dout = array(sizes.rows, sizes.d_model), array(sizes.rows, sizes.width)
    matrices = array(sizes.experts, sizes.d_model, sizes.width)
    one = 2.0 * sizes.rows * sizes.d_model * sizes.width

    def product(lhs: Any, rhs: Any, counts: Any) -> Any:
        return grouped_dot(lhs, rhs, counts, implementation=implementation)

    def gradient(multiply: Callable[..., Any], which: int) -> Callable[..., Any]:
        def run(dout: Any, lhs: Any, rhs: Any, *more: Any) -> Any:
            operands = [lhs, rhs]

            def alone(x: Any) -> Any:
                return multiply(*operands[:which], x, *operands[which + 1 :], *more)

            return jax.vjp(alone, operands[which])[1](dout)[0]

        return run

    found = [Pair("forward", (jnp.matmul, (rows, matrices[0])), (product, (rows, matrices, counts)), one)]
    for which, name in enumerate(("dlhs", "drhs")):
        dense = gradient(jnp.matmul, which), (dout, rows, matrices[0])
        found.append(Pair(name, dense, (gradient(product, which), (dout, rows, matrices, counts)), one))

    gate, down = array(sizes.experts, sizes.d_model, sizes.width), array(sizes.experts, sizes.width, sizes.d_model)
    tokens, dense_width = array(sizes.tokens, sizes.d_model), sizes.top_k * sizes.width
    up = array(sizes.d_model, dense_width)

    def both(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def run(dout: Any, x: Any, gate: Any, up: Any, down: Any, *more: Any) -> Any:
            def swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
                hidden = jax.nn.silu(multiply(x, gate, *more)) * multiply(x, up, *more)
                return multiply(hidden, down, *more)

            out, pullback = jax.vjp(swiglu, x, gate, up, down)
            return out, pullback(dout)

        return run

    dense = both(jnp.matmul), (tokens, tokens, up, up[::-1], array(dense_width, sizes.d_model))
    return [*found, Pair("SwiGLU", dense, (both(product), (rows, rows, gate, matrices, down, counts)), 9 * one)]


def layer_pairs(sizes: Sizes) -> list[Pair]:
    """The model's layers; the router's balance is that of its initial weights."""
    model = ModelConfig(
        d_model=sizes.d_model,
        ffn_dim=sizes.top_k * sizes.width,
        match_params=False,
        num_experts=sizes.experts,
        experts_per_token=sizes.top_k,
        expert_dim=sizes.width,
    )
    x = jax.random.normal(jax.random.key(0), (sizes.tokens // 256, 256, sizes.d_model))
    one = 2.0 * sizes.rows * sizes.d_model * sizes.width
    forward, backward = [], []
    for module in (MLP, Experts):
        graph, parameters = nnx.split(module(model, nnx.Rngs(params=0)))

        def layer(parameters: Any, x: Any, graph: Any = graph, routed: bool = module is Experts) -> Any:
            y = nnx.merge(graph, parameters)(x)
            return y[0] if routed else y

        def gradients(parameters: Any, x: Any, layer: Any = layer) -> Any:
            return jax.grad(lambda parameters, x: jnp.square(layer(parameters, x)).sum(), (0, 1))(parameters, x)

        forward.append((layer, (parameters, x)))
        backward.append((gradients, (parameters, x)))
    return [Pair("layer", *forward, 3 * one), Pair("+ grads", *backward, 9 * one)]


def product_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of all matrix products that a call can come to, a loop's for each turn, of branches the largest."""

    def count(jaxpr: Any) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
                total += 2.0 * inner * math.prod(equation.outvars[0].aval.shape)
            inside = [
                x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))
            ]
            counts = [count(getattr(x, "jaxpr", x)) for x in inside if hasattr(x, "jaxpr") or hasattr(x, "eqns")]
            several = max if equation.primitive.name == "cond" else sum
            total += equation.params.get("length", 1) * several(counts or [0.0])
        return total

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return count(pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def clock(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds of one call, by the wall and of all cores."""
    wall, cores = time.perf_counter(), time.process_time()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - wall, time.process_time() - cores


def measure(pair: Pair, rounds: int) -> str:
    """One row of the table."""
    (dense, dense_arguments), (grouped, grouped_arguments) = pair.dense, pair.grouped
    calls = (jax.jit(dense), dense_arguments), (jax.jit(grouped), grouped_arguments)
    for call in calls:
        clock(*call)
    times = np.array([[clock(*call) for call in calls] for _ in range(rounds)])
    wall = [1e3 * median(times[:, i, 0]) for i in range(2)]
    ratio = median(times[:, 1, 0] / times[:, 0, 0])
    cores = [times[:, i, 1].sum() / times[:, i, 0].sum() for i in range(2)]
    work = product_flops(grouped, *grouped_arguments) / pair.flops
    return (
        f"{pair.name:8} {wall[0]:9.1f} {wall[1]:9.1f}   {ratio:5.2f} x   {work:5.3f} x     "
        f"{cores[0]:.2f} {cores[1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--implementation", help="of grouped_dot; the default is what it chooses")
    options = vars(parser.parse_args())
    rounds, implementation = options.pop("rounds"), options.pop("implementation")
    sizes = Sizes(**options)
    found = pairs(sizes, implementation)
    name = choose_grouped(*found[0].grouped[1][:2], implementation=implementation)
    print(f'{sizes}, float32, "{name}" on {jax.devices()[0].device_kind}, jax {jax.__version__}, {rounds} rounds')
    print("          dense ms      ours     time      FLOPs       cores")
    for pair in [*found, *layer_pairs(sizes)]:
        print(measure(pair, rounds), flush=True)


if __name__ == "__main__":
    main()
