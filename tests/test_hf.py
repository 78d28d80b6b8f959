"""Checkpoints of others: logits and greedy text of PyTorch, in and out without loss, and what is wrong is named."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from gattn import model as decoder
from gattn.__main__ import main
from gattn.config import Config, ConfigError, DataConfig, GateSpec, ModelConfig, OptimConfig, TrainConfig, override
from gattn.files import run_directory
from gattn.generate import Generator, Sampling
from gattn.interop import hf
from gattn.step import precise
from gattn.train import train
from tests.eight import found_by

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
each_family = pytest.mark.parametrize("family", FAMILIES)


def logits(model, params, tokens):
    graph = decoder.abstract(model)[0]

    def forward(params, tokens):
        one = nnx.merge(graph, params)
        return one(tokens)[0] @ one.output_matrix()

    return np.asarray(jax.jit(precise(forward, model))(params, tokens))


@each_family
def test_logits_and_greedy_text_are_those_of_pytorch(family):
    model, params = hf.load(GOLDEN / family)
    golden = np.load(GOLDEN / family / "golden.npz")
    tokens = golden["tokens"].astype(np.int32)
    np.testing.assert_allclose(logits(model, params, tokens), golden["logits"], rtol=0, atol=2e-5)
    config = Config(model=model, data=DataConfig(source="not:opened", seq_len=48))
    generator = Generator(config, params, end=model.vocab_size)  # a token that never comes
    steps = list(generator.tokens([tokens[0]], Sampling(max_new_tokens=32)))
    assert [int(step[0]) for step in steps] == golden["greedy"].tolist()


def same(one, other):
    pairs = zip(nnx.to_flat_state(one), nnx.to_flat_state(other), strict=True)
    return all(a == b and x.dtype == y.dtype and np.array_equal(x[...], y[...]) for (a, x), (b, y) in pairs)


@each_family
def test_out_and_in_again_is_the_identity(family, tmp_path):
    """Bit for bit, in the layout it came in and, with an elementwise gate, in the other one; and the file's tensors are
    those that came."""
    model, params = hf.load(GOLDEN / family)
    _, layout = hf.read_config(GOLDEN / family / "config.json")
    hf.save(tmp_path / "out", model, params, layout)
    again, values = hf.load(tmp_path / "out")
    assert again == model
    exact = layout != "qwen3_5"  # which stores norms less 1
    assert same(values, params) or not exact
    before, after = (hf.open_tensors(folder) for folder in (GOLDEN / family, tmp_path / "out"))
    for name, tensor in after.items():
        np.testing.assert_allclose(tensor.read(), before[name].read(), rtol=0, atol=0 if exact else 2e-7)
    others = {"official": "qwen3_5", "qwen3_5": "official"} if model.gates == (hf.ELEMENTWISE,) else {}
    for other in filter(None, [others.get(layout)]):
        hf.save(tmp_path / other, model, params, other)
        hf.save(tmp_path / "back", *hf.load(tmp_path / other), layout)
        back, values = hf.load(tmp_path / "back")
        assert back == model
        for (_, a), (_, b) in zip(nnx.to_flat_state(params), nnx.to_flat_state(values), strict=True):
            np.testing.assert_allclose(a[...], b[...], rtol=0, atol=2e-7)


def test_a_gain_between_a_half_and_two_keeps_every_bit_in_qwen3_5(tmp_path):
    model, params = hf.load(GOLDEN / "official_elementwise")
    flat = nnx.to_flat_state(params)
    kept = [(p, v.replace(np.clip(v[...], 0.5, 2.0)) if p[-1] == "gain" else v) for p, v in flat]
    params = nnx.from_flat_state(kept)
    hf.save(tmp_path / "out", model, params, "qwen3_5")
    assert same(hf.load(tmp_path / "out")[1], params)


def test_both_dialects_of_config_json_say_the_same(tmp_path):
    new = json.loads((GOLDEN / "qwen3_tied_yarn" / "config.json").read_text())
    old = dict(new)
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old |= {"rope_scaling": rope, "torch_dtype": old.pop("dtype")}
    old.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert hf.read_config(tmp_path / "config.json") == hf.read_config(GOLDEN / "qwen3_tied_yarn" / "config.json")


def test_bfloat16_stays_and_float16_is_read_as_float32(tmp_path):
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    values = load_file(GOLDEN / "qwen3" / "model.safetensors")
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    for dtype, ours in ((ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float32")):
        folder = tmp_path / ours
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {"dtype": np.dtype(dtype).name}))
        save_file({name: v.astype(dtype) for name, v in values.items()}, folder / "model.safetensors")
        model, params = hf.load(folder)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {ours}
        assert model.dtype == ours
        np.testing.assert_array_equal(params["embedding"][...], values["model.embed_tokens.weight"].astype(dtype))


def test_shards_are_read_and_written(tmp_path, monkeypatch):
    """Many files with an index say what one says."""
    from gattn.interop import tensors

    monkeypatch.setattr(tensors, "SHARD_BYTES", 20_000)
    model, params = hf.load(GOLDEN / "qwen3_moe")
    hf.save(tmp_path / "out", model, params, "plain", {"tokenizer.json": b"{}"})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(set(index["weight_map"].values())) > 3
    assert files == {*index["weight_map"].values(), "config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert same(hf.load(tmp_path / "out")[1], params)


# ---- what is wrong --------------------------------------------------------------------------------------------------


def change_config(**changes):
    """Fields of config.json set, or with `...` removed."""

    def mutate(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))

    return mutate


def change_tensors(change):
    def mutate(folder):
        from safetensors.numpy import load_file, save_file

        values = load_file(folder / "model.safetensors")
        change(values)
        save_file(values, folder / "model.safetensors")

    return mutate


def drop(name):
    return change_tensors(lambda values: values.pop(name))


def put(name, value):
    return change_tensors(lambda values: values.update({name: value}))


def rewrite(name, change):
    """The bytes of a file."""

    def mutate(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return mutate


def header(change):
    """The JSON at the head of the safetensors."""

    def new(data):
        (size,) = struct.unpack("<Q", data[:8])
        parts = json.loads(data[8 : 8 + size])
        change(parts)
        made = json.dumps(parts).encode()
        return struct.pack("<Q", len(made)) + made + data[8 + size :]

    return rewrite("model.safetensors", new)


def index(**where):
    """An index of shards in place of the one file."""

    def mutate(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        names = dict.fromkeys(hf.open_tensors(folder_with(folder, "a.safetensors")), "a.safetensors")
        names = {name: file for name, file in (names | where).items() if file is not ...}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return mutate


def folder_with(folder, file):
    other = folder.parent / "whole"
    other.mkdir(exist_ok=True)
    shutil.copy(folder / file, other / "model.safetensors")
    return other


def entry(name, change):
    """One file within the zip of PyTorch; a name that is not there is added."""

    def mutate(folder):
        path = folder / "pytorch_model.bin"
        with zipfile.ZipFile(path) as old:
            parts = {info.filename: old.read(info) for info in old.infolist()}
        full = next((part for part in parts if part.endswith(name)), name)
        parts[full] = change(parts.get(full, b""))
        with zipfile.ZipFile(path, "w") as new:
            for part, data in parts.items():
                if data is not None:
                    new.writestr(part, data)

    return mutate


class Hostile:
    """What it does when it is unpickled: it leaves a file behind."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def hostile(function, *arguments):
    return entry("data.pkl", lambda _: pickle.dumps({"model.norm.weight": Hostile(function, *arguments)}, protocol=2))


