"""Golden losses: twenty steps of four small configs, committed; a change of code that changes what is learned is seen.

`python -m tests.test_golden` writes them again. They were made on x86-64 (see the file); other machines and versions
round differently, which twenty steps let grow, hence the tolerance.
"""

import json
import platform
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.variants import apply
from experiments.sinkbench import sinkbench_config
from gattn import model
from gattn.config import override
from gattn.data.loader import open_source
from gattn.step import new_state, train_step

FILE = Path(__file__).parent / "golden" / "losses.json"
BASE = override(
    sinkbench_config(),
    {"model.d_model": 64, "model.num_layers": 2, "data.batch_size": 16, "train.steps": 20, "optim.warmup_steps": 4},
)
CONFIGS = {
    "baseline": BASE,
    "g1_elementwise": apply(BASE, "g1_elementwise"),
    "g2_headwise bfloat16": override(apply(BASE, "g2_headwise"), {"model.dtype": "bfloat16"}),
    "g1_headwise accumulation z_loss wsd": override(
        apply(BASE, "g1_headwise"),
        {"train.accumulation": 4, "train.z_loss": 1e-3, "optim.schedule": "wsd", "optim.decay_steps": 8},
    ),
}


def losses(name: str) -> list[float]:
    config = CONFIGS[name]
    state, out = new_state(config), []
    step = train_step(model.abstract(config.model)[0], config)
    for index, batch in zip(range(20), open_source(config).train(0), strict=False):
        state, vector = step(state, np.int32(index), batch)
        out.append(float(vector[0]))
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_of_twenty_steps_are_those_that_were_committed(name):
    golden = json.loads(FILE.read_text())["losses"][name]
    np.testing.assert_allclose(losses(name), golden, rtol=3e-3 if "bfloat16" in name else 2e-4)
    assert golden[-1] < golden[0] - 0.1


if __name__ == "__main__":
    made = f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"
    content = {"made": made, "losses": {name: [round(loss, 6) for loss in losses(name)] for name in CONFIGS}}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
