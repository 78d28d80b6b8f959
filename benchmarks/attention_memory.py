"""Peak memory and time of long causal gated attention on a CPU, forward and backward, in a process of its own.

    python -m benchmarks.attention_memory --length 32768 --heads 8 --head-dim 64

prints one line. At these defaults the peak has to stay under 2 GB (one float32 T x S array per head would take 34 GB).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time


def measure(length: int, heads: int, head_dim: int, implementation: str) -> tuple[float, float, float]:
    """Compile time and run time in seconds, and the peak resident memory of this process in bytes."""
    import jax
    import jax.numpy as jnp

    from gattn import gated_dot_product_attention

    def loss(query, key, value, gate):
        out = gated_dot_product_attention(query, key, value, gate=gate, is_causal=True, implementation=implementation)
        return (out * out).sum()

    shape = (1, length, heads, head_dim)
    arrays = [jax.random.normal(key, shape, jnp.float32) for key in jax.random.split(jax.random.key(0), 4)]
    start = time.perf_counter()
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(*arrays).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    finished = time.perf_counter()
    # macOS counts bytes, Linux kilobytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return compiled - start, finished - compiled, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Measures in a spawned child, whose peak is not that of anything that ran before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="query and key length")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--implementation", default="chunked", choices=("chunked", "reference"))
    arguments = vars(parser.parse_args())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        compile_time, run_time, peak = pool.apply(measure, kwds=arguments)
    print(
        "{implementation}, T = S = {length}, {heads} heads, head_dim {head_dim}, float32, causal, gated, forward + "
        "backward:".format(**arguments),
        f"peak {peak / 1e9:.2f} GB, {run_time:.1f} s after {compile_time:.1f} s of compilation",
    )


if __name__ == "__main__":
    main()
