"""MpiComm: the collectives by mpi4py, buffer calls only.  This is the one file that imports mpi4py.

A rank that fails takes all down: an uncaught exception and a non-zero `sys.exit` print what they have to say and abort
the job, instead of leaving the other ranks in a collective for ever.
"""
import sys
import traceback
from types import TracebackType
from typing import Any

import numpy as np

from refimpl.comm.base import Comm, CommError
from refimpl.comm.ledger import Ledger


def load_mpi() -> Any:
    """The module mpi4py.MPI.  Error: CommError with what to install."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(f"mpi4py cannot be imported ({error}): pip install 'refimpl[mpi]'") from None
    except RuntimeError as error:                       # the wheel found no MPI library
        raise CommError(f"no MPI library found ({str(error).splitlines()[0]}): pip install 'refimpl[mpi]' brings MPICH, "
                        f"or install your system's MPI") from None
    return MPI


class MpiComm(Comm):
    """Ranks of an MPI communicator."""

    def __init__(self, raw: Any, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None) -> None:
        super().__init__(raw.Get_rank(), raw.Get_size(), axes, ledger)
        self.raw, self.MPI = raw, load_mpi()
        self.grids: dict[tuple[int, ...], Any] = {}

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        sizes = tuple(dims.values())
        if sizes not in self.grids:
            self.grids[sizes] = self.raw.Create_cart(sizes, periods=[False] * len(sizes), reorder=False)
        return MpiComm(self.grids[sizes].Sub([axis in keep for axis in dims]), keep, self.ledger)

    def _all_reduce(self, x: np.ndarray, how: str) -> np.ndarray:
        y = np.empty_like(x)
        self.raw.Allreduce(x, y, self.MPI.SUM if how == "sum" else self.MPI.MAX)
        return y

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sum(sizes), *x.shape[1:]), x.dtype)
        self.raw.Allgatherv(x, [y, self.counts(x, sizes)])
        return y

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sizes[self.rank], *x.shape[1:]), x.dtype)
        self.raw.Reduce_scatter(x, y, self.counts(x, sizes), self.MPI.SUM)
        return y

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        y = x.copy()
        self.raw.Bcast(y, root)
        return y

    def _barrier(self) -> None:
        self.raw.Barrier()

    @staticmethod
    def counts(x: np.ndarray, sizes: tuple[int, ...]) -> list[int]:
        """Elements per rank, for rows of `x` shared out by `sizes`."""
        row = int(np.prod(x.shape[1:], dtype=np.int64))
        return [n * row for n in sizes]


def mpi_world() -> MpiComm:
    """MPI's world, with the hooks that end all ranks when one fails."""
    MPI = load_mpi()
    world = MpiComm(MPI.COMM_WORLD)
    if world.size > 1 and not isinstance(sys.exit, AbortingExit):
        sys.excepthook = AbortingHook(MPI)
        sys.exit = AbortingExit(MPI)                    # type: ignore[assignment]
    return world


def abort(MPI: Any, code: int) -> None:
    """End all ranks now."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(code)


class AbortingHook:
    """sys.excepthook that prints the traceback under the rank's number and aborts the job."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"rank {self.MPI.COMM_WORLD.Get_rank()} failed, all ranks end:\n{text}")
        abort(self.MPI, 1)


class AbortingExit:
    """sys.exit that aborts the job when the status says failure: Python calls no hook for SystemExit."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, status: Any = None) -> None:
        if status is None or status == 0:
            raise SystemExit(status)
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
        abort(self.MPI, status if isinstance(status, int) else 1)
