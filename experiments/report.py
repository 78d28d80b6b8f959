"""Tables from result.json: our numbers over seeds with the paper's beside them, pictures, and where it all comes from.

Nothing is scraped from logs and nothing is assumed: what was not measured prints as "missing", what a row does not have
(the gate score of an ungated model) as "–", and a finding is worded by the numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import plots, provenance
from experiments.provenance import MISSING, Source, Trained
from experiments.render import Block, Bullets, Grid, Heading, Link, Text, save, terminal
from experiments.runner import Run
from gattn.files import home

Result = dict[str, Any]
Finding = Callable[["Measured"], str]

NOT_APPLICABLE = "–"
MANY = 3  # rows of which nothing can be said are counted, not named, beyond this
LEGEND = (
    "Mean over seeds (lowest–highest). F-Attn: attention to the first token; floor: what uniform attention gives it "
    "for the same queries. Sink rate: share of heads with F-Attn above 0.3. M-Act: mean over layers of the largest "
    "activation. Missing: not measured yet; –: the row has no such thing; not finite: runs whose loss ceased to be, "
    "which are in no mean. Our numbers lead to their runs (in Markdown those of seeds)."
)


@dataclass(frozen=True)
class Column:
    """One measure. `value` reads a result.json, None where a row has no such thing; `paper` is the published column."""

    title: str
    value: Callable[[Result], float | None]
    format: str = ".3f"
    paper: str | None = None
    brief: str = ""
    """Title on the terminal; without one the column stands in the files only."""


@dataclass(frozen=True)
class Row:
    """One variant: its runs over seeds, and the paper's row (see `paper_row`) where there is one."""

    label: str
    runs: tuple[Run, ...]
    paper: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Section:
    """Rows that may be compared with each other."""

    name: str
    """Prefix of its picture files."""
    heading: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Table:
    """A report: `home()/runs/<name>/` with report.md, report.html and its pictures."""

    name: str
    title: str
    note: str
    command: str
    sections: tuple[Section, ...]


def paper() -> dict[str, Any]:
    """The published numbers, with their source."""
    return json.loads((Path(__file__).parent / "paper_tables.json").read_text())


def paper_rows(table: str) -> list[dict[str, Any]]:
    """The rows of a published table, by its columns."""
    published = paper()[table]
    return [dict(zip(published["columns"], line, strict=True)) for line in published["rows"]]


def paper_row(table: str, row: int) -> dict[str, Any]:
    """Row number `row` of a published table, e.g. `paper_row("table4", 2)["f_attn"]`."""
    return next(line for line in paper_rows(table) if line["row"] == row)


def load_results(runs: Sequence[Run]) -> list[Result | None]:
    """Each run's result.json, None where it is not finished."""
    return [run.result() for run in runs]


# ---- measures ---------------------------------------------------------------------------------------------------


def first_gate_mean(result: Result) -> float | None:
    """Mean score of the (first) gate, None without gates."""
    gates = result["probes"]["gates"]
    return next(iter(gates.values()))["mean"] if gates else None


def bayes_excess(result: Result) -> float | None:
    """Held-out loss above that of the true distribution, where it is known."""
    bayes = result["eval"]["bayes_loss"]
    return None if bayes is None else result["eval"]["loss"] - bayes


F_ATTN = Column("F-Attn", lambda r: r["probes"]["f_attn"], paper="f_attn", brief="F-Attn")
FLOOR = Column("floor", lambda r: r["probes"]["f_attn_floor"], brief="floor")
RATIO = Column("F-Attn / floor", lambda r: r["probes"]["f_attn"] / r["probes"]["f_attn_floor"], ".2f", brief="x floor")
GATE = Column("gate score", first_gate_mean, paper="gate_score", brief="gate")
M_ACT = Column("M-Act", lambda r: r["probes"]["m_act"], ".3g", paper="m_act", brief="M-Act")
SINK_RATE = Column("sink rate", lambda r: r["probes"]["sink_rate"], ".2f", brief="sinks")
ABSORBED = Column("absorbed", lambda r: r["probes"]["absorbed"], ".2f")
EXCESS = Column("loss - Bayes", bayes_excess, ".4f", brief="excess")
INITIAL_LOSS = Column("initial loss", lambda r: r["eval"]["initial_loss"])
LOSS = Column("held-out loss", lambda r: r["eval"]["loss"])
FALL = Column("fell by", lambda r: r["eval"]["initial_loss"] - r["eval"]["loss"], brief="fell by")
PERPLEXITY = Column("perplexity", lambda r: r["eval"]["perplexity"], ".2f", paper="ppl", brief="ppl")
BENCHMARKS = tuple(
    Column(title, lambda r, key=key: r["benchmarks"][key], ".2f", paper=key)
    for key, title in (("hellaswag", "HellaSwag"), ("mmlu", "MMLU"), ("gsm8k", "GSM8k"), ("ceval", "C-eval"))
)
BITS = Column("bits/byte", lambda r: r["eval"]["bits_per_byte"], ".4f", brief="bits/B")

