"""Localises launchers that do not fit, numbers of ranks that go unnoticed, and BLAS thread counts."""
import os
import sys

import numpy as np
import pytest

from refimpl.comm import CommError, launch
from refimpl.comm.launch import (DEAF, PATIENT, THREAD_VARIABLES, cgroup_cores, is_foreign, launcher, mpirun_command,
                                 set_blas_threads, share_of_cores)
from refimpl.comm.library import find_mpi, library

from .programs import LAUNCHERS, QUICK, execute


def python(code, **environment):
    return execute([sys.executable, "-c", code], **environment)


# -- how many ranks ------------------------------------------------------------------------------------------------

COUNT = """
'''Count the ranks.'''
import numpy as np
from refimpl.comm import launch

def main(comm):
    assert comm.all_reduce(np.ones(1)) == comm.size
    if comm.rank == 0:
        print(comm.size, type(comm).__name__)

if __name__ == "__main__":
    launch(main, ranks=(1, 2))
"""


@pytest.fixture
def count(tmp_path):
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    return script


def test_a_program_runs_alone_on_threads_and_under_mpirun(count, mpirun):
    assert execute([sys.executable, str(count)])[:2] == (0, "1 SerialComm\n")
    assert execute([sys.executable, str(count), "--simulate", "2"])[:2] == (0, "2 ThreadComm\n")
    code, out, err, _ = mpirun(count)
    assert (code, out.strip()) == (0, "2 MpiComm"), err


def test_a_wrong_number_of_ranks_gets_a_sentence(count):
    code, _, err, _ = execute([sys.executable, str(count), "--simulate", "3"])
    assert code == 2 and "Traceback" not in err
    assert err == (f"count.py needs 1 or 2 ranks, got 3: mpirun -n 1 python {count}, or without MPI "
                   f"python {count} --simulate 1\n")


@pytest.mark.parametrize("n", ("0", "-1", "x"))
def test_simulate_wants_a_number_of_ranks(count, n):
    code, out, err, _ = execute([sys.executable, str(count), "--simulate", n])
    assert code == 2 and out == "" and "--simulate" in err and "Traceback" not in err


def test_simulate_under_mpirun_is_refused(count, mpirun):
    code, _, err, _ = mpirun(count, "--simulate", "2")
    assert code == 2 and "--simulate N is for a process of its own, not under mpirun" in err


