"""The static benchmark's arithmetic, and the blocks that the TPU kernels visit. Compiling is tested in tests/aot."""

import pytest

from benchmarks.tpu_programs import PRODUCTS, Program, kernel_name
from benchmarks.tpu_static import mark_best, mixed, price, visits


def test_the_kernels_visit_the_blocks_that_a_mask_needs_and_no_more():
    for row in visits():
        assert len(row["visited"]) == 4
        assert {*row["visited"].values()} == {row["needed"]}, row


def measured(bundles, matmul_rows=4096, outside=()):
    slots = {"MATMUL": 1000, "VLOAD:FILL": bundles // 10, "VSTORE:SPILL": 7}
    kernel = {"bundles": bundles, "slots": slots, "capacity": {"MATMUL": 4}, "matmul_rows": matmul_rows, "bytes": 5}
    return {
        "kernels": {"gattn_forward.3": kernel},
        "steps": {"gattn_forward": 64},
        "branches": ["finish", "init", "run"],
        "outside": [{"name": "fusion", "cycles": cycles, "bytes": 8} for cycles in outside],
        "temporary_bytes": 9,
    }


PROGRAM = Program("v5p", "forward", "gattn", "", (512, 512, 512))


def test_a_pass_costs_its_steps_what_runs_once_per_row_and_what_xla_adds():
    whole = measured(1500)
    regions = {"init": (whole, measured(1400)), "finish": (whole, measured(1300))}
    row = price(PROGRAM, measured(1500, outside=(300, 20)), regions)
    # 4096 / 512 = 8 rows of 8 steps.
    assert row["cycles_per_pair"] * 4096**2 == pytest.approx(64 * 1200 + 8 * (100 + 200) + 320)
    assert row["outside_bytes"] == 16
    assert row["kernels"]["gattn_forward"]["fills"] == 150 - 10 - 20


def test_a_program_that_cannot_be_priced_has_no_price_and_is_not_the_best():
    good = price(PROGRAM, measured(1500), {})
    rows = [good, price(PROGRAM, {"refused": "no memory"}, {}), price(PROGRAM, measured(10, matmul_rows=4095), {})]
    mark_best(rows)
    assert [row["cycles_per_pair"] is None for row in rows] == [False, True, True]
    assert [row["best"] for row in rows] == [True, False, False]
    with pytest.raises(RuntimeError, match="surprise"):
        price(PROGRAM, measured(1500) | {"branches": ["surprise"]}, {})


def test_splash_is_compared_at_the_best_blocks_of_each_of_its_two_backward_kernels():
    def row(size, dq, dkv):
        kernels = {"dq": {"cycles_per_pair": dq}, "dkv": {"cycles_per_pair": dkv}}
        head = {"chip": "v5p", "pass": "backward", "kernel": "splash", "variant": "split", "blocks": [size] * 3}
        return head | {"kernels": kernels, "outside_cycles_per_pair": 0.5, "cycles_per_pair": 0.5 + dq + dkv}

    (best,) = mixed([row(512, 3, 4), row(1024, 2, 5), row(2048, 4, 6)])
    assert best["cycles_per_pair"] == 0.5 + 2 + 4
    assert sorted(best["blocks"]) == [[512] * 3, [1024] * 3]
    assert not mixed([row(512, 3, 4), row(1024, 4, 5)])


def test_every_kernel_name_is_found_in_what_xla_calls_it():
    for name in PRODUCTS:
        assert kernel_name(f"transpose_jvp_{name}__.12") == name
