"""`gattn eval` and `gattn generate`: perplexity equals one computed by hand in float64, whatever the batches; what is
written stays what it was but for its own entries; mistakes are named."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from gattn import evaluate, model, resume, train
from gattn.__main__ import main
from gattn.config import Config, ConfigError, GateSpec, override
from gattn.data.loader import Source
from gattn.evaluate import Evaluation
from gattn.files import home
from gattn.rope import yarn

BOS, END = 256, b"?"


def lines(config):
    """Bytes of sentences with a number in each, the training and the held-out ones from different seeds."""
    batch, length = config.data.batch_size, config.data.seq_len

    def text(seed):
        rng = np.random.default_rng(seed)
        parts = " ".join(f"{rng.integers(100)} and {rng.integers(100)}" for _ in range(length // 4))
        return np.frombuffer(parts.encode(), np.uint8)[:length].astype(np.int32)

    def rows(seeds):
        targets = np.stack([text(seed) for seed in seeds])
        inputs = np.concatenate([np.full_like(targets[:, :1], BOS), targets[:, :-1]], axis=1)
        return {"inputs": inputs, "targets": targets}

    def training(step, which=slice(None)):
        while True:
            batch_rows = rows(range(1000 + step * batch, 1000 + (step + 1) * batch))
            yield {name: x[which] for name, x in batch_rows.items()}
            step += 1

    def held_out():
        for start in range(0, config.data.eval_sequences, batch):
            yield rows(range(start, min(start + batch, config.data.eval_sequences)))

    return Source(
        fingerprint="0" * 16,
        vocab_size=257,
        train=training,
        held_out={"lines": held_out},
        token_bytes=np.array([1] * 256 + [0]),
        bayes_loss=None,
        decode_tokens=lambda ids: [chr(i) for i in ids],
        encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32),
        decode=lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", errors="replace"),
        bos_id=BOS,
    )


CONFIG = override(
    Config(),
    {
        **{"model.vocab_size": 257, "model.num_layers": 2, "model.d_model": 32, "model.head_dim": 8},
        **{"model.ffn_dim": 64, "model.gates": (GateSpec("g1", "headwise"),), "model.scan_layers": False},
        **{"data.source": "tests.test_evaluate:lines", "data.seq_len": 32, "data.batch_size": 4},
        **{"data.eval_sequences": 8, "optim.warmup_steps": 2, "train.steps": 20, "train.tensorboard": False},
    },
)


@pytest.fixture(scope="module")
def run():
    """A finished run at home."""
    train.train(CONFIG, console=Console(file=io.StringIO()))
    return home() / "runs" / CONFIG.run_name


@pytest.fixture(scope="module")
def loaded(run):
    return resume.load(run)


def by_hand(config, params, tokens, frequencies, factor):
    """Log probabilities [B, T, V] in float64, by NumPy alone; RoPE by these frequencies, times factor."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))
    m, blocks = config.model, weights["blocks"]

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps) * gain

    def rotate(x):
        angles = np.arange(x.shape[1])[:, None] * frequencies
        cos, sin = (factor * f(angles)[:, None] for f in (np.cos, np.sin))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    h = weights["embedding"][tokens]
    for i in range(m.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
        attention, x = layer["attention"], norm(h, layer["attention_norm"]["gain"])
        project = lambda name, x=x, a=attention: np.einsum("btd,dnh->btnh", x, a[name]["kernel"])  # noqa: E731
        q = rotate(norm(project("query"), attention["query_norm"]["gain"]))
        k = rotate(norm(project("key"), attention["key_norm"]["gain"]))
        k, v = (np.repeat(y, m.num_heads // m.num_kv_heads, axis=2) for y in (k, project("value")))
        logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(m.head_dim)
        logits = np.where(np.tri(tokens.shape[1], dtype=bool), logits, -np.inf)
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("bnts,bsnh->btnh", probabilities / probabilities.sum(-1, keepdims=True), v)
        out *= sigmoid(np.einsum("btd,dnh->btnh", x, attention["gates"]["g1"]["kernel"]))
        h = h + out.reshape(*h.shape[:2], -1) @ attention["out"]["kernel"].reshape(-1, m.d_model)
        x, mlp = norm(h, layer["mlp_norm"]["gain"]), layer["mlp"]
        up, gate = x @ mlp["up"]["kernel"], x @ mlp["gate"]["kernel"]
        h = h + (gate * sigmoid(gate) * up) @ mlp["down"]["kernel"]
    logits = norm(h, weights["final_norm"]["gain"]) @ weights["embedding"].T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("length", [32, 96])
def test_perplexity_under_yarn_is_that_of_a_float64_transcription(loaded, length):
    """Within the original length and beyond it."""
    read, _ = evaluate.reading(loaded.config, Evaluation(rope="yarn", factor=4.0))
    found = evaluate.perplexity(read, loaded.params, length, 8, 10**6)
    frequencies, factor = yarn(8, read.model.rope_theta, 4.0, 32)
    (batch,) = lines(override(read, {"data.seq_len": length, "data.batch_size": 8})).held_out["lines"]()
    logs = by_hand(read, loaded.params, batch["inputs"], frequencies, factor)
    nats = -np.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
    assert found["loss"] == pytest.approx(nats.mean(), abs=2e-6)
    assert found["bits_per_byte"] == pytest.approx(nats.mean() / np.log(2), abs=2e-6)
    for part in found["by_position"]:
        assert part["loss"] == pytest.approx(nats[:, part["from"] : part["to"]].mean(), abs=1e-5)
    assert [part["from"] for part in found["by_position"]] == ([0] if length == 32 else [0, 64])
    plain = evaluate.perplexity(loaded.config, loaded.params, length, 8, 10**6)
    assert abs(plain["loss"] - found["loss"]) > 1e-4


def test_perplexity_does_not_depend_on_batches(loaded):
    whole, parts = (evaluate.perplexity(loaded.config, loaded.params, 64, 7, size) for size in (10**6, 128))
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-6)
    assert whole["tokens"] == parts["tokens"] == 7 * 64


def test_a_window_as_wide_as_the_text_changes_nothing(loaded):
    losses = []
    for window, kept in ((0, 0), (64, 0), (62, 2), (16, 2), (16, 0)):
        read, name = evaluate.reading(loaded.config, Evaluation(window=window, kept_first=kept))
        losses.append(evaluate.perplexity(read, loaded.params, 64, 4, 256)["loss"])
        assert ("window 16" in name) == (window == 16)
    assert losses[:3] == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert len({round(loss, 6) for loss in losses}) == 3


def test_entries_join_the_result_and_replace_their_own_kind(run, capsys):
    before = json.loads((run / "result.json").read_text())
    assert main(["eval", str(run), "--lengths", "32,48", "--sequences", "4"]) == 0
    assert main(["eval", str(run), "--lengths", "48", "--sequences", "8", "--rope", "linear"]) == 0
    assert main(["eval", str(run), "--lengths", "48", "--sequences", "6"]) == 0
    after = json.loads((run / "result.json").read_text())
    entries = after.pop("evaluations")
    assert after == {name: value for name, value in before.items() if name != "evaluations"}
    assert {"ppl 32", "ppl 48", "ppl 48, linear x1.5"} <= set(entries)
    assert entries["ppl 48"]["tokens"] == 6 * 48
    assert entries["ppl 32"]["perplexity"] == pytest.approx(np.exp(entries["ppl 32"]["loss"]))
    assert "loss by position, 48 tokens" in capsys.readouterr().out


def test_ruler_scores_a_model_by_what_it_writes(run, loaded, monkeypatch, capsys):
    """A decoder that always knows gets 100, the trained one about 0."""
    assert main(["eval", str(run), "--tasks", "ruler-mini,vt", "--lengths", "2k", "--samples", "3"]) == 0
    entries = json.loads((run / "result.json").read_text())["evaluations"]
    for task in ("mini_single", "mini_multikey", "mini_multivalue", "mini_vt", "vt"):
        entry = entries[f"{task} 2048"]
        assert entry["samples"] == 3
        assert entry["score"] < 50
        assert entry["example"]["end"].endswith(("=", "are"))

    def knows(generator, prompts, sampling, decode, show=None):
        asked = [decode(prompt).rpartition("?")[2] for prompt in prompts]
        return [decode(prompt).partition(f" {key}")[2][:3] for prompt, key in zip(prompts, asked, strict=True)]

    monkeypatch.setattr(evaluate, "texts", knows)
    found = evaluate.evaluate(loaded, Evaluation(tasks="mini_multikey", lengths="256,512", samples=9))
    assert [entry["score"] for entry in found.values()] == [100.0, 100.0]


def test_generate_prints_prompts_and_what_follows(run, capsys):
    words = ["generate", str(run), "--prompt", "1 and 2", "--prompt", "ab", "--max-new-tokens", "9"]
    assert main(words) == 0
    first = capsys.readouterr().out
    one, _, two = first.partition("\n---\n")
    assert one.startswith("1 and 2")
    assert len(one) > 8
    assert two.startswith("ab")
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main([*words, "--temperature", "1.5", "--seed", "3"]) == 0
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "ppl,rule"], "rule"),
        (["--lengths", "4x"], "4096,8192"),
        (["--lengths", "1"], "at least 2"),
        (["--rope", "yarn", "--factor", "0.5"], "factor"),
        (["--rope", "yarn"], "above the trained 32"),
        (["--factor", "4"], "--rope"),
        (["--kept-first", "4"], "window"),
        (["--tasks", "qa_1", "--lengths", "4k"], "leave the task out"),
        (["--tasks", "niah_single_2", "--lengths", "4k", "--essay", "nowhere.txt"], "nowhere.txt"),
        (["--tasks", "vt", "--lengths", "64"], "too short"),
        (["--step", "7"], "step = 7"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, capsys, words, says):
    before = (run / "result.json").read_text()
    assert main(["eval", str(run), *words]) == 2
    found = capsys.readouterr().err
    assert says in found
    assert "Traceback" not in found
    assert (run / "result.json").read_text() == before


def test_an_unfinished_run_is_refused(run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert main(["eval", str(tmp_path)]) == 2
    assert "train it to its end" in capsys.readouterr().err
    assert main(["generate", str(run)]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_positions_end_where_the_table_does(loaded):
    learned = dataclasses.replace(loaded.config.model, position="learned", max_seq_len=64)
    params = model.init(learned, 0)
    there = loaded._replace(config=dataclasses.replace(loaded.config, model=learned), params=params)
    with pytest.raises(ConfigError, match="64 learned positions"):
        evaluate.evaluate(there, Evaluation(lengths="65"))
    with pytest.raises(ConfigError, match="RoPE"):
        evaluate.evaluate(there, Evaluation(rope="yarn", factor=2.0))
