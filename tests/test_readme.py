"""The README's code runs as it stands, and its commands name what exists."""

import re
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
