"""Gated attention on a GPU: first whether it is right, then how fast it is. One command, under 4 minutes.

    python -m benchmarks.gpu_attention [--json FILE]
    python -m benchmarks.gpu_attention --smoke --implementations chunked,reference     # tiny sizes, on any machine

Needs jax (0.11.2 or 0.12) with CUDA, numpy and this package; tokamax is timed too where it is installed.

Correctness: output, log-sum-exp and all gradients against NumPy in float64, next to what attention written by hand in
the same precision (products, softmax in float32, products, gate) differs from it. An error of more than 1.5 times that
one, in the root mean square or at the 99.9th percentile, is a failure, and makes the exit code 1.

Time: causal, bfloat16, 32 query heads, 16384 tokens as 1 x 16384 or 4 x 4096. A call is repeated in a loop on the
device; the implementations take turns, and the median counts. "residuals" is the forward pass that also leaves what the
backward pass needs. A forward pass has 4 B N T^2 H / 2 FLOPs (half because of causality), a backward pass 2.5 times as
many. Share: of the rate at which this card was measured to multiply 8192 x 8192 bfloat16 matrices in the same run. What
does not fit into --minutes is left out, the least important first, and named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gattn import gated_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPLEMENTATIONS = ("gpu", "cudnn", "tokamax", "chunked", "reference")
PASSES = ("forward", "backward", "residuals")
TOKENS, HEADS = 16384, 32
# FLOPs that a timed loop should have: 40 ms at 600 TFLOP/s, beside which launching it is nothing.
LOOP_FLOPS = 24e12
TURNS = 7
# How much longer than the longest one so far a unit of work may take.
MARGIN = 1.25
# Errors up to this are nobody's fault: of float32 results, which the unfused computation may have exactly.
NEGLIGIBLE = 1e-5


class Case(NamedTuple):
    """A call whose results are checked. `window`: keys before the row; `packed`: documents and padding in each row."""

    name: str
    head_dim: int
    length: int = 1024
    key_length: int = 1024
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    gate: str = "elementwise"
    activation: str = "sigmoid"
    causal: bool = True
    window: int | None = None
    packed: bool = False
    sinks: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case("causal", 128),
    Case("causal", 64),
    Case("causal", 256, length=512, key_length=512),
    Case("ragged, full", 128, length=900, key_length=1100, gate="headwise", causal=False),
    Case("window, sinks", 128, window=200, sinks=True),
    Case("packed, ns_sigmoid", 64, 512, 512, batch=2, gate="headwise", activation="ns_sigmoid", packed=True),
    Case("float16", 128, length=512, key_length=512, dtype="float16"),
    Case("full, no gate", 256, length=512, key_length=512, kv_heads=8, gate="none", causal=False),
)


class Problem(NamedTuple):
    """Causal attention of 32 query heads; all problems have equally many tokens."""

    head_dim: int
    length: int
    kv_heads: int = 8
    heads: int = HEADS
    tokens: int = TOKENS

    @property
    def batch(self) -> int:
        return self.tokens // self.length

    def flops(self, direction: str) -> float:
        """Of the useful products: two forward, five backward, half of each because of causality."""
        forward = 4 * self.batch * self.heads * self.length**2 * self.head_dim / 2
        return 2.5 * forward if direction == "backward" else forward


# The most important first.
PROBLEMS = tuple(
    Problem(*sizes)
    for sizes in (
        (128, 16384), (128, 4096), (64, 16384), (256, 16384), (128, 16384, 4), (64, 4096), (256, 4096),
        (128, 4096, 4), (64, 16384, 4), (256, 16384, 4), (64, 4096, 4), (256, 4096, 4),
    )
)  # fmt: skip


class Budget:
    """Seconds to spend. A unit of work is begun only if there is time for it, judged by the longest of its kind."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._start, self._seconds = clock, clock(), seconds
        self._longest: dict[str, float] = {}

    def allows(self, kind: str, part: float = 1.0) -> bool:
        """Within the first `part` of the time. Of an unknown kind, it takes the longest of all to be the measure."""
        longest = self._longest.get(kind, max(self._longest.values(), default=0.0))
        return self._clock() + MARGIN * longest < self._start + part * self._seconds

    @contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        start = self._clock()
        yield
        self._longest[kind] = max(self._longest.get(kind, 0.0), self._clock() - start)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Made on the device: it takes long to draw and to send so many numbers.
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype))()


