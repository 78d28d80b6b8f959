"""Every test process computes on one core, compiles quickly rather than well, and keeps its files to itself."""

import os
import tempfile
import time
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("no test has a time limit", deadline=None)
hypothesis.settings.load_profile("no test has a time limit")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # sizes XLA's thread pools
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# One compilation for all tests and the processes they start; a folder of this test run, so that nothing is stale.
run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}-{time.time_ns()}")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"gattn-tests-jax-{run}")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ["GATTN_HOME"] = tempfile.mkdtemp(prefix="gattn-tests-")


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks of chunked attention small enough that a test's short sequences are several of them."""
    from functools import partial

    from gattn.kernels import api, chunked, vjp

    kernel = vjp.Kernel(partial(chunked.forward, block=16), partial(chunked.backward, block=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(api._KERNELS, "chunked", kernel)
        yield
