"""Attention under a mesh of 8 devices is attention on one; the checks run in one process, tests/eight_devices.py."""

from __future__ import annotations

import pytest

from tests.eight import found_by

LAYOUTS = ("rows and heads", "batch over both", "batch alone", "not at all")
SPLITS = [("batch and heads", 8), ("batch and heads", 1), *((layout, 2) for layout in LAYOUTS)]


@pytest.fixture(scope="module")
def found():
    return found_by("tests.eight_devices")


@pytest.mark.parametrize("axes", ["automatic", "explicit"])
@pytest.mark.parametrize(("layout", "kv_heads"), SPLITS)
def test_a_split_changes_no_value_and_no_gradient(found, axes, layout, kv_heads):
    """Gradients of what every part shares (sinks, kv heads, the keys of split rows) are summed over the parts."""
    assert found[f"{axes}, {layout}, {kv_heads} kv heads"] == []


def test_the_tpu_kernel_too(found):
    assert found["tpu"] == []


def test_inside_of_shard_map_a_device_attends_to_its_own(found):
    assert isinstance(found["inside of shard_map"], float), found["inside of shard_map"]
    assert found["inside of shard_map"] < 1e-6


def test_a_split_by_batch_and_heads_needs_no_communication(found):
    assert found["communicates"] == []


def test_saved_names_spare_the_second_forward_in_every_part(found):
    assert found["loops saving nothing"] == 3
    assert found["loops saving the names"] == 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("batch", "3 sequences, must be a multiple of the 2 parts of 'data'"),
        ("heads", "6 heads, must be a multiple of the 4 parts of 'tensor'"),
        ("kv heads", "key has 3 heads, which 4 parts of 'tensor' cannot share"),
        ("axes", "jax.set_mesh) has ('data', 'tensor')"),
        ("head_dim", "head_dim whole"),
        ("automatic", "needs sharding=P("),
    ],
)
def test_errors_name_what_does_not_divide(found, what, words):
    assert words in found[f"message: {what}"]
