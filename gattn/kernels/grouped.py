"""One grouped matrix product with its gradient, for experts: rows sorted by group, each group with its own matrix.

Three implementations, none of which drops or pads rows in memory: "ragged" is XLA's ragged dot, grouped on TPUs only;
"gpu" is a Mosaic GPU kernel for Hopper; "blocks" is a loop over blocks of rows, for CPUs.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from gattn.kernels import grouped_cpu, tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float, Int

IMPLEMENTATIONS = ("ragged", "gpu", "blocks")


def grouped_dot(
    lhs: Float[ArrayLike, "M K"],
    rhs: Float[ArrayLike, "E K N"],
    group_sizes: Int[ArrayLike, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Each group's rows times its own matrix: ``out[m] = lhs[m] @ rhs[e]`` for the rows m of group e.

    M rows, K and N columns, E groups. Sums are in float32, and the gradients of lhs and rhs are grouped products too.

    Args:
      lhs: [M, K] float16, bfloat16 or float32, sorted by group: the first group_sizes[0] rows are group 0's, and so on.
      rhs: [E, K, N] in lhs's dtype or in float32, then rounded to lhs's dtype; its gradient comes in its own dtype.
      group_sizes: [E] integers, non-negative, with a sum of at most M; any may be zero. Not differentiated. Rows beyond
        the sum may hold anything, NaN included: they give zeros, and get and cause zero gradients.
      implementation: "ragged", "gpu", "blocks", or None to take what `choose_grouped` says. A given one is never
        replaced.

    Returns:
      [M, N] in lhs's dtype.

    Raises:
      TypeError, ValueError: an argument has a dtype or shape that cannot work, or the implementation cannot do it.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    name = choose_grouped(lhs, rhs, implementation=implementation)
    if group_sizes.shape != rhs.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be [E] = [{rhs.shape[0]}] integers, got {group_sizes.dtype} {group_sizes.shape}."
        )
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    return _grouped_dot(_methods(name, tuning.interpreting.value), lhs, rhs, group_sizes.astype(jnp.int32))


def choose_grouped(lhs: Any, rhs: Any, *, implementation: str | None = None) -> str:
    """The name of the implementation that `grouped_dot` runs for such arrays (or `jax.ShapeDtypeStruct`s).

    None takes "ragged" on TPUs and "blocks" on CPUs; on GPUs "gpu" where it can do the call: Hopper, 16-bit numbers,
    jax from 0.11 on. Other calls on a GPU take "ragged", which multiplies all rows by all E matrices there: E times the
    FLOPs, and an array of E x M x K numbers. The platform is that of the mesh in context, else of the default device.

    Raises:
      TypeError, ValueError: the arrays do not fit, the name is unknown, or it cannot do the call; with the remedy.
    """
    _check(lhs, rhs)
    if implementation is None:
        platform = tuning.platform()
        if platform == "gpu":
            return "gpu" if _unsupported(lhs, rhs) is None else "ragged"
        return "ragged" if platform == "tpu" else "blocks"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown: use one of {IMPLEMENTATIONS}, or None to choose."
        )
    problem = _unsupported(lhs, rhs) if implementation == "gpu" else None
    if problem is not None:
        raise ValueError(f"implementation='gpu' cannot do this call: {problem}. None chooses one that can.")
    return implementation


def _check(lhs: Any, rhs: Any) -> None:
    if len(lhs.shape) != 2 or len(rhs.shape) != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"lhs must be [M, K] and rhs [E, K, N], got {lhs.shape} and {rhs.shape}.")
    if lhs.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise TypeError(f"lhs must be float16, bfloat16 or float32, got {lhs.dtype}.")
    if rhs.dtype not in (lhs.dtype, jnp.float32):
        raise TypeError(f"rhs must have lhs's dtype {lhs.dtype} or be float32, got {rhs.dtype}.")


def _unsupported(lhs: Any, rhs: Any) -> str | None:
    return _gpu().unsupported(lhs, rhs)


def _gpu() -> Any:
    """The module of the GPU kernel, which may import only where Pallas has that device."""
    return importlib.import_module("gattn.kernels.grouped_gpu")


class _Methods(NamedTuple):
    """The two products of an implementation, as hashable functions."""

    rows: Callable[..., Array]
    """(lhs [M, K], rhs [E, K, N], sizes, transposed) -> [M, N] in lhs's dtype; transposed, rhs is [E, N, K]."""
    matrices: Callable[..., Array]
    """(lhs [M, K], dout [M, N], sizes, dtype) -> [E, K, N]: lhs^T dout over the rows of each group."""
    in_turn: bool = False
    """Whether the two gradients must not be computed side by side."""


# Cached, because jit's cache knows functions by identity.
@cache
def _methods(name: str, interpret: Any) -> _Methods:
    if name == "ragged":
        return _Methods(_ragged_rows, _ragged_matrices)
    if name == "gpu":
        return _Methods(partial(_gpu().rows, interpret=interpret), partial(_gpu().matrices, interpret=interpret))
    return _Methods(grouped_cpu.rows, grouped_cpu.matrices, in_turn=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(methods: _Methods, lhs: Array, rhs: Array, sizes: Array) -> Array:
    return methods.rows(lhs, rhs, sizes, False)


def _grouped_dot_forward(methods: _Methods, lhs: Any, rhs: Any, sizes: Any) -> Any:
    # What is wanted must be known before it is traced: None where it is not.
    wanted = tuple(() if x.perturbed else None for x in (lhs, rhs))
    lhs, rhs, sizes = lhs.value, rhs.value, sizes.value
    return methods.rows(lhs, rhs, sizes, False), (lhs, rhs, sizes, wanted)


def _grouped_dot_backward(methods: _Methods, residuals: Any, dout: Any) -> tuple[Array | None, Array | None, None]:
    lhs, rhs, sizes, wanted = residuals
    if isinstance(dout, SymbolicZero):
        return None, None, None
    dlhs = drhs = None
    if wanted[1] is not None:
        drhs = methods.matrices(lhs, dout, sizes, rhs.dtype)
        if methods.in_turn:
            # XLA runs loops that are independent side by side, and on a CPU they then fight for its caches. No size is
            # negative, but XLA cannot know.
            sizes = jnp.where(sizes[0] < 0, sizes + drhs[0, 0, 0].astype(jnp.int32), sizes)
    if wanted[0] is not None:
        dlhs = methods.rows(dout, rhs, sizes, True)
    return dlhs, drhs, None


_grouped_dot.defvjp(_grouped_dot_forward, _grouped_dot_backward, symbolic_zeros=True)


# ---- ragged: XLA's own -------------------------------------------------------------------------------------------


def _ragged_rows(lhs: Array, rhs: Array, sizes: Array, transposed: bool) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    out = _ragged(lhs, rhs.astype(lhs.dtype), sizes, numbers, lhs.dtype)
    # On TPUs, what lies beyond the groups is not written at all.
    return jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 0)


def _ragged_matrices(lhs: Array, dout: Array, sizes: Array, dtype: Any) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return _ragged(lhs, dout, sizes, numbers, dtype)


def _ragged(lhs: Array, rhs: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, dtype: Any) -> Array:
    """TPUs' kernels sum in float32 whatever the result's dtype, and a float32 result would be an array more."""
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers, precision=precision, preferred_element_type=dtype)
