"""A run as far as it has come: its newest checkpoint that can be read, and whether its data are still the same."""

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from gattn import model
from gattn.checkpoint import CheckpointError, Checkpoints, Restored
from gattn.config import Config, ConfigError, from_dict
from gattn.data.loader import Source, open_source
from gattn.distributed import decided
from gattn.files import as_path, home, is_local
from gattn.guard import TrainingError, read_json
from gattn.interop import hf
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
    """A run's weights (their average where one is kept) from its newest readable checkpoint, or the one of `step`; or
    those of a checkpoint in the layout of Hugging Face. Tells `note` of checkpoints that cannot be read.

    Raises:
      ConfigError: no run there, or no such checkpoint.
      TrainingError: the checkpoints, or the data, are not what they were.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError("run", str(directory), "no run there: it has no config.json")
    if hf.is_checkpoint(directory):
        if step is not None:
            raise ConfigError("step", step, "a checkpoint of Hugging Face has but one: leave it out")
        config, params = hf.as_run(directory)
        return Loaded(config, model.abstract(config.model)[0], params, open_source(config), 0)
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


def notes(directory: Path) -> Path:
    """Where what is measured of a run goes: its folder; of others' checkpoints, which stay as they are, one at home."""
    return home() / "runs" / directory.absolute().name if hf.is_checkpoint(directory) else directory


def find_run(name: str) -> Path:
    """The run's folder: the path itself, the run at home of that name, or the only one whose name begins with it; or
    `hf://owner/name`, which is fetched from the hub once.

    Raises:
      ConfigError: if neither is a run; it names runs that are called similarly.
    """
    if name.startswith("hf://"):
        return hf.fetch(name)
    runs = home() / "runs"
    for path in (as_path(name), *([] if "/" in name else [runs / name])):
        if (path / "config.json").exists():
            return path
    known = sorted(p.name for p in runs.iterdir() if (p / "config.json").exists()) if runs.is_dir() else []
    wanted = name.rstrip("/").rpartition("/")[2]
    begun = [k for k in known if wanted and "/" not in name and k.startswith(wanted)]
    if len(begun) == 1:
        return runs / begun[0]
    if begun:
        raise ConfigError("run", name, f"{len(begun)} runs begin so: {', '.join(begun)}")
    close = [k for k in known if wanted and wanted in k][:3] or difflib.get_close_matches(wanted, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"{runs} holds {', '.join(known[:5]) or 'no runs'}"
    raise ConfigError("run", name, f"no run there (a folder with a config.json), nor of that name below {runs}: {hint}")


def starting_point(config: Config, directory: Path) -> Path | None:
    """The folder of the finished run that `train.start_from` names, None where it names none. `directory`: of the run
    that starts.

    Raises:
      ConfigError: no such run, not finished, diverged, without its last checkpoint, on other data, or with a model that
        differs in more than gates that this one has and that one lacks, and in how positions are read.
    """
    field, name = "train.start_from", config.train.start_from
    if not name:
        return None
    folder = as_path(name) if "/" in name else home() / "runs" / name  # not by a prefix: it is in the fingerprint
    if not (folder / "config.json").exists() or folder == directory:
        raise ConfigError(field, name, f"{folder} is no run to start from: give the name of a finished run's folder")
    old = from_dict(Config, read_json(folder / "config.json"))
    result = read_json(folder / "result.json") if (folder / "result.json").exists() else {"diverged": None}
    if "diverged" in result:
        raise ConfigError(field, name, f"{folder} is not finished, or diverged: train it to its end")
    if old.train.steps not in Checkpoints(folder / "checkpoints").steps:
        raise ConfigError(field, name, f"its last checkpoint, {old.train.steps}, is gone: move {folder} away, train it")
    for part, allowed in (("model", _MAY_DIFFER), ("data", _DATA_MAY_DIFFER)):
        before, now = getattr(old, part), getattr(config, part)
        for one in dataclasses.fields(before):
            pair = getattr(before, one.name), getattr(now, one.name)
            if pair[0] != pair[1] and one.name not in allowed:
                remedy = f"{part}.{one.name} is {pair[0]!r} there and {pair[1]!r} here: {_ALLOWED}"
                raise ConfigError(field, name, remedy)
    if lost := [gate.label for gate in old.model.gates if gate not in config.model.gates]:
        raise ConfigError(field, name, f"its gate {lost[0]} is not here: keep it, {_ALLOWED}")
    if old.model.ffn_width != config.model.ffn_width:
        remedy = (
            f"its FFN is {old.model.ffn_width} wide, here {config.model.ffn_width}: set model.match_params to False"
        )
        raise ConfigError(field, name, remedy)
    return folder.absolute() if is_local(folder) else folder


# Of the model and the data of a run that another starts from: what does not change what its weights mean.
_MAY_DIFFER = (
    *("gates", "match_params", "dtype", "remat", "scan_layers", "attention", "buffer_factor"),
    *("rope_theta", "rope_scaling", "rope_factor", "rope_original_length", "window", "kept_first"),
)
_ALLOWED = "gates may be added, and RoPE's base and scaling, the window and the length may change"
_DATA_MAY_DIFFER = ("batch_size", "seq_len", "eval_sequences", "workers", "attend_across_documents")


def take_over(fresh: Any, folder: Path, mesh: Mesh) -> Any:
    """The parameters `fresh` with the last weights of the run in `folder` in place of those that it has.

    Raises:
      CheckpointError: its last checkpoint cannot be read.
    """
    old = from_dict(Config, decided(lambda: read_json(folder / "config.json")))
    found = Checkpoints(folder / "checkpoints").restore(old.train.steps, abstract_state(old, mesh))
    weights = dict(nnx.to_flat_state(found.state.weights))
    return nnx.from_flat_state([(path, weights.get(path, leaf)) for path, leaf in nnx.to_flat_state(fresh)])


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
