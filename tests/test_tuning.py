"""Blocks: pinned ones give the same bits, the table's nearest row is taken, a machine without the device is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tune
from gattn import gated_dot_product_attention
from gattn.kernels import api, tpu, tuning
from tests.attention import normal, qkv, quick

ROOT = Path(__file__).resolve().parent.parent


def row(kernel="tpu.forward", kind="chip", head_dim=128, length=4096, blocks=(512, 512), dtype="bfloat16"):
    return tuning.Row(kernel, kind, dtype, head_dim, length, blocks, 1.5, "2026-11-30")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of its own; `tuning.blocks` reads it."""
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "blocks.json")
    return tuning.TABLE


def test_the_nearest_length_in_ratio_of_what_else_is_equal(table):
    tuning.write([row(length=length, blocks=(length,)) for length in (1024, 8192)], table)
    tuning.write([row(kernel="tpu.backward", blocks=((1, 2, (3, 4)), 5))], table)

    def blocks(kernel="tpu.forward", dtype=jnp.bfloat16, head_dim=128, length=4096, kind="chip"):
        return tuning.blocks(kernel, dtype, head_dim, length, kind)

    assert [blocks(length=n) for n in (1, 2000, 4000, 10**6)] == [(1024,), (1024,), (8192,), (8192,)]
    assert blocks(kernel="tpu.backward") == ((1, 2, (3, 4)), 5)
    assert (
        blocks(kind="other") is blocks(head_dim=64) is blocks(dtype=jnp.float32) is blocks(kernel="gpu.forward") is None
    )


def test_a_later_measurement_takes_the_place_of_an_earlier_one(table):
    tuning.write([row(), row(length=8192)], table)
    tuning.write([row(blocks=(256, 1024))], table)
    assert {(x.length, x.blocks) for x in tuning.read(table)} == {(4096, (256, 1024)), (8192, (512, 512))}
    assert len(json.loads(table.read_text())) == 2


def test_the_packages_own_table_can_be_read_and_is_in_the_wheel():
    assert all(isinstance(x, tuning.Row) for x in tuning.read(tuning.TABLE))
    assert "blocks.json" in (ROOT / "pyproject.toml").read_text()


def test_pinned_blocks_give_the_same_bits_and_the_tables_are_pinned(table):
    """Twice the same; as many as the table says; and other ones that agree only up to rounding."""
    arguments = qkv(batch=1, length=300, key_length=300, heads=2, kv_heads=1, head_dim=64)
    arguments |= {"gate": normal(4, 1, 300, 2, 64)}

    def out_and_grads(arrays):
        attention = partial(gated_dot_product_attention, is_causal=True, implementation="tpu")
        out, pullback = jax.vjp(lambda arrays: attention(**arrays), arrays)
        return [out, *jax.tree.leaves(pullback(jnp.cos(out)))]

    def run():
        # Blocks are looked up when tracing.
        jax.clear_caches()
        with api.interpreting(True):
            return quick(out_and_grads)(arguments)

    def tuned(*blocks):
        rows = [row(f"tpu.{name}", tuning.kind(), 64, 300, blocks, "float32") for name in ("forward", "backward")]
        tuning.write(rows, table)
        return run()

    small, again, large = tuned(128, 128), tuned(128, 128), tuned(384, 384)
    for x, y, other in zip(small, again, large, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, other, atol=1e-5)
    assert not all(np.array_equal(x, other) for x, other in zip(small, large, strict=True))


def test_tuning_keeps_what_is_fastest_among_the_right(capsys):
    """With the interpreter and a clock that likes blocks of 256 keys; one candidate does not compile, one is wrong."""
    problem = tune.Problem("float32", 64, 256, 1, 1, 1)
    costs = iter([3.0, 2.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_sweeps", lambda *_: [lambda best: [tpu.Blocks(128, 128), "broken", tpu.Blocks(256, 128)]])
        rows = list(tune.tune("tpu", "forward", problem, lambda call: next(costs), interpret=True))
    assert [x.blocks for x in rows] == [tpu.Blocks(), tpu.Blocks(128, 128), tpu.Blocks(256, 128)]
    assert [x.microseconds for x in rows] == [3e6, 2e6, 1e6]
    assert rows[0][:5] == ("tpu.forward", tuning.kind(), "float32", 64, 256)
    assert "broken: AttributeError" in capsys.readouterr().out


def test_a_machine_without_the_device_is_refused():
    command = [sys.executable, "-m", "benchmarks.tune", "--kernel", "tpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "measured on the device itself, and here jax sees 'cpu'" in done.stderr
