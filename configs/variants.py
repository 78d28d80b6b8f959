"""Every variant by name: a dict of ModelConfig fields, or a function that makes one. One more is one more line here.

`gattn train --gate NAME` applies one, `--gate g1_headwise+g2_elementwise` several. Positions: g1 SDPA output, g2 value,
g3 key, g4 query, g5 after W_O (paper Fig. 1). PAPER says which rows of its tables they are.
"""

from collections.abc import Callable
from typing import Any

from gattn.config import Config, ConfigError, GateSpec, ModelConfig, override

VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "g1_elementwise": {"gates": (GateSpec("g1", "elementwise"),)},
    "g1_headwise": {"gates": (GateSpec("g1", "headwise"),)},
    "g1_elementwise_shared": {"gates": (GateSpec("g1", "elementwise", "shared"),)},
    "g1_headwise_shared": {"gates": (GateSpec("g1", "headwise", "shared"),)},
    "g2_elementwise": {"gates": (GateSpec("g2", "elementwise"),)},
    "g2_headwise": {"gates": (GateSpec("g2", "headwise"),)},
    "g2_elementwise_shared": {"gates": (GateSpec("g2", "elementwise", "shared"),)},
    "g3_elementwise": {"gates": (GateSpec("g3", "elementwise"),)},
    "g4_elementwise": {"gates": (GateSpec("g4", "elementwise"),)},
    "g5_elementwise": {"gates": (GateSpec("g5", "elementwise"),)},
    "g1_elementwise_silu": {"gates": (GateSpec("g1", activation="silu"),)},
    "g1_additive_silu": {"gates": (GateSpec("g1", op="add", activation="silu"),)},
    "g1_additive_identity": {"gates": (GateSpec("g1", op="add", activation="identity"),)},
    "g1_elementwise_ns": {"gates": (GateSpec("g1", activation="ns_sigmoid"),)},
    "g1_input_independent": {"gates": (GateSpec("g1", source="independent"),)},
    "g1_elementwise_identity": {"gates": (GateSpec("g1", activation="two_sigmoid", init_scale=0.0),)},  # A.7
    "g1_rmsnorm": {"sdpa_transform": "rmsnorm"},
    "g1_silu": {"sdpa_transform": "silu"},
    "switch_kv_8_top8": {"switch_heads": 8, "switch_top_k": 8, "switch_keys": True},
    "switch_kv_4_top4": {"switch_heads": 4, "switch_top_k": 4, "switch_keys": True},
    "switch_v_4_top4": {"switch_heads": 4, "switch_top_k": 4},
    "switch_v_8_top2": {"switch_heads": 8, "switch_top_k": 2},
    "switch_v_1_top1": {"switch_heads": 1, "switch_top_k": 1},  # g2_headwise by another name
    "softmax_off_by_one": {"softmax": "off_by_one"},  # rivals: no gate, a softmax that may attend to nothing
    "sink_logit": {"softmax": "sink_logit"},
    "sandwich_norm": {"sandwich_norm": True},
}


def experts_plus4(model: ModelConfig) -> dict[str, Any]:
    """Four more experts, all of which every token goes to in addition to those it went to.

    Raises:
      ConfigError: for a dense model.
    """
    if not model.num_experts:
        raise ConfigError(
            "gate", "experts_plus4", "needs a model with experts: --preset moe_tiny, or another moe preset"
        )
    return {"num_experts": model.num_experts + 4, "experts_per_token": model.experts_per_token + 4}


def kv_double(model: ModelConfig) -> dict[str, Any]:
    """Twice the kv heads: 8 in place of the paper's 4."""
    return {"num_kv_heads": 2 * model.num_kv_heads}


def q_half_more(model: ModelConfig) -> dict[str, Any]:
    """Half as many query heads again, of the same size: 48 in place of the paper's 32.

    Raises:
      ConfigError: where that is no whole number.
    """
    if model.num_heads % 2:
        raise ConfigError("gate", "q_half_more", f"needs an even number of query heads, not {model.num_heads}")
    return {"num_heads": model.num_heads * 3 // 2}


RELATIVE: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    function.__name__: function for function in (experts_plus4, kv_double, q_half_more)
}
NAMES = (*VARIANTS, *RELATIVE)


# Table and row of the paper -> variant.
PAPER: dict[str, dict[int, str]] = {
    "table1": {
        1: "baseline",
        2: "kv_double",
        3: "q_half_more",
        4: "experts_plus4",
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
    },
    "table2": {
        1: "baseline",
        2: "g1_elementwise",
        3: "baseline",
        4: "g1_elementwise",
        5: "baseline",
        6: "baseline",
        7: "sandwich_norm",
        8: "g1_elementwise",
        9: "g1_headwise",
        10: "g1_elementwise",
        11: "baseline",
        12: "baseline",
        13: "g1_elementwise",
        14: "g1_elementwise",
    },
    "table3": {
        1: "baseline",
        2: "g1_elementwise",
        3: "g2_elementwise",
        4: "g1_additive_silu",
        5: "g1_rmsnorm",
        6: "g1_silu",
        7: "g1_additive_identity",
    },
    "table4": {
        1: "baseline",
        2: "g1_elementwise",
        3: "g1_headwise",
        4: "g1_elementwise_shared",
        5: "g2_elementwise",
        6: "g1_input_independent",
        7: "g1_elementwise_ns",
    },
    "table6": {
        1: "baseline",
        2: "switch_kv_8_top8",
        3: "switch_kv_4_top4",
        4: "switch_v_4_top4",
        5: "switch_v_8_top2",
        6: "switch_v_1_top1",
    },
}


def apply(config: Config, name: str) -> Config:
    """The config with the variant `name`, or several joined by +, laid over its model in place of its gates.

    Raises:
      ConfigError: for a name that is not in NAMES, or a combination that the model cannot take.
    """
    fields: dict[str, Any] = {"gates": ()}
    for part in name.split("+"):
        if part not in NAMES:
            raise ConfigError("gate", part, f"no such variant; known: {', '.join(NAMES)}")
        new = RELATIVE[part](override(config.model, fields)) if part in RELATIVE else VARIANTS[part]
        fields |= new | {"gates": fields["gates"] + new.get("gates", ())}
    return override(config, {f"model.{key}": value for key, value in fields.items()})
