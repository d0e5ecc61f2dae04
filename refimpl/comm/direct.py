"""CUDA-aware MPI: arrays of a device are handed to MPI as they are.  Asked for by REFIMPL_CUDA_AWARE=1.

An MPI that was built without CUDA reads the pointer as one of the host's, and crashes.  So `probe` tries the calls below in a
child process first, with one rank; then the ranks try them together (`require`).  Only what was tried is done directly, and
everything else goes by way of the host (device.py).
"""
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from refimpl.array import Array, device_module, to_host, xp_of
from refimpl.comm.arguments import CommError
from refimpl.comm.device import settle
from refimpl.comm.library import library, load_mpi

CALLS = ("Allreduce", "Bcast", "Allgather", "Sendrecv")
N = 10                                                  # elements of the trial
PROGRAM = f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}]; from refimpl.comm.direct import child; " \
    "child(sys.argv[1])"
LAUNCHERS = ("PMI", "PRTE_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL", "HYD", "SLURM_")
ASK = "Use an MPI that was built with CUDA and its mpirun, or unset REFIMPL_CUDA_AWARE: arrays then go by way of the host"


# -- the calls ---------------------------------------------------------------------------------------------------------


def all_reduce(raw: Any, x: Array) -> Array:
    y = x.copy()                                        # in C order
    settle(y)                                           # x is made, and nothing queued still uses the memory that y got
    raw.Allreduce(load_mpi().IN_PLACE, y)
    settle(y)
    return y


def broadcast(raw: Any, x: Array, root: int) -> Array:
    y = x.copy()
    settle(y)
    raw.Bcast(y, root)
    settle(y)
    return y


def all_gather(raw: Any, x: Array) -> Array:
    rank, n = raw.Get_rank(), x.shape[0]
    y = xp_of(x).zeros((raw.Get_size() * n, *x.shape[1:]), x.dtype)
    y[rank * n:(rank + 1) * n] = x
    settle(y)
    raw.Allgather(load_mpi().IN_PLACE, y)
    settle(y)
    return y


def permute(raw: Any, x: Array, source: int, target: int, rows: int) -> Array:
    x, y = x.copy(), xp_of(x).zeros((rows, *x.shape[1:]), x.dtype)
    settle(y)
    raw.Sendrecv(x, target, 0, y, source, 0)
    settle(y)
    return y


def direct(raw: Any, operation: str, x: Array, args: tuple, order: str = "any", largest: int = 2**31 - 1) -> Array | None:
    """The result, on x's device, of the collective `operation` of base.py; None where it was not tried.

    Ranks of which some do it directly and others by way of the host understand one another: MPI is called alike.
    """
    rank, size = raw.Get_rank(), raw.Get_size()
    if not 0 < x.size <= largest // size:
        return None
    if operation == "all_reduce" and order == "any" and args == ("sum",):       # our maximum is made by numpy
        return all_reduce(raw, x)
    if operation == "broadcast":
        return broadcast(raw, x, *args)
    if operation == "all_gather" and len(set(args[0])) == 1:
        return all_gather(raw, x)
    if operation == "permute":
        source, target, sizes = args
        if None not in (source, target) and source != rank and len(set(sizes)) == 1:
            return permute(raw, x, source, target, sizes[source])
    return None


# -- the trial ---------------------------------------------------------------------------------------------------------


def trial(raw: Any, xp: Any) -> Iterator[tuple[str, bool]]:
    """Each of CALLS once: its name, and whether its numbers are right.  Made by all ranks together."""
    rank, size = raw.Get_rank(), raw.Get_size()
    first = np.arange(float(N))
    x = xp.asarray(first + rank)
    yield "Allreduce", same(all_reduce(raw, x), first * size + size * (size - 1) / 2)
    yield "Bcast", same(broadcast(raw, x, 0), first)
    yield "Allgather", same(all_gather(raw, x), np.concatenate([first + r for r in range(size)]))
    yield "Sendrecv", same(permute(raw, x, (rank - 1) % size, (rank + 1) % size, N), first + (rank - 1) % size)


def same(y: Array, expected: np.ndarray) -> bool:
    return bool((to_host(y) == expected).all())


def wrong(raw: Any, xp: Any) -> str:
    """Which calls give other numbers than they should, as a sentence; "" where none does."""
    calls = ", ".join([name for name, right in trial(raw, xp) if not right])
    return f"{calls} gave wrong numbers" if calls else ""


def child(device: str) -> None:
    """The child process: name each call that went well, so that after a crash it is known which did not."""
    try:
        for name, right in trial(load_mpi().COMM_SELF, device_module(device)):
            if not right:
                raise ValueError(f"{name} gave wrong numbers")
            print(name, flush=True)
    except (ValueError, CommError) as error:
        sys.exit(str(error))


@cache
def probe(device: str = "cupy", program: str = PROGRAM, seconds: float = 120.0) -> str:
    """Why MPI cannot be handed arrays of `device`, "" where it can: tried in a child process, with one rank."""
    try:
        done = subprocess.run([sys.executable, "-c", program, device], capture_output=True, text=True, timeout=seconds,
                              stdin=subprocess.DEVNULL, env=without_launcher(os.environ))
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {seconds:g} s"
    went_well, said = done.stdout.split(), done.stderr.strip().splitlines()
    call = next((name for name in CALLS if name not in went_well), "")
    if done.returncode == 0 and not call:
        return ""
    if done.returncode < 0:
        return f"{call or 'the end'} of a trial crashed ({signal.Signals(-done.returncode).name})"
    if done.returncode == 1 and said:                   # `child`, or Python, gives the reason
        return said[-1]
    return f"{call or 'the end'} of a trial ended with status {done.returncode}{': ' if said else ''}{said[-1] if said else ''}"


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is an MPI program of its own, started by a rank: not what the launcher told the rank,
    but what the user wants of MPI (OMPI_MCA_..., MPIR_CVAR_...)."""
    return {name: text for name, text in environment.items() if not name.startswith(LAUNCHERS) or "_MCA_" in name}


def require(comm: Any, local_rank: int, device: str = "cupy") -> None:
    """The trial: by one rank of each machine in a child process, then by all ranks together, each with its GPU.

    Error: CommError, the same on every rank, where MPI cannot be handed arrays of `device`.
    """
    together(comm, probe(device) if local_rank == 0 else "", device)
    xp, failure = None, ""
    try:
        xp = device_module(device, local_rank)
    except ValueError as error:
        failure = str(error)
    together(comm, failure, device)
    with comm.agreed("", lambda: "the trial of CUDA-aware MPI"):
        failure = wrong(comm.raw, xp)
    together(comm, failure, device)


def together(comm: Any, failure: str, device: str) -> None:
    """Error: CommError on every rank, where one has a failure."""
    failures = comm.gather_texts(failure)
    if any(failures):
        raise CommError(f"REFIMPL_CUDA_AWARE=1, but this MPI ({library(load_mpi())}) cannot be handed arrays of {device}: "
                        f"{next(filter(None, failures))}.  {ASK}")
