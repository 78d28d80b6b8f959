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
# # Look inside a checkpoint
#
# What a trained model attends to, how large its activations are, what its gates do. Without a run of your own a small
# one is trained first, in a quarter of a minute.

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

# %%
RUN = ""  # a folder below runs/, or the beginning of its name

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import resume
from gattn.config import override
from gattn.files import run_directory
from gattn.train import train

# A fifth of the bench's tokens, faster: the sink is there, if smaller.
SHORT = {"train.steps": 500, "data.batch_size": 16, "optim.learning_rate": 4e-3}
if RUN:
    folder = resume.find_run(RUN)
else:
    config = apply(override(sinkbench_config(), SHORT), "g1_headwise")
    train(config)
    folder = run_directory(config)
run = resume.load(folder)
print(f"{run.config.run_name}, step {run.step:,}")

# %% [markdown]
# ## Its parameters
#
# The blocks are stacked: their first axis is the layer.

# %%
from flax import nnx

for path, leaf in nnx.to_flat_state(run.params):
    print(f"{'.'.join(map(str, path)):50} {leaf.shape!s:20} {float(abs(leaf[...]).max()):8.3f} at most")

# %% [markdown]
# ## Its probes
#
# The same numbers as `python -m gattn probe RUN`, on held-out data: F-Attn is the share of attention that later tokens
# give to the first one, to be read against the floor (that of uniform attention); M-Act the largest activation, mean
# over layers.

# %%
import itertools

from rich.console import Console

from gattn.inspection import measure, show

name, batches = next(iter(run.source.held_out.items()))
measured = {"run": run.config.run_name, "step": run.step, "label": run.config.model.label}
measured |= measure(run, itertools.islice(batches(), 4), name)
measured["eval"]["bayes_loss"] = run.source.bayes_loss
show(measured, Console(width=110, force_jupyter=False))

# %% [markdown]
# ## Its heads, on one text

# %%
import matplotlib.pyplot as plt

tokens = next(batches())["inputs"][:1, :48]
decoder = nnx.merge(run.graph, run.params)
hidden, aux = decoder(tokens, probe=True)
maps = aux["layers"]["map"]
layers, heads = maps.shape[:2]
figure, axes = plt.subplots(layers, heads, figsize=(3.2 * heads, 3.2 * layers), squeeze=False, layout="constrained")
for layer in range(layers):
    for head in range(heads):
        share = float(maps[layer, head, 1:, 0].mean())
        axes[layer, head].imshow(maps[layer, head], cmap="Greys", vmin=0, vmax=0.5)
        axes[layer, head].set_title(f"layer {layer}, head {head}: first token {share:.2f}", fontsize=9)
plt.show()

# %% [markdown]
# ## What it would say next

# %%
import jax

probabilities = jax.nn.softmax(hidden[0, -1] @ decoder.output_matrix())
best = probabilities.argsort()[::-1][:5]
context = " ".join(run.source.decode_tokens(tokens[0, -8:]))
print("after", context)
for token in best:
    print(f"  {run.source.decode_tokens([int(token)])[0]:6} {float(probabilities[token]):.3f}")
assert abs(float(probabilities.sum()) - 1) < 1e-4
