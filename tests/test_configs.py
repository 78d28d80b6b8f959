"""Presets and variants: each builds, and adds the parameters that the paper prints."""

import json
from pathlib import Path

import pytest

from configs.models import PRESETS, dense_1p7b_28l, tiny
from configs.variants import VARIANTS, apply
from gattn import model
from gattn.config import Config, ConfigError, DataConfig, ModelConfig, override

TABLES = json.loads((Path(__file__).parents[1] / "experiments" / "paper_tables.json").read_text())

# The attention shape of the 15A2B model (paper Sec. 3.1); its experts do not matter for what a variant adds.
ATTENTION_15A2B = Config(
    model=ModelConfig(
        num_layers=24, d_model=2048, num_heads=32, num_kv_heads=4, head_dim=128, ffn_dim=6144, match_params=False
    ),
    data=DataConfig(seq_len=4096),
)

TABLE1_ROWS = {
    2: "kv8",
    3: "q48",
    5: "g1_elementwise",
    6: "g2_elementwise",
    7: "g3_elementwise",
    8: "g4_elementwise",
    9: "g5_elementwise",
    10: "g1_headwise",
    11: "g2_headwise",
    12: "g1_elementwise_shared",
    13: "g2_elementwise_shared",
    14: "g1_additive_silu",
    15: "g1_elementwise_silu",
}


@pytest.mark.parametrize(("row", "name"), TABLE1_ROWS.items())
def test_added_parameters_are_the_published_ones(row, name):
    """Published in millions with two or three digits, rounded or cut off (row 9: 100.66M is printed as 100)."""
    table = TABLES["table1"]
    published = {r[0]: dict(zip(table["columns"], r, strict=True))["added_params_m"] for r in table["rows"]}[row]
    base = model.param_counts(ATTENTION_15A2B.model)["params"]
    added = (model.param_counts(apply(ATTENTION_15A2B, name).model)["params"] - base) / 1e6
    assert added == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", ["g1_rmsnorm", "g1_silu", "softmax_off_by_one"])
def test_parameter_free_variants_add_none(name):
    base = model.param_counts(ATTENTION_15A2B.model)["params"]
    assert model.param_counts(apply(ATTENTION_15A2B, name).model)["params"] == base


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
    one_step = 3 * config.model.d_model * config.model.ffn_multiple * config.model.num_layers
    assert abs(counts["param_difference"]) <= one_step / 2
    assert "python -m gattn train" in PRESETS[name].__doc__


@pytest.mark.parametrize(("name", "millions"), [("tiny", 1), ("small", 25), ("base", 125)])
def test_preset_sizes_are_as_documented(name, millions):
    counts = model.param_counts(PRESETS[name]().model)
    assert counts["non_embedding_params"] / 1e6 == pytest.approx(millions, rel=0.1)


def test_gates_of_joined_variants_add_up():
    both = apply(tiny(), "g1_headwise+g2_elementwise")
    assert [gate.label for gate in both.model.gates] == ["g1_headwise", "g2_elementwise"]
    assert apply(both, "baseline").model.gates == ()


def test_variants_differ_and_unknown_ones_are_refused():
    base = override(ATTENTION_15A2B, {"model.match_params": True})
    assert len({apply(base, name).fingerprint() for name in VARIANTS}) == len(VARIANTS)
    with pytest.raises(ConfigError, match="g1_headwise"):
        apply(base, "g1_headwize")
