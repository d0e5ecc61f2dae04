"""The MPI library.  This is the one file that imports mpi4py."""
from functools import cache
from typing import Any

import numpy as np

from refimpl.comm.arguments import CommError

INSTALL = ("pip install '.[mpi]' in the checkout brings MPICH; for the system's own (MPI=system) apt-get install mpich, or "
           "openmpi-bin and libopenmpi-dev")


@cache
def load_mpi() -> Any:
    """The module mpi4py.MPI.  Error: CommError with what to install."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(f"mpi4py cannot be imported ({error}): {INSTALL}") from None
    except RuntimeError as error:                       # the wheel found no MPI library
        raise CommError(f"no MPI library found ({str(error).splitlines()[0]}): {INSTALL}") from None
    return MPI


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
