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
# # Explore a gate in five minutes
#
# A head of softmax attention has to put all of its attention somewhere. When it has nothing to do, it puts it on the
# first token: the attention sink. A sigmoid gate on the head's output, computed from the query's token, lets it rest
# instead ([arXiv 2505.06708](https://arxiv.org/abs/2505.06708)). Here both are trained, and looked at.

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
# ## The gate by itself
#
# `gated_dot_product_attention` takes the names and shapes of `jax.nn.dot_product_attention`, and `gate`: the scores
# before the sigmoid, one per channel `[B, T, N, H]` or one per head `[B, T, N, 1]`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from gattn import gated_dot_product_attention

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
plain = gated_dot_product_attention(q, k, v, is_causal=True)
scores = jnp.array([-20.0, 20.0]).reshape(1, 1, 2, 1) * jnp.ones((1, 16, 2, 1))  # head 0 shut, head 1 open
gated = gated_dot_product_attention(q, k, v, gate=scores, is_causal=True)
print("head 0:", float(abs(gated[:, :, 0]).max()), " head 1 changed by:", float(abs(gated - plain)[:, :, 1].max()))
assert float(abs(gated[:, :, 0]).max()) < 1e-6

# %% [markdown]
# ## In a model
#
# A variant is a line of `configs/variants.py`. The *sink bench* is a small language in which heads have work only after
# certain tokens; a plain decoder of one layer grows a sink on it within a minute.

# %%
from configs.variants import VARIANTS, apply
from experiments.sinkbench import sinkbench_config
from gattn.config import override
from gattn.train import train

# A fifth of the bench's tokens, faster: the sink is there, if smaller.
SHORT = {"train.steps": 500, "data.batch_size": 16, "optim.learning_rate": 4e-3}
bench = override(sinkbench_config(), SHORT)
print(VARIANTS["g1_headwise"])
results = {name: train(apply(bench, name)) for name in ("baseline", "g1_headwise")}

# %%
for name, result in results.items():
    found = result["probes"]
    print(f"{name:12} F-Attn {found['f_attn']:.3f} (uniform attention: {found['f_attn_floor']:.3f})")
assert results["g1_headwise"]["probes"]["f_attn"] < results["baseline"]["probes"]["f_attn"]

# %% [markdown]
# ## What the heads look at, and how far the gate is open
#
# One held-out text, mean over heads. The dark first column of the baseline is the sink.

# %%
from flax import nnx

from gattn import resume
from gattn.files import run_directory

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for axis, name in zip(axes[:2], results, strict=True):
    run = resume.load(run_directory(apply(bench, name)))
    tokens = next(run.source.held_out["held-out"]())["inputs"][:1]
    attention = nnx.merge(run.graph, run.params)(tokens, probe=True)[1]["layers"]["map"][0].mean(axis=0)
    axis.imshow(attention, cmap="Greys", vmin=0, vmax=0.5)
    axis.set(title=name, xlabel="key", ylabel="query")
gate = results["g1_headwise"]["probes"]["gates"]["g1"]
edges, shares = gate["histogram"]["edges"], gate["histogram"]["shares"]
axes[2].stairs(shares[0], edges, fill=True)
axes[2].set(title=f"gate scores, mean {gate['mean']:.2f}", xlabel="score", ylabel="share")
plt.show()

# %% [markdown]
# Next: look closer with `inside_a_checkpoint`, compare more of them with `reproduce_table_4`, or write one in
# `write_your_own_variant`.
