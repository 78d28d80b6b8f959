# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own variant
#
# First one that the grammar has and the paper has not; then one that the grammar has not.

# %%
import os
import subprocess
import sys
from pathlib import Path

# On Colab: put the address of your copy of gattn here, and this cell brings and installs it. In a checkout leave it.
REPOSITORY = ""


def checkout():
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "configs" / "variants.py").exists()), None)


if checkout() is None:
    if not REPOSITORY:
        raise SystemExit("no checkout of gattn here: set REPOSITORY to the address of one")
    subprocess.run(["git", "clone", "-q", "--depth", "1", REPOSITORY, "gattn-checkout"], check=True)
    os.chdir("gattn-checkout")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", ".", "matplotlib"], check=True)
os.chdir(checkout())
sys.path.insert(0, os.getcwd())

# %% [markdown]
# ## In the grammar
#
# A `GateSpec` says where a gate stands, how fine it is, what it is shared by, how it acts. Anything it can say trains,
# is probed and reported like the paper's own. Here: a headwise gate that begins almost shut.

# %%
from experiments.sinkbench import sinkbench_config
from gattn.config import ConfigError, GateSpec, override
from gattn.train import train

shut = GateSpec("g1", "headwise", bias=True, bias_init=-2.0)
try:
    GateSpec("g5", "headwise")
except ConfigError as error:
    print(error)  # what makes no sense says so

bench = override(sinkbench_config(), {"train.steps": 200, "data.batch_size": 16})
results = {}
for gate in (GateSpec("g1", "headwise"), shut):
    config = override(bench, {"model.gates": (gate,)})
    print(f"{gate.label}: {gate.num_params(config.model)} parameters a layer")
    results[gate.label] = train(config)

# %%
for label, result in results.items():
    mean = result["probes"]["gates"]["g1"]["mean"]
    print(f"{label:22} loss {result['eval']['loss']:.3f}, gate {mean:.3f}, F-Attn {result['probes']['f_attn']:.3f}")

# %% [markdown]
# To give it a name for `--gate` and for tables, it is one line in `VARIANTS` of `configs/variants.py`.
#
# ## Outside of it
#
# A new idea is tried in a layer of its own first: a gate whose score is *hard*, exactly 0 or 1 far from the middle, so
# that a closed head adds exactly nothing.

# %%
import jax
import jax.numpy as jnp
from flax import nnx

from gattn import gated_dot_product_attention


class HardlyGated(nnx.Module):
    """Attention with a hard sigmoid per head on its output."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.qkv = nnx.LinearGeneral(dim, (3, heads, dim // heads), use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(dim, heads, rngs=rngs)
        self.out = nnx.LinearGeneral((heads, dim // heads), dim, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        out = gated_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out * jax.nn.hard_sigmoid(self.gate(x))[..., None])


layer = HardlyGated(32, 4, nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (2, 12, 32))

# %% [markdown]
# ## Before it is trusted
#
# Three properties that any gate of this kind has; `tests/` asks the same of the built-in ones.

# %%
# Causal: a later token changes nothing before it.
changed = layer(x.at[:, 8].add(1.0))
assert jnp.allclose(changed[:, :8], layer(x)[:, :8], atol=1e-6)

# Looks at the query: the same context, another query, another gate.
assert not jnp.allclose(layer.gate(x)[:, 8], layer.gate(x.at[:, 8].add(1.0))[:, 8])

# Closed is closed: with a score far below zero nothing leaves the head, and no gradient enters it.
layer.gate.bias[...] = jnp.full(4, -10.0)
assert float(abs(layer(x)).max()) == 0.0
gradient = nnx.grad(lambda one: (one(x) ** 2).sum())(layer)
assert float(abs(gradient["qkv"]["kernel"][...]).max()) == 0.0
print("causal, query-dependent, and it closes; but once closed it has no gradient by which to open again")

# %% [markdown]
# If it earns its keep: an entry in `ACTIVATIONS` of `gattn/gates.py` and in `Activation` of `gattn/architecture.py`
# makes `GateSpec(activation=...)` know it at all five positions, and every test and experiment with it.
