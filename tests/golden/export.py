"""Every golden model as gattn writes it, for PyTorch to read: `python -m tests.golden.export FOLDER` (`make.py`)."""

import sys
from pathlib import Path

from gattn.interop import hf

HERE = Path(__file__).parent


def main(out: Path) -> None:
    """One folder per model and layout that can say it."""
    for family in sorted(path.parent for path in HERE.glob("*/golden.npz")):
        model, params = hf.load(family)
        layouts = ["qwen3_5", "official"] if model.gates else [hf.layout_of(model)]
        for layout in layouts:
            hf.save(out / f"{family.name}-to-{layout}", model, params, layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
