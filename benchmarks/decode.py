"""A decode step beside the bare products with its matrices, on this machine, side by side in one run.

    python -m benchmarks.decode --preset small --batch 1

prints the time of both, in turns and the median of each, and their ratio. Weights are random: that changes no time. The
products are those of one token with every matrix that the step uses, compiled as one program.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import tyro

IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Args:
    """Times a decode step."""

    preset: str = "small"
    """Of `configs.models`."""
    gate: str = "g1_headwise"
    """Of `configs.variants`."""
    batch: int = 1
    """Prompts at a time."""
    prompt: int = 64
    """Tokens of each prompt."""
    rounds: int = 11
    """Of several steps in a row each; the first is not counted."""


def main(args: Args) -> None:
    """Prints the two times and their ratio."""
    import jax
    import numpy as np
    from flax import nnx

    from configs.models import PRESETS
    from configs.variants import apply
    from gattn import model
    from gattn.generate import Generator, Sampling

    config = apply(PRESETS[args.preset](), args.gate)
    made = Generator(config, model.init(config.model, 0), end=-1)
    prompts = [np.arange(args.prompt, dtype=np.int32) % config.model.vocab_size] * args.batch
    matrices = [leaf[...] for _, leaf in nnx.to_flat_state(made.params) if leaf[...].ndim >= 2]
    if not config.model.tied_embeddings:
        matrices.remove(made.params["embedding"][...])

    @jax.jit
    def products(matrices, x):
        size = config.model.d_model
        flat = [m.reshape(size, -1) if m.shape[0] == size else m.reshape(-1, size).T for m in matrices]
        return sum((x @ matrix).sum() for matrix in flat)

    x = jax.random.normal(jax.random.key(0), (args.batch, config.model.d_model), config.model.dtype)
    steps = made.tokens(prompts, Sampling(max_new_tokens=args.rounds * (IN_A_ROW + 1) + 1))
    # A step is handed out while the next one runs: only several in a row tell how long one takes.
    kinds: dict[str, Callable[[], Any]] = {"step": lambda: next(steps), "bare": lambda: float(products(matrices, x))}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, act in kinds.items():
            act()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                act()
            times[name].append((time.perf_counter() - start) / IN_A_ROW)
    step, bare = (statistics.median(times[name][1:]) for name in kinds)
    size = sum(matrix.nbytes for matrix in matrices)
    print(
        f"{args.preset}, {args.gate}, batch {args.batch}, {size / 2**20:.0f} MiB of matrices: decode step "
        f"{1e3 * step:.2f} ms, bare products {1e3 * bare:.2f} ms, ratio {step / bare:.2f}"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
