"""What a trained gate does, and why the first token: forward passes of bench models that were changed after training.

`python -m experiments.interventions` trains what is missing of bench A and the deep bench (shared with Table 4) and
measures F-Attn, M-Act and held-out loss when the scores X W of its G1 gate are replaced:

* *mean*: every gate of a layer is that layer's mean over tokens, heads and channels; *by head and channel*: each gate
  is its own mean over tokens, so that all that depends on the token is gone; *open*: every gate is 1.
* *swapped*: a head gets the scores of the one before. *scores x t*: a sharper (t > 1) or a flatter gate.

All are changes of parameters (a kernel of zeros, a bias, a permutation), so that what runs is the model itself. The
second table moves BOS in the ungated models and asks where the attention goes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console

from configs.variants import apply
from experiments import provenance
from experiments.render import Block, Bullets, Grid, Heading, Link, Text, save, terminal
from experiments.report import Stat
from experiments.runner import Run, run_all, sweep
from experiments.sinkbench import BOS, sinkbench_config, sinkbench_deep_config
from experiments.study import command, cut
from gattn import gates, model, probes, resume
from gattn.config import Config, override
from gattn.data.loader import Batch
from gattn.files import home, write_atomically
from gattn.layers import Context
from gattn.rope import rope_table
from gattn.step import eval_step, evaluate_all

BENCHES = {"A": sinkbench_config, "deep": sinkbench_deep_config}
GATED = {"SDPA elementwise": "g1_elementwise", "SDPA headwise": "g1_headwise"}
SEQUENCES = 64  # of the second table

Measure = dict[str, list[dict[str, float]]]
"""What was changed -> the measures of each seed."""
Measures = dict[str, Measure]
"""Bench and variant -> `Measure`."""

NOTE = (
    "Mean over seeds (lowest-highest) on held-out sequences; nothing was trained after the change. F-Attn of uniform "
    "attention is {floor}. Excess: held-out loss above that of the true distribution, in nats."
)
NOTE_FIRST = (
    "Share of attention that later tokens give to the token that comes first, and to BOS where it stands elsewhere: "
    "mean over layers, heads, queries and {sequences} held-out sequences. Uniform: the same for uniform attention. The "
    "models were trained with BOS in front, always."
)


@dataclasses.dataclass(frozen=True)
class Args:
    """Measures trained bench models after changing their gates, or where BOS stands."""

    seeds: int = 3
    """Seeds per model."""
    workers: int | None = None
    """Runs at a time; sized to the machine by default."""
    steps: int | None = None
    """Cuts every run to this many steps, to try the machinery; the report goes to a folder of its own."""


@dataclasses.dataclass(frozen=True)
class Gated:
    """A trained model with a G1 gate that has a bias (of 0, as trained), and its gates' means over held-out tokens."""

    config: Config
    params: nnx.State
    means: Float[Array, "L N H_or_1"]

    @property
    def kernel(self) -> Float[Array, "L D N H_or_1"]:
        return self.params["blocks"]["attention"]["gates"]["g1"]["kernel"][...]

    def replaced(self, kernel: Array, bias: Array) -> nnx.State:
        """The parameters with these of the gate, by layer."""
        flat = dict(nnx.to_flat_state(self.params))
        for name, value in (("kernel", kernel), ("bias", bias)):
            path = ("blocks", "attention", "gates", "g1", name)
            flat[path] = flat[path].replace(jnp.broadcast_to(value, flat[path].shape).astype(jnp.float32))
        return nnx.from_flat_state(list(flat.items()))


INTERVENTIONS: dict[str, Callable[[Gated], nnx.State]] = {
    "as trained": lambda g: g.replaced(g.kernel, jnp.zeros(())),
    "mean": lambda g: g.replaced(0 * g.kernel, _logit(g.means.mean(axis=(1, 2), keepdims=True))),
    "by head and channel": lambda g: g.replaced(0 * g.kernel, _logit(g.means)),
    "open": lambda g: g.replaced(0 * g.kernel, jnp.float32(30.0)),
    "swapped": lambda g: g.replaced(jnp.roll(g.kernel, 1, axis=2), jnp.zeros(())),
    **{f"scores x {t:g}": lambda g, t=t: g.replaced(t * g.kernel, jnp.zeros(())) for t in (0.5, 2.0, 4.0)},
}


def _logit(mean: Array) -> Array:
    return jnp.log(mean) - jnp.log1p(-mean)


def with_bias(loaded: resume.Loaded) -> Gated:
    """A loaded run of a model with a G1 gate, made changeable."""
    (spec,) = loaded.config.model.gates
    config = override(loaded.config, {"model.gates": (dataclasses.replace(spec, bias=True),)})
    flat = dict(nnx.to_flat_state(model.abstract(config.model)[1]))
    trained = dict(nnx.to_flat_state(loaded.params))
    zero = {path: leaf.replace(jnp.zeros(leaf.shape, leaf.dtype)) for path, leaf in flat.items() if path not in trained}
    params = nnx.from_flat_state(list((trained | zero).items()))
    batches = loaded.source.held_out["held-out"]()
    return Gated(config, params, gate_means(config, params, batches))


