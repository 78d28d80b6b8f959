"""Finds the fastest blocks of a device's kernels on the device that is here, and writes them into the package.

    python -m benchmarks.tune --kernel gpu --head-dim 64 128 256 --length 4096 16384

measures forward and backward of causal, gated attention with every candidate that compiles, prints a line for each, and
puts the best into gattn/kernels/blocks.json, from where every later call takes them. Candidates whose results are not
those of the default blocks are left out. A machine without the device is refused.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gattn.kernels import api, arguments, reference, tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIDES = (256, 512, 1024, 2048)
GPU_TILES = [
    (rows, keys, (stages, stages)) for rows in (64, 128, 192) for keys in (64, 128, 192) for stages in (1, 2, 3)
]


class Problem(NamedTuple):
    """What is attended to: [batch, length, heads, head_dim] queries, as many keys of kv_heads heads."""

    dtype: str
    head_dim: int
    length: int
    batch: int
    heads: int
    kv_heads: int


def main() -> None:
    """Refuses, or measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=("tpu", "gpu"), required=True)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--table", type=Path, default=tuning.TABLE, help="where the best are added")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args()
    if jax.default_backend() != options.kernel:
        parser.error(
            f"--kernel {options.kernel} is measured on the device itself, and here jax sees "
            f"{jax.devices()[0].device_kind!r}. Run it on a machine that has one; no estimate is written."
        )
    measured: list[tuning.Row] = []
    for head_dim, length in itertools.product(options.head_dim, options.length):
        problem = Problem(options.dtype, head_dim, length, options.batch, options.heads, options.kv_heads)
        for name in ("forward", "backward"):
            rows = list(tune(options.kernel, name, problem, partial(seconds, repeats=options.repeats)))
            measured += rows
            tuning.write([min(rows, key=lambda row: row.microseconds)], options.table)
    if options.json:
        options.json.write_text(json.dumps({"rows": [row._asdict() for row in measured]}), encoding="utf-8")


def tune(
    kernel: str, name: str, problem: Problem, clock: Callable[[Callable[[], Any]], float], **more: Any
) -> Iterator[tuning.Row]:
    """Measures one pass with the default blocks, then with candidates, from the best so far on; prints and yields rows.

    `clock` takes a compiled call and returns seconds; `more` goes to the kernel.
    """
    call, operands = _pass(kernel, name, problem, **more)
    right, best, fastest = None, _default(kernel, problem.head_dim), float("inf")
    for candidates in _sweeps(kernel, name):
        for blocks in (best, *(x for x in candidates(best) if x != best)):
            label = f"{kernel}.{name} {problem.dtype} head_dim {problem.head_dim} length {problem.length} {blocks}"
            try:
                compiled = jax.jit(partial(call, blocks=blocks)).lower(*operands).compile()
                got = jax.tree.map(lambda x: np.asarray(x, np.float32), compiled(*operands))
            except Exception as error:  # too much memory, shapes that the compiler refuses: a candidate less
                print(f"{label}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
            right = right or got
            if not all(np.allclose(x, y, rtol=0.02, atol=0.02) for x, y in zip(got, right, strict=True)):
                print(f"{label}: not what the default blocks compute")
                continue
            took = clock(partial(compiled, *operands))
            print(f"{label}: {took * 1e6:.1f} us", flush=True)
            if took < fastest:
                best, fastest = blocks, took
            yield tuning.Row(
                f"{kernel}.{name}",
                tuning.kind(),
                problem.dtype,
                problem.head_dim,
                problem.length,
                blocks,
                round(took * 1e6, 1),
                datetime.date.today().isoformat(),
            )


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of single runs, each waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _pass(kernel: str, name: str, problem: Problem, **more: Any) -> tuple[Callable[..., list[jax.Array]], tuple]:
    """The kernel's pass as a function of its operands and `blocks`, and operands for it."""
    module = api._module(kernel)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(heads: int) -> jax.Array:
        return jax.random.normal(
            next(keys), (problem.batch, problem.length, heads, problem.head_dim), jnp.dtype(problem.dtype)
        )

    inputs = reference.Inputs(
        draw(problem.heads), draw(problem.kv_heads), draw(problem.kv_heads), gate=draw(problem.heads)
    )
    options = reference.Options(problem.head_dim**-0.5, is_causal=True)
    mask = arguments.make_mask(inputs, arguments.Limits(*(None,) * 5), options)

    def run(*operands: Any, blocks: Any) -> list[jax.Array]:
        inputs, *rest = operands
        function = getattr(module, name)
        return jax.tree.leaves(function(inputs, mask, options, *rest, blocks=blocks, **more))

    if name == "forward":
        return run, (inputs,)
    _, lse = module.forward(inputs, mask, options, **more)
    dout = draw(problem.heads)
    return run, (inputs, lse, dout, jnp.zeros_like(lse))


def _default(kernel: str, head_dim: int) -> Any:
    module = api._module(kernel)
    return module.Blocks() if kernel == "tpu" else module.BLOCKS[head_dim]


def _sweeps(kernel: str, name: str) -> list[Callable[[Any], list[Any]]]:
    """Lists of candidates, made one after the other of the best so far: all, or one kernel's tile after another's."""
    module = api._module(kernel)
    if kernel == "tpu":
        return [lambda best: [module.Blocks(*sides) for sides in itertools.product(SIDES, SIDES)]]
    fields = ("forward",) if name == "forward" else ("query_gradient", "key_value_gradient")
    return [
        lambda best, field=field: [best._replace(**{field: module.Tile(*tile)}) for tile in GPU_TILES]
        for field in fields
    ]


if __name__ == "__main__":
    main()
