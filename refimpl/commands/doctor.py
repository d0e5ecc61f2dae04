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

from refimpl.comm import CommError, world
from refimpl.comm.launch import THREAD_VARIABLES, affinity, cgroup_cores, launched_rank, launcher, library, mpirun_command
from refimpl.comm.library import load_mpi

EXTRAS = {"threadpoolctl": ("run", "sets the BLAS threads of each rank"), "tqdm": ("run", "progress bars"),
          "matplotlib": ("run", "pictures"), "pytest": ("test", "the tests"), "mypy": ("test", "types"),
          "flake8": ("test", "style"), "isort": ("test", "import order")}
PROBE = r"import sys; from mpi4py import MPI; sys.stdout.write(f'{MPI.COMM_WORLD.Get_size()}\n')"  # one write a line
Row = tuple[str, str, str]                              # "ok" or "missing" or "wrong"; what; what was found or what to do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 where something is wrong (missing extras are not)."""
    rows = [row for part in (python_and_numpy, blas, mpi, gpu, extras) for row in part()]
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
    cores = f"{int(affinity().sum())} cores" + (f", cgroup quota {quota:g}" if quota else "")
    set_by = [f"{v}={os.environ[v]}" for v in THREAD_VARIABLES if os.environ.get(v)]
    try:
        import threadpoolctl
    except ImportError:
        yield "missing", "BLAS threads", f"{cores}; every rank uses them all: pip install '.[run]' or set OMP_NUM_THREADS"
        return
    started = launcher()
    ranks = started[1] if started else 1
    with suppress(CommError):                           # the rows on MPI say what is wrong
        world()                                         # sets the threads
    for pool in threadpoolctl.threadpool_info():
        yield "ok", "BLAS", f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads for this rank " \
            f"({', '.join(set_by) or f'{cores}, {ranks} ranks'})"


def mpi() -> Iterator[Row]:
    """The library that mpi4py loads, the launcher, and whether they belong together: tried with two ranks."""
    try:
        found = library(load_mpi())
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


def extras() -> Iterator[Row]:
    for name, (extra, purpose) in EXTRAS.items():
        try:
            yield "ok", name, f"{importlib.metadata.version(name)} ({purpose})"
        except importlib.metadata.PackageNotFoundError:
            yield "missing", name, f"{purpose}: pip install '.[{extra}]'"
