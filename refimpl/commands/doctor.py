"""python -m refimpl doctor: what this installation has, and for each missing thing what to do."""
import argparse
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from typing import Iterator

import numpy as np

from refimpl.comm import CommError, local_rank, world
from refimpl.comm.direct import probe
from refimpl.comm.launch import THREAD_VARIABLES, affinity, cgroup_cores, launched_rank, launcher, mpirun_command
from refimpl.comm.library import find_mpi, library
from refimpl.comm.mpi import MpiComm
from refimpl.comm.switches import SWITCHES, read_switches, unknown_switches

EXTRAS = {"threadpoolctl": ("run", "sets the BLAS threads of each rank"), "tqdm": ("run", "progress bars"),
          "matplotlib": ("run", "pictures"), "pytest": ("test", "the tests"), "mypy": ("test", "types"),
          "flake8": ("test", "style"), "isort": ("test", "import order")}
PROBE = r"import sys; from mpi4py import MPI; sys.stdout.write(f'{MPI.COMM_WORLD.Get_size()}\n')"  # one write a line
Row = tuple[str, str, str]                              # "ok" or "missing" or "wrong"; what; what was found or what to do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 where something is wrong (missing extras are not)."""
    rows = [row for part in (python_and_numpy, blas, mpi, ranks, switches, gpu, extras) for row in part()]
    if launched_rank():
        return 0
    for state, what, found in rows:
        print(f"{state:8}{what:16}{found}")
    return int(any(state == "wrong" for state, _, _ in rows))


def python_and_numpy() -> Iterator[Row]:
    yield "ok", "python", f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    yield "ok", "numpy", np.__version__


def blas() -> Iterator[Row]:
    """Which BLAS, with how many threads, and what decides that."""
    quota = cgroup_cores()
    cores = plural(int(affinity().sum()), "core") + (f", cgroup quota {quota:g}" if quota else "")
    set_by = [f"{v}={os.environ[v]}" for v in THREAD_VARIABLES if os.environ.get(v)]
    try:
        import threadpoolctl
    except ImportError:
        yield "missing", "BLAS threads", f"{cores}; every rank uses them all: pip install '.[run]' or set OMP_NUM_THREADS"
        return
    started = launcher()
    size = (started[1] or 1) if started else 1
    with suppress(CommError, ValueError):               # the rows on MPI and on switches say what is wrong
        world()                                         # sets the threads
    why = ", ".join(set_by) or f"{cores}, {plural(size, 'rank')}"
    for pool in threadpoolctl.threadpool_info():
        threads = plural(pool["num_threads"], "thread")
        yield "ok", "BLAS", f"{pool['internal_api']} {pool['version']}, {threads} for this rank ({why})"


def mpi() -> Iterator[Row]:
    """The library that mpi4py loads, the launcher, and whether they belong together: tried with two ranks."""
    try:
        found = library(find_mpi())
        yield "ok", "mpi4py", importlib.metadata.version("mpi4py")
        yield "ok", "MPI library", found
    except CommError as error:
        found = ""
        yield "missing", "MPI library", f"{error}; without it: one rank, and threads (--simulate)"
    started = launcher()
    try:
        if started:
            yield "ok", "launcher", f"{started[0]}, {world().size} ranks, and the library sees as many"
        elif found:
            yield try_two_ranks(mpirun_command(2), found)
        else:
            yield "ok", "launcher", f"{mpirun_command(2)[0]}, of no use without a library"
    except CommError as error:
        yield "wrong" if started else "missing", "launcher", str(error)
    except ValueError:                                  # the rows on switches say what is wrong
        pass


def try_two_ranks(command: list[str], found: str) -> Row:
    """Whether the launcher starts ranks that the library `found` sees."""
    try:
        done = subprocess.run([*command, sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "wrong", "launcher", f"{' '.join(command)} did not start two ranks within 60 s"
    if done.stdout.split() == ["2", "2"]:
        return "ok", "launcher", f"{command[0]}: two ranks started, two seen"
    return "wrong", "launcher", f"{' '.join(command)} started two ranks, which saw {done.stdout.split() or 'no'} ranks: " \
        f"use the mpirun of {found}.  {done.stderr.strip()[:300]}"


def ranks() -> Iterator[Row]:
    """Under a launcher, each rank: where it is, what it may use, and what watches over it."""
    if not launcher():
        return
    try:
        comm = world()
    except (CommError, ValueError):                     # the same on all ranks
        return
    mine = f"host {platform.node()}, local rank {local_rank(comm)}, {spans(affinity())}, {blas_threads()}"
    for rank, text in enumerate(comm.gather_texts(mine)):
        yield "ok", f"rank {rank}", text
    if isinstance(comm, MpiComm) and comm.size > 1:
        if comm.watch:
            yield "ok", "watch", "the ranks are connected beside MPI: a fault of one ends all with a sentence"
        else:
            yield "missing", "watch", "the ranks cannot connect beside MPI: only the launcher will notice a rank that dies"


def spans(cores: np.ndarray) -> str:
    """The cores that are True.

    >>> spans(np.array([True, True, False, True]))
    'cores 0-1,3'
    """
    numbers = np.flatnonzero(cores)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return f"core{'s' * (len(numbers) > 1)} " + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs if len(r))


def blas_threads() -> str:
    try:
        import threadpoolctl
    except ImportError:
        return "BLAS threads unknown"
    threads = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return plural(max(threads), "BLAS thread") if threads else "BLAS threads unknown"


def plural(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def switches() -> Iterator[Row]:
    for s in SWITCHES:
        try:
            s.value()
            yield "ok", "switch", f"{s.name}={s.text or s.default} ({'set' if s.text else 'default'}): {s.meaning}"
        except ValueError as error:
            yield "wrong", "switch", str(error)
    for name in unknown_switches():
        yield "wrong", "switch", f"{name} is not one of them"


def gpu() -> Iterator[Row]:
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        yield "missing", "cupy", "runs on the CPU; for GPUs: pip install '.[gpu]'"
    except Exception as error:                          # cupy without a driver raises its own errors
        yield "missing", "GPU", f"cupy is there, but no GPU: {str(error).splitlines()[0]}"
    else:
        yield "ok", "GPUs", f"{count}, cupy {cupy.__version__}"
    with suppress(ValueError):                          # (under a launcher the ranks have tried it by now)
        if read_switches().cuda_aware and not launcher():
            failure = probe()
            yield ("wrong", "CUDA-aware MPI", failure) if failure else ("ok", "CUDA-aware MPI", "takes GPU arrays on one rank")


def extras() -> Iterator[Row]:
    for name, (extra, purpose) in EXTRAS.items():
        try:
            yield "ok", name, f"{importlib.metadata.version(name)} ({purpose})"
        except importlib.metadata.PackageNotFoundError:
            yield "missing", name, f"{purpose}: pip install '.[{extra}]'"
