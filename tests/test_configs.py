"""Presets and variants: each builds, at the sizes that its docstring names."""

import pytest

from configs.models import PRESETS, dense_1p7b_28l, moe_15a2b, tiny
from configs.variants import NAMES, apply
from gattn import model
from gattn.config import ConfigError, MeshConfig, override
from gattn.sharding import check, mesh_shape


@pytest.mark.parametrize("name", ["g1_rmsnorm", "g1_silu", "softmax_off_by_one"])
def test_parameter_free_variants_add_none(name):
    base = model.param_counts(tiny().model)["params"]
    assert model.param_counts(apply(tiny(), name).model)["params"] == base


@pytest.mark.parametrize(
    ("gate", "params", "ffn"),
    [
        ("baseline", 1_720_837_120, 6144),
        ("g1_headwise", 1_721_754_624, 6144),
        ("g1_elementwise", 1_728_177_152, 5504),
    ],
)
def test_dense_model_has_the_official_checkpoints_parameters(gate, params, ffn):
    config = apply(dense_1p7b_28l(), gate)
    assert model.param_counts(config.model)["params"] == params
    assert config.model.ffn_width == ffn


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("gate", ["baseline", "g1_elementwise"])
def test_every_preset_builds(name, gate):
    config = apply(PRESETS[name](), gate)
    counts = model.param_counts(config.model)
    assert 0 < counts["non_embedding_params"] < counts["params"]
    assert counts["gate_params"] == config.model.num_layers * config.model.gate_params
    if config.model.num_experts:  # experts are not narrowed to pay for a gate, as in the paper
        assert counts["param_difference"] == counts["gate_params"]
    else:
        one_step = 3 * config.model.d_model * config.model.ffn_multiple * config.model.num_layers
        assert abs(counts["param_difference"]) <= one_step / 2
    assert "python -m gattn train" in PRESETS[name].__doc__


@pytest.mark.parametrize(
    ("name", "millions", "active"),
    [("tiny", 1, 1), ("small", 25, 25), ("base", 125, 125), ("moe_tiny", 2.5, 0.75), ("moe_small", 929, 136)],
)
def test_preset_sizes_are_as_documented(name, millions, active):
    """Without embeddings; `active` without the experts that a token does not go to."""
    counts = model.param_counts(PRESETS[name]().model)
    assert counts["non_embedding_params"] / 1e6 == pytest.approx(millions, rel=0.1)
    idle = counts["params"] - counts["active_params"]
    assert (counts["non_embedding_params"] - idle) / 1e6 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("dense_1p7b_28l", "fsdp=512"),
        ("dense_1p7b_48l", "fsdp=64,data=4"),
        ("moe_15a2b", "fsdp=64,expert=8"),
        ("moe_15a2b", "fsdp=8,expert=8"),
        ("moe_tiny", "data=2,expert=4"),
        ("moe_tiny", "fsdp=2,expert=2,tensor=2"),
    ],
)
def test_large_presets_divide_over_large_meshes(preset, mesh):
    parsed = MeshConfig.parse(mesh)
    devices = parsed.fsdp * parsed.expert * parsed.tensor * max(parsed.data, 1)
    check(PRESETS[preset](), mesh_shape(parsed, devices))


def test_four_more_experts_and_all_of_them_used():
    config = moe_15a2b()
    more = apply(config, "experts_plus4+g1_headwise").model
    assert (more.num_experts, more.experts_per_token) == (132, 12)
    assert more.gates
    with pytest.raises(ConfigError, match="moe_tiny"):
        apply(tiny(), "experts_plus4")


def test_wider_attention_is_the_papers_at_its_size():
    """Table 1, rows 2 and 3: 8 kv heads in place of 4, 48 query heads in place of 32."""
    config = moe_15a2b()
    assert apply(config, "kv_double").model.num_kv_heads == 8
    assert apply(config, "q_half_more").model.num_heads == 48
    with pytest.raises(ConfigError, match="even number"):
        apply(override(tiny(), {"model.num_heads": 3, "model.num_kv_heads": 1}), "q_half_more")


def test_gates_of_joined_variants_add_up():
    assert apply(moe_15a2b(), "kv_double+kv_double").model.num_kv_heads == 16
    both = apply(tiny(), "g1_headwise+g2_elementwise")
    assert [gate.label for gate in both.model.gates] == ["g1_headwise", "g2_elementwise"]
    assert apply(both, "baseline").model.gates == ()


def test_variants_differ_and_unknown_ones_are_refused():
    base = moe_15a2b()
    assert len({apply(base, name).fingerprint() for name in NAMES}) == len(NAMES)
    assert len({apply(base, name).model.label for name in ("switch_v_8_top2", "switch_kv_8_top8", "baseline")}) == 3
    with pytest.raises(ConfigError, match=r"g1_headwise.*experts_plus4"):
        apply(base, "g1_headwize")
