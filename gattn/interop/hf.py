"""Checkpoints in the layouts of Hugging Face: Qwen3 (dense and MoE), the paper's official gated ones, Llama, Mistral.

A folder holds config.json and tensors. Both must be understood in full: a field, a tensor or a shape that is not known
here is an error that names it. What stands for what (torch weights are [out, in]; N query heads in K groups of G):

| file | here |
| --- | --- |
| `self_attn.q_proj` [N H, D] | `attention.query.kernel` [D, N, H] |
| official elementwise: [K, 2, G, H, D] | query at 0 and `attention.gates.g1.kernel` [D, N, H] at 1 |
| official headwise: [K, G H + G, D] | query, and in the last G rows of a group `gates.g1.kernel` [D, N, 1] |
| `Qwen3_5ForCausalLM`: [N, 2, H, D] | query at 0 and gate at 1; norms are stored less 1 |
| `self_attn.k_proj`, `v_proj` [K H, D], `o_proj` [D, N H] | `attention.key`, `value`, `out` |
| `mlp.gate_proj`, `up_proj` [F, D], `down_proj` [D, F] | `mlp.gate`, `up`, `down`; of experts `experts.*` [E, ...] |
| `mlp.gate` [E, D] | `experts.router` [D, E] |
| `embed_tokens` [V, D], `lm_head` [V, D] | `embedding`, and where they are not tied `output` [D, V] |
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gattn import model as decoder
from gattn import sharding
from gattn.config import Config, ConfigError, DataConfig, ModelConfig, override
from gattn.files import write_atomically
from gattn.interop.hf_config import ELEMENTWISE, HEADWISE, Layout, config_json, read_config
from gattn.interop.tensors import SAFE, SAFE_INDEX, TORCH, TORCH_INDEX, Tensor, open_tensors, write_tensors

NAMED = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}

# ---- layouts ----------------------------------------------------------------------------------------------------

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file and the parameters that it holds; `{i}` in its name is the layer, `{e}` the expert."""

    name: str
    paths: tuple[str, ...]
    """Dotted, as `gattn.model.param_shapes` has them."""
    shape: tuple[int, ...]
    split: Callable[[np.ndarray], Arrays]
    """The file's tensor to those of one layer (and one expert)."""
    join: Callable[[Arrays], np.ndarray]


def entries(model: ModelConfig, layout: Layout) -> list[Entry]:
    """Everything that a checkpoint of this model holds.

    Raises:
      ConfigError: the layout has no place for the model.
    """
    d, n, k, h, f = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_width
    less = 1.0 if layout == "qwen3_5" else 0.0
    layer = "model.layers.{i}."

    def matrix(name: str, path: str, out: int, into: int, *shape: int) -> Entry:
        return Entry(name, (path,), (out, into), lambda t: (t.T.reshape(shape),), lambda a: a[0].reshape(into, out).T)

    def norm(name: str, path: str, size: int) -> Entry:
        if not less:
            return Entry(name, (path,), (size,), lambda t: (t,), lambda a: a[0])
        return Entry(name, (path,), (size,), lambda t: (t + t.dtype.type(1),), lambda a: a[0] - a[0].dtype.type(1))

    found = [
        Entry(NAMED["embed"], ("embedding",), (model.vocab_size, d), lambda t: (t,), lambda a: a[0]),
        norm(NAMED["norm"], "final_norm.gain", d),
        norm(f"{layer}input_layernorm.weight", "blocks.attention_norm.gain", d),
        norm(f"{layer}post_attention_layernorm.weight", "blocks.mlp_norm.gain", d),
        _query(f"{layer}self_attn.q_proj.weight", model, layout),
        matrix(f"{layer}self_attn.k_proj.weight", "blocks.attention.key.kernel", k * h, d, d, k, h),
        matrix(f"{layer}self_attn.v_proj.weight", "blocks.attention.value.kernel", k * h, d, d, k, h),
        matrix(f"{layer}self_attn.o_proj.weight", "blocks.attention.out.kernel", d, n * h, n * h, d),
    ]
    if model.qk_norm:
        found += [
            norm(f"{layer}self_attn.q_norm.weight", "blocks.attention.query_norm.gain", h),
            norm(f"{layer}self_attn.k_norm.weight", "blocks.attention.key_norm.gain", h),
        ]
    if not model.tied_embeddings:
        found.append(matrix(NAMED["head"], "output", model.vocab_size, d, d, model.vocab_size))
    if model.num_experts:
        width, each = model.expert_dim, f"{layer}mlp.experts.{{e}}."
        found += [
            matrix(f"{layer}mlp.gate.weight", "blocks.experts.router", model.num_experts, d, d, model.num_experts),
            matrix(f"{each}gate_proj.weight", "blocks.experts.gate", width, d, d, width),
            matrix(f"{each}up_proj.weight", "blocks.experts.up", width, d, d, width),
            matrix(f"{each}down_proj.weight", "blocks.experts.down", d, width, width, d),
        ]
    else:
        found += [
            matrix(f"{layer}mlp.gate_proj.weight", "blocks.mlp.gate.kernel", f, d, d, f),
            matrix(f"{layer}mlp.up_proj.weight", "blocks.mlp.up.kernel", f, d, d, f),
            matrix(f"{layer}mlp.down_proj.weight", "blocks.mlp.down.kernel", d, f, f, d),
        ]
    held, has = {path for one in found for path in one.paths}, set(decoder.param_shapes(model))
    if held != has:
        odd = sorted(has ^ held)[0]
        raise ConfigError("model", model.label, f"{layout} checkpoints have no place for {odd}")
    return found


