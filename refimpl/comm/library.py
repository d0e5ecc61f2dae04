"""The MPI library.  This is the one file that imports mpi4py."""
import faulthandler
import signal
from contextlib import contextmanager
from functools import cache
from typing import Any, Iterator

import numpy as np

from refimpl.comm.arguments import CommError

INSTALL = ("pip install '.[mpi]' in the checkout brings MPICH; for the system's own (MPI=system) apt-get install mpich, or "
           "openmpi-bin and libopenmpi-dev")


PATIENCE = 60                                           # seconds that MPI_Init waits for the other ranks
VAIN = f"in {PATIENCE} s not all ranks came to MPI_Init: one of them ended before, see above, or is late"
START = compile("MPI.Init_thread()", VAIN, "exec")      # faulthandler says only tracebacks: VAIN is the file of this one


@cache
def find_mpi() -> Any:
    """The module mpi4py.MPI, not started.  Error: CommError with what to install."""
    try:
        import mpi4py
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(f"mpi4py cannot be imported ({error}): {INSTALL}") from None
    except RuntimeError as error:                       # the wheel found no MPI library
        raise CommError(f"no MPI library found ({str(error).splitlines()[0]}): {INSTALL}") from None
    return MPI


@cache
def load_mpi() -> Any:
    """The module mpi4py.MPI, started.  Error: as find_mpi.

    MPI_Init waits for all ranks, in MPICH for ever, and neither threads nor signal handlers of Python run meanwhile.  So an
    alarm ends a process that waits in vain.
    """
    MPI = find_mpi()
    if not MPI.Is_initialized():
        with alarm(PATIENCE):
            exec(START, {"MPI": MPI})
    return MPI


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """The body may take that long, then SIGALRM ends the process, with a traceback; none where SIGALRM has another use."""
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    faulthandler.register(signal.SIGALRM, 2, all_threads=False, chain=True)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.unregister(signal.SIGALRM)


def library(MPI: Any) -> str:
    """The library's name and version."""
    return " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")


@cache
def maximum(MPI: Any) -> Any:
    """The elementwise maximum as an MPI operation: MPI.MAX may lose a nan, numpy's maximum keeps it."""
    def larger(part: Any, total: Any, datatype: Any) -> None:
        into = np.frombuffer(total, datatype.tocode())
        np.maximum(np.frombuffer(part, datatype.tocode()), into, out=into)
    return MPI.Op.Create(larger, commute=True)
