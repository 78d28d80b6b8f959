"""How many RULER samples a minute are made, on one core, with a BPE tokenizer trained on the embedded corpus.

    python -m benchmarks.ruler_speed --length 131072

prints samples a minute, task by task. The essay is the embedded corpus; qa needs a file in SQuAD's format.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Args:
    """Times the generators."""

    length: int = 131_072
    """Tokens of a sample."""
    samples: int = 3
    """Of each task."""
    qa: str = ""
    """A file in SQuAD's format."""


def main(args: Args) -> None:
    """Prints a line per task."""
    from gattn import ruler
    from gattn.data.corpus import read_corpus
    from gattn.data.tokenizer import open_tokenizer

    corpus = read_corpus()
    tokenizer = open_tokenizer("bpe", 16_384, corpus)
    path = Path(args.qa) if args.qa else None
    material = ruler.Material(" ".join(document.text for document in corpus.held_out), (path, path))
    for task in ruler.OFFICIAL:
        if not task.startswith("qa") or path:
            start = time.perf_counter()
            ruler.samples(task, args.length, args.samples, lambda text: len(tokenizer.encode(text)), material)
            print(f"{task:16} {60 * args.samples / (time.perf_counter() - start):6.0f} samples a minute", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