def _query(name: str, model: ModelConfig, layout: Layout) -> Entry:
    d, n, k, h = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim
    g, query = n // k, "blocks.attention.query.kernel"
    if layout == "plain":
        return Entry(name, (query,), (n * h, d), lambda t: (_heads(t, n),), lambda a: _rows(a[0]))
    paths = (query, "blocks.attention.gates.g1.kernel")
    if layout == "official" and model.gates == (HEADWISE,):

        def split(t: np.ndarray) -> Arrays:
            groups = t.reshape(k, g * h + g, d)
            return _heads(groups[:, : g * h].reshape(n * h, d), n), _heads(groups[:, g * h :].reshape(n, d), n)

        def join(a: Arrays) -> np.ndarray:
            parts = [_rows(one).reshape(k, -1, d) for one in a]
            return np.concatenate(parts, axis=1).reshape(n * h + n, d)

        return Entry(name, paths, (n * h + n, d), split, join)
    lead = (k, 2, g * h, d) if layout == "official" else (n, 2, h, d)

    def split_pairs(t: np.ndarray) -> Arrays:
        pairs = t.reshape(lead)
        return tuple(_heads(pairs[:, i].reshape(n * h, d), n) for i in range(2))

    def join_pairs(a: Arrays) -> np.ndarray:
        parts = [_rows(one).reshape(lead[0], lead[2], d) for one in a]
        return np.stack(parts, axis=1).reshape(2 * n * h, d)

    return Entry(name, paths, (2 * n * h, d), split_pairs, join_pairs)


