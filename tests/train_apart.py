"""One process of several (or the only one) that trains: `python -m tests.train_apart NOTES STOP_AT ARGUMENTS`.

ARGUMENTS are those of `gattn train`. Every state that is saved or restored is also written to NOTES, whole, as
`saved-<step>.npz` and `restored-<step>.npz`. This process gets a SIGTERM with the batch of step STOP_AT, if that is not
negative. `refused HOW NOTES ...` instead joins the others and writes into NOTES how the command ends in each of several
situations.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from gattn import distributed, train
from gattn.__main__ import main
from gattn.checkpoint import Checkpoints
from gattn.config import ConfigError


def write(path: Path, state) -> None:
    """The whole arrays of a state, whatever devices of whatever processes hold parts of them."""
    leaves = [np.asarray(multihost_utils.process_allgather(leaf, tiled=True)) for leaf in jax.tree.leaves(state)]
    if distributed.is_first():
        np.savez(path, *leaves)


def take_notes(notes: Path) -> None:
    """From now on states are written to the folder."""

    def save(self, step, state, *more, real=Checkpoints.save):
        write(notes / f"saved-{step}.npz", state)
        real(self, step, state, *more)

    def newest(*arguments, real=train.newest):
        found = real(*arguments)
        if found:
            write(notes / f"restored-{found.step}.npz", found.state)
        return found

    Checkpoints.save, train.newest = save, newest


def stop_at(step: int) -> None:
    """This process will be told to stop with that batch."""

    def opened(config, real=train.open_source):
        source = real(config)

        def batches(first, rows=slice(None)):
            for index, batch in enumerate(source.train(first, rows), first):
                if index == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return dataclasses.replace(source, train=batches)

    train.open_source = opened


def missing(config):
    """Data that only the first process has."""
    if distributed.is_first():
        return open_source(config)
    raise ConfigError("data.source", "there", "not on this machine")


open_source = train.open_source


def refused(how: str, notes: str, config: str, other: str, finished: str, cut: str) -> None:
    """What the command returns and says where it cannot or need not train."""
    distributed.initialize(how)
    outcomes = {}

    def ends(name, config, directory):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = main(["train", "--config", config, "--dir", directory, "--mesh", "data=2,fsdp=4"])
        outcomes[name] = [code, said.getvalue()]

    ends("other config", other, finished)
    ends("finished", config, finished)
    train.open_source = missing
    ends("no data", config, cut)
    train.open_source = open_source
    lock = train.lock(Path(cut)) if distributed.is_first() else contextlib.nullcontext()
    with lock:
        ends("locked", config, cut)
    (Path(notes) / f"outcomes-{jax.process_index()}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    if sys.argv[1] == "refused":
        refused(*sys.argv[2:])
    else:
        take_notes(Path(sys.argv[1]))
        stop_at(int(sys.argv[2]))
        sys.exit(main(["train", *sys.argv[3:]]))
