"""The ranks that a test runs on: threads of one process, or those of mpirun.

A test that takes `ranks` gives it a function of a communicator: `ranks.run(fn)`.  Started plainly, the test runs once for
each of THREAD_SIZES, on threads.  Started under mpirun (tests/run_mpi.py) only these tests are collected, and run on MPI's
ranks.  Assertions stand inside `fn`, so they run on all ranks; verdicts are gathered before one is raised.
"""
import itertools
from dataclasses import dataclass
from typing import Callable, Iterator

import pytest

from refimpl.comm import Comm, Mesh, run_threads, world
from refimpl.comm.launch import launcher, set_blas_threads

THREAD_SIZES = (1, 2, 3, 4, 8)
WORLD = world() if launcher() else None
set_blas_threads(1)


@dataclass
class Ranks:
    size: int

    def run(self, fn: Callable[[Comm], object]) -> None:
        """`fn(comm)` on every rank; if it fails on any, the test fails on all, with every rank's error."""
        if WORLD is None:
            run_threads(self.size, fn, timeout=60)
            return
        verdict = ""
        try:
            fn(WORLD)
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"
        verdicts = WORLD.gather_objects(verdict)
        assert not any(verdicts), "\n".join(f"rank {r}: {v}" for r, v in enumerate(verdicts) if v)

    def meshes(self) -> Iterator[dict[str, int]]:
        """Every dp x tp that these ranks can form."""
        for dp, tp in itertools.product(range(1, self.size + 1), repeat=2):
            if dp * tp == self.size:
                yield {"dp": dp, "tp": tp}

    def run_meshes(self, fn: Callable[[Mesh], object]) -> None:
        """`fn(mesh)` on every rank of every dp x tp."""
        for dims in self.meshes():
            self.run(lambda comm: fn(Mesh(**dims, comm=comm)))


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
