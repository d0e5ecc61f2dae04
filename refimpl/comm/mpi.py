"""MpiComm: the collectives by mpi4py, buffer calls only.  This is the one file that imports mpi4py.

Checked mode (the default): before each collective the ranks exchange a hash of what they are about to do, without
blocking.  Where they differ, all of them raise the same sentence, instead of hanging or mixing up each other's data.

A rank that fails takes all down: an uncaught exception and a non-zero `sys.exit` print what they have to say and abort
the job, instead of leaving the other ranks in a collective for ever.
"""
import sys
import time
import traceback
from types import TracebackType
from typing import Any

import numpy as np

from refimpl.comm.base import Comm, CommError, require_agreement
from refimpl.comm.ledger import Ledger
from refimpl.rng import fnv1a64

CLAIM_BYTES = 512                                       # how much of each rank's claim an error shows
FORWARDING = 0.5                                        # seconds for the launcher to pass on what a rank said before it aborts


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
    """Ranks of an MPI communicator.

    checked   exchange a hash of every call before it; as much latency again, so a benchmark may turn it off
    timeout   seconds that a checked call waits for the other ranks before it is an error
    """

    def __init__(self, raw: Any, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None, checked: bool = True,
                 timeout: float = 300.0) -> None:
        super().__init__(raw.Get_rank(), raw.Get_size(), axes, ledger)
        self.raw, self.MPI, self.checked, self.timeout = raw, load_mpi(), checked, timeout
        self.subs: dict[Any, MpiComm] = {}              # MPI has a limited number of communicators: none is made twice

    def _agree(self, claim: str, patience: float | None = None) -> None:
        if not self.checked:
            return
        mine, hashes = np.array([fnv1a64(claim)], np.uint64), np.empty(self.size, np.uint64)
        self.wait(self.raw.Iallgather(mine, hashes), claim, patience or self.timeout)
        if (hashes != hashes[0]).any():                 # on all ranks, or on none
            text = np.zeros(CLAIM_BYTES, np.uint8)
            raw = claim.encode()[:CLAIM_BYTES]
            text[:len(raw)] = np.frombuffer(raw, np.uint8)
            texts = np.empty((self.size, CLAIM_BYTES), np.uint8)
            self.raw.Allgather(text, texts)
            claims = [t.tobytes().rstrip(b"\0").decode(errors="ignore") for t in texts]
            require_agreement(claims, self.world_ranks())

    def wait(self, request: Any, claim: str, patience: float) -> None:
        """Poll: the other ranks may need this core, and one that never comes must become an error."""
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > patience:
                raise CommError(f"rank {self.world_ranks()[self.rank]} waited {patience:g} s in {claim}; not all of the ranks "
                                f"{', '.join(map(str, self.world_ranks()))} came")
            if waited > 1e-4:
                time.sleep(1e-6 if waited < 1e-2 else 1e-4)

    def world_ranks(self) -> list[int]:
        """The numbers in the world of this communicator's ranks."""
        group, world = self.raw.Get_group(), self.MPI.COMM_WORLD.Get_group()
        return list(self.MPI.Group.Translate_ranks(group, list(range(self.size)), world))

    def _sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        grid, key = tuple(dims.items()), (tuple(dims.items()), keep)
        if grid not in self.subs:
            sizes = tuple(dims.values())
            raw = self.raw.Create_cart(sizes, periods=[False] * len(sizes), reorder=False)
            self.subs[grid] = MpiComm(raw, tuple(dims), self.ledger, self.checked, self.timeout)
        if key not in self.subs:
            raw = self.subs[grid].raw.Sub([axis in keep for axis in dims])
            self.subs[key] = MpiComm(raw, keep, self.ledger, self.checked, self.timeout)
        return self.subs[key]

    def _all_reduce(self, x: np.ndarray, how: str) -> np.ndarray:
        y = np.empty_like(x)
        if how == "sum":
            self.raw.Allreduce(x, y, self.MPI.SUM)
        else:                                           # MPI.MAX may lose a nan: numpy's maximum keeps it
            op = self.MPI.Op.Create(maximum, commute=True)
            self.raw.Allreduce(x, y, op)
            op.Free()
        return y

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sum(sizes), *x.shape[1:]), x.dtype)
        self.raw.Allgatherv(x, [y, counts(x, sizes)])
        return y

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sizes[self.rank], *x.shape[1:]), x.dtype)
        self.raw.Reduce_scatter(x, y, counts(x, sizes), self.MPI.SUM)
        return y

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        y = x.copy()
        self.raw.Bcast(y, root)
        return y

    def _barrier(self) -> None:
        self.raw.Barrier()


def counts(x: np.ndarray, sizes: tuple[int, ...]) -> list[int]:
    """Elements per rank, for rows of `x` shared out by `sizes`."""
    row = int(np.prod(x.shape[1:], dtype=np.int64))
    return [n * row for n in sizes]


def maximum(part: Any, total: Any, datatype: Any) -> None:
    """The elementwise maximum as an MPI operation on two raw buffers."""
    into = np.frombuffer(total, datatype.tocode())
    np.maximum(np.frombuffer(part, datatype.tocode()), into, out=into)


def mpi_world(checked: bool = True) -> MpiComm:
    """MPI's world, with the hooks that end all ranks when one fails."""
    MPI = load_mpi()
    world = MpiComm(MPI.COMM_WORLD, checked=checked)
    if world.size > 1 and not isinstance(sys.exit, AbortingExit):
        sys.excepthook = AbortingHook(MPI)
        sys.exit = AbortingExit(MPI)                    # type: ignore[assignment]
    return world


class AbortingHook:
    """sys.excepthook that prints the traceback under the rank's number and aborts the job."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        abort(self.MPI, 1, "failed", "".join(traceback.format_exception(kind, error, trace)))


class AbortingExit:
    """sys.exit that aborts the job when the status says failure: Python calls no hook for SystemExit."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, status: Any = None) -> None:
        if status is None or status == 0:
            raise SystemExit(status)
        number = status if isinstance(status, int) else 1
        abort(self.MPI, number, f"exits with status {number}", "" if number is status else f"{status}\n")


def abort(MPI: Any, code: int, what: str, text: str) -> None:
    """Say why and end all ranks now."""
    sys.stdout.flush()
    sys.stderr.write(f"rank {MPI.COMM_WORLD.Get_rank()} {what}, all ranks end:\n{text}" if text else
                     f"rank {MPI.COMM_WORLD.Get_rank()} {what}, all ranks end\n")
    sys.stderr.flush()
    time.sleep(FORWARDING)
    MPI.COMM_WORLD.Abort(code)
