"""Checks on 8 CPU devices, in a process of their own: jax must be told of the devices before it has any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def found_by(module: str) -> Any:
    """What `python -m module` prints as its last line, as JSON."""
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def print_all(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Name -> what the check returned, or its traceback: the line that `found_by` reads."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
