"""Localises faults of run_mpi.py and conftest.py: a test under mpirun that hangs for ever, or fails on one rank unnoticed."""
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command

HERE = Path(__file__).parent
SOON = 40                                               # seconds in which the planted fault must have ended the run
PLANTED = """
import time
import conftest
conftest.PATIENCE = 1

def test_planted(ranks):
    def check(comm):
        if comm.rank == 1:
            {fault}
        {others}
    ranks.run(check)
"""
FAULTS = {                                              # what rank 1 does, what both do then, what must be said
    "endless": ("time.sleep(600)", "pass", "Timeout (0:00:03)!"),
    "endless while others wait in a collective": ("time.sleep(600)", "comm.barrier()", "Timeout (0:00:03)!"),
    "stuck in a call of MPI": ("comm.raw.Barrier()", "pass", "Timeout (0:00:03)!"),
    "fails while others wait": ("assert not 'planted'", "comm.barrier()", "This rank failed, others still wait for it"),
    "fails alone": ("assert not 'planted'", "pass", "rank 1: Traceback"),
}


def run_mpi(*arguments, **environment):
    return subprocess.run([sys.executable, str(HERE / "run_mpi.py"), *arguments], capture_output=True, text=True, timeout=90,
                          stdin=subprocess.DEVNULL, cwd=HERE.parent, env=os.environ | environment)


@pytest.fixture
def planted(tmp_path):
    try:
        mpirun_command(2)
    except CommError as error:
        pytest.skip(str(error))

    def run(fault, others):
        (tmp_path / "test_planted.py").write_text(PLANTED.format(fault=fault, others=others))
        return run_mpi("2", "-p", "conftest", "-o", "faulthandler_timeout=3", str(tmp_path), PYTHONPATH=str(HERE))
    return run


@pytest.mark.parametrize("case", FAULTS)
def test_a_test_that_hangs_or_fails_on_one_rank_ends_the_run_and_is_named(planted, case):
    fault, others, said = FAULTS[case]
    start = time.monotonic()
    done = planted(fault, others)
    assert done.returncode != 0 and time.monotonic() - start < SOON
    assert said in done.stdout + done.stderr, done.stdout + done.stderr
    assert "test_planted" in done.stdout + done.stderr


def test_a_test_that_passes_passes(planted):
    done = planted("pass", "comm.barrier()")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_without_mpi_it_says_what_to_install(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('planted')")
    done = run_mpi("2", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "run_mpi.py: mpi4py cannot be imported (planted)" in done.stderr and "apt-get install mpich" in done.stderr


@pytest.mark.parametrize("failures, runs", ((0, 1), (1, 2), (2, 3), (9, 3)))
def test_an_mpirun_that_could_not_start_itself_starts_again(failures, runs, monkeypatch, tmp_path):
    """At most twice; every other end is the end."""
    sys.path.insert(0, str(HERE))
    try:
        module = importlib.import_module("run_mpi")
    finally:
        sys.path.remove(str(HERE))
    count = tmp_path / "count"
    script = f"echo x >>{count}; [ $(wc -l <{count}) -gt {failures} ] || exit {module.UNABLE}; exit 7"
    monkeypatch.setattr(module, "mpirun_command", lambda n: ["sh", "-c", script])
    assert module.start(2, []) == (module.UNABLE if failures > 2 else 7)
    assert len(count.read_text().splitlines()) == runs
