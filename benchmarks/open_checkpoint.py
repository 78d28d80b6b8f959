"""How long it takes, and how much memory, to look inside a checkpoint of the paper's size.

`python -m benchmarks.open_checkpoint` writes a random 1.7B checkpoint in the official layout (headwise gate inside
q_proj, bfloat16, 3.4 GB, in a folder of its own that is removed at the end), then imports it, and probes it on 512
tokens, each in a process of its own. The real official files were never opened here.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from configs.models import dense_1p7b_28l
from configs.variants import apply
from gattn.config import override
from gattn.data.corpus import read_corpus
from gattn.data.tokenizer import open_tokenizer
from gattn.interop import hf
from gattn.interop.tensors import write_tensors

IMPORT = """
import sys, time, jax
from pathlib import Path
from gattn.interop import hf
began = time.perf_counter()
model, params = hf.load(Path(sys.argv[1]))
jax.block_until_ready(params)
print(time.perf_counter() - began)
"""


def write(folder: Path) -> int:
    """The checkpoint with a tokenizer that its vocabulary has room for, and a text of 512 tokens; its bytes."""
    model = override(apply(dense_1p7b_28l(), "g1_headwise").model, {"match_params": False})
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for entry in hf.entries(model, "official"):
            for name in hf.names(model, entry):
                flat = len(entry.shape) == 1
                values = rng.standard_normal(entry.shape, np.float32) * (0 if flat else model.init_std) + flat
                yield name, values.astype(ml_dtypes.bfloat16)

    write_tensors(folder, tensors())
    (folder / "config.json").write_text(json.dumps(hf.config_json(model, "official")))
    corpus = read_corpus()
    tokenizer = open_tokenizer("bpe", 4096, corpus)
    (folder / "tokenizer.json").write_text(tokenizer.spelling or "")
    words = tokenizer.encode(corpus.held_out[0].text)[:512]
    (folder / "text.txt").write_text(tokenizer.decode(words))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measured(words: list[str]) -> tuple[float, float, str]:
    """Seconds, largest resident GB, and standard output of a command."""
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6  # of the largest child so far, KB on Linux
    return time.perf_counter() - began, peak, done.stdout


def main() -> None:
    """Writes, imports, probes; prints what it took."""
    root = Path(tempfile.mkdtemp(prefix="open-checkpoint-"))
    try:
        size = write(root / "random-1p7b")
        print(f"checkpoint of {size / 1e9:.2f} GB", flush=True)
        wall, peak, said = measured([sys.executable, "-c", IMPORT, str(root / "random-1p7b")])
        print(f"import: {float(said):.1f} s ({wall:.1f} s with the start of Python), {peak:.2f} GB at most", flush=True)
        probe = ["-m", "gattn", "probe", str(root / "random-1p7b"), "--text", str(root / "random-1p7b" / "text.txt")]
        wall, peak, said = measured([sys.executable, *probe])
        print(f"probe on 512 tokens: {wall:.1f} s in all, {peak:.2f} GB at most")
        print("\n".join(said.strip().splitlines()[:8]))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
