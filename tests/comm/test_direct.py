"""Localises faults of CUDA-aware MPI: an MPI without it that crashes the program, arrays handed over before they are made.

The double gives MPI its memory by the interface that cupy's arrays have; the trial runs with numpy's arrays, too.
"""
import sys

import numpy as np
import pytest
from device import double, stream

from refimpl.array import on_device, to_host
from refimpl.comm import CommError
from refimpl.comm.device import fetched
from refimpl.comm.direct import CALLS, PROGRAM, direct, probe, require, trial, without_launcher, wrong
from refimpl.comm.launch import local_rank, mpirun_command
from refimpl.comm.library import load_mpi

from .programs import execute

DTYPES = ("float64", "float32", "int64", "int32", "uint8")


def raw_of(comm):
    """MPI's communicator of the ranks under mpirun; else the one rank that this process is."""
    if hasattr(comm, "raw"):
        return comm.raw
    try:
        return load_mpi().COMM_SELF
    except CommError as error:
        pytest.skip(str(error))


def late(values):
    """On the device, made by a stream that nobody has waited for."""
    with stream.Stream():
        return double.asarray(values)


def on_each(ranks, fn):
    """`fn(raw, rank, size)` on MPI's ranks, or once in this process."""
    run = ranks.run if ranks.size == 1 else ranks.run_mpi
    run(lambda comm: fn(raw_of(comm), raw_of(comm).Get_rank(), raw_of(comm).Get_size()))


