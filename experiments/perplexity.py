"""What Tables 1, 3 and 6 share: rows of one mixture-of-experts model, trained alike, compared by perplexity."""

from __future__ import annotations

from collections.abc import Sequence

from configs.models import moe_15a2b, moe_small, moe_tiny
from experiments import report, study
from experiments.capability import CHANCE, capability_config
from experiments.report import Column, Finding
from experiments.study import Part, ScaledArgs, Study

BASES = {"cpu": moe_tiny, "chip": moe_small, "pod": moe_15a2b}
COLUMNS = (report.PERPLEXITY, report.BITS, report.LOSS, report.FALL, *report.ATTENTION_COLUMNS, *report.BENCHMARKS)
NOTE = (
    "Decoders with experts. Held equal: tokens, and every setting that the table below does not list as different; as "
    "in the paper a row adds its parameters and FLOPs, both of which are listed. Perplexity is "
    "per token of our tokenizer and no match for the paper's; bits/byte does not depend on the tokenizer. Benchmarks "
    "(HellaSwag and so on) are the paper's; ours are missing where a run was not evaluated on them. F-Attn has to be "
    "read against its floor: sinks in text appear only after 0.5 to 1 billion tokens."
)

CAPABILITIES = tuple(
    Column(f"{task} (chance {chance:.3f})", lambda r, task=task: r["eval"]["sets"][task]["loss"], brief=task)
    for task, chance in CHANCE.items()
)
CAPABILITIES_NOTE = (
    "The same rows as small decoders with experts, trained on four tasks at once: held-out nats per answer, 0 for who "
    "knows the rule, chance for who does not see the row. Induction copies what once followed the same two tokens; "
    "recall is the newest value of a key; arithmetic, sums modulo 17 of pairs trained on the other way round only; "
    "brackets, the type of the one to close. They stand where the paper has MMLU and GSM8K and are no match for them. "
    "Arithmetic leaves chance suddenly, in some seeds late: its range tells more than its mean."
)


def rows(table: str, args: ScaledArgs, title: str, findings: Sequence[Finding], scale: str) -> Part:
    """The rows of a published table as language models of a scale."""
    base = study.given(BASES[scale](), args)
    tokens = base.train.steps * base.data.batch_size * base.data.seq_len
    return Part(
        name=f"experts {scale}",
        heading=f"{title}, {tokens:,} tokens a run",
        note=NOTE,
        base=base,
        lines=study.paper_lines(table),
        seeds=args.seeds,
        columns=COLUMNS,
        findings=(
            report.same_order_as_paper(report.PERPLEXITY),
            report.apart(report.PERPLEXITY),
            *findings,
        ),
    )


def capabilities(table: str, args: ScaledArgs) -> Part:
    """The rows of a published table on the capability bench."""
    return Part(
        name="capability",
        heading="Capabilities",
        note=CAPABILITIES_NOTE,
        base=study.cut(capability_config(), args.steps),
        lines=study.paper_lines(table),
        seeds=args.seeds,
        columns=CAPABILITIES,
        findings=tuple(map(report.apart, CAPABILITIES)),
    )


def build(table: str, args: ScaledArgs, title: str, findings: Sequence[Finding] = ()) -> Study:
    """All rows of a published table at a scale."""
    parts = [rows(table, args, title, findings, args.scale)]
    parts += [capabilities(table, args)] if args.scale == "cpu" else []
    model = parts[0].base.model
    note = (
        f"Rows of the paper's Table {table.removeprefix('table')} ({report.paper()[table]['model']}) with the model "
        f"`{BASES[args.scale].__name__}`. The paper's numbers stand beside ours for the order of rows and the size of "
        "effects: models, data and training differ by orders of magnitude. Rows have the paper's names, but "
        f"their sizes are this model's: {model.num_kv_heads} kv heads where it has 4, and twice as many where it has "
        f"8; {model.num_heads} and {model.num_heads * 3 // 2} query heads for its 32 and 48; {model.num_experts} "
        f"experts, top-{model.experts_per_token}, for its 128, top-8, and four more of each."
    )
    return study.study(table, args, f"Gated attention, Table {table.removeprefix('table')}", note, parts)
