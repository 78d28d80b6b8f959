"""The paper's Table 5: trained short, then longer with another base of RoPE, then stretched by YaRN; RULER's scores.

`python -m experiments.table5` trains the language of `experiments.longcontext` at 64 tokens, then at 256 with RoPE's
base raised from 10,000 to 1,000,000, and asks: as trained, and by YaRN at four times the length, for which nothing is
trained. Half an hour on 2 cores. A last part compares positions: RoPE, ALiBi, none. `--scale chip` is the same in a
larger model, `--scale pod` the paper's rows with RULER's own tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from configs.models import dense_1p7b_28l
from configs.variants import apply
from experiments import report, study
from experiments.longcontext import TAUGHT, longcontext_config
from experiments.questions import answer
from experiments.report import Column, Result, change
from experiments.runner import Run
from experiments.study import Line, Part, ScaledArgs, Study
from gattn.config import Config, override
from gattn.evaluate import Evaluation
from gattn.ruler import CHANCE

BASELINE, ELEMENTWISE, HEADWISE = "baseline", "SDPA elementwise", "SDPA headwise"
VARIANT = {BASELINE: "baseline", ELEMENTWISE: "g1_elementwise", HEADWISE: "g1_headwise"}
PUBLISHED = {BASELINE: 1, ELEMENTWISE: 2}
POSITIONS = {"RoPE": "rope", "ALiBi": "alibi", "no positions": "none"}
BASE = 1_000_000.0  # of RoPE in the longer stage
STRETCH = 4  # by YaRN
YARN = f"yarn x{STRETCH}"  # as `gattn eval` calls it
PAPER_LENGTHS = ("4k", "8k", "16k", "32k", "64k", "128k")

NOTE = (
    "The paper trains a dense 1.7B model at 4k, goes on at 32k with RoPE's base raised from 10,000 to 1,000,000, and "
    "stretches it to 128k by YaRN without training. Its rows are the baseline and one with an SDPA gate, it does not "
    "say which; here they stand beside the baseline and the elementwise gate. {scale}A score is the mean of {tasks} "
    "in percent, over {samples} prompts each; chance: {chance:.1f}. "
)
NOTE_SYNTHETIC = (
    "What is trained on is made of these tasks (`experiments.longcontext`), so that a small model can do them at the "
    "lengths it was trained for: what is compared is what it loses beyond."
)
NOTE_PAPER = "The paper does not name its RULER subset; qa needs files that are not here (`gattn eval --qa-1`)."


@dataclass(frozen=True)
class Args(ScaledArgs):
    """Trains what is missing, asks its questions, writes the report."""

    samples: int = 100
    """Prompts per task and length (RULER: 500)."""


@dataclass(frozen=True)
class Scale:
    """What a scale puts in the place of the paper's stages."""

    short: Config
    longer: dict[str, Any]
    """In what the second stage differs, RoPE's base apart."""
    tasks: tuple[str, ...]
    """As `gattn eval` names them."""
    shortest: int
    """Of the lengths at which is asked; each further one is twice as long."""
    rows: tuple[str, ...] = tuple(VARIANT)
    positions: tuple[str, ...] = tuple(POSITIONS)

    @property
    def length(self) -> int:
        """Of the second stage."""
        return self.longer["data.seq_len"]

    @property
    def lengths(self) -> list[int]:
        """At which is asked, up to `STRETCH` times that of the second stage."""
        return [self.shortest * 2**i for i in range((STRETCH * self.length // self.shortest).bit_length())]

    @property
    def native(self) -> list[int]:
        """Those that it was trained for."""
        return [length for length in self.lengths if length <= self.length]

    def asked(self, config: Config, samples: int) -> list[Evaluation]:
        """What is asked of a run: as trained, and with RoPE by YaRN."""
        tasks = ",".join(self.tasks)
        lengths = self.lengths if self.positions else self.native
        found = [Evaluation(tasks, ",".join(map(str, lengths)), samples=samples)]
        if config.model.position == "rope":
            every = ",".join(map(str, self.lengths))
            found.append(Evaluation(f"ppl,{tasks}", every, samples=samples, rope="yarn", factor=float(STRETCH)))
        return found


def scales() -> dict[str, Scale]:
    """The stages of each scale."""
    short = longcontext_config()
    longer = {"data.seq_len": 256, "data.batch_size": 4, "data.eval_sequences": 16, "train.steps": 1500}
    longer |= {"optim.learning_rate": 2e-3, "optim.final_learning_rate": 2e-4}
    large = {"model.num_layers": 8, "model.d_model": 512, "model.num_heads": 8, "model.num_kv_heads": 4}
    large |= {"model.head_dim": 64, "model.ffn_dim": 1536, "model.dtype": "bfloat16", "optim.learning_rate": 1e-3}
    large |= {"optim.final_learning_rate": 1e-4, "data.seq_len": 512, "data.batch_size": 64, "train.loss_chunk": 8192}
    large_longer = longer | {"data.seq_len": 4096, "data.batch_size": 8, "optim.learning_rate": 5e-4}
    large_longer |= {"optim.final_learning_rate": 5e-5}
    paper, tokens = dense_1p7b_28l(), 2048 * 4096  # tokens of a step, in both stages
    first = {"data.batch_size": 2048, "train.steps": round(3.5e12 / tokens), "optim.learning_rate": 0.0045}
    second = {"data.seq_len": 32768, "data.batch_size": tokens // 32768, "train.steps": round(80e9 / tokens)}
    second |= {"optim.learning_rate": paper.optim.final_learning_rate}  # not published: as the first stage ends
    return {
        "cpu": Scale(short, longer, TAUGHT, 128),
        "chip": Scale(override(short, large), large_longer, TAUGHT, 512),
        "pod": Scale(override(paper, first), second, ("ruler",), 4096, tuple(PUBLISHED), ()),
    }


def build(args: Args) -> Study:
    """The first stage, the second with its scores, and the second of every position with one seed."""
    scale = scales()[args.scale]
    short = study.given(scale.short, args)
    long = study.cut(override(short, {**scale.longer, "model.rope_theta": BASE}), args.steps)
    native = [_score(scale, args.samples, length) for length in scale.lengths]
    yarn = [_score(scale, args.samples, length, YARN) for length in scale.lengths]
    lost = _lost(scale, args.samples)
    lines = [_line(label, short, {}, published=True) for label in scale.rows]
    first = Part(
        name=f"short {args.scale}",
        heading=f"First stage: {_tokens(short)}",
        note="What the second stage starts with. The published numbers are those after it.",
        base=short,
        lines=tuple(Line(label, VARIANT[label]) for label in scale.rows),
        seeds=args.seeds,
        columns=(report.LOSS, report.EXCESS, *report.ATTENTION_COLUMNS),
    )
    second = Part(
        name=f"long {args.scale}",
        heading=f"Second stage: {_tokens(long)}; then YaRN to {scale.lengths[-1]:,}",
        note=(
            "Held equal: tokens and all training; a gate adds its parameters. Native: read as trained. YaRN: read with "
            f"RoPE stretched {STRETCH} times, at every length. In the last stage nothing is trained."
        ),
        base=long,
        lines=tuple(lines),
        seeds=args.seeds,
        columns=(*native[: len(scale.native)], *yarn, lost, _yarn_loss(scale), report.LOSS, *report.ATTENTION_COLUMNS),
        findings=tuple(
            change(column, BASELINE, label)
            for label in scale.rows[1:]
            for column in (native[len(scale.native) - 1], *yarn[len(scale.native) - 1 :], lost)
        ),
    )
    grid = Part(
        name=f"positions {args.scale}",
        heading="Positions, one seed, read as trained",
        note=(
            f"Both stages as above, with RoPE, ALiBi or no positions at all, at lengths up to {STRETCH} times the "
            "longest trained, without YaRN. One seed: differences may be noise."
        ),
        base=long,
        lines=tuple(
            _line(label, short, {"model.position": POSITIONS[position]}, f"{position}: ")
            for position in scale.positions
            for label in scale.rows
        ),
        seeds=1,
        columns=(*(dataclasses.replace(one, paper=None) for one in native), report.LOSS, *report.ATTENTION_COLUMNS),
    )
    tasks = scale.asked(long, args.samples)[0].each_task()
    chance = sum(CHANCE.get(task, 0.0) for task in tasks) / len(tasks)
    note = NOTE.format(scale=_scaled(scale), tasks=", ".join(tasks), samples=args.samples, chance=chance)
    note += NOTE_PAPER if args.scale == "pod" else NOTE_SYNTHETIC
    parts = [first, second, *([grid] if grid.lines else [])]
    made = study.study("table5", args, "Gated attention, Table 5", note, parts)
    command = made.command + (f" --samples {args.samples}" if args.samples != Args.samples else "")
    asked = {run: scale.asked(run.config, args.samples) for part in parts[1:] for run in part.runs(part.needed)}
    return dataclasses.replace(made, command=command, questions=asked)


def _line(label: str, short: Config, changes: dict[str, Any], prefix: str = "", published: bool = False) -> Line:
    """A row of the second stage; its first stage differs from `short` in the same."""
    base = apply(override(short, changes), VARIANT[label])

    def start(seed: int) -> Run:
        return Run(f"to start from: {prefix}{label}", seed, override(base, {"train.seed": seed}))

    paper = ("table5", PUBLISHED[label]) if published and label in PUBLISHED else None
    return Line(f"{prefix}{label}", VARIANT[label], paper, changes, start)


def _tokens(config: Config) -> str:
    tokens = config.train.steps * config.data.batch_size * config.data.seq_len
    return f"{tokens:,} tokens at {config.data.seq_len:,}, RoPE's base {config.model.rope_theta:,.0f}"


def _scaled(scale: Scale) -> str:
    ratio = 32768 / scale.length
    return "" if ratio == 1 else f"Here the lengths from the second stage on are those over {ratio:g}. "


# ---- columns ----------------------------------------------------------------------------------------------------


def score(scale: Scale, samples: int, length: int, read: str) -> Callable[[Result], float]:
    """Mean over tasks, percent, of so many samples each."""
    tasks = Evaluation(",".join(scale.tasks)).each_task()
    return lambda result: fmean(answer(result, task, length, read, samples=samples)["score"] for task in tasks)


def _score(scale: Scale, samples: int, length: int, read: str = "") -> Column:
    name = "YaRN" if read else "native"
    place = PAPER_LENGTHS[scale.lengths.index(length) - len(scale.lengths)]
    title = f"{length:,} {name}"
    brief = title if length in (scale.length, scale.lengths[-1]) else ""
    return Column(title, score(scale, samples, length, read), ".1f", f"{name.lower()}_{place}", brief)


def _lost(scale: Scale, samples: int) -> Column:
    before, after = (score(scale, samples, scale.length, read) for read in ("", YARN))
    return Column(f"lost at {scale.length:,} by YaRN", lambda r: before(r) - after(r), ".1f", brief="lost")


def _yarn_loss(scale: Scale) -> Column:
    longest = scale.lengths[-1]
    return Column(f"loss at {longest:,} by YaRN", lambda r: answer(r, "ppl", longest, YARN)["loss"])


if __name__ == "__main__":
    study.main(Args, build, __doc__)