# -- the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_calls_wait_for_the_device_and_give_the_right_numbers(ranks, dtype):
    def on_rank(raw, rank, size):
        a = (np.arange(6).reshape(2, 3) + 1).astype(dtype)
        mine = a * (rank + 1)
        before, after = (rank - 1) % size, (rank + 1) % size
        cases = {"all_reduce": (("sum",), a * (size * (size + 1) // 2)), "broadcast": ((size - 1,), a * size),
                 "all_gather": (((2,) * size,), np.concatenate([a * (r + 1) for r in range(size)]))}
        if size > 1:
            cases["permute"] = (before, after, (2,) * size), a * (before + 1)
        for operation, (args, expected) in cases.items():
            for x in (late(mine), late(mine.T.copy()).swapaxes(0, 1)):
                y = direct(raw, operation, x, args)
                assert on_device(y) and (y.shape, y.dtype) == (expected.shape, expected.dtype), operation
                assert y.__cuda_array_interface__, "nothing is queued on it any more"
                assert to_host(y).tolist() == expected.tolist(), operation
                assert to_host(x).tolist() == mine.tolist(), "an argument was written to"
    on_each(ranks, on_rank)


def test_what_was_not_tried_goes_by_way_of_the_host(ranks):
    def on_rank(raw, rank, size):
        x = late(np.ones((2, 3)))
        even, uneven = (2,) * size, (2,) * (size - 1) + (3,)
        for operation, args in (("reduce", (0,)), ("reduce_scatter", (even,)), ("all_to_all", (None,)),
                                ("all_reduce", ("max",)), ("permute", (None, None, even)), ("permute", (rank, rank, even))):
            assert direct(raw, operation, x, args) is None
        assert direct(raw, "all_reduce", x, ("sum",), order="fixed") is None
        assert direct(raw, "all_reduce", x, ("sum",), largest=5) is None
        assert direct(raw, "all_reduce", x[:0], ("sum",)) is None
        if size > 1:
            assert direct(raw, "all_gather", x, (uneven,)) is None
            assert direct(raw, "permute", x, ((rank - 1) % size, (rank + 1) % size, uneven)) is None
    on_each(ranks, on_rank)


def test_a_communicator_hands_over_what_was_tried_and_its_sums_are_those_of_the_host(ranks, monkeypatch):
    def on_rank(comm):
        mine, whole = np.arange(6.0).reshape(2, 3) + comm.rank, comm.sub({"dp": 1, "tp": comm.size}, ("tp",))
        by_host = {"reduce": lambda c, x: c.reduce(x), "max": lambda c, x: c.all_reduce(x, "max"),
                   "reduce_scatter": lambda c, x: c.reduce_scatter(x, 1),
                   "in order": lambda c, x: c.fixed_order().all_reduce(x), "later": lambda c, x: c.start_ring(x).wait()}
        acts = {"all_reduce": lambda c, x: c.all_reduce(x), "broadcast": lambda c, x: c.broadcast(x, c.size - 1),
                "all_gather": lambda c, x: c.all_gather(x, 0), "all_gather 1": lambda c, x: c.all_gather(x, 1),
                "ring": lambda c, x: c.ring(x), **by_host}
        staged = []
        monkeypatch.setattr("refimpl.comm.base.fetched", lambda x: staged.append(on_device(x)) or fetched(x))
        for c in (comm, whole):
            c.direct = True
            for name, act in acts.items():
                staged.clear()
                y = act(c, late(mine))
                assert c.size == 1 or any(staged) == (name in by_host), name
                expected = act(c, mine)
                assert (y is None) == (expected is None), name  # of a reduction, where it is not the root
                assert y is None or fetched(y).tobytes() == expected.tobytes(), name
            c.direct = False
    ranks.run_mpi(on_rank)


# -- the trial -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xp", (np, double), ids=("numpy", "double"))
def test_the_trial_makes_every_call_and_they_are_right(ranks, xp):
    def on_rank(raw, rank, size):
        assert list(trial(raw, xp)) == [(name, True) for name in CALLS]
        assert wrong(raw, xp) == ""
    on_each(ranks, on_rank)


class Forgetful:
    """MPI's communicator, whose Bcast and Sendrecv move nothing."""

    def __init__(self, raw):
        self.raw = raw

    def __getattr__(self, name):
        return getattr(self.raw, name)

    def Bcast(self, y, root):
        y[:] = 0.5

    def Sendrecv(self, *args):
        pass


def test_wrong_numbers_are_named(ranks):
    def on_rank(raw, rank, size):
        assert wrong(Forgetful(raw), np) == "Bcast, Sendrecv gave wrong numbers"
    on_each(ranks, on_rank)


# -- the child process -----------------------------------------------------------------------------------------------


def test_a_child_of_a_rank_is_an_mpi_program_of_its_own(ranks):
    """Under mpirun, too: it must not take itself for the rank."""
    def on_rank(comm):
        raw_of(comm)
        if comm.rank == 0:
            assert probe("numpy") == ""
        comm.barrier()
    (ranks.run if ranks.size == 1 else ranks.run_mpi)(on_rank)


CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize("program, sentence", (
    (CRASH, "Allreduce of a trial crashed (SIGSEGV)"),
    (f"print('Allreduce', flush=True); {CRASH}", "Bcast of a trial crashed (SIGSEGV)"),
    (f"print('Allreduce Bcast Allgather Sendrecv', flush=True); {CRASH}", "the end of a trial crashed (SIGSEGV)"),
    ("import os; os.abort()", "Allreduce of a trial crashed (SIGABRT)"),
    ("import sys; sys.exit('first\\nand last')", "and last"),
    ("import sys; sys.exit(3)", "Allreduce of a trial ended with status 3"),
    ("import sys; print('Allreduce'); print('illegal address', file=sys.stderr); sys.exit(15)",
     "Bcast of a trial ended with status 15: illegal address"),
    ("print('Allreduce')", "Bcast of a trial ended with status 0"),
    ("import time; time.sleep(60)", "a trial did not end within 0.5 s"),
    (PROGRAM, "device 'tpu' is not supported: use one of numpy, cupy")))
def test_a_child_that_fails_or_crashes_is_a_sentence(program, sentence):
    if program == PROGRAM:
        raw_of(None)
    assert probe("tpu", program, 0.5 if "sleep" in program else 60.0) == sentence


def test_a_child_is_told_what_the_user_wants_and_not_what_the_launcher_says():
    launchers = {"PMI_RANK": "1", "PMI_FD": "9", "PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_SIZE": "2", "HYDI_CONTROL_FD": "7",
                 "MPI_LOCALRANKID": "0", "PRTE_LAUNCHED": "1", "SLURM_PROCID": "0", "MV2_COMM_WORLD_SIZE": "2"}
    users = {"PATH": "/bin", "OMPI_MCA_pml": "ucx", "PMIX_MCA_gds": "hash", "MPIR_CVAR_ENABLE_GPU": "1", "OPAL_PREFIX": "/x"}
    assert without_launcher(launchers | users) == users


# -- all ranks -------------------------------------------------------------------------------------------------------


def test_all_ranks_go_on_or_none(ranks):
    def on_rank(comm):
        require(comm, local_rank(comm), "numpy")
        with pytest.raises(CommError) as error:
            require(comm, local_rank(comm), "tpu")
        assert "cannot be handed arrays of tpu: device 'tpu' is not supported" in str(error.value)
        assert str(error.value).endswith("or unset REFIMPL_CUDA_AWARE: arrays then go by way of the host")
    ranks.run_mpi(on_rank)


PROGRAM_THAT_ASKS = """
from refimpl.comm import launch

def main(comm):
    raise AssertionError("it went on")

if __name__ == "__main__":
    launch(main)
"""


def test_an_mpi_that_cannot_is_refused_with_one_sentence_for_all_ranks(mpirun, tmp_path):
    (tmp_path / "asks.py").write_text(PROGRAM_THAT_ASKS)
    (tmp_path / "cupy.py").write_text("raise ImportError('planted')")
    code, out, err, _ = execute([*mpirun_command(2), sys.executable, str(tmp_path / "asks.py")], REFIMPL_CUDA_AWARE="1",
                                PYTHONPATH=str(tmp_path))
    assert code != 0 and out.strip() == "" and "Traceback" not in err
    assert err.count("asks.py: REFIMPL_CUDA_AWARE=1, but this MPI (") == 1, err
    assert ") cannot be handed arrays of cupy: the device cupy needs the package cupy (planted): pip install" in err


def test_alone_there_is_nothing_to_ask(tmp_path):
    (tmp_path / "one.py").write_text("from refimpl.comm import world\nprint(world().size)\n")
    assert execute([sys.executable, str(tmp_path / "one.py")], REFIMPL_CUDA_AWARE="1")[:2] == (0, "1\n")