ATTENTION_COLUMNS = (F_ATTN, FLOOR, RATIO, GATE, M_ACT, SINK_RATE)


@dataclass(frozen=True)
class Stat:
    """One measure over the seeds of a row."""

    values: tuple[float, ...]
    applies: bool
    diverged: int = 0
    """Runs whose loss or gradient ceased to be finite, and which therefore have no value."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def text(self, form: str, spread: bool = True) -> str:
        if not self.applies:
            return NOT_APPLICABLE
        lost = f"{self.diverged} not finite" if self.diverged else ""
        if not self.values:
            return lost or MISSING
        low, high = f"{min(self.values):{form}}", f"{max(self.values):{form}}"
        text = f"{self.mean:{form}}" + (f" ({low}–{high})" if spread and low != high else "")
        return f"{text}, {lost}" if lost else text


def stat(results: Sequence[Result | None], column: Column) -> Stat:
    """A measure of these runs; None is one that is not finished."""
    values, applies, diverged = [], True, 0
    for result in filter(None, results):
        try:
            value = column.value(result)
        except KeyError:
            diverged += "diverged" in result
            continue
        if value is None:
            applies = False
        else:
            values.append(value)
    return Stat(tuple(values), applies or bool(values), diverged)


class Measured:
    """A section's results: by row label the loaded results, by label and column the statistics."""

    def __init__(self, section: Section):
        self.section = section
        self.results = {row.label: load_results(row.runs) for row in section.rows}
        self.columns = [c for c in section.columns if any(self.stat(row.label, c).applies for row in section.rows)]

    def stat(self, label: str, column: Column) -> Stat:
        """Over the seeds of a row; a label that is no row of this section counts as not measured."""
        return stat(self.results.get(label, []), column)

    def sources(self) -> list[Source]:
        """Rows that have results, with the runs these are from."""
        out = []
        for number, row in enumerate(self.section.rows, 1):
            runs = tuple(
                Trained(run.folder.name, run.seed, result, self._values(result))
                for run, result in zip(row.runs, self.results[row.label], strict=True)
                if result
            )
            if runs:
                out.append(Source(row.label, provenance.row_anchor(self.section.name, number), runs))
        return out

    def _values(self, result: Result) -> tuple[str, ...]:
        return tuple(stat([result], column).text(column.format) for column in self.columns)

    def present(self) -> dict[str, list[Result]]:
        """Rows that have results, with these only."""
        kept = {label: [r for r in results if r] for label, results in self.results.items()}
        return {label: results for label, results in kept.items() if results}


# ---- findings: claims that the numbers decide ---------------------------------------------------------------------


def ordering(column: Column, *labels: str) -> Finding:
    """Claims that the means rise in this order of rows."""

    def finding(measured: Measured) -> str:
        stats = [measured.stat(label, column) for label in labels]
        claim = f"{column.title}: {' < '.join(labels)}"
        if not all(stat.values for stat in stats):
            return f"{claim}: not measured ({_absent(labels, stats)} missing)."
        holds = all(a.mean < b.mean for a, b in pairwise(stats))
        means = ", ".join(stat.text(column.format, spread=False) for stat in stats)
        text = f"{claim}: {_verdict(holds)}; measured {means}"
        if holds and any(max(a.values) >= min(b.values) for a, b in pairwise(stats)):
            text += " in the mean, with overlapping ranges of seeds"
        return text + "."

    return finding


