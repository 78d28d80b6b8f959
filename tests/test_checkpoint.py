"""Checkpoints: what is kept, damage that is found, a disk that is full."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn.checkpoint import CheckpointError, Checkpoints, checksum
from gattn.config import TrainConfig

# Orbax leaves event loops and futures behind when a checkpoint cannot be written or read, which is what is tested here.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"
)

STATE = {
    "step": jnp.int32(7),
    "w": jax.random.normal(jax.random.key(0), (300, 50)),
    "half": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4),
    "flags": jnp.array([True, False, True]),
    "bytes": jnp.arange(5, dtype=jnp.uint8),
}


def like(state):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)


def save(folder, *steps, losses=None, **kept):
    with Checkpoints(folder, TrainConfig(checkpoint_every=1, eval_every=1, **kept)) as checkpoints:
        for step in steps:
            known = {s: loss for s, loss in (losses or {}).items() if s <= step}
            checkpoints.save(step, STATE | {"step": jnp.int32(step)}, {"at": step}, known)


def kept(folder):
    return Checkpoints(folder).steps


def test_round_trip_of_every_dtype(tmp_path):
    save(tmp_path, 3)
    with Checkpoints(tmp_path) as checkpoints:
        step, state, metadata = checkpoints.restore(3, like(STATE))
    assert (step, metadata) == (3, {"at": 3})
    jax.tree.map(np.testing.assert_array_equal, state, STATE | {"step": jnp.int32(3)})
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, STATE)


def test_last_every_and_best_are_kept(tmp_path):
    losses = {step: abs(step - 5) + 1.0 for step in range(1, 10)}
    save(tmp_path / "last", *range(1, 10), keep_last=3)
    save(tmp_path / "all", *range(1, 10), losses=losses, keep_last=2, keep_every=4, keep_best=True)
    assert kept(tmp_path / "last") == [7, 8, 9]
    assert kept(tmp_path / "all") == [4, 5, 8, 9]
    assert Checkpoints(tmp_path / "all").best(losses) == 5
    losses[9] = 0.5  # measured only after a restart, when its checkpoint was there already
    save(tmp_path / "all", 10, 11, 12, losses=losses | {10: 0.6}, keep_last=2, keep_every=4, keep_best=True)
    assert kept(tmp_path / "all") == [4, 8, 9, 11, 12]
    assert Checkpoints(tmp_path / "all").best({}) is None


def test_saving_goes_on_while_the_state_is_given_away(tmp_path):
    """A donated buffer is written over by the next step while the checkpoint is still being written."""
    step = jax.jit(lambda x: x * 1.5 + 1.0, donate_argnums=0)
    state = jax.random.normal(jax.random.key(1), (1000, 1000))
    saved = {}
    with Checkpoints(tmp_path, TrainConfig(checkpoint_every=1, keep_last=9)) as checkpoints:
        for index in range(4):
            saved[index] = np.array(state)
            checkpoints.save(index, {"x": state}, {})
            for _ in range(5):
                state = step(state)
    with Checkpoints(tmp_path) as checkpoints:
        for index, value in saved.items():
            restored = checkpoints.restore(index, like({"x": state})).state["x"]
            np.testing.assert_array_equal(restored, value)


def test_reading_leaves_a_run_in_progress_alone(tmp_path):
    """`gattn probe` on a run that is just writing: its temporary folder stays; the next trainer removes it."""
    save(tmp_path, 1)
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert kept(tmp_path) == [1]
    assert unfinished.exists()
    save(tmp_path, 3)
    assert not unfinished.exists()


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "commit_success.txt")


def data_file(folder: Path) -> Path:
    return max(files(folder), key=lambda p: p.stat().st_size)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    save(folder, 1)
    return folder


def copied(healthy, tmp_path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "copy"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_flipped_bit_is_found_or_harmless(healthy, tmp_path_factory, place, bit):
    """Any bit of any file: either the checkpoint is refused, or what is read is what was saved (unused bytes exist)."""
    folder = copied(healthy, tmp_path_factory.mktemp("flipped"))
    every = files(folder)
    sizes = np.cumsum([path.stat().st_size for path in every])
    place %= int(sizes[-1])
    index = int(np.searchsorted(sizes, place, side="right"))
    content = bytearray(every[index].read_bytes())
    content[place - int(sizes[index - 1] if index else 0)] ^= 1 << bit
    every[index].write_bytes(content)
    with Checkpoints(folder, TrainConfig()) as checkpoints:
        if not checkpoints.steps:  # orbax could not even list it
            assert [path.name for path in checkpoints.damaged][-1:] == ["damaged-checkpoint-1"]
            return
        try:
            restored = checkpoints.restore(1, like(STATE)).state
        except CheckpointError as error:
            assert re.search(r"1 (cannot be read|is damaged)", str(error))  # noqa: PT017 - or no error at all
        else:
            jax.tree.map(np.testing.assert_array_equal, restored, STATE | {"step": jnp.int32(1)})


@pytest.mark.parametrize("how", ["half", "empty", "gone", "zeros in the middle"])
def test_a_broken_data_file_is_refused(healthy, tmp_path, how):
    folder = copied(healthy, tmp_path)
    path = data_file(folder)
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        zeros = content[:middle] + bytes(64) + content[middle + 64 :]
        path.write_bytes({"half": content[:middle], "empty": b"", "zeros in the middle": zeros}[how])
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=r"1 (cannot be read|is damaged)"):
        checkpoints.restore(1, like(STATE))


def test_a_damaged_checkpoint_is_set_aside_and_can_be_written_anew(healthy, tmp_path):
    folder = copied(healthy, tmp_path)
    with Checkpoints(folder, TrainConfig()) as checkpoints:
        checkpoints.set_aside(1)
        assert checkpoints.steps == []
        checkpoints.save(1, STATE, {})
        (aside,) = checkpoints.damaged
    assert data_file(aside).exists()
    assert kept(folder) == [1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 59), st.integers(0, 31))
def test_checksum_sees_every_bit(seed, index, bit):
    values = np.random.default_rng(seed).integers(0, 2**32, 60, dtype=np.uint32)
    other = values.copy()
    other[index] ^= np.uint32(1 << bit)
    as_float = lambda x: {"x": jax.lax.bitcast_convert_type(x.reshape(3, 4, 5), np.float32)}  # noqa: E731
    assert checksum(as_float(values)) == checksum(as_float(values.copy())) != checksum(as_float(other))


@given(st.integers(0, 2**32 - 1), st.integers(0, 31), st.sets(st.integers(0, 59), min_size=2))
def test_checksum_sees_the_same_bit_of_several_elements(seed, bit, places):
    """Signs most of all: minus x is not x."""
    values = np.random.default_rng(seed).integers(0, 2**32, 60, dtype=np.uint32)
    other = values.copy()
    other[list(places)] ^= np.uint32(1 << bit)
    assert checksum({"x": values}) != checksum({"x": other})
    assert checksum({"x": jnp.ones((4, 4))}) != checksum({"x": -jnp.ones((4, 4))})


def test_checksum_sees_order_names_shapes_and_dtypes():
    x = jnp.arange(6.0)
    states = [{"x": x}, {"y": x}, {"x": x[::-1]}, {"x": x.reshape(2, 3)}, {"x": x.astype(jnp.int32)}, {"x": x, "y": x}]
    assert len({checksum(state) for state in states}) == len(states)


def test_checksum_does_not_depend_on_the_sharding():
    """Eight devices in another process give the same digits."""
    program = (
        "import jax, numpy as np; jax.config.update('jax_num_cpu_devices', 8)\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "from gattn.checkpoint import checksum\n"
        "x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)\n"
        "mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('a', 'b'))\n"
        "specs = [P(), P('a'), P('a', 'b'), P(None, ('a', 'b'))]\n"
        "print(*{checksum({'x': jax.device_put(x, NamedSharding(mesh, spec))}) for spec in specs})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    assert done.stdout.split() == [checksum({"x": jnp.asarray(x)})]


FULL = """
import resource, signal, sys
import jax, jax.numpy as jnp
from pathlib import Path
from gattn.checkpoint import CheckpointError, Checkpoints
from gattn.config import TrainConfig

folder = Path(sys.argv[1])
with Checkpoints(folder, TrainConfig()) as checkpoints:
    checkpoints.save(1, {"x": jnp.ones(10)}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    with Checkpoints(folder, TrainConfig()) as checkpoints:
        checkpoints.save(2, {"x": jax.random.normal(jax.random.key(0), (1000, 1000))}, {})
        checkpoints.wait()
        print("never here")
except CheckpointError as error:
    print(error)
print(Checkpoints(folder).steps)
"""


def test_a_disk_that_takes_no_more_is_one_clear_error(tmp_path):
    """The operating system refuses the write (here by a file size limit): one line, and the checkpoint before stays."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    said, steps = done.stdout.strip().splitlines()
    assert said.startswith("cannot write ")
    assert "File too large" in said
    assert "make room" in said
    assert steps == "[1]"
    assert "Traceback" not in done.stderr
