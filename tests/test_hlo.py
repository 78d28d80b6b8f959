"""Programs read from their text: what runs how often, and what that costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gattn import hlo, hlo_cost

SIZE = 64
PRODUCT = 2 * SIZE**3  # FLOPs of one product of two such matrices
MATRICES = jax.ShapeDtypeStruct((5, SIZE, SIZE), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)


def program(function, *arguments):
    return hlo_cost.read_costs(jax.jit(function).lower(*arguments).compile().as_text())


def chain(x, matrices, *, unroll):
    return jax.lax.scan(lambda x, matrix: (jnp.tanh(x @ matrix), None), x, matrices, unroll=unroll)[0]


def test_a_scanned_loop_costs_what_it_costs_unrolled():
    scanned, unrolled = (program(functools.partial(chain, unroll=n), MATRIX, MATRICES) for n in (1, 5))
    assert any(x.instruction.opcode == "while" for x in scanned.executed())
    assert not any(x.instruction.opcode == "while" for x in unrolled.executed())
    assert scanned.flops() == unrolled.flops() == 5 * PRODUCT
    assert scanned.traffic() == pytest.approx(unrolled.traffic(), rel=0.5)


def test_unrolled_flops_are_those_of_xlas_cost_analysis():
    def products(x, matrices):
        return functools.reduce(jnp.matmul, list(matrices), x)

    compiled = jax.jit(products).lower(MATRIX, MATRICES).compile()
    assert hlo_cost.read_costs(compiled.as_text()).flops() == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


def test_nested_loops_multiply():
    def outer(x, matrices):
        return jax.lax.fori_loop(0, 3, lambda _, x: chain(x, matrices, unroll=1), x)

    assert program(outer, MATRIX, MATRICES).flops() == 15 * PRODUCT


def test_the_gradient_of_a_rematerialised_scan_has_four_products_for_each_one():
    def loss(x, matrices):
        step = jax.checkpoint(lambda x, matrix: (jnp.tanh(x @ matrix), None))
        return jax.lax.scan(step, x, matrices)[0].sum()

    found = program(jax.grad(loss, (0, 1)), MATRIX, MATRICES)
    assert found.flops() == 4 * 5 * PRODUCT
    forward = [shapes for name, shapes in found.stacked(5) if "transpose" not in name]
    assert [[shape.dims for shape in shapes] for shapes in forward] == [[(5, SIZE, SIZE)]]  # inputs of the steps


def test_of_a_conditional_one_branch_counts():
    def choose(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.tanh(x @ x) @ x, lambda x: x @ x, x)

    found = program(choose, jax.ShapeDtypeStruct((), bool), MATRIX)
    assert (found.flops(), found.flops(most=True)) == (PRODUCT, 2 * PRODUCT)


def test_a_loop_without_an_end_that_is_known_counts_once_and_is_named():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x @ x, x)

    found = program(until, MATRIX)
    assert found.flops() == PRODUCT
    assert len(found.program.unknown_loops) == 1


def test_slices_and_updates_move_their_piece():
    """A loop that reads and writes one row at a time moves the whole array once, not once for every row."""

    def copy(rows):
        def step(out, i):
            return jax.lax.dynamic_update_index_in_dim(out, rows[i] * 2, i, 0), None

        return jax.lax.scan(step, jnp.zeros_like(rows), jnp.arange(rows.shape[0]))[0]

    rows = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    size = 256 * 1024 * 4
    assert program(copy, rows).traffic() < 8 * size  # 512 if all rows counted


@pytest.mark.parametrize(
    ("lhs", "kernel", "labels", "window", "out", "flops"),
    [
        # A product of matrices as a TPU writes it.
        ("8,16", "16,32", "bf_io->bf", None, "8,32", 2 * 8 * 16 * 32),
        # x [4, 10, 32] with a kernel of 6 heads of 16: heads are a window that the padding lets slide over one place.
        ("4,10,32", "32,6,16", "0bf_i1o0->0b1f", "size=1x6 pad=0_0x5_5 rhs_reversal=0x1", "4,10,6,16", None),
        # A true convolution: 5 places, 3 of them see the whole window, two all but one.
        ("1,5,7", "3,7,9", "b0f_0io->b0f", "size=3 pad=1_1", "1,5,9", 2 * 7 * 9 * 13),
    ],
)
def test_convolutions_count_places_that_are_no_padding(lhs, kernel, labels, window, out, flops):
    if flops is None:
        lhs, labels, flops = "4,10,1,32", "0b1f_i1o0->0b1f", 2 * 4 * 10 * 6 * 16 * 32
        kernel = "32,6,16,1"
    given = f"window={{{window}}}, " if window else ""
    text = f"""HloModule m
