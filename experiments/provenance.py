"""Where a report's numbers come from: what was trained, every run with its values, its folder and its config.

A report lies beside the folders of its runs and links to them; a copy of it that was sent elsewhere still holds the
configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from experiments.render import Block, Code, Details, Grid, Heading, Link, Text, slug

Result = dict[str, Any]

MISSING = "missing"
CONFIGS = (
    "Of the first run of each section the whole config.json, of all others the fields, by dotted path, in which they "
    "differ from it."
)
FOLDERS = (
    "A variant leads to its configs below; folder and config.json are found as long as this report lies beside them, "
    "in runs/."
)


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder's name, its result, and its values as they print in the columns of its section."""

    folder: str
    seed: int
    result: Result
    values: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The finished runs of a row; `anchor` is unique in the report."""

    label: str
    anchor: str
    runs: tuple[Trained, ...]

    @property
    def runs_anchor(self) -> str:
        """Of its values, seed by seed."""
        return f"runs-{self.anchor}"

    @property
    def config_anchor(self) -> str:
        """Of its config."""
        return f"config-{self.anchor}"


def row_anchor(section: str, number: int) -> str:
    """For `Source.anchor`: a section's name and a row's place in it."""
    return f"{slug(section)}-{number}"


def runs(titles: Sequence[str], sources: Sequence[Source]) -> list[Block]:
    """Each run's values, with links to its folder and config; numbers of the table above lead here.

    Columns that no run has are left out.
    """
    lines = [run.values for source in sources for run in source.runs]
    kept = [i for i in range(len(titles)) if any(values[i] != MISSING for values in lines)]
    rows = [
        (
            Link(source.label, f"#{source.config_anchor}"),
            str(run.seed),
            Link("config.json", f"../{quote(run.folder)}/config.json"),
            *(run.values[i] for i in kept),
            Link(run.folder, f"../{quote(run.folder)}/"),
        )
        for source in sources
        for run in source.runs
    ]
    header = ("variant", "seed", "config", *(titles[i] for i in kept), "folder")
    groups = tuple((source.runs_anchor, len(source.runs)) for source in sources)
    caption = "Each run, its config and folder"
    return [
        Heading(3, "Runs"),
        Grid(header, tuple(rows), caption=caption, prose=(len(header) - 1,), groups=groups),
        Text(FOLDERS),
    ]


def configs(sections: Sequence[tuple[str, Sequence[Source]]]) -> list[Block]:
    """The configs of all runs, by heading of their section; empty without runs."""
    blocks: list[Block] = []
    for heading, sources in sections:
        if sources:
            base = sources[0].runs[0].result["config"]
            blocks.append(Heading(3, f"Configs: {heading}"))
            blocks += [_config(source, base, whole=source is sources[0]) for source in sources]
    return [Heading(2, "Configs"), Text(CONFIGS), *blocks] if blocks else []


def _config(source: Source, base: Mapping[str, Any], whole: bool) -> Details:
    """What sets a row apart, and within it each run; ends with each run's own fields and fingerprint."""
    reference = flat(base)
    apart = {run.folder: _unlike(flat(run.result["config"]), reference) for run in source.runs}
    first, *others = apart.values()
    shared = {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}
    own = {
        run.folder: {key: value for key, value in apart[run.folder].items() if key not in shared}
        | {"fingerprint": run.result.get("fingerprint")}
        for run in source.runs
    }
    codes = [base] * whole + [shared | {"runs": own}]
    summary = f"{source.label}: the whole config" if whole else f"{source.label}: what differs"
    return Details(summary, tuple(Code(json.dumps(code, indent=1), "json") for code in codes), source.config_anchor)


def _unlike(config: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that differ; null where only the reference has one."""
    return {key: config.get(key) for key in {**reference, **config} if config.get(key) != reference.get(key)}


def models(sources: Sequence[Source]) -> Grid:
    """Sizes and costs by row."""
    first = sources[0]
    against = f"against {first.label}"
    header = ("variant", "parameters", "active", "gate", "FFN width", against, "tokens", "training FLOPs")
    base = at(first.runs[0].result, "model.params")
    rows = []
    for source in sources:
        result = source.runs[0].result
        counts = [at(result, f"model.{key}") for key in ("params", "active_params", "gate_params", "ffn_width")]
        ended = next((run.result for run in source.runs if "diverged" not in run.result), result)
        tokens, each = at(ended, "data.tokens"), at(result, "model.flops_per_token")
        texts = [MISSING if count is None else f"{count:,}" for count in counts]
        difference = MISSING if None in (counts[0], base) else f"{counts[0] - base:+,}"
        flops = MISSING if None in (tokens, each) else f"{tokens * each:.3g}"
        rows.append((source.label, *texts, difference, MISSING if tokens is None else f"{tokens:,}", flops))
    return Grid(header, tuple(rows), caption="Sizes and costs")


def setting(sources: Sequence[Source]) -> Grid:
    """What all runs share, and on what they ran."""
    results = [run.result for source in sources for run in source.runs]

    def each(*paths: str) -> str:
        """The distinct values over all runs: normally one."""
        lines = {", ".join(_spell(at(result, path)) for path in paths) for result in results}
        return "; ".join(sorted(lines))

    fields = [flat(result["config"]) for result in results]
    differing = sorted(key for key in fields[0] if len({json.dumps(one.get(key)) for one in fields}) > 1)
    matching = {one.get("model.match_params") for one in fields}
    matched = "the FFN pays for the gates" if matching == {True} else "gates add their parameters"
    seconds = [spent for result in results if (spent := at(result, "time.train_s")) is not None]
    time = f"{sum(seconds):,.0f} s in all, {min(seconds):.0f}–{max(seconds):.0f} s a run" if seconds else MISSING
    return Grid(
        ("what", "value"),
        (
            ("rows differ in", ", ".join(differing) or "nothing: one run"),
            ("held equal", f"every other field of the config; {matched}"),
            ("data and fingerprint", each("data.source", "data.fingerprint")),
            ("vocabulary", each("data.vocab_size")),
            ("tokens: training, evaluation", each("data.tokens", "eval.tokens")),
            ("machine", each("environment.platform", "environment.device_kind", "environment.cpu")),
            ("jax, python", each("environment.jax", "environment.python")),
            ("attention, dtype", each("environment.attention", "environment.dtype")),
            ("training time", f"{len(results)} runs, one process each: {time}"),
        ),
        caption="What the runs share, and where they ran",
        prose=(1,),
    )


def at(result: Result, path: str) -> Any:
    """A field by its dotted path, None where it is not there."""
    node: Any = result
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by their dotted paths."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _spell(value: Any) -> str:
    return MISSING if value is None else f"{value:,}" if isinstance(value, int) else str(value)
