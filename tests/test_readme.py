"""The README's code runs as it stands, and its commands name what exists."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import flax.linen as nn
import jax
import pytest
from flax import nnx

from configs.models import PRESETS
from configs.variants import VARIANTS
from gattn import gated_dot_product_attention

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PLAIN, LINEN, NNX = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
X = jax.random.normal(jax.random.key(0), (2, 128, 256))


def test_plain_jax():
    names = {}
    exec(PLAIN, names)
    assert names["out"].shape == (2, 128, 4, 64)
    expected = jax.nn.dot_product_attention(names["q"], names["k"], names["v"], is_causal=True)
    expected = expected * jax.nn.sigmoid(names["gate"])
    assert jax.numpy.allclose(names["out"], expected, atol=1e-5)


def test_linen():
    names = {"jax": jax, "nn": nn, "gated_dot_product_attention": gated_dot_product_attention}
    exec("def call(self, x):\n" + textwrap.indent(LINEN, "    "), names)

    class Attention(nn.Module):
        heads: int
        __call__ = nn.compact(names["call"])

    module = Attention(4)
    assert module.apply(module.init(jax.random.key(0), X), X).shape == X.shape


def test_nnx():
    names = {"jax": jax, "nnx": nnx, "gated_dot_product_attention": gated_dot_product_attention}
    names |= {"dim": 256, "heads": 4, "rngs": nnx.Rngs(0)}
    exec("def call(self, x):\n" + textwrap.indent(NNX, "    "), names)

    class Attention(nnx.Module):
        def __init__(self):
            self.qkvg = eval(re.search(r"self\.qkvg = (.*)", NNX).group(1), names)
            self.out = eval(re.search(r"self\.out = (.*)", NNX).group(1), names)

        __call__ = names["call"]

    assert Attention()(X).shape == X.shape


@pytest.mark.parametrize("words", re.findall(r"python -m gattn train (--preset.*)", README))
def test_commands_name_presets_and_variants(words):
    named = dict(re.findall(r"--(preset|gate) (\w+)", words))
    assert named["preset"] in PRESETS
    assert named.get("gate", "baseline") in VARIANTS


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target


def texts(folder: Path) -> None:
    """Somebody's own text: files, JSONL and Parquet."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    documents = [f"Chapter {i}.\n" + " ".join(f"word{i * j % 97}" for j in range(400)) for i in range(150)]
    for i, text in enumerate(documents[:50]):
        (folder / f"{i}.txt").write_text(text)
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents[50:100])]
    (folder / "more.jsonl").write_text("\n".join(lines) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": documents[100:]}), folder / "table.parquet")


@pytest.mark.slow
def test_the_example_on_your_own_text(tmp_path):
    """Its commands, word for word but for sizes that a test can afford, each cut by Ctrl-C once and then run again."""
    commands = re.search(r"## On your own text\n\n```\n(.*?)```", README, flags=re.DOTALL).group(1).strip().splitlines()
    assert [command.split()[3] for command in commands] == ["prepare", "train", "probe"]
    texts(tmp_path / "my-texts")
    small = "--data.eval-sequences 4 --data.seq-len 64 --train.steps 12 --optim.warmup-steps 2 --train.eval-every 6 "
    small += "--model.d-model 32 --model.num-layers 1 --model.vocab-size 1024"
    sizes = {"prepare": "--vocab-size 1024", "train": small, "probe": ""}
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "GATTN_HOME": str(tmp_path), "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}
    for command in commands:
        words = [*shlex.split(command), *shlex.split(sizes[command.split()[3]])]
        assert words.pop(0) == ".venv/bin/python"
        options = {"cwd": tmp_path, "env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        cut = subprocess.Popen([sys.executable, *words], **options)
        said = cut.stdout.readline()  # it is at work, or has failed
        cut.send_signal(signal.SIGINT)
        said += cut.communicate()[0]
        assert cut.returncode in (0, 130, -signal.SIGINT), said
        done = subprocess.run([sys.executable, *words], **options, check=False)
        assert done.returncode == 0, done.stdout
    run = next((tmp_path / "runs").iterdir())
    assert {"result.json", "probe.html", "probe.json", "events", "metrics.jsonl"} <= {
        path.name for path in run.iterdir()
    }
    result = json.loads((run / "result.json").read_text())
    assert result["eval"]["loss"] < result["eval"]["initial_loss"]
    assert result["eval"]["bits_per_byte"] > 0
