"""gattn: gated softmax attention in JAX (arXiv 2505.06708).

Names are resolved on first use, so ``from gattn import gated_dot_product_attention`` needs jax and numpy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gattn.kernels.api import attention_maps, choose_implementation, gated_dot_product_attention

__version__ = "0.1.0"
__all__ = ["__version__", "attention_maps", "choose_implementation", "gated_dot_product_attention"]

_HOMES = {
    "attention_maps": "gattn.kernels.api",
    "choose_implementation": "gattn.kernels.api",
    "gated_dot_product_attention": "gattn.kernels.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
