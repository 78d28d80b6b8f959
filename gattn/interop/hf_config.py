"""config.json of Hugging Face in both dialects, to a model and back; what is not understood is a named error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gattn.config import ConfigError, GateSpec, ModelConfig

Layout = Literal["plain", "official", "qwen3_5"]
FAMILIES = {"qwen3": True, "qwen3_moe": True, "llama": False, "mistral": False}  # model_type -> norms of q and k
ELEMENTWISE, HEADWISE = GateSpec("g1", "elementwise"), GateSpec("g1", "headwise")

# Fields that do not change what is computed from tokens.
IDLE = {
    *(
        "architectures",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "_name_or_path",
        "auto_map",
        "id2label",
    ),
    *("label2id", "pad_token_id", "bos_token_id", "eos_token_id", "router_aux_loss_coef", "output_router_logits"),
    *("attention_dropout", "max_window_layers", "pretraining_tp", "model_type", "torch_dtype", "dtype"),
    *("_attn_implementation", "return_dict", "output_hidden_states", "output_attentions", "num_nextn_predict_layers"),
}
# Fields that must say this where they are there.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "shared_expert_intermediate_size": (0, None),
    "partial_rotary_factor": (1.0, 1, None),
}


class _Fields:
    """config.json, of which every field is taken or refused."""

    def __init__(self, raw: Mapping[str, Any], path: Path):
        self.raw, self.path, self.seen = raw, path, set(IDLE)

    def error(self, field: str, remedy: str) -> ConfigError:
        return ConfigError(f"config.json: {field}", self.raw.get(field), remedy)

    def take(self, kind: type, *names: str, default: Any = ...) -> Any:
        """The value of the first of these names that is there and not null."""
        self.seen |= set(names)
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise self.error(name, f"must be of type {kind.__name__}")
            return value
        if default is ...:
            raise self.error(names[0], "is missing: it cannot be guessed")
        return default

    def finish(self) -> None:
        for name, allowed in FIXED.items():
            self.seen.add(name)
            if name in self.raw and self.raw[name] not in allowed:
                raise self.error(name, f"cannot be computed here: {allowed[0]!r} can")
        if unknown := sorted(set(self.raw) - self.seen):
            raise self.error(unknown[0], "is not known here, and may change what is computed: nothing is guessed")


def read_config(path: Path) -> tuple[ModelConfig, Layout]:
    """The model that a config.json describes, and how its query weights are laid out.

    Raises:
      ConfigError: naming the field that is missing, unknown, or says what cannot be computed here.
    """
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError("config.json", str(path), f"cannot be read: {error}") from error
    if raw.get("model_type") == "qwen3_5_text":
        return _qwen3_5(_Fields(raw, path)), "qwen3_5"
    fields = _Fields(raw, path)
    family = fields.take(str, "model_type")
    if family not in FAMILIES:
        raise fields.error("model_type", f"is not known here; known: {', '.join([*FAMILIES, 'qwen3_5_text'])}")
    common = _common(fields)
    gates = [
        spec
        for spec in (ELEMENTWISE, HEADWISE)
        if fields.take(bool, f"{spec.granularity}_attn_output_gate", default=False)
    ]
    if len(gates) > 1:
        raise fields.error("headwise_attn_output_gate", "is set beside elementwise_attn_output_gate: one gate at most")
    qk_norm = fields.take(bool, "use_qk_norm", default=FAMILIES[family])
    window = _window(fields, family)
    if family == "qwen3_moe":
        experts = {
            "num_experts": fields.take(int, "num_experts", "num_local_experts"),
            "experts_per_token": fields.take(int, "num_experts_per_tok"),
            "expert_dim": fields.take(int, "moe_intermediate_size"),
            "norm_topk_prob": fields.take(bool, "norm_topk_prob"),
        }
    else:
        experts = {}
    _layer_types(fields, ("sliding_attention",) if window else ("full_attention",))
    fields.finish()
    model = _model({**common, **experts, "gates": tuple(gates), "qk_norm": qk_norm, "window": window})
    return model, "official" if gates else "plain"


def _qwen3_5(fields: _Fields) -> ModelConfig:
    common = _common(fields)
    if fields.take(bool, "attn_output_gate", default=True) is not True:
        raise fields.error("attn_output_gate", "must be true: qwen3_5_text is read for its gate")
    _layer_types(fields, ("full_attention",), required=True)
    linear = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads")
    fields.seen |= {*linear, "linear_num_value_heads", "linear_value_head_dim", "full_attention_interval"}
    fields.seen |= {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mlp_only_layers"}  # of layers that are not there
    fields.finish()
    return _model({**common, "gates": (ELEMENTWISE,), "qk_norm": True})


def _common(fields: _Fields) -> dict[str, Any]:
    heads, width = fields.take(int, "num_attention_heads"), fields.take(int, "hidden_size")
    head_dim = fields.take(int, "head_dim", default=width // heads)
    dtype = str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32")
    return {
        "vocab_size": fields.take(int, "vocab_size"),
        "num_layers": fields.take(int, "num_hidden_layers"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": fields.take(int, "num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "ffn_dim": fields.take(int, "intermediate_size"),
        "norm_eps": fields.take(float, "rms_norm_eps"),
        "max_seq_len": fields.take(int, "max_position_embeddings"),
        "tied_embeddings": fields.take(bool, "tie_word_embeddings", default=False),
        "dtype": "bfloat16" if "bfloat16" in dtype else "float32",
        **_rope(fields),
    }


def _rope(fields: _Fields) -> dict[str, Any]:
    """Both dialects: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    fields.seen |= {"rope_parameters", "rope_scaling"}
    given = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", "must be an object")
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    inner = _Fields(given, fields.path)
    theta = inner.take(float, "rope_theta") if "rope_theta" in given else fields.take(float, "rope_theta")
    fields.seen.add("rope_theta")
    kind = inner.take(str, "rope_type", "type", default="default")
    out: dict[str, Any] = {"rope_theta": theta}
    inner.seen |= {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(f"config.json: {name}.partial_rotary_factor", given["partial_rotary_factor"], "must be 1")
    if kind in ("linear", "yarn"):
        factor = inner.take(float, "factor")
        out |= {"rope_scaling": kind, "rope_factor": factor} if factor != 1.0 else {}
        if kind == "yarn":
            limit = fields.take(int, "max_position_embeddings")
            out["rope_original_length"] = inner.take(int, "original_max_position_embeddings", default=limit)
            for field, usual in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
                inner.seen.add(field)
                if given.get(field, usual) not in (None, usual):
                    raise ConfigError(f"config.json: {name}.{field}", given[field], f"only {usual!r} is computed here")
    elif kind != "default":
        raise ConfigError(f"config.json: {name}.rope_type", kind, "is not known here: default, linear and yarn are")
    if unknown := sorted(set(given) - inner.seen):
        raise ConfigError(
            f"config.json: {name}.{unknown[0]}", given[unknown[0]], "is not known here: nothing is guessed"
        )
    return out


def _window(fields: _Fields, family: str) -> int:
    window = fields.take(int, "sliding_window", default=0)
    used = fields.take(bool, "use_sliding_window", default=family == "mistral")
    return window if used else 0


def _layer_types(fields: _Fields, allowed: Sequence[str], required: bool = False) -> None:
    fields.seen.add("layer_types")
    types = fields.raw.get("layer_types")
    if types is None and not required:
        return
    layers = fields.raw.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers or set(types) - set(allowed):
        raise fields.error("layer_types", f"must be {layers} times {allowed[0]!r}")


def _model(fields: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**fields, match_params=False)
    except ConfigError as error:
        raise ConfigError(f"config.json: {error.field}", error.value, error.remedy) from error


def config_json(model: ModelConfig, layout: Layout) -> dict[str, Any]:
    """What config.json says of a model, in the newer dialect and in the older one."""
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rope_scaling != "none":
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = model.rope_original_length
    out: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": model.max_seq_len,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": False,
        "rope_parameters": rope,
        "dtype": model.dtype,
    }
    if layout == "qwen3_5":
        full = {"layer_types": ["full_attention"] * model.num_layers, "partial_rotary_factor": 1.0}
        rope["partial_rotary_factor"] = 1.0
        return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **out, **full}
    if model.num_experts:
        name, kind = "Qwen3MoeForCausalLM", "qwen3_moe"
        out |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_dim,
            "norm_topk_prob": model.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif model.qk_norm:
        name, kind = "Qwen3ForCausalLM", "qwen3"
    elif model.window:
        name, kind = "MistralForCausalLM", "mistral"
    else:
        name, kind = "LlamaForCausalLM", "llama"
    if model.window:
        out["sliding_window"] = model.window
        if kind.startswith("qwen3"):
            out |= {"use_sliding_window": True, "max_window_layers": 0}
            out["layer_types"] = ["sliding_attention"] * model.num_layers
    if layout == "official":
        for spec in (ELEMENTWISE, HEADWISE):
            out[f"{spec.granularity}_attn_output_gate"] = model.gates == (spec,)
        out |= {"use_qk_norm": model.qk_norm, "qkv_bias": False}
    return {"architectures": [name], "model_type": kind, **out}
