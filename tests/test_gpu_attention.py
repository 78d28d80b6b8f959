"""The GPU benchmark where there is no GPU: its oracle, its judgement, its counting, and all of it with tiny sizes."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_attention
from benchmarks.gpu_attention import CASES, PROBLEMS, Budget, Problem, aims, compare, draw, exact, repeated
from gattn import gated_dot_product_attention
from tests.attention import assert_close, quick

SMALL = [case._replace(length=case.length // 16, key_length=case.key_length // 16, head_dim=64) for case in CASES]


@pytest.fixture(scope="module")
def compilers():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_oracle_and_the_masks_are_those_of_the_api(case):
    arrays, dout, more, allowed = draw(case._replace(dtype="float32", window=case.window and 20))

    def run(arrays, dout):
        def attend(arrays):
            return gated_dot_product_attention(**arrays, **more, implementation="reference", return_residual=True)

        (out, lse), pullback = jax.vjp(attend, arrays)
        return {"out": out, "lse": lse, **pullback((dout, jnp.zeros_like(lse)))[0]}

    assert_close(quick(run)(arrays, dout), exact(arrays, dout, allowed, case.activation))


def test_a_right_implementation_passes_and_its_errors_stand_beside_those_by_hand(compilers):
    (row,) = gpu_attention.check(SMALL[5], ["chunked"], compilers)
    assert not row["failed"]
    assert {*row["errors"]} == {*row["by_hand"]} == {"out", "lse", "query", "key", "value", "gate"}
    for name, both in row["by_hand"].items():
        assert 0 < both[0] < 0.02, name


@pytest.mark.parametrize(
    ("array", "wrong"),
    [("key", lambda out: out * 1.01), ("query", lambda out: out.at[0, 0].set(jnp.nan))],
    ids=["a hundredth", "NaN"],
)
def test_a_wrong_implementation_fails(compilers, monkeypatch, array, wrong):
    def attend(**arguments):
        out, lse = gated_dot_product_attention(**arguments)
        return wrong(out), lse

    monkeypatch.setattr(gpu_attention, "gated_dot_product_attention", attend)
    (row,) = gpu_attention.check(SMALL[0], ["chunked"], compilers)
    assert row["failed"]
    assert "out" in row["wrong"] or array in row["wrong"]


def test_an_implementation_that_breaks_is_a_failure_unless_it_is_cudnn(compilers):
    gpu, chunked = gpu_attention.check(SMALL[0]._replace(head_dim=48), ["gpu", "chunked"], compilers)
    assert gpu["failed"]
    assert "head_dim" in gpu["error"] or "0.11" in gpu["error"]
    assert not chunked["failed"]
    sinks = next(case for case in SMALL if case.sinks)
    (cudnn,) = gpu_attention.check(sinks, ["cudnn"], compilers)
    assert not cudnn["failed"]
    assert "cudnn" in cudnn["error"]


def test_flops_are_those_of_the_pairs_that_attend():
    problem = Problem(8, 64, kv_heads=2, heads=4, tokens=128)
    pairs = sum(row + 1 for row in range(64))
    per_pair = 2 * 2 * 8
    assert problem.batch == 2
    # The diagonal is counted half.
    assert problem.flops("forward") == problem.flops("residuals") == 2 * 4 * (pairs - 32) * per_pair
    assert problem.flops("backward") == 2 * 4 * (pairs - 32) * 5 / 2 * per_pair


def test_the_problems_are_the_issues_and_the_aims_come_first():
    assert {(x.head_dim, x.length, x.kv_heads) for x in PROBLEMS} == {
        (d, t, k) for d in (64, 128, 256) for t in (4096, 16384) for k in (8, 4)
    }
    assert PROBLEMS[0][:3] == (128, 16384, 8)
    assert {x.batch * x.length for x in PROBLEMS} == {16384}


def test_the_budget_is_never_overrun_by_work_that_takes_as_long_as_before():
    now = [100.0]
    budget = Budget(60, clock=lambda: now[0])

    def work(kind, seconds):
        if not budget.allows(kind):
            return False
        with budget.spend(kind):
            now[0] += seconds
        return True

    assert work("forward", 5)
    assert work("backward", 20)
    # 25 s are gone; "other" may take as long as the longest so far.
    assert work("backward", 20)
    assert not work("backward", 20)
    assert not work("other", 20)
    assert not budget.allows("forward", part=0.5)
    done = 0
    while work("forward", 5):
        done += 1
    assert done == 2
    assert now[0] <= 160


def test_a_loop_runs_its_call_every_time():
    calls = []

    def call(x):
        count = jax.pure_callback(lambda x: calls.append(1) or np.asarray(x) + 1, jax.ShapeDtypeStruct((), x.dtype), x)
        return {"one": count, "two": jnp.full((3, 2), count)}

    assert jax.jit(repeated(call, 5))(jnp.float32(1)) == 5 * (2 + 2)
    assert len(calls) == 5


def times(**milliseconds):
    rows = []
    for name, x in milliseconds.items():
        implementation, _, rest = name.partition("_")
        row = {"implementation": implementation, "gated": not rest, "pass": "forward", "milliseconds": x}
        row |= Problem(128, 16384)._asdict()
        rows.append(row | ({"tflops": 1000 / x} if x else {"error": "no"}))
    compare(rows, rate=500)
    return {name: row for name, row in zip(milliseconds, rows, strict=True)}


def test_rows_are_compared():
    rows = times(gpu=4.0, gpu_ungated=3.2, cudnn=5.0, cudnn_ungated=None)
    assert rows["gpu"]["share"] == pytest.approx(0.5)
    assert rows["gpu"]["gate_overhead"] == pytest.approx(0.25)
    assert rows["gpu"]["over_cudnn_gated"] == pytest.approx(0.8)
    assert "gate_overhead" not in rows["cudnn"]
    assert "gate_overhead" not in rows["gpu_ungated"]
    assert "share" not in rows["cudnn_ungated"]
    said = aims(list(rows.values()))
    assert any("50.0%" in line and "60%" in line for line in said)
    assert any("+25.00%" in line for line in said)
    assert "0 of 1 rows are slower" in said[-1]
    assert "1 of 1 rows are slower" in aims(list(times(gpu=6.0, cudnn=5.0).values()))[-1]


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_attention", *arguments])
    gpu_attention.main()


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch):
    with pytest.raises(SystemExit) as exit:
        main(monkeypatch)
    assert "needs an NVIDIA GPU" in exit.value.code
    assert "\n" not in exit.value.code


def test_the_whole_run_writes_what_it_prints_and_survives_what_fails(monkeypatch, tmp_path, capsys):
    """cuDNN fails on a CPU; the others' times are there all the same."""
    monkeypatch.setattr(gpu_attention, "CASES", CASES[:1])
    path = tmp_path / "results.json"
    main(monkeypatch, "--smoke", "--implementations", "cudnn,chunked,tokamax", "--json", str(path))
    results = json.loads(path.read_text())
    assert [row["implementation"] for row in results["correctness"]] == ["cudnn", "chunked"]
    assert not results["left_out"]
    assert len(results["rows"]) == 2 * 3 * 2 * 2
    for row in results["rows"]:
        if row["implementation"] == "cudnn":
            assert row["error"]
            assert row["milliseconds"] is None
        else:
            assert row["milliseconds"] > 0
            assert row["tflops"] > 0
            assert ("gate_overhead" in row) == row["gated"]
    said = capsys.readouterr().out
    assert "tokamax is not installed" in said
    assert said.count("FAILED") == 12
    assert said.count("chunked, gated") == said.count("chunked, no gate") == 6


def test_a_contestant_that_dies_on_the_device_is_a_row_with_an_error(compilers, monkeypatch):
    def attention(name, gated):
        def attend(query, key, value, gate=None):
            def look(x):
                if gated:
                    raise RuntimeError("out of memory")
                return x

            return jax.pure_callback(look, jax.ShapeDtypeStruct(query.shape, query.dtype), query)

        return attend

    monkeypatch.setattr(gpu_attention, "attention", attention)
    contestants = [("reference", True), ("reference", False)]
    dead, alive = gpu_attention.measure(Problem(8, 16, 2, 4, 16), "forward", contestants, compilers, smoke=True)
    assert "error" in dead
    assert dead["milliseconds"] is None
    assert alive["milliseconds"] > 0


def test_what_there_is_no_time_for_is_named(monkeypatch, tmp_path, capsys):
    path = tmp_path / "results.json"
    main(monkeypatch, "--smoke", "--minutes", "0.01", "--implementations", "reference", "--json", str(path))
    results = json.loads(path.read_text())
    assert not results["correctness"]
    assert not results["rows"]
    assert len(results["left_out"]) == len(CASES) + 6
    assert capsys.readouterr().out.count("left out, no time") == len(CASES) + 6
