"""Checkpoints of a run. The only module that imports orbax."""

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The checkpoints below a folder, one per step; writes are atomic and the last two are kept. A context manager."""

    def __init__(self, directory: Path):
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(2),
            cleanup_tmp_directories=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Writes the pytree `state` and JSON `metadata`; does nothing when this step is there already."""
        if self.latest != step:
            self._checkpointer.save(step, state, force=True, custom_metadata=metadata)

    def metadata(self, step: int) -> dict[str, Any]:
        """What `save` was given as metadata."""
        return self._checkpointer.metadata(step).custom_metadata or {}

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at `step`, with the structure, shapes and dtypes of `like` (arrays or ShapeDtypeStructs)."""
        return self._checkpointer.load(step, like)
