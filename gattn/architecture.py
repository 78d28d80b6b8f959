"""The model's configuration: the gates' specs and the decoder's shape, with their validation; no jax here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from gattn.schema import ADDED, COSMETIC, ConfigError, above, at_least, check_types

Position = Literal["g1", "g2", "g3", "g4", "g5"]
Activation = Literal["sigmoid", "silu", "ns_sigmoid", "identity", "two_sigmoid"]


@dataclass(frozen=True)
class GateSpec:
    """One gate Y' = Y * act(score) or Y + act(score), score = X W (paper eq. 5), X the block's normalised input."""

    position: Position = "g1"
    """Where: g1 SDPA output, g2 value, g3 key, g4 query (each after its projection), g5 after W_O."""
    granularity: Literal["elementwise", "headwise"] = "elementwise"
    """One score per channel, or one per head."""
    sharing: Literal["specific", "shared"] = "specific"
    """shared: activated scores are averaged over the heads (same parameters, one score for all heads)."""
    op: Literal["multiply", "add"] = "multiply"
    """How the activated score meets what it gates."""
    activation: Activation = "sigmoid"
    """ns_sigmoid = 0.5 + 0.5 sigmoid (not sparse), two_sigmoid = 2 sigmoid (the identity at score 0)."""
    source: Literal["input", "independent"] = "input"
    """independent: the score is a zero-initialised parameter instead of a function of the token."""
    bias: bool = False
    """Adds a learned bias to the score."""
    bias_init: float = 0.0
    """Initial value of that bias."""
    init_scale: float = 1.0
    """Standard deviation of the gate's weight, in units of model.init_std (0: zero-initialised)."""

    def __post_init__(self):
        check_types(self)
        if self.position == "g5" and self.granularity == "headwise":
            raise ConfigError("granularity", self.granularity, "g5 gates the D channels after W_O: use elementwise")
        if self.position == "g5" and self.sharing == "shared":
            raise ConfigError("sharing", self.sharing, "g5 has no head axis to share over: use specific")
        if self.source == "independent" and self.bias:
            raise ConfigError("bias", self.bias, "an input-independent gate is a bias already: set bias to False")
        if self.source == "independent" and self.init_scale != 1.0:
            raise ConfigError("init_scale", self.init_scale, "an input-independent gate starts at zero: leave it at 1")
        if self.bias_init and not self.bias:
            raise ConfigError("bias_init", self.bias_init, "has no effect without a bias: set bias to True")
        at_least(self, 0.0, "init_scale")

    def score_shape(self, model: ModelConfig) -> tuple[int, ...]:
        """Shape of one token's scores before sharing: (heads, head_dim), (heads, 1), or (D,) at g5."""
        if self.position == "g5":
            return (model.d_model,)
        heads = model.num_kv_heads if self.position in ("g2", "g3") else model.num_heads
        return (heads, model.head_dim if self.granularity == "elementwise" else 1)

    def num_params(self, model: ModelConfig) -> int:
        """Parameters this gate adds to one layer."""
        scores = math.prod(self.score_shape(model))
        if self.source == "independent":
            return scores
        return scores * (model.d_model + self.bias)

    @property
    def label(self) -> str:
        """A short name that tells this spec from the others, e.g. g1_elementwise, g1_elementwise_shared_add_silu."""
        parts: list[str] = [self.position, self.granularity]
        defaults = GateSpec()
        parts += [
            getattr(self, f)
            for f in ("sharing", "op", "activation", "source")
            if getattr(self, f) != getattr(defaults, f)
        ]
        if self.bias:
            parts.append(f"bias{self.bias_init:g}")
        if self.init_scale != 1.0:
            parts.append(f"init{self.init_scale:g}")
        return "_".join(parts)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. Letters: D d_model, N num_heads, K num_kv_heads, H head_dim, F ffn, L num_layers, V vocab_size."""

    vocab_size: int = 4096
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_dim: int = 512
    """SwiGLU width of the ungated model; `ffn_width` is what is built."""
    gates: tuple[GateSpec, ...] = ()
    """The gates, at most one per position; `--gate NAME` of the command line sets them by name."""
    sdpa_transform: Literal["none", "rmsnorm", "silu"] = "none"
    """Parameter-free change of the SDPA output, per head (paper Table 3, rows 5 and 6)."""
    softmax: Literal["standard", "off_by_one", "sink_logit"] = "standard"
    """off_by_one adds exp(0) to every softmax denominator, sink_logit a learned exp(s) per head."""
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    """Position encoding: rotary; a learned table added to the embeddings; alibi takes a slope per head times the
    distance from the logits (arXiv 2108.12409); or none (NoPE)."""
    rope_theta: float = 10_000.0
    rope_scaling: Literal["none", "linear", "yarn"] = field(default="none", metadata=ADDED)
    """RoPE beyond the length it was trained at: linear divides positions (arXiv 2306.15595), yarn slows the channels
    that turn slowly and sharpens the softmax (arXiv 2309.00071)."""
    rope_factor: float = field(default=1.0, metadata=ADDED)
    """By how much rope_scaling extends the length."""
    rope_original_length: int = field(default=0, metadata=ADDED)
    """The length that yarn extends: the one it was trained at."""
    window: int = field(default=0, metadata=ADDED)
    """Keys that a query sees, its own among them (sliding window, the W of Hugging Face); 0: all up to its own."""
    kept_first: int = field(default=0, metadata=ADDED)
    """With a window, first tokens that all queries see beside it, at the distances that they have in a cache of
    kept_first + window tokens (StreamingLLM, arXiv 2309.17453)."""
    max_seq_len: int = 4096
    """Rows of the learned position table (unused with rope)."""
    qk_norm: bool = True
    """RMSNorm of queries and keys per head, before RoPE."""
    tied_embeddings: bool = True
    sandwich_norm: bool = False
    """A second RMSNorm on each sublayer's output, before it joins the residual stream."""
    clip_outputs: float = field(default=0.0, metadata=ADDED)
    """Limit of |attention and FFN outputs| before they join the residual stream (paper A.6: 300, 100); 0: none."""
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of every matrix and embedding."""
    ffn_multiple: int = 8
    """The FFN is narrowed in steps of this (128 at the paper's shapes)."""
    match_params: bool = True
    """Narrow the FFN of a gated model so that its parameter count stays that of the ungated one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, softmax and loss are float32."""
    remat: Literal["none", "dots", "attention", "full"] = "none"
    """What backward recomputes: nothing; everything but matrix products; all but attention itself; the whole block."""
    scan_layers: bool = True
    """Scan over stacked layers (compile time independent of depth) instead of unrolling them."""
    attention: Literal["auto", "tpu", "gpu", "cudnn", "chunked", "reference"] = "auto"
    """Implementation of attention; auto takes the best for the device and shape, and the run records which."""
    num_experts: int = field(default=0, metadata=ADDED)
    """E: experts in place of the FFN; 0 is a dense model."""
    experts_per_token: int = field(default=0, metadata=ADDED)
    """Experts that each token goes to (top-k)."""
    expert_dim: int = field(default=0, metadata=ADDED)
    """F: SwiGLU width of one expert."""
    norm_topk_prob: bool = field(default=True, metadata=ADDED)
    """Divide the chosen experts' router probabilities by their sum."""
    buffer_factor: float = field(default=2.0, metadata=COSMETIC)
    """Rows of the buffer in which a device of mesh axis `expert` receives tokens, over those of a balanced load. What
    does not fit takes a second path with room for all (metric `moe/overflow`); no token is dropped."""
    switch_heads: int = field(default=0, metadata=ADDED)
    """Value projections per kv head among which a sigmoid router chooses (paper Table 6); 0: one, without a router."""
    switch_top_k: int = field(default=0, metadata=ADDED)
    """How many of them are summed, weighted by their scores."""
    switch_keys: bool = field(default=False, metadata=ADDED)
    """Also of the keys, chosen by the same router."""

    def __post_init__(self):
        check_types(self)
        positive = ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
        at_least(self, 1, *positive, "max_seq_len", "ffn_multiple")
        above(self, 0.0, "rope_theta", "norm_eps")
        at_least(self, 0.0, "init_std", "clip_outputs")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_kv_heads", self.num_kv_heads, f"must divide num_heads = {self.num_heads} (grouped-query attention)"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError("head_dim", self.head_dim, "RoPE rotates pairs of channels: make it even")
        self._check_range()
        positions = [gate.position for gate in self.gates]
        if twice := {p for p in positions if positions.count(p) > 1}:
            raise ConfigError("gates", positions, f"position {min(twice)} is gated twice: keep one gate per position")
        if self.gates and self.match_params and self.ffn_dim % self.ffn_multiple:
            raise ConfigError(
                "ffn_dim", self.ffn_dim, f"must be a multiple of ffn_multiple = {self.ffn_multiple} to match parameters"
            )
        self._check_experts()
        if self.ffn_width < 1:
            raise ConfigError(
                "ffn_dim",
                self.ffn_dim,
                f"the gates add more parameters ({self.gate_params:,} a layer) than the FFN can give up: "
                "widen it or set match_params to False",
            )

    def _check_range(self) -> None:
        at_least(self, 0, "rope_original_length", "window", "kept_first")
        at_least(self, 1.0, "rope_factor")
        if self.rope_scaling != "none" and self.position != "rope":
            raise ConfigError("rope_scaling", self.rope_scaling, f"scales RoPE, and position is {self.position!r}")
        if (self.rope_scaling == "none") != (self.rope_factor == 1.0):
            remedy = f"belongs to rope_scaling = {self.rope_scaling!r}: above 1 with linear and yarn, 1 with none"
            raise ConfigError("rope_factor", self.rope_factor, remedy)
        if (self.rope_scaling == "yarn") != bool(self.rope_original_length):
            remedy = "the length trained at, with rope_scaling = 'yarn'; 0 with the others"
            raise ConfigError("rope_original_length", self.rope_original_length, remedy)
        if self.kept_first and not self.window:
            raise ConfigError("kept_first", self.kept_first, "keeps tokens beside a window: set window, or this to 0")

    def _check_experts(self) -> None:
        at_least(self, 0, "num_experts", "experts_per_token", "expert_dim", "switch_heads", "switch_top_k")
        for of, parts in (("num_experts", ("experts_per_token", "expert_dim")), ("switch_heads", ("switch_top_k",))):
            for name in parts:
                if bool(getattr(self, name)) != bool(getattr(self, of)):
                    remedy = f"belongs to model.{of} = {getattr(self, of)}: set both above 0, or both to 0"
                    raise ConfigError(name, getattr(self, name), remedy)
        if self.experts_per_token > self.num_experts:
            remedy = f"must not exceed num_experts = {self.num_experts}"
            raise ConfigError("experts_per_token", self.experts_per_token, remedy)
        if self.switch_top_k > self.switch_heads:
            remedy = f"must not exceed switch_heads = {self.switch_heads}"
            raise ConfigError("switch_top_k", self.switch_top_k, remedy)
        if self.switch_keys and not self.switch_heads:
            raise ConfigError("switch_keys", True, "belongs to switch_heads: set that, or this to False")
        if self.num_experts and self.match_params:
            remedy = "only a dense FFN is narrowed, not experts (as in the paper): set it to False"
            raise ConfigError("match_params", True, remedy)
        at_least(self, 1.0, "buffer_factor")

    @property
    def activations(self) -> dict[Position, Activation]:
        """Gate position -> activation."""
        return {gate.position: gate.activation for gate in self.gates}

    @property
    def gate_params(self) -> int:
        """Parameters that the gates add to one layer."""
        return sum(gate.num_params(self) for gate in self.gates)

    @property
    def ffn_width(self) -> int:
        """F as built: `ffn_dim`, narrowed to the nearest `ffn_multiple` that pays for the gates when `match_params`."""
        if not self.match_params:
            return self.ffn_dim
        steps = round(self.gate_params / (3 * self.d_model * self.ffn_multiple))
        return self.ffn_dim - steps * self.ffn_multiple

    @property
    def label(self) -> str:
        """What sets this model's attention apart: the gates' labels and the parameter-free changes."""
        parts = [gate.label for gate in self.gates]
        parts += [f"sdpa_{self.sdpa_transform}"] if self.sdpa_transform != "none" else []
        parts += [self.softmax] if self.softmax != "standard" else []
        parts += ["sandwich"] if self.sandwich_norm else []
        parts += [f"clip{self.clip_outputs:g}"] if self.clip_outputs else []
        if self.switch_heads:
            kind = "kv" if self.switch_keys else "v"
            parts.append(f"switch_{kind}_{self.switch_heads}_top{self.switch_top_k}")
        return "+".join(parts) or "baseline"