def _heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads H, D] to [D, heads, H]."""
    return rows.T.reshape(rows.shape[1], heads, -1)


def _rows(kernel: np.ndarray) -> np.ndarray:
    """[D, heads, H] to [heads H, D]."""
    return kernel.reshape(len(kernel), -1).T


# ---- in -----------------------------------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's: its files are called so, or its config.json is not that of a run."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        return isinstance(raw, dict) and "model" not in raw and bool({"model_type", "hidden_size"} & set(raw))
    except (OSError, ValueError):
        return any((folder / name).exists() for name in (SAFE, SAFE_INDEX, TORCH, TORCH_INDEX))


def fetch(name: str) -> Path:
    """The local copy of `hf://owner/name` or `hf://owner/name@revision`: config, tokenizer and weights, fetched once.

    Raises:
      ConfigError: another spelling, or it cannot be fetched.
    """
    repository, _, revision = name.removeprefix("hf://").partition("@")
    if repository.count("/") != 1:
        raise ConfigError("run", name, "spell it hf://owner/name, or hf://owner/name@revision")
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
        if not list(folder.glob("*.safetensors")):
            folder = Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=[*wanted, f"{TORCH}*", "pytorch_model-*.bin"]
                )
            )
    except Exception as error:  # the hub's, HTTP's and the disk's
        raise ConfigError("run", name, f"cannot be fetched: {error}") from error
    return folder


def as_run(folder: Path) -> tuple[Config, nnx.State]:
    """A checkpoint as a run that was never trained here: its text is the embedded corpus by its own tokenizer.json, in
    windows of at most 512 tokens.

    Raises:
      ConfigError: as `load`.
    """
    model, params = load(folder)
    data = DataConfig(
        tokenizer=str(folder.absolute()), seq_len=min(512, model.max_seq_len), batch_size=1, eval_sequences=4
    )
    return Config(model=model, data=data), params


def companions(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that say how text becomes tokens and back."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def load(folder: Path, mesh: Mesh | None = None) -> tuple[ModelConfig, nnx.State]:
    """A checkpoint's model and its parameters in the file's dtype (float16 as float32), each laid out on the mesh as it
    is read: no more than one parameter is twice in this process's memory.

    Raises:
      ConfigError: naming the field or the tensor that is missing, too much, or not as config.json says.
    """
    model, layout = read_config(folder / "config.json")
    known, tensors = entries(model, layout), open_tensors(folder)
    _check(model, known, tensors)
    state = decoder.abstract(model)[1]
    where = sharding.shardings(mesh, state) if mesh is not None else None
    flat = dict(nnx.to_flat_state(state))
    places = dict(nnx.to_flat_state(where)) if where is not None else {}
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    holder = {path: (entry, entry.paths.index(path)) for entry in known for path in entry.paths}
    loaded = []
    for path, leaf in flat.items():
        entry, part = holder[".".join(map(str, path))]
        place = places[path] if places else one_device
        array = jax.make_array_from_callback(
            leaf.shape, getattr(place, "value", place), _reader(entry, part, leaf.shape, tensors)
        )
        loaded.append((path, leaf.replace(array)))
    return model, nnx.from_flat_state(loaded)


def _reader(
    entry: Entry, part: int, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> Callable[[Any], np.ndarray]:
    """By an index of the parameter: its values, layer after layer and expert after expert."""
    stacked = ("{i}" in entry.name) + ("{e}" in entry.name)
    first = tensors[entry.name.format(i=0, e=0)]
    dtype = np.dtype(np.float32) if first.dtype == np.float16 else first.dtype

    def read(index: tuple[slice, ...]) -> np.ndarray:
        lead = [range(size)[one] for size, one in zip(shape[:stacked], index, strict=False)]
        rest = index[stacked:]
        inner = tuple(len(range(size)[one]) for size, one in zip(shape[stacked:], rest, strict=True))
        out = np.empty((*map(len, lead), *inner), dtype)
        for place in np.ndindex(*map(len, lead)):
            numbers = dict(zip("ie", (lead[axis][at] for axis, at in enumerate(place)), strict=False))
            out[place] = entry.split(tensors[entry.name.format(**numbers)].read())[part][rest]
        return out

    return read


def names(model: ModelConfig, entry: Entry) -> Iterator[str]:
    for i in range(model.num_layers if "{i}" in entry.name else 1):
        for e in range(model.num_experts if "{e}" in entry.name else 1):
            yield entry.name.format(i=i, e=e)


def _check(model: ModelConfig, known: Sequence[Entry], tensors: Mapping[str, Tensor]) -> None:
    left = set(tensors)
    for entry in known:
        dtypes = set()
        for name in names(model, entry):
            if name not in tensors:
                raise ConfigError("checkpoint", name, "is missing: config.json asks for it")
            if tensors[name].shape != entry.shape:
                remedy = f"has the shape {tensors[name].shape}, by config.json {entry.shape}"
                raise ConfigError("checkpoint", name, remedy)
            dtypes.add(tensors[name].dtype)
            left.discard(name)
        if len(dtypes) > 1:
            said = " and ".join(sorted(map(str, dtypes)))
            raise ConfigError("checkpoint", entry.name, f"is {said} in different layers: convert them to one")
    if model.tied_embeddings:  # some files have it all the same
        left.discard(NAMED["head"])
    if left := {name for name in left if not name.endswith(".rotary_emb.inv_freq")}:
        raise ConfigError("checkpoint", sorted(left)[0], f"has no place in this model ({len(left)} such tensors)")


# ---- out ----------------------------------------------------------------------------------------------------------

# Of a model, what its checkpoint must give back.
MEANT = (
    *(
        "vocab_size",
        "num_layers",
        "d_model",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_dim",
        "gates",
        "sdpa_transform",
    ),
    *(
        "softmax",
        "position",
        "rope_theta",
        "rope_scaling",
        "rope_factor",
        "rope_original_length",
        "window",
        "kept_first",
    ),
    *("qk_norm", "tied_embeddings", "sandwich_norm", "clip_outputs", "norm_eps", "num_experts", "experts_per_token"),
    *("expert_dim", "norm_topk_prob", "switch_heads"),
)


def save(
    folder: Path, model: ModelConfig, params: nnx.State, layout: Layout, extra: Mapping[str, bytes] | None = None
) -> None:
    """Writes a checkpoint folder, whole or not at all, in the parameters' dtype; `extra`: files that go with it, such
    as tokenizer.json. Bit for bit what `load` gives back, but that qwen3_5 stores norms less 1 (a gain outside of 0.5
    to 2 may come back with another last bit) and a headwise gate as an elementwise one.

    Raises:
      ConfigError: the folder is there, or the layout has no word for something of the model.
    """
    if folder.exists():
        raise ConfigError("dst", str(folder), "is there already: nothing is overwritten")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    plain = {"ffn_dim": model.ffn_width, "match_params": False, "dtype": "float32"}
    plain |= {"dtype": "bfloat16"} if dtypes == {"bfloat16"} else {}
    gates = tuple(dataclasses.replace(gate, init_scale=1.0) for gate in model.gates)
    model = override(model, {**plain, "gates": gates})
    if layout == "qwen3_5" and gates == (HEADWISE,):
        model, params = _elementwise(model, params)
    described = config_json(model, layout)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_atomically(part / "config.json", json.dumps(described, indent=2) + "\n")
        back, _ = read_config(part / "config.json")
        for field in MEANT:
            if (ours := getattr(model, field)) != (theirs := getattr(back, field)):
                raise ConfigError(
                    f"model.{field}", ours, f"cannot be said in the {layout} layout (it would be {theirs!r})"
                )
        write_tensors(part, _written(model, params, layout))
        for name, content in (extra or {}).items():
            write_atomically(part / name, content)
        part.chmod(0o755)
        part.rename(folder)
    except OSError as error:
        raise ConfigError("dst", str(folder), f"cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _elementwise(model: ModelConfig, params: nnx.State) -> tuple[ModelConfig, nnx.State]:
    """The same function of a headwise gate's model with an elementwise one: every channel has its head's score."""
    path = ("blocks", "attention", "gates", "g1", "kernel")
    flat = [
        (at, leaf.replace(jnp.repeat(leaf[...], model.head_dim, axis=-1)) if at == path else leaf)
        for at, leaf in nnx.to_flat_state(params)
    ]
    return override(model, {"gates": (ELEMENTWISE,)}), nnx.from_flat_state(flat)


def _written(model: ModelConfig, params: nnx.State, layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    for entry in entries(model, layout):
        stacked = ("{i}" in entry.name) + ("{e}" in entry.name)
        lead = (model.num_layers, model.num_experts)[:stacked]
        for place in np.ndindex(*lead):
            parts = tuple(
                np.asarray(jax.device_get(flat[path][place] if place else flat[path])) for path in entry.paths
            )
            yield entry.name.format(**dict(zip("ie", place, strict=False))), entry.join(parts)


def layout_of(model: ModelConfig) -> Layout:
    """The one that says it without loss: official with a gate, plain without."""
    return "official" if model.gates else "plain"
