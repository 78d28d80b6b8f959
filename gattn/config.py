"""Every configuration of gattn as a frozen dataclass: validation, dotted overrides, JSON, fingerprint.

No jax here, so that presets, sweeps and reports can be read anywhere. A `Config` fixes a run completely; two configs
with the same `fingerprint()` train the same parameters. Anything wrong raises `ConfigError` with the dotted field, its
value and the remedy, before an array exists.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from gattn.architecture import GateSpec as GateSpec
from gattn.architecture import ModelConfig
from gattn.schema import ADDED, COSMETIC, above, at_least, check_types
from gattn.schema import ConfigError as ConfigError
from gattn.schema import from_dict as from_dict
from gattn.schema import override as override
from gattn.schema import to_json as to_json

SCHEMA = 1  # part of every fingerprint; raise it when a change of code changes what an unchanged config computes


@dataclass(frozen=True)
class DataConfig:
    """Where token sequences come from and how they are batched."""

    source: str = "corpus"
    """`corpus` (Python's standard library, embedded), folders made by `python -m gattn prepare`, with weights where
    there are several (`data/web=0.7,data/code=0.3`), or `package.module:function`, which takes the Config."""
    tokenizer: str = "bpe"
    """Of the embedded corpus: bpe is trained once on it to model.vocab_size entries, bytes uses 257 of them; or a path,
    of a tokenizer.json or its folder. Prepared folders bring their own."""
    seq_len: int = 256
    """T: input positions per sequence, BOS included."""
    batch_size: int = 16
    """B: sequences per optimiser step."""
    attend_across_documents: bool = False
    """Let attention cross the document borders inside a window."""
    eval_sequences: int = 128
    """Held-out sequences per evaluation, of each prepared folder."""
    workers: int = field(default=1, metadata=COSMETIC)
    """Threads that read batches ahead (0: the loop reads them itself); cannot change a batch."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 1, "batch_size", "eval_sequences")
        at_least(self, 2, "seq_len")
        at_least(self, 0, "workers")
        if self.source != "corpus" and not is_import_path(self.source):
            parts = self.mixture()
            one_spelling = ",".join(f"{folder}={weight:.6g}" for folder, weight in parts.items())
            object.__setattr__(self, "source", one_spelling if len(parts) > 1 else next(iter(parts)))

    def mixture(self) -> dict[str, float]:
        """Prepared folder -> weight (they sum to 1), where `source` names folders: `a` or `a=0.7,b=0.3`."""
        out: dict[str, float] = {}
        for part in self.source.split(","):
            folder, given, weight = part.strip().rpartition("=")
            folder, weight = (folder, weight) if given else (weight, "1")
            folder = folder.rstrip("/") or folder
            try:
                out[folder] = float(weight)
            except ValueError:
                out[folder] = math.nan
            if not folder or not 0 < out[folder] < math.inf:
                remedy = (
                    "use 'corpus', a prepared folder, 'FOLDER=0.7,FOLDER=0.3' (above 0) or 'package.module:function'"
                )
                raise ConfigError("source", self.source, remedy)
        if len(out) != self.source.count(",") + 1:
            raise ConfigError("source", self.source, "names a folder twice: add its weights")
        return {folder: weight / sum(out.values()) for folder, weight in out.items()}


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a linear warm-up and a schedule after it."""

    learning_rate: float = 3e-3
    """Peak, reached after warmup_steps."""
    final_learning_rate: float = 3e-4
    """Where the schedule ends, one step after the last (unused with schedule = constant)."""
    warmup_steps: int = 50
    schedule: Literal["cosine", "linear", "constant", "wsd"] = field(default="cosine", metadata=ADDED)
    """After the warm-up: cosine or linear to final_learning_rate; constant; wsd (warm-up, stable, decay) stays at the
    peak and falls linearly over the last decay_steps."""
    decay_steps: int = field(default=0, metadata=ADDED)
    """Length of wsd's decay."""
    weight_decay: float = 0.1
    """On everything with two or more axes per layer; never on norms, biases and sink logits."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""

    def __post_init__(self):
        check_types(self)
        above(self, 0.0, "learning_rate", "eps", "clip_norm")
        at_least(self, 0.0, "final_learning_rate", "weight_decay", "warmup_steps", "b1", "b2")
        for name in ("b1", "b2"):
            if getattr(self, name) >= 1:
                raise ConfigError(name, getattr(self, name), "a decay rate lies in [0, 1)")
        if self.schedule != "constant" and self.final_learning_rate > self.learning_rate:
            raise ConfigError("final_learning_rate", self.final_learning_rate, "must not exceed learning_rate")
        if self.decay_steps < 2 if self.schedule == "wsd" else self.decay_steps:
            remedy = "the length of wsd's decay: at least 2 with optim.schedule = wsd, 0 with the others"
            raise ConfigError("decay_steps", self.decay_steps, remedy)


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    seed: int = 0
    """Seeds parameters and data order."""
    start_from: str = field(default="", metadata=ADDED)
    """Finished run (its folder's name below $GATTN_HOME/runs, or a path) whose last weights training starts with; gates
    that this model has and that one lacks are drawn as ever; RoPE's base, its scaling, the window and the length may be
    others. Empty: everything is drawn."""
    divergence_is_a_result: bool = field(default=False, metadata=COSMETIC)
    """A loss or gradient that is not finite ends the run with a result that says so, and not with an error (for studies
    of stability)."""
    loss_chunk: int = 2048
    """Positions whose logits exist at the same time."""
    accumulation: int = field(default=1, metadata=ADDED)
    """Equal parts of the batch taken one after the other (memory); every token counts the same."""
    z_loss: float = field(default=0.0, metadata=ADDED)
    """Weight of the mean squared log-partition of the logits, added to what is minimised (PaLM: 1e-4)."""
    balance_loss: float = field(default=0.0, metadata=ADDED)
    """Weight of the experts' balance loss, E sum_e f_e P_e over the global batch, mean over layers (`gattn.moe`)."""
    router_z_loss: float = field(default=0.0, metadata=ADDED)
    """Weight of the mean squared log-partition of the routers' logits, mean over layers (ST-MoE: 1e-3)."""
    ema_decay: float = field(default=0.0, metadata=ADDED)
    """Decay of an average of the weights, which evaluation and probes then use; 0 keeps none."""
    log_every: int = field(default=10, metadata=COSMETIC)
    """Steps between lines of metrics.jsonl (each line holds every step's loss)."""
    eval_every: int = field(default=250, metadata=COSMETIC)
    """Steps between evaluations on held-out data (also before the first step and after the last)."""
    probe_every: int = field(default=0, metadata=COSMETIC)
    """Steps between probes on one held-out batch while training; 0 probes only at the end."""
    checkpoint_every: int = field(default=250, metadata=COSMETIC)
    """Steps between checkpoints (also after the last)."""
    keep_last: int = field(default=2, metadata=COSMETIC)
    """Newest checkpoints kept; two, so that a damaged one costs one interval."""
    keep_every: int = field(default=0, metadata=COSMETIC)
    """Checkpoints whose step is a multiple of this are kept for good; 0 keeps none."""
    keep_best: bool = field(default=False, metadata=COSMETIC)
    """Keep the checkpoint with the lowest held-out loss."""
    tensorboard: bool = field(default=True, metadata=COSMETIC)
    """Write TensorBoard events into the run's folder."""
    wandb: str = field(default="", metadata=COSMETIC)
    """Weights & Biases project to report to; empty reports nowhere."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 1, "steps", "loss_chunk", "accumulation", "log_every", "eval_every", "checkpoint_every")
        at_least(self, 1, "keep_last")
        at_least(self, 0, "seed", "z_loss", "balance_loss", "router_z_loss", "ema_decay", "probe_every", "keep_every")
        if self.ema_decay >= 1:
            raise ConfigError("ema_decay", self.ema_decay, "a decay rate lies in [0, 1)")
        if self.keep_every % self.checkpoint_every:
            remedy = f"must be a multiple of checkpoint_every = {self.checkpoint_every}: others are never written"
            raise ConfigError("keep_every", self.keep_every, remedy)
        if self.keep_best and self.checkpoint_every % self.eval_every:
            remedy = f"checkpoint_every = {self.checkpoint_every} must be a multiple of eval_every = {self.eval_every}"
            raise ConfigError("keep_best", self.keep_best, remedy)
        if self.seed >= 2**32:
            raise ConfigError("seed", self.seed, "must be below 2**32: JAX takes 32 bits of it")


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has. It changes how a run is computed and not what: a run may go on on
    another mesh."""

    dcn_data: int = field(default=1, metadata=COSMETIC)
    """Copies of the model on slices (or machines) that a slower network connects."""
    data: int = field(default=0, metadata=COSMETIC)
    """Copies of the model, each with its part of the batch; 0: as many as the other axes leave devices for."""
    fsdp: int = field(default=1, metadata=COSMETIC)
    """Parts of the batch, over which parameters and optimiser state are cut up, too."""
    expert: int = field(default=1, metadata=COSMETIC)
    """Parts of the batch, over which the experts are distributed; tokens travel to them."""
    context: int = field(default=1, metadata=COSMETIC)
    """Parts of every sequence."""
    tensor: int = field(default=1, metadata=COSMETIC)
    """Parts of the heads and of the FFN's width."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 0, "data")
        at_least(self, 1, "dcn_data", "fsdp", "expert", "context", "tensor")

    @staticmethod
    def parse(text: str) -> MeshConfig:
        """A mesh from `data=2,fsdp=4`; axes that are not named have one device, `data` as many as are left.

        Raises:
          ConfigError: for another spelling, an unknown axis or one that is named twice.
        """
        sizes: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            axis, _, size = part.strip().partition("=")
            if not size.isdecimal() or axis in sizes:
                raise ConfigError("mesh", text, "give each axis once, with its devices: data=2,fsdp=4")
            sizes[axis] = int(size)
        return from_dict(MeshConfig, sizes, "mesh")

    def __str__(self) -> str:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        check_types(self)
        if self.optim.warmup_steps >= self.train.steps:
            raise ConfigError(
                "optim.warmup_steps", self.optim.warmup_steps, f"must be below train.steps = {self.train.steps}"
            )
        if self.optim.warmup_steps + self.optim.decay_steps > self.train.steps:
            remedy = f"warm-up and decay must fit into train.steps = {self.train.steps}"
            raise ConfigError("optim.decay_steps", self.optim.decay_steps, remedy)
        if self.data.batch_size % self.train.accumulation:
            remedy = f"must divide data.batch_size = {self.data.batch_size}"
            raise ConfigError("train.accumulation", self.train.accumulation, remedy)
        for name in ("balance_loss", "router_z_loss"):
            if getattr(self.train, name) and not self.model.num_experts:
                raise ConfigError(f"train.{name}", getattr(self.train, name), "belongs to experts: set it to 0")
        if self.model.position == "learned" and self.data.seq_len > self.model.max_seq_len:
            raise ConfigError(
                "model.max_seq_len", self.model.max_seq_len, f"learned positions must cover seq_len {self.data.seq_len}"
            )
        own = self.data.tokenizer in ("bpe", "bytes")
        if self.data.source == "corpus" and own and self.model.vocab_size < 257:
            raise ConfigError("model.vocab_size", self.model.vocab_size, "256 bytes and BOS need at least 257")

    def fingerprint(self) -> str:
        """16 hex digits of everything that changes the trained parameters or the final measures."""
        kept: dict[str, Any] = {"schema": SCHEMA}
        for part in dataclasses.fields(self):
            section = getattr(self, part.name)
            left_out = {f.name for f in dataclasses.fields(section) if _left_out(f, getattr(section, f.name))}
            if fields := {k: v for k, v in dataclasses.asdict(section).items() if k not in left_out}:
                kept[part.name] = fields
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def run_name(self) -> str:
        """Folder name of the run: source, variant, seed and fingerprint; the same for every table that needs it."""
        source = self.data.source
        if is_import_path(source):
            source = source.rpartition(":")[2]
        elif source != "corpus":
            names = [folder.rpartition("/")[2] for folder in self.data.mixture()]
            source = "+".join(re.sub(r"[^\w.]+", "-", name) for name in names)
        return f"{source}-{self.model.label}-s{self.train.seed}-{self.fingerprint()[:10]}"[-120:]


def is_import_path(text: str) -> bool:
    """Whether text reads `package.module:function`."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def differences(old: Config, new: Config) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Dotted field -> (old, new) where two configs differ: what changes a run's mathematics, and what does not."""
    mathematical: dict[str, tuple[Any, Any]] = {}
    cosmetic: dict[str, tuple[Any, Any]] = {}
    for part in dataclasses.fields(Config):
        before, after = getattr(old, part.name), getattr(new, part.name)
        for f in dataclasses.fields(before):
            pair = getattr(before, f.name), getattr(after, f.name)
            if pair[0] != pair[1]:
                (cosmetic if f.metadata.get("cosmetic") else mathematical)[f"{part.name}.{f.name}"] = pair
    return mathematical, cosmetic


def _left_out(f: dataclasses.Field, value: Any) -> bool:
    return bool(f.metadata.get("cosmetic") or (f.metadata.get("added") and value == f.default))