Q = "model.layers.1.self_attn.q_proj.weight"
ZEROS = np.zeros((64, 48), np.float32)
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MUTATIONS = {
    # config.json: missing, unknown, wrong kind, cannot be computed
    "no vocab_size": ("qwen3", change_config(vocab_size=...), "vocab_size"),
    "no rms_norm_eps": ("qwen3", change_config(rms_norm_eps=...), "rms_norm_eps"),
    "no rope": ("qwen3", change_config(rope_parameters=...), "rope_theta"),
    "no max_position_embeddings": ("qwen3", change_config(max_position_embeddings=None), "max_position_embeddings"),
    "no model_type": ("qwen3", change_config(model_type=...), "model_type"),
    "a family that is not known": ("qwen3", change_config(model_type="gpt_oss"), "gpt_oss"),
    "an unknown field": ("qwen3", change_config(logit_softcap=30.0), "logit_softcap"),
    "a bias": ("qwen3", change_config(attention_bias=True), "attention_bias"),
    "a bias of the FFN": ("llama", change_config(mlp_bias=True), "mlp_bias"),
    "another activation": ("qwen3", change_config(hidden_act="gelu"), "hidden_act"),
    "text for a number": ("qwen3", change_config(num_hidden_layers="2"), "num_hidden_layers"),
    "true for a number": ("qwen3", change_config(num_attention_heads=True), "num_attention_heads"),
    "heads that do not divide": ("qwen3", change_config(num_key_value_heads=3), "num_kv_heads"),
    "another RoPE": ("llama", change_config(rope_parameters={"rope_theta": 1e4, "rope_type": "llama3"}), "llama3"),
    "an unknown field of RoPE": ("qwen3", change_config(rope_parameters=YARN | {"mscale": 1.0}), "mscale"),
    "another ramp of YaRN": ("qwen3", change_config(rope_parameters=YARN | {"beta_fast": 16}), "beta_fast"),
    "a part of the channels": (
        "qwen3",
        change_config(rope_parameters=YARN | {"partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    "some layers slide": (
        "qwen3",
        change_config(layer_types=["full_attention", "sliding_attention"]),
        "layer_types",
    ),
    "a layer without experts": ("qwen3_moe", change_config(mlp_only_layers=[0]), "mlp_only_layers"),
    "experts every other layer": ("qwen3_moe", change_config(decoder_sparse_step=2), "decoder_sparse_step"),
    "more experts a token than there are": ("qwen3_moe", change_config(num_experts_per_tok=9), "experts_per_token"),
    "two gates": (
        "official_elementwise",
        change_config(headwise_attn_output_gate=True),
        "headwise_attn_output_gate",
    ),
    "no JSON": ("qwen3", rewrite("config.json", lambda data: data[:100]), "config.json"),
    # tensors: missing, too many, misshapen, of another kind
    "a layer's norm is missing": ("qwen3", drop("model.layers.1.input_layernorm.weight"), "layers.1.input_layernorm"),
    "q_proj is missing": ("qwen3", drop(Q), Q),
    "lm_head is missing": ("qwen3", drop("lm_head.weight"), "lm_head.weight"),
    "an expert is missing": (
        "qwen3_moe",
        drop("model.layers.0.mlp.experts.3.up_proj.weight"),
        "experts.3.up_proj",
    ),
    "a tensor too many": ("qwen3", put("model.layers.2.mlp.up_proj.weight", ZEROS), "model.layers.2"),
    "a bias too many": ("qwen3", put("model.layers.0.self_attn.q_proj.bias", ZEROS[:, 0]), "q_proj.bias"),
    "a q_proj with a gate that is not said": (
        "official_elementwise",
        change_config(elementwise_attn_output_gate=False),
        "q_proj",
    ),
    "a gate that is said and not there": ("qwen3", change_config(headwise_attn_output_gate=True), "q_proj"),
    "transposed": ("qwen3", put(Q, ZEROS.T.copy()), Q),
    "a flat norm in two dimensions": ("qwen3", put("model.norm.weight", np.ones((1, 48), np.float32)), "model.norm"),
    "another vocabulary": ("qwen3", change_config(vocab_size=130), "embed_tokens"),
    "whole numbers": ("qwen3", put(Q, ZEROS.astype(np.int32)), Q),
    "float64": ("qwen3", put(Q, ZEROS.astype(np.float64)), Q),
    "a layer in another dtype": ("qwen3", put(Q, ZEROS.astype(np.float16)), "q_proj"),
    # files: cut, empty, not there, pointing elsewhere
    "cut safetensors": ("qwen3", rewrite("model.safetensors", lambda data: data[:-100]), "model.safetensors"),
    "empty safetensors": ("qwen3", rewrite("model.safetensors", lambda data: b""), "model.safetensors"),
    "a cut header": ("qwen3", rewrite("model.safetensors", lambda data: data[:200]), "model.safetensors"),
    "a header that lies": ("qwen3", header(lambda parts: parts[Q].update(data_offsets=[0, 4])), "model.safetensors"),
    "no weights": ("qwen3", lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
    "an index out of its folder": ("qwen3", index(**{Q: "../whole/model.safetensors"}), "../whole"),
    "an index to the root": ("qwen3", index(**{Q: "/etc/passwd"}), "/etc/passwd"),
    "a shard that is not there": ("qwen3", index(**{Q: "b.safetensors"}), "b.safetensors"),
    "an index that lacks a tensor": ("qwen3", index(**{Q: ...}), Q),
    "an index with a tensor too many": ("qwen3", index(other="a.safetensors"), "other"),
    # PyTorch's zip
    "cut zip": ("official_headwise", rewrite("pytorch_model.bin", lambda data: data[:-2000]), "pytorch_model.bin"),
    "no zip": ("official_headwise", rewrite("pytorch_model.bin", lambda data: b"x" * 1000), "pytorch_model.bin"),
    "a cut storage": ("official_headwise", entry("data/0", lambda data: data[:-4]), "embed_tokens"),
    "a lost storage": ("official_headwise", entry("data/0", lambda data: None), "embed_tokens"),
    "a cut pickle": ("official_headwise", entry("data.pkl", lambda data: data[: len(data) // 2]), "pytorch_model.bin"),
    "a list": ("official_headwise", entry("data.pkl", lambda _: pickle.dumps([1, 2])), "list"),
    "a number": ("official_headwise", entry("data.pkl", lambda _: pickle.dumps({"a": 1})), "int"),
    "hostile: os.system": ("official_headwise", hostile(os.system, "touch MARKER"), "system"),
    "hostile: open": ("official_headwise", hostile(open, "MARKER", "w"), "open"),
    "hostile: eval": ("official_headwise", hostile(eval, "open('MARKER', 'w')"), "eval"),
    "hostile: exec": ("official_headwise", hostile(exec, "open('MARKER', 'w')"), "exec"),
    "hostile: BytesIO": ("official_headwise", hostile(io.BytesIO, b""), "BytesIO"),
}


def test_there_are_at_least_fifty_ways_to_be_wrong():
    assert len(MUTATIONS) >= 50


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_checkpoint_is_named_runs_nothing_and_leaves_nothing(mutation, tmp_path, monkeypatch, capsys):
    family, mutate, named = MUTATIONS[mutation]
    shutil.copytree(GOLDEN / family, tmp_path / "src")
    mutate(tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said
    assert len(said.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before  # no output, no marker of a hostile pickle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("softmax", "off_by_one"), ("position", "alibi"), ("clip_outputs", 100.0), ("sdpa_transform", "silu")),
        *(("window", 8), ("sandwich_norm", True), ("gates", (hf.HEADWISE, GateSpec("g2")))),
    ],
)
def test_what_a_layout_cannot_say_is_not_written(field, value, tmp_path):
    """But a window can be said, of all layers; it comes back."""
    model, _ = hf.load(GOLDEN / "qwen3")
    model = override(model, {field: value})
    params = decoder.init(model, 0)
    layout = hf.layout_of(model)
    if field == "window":
        hf.save(tmp_path / "out", model, params, layout)
        assert hf.load(tmp_path / "out")[0] == model
        return
    with pytest.raises(ConfigError) as error:
        hf.save(tmp_path / "out", model, params, layout)
    assert field.removesuffix("s") in str(error.value) or "no place" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    model, params = hf.load(GOLDEN / "qwen3")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="there already"):
        hf.save(tmp_path / "out", model, params, "plain")
    assert list((tmp_path / "out").iterdir()) == []


# ---- as a run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_leaves_is_the_same_model_wherever_a_run_is_expected(tmp_path, monkeypatch, capsys):
    """Text, loss and probes of the exported folder are those of the run; nothing is written into the folder."""
    monkeypatch.setenv("GATTN_HOME", str(tmp_path / "home"))
    model = ModelConfig(
        **{"vocab_size": 300, "num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
        **{
            "ffn_dim": 32,
            "match_params": False,
            "gates": (GateSpec("g1", "headwise"),),
            "init_std": 0.2,
            "max_seq_len": 64,
        },
    )
    data = DataConfig(seq_len=64, batch_size=2, eval_sequences=4)
    optim = OptimConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=1)
    config = Config(model=model, data=data, optim=optim, train=TrainConfig(steps=2, eval_every=2, checkpoint_every=2))
    train(config)
    run, folder = run_directory(config), tmp_path / "left"
    assert main(["convert", str(run), str(folder)]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"config.json", "model.safetensors", "tokenizer.json"}
    capsys.readouterr()

    def said(*words):
        assert main([*words]) == 0
        return capsys.readouterr().out

    texts = {said("generate", str(one), "--prompt", "def main(", "--max-new-tokens", "16") for one in (run, folder)}
    assert len(texts) == 1
    for one in (run, folder):
        said("eval", str(one), "--tasks", "ppl", "--lengths", "64", "--sequences", "4")
        said("probe", str(one), "--text", str(Path(__file__)))
    home = tmp_path / "home" / "runs"
    entries = [json.loads((home / name / "result.json").read_text())["evaluations"] for name in (run.name, "left")]
    assert entries[0]["ppl 64"]["loss"] == pytest.approx(entries[1]["ppl 64"]["loss"], abs=1e-6)
    probes = [json.loads((home / n / "probe-test_hf.py.json").read_text())["probes"] for n in (run.name, "left")]
    assert probes[0]["f_attn"] == pytest.approx(probes[1]["f_attn"], abs=1e-6)
    assert probes[0]["gates"]["g1"]["mean"] == pytest.approx(probes[1]["gates"]["g1"]["mean"], abs=1e-6)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    again = tmp_path / "again"  # a checkpoint to a checkpoint, in another layout, with its tokenizer
    assert main(["convert", str(folder), str(again), "--layout", "qwen3_5"]) == 0
    assert (again / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    capsys.readouterr()
    assert said("generate", str(again), "--prompt", "def main(", "--max-new-tokens", "16") in texts
    assert main(["generate", str(folder), "--prompt", "x", "--step", "3"]) == 2
    assert main(["probe", "hf://nobody"]) == 2
    assert "hf://owner/name" in capsys.readouterr().err


@pytest.fixture(scope="module")
def eight():
    return found_by("tests.eight_checkpoints")


@pytest.mark.parametrize("case", ["fsdp and tensor", "experts"])
def test_read_onto_a_mesh_every_device_gets_its_part(eight, case):
    found = eight[case]
    assert isinstance(found, dict), found
    assert found["equal"]
    assert found["placed"]
    assert found["split"] >= 5