@pytest.mark.parametrize("variable, who", (("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "MPICH's")))
def test_copies_that_would_each_believe_to_be_alone_are_explained(count, mpirun, variable, who):
    code, out, err, _ = execute([sys.executable, str(count)], **{variable: "4"})
    assert code == 1 and out == "" and "Traceback" not in err
    assert "started 4 processes, but the MPI library that mpi4py loaded " in err and who in err and "doctor" in err


@pytest.mark.parametrize("version, variables, foreign", (
    ("MPICH Version: 5.0.2", "PMI_SIZE", False), ("MPICH Version: 5.0.2", "OMPI_COMM_WORLD_SIZE PMIX_RANK", True),
    ("MPICH Version: 5.0.2", "PMIX_RANK", False),       # it may have been built with PMIx
    ("Open MPI v5.0.11", "OMPI_COMM_WORLD_SIZE PMIX_RANK", False), ("Open MPI v5.0.11", "PMI_SIZE", True),
    ("Open MPI v4.1.4", "PMI_SIZE", False), ("Open MPI v5.0.11", "PMIX_RANK", False),
    ("Open MPI v5.0.11", "PMI_SIZE OMPI_COMM_WORLD_SIZE PMIX_RANK", False)))        # mpirun in a shell under srun
def test_a_launcher_that_the_library_cannot_understand_is_known_before_mpi_starts(monkeypatch, version, variables, foreign):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name in variables.split():
        monkeypatch.setenv(name, "2")
    assert is_foreign(version) == foreign


def test_of_two_launchers_that_of_the_library_counts(monkeypatch):
    """mpirun in a shell that another mpirun, or srun, has started: the outer one's variables are still there."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, {"P": "2", "O": "4"}[name[0]] if "SIZE" in name else {"P": "1", "O": "3"}[name[0]])
    module = sys.modules["refimpl.comm.launch"]
    monkeypatch.setattr(module, "find_mpi", lambda: None)
    for version, who, size, rank in (("MPICH Version: 5.0.2", "MPICH's", 2, 1), ("Open MPI v5.0.11", "Open MPI's", 4, 3)):
        monkeypatch.setattr(module, "library", lambda mpi, version=version: version)
        found = launcher()
        assert found and found[0].startswith(who) and found[1] == size and module.launched_rank() == rank


def test_a_foreign_launcher_is_a_sentence_and_not_the_librarys_own_end(count, mpirun):
    theirs = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}
    ours = {"PMI_SIZE": "4", "PMI_RANK": "0"}
    code, out, err, _ = execute([sys.executable, str(count)], **(ours if library(find_mpi()).startswith("Open") else theirs))
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "started 4 processes, but the MPI library that mpi4py loaded cannot work with it.  Use the mpirun of" in err


def test_tasks_of_srun_that_cannot_know_of_each_other_are_explained(count, mpirun):
    code, out, err, _ = execute([sys.executable, str(count)], SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0")
    assert code == 1 and out == "" and "srun started 4 processes, but the MPI library that mpi4py loaded sees 1" in err
    assert "or srun --mpi=pmi" in err
    assert execute([sys.executable, str(count)], SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")[:2] == (0, "1 SerialComm\n")


EARLY = """
from refimpl.comm import library, world
from refimpl.comm.launch import launched_rank
library.PATIENCE = 2
if launched_rank() == 1:
    raise SystemExit(0)
world()
"""


def test_a_rank_that_ends_before_mpi_starts_does_not_leave_the_others_waiting(mpirun, tmp_path):
    (tmp_path / "early.py").write_text(EARLY)
    code, _, err, seconds = mpirun(tmp_path / "early.py", n=3)
    assert code != 0 and seconds < QUICK
    ours = "s not all ranks came to MPI_Init: one of them ended before, see above, or is late" in err
    assert ours or "this process did not call \"init\" before exiting" in err, err         # Open MPI may see it first


def test_the_alarm_leaves_an_alarm_of_others_alone():
    code, out, err, _ = python("""
import signal, time
from refimpl.comm.library import alarm
signal.signal(signal.SIGALRM, lambda *args: print("theirs"))
signal.alarm(1)
with alarm(1):
    time.sleep(1.5)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
with alarm(1):
    pass
time.sleep(1.5)
print("alive")
""")
    assert (code, out) == (0, "theirs\nalive\n"), err


@pytest.mark.parametrize("variables, found", (
    ({}, None), ({"PMI_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_SIZE": "2"}, 2), ({"PMI_SIZE": "none"}, None),
    ({"PMIX_RANK": "0"}, "?"), ({"SLURM_STEP_NUM_TASKS": "4"}, 4), ({"SLURM_STEP_NUM_TASKS": "1"}, None),
    ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, 4)))             # mpirun starts its daemons by srun
def test_launchers_are_known_by_their_variables(monkeypatch, variables, found):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launcher() or (None, None))[1] == (None if found == "?" else found)
    assert (launcher() is None) == (found is None)


def test_the_package_imports_without_mpi():
    code, out, err, _ = python("import refimpl, refimpl.comm, refimpl.models, sys; print('mpi4py.MPI' in sys.modules)")
    assert (code, out) == (0, "False\n"), err


def test_a_serial_world_does_not_start_mpi():
    code, out, err, _ = python("from refimpl.comm import world; import sys; print(world().size, 'mpi4py.MPI' in sys.modules)")
    assert (code, out) == (0, "1 False\n"), err


def test_a_missing_mpirun_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommError, match=r"no mpirun found beside this Python or on PATH: pip install '.\[mpi\]' in the "
                                        "checkout brings MPICH; .* apt-get install mpich"):
        mpirun_command(2)


@pytest.mark.parametrize("version, root, arguments", (
    ("HYDRA build details: Version: 5.0.2", True, ["-disable-auto-cleanup", "-n", "3", "sh", "-c", DEAF, "sh"]),
    ("mpirun (Open MPI) 5.0.11", False, ["--oversubscribe", "-n", "3", "sh", "-c", PATIENT, "sh"]),
    ("mpirun (Open MPI) 4.1.6", True, ["--oversubscribe", "--allow-run-as-root", "-n", "3", "sh", "-c", PATIENT, "sh"]),
    ("another", True, ["-n", "3"])))
def test_launchers_are_told_what_they_need(monkeypatch, tmp_path, version, root, arguments):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    assert mpirun_command(3) == [str(program), *arguments]


# -- BLAS threads --------------------------------------------------------------------------------------------------


def cores(*rows):
    return np.array([[c in row for c in range(16)] for row in rows])


@pytest.mark.parametrize("everybody, quota, threads", (
    ([range(8)], None, 8),                              # one rank, eight cores
    ([range(8)] * 4, None, 2),                          # four ranks that share eight cores (MPICH)
    ([{0, 1}, {2, 3}, {4, 5}, {6, 7}], None, 2),        # bound to two cores each (Open MPI): not divided again
    ([{0}, {1}], None, 1),
    ([{0}] * 4, None, 1),                               # never 0
    ([range(8)], 2.0, 2),                               # a container with a quota of two cores
    ([range(8)] * 4, 4.0, 1),                           # the quota is for all ranks
    ([range(8)], 0.5, 1),
    ([{0, 1, 2, 3}, {0, 1}, {8}], None, 2)))            # only ranks that overlap count
def test_blas_threads_are_own_cores_by_overlapping_ranks_within_the_quota(everybody, quota, threads):
    rows = cores(*map(set, everybody))
    assert share_of_cores(rows[0], rows, quota) == threads


@pytest.mark.parametrize("text, quota", (
    ("200000 100000\n", 2.0), ("max 100000\n", None), ("50000 100000", 0.5), ("", None), ("x y", None)))
def test_the_control_groups_quota_is_read(tmp_path, text, quota):
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_cores(str(tmp_path / "cpu.max")) == quota
    assert cgroup_cores(str(tmp_path / "missing")) is None


THREADS = """
import numpy, threadpoolctl
from refimpl.comm.launch import set_blas_threads
set_blas_threads(1)
print(max([pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"], default=0))
"""


def test_threads_that_the_user_has_set_are_left_alone():
    pytest.importorskip("threadpoolctl")
    code, out, err, _ = python(THREADS, OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    assert code == 0 and int(out) in (0, 2), err        # 0: a BLAS that threadpoolctl does not know
    assert python(THREADS)[1] in ("1\n", "0\n")


def test_threads_are_set_unless_a_variable_is(monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    calls = []
    monkeypatch.setattr(threadpoolctl, "threadpool_limits", calls.append)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_blas_threads(3)
    assert calls == [3]
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "5")
        set_blas_threads(3)
        monkeypatch.delenv(name)
    assert calls == [3]


def test_ranks_as_threads_get_one_blas_thread_each(monkeypatch):
    calls = []
    monkeypatch.setattr(sys.modules[launch.__module__], "set_blas_threads", calls.append)
    launch(quiet, argv=["--simulate", "2"])
    assert calls == [1]


def quiet(comm):
    """Nothing to do."""
