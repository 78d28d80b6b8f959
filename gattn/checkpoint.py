"""Checkpoints of a run. The only module that imports orbax."""

import hashlib
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from gattn.config import TrainConfig
from gattn.files import is_local

policies = ocp.training.preservation_policies


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
    """

    def __init__(self, directory: Path, train: TrainConfig | None = None):
        """Keeps what `train` says; without it nothing is removed, so that a run in progress can be read."""
        self.directory = directory.absolute() if is_local(directory) else directory
        self._writes, self._policy = train is not None, policies.PreserveAll()
        if train:
            keep = [policies.LatestN(train.keep_last)]
            keep += [policies.EveryNSteps(train.keep_every)] if train.keep_every else []
            best = policies.BestN(get_metric_fn=_negative_loss, n=1, keep_checkpoints_without_metrics=False)
            self._policy = policies.AnyPreservationPolicy(keep + ([best] if train.keep_best else []))
        self.damaged: list[Path] = []
        """Checkpoints that were set aside."""
        self._open()

    def _open(self) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every failing thread's stack: we raise it
        try:
            self._checkpointer = self._new()
        except Exception as error:  # orbax reads every step's metadata, and one that is damaged stops it
            damaged = [step for step in self._on_disk() if not _describes_itself(self.directory / str(step))]
            if not damaged or not self._writes:
                raise CheckpointError(
                    f"{self.directory} cannot be opened ({_reason(error)}); damaged: {damaged or 'unknown'}. Training "
                    "the run sets a damaged checkpoint aside and goes on from the one before"
                ) from error
            for step in damaged:
                self._move_aside(step)
            self._checkpointer = self._new()

    def _new(self) -> ocp.training.Checkpointer:
        checkpointer = ocp.training.Checkpointer(
            self.directory, preservation_policy=self._policy, cleanup_tmp_directories=self._writes
        )
        _ = checkpointer.checkpoints  # which may not be readable
        return checkpointer

    def _on_disk(self) -> list[int]:
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self._checkpointer.close()
        except Exception as failure:
            if error is None:
                raise CheckpointError(_cannot_write(self.directory, failure)) from failure

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the lowest held-out loss, None where no loss was given."""
        measured = [c for c in self._checkpointer.checkpoints if c.metrics is not None]
        return max(measured, key=lambda c: _negative_loss(c.metrics)).step if measured else None

    def save(self, step: int, state: Any, metadata: dict[str, Any], loss: float | None = None) -> None:
        """Starts writing the pytree `state` and JSON `metadata`, after the write before has ended; returns once the
        state may be changed. Does nothing when this step is there already.

        Raises:
          CheckpointError: if this or the write before cannot be completed (a full disk); older checkpoints stay.
        """
        if step in self.steps:
            return
        try:
            self._checkpointer.save_async(
                step,
                state,
                force=True,
                metrics=None if loss is None else {"loss": loss},
                custom_metadata={**metadata, "checksum": checksum(state)},
            )
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise CheckpointError(_cannot_write(self.directory / str(step), error)) from error

    def restore(self, step: int, like: Any) -> Restored:
        """The state saved at `step`, with the structure, shapes and dtypes of `like` (`jax.ShapeDtypeStruct`s).

        Raises:
          CheckpointError: if it cannot be read, or is not what was saved.
        """
        try:
            metadata = dict(self._checkpointer.metadata(step).custom_metadata)
            state = self._checkpointer.load(step, like)
            found, saved = checksum(state), metadata.pop("checksum")
        except Exception as error:  # damage shows itself in any way
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} cannot be read: {_reason(error)}"
            ) from error
        if found != saved:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged: checksum {found}, saved {saved}"
            )
        return Restored(step, state, metadata)

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way, beside the folder."""
        self._checkpointer.close()
        target = self._move_aside(step)
        self._open()
        return target

    def _move_aside(self, step: int) -> Path:
        source: Any = self.directory / str(step)
        target: Any = self.directory.parent / f"damaged-checkpoint-{step}"
        if is_local(source):
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(source, target)
        else:
            _copy(source, target)
            source.rmtree()
        self.damaged.append(target)
        return target


def checksum(state: Any) -> str:
    """16 hex digits of every bit of a pytree of arrays, and of its shapes; the same for any sharding and host count.

    Each array: sum over its elements of (its bits as an unsigned integer) x (2 x its index + 1), modulo 2^32, on the
    device. A change of any one element changes it; of several, but for one case in 2^32.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_weighted_bits([leaf for _, leaf in leaves]))
    parts = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {int(total)}"
        for (path, leaf), total in zip(leaves, sums, strict=True)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@jax.jit
def _weighted_bits(leaves: list[jax.Array]) -> list[jax.Array]:
    def one(leaf):
        bits = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        bits = jax.lax.bitcast_convert_type(bits, np.dtype(f"uint{8 * bits.dtype.itemsize}")).astype(jnp.uint32)
        index = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            stride = math.prod(leaf.shape[axis + 1 :])
            index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]


def _describes_itself(path: Path) -> bool:
    """Whether the small files that orbax reads of every step can be read."""
    try:
        ocp.metadata(path)
        numbers = path / "metrics" / "metrics"
        return not numbers.exists() or isinstance(json.loads(numbers.read_text()), dict)
    except Exception:  # damage shows itself in any way
        return False


def _copy(source: Any, target: Any) -> None:
    """Everything below a prefix of a bucket."""
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            path.copy(target / path.name, overwrite=True)


def _negative_loss(metrics: dict[str, float]) -> float:
    return -metrics["loss"]


def _cannot_write(path: Path, error: Exception) -> str:
    return (
        f"cannot write {path}: {_reason(error)}. Older checkpoints are as they were: make room and run the same command"
    )


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom: orbax wraps the cause."""
    while below := error.__cause__ or error.__context__:
        error = below
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
