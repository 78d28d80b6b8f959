"""Rows to the devices of their experts and back: a ragged all-to-all with its gradient, emulated on CPUs.

On the mesh axis `expert` n devices hold E/n experts each. A device has rows sorted by expert, any number for each; they
travel to the expert's device, into a buffer, and what was made of them travels back to where they came from.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gattn.kernels import tuning

AXIS = "expert"


class Operands(NamedTuple):
    """Of `jax.lax.ragged_all_to_all`: blocks of rows, E/n for each device of the axis, one per expert."""

    input_offsets: Int[Array, "E"]
    """Where each block begins here."""
    send_sizes: Int[Array, "E"]
    output_offsets: Int[Array, "E"]
    """Where it begins on the device that it goes to."""
    recv_sizes: Int[Array, "E"]


class Ways(NamedTuple):
    """How one device's rows go to the experts and come back."""

    there: Operands
    back: Operands


def ways(counts: Int[Array, "n E"], me: Int[Array, ""] | int) -> Ways:
    """Device `me`'s operands, from the assignments of every device to every expert.

    A device sends its rows sorted by expert. They arrive by expert and then by source, ready for the grouped product:
    what goes to expert e begins after all that goes to the same device's experts before e, and after what devices
    before this one send to e.
    """
    parts, experts = counts.shape
    starts = jnp.cumsum(counts, axis=1) - counts
    loads = counts.sum(axis=0).reshape(parts, -1)
    begins = (jnp.cumsum(loads, axis=1) - loads).reshape(-1)
    arrivals = begins + jnp.cumsum(counts, axis=0) - counts

    def mine(x):
        return jax.lax.dynamic_slice_in_dim(x, me * (experts // parts), experts // parts, axis=1).reshape(-1)

    there = Operands(starts[me], counts[me], arrivals[me], mine(counts))
    back = Operands(mine(arrivals), mine(counts), mine(starts), counts[me])
    return Ways(there, back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange(
    rows: Float[Array, "from *D"], sizes: tuple[int, int], there: Operands, back: Operands
) -> Float[Array, "to *D"]:
    """Sends blocks of `sizes[0]` rows into buffers of `sizes[1]` rows; zeros where none arrive.

    `back` are the operands of the way back, which the gradient takes.
    """
    move = _emulated if tuning.platform() == "cpu" else jax.lax.ragged_all_to_all
    return move(rows, jnp.zeros((sizes[1], *rows.shape[1:]), rows.dtype), *there, axis_name=AXIS)


exchange.defvjp(
    lambda rows, sizes, there, back: (exchange(rows, sizes, there, back), (there, back)),
    lambda sizes, both, cotangent: (exchange(cotangent, sizes[::-1], *both[::-1]), None, None),
)


def _emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA does not have for CPUs, from the same operands.

    Every device gets all rows, and takes each block that was sent to it from where its sender says that it begins to
    where its sender says that it goes.
    """
    parts, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def sent_here(x):
        return jax.lax.all_gather(x, axis_name).reshape(parts, parts, -1)[:, me].reshape(-1)

    begins, sizes, goes = sent_here(input_offsets), sent_here(send_sizes), sent_here(output_offsets)
    sizes = jnp.where(sizes == recv_sizes, sizes, -1)  # both sides must agree
    place = jnp.arange(output.shape[0])[:, None] - goes
    inside = (place >= 0) & (place < sizes)
    found, block = inside.any(axis=1), jnp.argmax(inside, axis=1)
    row = jnp.where(found, jnp.arange(output.shape[0]) - goes[block] + begins[block], 0)
    arrived = jax.lax.all_gather(operand, axis_name)[block // (begins.size // parts), row]
    return jnp.where(found.reshape(-1, *(1,) * (output.ndim - 1)), arrived, output)
