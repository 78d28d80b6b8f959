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
# # Reproduce Table 4
#
# The paper's Table 4 asks which gates remove the attention sink of a 15B model. Three of its rows on bench A, with a
# fifth of the bench's tokens and one seed: the whole table, with seeds and the deep bench, is
# `python -m experiments.table4 --scale cpu`.

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
from configs.variants import PAPER, apply
from experiments.report import paper_row
from experiments.sinkbench import sinkbench_config
from gattn.config import override
from gattn.train import train

# A fifth of the bench's tokens, faster: the sink is there, if smaller.
SHORT = {"train.steps": 500, "data.batch_size": 16, "optim.learning_rate": 4e-3}
ROWS = {row: PAPER["table4"][row] for row in (1, 3, 5)}  # baseline, SDPA headwise, value elementwise
bench = override(sinkbench_config(), SHORT)
results = {row: train(apply(bench, variant)) for row, variant in ROWS.items()}

# %%
print(f"{'':18} {'F-Attn':>7} {'paper':>7} {'gate':>7} {'paper':>7}")
for row, result in results.items():
    published, found = paper_row("table4", row), result["probes"]
    gates = [gate["mean"] for gate in found["gates"].values()]
    ours = [f"{found['f_attn']:.3f}", f"{published['f_attn']:.3f}"]
    ours += [f"{gates[0]:.3f}", f"{published['gate_score']:.3f}"] if gates else ["", ""]
    print(f"{published['method']:18} " + " ".join(f"{cell:>7}" for cell in ours))
floor = results[1]["probes"]["f_attn_floor"]
print(f"uniform attention would give the first token {floor:.3f}")

# %% [markdown]
# The gate on the output of attention removes the sink; the gate on the values, which the query cannot close, does not:
# as in the paper. One layer forms no massive activations, so M-Act is not compared here; the deep bench does.

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
names = [paper_row("table4", row)["method"] for row in ROWS]
places = range(len(names))
axis.barh([p - 0.2 for p in places], [r["probes"]["f_attn"] for r in results.values()], 0.4, label="bench A, here")
axis.barh([p + 0.2 for p in places], [paper_row("table4", row)["f_attn"] for row in ROWS], 0.4, label="paper, 15B")
axis.axvline(floor, color="grey", linestyle=":", label="uniform attention, here")
axis.set_yticks(list(places), names)
axis.invert_yaxis()
axis.set_xlabel("F-Attn")
axis.legend()
plt.show()
assert results[3]["probes"]["f_attn"] < min(results[1]["probes"]["f_attn"], results[5]["probes"]["f_attn"])
