"""What a StreamingLLM cache costs (arXiv 2309.17453): a window, with 0, 1 or 4 first tokens kept, gated and not.

`python -m experiments.streaming` trains bench A and the deep bench where `table4` has not, and reads them with a window
far smaller than the text. Who rests on the first token misses it once it has left the window, though nothing in these
languages reaches back more than four tokens; who has a gate should not. About half an hour on 2 cores, two minutes of
it without training. Of a run of one's own: `python -m gattn eval RUN --lengths 4k --window 256 --kept-first 4`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from experiments import study
from experiments.questions import answer
from experiments.report import ATTENTION_COLUMNS, EXCESS, Column, Finding, Result, bound, change
from experiments.sinkbench import sinkbench_config, sinkbench_deep_config
from experiments.study import Args, Line, Part, Study
from gattn.config import Config
from gattn.evaluate import Evaluation

BASELINE = "baseline"
VARIANT = {BASELINE: "baseline", "SDPA elementwise": "g1_elementwise", "SDPA headwise": "g1_headwise"}
KEPT = (0, 1, 4)
TIMES = (4, 8, 16)  # the window
SEQUENCES = 64

NOTE = (
    "Held-out loss above that of the true distribution, in nats, of texts so many times as long as the window, by a "
    "cache that keeps the newest tokens of the window and so many first ones (BOS is the first); positions are those "
    "in the cache. The first column of losses is without a window, at the length trained. Nothing is trained with a "
    "window."
)


@dataclass(frozen=True)
class Bench:
    """What is trained and through which window it is read."""

    name: str
    config: Callable[[], Config]
    window: int

    @property
    def lengths(self) -> list[int]:
        """Of the texts."""
        return [times * self.window for times in TIMES]

    def evaluations(self) -> list[Evaluation]:
        """A window at every length for every number of kept tokens."""
        lengths = ",".join(map(str, self.lengths))
        return [Evaluation("ppl", lengths, sequences=SEQUENCES, window=self.window, kept_first=kept) for kept in KEPT]

    def excess(self, kept: int, length: int) -> Callable[[Result], float]:
        """Nats above the Bayes loss."""
        read = f"window {self.window}" + (f", kept {kept}" if kept else "")

        def value(result: Result) -> float:
            entry = answer(result, "ppl", length, read, sequences=SEQUENCES)
            return entry["loss"] - entry["bayes_loss"]

        return value

    def columns(self) -> list[Column]:
        """Excess by length and kept tokens."""
        longest = self.lengths[-1]
        return [
            Column(
                f"{length} tokens, {kept} kept",
                self.excess(kept, length),
                ".4f",
                brief=f"{kept} kept" if length == longest else "",
            )
            for length in self.lengths
            for kept in KEPT
        ]

    def missed(self) -> Column:
        """What the loss of the first tokens costs at the longest."""
        longest = self.lengths[-1]
        none, kept = (self.excess(number, longest) for number in (KEPT[0], KEPT[-1]))
        title = f"{longest} tokens, {KEPT[0]} kept less {KEPT[-1]} kept"
        return Column(title, lambda r: none(r) - kept(r), ".4f", brief="missed")

    def findings(self) -> tuple[Finding, ...]:
        """Whether the gated models miss the first tokens less."""
        missed = self.missed()
        gated = [label for label in VARIANT if label != BASELINE]
        return (*(change(missed, BASELINE, label) for label in gated), bound(missed, gated, below=0.001))


BENCHES = (Bench("A", sinkbench_config, 16), Bench("deep", sinkbench_deep_config, 12))


def build(args: Args) -> Study:
    """A part for each bench."""
    parts = [_part(bench, args) for bench in BENCHES]
    note = "The sink is what StreamingLLM keeps its first tokens for. Is there anything to keep with a gate?"
    asked = {
        run: bench.evaluations() for bench, part in zip(BENCHES, parts, strict=True) for run in part.runs(part.needed)
    }
    made = study.study("streaming", args, "A window and the first tokens", note, parts)
    return dataclasses.replace(made, questions=asked)


def _part(bench: Bench, args: Args) -> Part:
    base = study.cut(bench.config(), args.steps)
    return Part(
        name=f"window {bench.name}",
        heading=f"Bench {bench.name}: trained at {base.data.seq_len} tokens, read with a window of {bench.window}",
        note=NOTE,
        base=base,
        lines=tuple(Line(label, variant) for label, variant in VARIANT.items()),
        seeds=args.seeds,
        columns=(EXCESS, *bench.columns(), bench.missed(), *ATTENTION_COLUMNS),
        findings=bench.findings(),
    )


if __name__ == "__main__":
    study.main(Args, build, __doc__)
