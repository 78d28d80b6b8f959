"""What `python -m gattn eval` does: perplexity at any length and by position, and RULER, into a run's result.json.

Nothing is trained: the model may be read with another RoPE, a window, or first tokens that are kept, and the entry's
name says so. Lengths may lie far beyond the one it was trained at.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from gattn import model, ruler
from gattn.config import Config, ConfigError, override
from gattn.data.corpus import read_corpus
from gattn.data.loader import Source, open_source
from gattn.files import write_atomically
from gattn.generate import Generator, Sampling, texts
from gattn.loss import cross_entropy, describe
from gattn.metrics import finite
from gattn.resume import Loaded, notes
from gattn.schema import at_least, check_types
from gattn.step import precise

GROUPS = {"ruler": ruler.OFFICIAL, "ruler-mini": ruler.MINI}
FIRST_EDGE = 64  # of the positions by which perplexity is told; every further one is twice as far


@dataclass(frozen=True)
class Evaluation:
    """Which tasks at which lengths, and how the model is read."""

    tasks: str = "ppl"
    """With commas between: ppl, ruler, ruler-mini, or single tasks of the two."""
    lengths: str = ""
    """Tokens, BOS and an answer's included, with commas between: 4096,8192 or 4k,8k; by default that of training."""
    sequences: int = 16
    """Held-out sequences per length, for ppl."""
    samples: int = 100
    """Prompts per task and length, for RULER (published with 500)."""
    rope: Literal["none", "linear", "yarn"] = "none"
    """How RoPE is stretched: position interpolation or YaRN."""
    factor: float = 0.0
    """By how much; 0: the longest length over the one of training."""
    rope_theta: float = 0.0
    """Another base of RoPE; 0: the run's."""
    window: int = 0
    """Keys that a query sees, its own among them; 0: as trained."""
    kept_first: int = 0
    """First tokens that all queries see beside the window (StreamingLLM)."""
    across_documents: bool = False
    """Let ppl's attention cross the borders of documents inside a window, as long contexts need where documents are
    short; else as trained."""
    batch_tokens: int = 16_384
    """Tokens of a batch: as many sequences of one length as fit, at least one."""
    seed: int = 0
    """Of RULER's prompts."""
    essay: str = ""
    """A text for RULER's essay tasks; by default the embedded corpus."""
    qa_1: str = ""
    """A file in SQuAD's format (SQuAD)."""
    qa_2: str = ""
    """A file in SQuAD's format (HotpotQA)."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 1, "sequences", "samples", "batch_tokens")
        at_least(self, 0, "factor", "rope_theta", "window", "kept_first", "seed")
        for length in self.each_length():
            if length < 2:
                raise ConfigError("lengths", length, "a target needs something before it: at least 2")
        for task in self.tasks.split(","):
            if task not in ("ppl", *GROUPS, *ruler.TASKS):
                known = ", ".join(("ppl", *GROUPS, *ruler.TASKS))
                raise ConfigError("tasks", task, f"no such task; known: {known}")
        if self.factor and self.rope == "none":
            raise ConfigError("factor", self.factor, "stretches RoPE: add --rope linear or yarn")

    def each_length(self) -> list[int]:
        """`lengths` as numbers.

        Raises:
          ConfigError: for another spelling.
        """
        found = []
        for part in filter(None, self.lengths.split(",")):
            number, kilo = part.strip().removesuffix("k"), part.strip().endswith("k")
            if not number.isdecimal():
                raise ConfigError("lengths", self.lengths, "give tokens, with commas between: 4096,8192 or 4k,8k")
            found.append(int(number) * (1024 if kilo else 1))
        return found

    def each_task(self) -> list[str]:
        """The tasks one by one, without those of a group whose files are missing."""
        out: dict[str, None] = {}
        for task in self.tasks.split(","):
            for one in GROUPS.get(task, (task,)):
                if one == task or not one.startswith("qa") or getattr(self, one):
                    out[one] = None
        return list(out)


def reading(config: Config, given: Evaluation) -> tuple[Config, str]:
    """The config by which the run is read, and its name: empty where that is as it was trained.

    Raises:
      ConfigError: what does not fit the model.
    """
    changes: dict[str, Any] = {}
    trained, name = config.data.seq_len, []
    if given.rope != "none":
        factor = given.factor or max([*given.each_length(), trained]) / trained
        if factor <= 1:
            raise ConfigError("factor", given.factor, f"nothing to stretch: no length is above the trained {trained}")
        changes |= {"model.rope_scaling": given.rope, "model.rope_factor": float(factor)}
        changes["model.rope_original_length"] = trained if given.rope == "yarn" else 0
        name.append(f"{given.rope} x{factor:g}")
    for field, word in (("rope_theta", "theta"), ("window", "window"), ("kept_first", "kept")):
        if value := getattr(given, field):
            changes[f"model.{field}"] = value
            name.append(f"{word} {value:g}")
    if given.across_documents:
        changes["data.attend_across_documents"] = True
        name.append("across documents")
    return override(config, changes), ", ".join(name)


def evaluate(loaded: Loaded, given: Evaluation, note: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Entries of result.json's `evaluations`: name -> what was measured.

    Raises:
      ConfigError: a task, length or file that cannot be used.
    """
    config, how = reading(loaded.config, given)
    lengths = given.each_length() or [config.data.seq_len]
    if config.model.position == "learned" and max(lengths) > config.model.max_seq_len:
        raise ConfigError("lengths", max(lengths), f"beyond the model's {config.model.max_seq_len} learned positions")
    out: dict[str, Any] = {}
    prompts = _Prompts(config, loaded, given)
    for task in given.each_task():
        for length in lengths:
            if task == "ppl":
                found = perplexity(config, loaded.params, length, given.sequences, given.batch_tokens)
                note(f"ppl at {length:,}: {found['perplexity']:.2f}")
            else:
                found = prompts.score(task, length)
                note(f"{task} at {length:,}: {found['score']:.1f}")
            words = [f"{task} {length}", *([how] if how else [])]
            out[", ".join(words)] = {"task": task, "length": length, "read": how, "step": loaded.step, **found}
    return out


