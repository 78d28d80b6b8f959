"""A run as far as it has come: its newest checkpoint that can be read, and whether its data are still the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from gattn import model
from gattn.checkpoint import CheckpointError, Checkpoints, Restored
from gattn.config import Config, ConfigError, from_dict
from gattn.data.loader import Source, open_source
from gattn.distributed import decided
from gattn.guard import TrainingError, read_json
from gattn.step import State, abstract_state

NONE_LEFT = "None is left to go on from: if the run is not being trained now, move its folder away to start again"


class Loaded(NamedTuple):
    """A run as far as it has come."""

    config: Config
    graph: nnx.GraphDef
    params: Any
    source: Source
    step: int


def load(directory: Path, step: int | None = None, note: Callable[[str], None] = print) -> Loaded:
    """A run's weights (their average where one is kept) from its newest readable checkpoint, or the one of `step`;
    tells `note` of checkpoints that cannot be read.

    Raises:
      ConfigError: no run there, or no such checkpoint.
      TrainingError: the checkpoints, or the data, are not what they were.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError("run", str(directory), "no run there: it has no config.json")
    config = from_dict(Config, read_json(path))
    source, like = open_source(config), abstract_state(config)
    checkpoints = Checkpoints(directory / "checkpoints")
    if not checkpoints.steps:
        raise ConfigError("run", str(directory), "has no checkpoint: train it until it has one")
    if step is not None and step not in checkpoints.steps:
        raise ConfigError("step", step, f"has no checkpoint; there are {checkpoints.steps}")
    found = None
    for _ in range(10):  # a run in progress removes old checkpoints while they are read: look again
        there, problems = checkpoints.steps, list[str]()
        try:
            found = checkpoints.restore(step, like) if step is not None else newest(checkpoints, like, problems.append)
            break
        except CheckpointError as error:
            if checkpoints.steps == there:
                raise TrainingError(str(error)) from error
    if found is None:
        raise TrainingError(f"{directory}: its checkpoints change faster than they can be read; try again")
    for problem in problems:
        note(problem)
    same_data(directory, found.metadata["data"], source)
    return Loaded(config, model.abstract(config.model)[0], found.state.weights, source, found.step)


def newest(checkpoints: Checkpoints, like: State, note: Callable[[str], None]) -> Restored | None:
    """The newest checkpoint that can be read and is what was saved; each that is not is reported.

    Raises:
      CheckpointError: there are checkpoints, and none can be used.
    """
    problems = []
    for step in reversed(decided(lambda: checkpoints.steps)):
        try:
            return checkpoints.restore(step, like)
        except CheckpointError as error:
            note(f"{error}: trying the one before")
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}. {NONE_LEFT}")
    return None


def same_data(directory: Path, fingerprint: str, source: Source) -> None:
    """Checks that a run's data are those that are there.

    Raises:
      TrainingError: if they are not.
    """
    if fingerprint != source.fingerprint:
        raise TrainingError(
            f"{directory} was trained on data {fingerprint}, here they are {source.fingerprint} (the embedded corpus "
            "differs between Python versions, and a folder may have been prepared anew): resume with the same data, or "
            "move the folder away"
        )
