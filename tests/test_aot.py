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


@pytest.mark.parametrize("topology", ["v7:2x2", "v5p:4", "h200:0", "h200:12", "h200:x", ""])
def test_what_is_no_machine_is_refused(topology, monkeypatch):
    monkeypatch.setattr(aot, "_require", lambda package: None)
    with pytest.raises(ValueError, match="give"):
        aot.devices(topology)
