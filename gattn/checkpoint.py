"""Checkpoints of a run. The only module that imports orbax."""

import contextlib
import hashlib
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from gattn.config import TrainConfig
from gattn.distributed import decided, together
from gattn.files import is_local

COMMITTED = "commit_success.txt"  # what makes a checkpoint whole where folders cannot be renamed
ASIDE = "damaged-checkpoint-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message says which, why and what to do."""


class Restored(NamedTuple):
    """A checkpoint as it was saved."""

    step: int
    state: Any
    metadata: dict[str, Any]


class Checkpoints:
    """The checkpoints below a folder, one per step. A context manager, which waits for the last write.

    Each is written in the background and appears whole or not at all. Its metadata hold a checksum of the state, so
    that damage anywhere between the device and the disk is found when it is read again, on a disk as in a bucket.
    Of several processes each calls everything here; what was saved by some devices can be restored on any others. What
    cannot be read by one process is not read by any; one that cannot write ends, and with it the others.
    """

    def __init__(self, directory: Path, train: TrainConfig | None = None):
        """Keeps what `train` says; without it the folder is only read, and a run in progress is not disturbed.

        Raises:
          CheckpointError: if orbax cannot open the folder.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every failing thread's stack: we raise it
        self.directory = directory.absolute() if is_local(directory) else directory
        self._keep = _Keep(train) if train else None
        self._writing: ocp.AsyncResponse | None = None
        self._checkpointer: ocp.training.Checkpointer | None = None
        if self._keep:
            # Orbax reads every step's description, and a damaged one would stop it.
            damaged = decided(lambda: [s for s in self.steps if not _describes_itself(self.directory / str(s))])
            for step in damaged:
                self.set_aside(step)
            self._open()

    def _open(self) -> None:
        try:
            self._checkpointer = together(
                lambda: ocp.training.Checkpointer(
                    self.directory, preservation_policy=self._keep, cleanup_tmp_directories=True
                )
            )
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise CheckpointError(f"{self.directory} cannot be opened: {_reason(error)}") from error

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                self.wait()
            elif self._writing:
                with contextlib.suppress(Exception):  # that what was saved is there; others may not come here
                    self._writing.result()
        finally:
            if self._checkpointer:
                with contextlib.suppress(Exception):  # what went wrong was said by `wait`
                    self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        whole = (path for path in found if path.name.isdigit() and (is_local(path) or (path / COMMITTED).exists()))
        return sorted(int(path.name) for path in whole)

    @property
    def damaged(self) -> list[Path]:
        """Checkpoints that were set aside, now or by an earlier process."""
        beside = self.directory.parent
        return sorted(path for path in beside.iterdir() if path.name.startswith(ASIDE)) if beside.is_dir() else []

    def save(self, step: int, state: Any, metadata: dict[str, Any], losses: Mapping[int, float] | None = None) -> None:
        """Starts writing the pytree `state` and JSON `metadata`, after the write before has ended; returns once the
        state may be changed. Does nothing when this step is there already. `losses`: held-out loss by step, by which
        the best is kept.

        Raises:
          CheckpointError: if this or the write before cannot be completed (a full disk); older checkpoints stay.
        """
        assert self._checkpointer is not None
        assert self._keep is not None
        self.wait()
        self._keep.losses = losses or {}
        if decided(lambda: step in self.steps):
            return
        kept = {**metadata, "checksum": checksum(state)}
        try:
            self._writing = self._checkpointer.save_async(step, state, force=True, custom_metadata=kept)
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise CheckpointError(_cannot_write(self.directory / str(step), error)) from error

    def wait(self) -> None:
        """Until what was saved is on the disk.

        Raises:
          CheckpointError: as `save`.
        """
        writing, self._writing = self._writing, None
        if writing:
            try:
                writing.result()
            except Exception as error:  # orbax and tensorstore raise many kinds
                raise CheckpointError(_cannot_write(self.directory, error)) from error

    def best(self, losses: Mapping[int, float]) -> int | None:
        """The step with the lowest of these losses whose checkpoint is there."""
        return min((step for step in self.steps if step in losses), key=losses.__getitem__, default=None)

    def restore(self, step: int, like: Any) -> Restored:
        """The state saved at `step`, with the structure, shapes and dtypes of `like` (`jax.ShapeDtypeStruct`s).

        Raises:
          CheckpointError: if it cannot be read, or is not what was saved.
        """
        path = self.directory / str(step)
        try:
            metadata = together(lambda: dict(ocp.metadata(path).custom_metadata))
            state = together(lambda: ocp.load(path, like))
            found, saved = checksum(state), metadata.pop("checksum")
        except Exception as error:  # damage shows itself in any way
            raise CheckpointError(f"checkpoint {path} cannot be read: {_reason(error)}") from error
        if found != saved:
            raise CheckpointError(f"checkpoint {path} is damaged: checksum {found}, saved {saved}")
        return Restored(step, state, metadata)

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint out of the way, beside the folder: `damaged-checkpoint-<step>`."""
        source: Any = self.directory / str(step)
        target: Any = self.directory.parent / f"{ASIDE}{step}"
        if self._checkpointer:
            self._checkpointer.close()

        def move() -> None:
            if is_local(source):
                shutil.rmtree(target, ignore_errors=True)
                shutil.move(source, target)
            else:
                _copy(source, target)
                source.rmtree()

        decided(move)
        if self._checkpointer:
            self._open()


class _Keep:
    """Which checkpoints orbax leaves: the newest, every k-th, and the best of those whose held-out loss is known."""

    def __init__(self, train: TrainConfig):
        self.train = train
        self.losses: Mapping[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer per checkpoint, oldest first."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        keep = set(steps[-self.train.keep_last :])
        if self.train.keep_every:
            keep |= {step for step in steps if step % self.train.keep_every == 0}
        if self.train.keep_best and (measured := [step for step in steps if step in self.losses]):
            keep.add(min(measured, key=self.losses.__getitem__))
        return [step in keep for step in steps]


def checksum(state: Any) -> str:
    """16 hex digits of every bit of a pytree of arrays, and of its shapes; the same for any sharding and host count.

    Each array: its elements' bits and places are mixed (murmur3's finaliser) and summed modulo 2^32, on the device. A
    change of one element changes it; of several, but for about one case in 2^32.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_mixed([leaf for _, leaf in leaves]))
    parts = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {int(total)}"
        for (path, leaf), total in zip(leaves, sums, strict=True)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@jax.jit
def _mixed(leaves: list[jax.Array]) -> list[jax.Array]:
    def one(leaf):
        bits = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        bits = jax.lax.bitcast_convert_type(bits, np.dtype(f"uint{8 * bits.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            stride = math.prod(leaf.shape[axis + 1 :])
            place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        x = bits ^ (place * np.uint32(0x9E3779B9))
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]


def _describes_itself(path: Path) -> bool:
    """Whether the small file that orbax reads of every step can be read."""
    try:
        return ocp.metadata(path).commit_timestamp_nsecs is not None
    except Exception:  # damage shows itself in any way
        return False


def _copy(source: Any, target: Any) -> None:
    """Everything below a prefix of a bucket."""
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            path.copy(target / path.name, overwrite=True)


def _cannot_write(path: Path, error: Exception) -> str:
    return (
        f"cannot write {path}: {_reason(error)}. Older checkpoints are as they were: make room and run the same command"
    )


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom: orbax wraps the cause."""
    while below := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = below
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:1000]}"