def first_line(error: Exception) -> str:
    message = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *(line[:160] for line in message[:1])])


def draw(case: Case) -> tuple[dict[str, jax.Array], jax.Array, dict[str, Any], np.ndarray]:
    """What is differentiated by, the output's cotangent, all other arguments, and which pairs [B, T, S] attend."""
    shape = case.batch, case.length, case.heads, case.head_dim
    kv_shape = case.batch, case.key_length, case.kv_heads, case.head_dim
    arrays = {
        "query": normal(0, shape, case.dtype),
        "key": normal(1, kv_shape, case.dtype),
        "value": normal(2, kv_shape, case.dtype),
    }
    if case.gate != "none":
        arrays["gate"] = normal(3, shape if case.gate == "elementwise" else (*shape[:3], 1), case.dtype)
    if case.sinks:
        arrays["sinks"] = normal(4, (case.heads,), jnp.float32)
    rows, keys = np.arange(case.length)[:, None], np.arange(case.key_length)
    allowed = np.ones((case.batch, case.length, case.key_length), bool)
    more: dict[str, Any] = {"is_causal": case.causal, "gate_activation": case.activation}
    if case.causal:
        allowed &= keys <= rows
    if case.window is not None:
        more["local_window_size"] = case.window, 0
        allowed &= keys >= rows - case.window
    if case.packed:
        # Cuts at other places in each sequence; the last stretch is padding.
        ids = np.stack([4 * np.arange(case.length) // (case.length - 9 - 40 * i) for i in range(case.batch)])
        ids = np.where(ids < 4, ids, -1)
        more["segment_ids"] = jnp.asarray(ids, jnp.int32)
        allowed &= (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    return arrays, normal(5, shape, case.dtype), more, allowed


def exact(arrays: dict[str, Any], dout: Any, allowed: np.ndarray, activation: str = "sigmoid") -> dict[str, np.ndarray]:
    """Output, lse and gradients in float64, by the formulas."""
    wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    heads, head_dim = wide["query"].shape[2:]
    kv_heads = wide["key"].shape[2]
    query, dout = (x.swapaxes(1, 2) for x in (wide["query"], np.asarray(dout, np.float64)))
    key, value = (np.repeat(wide[name].swapaxes(1, 2), heads // kv_heads, axis=1) for name in ("key", "value"))
    scale = head_dim**-0.5
    logits = np.where(allowed[:, None], scale * query @ key.swapaxes(2, 3), -np.inf)
    sinks = wide.get("sinks", np.full(heads, -np.inf))[:, None, None]
    peak = np.maximum(logits.max(-1, keepdims=True), sinks)
    peak[np.isinf(peak)] = 0
    total = np.exp(logits - peak).sum(-1, keepdims=True) + np.exp(sinks - peak)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + peak
    p = np.exp(logits - np.where(total == 0, np.inf, lse))
    ungated = p @ value
    multiplier, slope = np.ones(1), np.zeros(1)
    if "gate" in wide:
        sigma = 1 / (1 + np.exp(-wide["gate"].swapaxes(1, 2)))
        ns = activation == "ns_sigmoid"
        multiplier, slope = 0.5 + 0.5 * sigma if ns else sigma, sigma * (1 - sigma) * (0.5 if ns else 1)
    dungated = dout * multiplier
    delta = (dungated * ungated).sum(-1, keepdims=True)
    ds = p * (dungated @ value.swapaxes(2, 3) - delta)

    def by_kv_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2).swapaxes(1, 2)

    results = {
        "out": (ungated * multiplier).swapaxes(1, 2),
        "lse": lse[..., 0].swapaxes(1, 2),
        "query": scale * (ds @ key).swapaxes(1, 2),
        "key": scale * by_kv_head(ds.swapaxes(2, 3) @ query),
        "value": by_kv_head(p.swapaxes(2, 3) @ dungated),
    }
    if "gate" in wide:
        dgate = (dout * ungated * slope).swapaxes(1, 2)
        results["gate"] = dgate if wide["gate"].shape[-1] > 1 else dgate.sum(-1, keepdims=True)
    if "sinks" in wide:
        results["sinks"] = -(np.exp(sinks - lse) * delta).sum((0, 2, 3))
    return results


def by_hand(arrays: dict[str, Any], allowed: Any, activation: str) -> tuple[jax.Array, jax.Array]:
    """Attention, then a gate, in the precision of the inputs, as one writes it without thinking; and its lse."""
    query = arrays["query"]
    key, value = (jnp.repeat(arrays[x], query.shape[2] // arrays[x].shape[2], axis=2) for x in ("key", "value"))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    allowed = allowed[:, None]
    scores = jnp.where(allowed, scores, -1e30)
    sinks = arrays.get("sinks", jnp.full(query.shape[2], -jnp.inf))[:, None, None]
    with_sink = jnp.concatenate([jnp.broadcast_to(sinks, (*scores.shape[:3], 1)), scores], axis=-1)
    p = jnp.where(allowed, jax.nn.softmax(with_sink)[..., 1:], 0)
    out = jnp.einsum("BNTS,BSNH->BTNH", p.astype(value.dtype), value)
    if "gate" in arrays:
        sigma = jax.nn.sigmoid(arrays["gate"])
        out = out * (0.5 + 0.5 * sigma if activation == "ns_sigmoid" else sigma)
    lse = jnp.where(allowed.any(-1) | (sinks[..., 0] > -jnp.inf), jax.nn.logsumexp(with_sink, axis=-1), -jnp.inf)
    return out, lse.swapaxes(1, 2)


def check(case: Case, implementations: list[str], compilers: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """One row per implementation: its errors and those of `by_hand`, for the output and every gradient."""
    arrays, dout, more, allowed = draw(case)

    def program(function: Callable[[dict[str, jax.Array]], Any]) -> Any:
        def out_and_grads(arrays, dout):
            (out, lse), pullback = jax.vjp(function, arrays)
            return {"out": out, "lse": lse, **pullback((dout, jnp.zeros_like(lse)))[0]}

        return compilers.submit(jax.jit(out_and_grads).lower(arrays, dout).compile)

    waiting: dict[str, Any] = {}
    rows = {name: {**case._asdict(), "implementation": name, "failed": True} for name in implementations}
    for name in implementations:
        try:
            waiting[name] = program(called(name, more))
        except Exception as error:
            # cuDNN does not do everything, and that is no surprise.
            rows[name] |= {"error": first_line(error), "failed": name != "cudnn"}
    plain = program(lambda arrays: by_hand(arrays, jnp.asarray(allowed), case.activation))
    expected = exact(arrays, dout, allowed, case.activation)
    reference = {name: errors(x, expected[name]) for name, x in plain.result()(arrays, dout).items()}
    for name, compiled in waiting.items():
        try:
            got = {array: errors(x, expected[array]) for array, x in compiled.result()(arrays, dout).items()}
        except Exception as error:
            rows[name]["error"] = first_line(error)
            continue
        limits = {array: [max(1.5 * x, NEGLIGIBLE) for x in both] for array, both in reference.items()}
        # Written so that NaN is a failure.
        wrong = [array for array, both in got.items() if not all(map(float.__le__, both, limits[array]))]
        rows[name] |= {"errors": got, "by_hand": reference, "wrong": wrong, "failed": bool(wrong)}
    return list(rows.values())


def called(implementation: str, more: dict[str, Any]) -> Callable[[dict[str, jax.Array]], Any]:
    def attend(arrays: dict[str, Any]) -> Any:
        return gated_dot_product_attention(**arrays, **more, implementation=implementation, return_residual=True)

    return attend


def errors(got: Any, expected: np.ndarray) -> tuple[float, float]:
    """Root mean square and 99.9th percentile of the error, over the root mean square of what is expected."""
    got, finite = np.asarray(got, np.float64), np.isfinite(expected)
    if not np.array_equal(np.isfinite(got), finite):
        return math.nan, math.nan
    size = np.sqrt(np.mean(expected[finite] ** 2))
    error = np.abs(got[finite] - expected[finite]) / size
    return float(np.sqrt(np.mean(error**2))), float(np.quantile(error, 0.999))


def print_check(row: dict[str, Any]) -> None:
    name = "{name}, D {head_dim}".format(**row)
    print(f"{name:26} {row['implementation']:9}", end=" ")
    if "error" in row:
        print("FAILED:" if row["failed"] else "cannot:", row["error"], flush=True)
        return
    for array, (rms, _) in row["errors"].items():
        print(f"{array} {1e3 * rms:.2f}/{1e3 * row['by_hand'][array][0]:.2f}", end="  ")
    print(f"<-- WRONG: {', '.join(row['wrong'])}" if row["failed"] else "", flush=True)


def repeated(call: Callable[..., Any], times: int) -> Callable[..., jax.Array]:
    """`call`, so many times in a loop on the device."""

    def run(*operands: Any) -> jax.Array:
        def body(_: Any, token: jax.Array) -> jax.Array:
            # The barriers keep the compiler from hoisting the call out of the loop, and from computing only the numbers
            # that are looked at. Looking at one is all that is added.
            operands_now, token = lax.optimization_barrier((operands, token))
            results = lax.optimization_barrier(jax.tree.leaves(call(*operands_now)))
            return sum((x[(0,) * x.ndim].astype(jnp.float32) for x in results), token)

        return lax.fori_loop(0, times, body, jnp.float32(0))

    return run


def attention(implementation: str, gated: bool) -> Callable[..., jax.Array]:
    """Causal attention of (query, key, value) or (query, key, value, gate)."""

    def attend(query, key, value, gate=None):
        if implementation != "tokamax":
            return gated_dot_product_attention(
                query, key, value, gate=gate, is_causal=True, implementation=implementation
            )
        import tokamax

        out = tokamax.dot_product_attention(query, key, value, is_causal=True)
        return multiply(out, gate) if gated else out

    # Saves the arrays as they are for the backward pass, not in float32.
    @jax.checkpoint
    def multiply(out, gate):
        return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)

    return attend


def measure(
    problem: Problem, direction: str, contestants: list[tuple[str, bool]], compilers: ThreadPoolExecutor, smoke: bool
) -> list[dict[str, Any]]:
    """Rows of one pass: milliseconds of a call by each contestant (implementation, gated), or the error it died of."""
    shape = problem.batch, problem.length, problem.heads, problem.head_dim
    kv_shape = problem.batch, problem.length, problem.kv_heads, problem.head_dim
    query, key, value, gate, dout = (
        normal(seed, x, jnp.bfloat16) for seed, x in enumerate((shape, kv_shape, kv_shape, shape, shape))
    )
    flops = problem.flops(direction)
    times, turns = (2, 2) if smoke else (math.ceil(LOOP_FLOPS / flops), TURNS)

    def prepare(implementation: str, gated: bool) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        """The loop, being compiled, and what makes its operands."""
        call = attention(implementation, gated)
        operands: tuple[Any, ...] = (query, key, value, gate) if gated else (query, key, value)

        def forward(*operands):
            return jax.vjp(call, *operands)

        if direction != "backward":
            looped = jax.jit(repeated(call if direction == "forward" else forward, times)).lower(*operands)
            return compilers.submit(looped.compile), lambda: operands
        traced = jax.jit(forward).trace(*operands)
        started = compilers.submit(traced.lower().compile)
        pullback = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info[1])
        looped = jax.jit(repeated(lambda pullback, dout: pullback(dout), times)).lower(pullback, dout)
        return compilers.submit(looped.compile), lambda: (started.result()(*operands)[1], dout)

    rows: list[dict[str, Any]] = []
    ready: list[Any] = []
    took: list[Any] = []
    for implementation, gated in contestants:
        row = {**problem._asdict(), "batch": problem.batch, "pass": direction}
        row |= {"implementation": implementation, "gated": gated, "milliseconds": None}
        rows.append(row)
        try:
            ready.append((row, *prepare(implementation, gated)))
        except Exception as error:
            row["error"] = first_line(error)
    for row, compiled, make in ready:
        try:
            program, operands = compiled.result(), make()
            # A warm-up.
            program(*operands).block_until_ready()
            took.append((row, program, operands, []))
        except Exception as error:
            row["error"] = first_line(error)
    for _, (_, program, operands, seconds) in itertools.product(range(turns), took):
        start = time.perf_counter()
        program(*operands).block_until_ready()
        seconds.append((time.perf_counter() - start) / times)
    for row, _, _, seconds in took:
        row |= {"milliseconds": 1e3 * float(np.median(seconds)), "spread": max(seconds) / min(seconds) - 1}
        row["tflops"] = flops / row["milliseconds"] / 1e9
    return rows


def matmul_rate(size: int, times: int) -> float:
    """TFLOP/s of bfloat16 products of square matrices: the median of some loops."""
    x, y = (normal(seed, (size, size), jnp.bfloat16) for seed in range(2))
    program = jax.jit(repeated(jnp.matmul, times)).lower(x, y).compile()
    seconds = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        program(x, y).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 * times / float(np.median(seconds[1:])) / 1e12


def compare(rows: list[dict[str, Any]], rate: float) -> None:
    """Adds to the rows of one pass: share of the matmul rate, cost of the gate, time over that of cuDNN + XLA gate."""
    took = {(row["implementation"], row["gated"]): row["milliseconds"] for row in rows if row["milliseconds"]}
    for row in rows:
        mine = row["milliseconds"]
        if not mine:
            continue
        row["share"] = row["tflops"] / rate
        if row["gated"] and (row["implementation"], False) in took:
            row["gate_overhead"] = mine / took[row["implementation"], False] - 1
        if ("cudnn", True) in took:
            row["over_cudnn_gated"] = mine / took["cudnn", True]


def print_times(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        heads, gated = f"{row['heads']}/{row['kv_heads']}", row["gated"]
        outside = " + XLA gate" if row["implementation"] in ("cudnn", "tokamax") else ", gated"
        label = row["implementation"] + (outside if gated else ", no gate")
        print(f"{row['head_dim']:3} {row['length']:6} {heads:5} {row['pass']:9} {label:18}", end=" ")
        if "error" in row:
            print("FAILED:", row["error"], flush=True)
            continue
        print(f"{row['milliseconds']:8.3f} {row['tflops']:6.0f} {row['share']:6.1%}", end=" ")
        print(f"{row['gate_overhead']:+6.1%}" if "gate_overhead" in row else "      ", end=" ")
        print(f"{row['over_cudnn_gated']:5.2f}" if "over_cudnn_gated" in row else "     ", end=" ")
        # Faster than any product can be: then something was not computed.
        print("<-- IMPOSSIBLE" if row["share"] > 1.1 else "", flush=True)


def aims(rows: list[dict[str, Any]]) -> list[str]:
    """The goals for T 16k, D 128, and for all: each with what was measured, as far as it was."""
    said = []
    mine = [row for row in rows if row["implementation"] == "gpu" and row["gated"] and row["milliseconds"]]
    for direction, goal in (("forward", 0.6), ("backward", 0.45)):
        for row in mine:
            if (row["head_dim"], row["length"], row["pass"]) == (128, 16384, direction):
                heads = f"{row['heads']}/{row['kv_heads']}"
                said.append(f"{direction}, {heads}: {row['share']:.1%} of the matmul rate, aim {goal:.0%}")
                if "gate_overhead" in row:
                    said.append(f"{direction}, {heads}: the gate costs {row['gate_overhead']:+.2%}, aim under 1%")
    compared = [row for row in mine if "over_cudnn_gated" in row]
    slower = sum(row["over_cudnn_gated"] > 1 for row in compared)
    return [*said, f"{slower} of {len(compared)} rows are slower than cuDNN + XLA gate, aim 0"]


def run(arguments: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Everything, printed as it comes, and written as it comes: what kills it then loses little."""
    smoke, device = arguments.smoke, jax.devices()[0]
    cases: tuple[Case, ...] = CASES
    problems = PROBLEMS
    if smoke:
        cases = tuple(case._replace(length=case.length // 8, key_length=case.key_length // 8) for case in CASES)
        problems = tuple(Problem(64, length, kv_heads, 4, 256) for length, kv_heads in ((256, 2), (128, 1)))
    chosen = arguments.implementations
    if "tokamax" in chosen and importlib.util.find_spec("tokamax") is None:
        print("tokamax is not installed, and left out")
        chosen = [name for name in chosen if name != "tokamax"]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "jax": jax.__version__,
        "smoke": smoke,
        "correctness": [],
        "matmul_tflops": None,
        "rows": [],
        "left_out": [],
    }

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    with ThreadPoolExecutor(8) as compilers:
        print(f"{device.device_kind}, jax {jax.__version__}\n\nerrors x 1000: of each array / of attention by hand")
        for case in cases:
            if not budget.allows("case", part=0.5):
                results["left_out"].append(f"correctness of {case.name}, D {case.head_dim}")
                continue
            with budget.spend("case"):
                rows = check(case, [name for name in chosen if name != "tokamax"], compilers)
            results["correctness"] += rows
            for row in rows:
                print_check(row)
            save()

        rate = results["matmul_tflops"] = matmul_rate(*((256, 2) if smoke else (8192, 22)))
        print(f"\n{rate:.0f} TFLOP/s: bfloat16 products, {256 if smoke else 8192} square")
        print("head_dim, length, heads, pass         |  ms, TFLOP/s, share, cost of the gate, time / cuDNN + XLA gate")
        contestants = list(itertools.product(chosen, (True, False)))
        for problem, direction in itertools.product(problems, PASSES):
            if not budget.allows(direction):
                results["left_out"].append(
                    f"{direction} at head_dim {problem.head_dim}, length {problem.length}, "
                    f"heads {problem.heads}/{problem.kv_heads}"
                )
                continue
            with budget.spend(direction):
                rows = measure(problem, direction, contestants, compilers, smoke)
            compare(rows, rate)
            print_times(rows)
            results["rows"] += rows
            save()
    save()
    print()
    for name in results["left_out"]:
        print("left out, no time:", name)
    if "gpu" in chosen:
        print(*aims(results["rows"]), sep="\n")
    return results


def main() -> None:
    start = time.monotonic()

    def names(text: str) -> list[str]:
        if not {*text.split(",")} <= {*IMPLEMENTATIONS}:
            known = ", ".join(IMPLEMENTATIONS)
            raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {known}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", type=names, default=["gpu", "cudnn", "tokamax"])
    parser.add_argument("--minutes", type=float, default=4, help="in total; default: 4")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any machine, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    try:
        backend = jax.default_backend()
    except Exception as error:  # what JAX_PLATFORMS=cuda raises without a GPU depends on the version
        backend = first_line(error)
    if backend != "gpu" and not arguments.smoke:
        raise SystemExit(
            f"benchmarks.gpu_attention needs an NVIDIA GPU and jax with CUDA; here jax says: {backend}. "
            "--smoke --implementations chunked,reference only tries it out."
        )
    # 10 seconds less, to end in time.
    spent = time.monotonic() - start
    results = run(arguments, Budget(60 * arguments.minutes - spent - 10))
    wrong = [row for row in results["correctness"] if row["failed"]]
    broken = [row for row in results["rows"] if row["implementation"] == "gpu" and "error" in row]
    if wrong or broken:
        raise SystemExit(f"\nFAILED: {len(wrong)} checks of correctness and {len(broken)} measurements of our kernel.")


if __name__ == "__main__":
    main()