def bound(column: Column, labels: Sequence[str], *, above: float | None = None, below: float | None = None) -> Finding:
    """Claims that the means of these rows lie above or below a number."""

    def finding(measured: Measured) -> str:
        stats = [measured.stat(label, column) for label in labels]
        side = f"above {above:g}" if above is not None else f"below {below:g}"
        claim = f"{column.title} of {', '.join(labels)} {side}"
        if not all(stat.values for stat in stats):
            return f"{claim}: not measured ({_absent(labels, stats)} missing)."
        holds = all(stat.mean > above if above is not None else stat.mean < below for stat in stats)
        return f"{claim}: {_verdict(holds)}; measured {', '.join(stat.text(column.format) for stat in stats)}."

    return finding


def same_order_as_paper(column: Column) -> Finding:
    """Counts the pairs of rows that this measure orders as the paper does."""

    def finding(measured: Measured) -> str:
        pairs = []
        for row in measured.section.rows:
            published = row.paper.get(column.paper) if row.paper else None
            stat = measured.stat(row.label, column)
            if published is not None and stat.values:
                pairs.append((published, stat.mean))
        if len(pairs) < 2:
            return f"{column.title}: too few rows measured to compare their order with the paper's."
        same = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(pairs, 2))
        total = len(pairs) * (len(pairs) - 1) // 2
        return f"{column.title}: {same} of {total} pairs of rows are ordered as in the paper."

    return finding


def goes_with(column: Column, other: Column, *labels: str) -> Finding:
    """Claims that of any two of these rows the one with less of a measure has less of the other, in the mean."""

    def finding(measured: Measured) -> str:
        means = {}
        for label in labels:
            both = measured.stat(label, column), measured.stat(label, other)
            if both[0].values and both[1].values:
                means[label] = both[0].mean, both[1].mean
        claim = f"Less {column.title}, less {other.title} ({', '.join(labels)})"
        if len(means) < 2:
            return f"{claim}: not measured."
        pairs = list(combinations(means.values(), 2))
        same = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
        return f"{claim}: {_verdict(same == len(pairs))}; so it is in {same} of {len(pairs)} pairs of rows."

    return finding


def change(column: Column, baseline: str, label: str) -> Finding:
    """States how a measure of one row differs from the baseline's, both over seeds."""

    def finding(measured: Measured) -> str:
        stats = [measured.stat(name, column) for name in (baseline, label)]
        if not all(stat.values for stat in stats):
            texts = [stat.text(column.format) for stat in stats]
            return f"{column.title} of {label} against {baseline}: {texts[1]} against {texts[0]}."
        base, ours = stats
        word = "equal to" if ours.mean == base.mean else "lower than" if ours.mean < base.mean else "higher than"
        apart = max(ours.values) < min(base.values) or max(base.values) < min(ours.values)
        seeds = min(len(base.values), len(ours.values))
        if seeds == 1:
            doubt = "; one seed, so the difference may be noise"
        else:
            doubt = f"; the ranges of {seeds} seeds {'do not overlap' if apart else 'overlap'}"
        texts = (ours.text(column.format), base.text(column.format))
        return f"{column.title} of {label} is {word} {baseline}'s: {texts[0]} against {texts[1]}{doubt}."

    return finding


def against(ours: Stat, base: Stat) -> str:
    """Lower or higher: every seed lies so to every seed of the baseline; overlaps; or why that cannot be told."""
    if not ours.values or not base.values:
        return ""
    if ours.diverged or base.diverged:
        return f"{ours.diverged + base.diverged} not finite"
    if len(ours.values) == 1 or len(base.values) == 1:
        return "one seed"
    if max(ours.values) < min(base.values):
        return "lower"
    return "higher" if min(ours.values) > max(base.values) else "overlaps"


def claim(title: str, verdicts: Mapping[str, Sequence[str]]) -> str:
    """Which rows are lower, higher or neither, by their `against`; nothing of those that cannot be told."""
    title = f"{title[0].upper()}{title[1:]}"
    told = {word: verdicts[word] for word in ("lower", "overlaps", "higher") if word in verdicts}
    if not told:
        return f"{title}: {'one seed tells nothing' if 'one seed' in verdicts else 'not trained'}."
    texts = []
    for word, names in told.items():
        many = word == "overlaps" and len(names) > MANY
        texts.append(f"{word}: {f'{len(names)} other rows' if many else ', '.join(names)}")
    return f"{title}, against the baseline: {'; '.join(texts)}."


