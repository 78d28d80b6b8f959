"""Loss spikes counted on calm and on unstable runs: `python -m experiments.spikes`.

Six runs of `tiny`, 200 steps each: three seeds as it is, three unstable, with a learning rate that climbs to 1.0 (300
times too high), no clipping, no QK-norm. Prints what `gattn.metrics.SpikeCounter` finds, writes a table and curves.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib.figure import Figure
from rich.console import Console

from configs.models import tiny
from experiments.runner import run_all, sweep
from gattn.config import override
from gattn.files import home, write_atomically
from gattn.metrics import SpikeCounter, read_metrics

UNSTABLE = {
    "optim.learning_rate": 1.0,
    "optim.warmup_steps": 150,
    "optim.clip_norm": 1e6,
    "model.qk_norm": False,
}
KINDS = {"calm": {}, "unstable": UNSTABLE}
COLOURS = ("#000000", "#0072B2", "#D55E00")


@dataclass(frozen=True)
class Args:
    """Counts loss spikes on calm and unstable runs of `tiny`."""

    seeds: Annotated[int, tyro.conf.arg(help="Seeds of each kind")] = 3
    steps: Annotated[int, tyro.conf.arg(help="Steps of each run")] = 200
    out: Annotated[str, tyro.conf.arg(help="Folder of the report instead of $GATTN_HOME/runs/spikes")] = ""


def main(args: Args, console: Console) -> int:
    """Trains what is missing and reports; exit code 1 if a run failed."""
    short = {"train.steps": args.steps, "train.eval_every": args.steps, "train.checkpoint_every": args.steps}
    runs = sweep(override(tiny(), short), KINDS, range(args.seeds))
    failed = [outcome for outcome in run_all(runs, console=console) if outcome.state == "failed"]
    results = {(run.label, run.seed): result for run in runs if (result := run.result())}
    for run in runs:  # every step's loss, which a result has of short runs only
        if result := results.get((run.label, run.seed)):
            result["losses"] = [x for line in read_metrics(run.folder) for x in line.get("losses", ())]
    text = table(results)
    folder = Path(args.out) if args.out else home() / "runs" / "spikes"
    folder.mkdir(parents=True, exist_ok=True)
    curves(results).savefig(folder / "curves.png", dpi=150, facecolor="white")
    write_atomically(folder / "report.md", text)
    console.print(f"{text}\n{folder / 'report.md'}", highlight=False, soft_wrap=True, markup=False)
    return 1 if failed else 0


def table(results: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The counts as Markdown."""
    rule = SpikeCounter
    lines = [
        "# Loss spikes",
        "",
        f"A loss more than {rule.DEVIATIONS:g} standard deviations above the mean of the last {rule.WINDOW} calm",
        f"losses (at least {rule.LEAST}) begins a spike, which lasts until {rule.QUIET} losses in a row are calm.",
        "`unstable` is `tiny` with a learning rate that climbs to 1.0 over 150 steps, no clipping, no QK-norm. Made by",
        "`python -m experiments.spikes`.",
        "",
        "| run | seed | spikes | begin at step | share of spiking losses | largest loss after step 32 | last loss |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for (label, seed), result in results.items():
        found, losses = result["spikes"], result["losses"]
        begins = ", ".join(map(str, found["steps"])) or "none"
        numbers = f"{found['share']:.3f} | {max(losses[rule.LEAST :], default=math.nan):.2f} | {losses[-1]:.2f}"
        lines.append(f"| {label} | {seed} | {found['count']} | {begins} | {numbers} |")
    lines += ["", "![Training loss of each run; a triangle where a spike begins.](curves.png)", ""]
    return "\n".join(lines)


def curves(results: dict[tuple[str, int], dict[str, Any]]) -> Figure:
    """Training loss by step, one panel for calm and one for unstable runs, a triangle where a spike begins."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = dict(zip(KINDS, figure.subplots(1, 2, sharey=True), strict=True))
    for (label, seed), result in results.items():
        axis, losses = panels[label], result["losses"]
        axis.plot(range(1, len(losses) + 1), losses, color=COLOURS[seed % 3], linewidth=0.9, label=f"seed {seed}")
        for step in result["spikes"]["steps"]:
            axis.plot(step, losses[step - 1], marker="v", color=COLOURS[seed % 3], markersize=9)
    for label, axis in panels.items():
        axis.set_title(label)
        axis.set_xlabel("step")
        axis.grid(color="#dddddd", linewidth=0.6)
    panels["calm"].set_ylabel("training loss, nats")
    panels["unstable"].legend(frameon=False)
    return figure


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__), Console()))
    except KeyboardInterrupt:
        sys.exit(130)
