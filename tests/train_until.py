"""Trains a run and sends its process a signal at a chosen moment: `python -m tests.train_until CONFIG DIR WHEN SIGNAL`.

A thread watches from outside the loop, so that the signal is as sudden as one from another process. WHEN is one of

    batch:5          the batch of step 5 is handed out
    batch:5+0.02     the same, and then 0.02 seconds later
    in:FILE:NAME:3   the main thread is somewhere below function NAME of a file whose path ends in FILE, once the batch
                     of step 3 has been handed out (-1: from the beginning)
    start+0.5        0.5 seconds after training was asked for
    file:PATTERN:3   a path below DIR matches PATTERN once the batch of step 3 has been handed out
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from gattn import train
from gattn.config import Config, from_dict
from gattn.data.loader import open_source


def main(config_file: str, folder: str, when: str, name: str) -> None:
    stop = lambda: os.kill(os.getpid(), getattr(signal, name))  # noqa: E731
    kind, _, detail = when.partition(":")
    handed_out = [-1]

    def opened(config):
        source = open_source(config)

        def batches(first, rows=slice(None)):
            for index, batch in zip(itertools.count(first), source.train(first, rows), strict=False):
                handed_out[0] = index
                if kind == "batch" and index == int(detail.partition("+")[0]):
                    delay = float(detail.partition("+")[2] or 0)
                    threading.Timer(delay, stop).start() if delay else stop()
                yield batch

        return replace(source, train=batches)

    def watch(found):
        while not found():
            time.sleep(0.0002)
        stop()

    def on_the_stack():
        path, function, step = detail.split(":")
        if handed_out[0] < int(step):
            return False
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame:
            if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(path):
                return True
            frame = frame.f_back
        return False

    def on_the_disk():
        pattern, step = detail.split(":")
        return handed_out[0] >= int(step) and any(Path(folder).glob(pattern))

    if kind in ("in", "file"):
        found = on_the_stack if kind == "in" else on_the_disk
        threading.Thread(target=watch, args=(found,), daemon=True).start()
    if kind.startswith("start+"):
        threading.Timer(float(kind.partition("+")[2]), stop).start()
    train.open_source = opened
    train.train(from_dict(Config, json.loads(Path(config_file).read_text())), Path(folder))


main(*sys.argv[1:])
