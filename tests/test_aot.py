import sys

import pytest

from gattn import aot
from gattn.kernels import tuning


@pytest.mark.parametrize(
    ("missing", "devices"),
    [("libtpu", lambda: aot.tpu_devices("v5p")), ("jax_cuda12_plugin", aot.h200_devices)],
)
def test_without_the_compiler_the_error_names_it_and_says_how_to_get_it(monkeypatch, missing, devices):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=rf"{missing} is not installed.*make test-aot"):
        devices()


def test_a_kernel_traced_for_an_absent_gpu_sees_its_kind():
    here = tuning.kind()
    with aot.h200_mesh():
        assert tuning.kind() == "NVIDIA H200"
    assert tuning.kind() == here
