"""Every test process computes on one core, compiles quickly rather than well, and keeps its files to itself."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 --xla_backend_optimization_level=0",
)
os.environ["GATTN_HOME"] = tempfile.mkdtemp(prefix="gattn-tests-")
