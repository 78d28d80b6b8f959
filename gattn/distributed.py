"""Several processes that train one run: how they find each other, and end alike. One process needs nothing of it.

Process 0 alone writes into the run's folder, which all of them see (a shared file system, or a bucket). An error that
only one process meets would leave the others waiting for it: what may fail before the first step is therefore done by
`decided` or `together`, after which every process raises it. After that (a full disk, a crash) the process that fails
says why, and JAX ends the others when it has waited for them for `PATIENCE`.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from gattn.config import ConfigError

T = TypeVar("T")
PATIENCE = 30  # seconds


def initialize(how: str) -> None:
    """Joins the other processes, before any device is touched: `auto` (on Cloud TPU pods, under Slurm and Open MPI, JAX
    finds them), `HOST:PORT,COUNT,INDEX` (where process 0 listens, how many there are, which this is), or "" for one.

    Raises:
      ConfigError: for another spelling, or if `auto` finds nothing.
    """
    if not how:
        return
    address, *numbers = how.split(",")
    host, _, port = address.rpartition(":")
    if how != "auto" and not (host and port.isdecimal() and len(numbers) == 2 and all(map(str.isdecimal, numbers))):
        raise ConfigError("distributed", how, "give auto, or HOST:PORT,COUNT,INDEX such as 10.0.0.1:1234,2,0")
    count, index = map(int, numbers or (0, -1))
    if index >= count:
        raise ConfigError("distributed", how, f"there is no process {index} of {count}: they count from 0")
    # Without an accelerator processes exchange arrays by gloo; for others the option has no meaning.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which `gattn.guard.signals` answers
    if how != "auto":
        jax.distributed.initialize(address, count, index, shutdown_timeout_seconds=PATIENCE)
        return
    try:
        jax.distributed.initialize(shutdown_timeout_seconds=PATIENCE)
    except ValueError as error:
        remedy = f"no cluster was recognised ({error}): give HOST:PORT,COUNT,INDEX"
        raise ConfigError("distributed", how, remedy) from error


def is_first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def decided(decide: Callable[[], T]) -> T:
    """What `decide()` returns or raises in process 0, where alone it is called, in every process."""
    if jax.process_count() == 1:
        return decide()
    value, error = _attempt(decide) if is_first() else (None, None)
    there = _broadcast(pickle.dumps((value, _portable(error)))) if is_first() else _broadcast(b"")
    value, elsewhere = pickle.loads(there)  # of a process of this run, as code and data are
    if error or elsewhere:
        raise error or elsewhere
    return value


def together(act: Callable[[], T]) -> T:
    """`act()` in every process, which has ended everywhere when this returns. If it fails in any, it does in all, with
    the error of their own or that of the first process that has one."""
    if jax.process_count() == 1:
        return act()
    value, error = _attempt(act)
    message = pickle.dumps(_portable(error)) if error else b""
    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    if sizes.any():
        padded = np.frombuffer(message.ljust(int(sizes.max()), b"\0"), np.uint8)
        texts = multihost_utils.process_allgather(padded)
        raise error or pickle.loads(texts[int(np.flatnonzero(sizes)[0])].tobytes())
    return value


def _attempt(act: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """The error as other processes can read it: one that cannot be sent as it is, by its words."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _broadcast(message: bytes) -> bytes:
    """The message of process 0, in every process."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    padded = np.frombuffer(message.ljust(size, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()