ENTRY %main (a: bf16[{lhs}], b: bf16[{kernel}]) -> bf16[{out}] {{
  %a = bf16[{lhs}] parameter(0)
  %b = bf16[{kernel}] parameter(1)
  ROOT %c = bf16[{out}] convolution(%a, %b), {given}dim_labels={labels}
}}
"""
    assert hlo_cost.read_costs(text).flops() == flops


# As the TPU's compiler writes them; how often the loop runs is told by its condition alone.
TPU = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[2304,64]) -> bf16[144,64] {
  %input = bf16[2304,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[2304,64]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}
  %zero = s32[] constant(0)
  ROOT %piece = bf16[144,64]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={144,64}
}

%condition (state: (s32[], bf16[16,64])) -> pred[] {
  %state = (s32[]{:T(128)}, bf16[16,64]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(28)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (state.1: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %state.1 = (s32[]{:T(128)}, /*index=1*/bf16[16,64]{1,0:T(8,128)(2,1)}) parameter(0)
  %x.1 = bf16[16,64]{1,0:T(8,128)(2,1)} get-tuple-element(%state.1), index=1
  %all-gather-start = (bf16[16,64]{1,0}, bf16[64,64]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%x.1), GATHER
  %all-gather-done = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} all-gather-done(%all-gather-start)
  %next = bf16[16,64]{1,0:T(8,128)(2,1)} collective-permute(%x.1), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  %one = s32[]{:T(128)} constant(1)
  %plus = s32[]{:T(128)} add(%state.1#0, %one)
  ROOT %both = (s32[]{:T(128)}, bf16[16,64]{1,0}) tuple(%plus, %next)
}

ENTRY %main (x.2: bf16[16,64], rows: bf16[2304,64]) -> bf16[144,64] {
  %x.2 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)
  %rows = bf16[2304,64]{1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[]{:T(128)} constant(4)
  %state.2 = (s32[]{:T(128)}, bf16[16,64]{1,0}) tuple(%start, %x.2)
  %while = (s32[]{:T(128)}, bf16[16,64]{1,0}) while(%state.2), condition=%condition, body=%body
  %norm = f32[]{:T(128)} all-reduce(%start), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %scattered = bf16[144,64]{1,0} fusion(%rows), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
TPU = TPU.replace("GATHER", "replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}")
MESH = {"data": 2, "fsdp": 4}


def test_collectives_with_their_kinds_axes_and_bytes():
    found = hlo_cost.read_costs(TPU).collectives()
    rows = [(x.kind, hlo.axes(x.groups, MESH), x.size, x.bytes, x.times) for x in found]
    assert rows == [
        ("all-gather", ("fsdp",), 4, 64 * 64 * 2, 24),
        ("collective-permute", ("data",), 2, 16 * 64 * 2, 24),
        ("all-reduce", ("data", "fsdp"), 8, 4, 1),
        ("reduce-scatter", ("fsdp",), 4, 2304 * 64 * 2, 1),
    ]
    assert [x.sent for x in found] == [64 * 64 * 1.5, 16 * 64 * 2, 7, 2304 * 64 * 1.5]


def test_what_stays_on_the_chip_is_no_traffic():
    """The gathered array lies in VMEM, S(1): only the 16 rows are read."""
    parsed = hlo.parse(TPU)
    body = parsed.computations["body"]
    assert hlo_cost.instruction_bytes(parsed, body.instructions["all-gather-start"], body) == 16 * 64 * 2
    assert hlo_cost.instruction_bytes(parsed, body.instructions["all-gather-done"], body) == 0


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x=1", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[8], x=1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x=1", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, x=1", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("source_target_pairs={{0,1},{1,0}}, x=1", ((0, 1), (1, 0))),
        ("to_apply=%add", ()),
    ],
)
def test_replica_groups_in_every_notation(text, groups):
    assert hlo.replica_groups(text) == groups


def test_the_largest_arrays_and_those_of_a_shape():
    found = hlo.parse(TPU)
    assert [made.name for made in found.arrays_of(64, 64)] == ["all-gather-start", "all-gather-done"]
    assert not found.arrays_of(64, 128)
    big = program(lambda x: jnp.tanh(x @ x.T) @ x, jax.ShapeDtypeStruct((512, 8), np.float32)).program.largest(1)
    assert big[0][0].dims == (512, 512)
    assert "dot_general" in big[0][1]


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")