def gate_means(config: Config, params: nnx.State, batches: Iterator[Batch]) -> Float[Array, "L N H_or_1"]:
    """Activated values of the G1 gate, by layer, head and channel, mean over all tokens."""
    graph = model.abstract(config.model)[0]
    (spec,) = config.model.gates

    @jax.jit
    def sums(params, tokens):
        decoder = nnx.merge(graph, params)
        blocks, stacked = nnx.split(decoder.blocks)
        hidden = decoder.embedding[...][tokens]
        rope = rope_table(tokens.shape[1], config.model.head_dim, config.model.rope_theta)
        found = []
        for i in range(config.model.num_layers):
            block = nnx.merge(blocks, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            scores = block.attention.projections(block.attention_norm(hidden))[3]["g1"]
            found.append(gates.activate(spec, scores).sum(axis=(0, 1)))
            hidden, _ = block(hidden, Context(None, None, rope))
        return jnp.stack(found)

    total, count = jnp.float32(0.0), 0
    for batch in batches:
        total, count = total + sums(params, batch["inputs"]), count + batch["inputs"].size
    return total / count


def measure(
    step: Callable, config: Config, params: nnx.State, batches: Iterator[Batch], bayes: float
) -> dict[str, float]:
    """F-Attn, its floor, M-Act, gate score and excess over the Bayes loss, by `step` (of `eval_step`)."""
    loss, tokens, _, sums = evaluate_all(step, params, batches, None)
    found = probes.summarise(sums, config.model.activations)
    return {
        "f_attn": found["f_attn"],
        "floor": found["f_attn_floor"],
        "m_act": found["m_act"],
        "gate": found["gates"]["g1"]["mean"],
        "excess": loss / tokens - bayes,
    }


# ---- why the first token ----------------------------------------------------------------------------------------


def _again(tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """BOS in front, and once more in the middle."""
    middle = tokens.shape[1] // 2
    return np.concatenate([tokens[:, :middle], np.full_like(tokens[:, :1], BOS), tokens[:, middle:-1]], axis=1)


# What is read, and where BOS then stands beside or instead of the front.
PLACES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool]] = {
    "BOS in front, as trained": (lambda tokens: tokens, False),
    "no BOS": (lambda tokens: tokens[:, 1:], False),
    "BOS in front and in the middle": (_again, True),
    "BOS in the middle alone": (lambda tokens: _again(tokens)[:, 1:], True),
}


def mean_map(graph: nnx.GraphDef) -> Callable[[nnx.State, Any], Float[Array, "T T"]]:
    """Attention over one sequence, mean over layers and heads."""
    return jax.jit(
        lambda params, tokens: nnx.merge(graph, params)(tokens, probe=True)[1]["layers"]["map"].mean(axis=(0, 1))
    )


def attention_to(loaded: resume.Loaded, place: str, maps: Callable) -> dict[str, float]:
    """Mean share of the first token and of the BOS in the middle in the attention of the queries behind the middle; by
    `maps` (of `mean_map`)."""
    change, moved = PLACES[place]
    tokens = np.concatenate([batch["inputs"] for batch in loaded.source.held_out["held-out"]()])[:SEQUENCES, :48]
    changed = change(tokens)
    found = np.mean([maps(loaded.params, row[None]) for row in changed], axis=0)
    middle = int(np.flatnonzero(changed[0, 1:] == BOS)[0]) + 1 if moved else len(found) // 2
    behind = found[middle + 1 :]
    uniform = float(np.mean([1 / (query + 1) for query in range(middle + 1, len(found))]))
    shares = {"first": float(behind[:, 0].mean()), "uniform": uniform}
    return shares | ({"moved": float(behind[:, middle].mean())} if moved else {})


# ---- the command ------------------------------------------------------------------------------------------------


def runs(args: Args) -> dict[str, list[Run]]:
    """Bench and variant -> its runs over seeds."""
    out = {}
    for bench, config in BENCHES.items():
        for name, variant in {"baseline": "baseline", **GATED}.items():
            key = f"{bench}: {name}"
            out[key] = sweep(cut(apply(config(), variant), args.steps), {key: {}}, range(args.seeds))
    return out


