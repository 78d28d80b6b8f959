"""Trains a run and stops this process from outside the loop: `python -m tests.train_until CONFIG FOLDER STEP [kill]`.

The data source is wrapped to send this process SIGTERM (or SIGKILL) as it hands out the batch of that step, which is as
sudden for the loop as a signal from anywhere.
"""

import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from gattn import train
from gattn.config import Config, from_dict
from gattn.data.loader import open_source


def main(config_file: str, folder: str, step: str, kill: str = "") -> None:
    number = signal.SIGKILL if kill else signal.SIGTERM

    def opened(config):
        source = open_source(config)

        def batches(first):
            for index, batch in zip(itertools.count(first), source.train(first), strict=False):
                if index == int(step):
                    os.kill(os.getpid(), number)
                yield batch

        return replace(source, train=batches)

    train.open_source = opened
    train.train(from_dict(Config, json.loads(Path(config_file).read_text())), Path(folder))


main(*sys.argv[1:])
