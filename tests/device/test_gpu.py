"""Localises faults on a real GPU: everything the double shows, with cupy's own arithmetic.  make test-gpu."""
import subprocess
import sys

import numpy as np
import pytest
from device import suite

from refimpl import ops
from refimpl.array import owner, to_host, xp_of
from refimpl.autograd import Count, Guard, Tensor, value_and_grad
from refimpl.comm import Mesh, run_threads
from refimpl.comm.device import fetched
from refimpl.comm.direct import probe
from refimpl.generate import sample
from refimpl.models import init

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op, case", suite.case_names())
def test_op_gives_numpys_numbers(gpu, op, case, dtype):
    suite.check_case(gpu, op, case, dtype, exact=False)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_decoder_gives_numpys_numbers(gpu, dtype):
    suite.check_decoder(gpu, dtype, exact=False)


def test_bfloat16_is_rounded_as_by_numpy(gpu):
    suite.check_bfloat16(gpu)


@pytest.mark.parametrize("dims", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_decoder_on_a_mesh_gives_numpys_numbers(gpu, dims):
    """Ranks as threads that share the GPU; collectives go through the host."""
    size = dims.get("dp", 1) * dims.get("tp", 1)
    run_threads(size, lambda comm: suite.check_decoder(gpu, "float64", Mesh(**dims, comm=comm), exact=False))


def test_initial_weights_are_the_same_bits(gpu):
    for name, t in init(suite.CONFIG, Mesh(), seed=3, dtype="float32", xp=gpu).items():
        suite.compare(gpu, t.array, init(suite.CONFIG, Mesh(), seed=3, dtype="float32")[name].array, None)


def test_gradients_are_the_same_bits_in_every_run(gpu):
    """Rows of equal ids are added in a fixed order: atomics would not."""
    x, ids = gpu.asarray(np.random.default_rng(0).normal(size=(4096, 32))), gpu.asarray(np.arange(4096) % 3)
    runs = {to_host(ops.scatter_add.array(x, ids, n=3)[0]).tobytes() for _ in range(5)}
    assert len(runs) == 1


def test_an_infinite_row_stays_with_its_id(gpu):
    y = ops.scatter_add.array(gpu.asarray(np.array([np.inf, 1e20, 1.0, 2.0])), gpu.asarray(np.array([0, 1, 2, 2])), n=3)[0]
    assert to_host(y).tolist() == [np.inf, 1e20, 3.0]


def test_ids_out_of_range_are_refused(gpu):
    """cupy wraps them round."""
    x = gpu.asarray(np.eye(5))
    assert to_host(x[gpu.asarray([5])]).tolist() == to_host(x[:1]).tolist()
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        ops.embedding(x, gpu.asarray([5]))


def test_what_the_double_takes_for_granted(gpu):
    x = gpu.asarray(np.arange(4.0).reshape(2, 2))
    assert xp_of(x) is gpu and owner(x[0][1:]) is x and x.sum().shape == ()
    for refused in (lambda: np.asarray(x), lambda: x + np.ones(2), lambda: gpu.exp(x, where=x > 0)):
        with pytest.raises(TypeError):
            refused()
    host = x.get()
    host[:] = 7
    assert float(x.sum()) == 6


def after_long_kernels(gpu, values):
    """`values` on the device, as soon as kernels of many milliseconds have ended."""
    a = gpu.full((2000, 2000), 1e-3, "float64")
    for _ in range(20):
        a = a @ a * 0.5
    return gpu.asarray(values) + a.sum() * 0


@pytest.mark.parametrize("stream", ("the current stream", "another stream"))
def test_a_collective_waits_for_the_kernel_that_makes_its_input(gpu, stream):
    """Long kernels, then at once an all_reduce of a million doubles, again and again: pinned memory is used again."""
    def on_rank(comm):
        where = gpu.cuda.Stream(non_blocking=True) if stream == "another stream" else gpu.cuda.get_current_stream()
        for step in range(5):
            mine = np.random.default_rng([step, comm.rank]).normal(size=1_000_000)
            with where:
                x = after_long_kernels(gpu, mine)
            results = comm.all_reduce(x), comm.broadcast(x, 1), comm.ring(x), comm.start_all_reduce(x).wait()
            expected = comm.all_reduce(mine), comm.broadcast(mine, 1), comm.ring(mine), comm.all_reduce(mine)
            for y, e in zip(results, expected):
                suite.compare(gpu, y, e, None)
    run_threads(2, on_rank)


def test_arrays_are_staged_in_pinned_memory(gpu):
    x = fetched(after_long_kernels(gpu, np.arange(1e6)))
    assert isinstance(x.base, gpu.cuda.PinnedMemoryPointer) and (x == np.arange(1e6)).all()
    assert fetched(gpu.zeros((0, 3))).shape == (0, 3) and fetched(gpu.zeros(())).shape == ()
    assert fetched(gpu.asarray(np.eye(3)[::-1, :2])).tolist() == np.eye(3)[::-1, :2].tolist()


def test_the_probe_of_cuda_aware_mpi_says_yes_or_a_sentence(gpu):
    assert len(probe().splitlines()) <= 1


def test_frames_and_sampling(gpu):
    params = suite.parameters(gpu)
    with Count() as count, Guard():
        value_and_grad(lambda p: ops.sum(ops.exp(p["x"])), {"x": Tensor(gpu.asarray(np.ones((3, 5))))})
    assert count.peak > 0 and count.live == 0
    tokens = sample(params, np.array([1, 2]), 6, suite.CONFIG, Mesh(), 0.0)
    assert tokens.tolist() == sample(suite.parameters(np), np.array([1, 2]), 6, suite.CONFIG, Mesh(), 0.0).tolist()


def test_the_demo_agrees_with_a_gpu_per_local_rank(gpu, tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    where = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "demo")]
    command = [sys.executable, "-m", "refimpl", "demo", "--mesh", "tp=2", "--device", "cupy", "--steps", "3", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "OK: sharded equals serial" in done.stdout, done.stdout + done.stderr
