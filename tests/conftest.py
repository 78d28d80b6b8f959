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
# Computing is done by one thread; those of XLA's pool are there to wait, as the simulated warpgroups of a GPU do.
os.environ.setdefault("NPROC", "8")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false")
# One compilation for all tests and the processes they start; a folder of this test run, so that nothing is stale.
run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}-{time.time_ns()}")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"gattn-tests-jax-{run}")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ["GATTN_HOME"] = tempfile.mkdtemp(prefix="gattn-tests-")

LONGEST = ("test_step", "test_train", "test_notebooks", "test_distributed")


def pytest_collection_modifyitems(items):
    """Files whose single tests or fixtures take minutes go first: at the end one process would wait for the other."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks so small that the short sequences of tests are several, for every implementation that has blocks."""
    from functools import cache, partial

    from gattn.kernels import api

    whole = api._kernel

    @cache
    def small(name, interpret):
        kernel, blocks = whole(name, interpret), {"block": 16}
        if name != "chunked":
            module = api._module(name)
            blocks = {
                "blocks": module.Blocks(128, 128) if name == "tpu" else module.Blocks(*(module.Tile(64, 64),) * 3)
            }
        return kernel._replace(forward=partial(kernel.forward, **blocks), backward=partial(kernel.backward, **blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_kernel", small)
        yield