def main(args: Args, console: Console) -> int:
    """Trains what is missing, measures, reports; 1 where a run failed."""
    wanted = runs(args)
    outcomes = run_all([run for group in wanted.values() for run in group], args.workers, console=console)
    if failed := [outcome.run for outcome in outcomes if outcome.state == "failed"]:
        console.print(f"failed: {', '.join(str(run.folder) for run in failed)}", highlight=False, soft_wrap=True)
        return 1
    gated: Measures = {}
    places: Measures = {}
    for key, group in wanted.items():
        for run in group:
            loaded = resume.load(run.folder)
            if not run.config.model.gates:
                maps = mean_map(loaded.graph)
                for place in PLACES:
                    places.setdefault(key, {}).setdefault(place, []).append(attention_to(loaded, place, maps))
                continue
            changeable = with_bias(loaded)
            step = eval_step(model.abstract(changeable.config.model)[0], changeable.config, probe=True)
            for what, change in INTERVENTIONS.items():
                held_out = loaded.source.held_out["held-out"]()
                found = measure(step, changeable.config, change(changeable), held_out, loaded.source.bayes_loss or 0.0)
                gated.setdefault(key, {}).setdefault(what, []).append(found)
    folder = home() / "runs" / ("interventions" + (f"-{args.steps}-steps" if args.steps else ""))
    blocks = report(args, wanted, gated, places)
    write_atomically(folder / "interventions.json", json.dumps({"gates": gated, "first token": places}))
    save(folder, "report", "Interventions", blocks)
    terminal(blocks, console)
    console.print(f"\nReport: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    return 0


def report(args: Args, wanted: Mapping[str, list[Run]], gated: Measures, places: Measures) -> list[Block]:
    """Both tables, what they show, and where the numbers come from."""
    sources = _sources(wanted)
    anchors = {source.label: f"#{source.runs_anchor}" for source in sources}
    blocks: list[Block] = [
        Heading(1, "Interventions on trained gates"),
        Text("Forward passes of trained bench models whose gates, or whose first token, were changed."),
    ]
    columns = {"F-Attn": ("f_attn", ".3f"), "M-Act": ("m_act", ".3g"), "gate score": ("gate", ".3f")}
    columns["excess"] = ("excess", ".4f")
    for key, by_change in gated.items():
        floor = by_change["as trained"][0]["floor"]
        blocks += [Heading(2, f"Bench {key}"), Text(NOTE.format(floor=f"{floor:.3f}"))]
        blocks += [_grid("gate", columns, by_change, anchors[key], f"What becomes of bench {key}")]
        blocks += [Bullets((_without_input(key, by_change),))]
    blocks += [Heading(2, "Why the first token?"), Text(NOTE_FIRST.format(sequences=SEQUENCES))]
    columns = {"first token": ("first", ".3f"), "BOS in the middle": ("moved", ".3f"), "uniform": ("uniform", ".3f")}
    for key, by_place in places.items():
        blocks += [_grid("what is read", columns, by_place, anchors[key], f"Bench {key}")]
    blocks += [Bullets(tuple(_follows_bos(key, by_place) for key, by_place in places.items()))]
    words = "python -m experiments.interventions" + (f" --seeds {args.seeds}" if args.seeds != Args.seeds else "")
    words += f" --steps {args.steps}" if args.steps else ""
    blocks += [Heading(2, "How to get this"), Text(f"Command: {words}", terminal=True)]
    blocks += [provenance.models(sources), provenance.setting(sources), *provenance.runs([], sources)]
    return [*blocks, *provenance.configs([("The models", sources)])]


def _sources(wanted: Mapping[str, list[Run]]) -> list[provenance.Source]:
    sources = []
    for number, (key, group) in enumerate(wanted.items(), 1):
        results = [(run, run.result()) for run in group]
        runs = tuple(provenance.Trained(run.folder.name, run.seed, found, ()) for run, found in results if found)
        sources.append(provenance.Source(key, provenance.row_anchor("models", number), runs))
    return sources


def _grid(first: str, columns: Mapping[str, tuple[str, str]], found: Measure, anchor: str, caption: str) -> Grid:
    rows = {what: [_stat(ones, field).text(form) for field, form in columns.values()] for what, ones in found.items()}
    linked = tuple((Link(what, anchor, quiet=True), *cells) for what, cells in rows.items())
    header = (first, *columns)
    return Grid(header, linked, (header, *((what, *cells) for what, cells in rows.items())), caption=caption)


def _stat(found: Sequence[Mapping[str, float]], field: str) -> Stat:
    values = tuple(one[field] for one in found if field in one)
    return Stat(values, bool(values))


def _without_input(key: str, found: Measure) -> str:
    """What the part of the gate that depends on the token does."""
    texts = []
    for field, form, name in (("f_attn", ".3f", "F-Attn"), ("m_act", ".3g", "M-Act"), ("excess", ".4f", "excess loss")):
        before, after = (_stat(found[what], field).text(form) for what in ("as trained", "by head and channel"))
        texts.append(f"{name} {before} becomes {after}")
    return f"{key}, without what depends on the token: {'; '.join(texts)}."


def _follows_bos(key: str, found: Measure) -> str:
    """Whether attention goes to the token or to the place."""
    alone, none = found["BOS in the middle alone"], found["no BOS"]
    given = [(none, "first"), (alone, "moved"), (alone, "first"), (alone, "uniform")]
    without, moved, first, uniform = (_stat(ones, field).text(".3f") for ones, field in given)
    return (
        f"{key}: without BOS the token that comes first gets {without}; with BOS in the middle alone that BOS gets "
        f"{moved}, the token that comes first {first} (uniform attention: {uniform})."
    )


if __name__ == "__main__":
    command(Args, main, __doc__)
