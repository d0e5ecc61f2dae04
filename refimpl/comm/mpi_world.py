"""MPI's world, and what makes its ranks end together."""
import os
import sys
import threading
from contextlib import contextmanager
from functools import cache
from typing import Any, Iterator

import numpy as np

from refimpl.comm.ending import Ending
from refimpl.comm.library import library, load_mpi
from refimpl.comm.links import Links
from refimpl.comm.mpi import MpiComm
from refimpl.comm.watch import Watch

SLOW = 60.0                                             # seconds that all ranks have to come here, at least


@cache
def mpi_world(checked: bool = True, timeout: float = 300.0) -> MpiComm:
    """MPI's world, made once, with what ends all ranks when one fails, ends early or dies (watch.py, ending.py).

    timeout  seconds that a rank waits in a collective before the ranks that are not there are a fault
    """
    MPI = load_mpi()
    raw = MPI.COMM_WORLD
    if raw.Get_size() == 1:
        return MpiComm(raw, checked=checked)
    ending = Ending(MPI)
    ending.install()
    with limited(max(timeout, SLOW)):
        ending.watch = watch = watch_over(raw, timeout)
    comm = MpiComm(raw, checked=checked, watch=watch)
    if watch:
        watch.progress = comm.progress
    else:
        comm.patience = timeout
    return comm


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End this process where the body, in which it waits for all ranks, takes longer."""
    def end() -> None:
        sys.stderr.write(f"not all ranks came to world() within {seconds:g} s: one ended before, see above, or is late\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch_over(raw: Any, timeout: float) -> Watch | None:
    """A watch of every rank, or of none, where they cannot connect to one another beside MPI."""
    rank, size, links, failure = raw.Get_rank(), raw.Get_size(), None, ""

    def gather(mine: bytes) -> list[bytes]:
        sizes = np.empty(size, np.int64)
        raw.Allgather(np.array([len(mine)]), sizes)
        everybodys = bytearray(int(sizes.sum()))
        raw.Allgatherv(mine, [everybodys, sizes])
        ends = np.cumsum(sizes)
        return [bytes(everybodys[e - n:e]) for e, n in zip(ends, sizes)]

    try:
        links = Links(rank, size, gather)
    except OSError as error:
        failure = str(error)
    failures = [f.decode() for f in gather(failure.encode())]
    if links and not any(failures):
        hurry = 0.17 if library(load_mpi()).startswith("Open MPI") else 1.0         # its launcher waits for 0.25 seconds
        return Watch(links, rank, size, timeout, hurry)
    if links:
        links.close()
    if rank == 0:
        print("refimpl: only the launcher will notice a rank that dies, the time-out one that ends early: the ranks are not "
              f"connected beside MPI ({next(filter(None, failures))})", file=sys.stderr)
    return None
