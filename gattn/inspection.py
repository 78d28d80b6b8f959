"""What `python -m gattn probe` does: every probe over a run's checkpoint, as a table, a JSON file and a page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gattn import page, probes, resume
from gattn.config import ConfigError
from gattn.data.loader import Batch, Source
from gattn.files import write_atomically
from gattn.loss import describe
from gattn.metrics import finite
from gattn.step import eval_step, evaluate_all

DEFAULT_MAPS = 3  # layers whose attention maps are shown unless they are named


def inspect(
    run: Path,
    *,
    text: Path | None = None,
    layers: Sequence[int] | None = None,
    step: int | None = None,
    console: Console | None = None,
) -> Path:
    """Measures a run, prints tables, and writes `probe.html` and `probe.json` to its `notes`; the path of the page.

    Args:
      run: a run's folder.
      text: a UTF-8 file to measure on instead of the held-out data; the files are then `probe-<its name>.*`.
      layers: those whose attention maps are shown; by default the first, the last and the one with the highest F-Attn.
      step: of the checkpoint; by default the newest.

    Raises:
      ConfigError: no such run, checkpoint, layer or text, naming which.
    """
    console = console or Console()
    loaded = resume.load(run, step, console.print)
    config, source = loaded.config, loaded.source
    count = config.model.num_layers
    for layer in layers or ():
        if not 0 <= layer < count:
            raise ConfigError("layers", layer, f"the run has {count}: use 0 to {count - 1}")
    if text is None:
        name, batches, bayes = " and ".join(source.held_out), _held_out(source), source.bayes_loss
    else:
        targets = read_text(text, source)
        name, bayes = text.name, None
        batches = windows(targets, source.bos_id, config.data.seq_len, config.data.batch_size)
    measured = {
        "schema": 1,
        "run": run.name,
        "label": config.model.label,
        "step": loaded.step,
        **measure(loaded, batches, name, layers),
    }
    measured["eval"]["bayes_loss"] = bayes
    measured = finite(measured)
    stem = "probe" if text is None else f"probe-{text.name}"
    show(measured, console)
    folder = resume.notes(run)
    try:
        write_atomically(folder / f"{stem}.json", json.dumps(measured, allow_nan=False))
        write_atomically(folder / f"{stem}.html", page.render(measured))
    except OSError as error:
        raise ConfigError("run", str(folder), f"the page cannot be written there: {error}") from error
    return folder / f"{stem}.html"


def read_text(path: Path, source: Source) -> Int[np.ndarray, " _"]:
    """The file's token ids, without BOS.

    Raises:
      ConfigError: if the file cannot be read as UTF-8 or has less than two tokens, or if the run's data are no text.
    """
    if source.encode is None:
        raise ConfigError("text", str(path), "this run was trained on data that are no text: leave --text out")
    if not path.is_file():
        raise ConfigError("text", str(path), "is a folder" if path.is_dir() else "no such file")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError("text", str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("text", str(path), f"not UTF-8 from byte {error.start} on: convert it first") from error
    if not text:
        raise ConfigError("text", str(path), "the file is empty")
    ids = source.encode(text)
    if len(ids) < 2:
        raise ConfigError("text", str(path), f"only {len(ids)} token: attention needs at least two")
    return ids


def windows(ids: Int[np.ndarray, " _"], bos_id: int, seq_len: int, batch_size: int) -> Iterator[Batch]:
    """One document cut into windows of `seq_len` tokens, each predicted from BOS on, in batches of one size.

    What is left of the last window, and of the last batch, is padding: segment id -1 and target -1.
    """
    size = seq_len * batch_size
    for start in range(0, len(ids), size):
        targets = np.full((batch_size, seq_len), -1, np.int32)
        found = ids[start : start + size]
        targets.reshape(-1)[: len(found)] = found
        inputs = np.full_like(targets, bos_id)
        inputs[:, 1:] = np.where(targets[:, :-1] >= 0, targets[:, :-1], bos_id)
        yield {"inputs": inputs, "targets": targets, "segment_ids": np.where(targets >= 0, 1, -1).astype(np.int32)}


def measure(
    loaded: resume.Loaded, batches: Iterable[Batch], name: str, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """`data`, `eval`, `probes` and `maps` of a loaded run over batches, as plain numbers."""
    config, source, params = loaded.config, loaded.source, loaded.params
    step = eval_step(loaded.graph, config, probe=True)
    remaining = iter(batches)
    first = next(remaining)  # whose beginning the maps show
    total, targets, size, sums = evaluate_all(step, params, itertools.chain([first], remaining), source.token_bytes)
    probed = probes.summarise(sums, config.model.activations)
    return {
        "data": {"name": name, "sequences": int(sums["sequences"]), "tokens": int(sums["tokens"])},
        "eval": describe(total, targets, size),
        "probes": probed,
        "maps": _maps(sums, first, source, sorted(set(layers or _interesting(probed["f_attn_by_layer"])))),
    }


def show(measured: Mapping[str, Any], console: Console) -> None:
    """The summary, then the tables by layer."""
    console.print(Text(f"{measured['run']}, step {measured['step']:,}", style="bold"), soft_wrap=True)
    for name, text in page.summary(measured).items():
        console.print(Text(f"  {name:14}{text}"), soft_wrap=True)
    for grid in page.grids(measured):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for title in grid.header:
            table.add_column(Text(title), justify="right")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(Text(grid.title, style="bold"))
        console.print(table)


def _held_out(source: Source) -> Iterator[Batch]:
    return itertools.chain.from_iterable(batches() for batches in source.held_out.values())


def _interesting(f_attn: Sequence[float]) -> list[int]:
    if len(f_attn) <= DEFAULT_MAPS:
        return list(range(len(f_attn)))
    return [0, int(np.argmax(f_attn)), len(f_attn) - 1]


def _maps(sums: Mapping[str, Any], first: Batch, source: Source, layers: Sequence[int]) -> dict[str, Any]:
    """Attention of the first sequence's beginning: its tokens without padding, where each query's segment begins, the
    layers, and for each of them [N, M, M]."""
    found = sums["layers"]["map"]
    length = found.shape[-1]
    ids = first.get("segment_ids", np.zeros_like(first["inputs"]))[0, :length]
    length = int((ids >= 0).sum())
    found = found[list(layers), :, :length, :length]
    return {
        "tokens": source.decode_tokens(first["inputs"][0, :length]),
        "segment_starts": np.searchsorted(ids[:length], ids[:length]).tolist(),  # ids never fall along a row
        "layers": list(layers),
        "by_head": np.round(found.astype(float), 4).tolist(),
    }
