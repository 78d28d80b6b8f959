"""What benchmarks.tpu_static compiles: a pass of our kernels or of jax's splash attention, at one block size."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gattn.kernels import masks, tpu, vjp
from gattn.kernels.reference import Inputs, Options

LENGTH, HEAD_DIM = 4096, 128
KERNELS = ("gattn", "gattn_ungated", "splash", "splash_gated")
# Matrix products over a pair of blocks. Splash's dkv kernel has one more where it is fused and makes dq too.
PRODUCTS = {
    "gattn_forward": 2,
    "gattn_preprocess": 0,
    "gattn_backward_dq": 3,
    "gattn_backward_dkv": 4,
    "gattn_backward_dq_dkv": 5,
    "splash_mha_fwd_no_residuals": 2,
    "splash_mha_dq_no_residuals": 3,
    "splash_mha_dkv_no_residuals": 4,
}
# Those that make dq transposed: of that product head_dim rows are streamed, through full tiles where the chip has tiles
# of 256; of the others, rows or keys, through tiles that head_dim 128 fills by half.
DQ_TRANSPOSED = ("gattn_backward_dq", "gattn_backward_dq_dkv")
# The `pl.when` branches that run once per row or column of blocks, forward and what backward has more; the rest of a
# kernel is its step body.
REGIONS = {"gattn": (("init", "finish"), ("init_keys", "finish_keys")), "splash": (("init", "end"), ())}


class Program(NamedTuple):
    """What is compiled: one pass of one kernel at one block size. A backward pass is "split" or "fused"."""

    chip: str
    direction: str
    kernel: str
    variant: str
    blocks: tuple[int, int, int]

    @property
    def family(self) -> str:
        return self.kernel.split("_")[0]

    @property
    def ungated(self) -> Program:
        """The same kernels without the operations that XLA gates by: all but our forward's gate are outside."""
        gate_inside = self.kernel == "gattn" and self.direction == "forward"
        return self if gate_inside else self._replace(kernel={"gattn": "gattn_ungated"}.get(self.family, self.family))

    @property
    def regions(self) -> tuple[str, ...]:
        forward, more = REGIONS[self.family]
        return forward if self.direction == "forward" else forward + more


def attention(program: Program, mask: masks.Mask | None = None):
    """The attention of a program, and its arguments: query, key, value and, if it is gated, the gate."""
    arrays = [jax.ShapeDtypeStruct((1, LENGTH, 1, HEAD_DIM), jnp.bfloat16)] * 3
    if program.family == "splash":
        return splash_attention(program), arrays if program.kernel == "splash" else [*arrays, arrays[0]]
    blocks, fused = tpu.Blocks(*program.blocks[:2]), program.variant == "fused"
    kernel = vjp.Kernel(
        partial(tpu.forward, blocks=blocks), partial(tpu.backward, blocks=blocks, fused=fused), tpu.preprocess
    )
    mask = mask or masks.make_mask(LENGTH, LENGTH)
    options = Options(scale=HEAD_DIM**-0.5)

    def attend(*arrays):
        return vjp.attend(kernel, options, Inputs(*arrays), mask)[0]

    return attend, arrays if program.kernel == "gattn_ungated" else [*arrays, arrays[0]]


def splash_attention(program: Program):
    """jax's kernel, with the gate by XLA if there is one."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, keys, compute = program.blocks
    fused = program.variant == "fused"
    sizes = splash.splash_attention_kernel.BlockSizes(
        block_q=rows,
        block_kv=keys,
        block_kv_compute=compute,
        block_q_dkv=rows,
        block_kv_dkv=keys,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else rows,
        block_kv_dq=None if fused else keys,
        use_fused_bwd_kernel=fused,
    )
    everything = splash.MultiHeadMask([splash.FullMask((LENGTH, LENGTH))])
    kernel = splash.make_splash_mha_single_device(everything, block_sizes=sizes)

    # Without checkpoint JAX would save a float32 sigmoid for the backward pass.
    @jax.checkpoint
    def multiply(out, gate):
        return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)

    def attend(query, key, value, gate=None):
        # Of one head, this transposition moves nothing.
        heads_first = [x[0].swapaxes(0, 1) for x in (query, key, value)]
        out = kernel(*heads_first).swapaxes(0, 1)[None]
        return out if gate is None else multiply(out, gate)

    return attend


def one_pass(program: Program, mask: masks.Mask | None = None):
    """Forward without residuals, or backward from the residuals; and the arguments."""
    function, arrays = attention(program, mask)
    if program.direction == "forward":
        return function, arrays
    out, pull = jax.eval_shape(lambda *arrays: jax.vjp(function, *arrays), *arrays)
    return lambda pull, cotangent: pull(cotangent), (pull, out)


def kernel_name(name: str) -> str:
    """A kernel's own name, without what JAX's transformations and XLA put around it."""
    return max((known for known in PRODUCTS if known in name), key=len)
