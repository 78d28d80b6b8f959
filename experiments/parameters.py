"""What each row of the paper's Tables 1 and 6 adds to the 15A2B model: `python -m experiments.parameters`.

Our numbers are counted on the model as built, without allocating it; the published ones stand beside them. Where the
paper contradicts itself, or its own shape, the table says so and nothing is fitted to it. Takes seconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from rich.console import Console

from configs.models import moe_15a2b
from configs.variants import PAPER, apply
from experiments import report
from experiments.render import Block, Bullets, Grid, Heading, Text, terminal
from gattn import model

PRINTED_TOTAL, PRINTED_ACTIVE = 15.0, 2.54  # billions; paper Sec. 3.1

TABLES = ("table1", "table6")
PROJECTIONS = (
    "each kv head has E value projections instead of one, (E - 1) x 25.2M more, as many keys where they switch too, "
    "and a router; what the paper shares between them it does not say"
)
SAME = "4 top 4 prints the same with switched keys and without, though those have projections, too"
REMARKS = {
    "experts_plus4": (
        "four experts of width 768 are 4 x 3 x 2048 x 768 x 24 layers = 453M, and 0.2M of the routers; 400 is printed",
    ),
    "switch_kv_8_top8": (PROJECTIONS,),
    "switch_kv_4_top4": (PROJECTIONS, SAME),
    "switch_v_4_top4": (PROJECTIONS, SAME),
    "switch_v_8_top2": (PROJECTIONS,),
    "switch_v_1_top1": ("the headwise value gate by another name, for which Table 1, row 11, prints 0.2",),
}


@dataclass(frozen=True)
class Added:
    """Parameters that one row of the paper adds to the baseline, in millions."""

    row: int
    method: str
    variant: str
    ours: float
    printed: float

    @property
    def agrees(self) -> bool:
        """Whether ours, rounded or cut off to the digits that are printed, is what is printed."""
        exponent = Decimal(str(self.printed)).normalize().as_tuple().exponent
        digit = 10.0 ** min(int(exponent), 0)
        return -digit / 2 <= self.ours - self.printed < digit

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why ours differs; empty where it does not."""
        return () if self.agrees else REMARKS[self.variant]


@cache
def count(variant: str) -> dict[str, int]:
    """`gattn.model.param_counts` of the 15A2B model with a variant."""
    return model.param_counts(apply(moe_15a2b(), variant).model)


def added(table: str) -> list[Added]:
    """All rows of "table1" or "table6"."""
    base = count("baseline")["params"]
    return [
        Added(
            row["row"],
            row["method"],
            variant := PAPER[table][row["row"]],
            (count(variant)["params"] - base) / 1e6,
            row["added_params_m"],
        )
        for row in report.paper_rows(table)
    ]


def blocks() -> list[Block]:
    """The report: a table for each of the paper's, with remarks, and the model's own size."""
    out: list[Block] = [Heading(1, "Parameters added to moe_15a2b, in millions")]
    for table in TABLES:
        rows = added(table)
        header = ("row", "method", "variant", "ours", "paper", "")
        cells = tuple(
            (f"{a.row}", a.method, a.variant, f"{a.ours:.1f}", f"{a.printed:g}", "" if a.agrees else "differs")
            for a in rows
        )
        out += [Heading(2, f"Table {table.removeprefix('table')}"), Grid(header, cells, short=(header, *cells))]
        remarks: dict[str, list[str]] = {}
        for a in rows:
            for remark in a.remarks:
                remarks.setdefault(remark, []).append(str(a.row))
        out.append(Bullets(tuple(f"Row {', '.join(where)}: {remark}." for remark, where in remarks.items())))
    size = count("baseline")
    text = (
        f"The model itself: {size['params'] / 1e9:.2f}B parameters (paper: {PRINTED_TOTAL:g}B), of which a token uses "
        f"{size['active_params'] / 1e9:.2f}B (paper: {PRINTED_ACTIVE:g}B), both matrices of "
        f"{moe_15a2b().model.vocab_size:,} tokens included. The paper names no vocabulary; none makes both of its "
        "numbers true of its shape."
    )
    return [*out, Heading(2, "Size"), Text(text, terminal=True)]


def main() -> int:
    terminal(blocks(), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
