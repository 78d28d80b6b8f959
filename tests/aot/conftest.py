"""These tests run in .venv-aot (`make test-aot`), where the compilers for TPU and GPU are."""

import os

# tests/conftest.py asks for quick and bad code; what the compilers make of a kernel is the point here.
os.environ["XLA_FLAGS"] = ""

from gattn import aot

aot.prepare()