def apart(column: Column) -> Finding:
    """States which rows lie wholly below or above the row `baseline`, all seeds of both."""

    def finding(measured: Measured) -> str:
        verdicts: dict[str, list[str]] = {}
        for row in measured.section.rows:
            if row.label != "baseline":
                verdict = against(measured.stat(row.label, column), measured.stat("baseline", column))
                verdicts.setdefault(verdict, []).append(row.label)
        return claim(column.title, verdicts)

    return finding


def loss_fall(measured: Measured) -> str:
    """By how much training lowered the held-out loss, row by row."""
    ended = {label: [r for r in results if r and "diverged" not in r] for label, results in measured.results.items()}
    falls = [(label, *(stat(results, c) for c in (INITIAL_LOSS, LOSS, FALL))) for label, results in ended.items()]
    texts = [
        f"from {start.mean:.3f} to {end.mean:.3f} (by {fall.mean:.3f}) for {label}"
        for label, start, end, fall in falls
        if fall.values
    ]
    return f"Held-out loss went {'; '.join(texts)}." if texts else "Held-out loss: not measured."


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _absent(labels: Sequence[str], stats: Sequence[Stat]) -> str:
    return ", ".join(label for label, stat in zip(labels, stats, strict=True) if not stat.values)


# ---- the report -------------------------------------------------------------------------------------------------


def write(table: Table, console: Console | None = None) -> Path:
    """Builds the report from the results on disk, writes it, shows the short form; returns its folder."""
    folder = home() / "runs" / table.name
    blocks: list[Block] = [Heading(1, table.title), Text(table.note, terminal=True)]
    styles = plots.styles(row.label for section in table.sections for row in section.rows)
    measured = [Measured(section) for section in table.sections]
    for one in measured:
        blocks += _section(one, styles)
    blocks += [
        Heading(2, "How to get this"),
        Text(f"Command: {table.command}", terminal=True),
        Text(f"Published: {paper()['source']}"),
        *provenance.configs([(one.section.heading, one.sources()) for one in measured]),
    ]
    names = save(folder, "report", table.title, blocks)
    for stale in set(folder.glob("*.png")) - {folder / name for name in names}:
        stale.unlink()
    console = console or Console()
    terminal(blocks, console)
    console.print(f"\nReport: {folder / 'report.html'}, {folder / 'report.md'}", highlight=False, soft_wrap=True)
    return folder


def _section(measured: Measured, styles: plots.Styles) -> list[Block]:
    section, sources = measured.section, measured.sources()
    blocks: list[Block] = [Heading(2, section.heading), Text(section.note), _numbers(measured), Text(LEGEND)]
    if section.findings:
        blocks.append(Bullets(tuple(finding(measured) for finding in section.findings)))
    if sources:
        published = {row.label: row.paper for row in section.rows if row.paper}
        blocks += plots.images(section.name, measured.present(), published, styles)
        blocks += [Heading(3, "What was trained"), provenance.models(sources), provenance.setting(sources)]
        blocks += provenance.runs([column.title for column in measured.columns], sources)
    return blocks


def _numbers(measured: Measured) -> Grid:
    header, titles = ["variant"], ["variant"]
    for column in measured.columns:
        header += [column.title, f"{column.title}, paper"] if column.paper else [column.title]
        if column.brief:
            titles += [column.brief, "paper"] if column.paper else [column.brief]
    anchors = {source.label: f"#{source.runs_anchor}" for source in measured.sources()}
    long, short = [], []
    for row in measured.section.rows:
        cells, brief = [row.label], [row.label]
        for column in measured.columns:
            found = measured.stat(row.label, column)
            published = (row.paper or {}).get(column.paper)
            beside = [NOT_APPLICABLE if published is None else f"{published:g}"] if column.paper else []
            text = found.text(column.format)
            cells += [Link(text, anchors[row.label], quiet=True) if found.values else text, *beside]
            if column.brief:
                brief += [found.text(column.format, spread=False), *beside]
        done = f"{sum(r is not None for r in measured.results[row.label])}/{len(row.runs)}"
        long.append((*cells, Link(done, anchors[row.label]) if row.label in anchors else done))
        short.append((*brief, done))
    caption = "Mean over seeds (lowest–highest), beside the paper's"
    return Grid((*header, "seeds"), tuple(long), ((*titles, "seeds"), *short), caption)