# ---- perplexity -------------------------------------------------------------------------------------------------


def perplexity(config: Config, params: Any, length: int, sequences: int, batch_tokens: int) -> dict[str, Any]:
    """Loss, perplexity, bits per byte and, where known, Bayes loss on held-out windows of `length` tokens; and the loss
    by position: `from` (BOS is at 0), `to` (that one not), `loss`."""
    size = max(1, min(sequences, batch_tokens // length))
    changes = {"data.seq_len": length, "data.batch_size": size, "data.eval_sequences": sequences}
    config = override(config, changes | {"train.accumulation": 1})
    source = open_source(config)
    graph, edges = model.abstract(config.model)[0], _edges(length)

    def losses(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, _ = decoder(batch["inputs"], batch.get("segment_ids"))
        parts = []
        for start, stop in itertools.pairwise(edges):
            targets = batch["targets"][:, start:stop]
            matrix = decoder.output_matrix()
            parts.append(cross_entropy(hidden[:, start:stop], matrix, targets, config.train.loss_chunk)[1:])
        return parts

    step = jax.jit(precise(losses, config.model))
    totals, size = np.zeros((len(edges) - 1, 2)), 0
    for batches in source.held_out.values():
        for batch in batches():
            totals += np.array(jax.device_get(step(params, batch)), np.float64)
            if source.token_bytes is not None:
                size += int(source.token_bytes[batch["targets"][batch["targets"] >= 0]].sum())
    nats, tokens = totals.T
    return {
        **describe(float(nats.sum()), int(tokens.sum()), size),
        "sequences": sequences,
        **({} if source.bayes_loss is None else {"bayes_loss": source.bayes_loss}),
        "by_position": [
            {"from": start, "to": stop, "loss": float(total / count) if count else None}
            for (start, stop), total, count in zip(itertools.pairwise(edges), nats, tokens, strict=True)
        ],
    }


def _edges(length: int) -> list[int]:
    powers = [FIRST_EDGE * 2**i for i in range(max(0, math.ceil(math.log2(length / FIRST_EDGE))))]
    return [0, *(edge for edge in powers if edge < length), length]


# ---- RULER ------------------------------------------------------------------------------------------------------


class _Prompts:
    """Makes prompts, has them continued, scores them; the model is made ready once."""

    def __init__(self, config: Config, loaded: Loaded, given: Evaluation):
        self.config, self.params, self.source, self.given = config, loaded.params, loaded.source, given
        self.generator: Generator | None = None
        self.material: ruler.Material | None = None

    def score(self, task: str, length: int) -> dict[str, Any]:
        """`score` in percent, its `chance`, the number of `samples`, and the first one's prompt and answer."""
        encode, decode = _text(self.source)
        if self.material is None:
            self.material = _material(self.given, task)
        made = ruler.samples(
            task, length - 1, self.given.samples, lambda text: len(encode(text)), self.material, self.given.seed
        )
        if self.generator is None:
            self.generator = Generator(self.config, self.params, self.source.bos_id)
        answers = []
        for batch in _batches(made, max(1, self.given.batch_tokens // length)):
            ids = [np.concatenate([[self.source.bos_id], encode(sample.prompt)]).astype(np.int32) for sample in batch]
            answers += texts(self.generator, ids, Sampling(max_new_tokens=batch[0].new_tokens), decode)
        scores = [ruler.score(sample, answer) for sample, answer in zip(made, answers, strict=True)]
        return {
            "score": 100 * sum(scores) / len(scores),
            "chance": ruler.CHANCE.get(task, 0.0),
            "samples": len(scores),
            "example": {"end": made[0].prompt[-80:], "wanted": list(made[0].answers), "answer": answers[0]},
        }


def _batches(made: Sequence[ruler.Sample], size: int) -> Iterator[Sequence[ruler.Sample]]:
    return (made[i : i + size] for i in range(0, len(made), size))


def _text(source: Source) -> tuple[Callable[[str], Any], Callable[[Sequence[int]], str]]:
    if source.encode is None or source.decode is None:
        raise ConfigError("tasks", "ruler", "this run was trained on data that are no text: only ppl can be measured")
    return source.encode, source.decode


def _material(given: Evaluation, task: str) -> ruler.Material:
    essay = ""
    if given.essay:
        try:
            essay = Path(given.essay).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("essay", given.essay, f"cannot be read as UTF-8 text: {error}") from error
    elif set(given.each_task()) & set(ruler.ESSAYS):
        essay = " ".join(document.text for document in read_corpus().held_out)
    files = tuple(Path(name) if name else None for name in (given.qa_1, given.qa_2))
    return ruler.Material(essay, (files[0], files[1]))


# ---- the command ------------------------------------------------------------------------------------------------


def writable(run: Path) -> None:
    """Refuses a run without a result, before anything is measured."""
    if notes(run) == run and not (run / "result.json").exists():
        raise ConfigError("run", str(run), "has no result.json: train it to its end")


def record(run: Path, entries: dict[str, Any]) -> Path:
    """Puts entries into the result.json of the run's `notes`, in place of those of the same name; all else stays.

    Raises:
      ConfigError: its folder cannot be written.
    """
    path = notes(run) / "result.json"
    try:
        result = json.loads(path.read_text()) if path.exists() else {}
        result["evaluations"] = {**result.get("evaluations", {}), **finite(entries)}
        write_atomically(path, json.dumps(result, indent=1, allow_nan=False))
    except (OSError, ValueError) as error:
        raise ConfigError("run", str(run), f"its result.json cannot be read and written: {error}") from error
    return path


def show(entries: dict[str, Any], console: Console) -> None:
    """A table of all entries, and perplexity by position."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("task", "length", "read", "measured", "chance"):
        table.add_column(title, justify="left" if title in ("task", "read") else "right")
    for entry in entries.values():
        if entry["task"] == "ppl":
            bits = entry["bits_per_byte"]
            measured = f"{entry['perplexity']:.2f}" + (f" ({bits:.4f} bits/byte)" if bits else "")
            chance = ""
        else:
            measured, chance = f"{entry['score']:.1f}", f"{entry['chance']:.1f}"
        table.add_row(entry["task"], f"{entry['length']:,}", entry["read"] or "as trained", measured, chance)
    console.print(table)
    for entry in entries.values():
        if entry["task"] == "ppl":
            parts = [f"{p['from']:,}: {p['loss']:.3f}" for p in entry["by_position"] if p["loss"] is not None]
            console.print(f"loss by position, {entry['length']:,} tokens: {', '.join(parts)}", highlight=False)
