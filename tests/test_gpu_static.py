"""How the static benchmark reads PTX and ptxas' report. Compiling is for tests/aot."""

import pytest

from benchmarks.gpu_static import HEAD_DIMS, Program, Step, ctas_per_sm, describe, parse_launch, products, programs

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
# 64 CTAs of a producer and two consumers.
LAUNCH = (
    "%9 = gpu.launch async [%2] blocks(%arg2, %arg3, %arg4) in (%arg8 = %c2, %arg9 = %c32_7, %arg10 = %c1) "
    "threads(%arg5, %arg6, %arg7) in (%arg11 = %c384, %arg12 = %c1, %arg13 = %c1_3) "
    "dynamic_shared_memory_size %c167024_i32 {"
)
FORWARD = Program("gattn", "forward", 64, True)
# 8192 rows are shared out over 64 CTAs; a step sees 128 keys.
STEP = Step(8192, 128)
# By one warpgroup on 64 rows: scores of 128 keys, and their sum over the values.
SCORES = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1, 0, 0; }\n" * 4
SUM = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, {%r2}, %rd2, p, 1, 1, 0; }\n" * 8
PRODUCT = 2 * 64 * 128 * 64


def ptx(loop=SCORES + SUM, before="", after=""):
    """A kernel whose loop has its exit at the top, and a barrier's loop inside, in inline assembly."""
    return f"""
.visible .entry kernel()
{{
$L__func_begin0:
	@%p11 bra 	$L__BB0_10;
	setmaxnreg.dec.sync.aligned.u32 32;
	bra.uni 	$L__BB0_31;
$L__BB0_10:
	setmaxnreg.inc.sync.aligned.u32 240;
	{before}
$L__BB0_20:
	@%p146 bra 	$L__BB0_26;
	// begin inline asm
	LAB_WAIT:
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	// end inline asm
	{loop}
	@!%p2 bra 	$L__BB0_23;
	mov.b32 %r1, %r2;
$L__BB0_23:
	bra.uni 	$L__BB0_20;
$L__BB0_26:
	{after}
$L__BB0_31:
	ret;
}}
"""


def row(text, stack=0, stores=0, loads=0, more=""):
    report = REPORT.format(stack=stack, stores=stores, loads=loads)
    return describe(FORWARD, STEP, text, report + more, LAUNCH)


def test_products_are_counted_per_loop_and_outside():
    assert products(ptx()) == ([2 * PRODUCT], 0)
    assert products(ptx(before=SCORES, after=SUM)) == ([2 * PRODUCT], 2 * PRODUCT)
    # What is left of the loop if nothing jumps back is no loop.
    assert products(ptx().replace("bra.uni 	$L__BB0_20", "bra.uni 	$L__BB0_26")) == ([], 2 * PRODUCT)


def test_two_loops_one_after_the_other_are_two():
    second = f"$L__BB0_27:\n{SCORES}\n@%p5 bra $L__BB0_27;\n"
    loops, outside = products(ptx(after=second))
    assert sorted(loops) == [PRODUCT, 2 * PRODUCT]
    assert outside == 0


def test_a_good_kernel_is_described_and_has_no_problem():
    good = row(ptx(before=SCORES, after=SUM))
    assert good["problems"] == []
    assert (good["rows"], good["keys"], good["consumers"]) == (128, 128, 2)
    assert good["set_registers"] == [32, 240]
    assert good["wgmma"] == {"m64n128k16": 8, "m64n64k16": 16}
    # Two warpgroups of 64 rows.
    assert good["block_flops"] == 2 * 2 * PRODUCT
    assert good["shared_memory"] == 167024


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ptx(loop=SCORES), "work"),
        (ptx(loop=SCORES + SCORES + SUM), "work"),
        (ptx(before=SCORES), "work"),
        (ptx(loop=""), "work"),
        (ptx(loop=SCORES.replace("n128", "n256") + SUM), "work"),
    ],
    ids=["missing", "twice", "half a step outside", "none", "padding"],
)
def test_work_that_is_not_the_blocks_is_a_problem(text, said):
    (problem,) = row(text)["problems"]
    assert said in problem


def test_spills_and_serialised_products_are_problems():
    assert row(ptx(), stores=4)["problems"] == row(ptx(), loads=4)["problems"] == ["spills"]
    warning = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert row(ptx(), more=warning)["problems"] == ["wgmma serialised"]


def test_rows_that_are_not_shared_out_evenly_are_refused():
    with pytest.raises(RuntimeError, match="evenly"):
        describe(FORWARD, Step(8190, 128), ptx(), REPORT.format(stack=0, stores=0, loads=0), LAUNCH)


def test_a_launch_says_its_size():
    assert parse_launch(LAUNCH) == (64, 384, 167024)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_memory", "expected"),
    [
        (384, 168, 0, 1),  # registers: 12 warps x 5376 of 65536
        (256, 64, 50 * 1024, 4),  # registers and shared memory alike
        (128, 32, 100 * 1024, 2),  # shared memory: 228 KiB
        (1024, 32, 0, 2),  # threads
    ],
)
def test_ctas_that_fit_on_an_sm(threads, registers, shared_memory, expected):
    assert ctas_per_sm(threads, registers, shared_memory) == expected


def test_every_kernel_of_ours_is_compiled_with_and_without_a_mask():
    ours = [program for program in programs() if program.kernel == "gattn"]
    for head_dim in HEAD_DIMS:
        for causal in (True, False):
            here = [x for x in ours if (x.head_dim, x.causal) == (head_dim, causal)]
            assert {x.gate for x in here if x.part == "forward"} == {"none", "headwise", "elementwise"}
            assert {x.part for x in here} - {"forward"} in ({"dq", "dkv"}, {"dq", "dk", "dv"})
