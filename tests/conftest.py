"""The ranks that a test runs on: threads of one process, or those of mpirun.

A test that takes `ranks` gives it a function of a communicator: `ranks.run(fn)`.  Started plainly, the test runs once for
each of THREAD_SIZES, on threads.  Started under mpirun (tests/run_mpi.py) only these tests are collected, and run on MPI's
ranks.  Assertions stand inside `fn`, so they run on all ranks; verdicts are gathered before one is raised.
"""
import itertools
import os
import sys
import time
import traceback
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Callable, Iterator

import pytest

from refimpl.comm import Comm, Mesh, run_threads, world
from refimpl.comm.launch import launcher, set_blas_threads

THREAD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
PATIENCE = 20.0                                         # seconds from one rank's failure to the end of the run
WORLD = world() if launcher() else None
APART = WORLD.raw.Dup() if WORLD is not None else None
PYTEST: list[pytest.Config] = []
set_blas_threads(1)


@dataclass
class Ranks:
    size: int

    def run(self, fn: Callable[[Comm], object]) -> None:
        """`fn(comm)` on every rank; if it fails on any, the test fails on all, with every rank's traceback."""
        if WORLD is None:
            run_threads(self.size, fn, timeout=60)
            return
        verdict = ""
        WORLD.ledger.clear()
        try:
            fn(WORLD)
        except KeyboardInterrupt:
            raise
        except BaseException:                           # pytest.fail and pytest.raises raise no Exception
            verdict = traceback.format_exc()
            wait_for_the_others(verdict)
        else:
            wait_for_the_others("")
        verdicts = WORLD.gather_texts(verdict)
        if any(verdicts):
            pytest.fail("\n".join(f"rank {r}: {v}" for r, v in enumerate(verdicts) if v), pytrace=False)

    def run_mpi(self, fn: Callable[[Comm], object]) -> None:
        """The same where the ranks are MPI's."""
        if WORLD is None:
            pytest.skip("for the ranks of mpirun")
        self.run(fn)

    def meshes(self) -> Iterator[dict[str, int]]:
        """Every dp x tp that these ranks can form."""
        for dp, tp in itertools.product(range(1, self.size + 1), repeat=2):
            if dp * tp == self.size:
                yield {"dp": dp, "tp": tp}

    def cut_meshes(self) -> Iterator[dict[str, int]]:
        """Every dp x cp x tp that these ranks can form and that cuts sequences: cp > 1."""
        for dp, cp, tp in itertools.product(range(1, self.size + 1), range(2, self.size + 1), range(1, self.size + 1)):
            if dp * cp * tp == self.size:
                yield {"dp": dp, "cp": cp, "tp": tp}

    def run_meshes(self, fn: Callable[[Mesh], object], cut: bool = False) -> None:
        """`fn(mesh)` on every rank of every dp x tp; with `cut`, of every mesh that cuts sequences."""
        for dims in self.cut_meshes() if cut else self.meshes():
            self.run(lambda comm: fn(Mesh(**dims, comm=comm)))


def wait_for_the_others(verdict: str) -> None:
    """Under MPI: meet the other ranks apart from all collectives under test.  If this rank failed and they wait for it in
    one of those, say why and end them all."""
    request, start = APART.Ibarrier(), time.monotonic()
    while not request.Test():
        time.sleep(1e-4)
        if verdict and time.monotonic() - start > PATIENCE:
            PYTEST[0].pluginmanager.getplugin("capturemanager").suspend_global_capture()
            sys.stderr.write(f"This rank failed, others still wait for it in a collective:\n{verdict}")
            sys.exit(1)


def pytest_configure(config):
    PYTEST.append(config)
    if WORLD is None:                                   # what a killed mpirun leaves under its process number, no later one
        folder = TemporaryDirectory(ignore_cleanup_errors=True)             # of that number must find (openpmix issue 4022)
        os.environ["TMPDIR"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_generate_tests(metafunc):
    if "ranks" in metafunc.fixturenames:
        sizes = THREAD_SIZES if WORLD is None else (WORLD.size,)
        where = "threads" if WORLD is None else "mpi"
        metafunc.parametrize("ranks", [Ranks(n) for n in sizes], ids=[f"{where}{n}" for n in sizes])


def pytest_collection_modifyitems(config, items):
    if WORLD is not None:
        chosen = [item for item in items if "ranks" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def ranks(request):                                     # always parametrised by pytest_generate_tests
    return request.param
