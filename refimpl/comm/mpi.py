"""MpiComm: the collectives by mpi4py, buffer calls only.  This is the one file that imports mpi4py.

Checked mode (the default): before each collective the ranks exchange a hash of what they are about to do, without
blocking.  Where they differ, all of them raise the same sentence, instead of hanging or mixing up each other's data.
While they wait they look out for ranks that have ended (ending.py).
"""
import time
from functools import cache, cached_property
from typing import Any

import numpy as np

from refimpl.comm.base import Comm, CommError, require_agreement
from refimpl.comm.ending import Ending, end_together
from refimpl.comm.ledger import Ledger
from refimpl.rng import fnv1a64

CLAIM_BYTES = 512                                       # how much of each rank's claim an error shows
INSTALL = ("pip install '.[mpi]' in the checkout brings MPICH; for the system's own (MPI=system) apt-get install mpich, or "
           "openmpi-bin and libopenmpi-dev")


def load_mpi() -> Any:
    """The module mpi4py.MPI.  Error: CommError with what to install."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(f"mpi4py cannot be imported ({error}): {INSTALL}") from None
    except RuntimeError as error:                       # the wheel found no MPI library
        raise CommError(f"no MPI library found ({str(error).splitlines()[0]}): {INSTALL}") from None
    return MPI


class MpiComm(Comm):
    """Ranks of an MPI communicator.

    checked   exchange a hash of every call before it; as much latency again, so a benchmark may turn it off
    ending    knows which ranks have ended: a checked call that waits for one of them is an error at once
    timeout   seconds that a checked call waits for the other ranks before it is an error
    """

    def __init__(self, raw: Any, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None, checked: bool = True,
                 ending: Ending | None = None, timeout: float = 300.0) -> None:
        super().__init__(raw.Get_rank(), raw.Get_size(), axes, ledger)
        self.raw, self.MPI, self.checked, self.ending, self.timeout = raw, load_mpi(), checked, ending, timeout
        self.subs: dict[Any, MpiComm] = {}              # MPI has a limited number of communicators: none is made twice

    def _agree(self, claim: str, patience: float | None = None) -> None:
        if not self.checked:
            return
        if self.ending:
            self.ending.met[self.world_ranks] += 1
        mine, hashes = np.array([fnv1a64(claim)], np.uint64), np.empty(self.size, np.uint64)
        self.wait(self.raw.Iallgather(mine, hashes), claim, patience or self.timeout)
        if (hashes != hashes[0]).any():                 # on all ranks, or on none
            text = np.zeros(CLAIM_BYTES, np.uint8)
            raw = claim.encode()[:CLAIM_BYTES]
            text[:len(raw)] = np.frombuffer(raw, np.uint8)
            texts = np.empty((self.size, CLAIM_BYTES), np.uint8)
            self.raw.Allgather(text, texts)
            claims = [t.tobytes().rstrip(b"\0").decode(errors="ignore") for t in texts]
            require_agreement(claims, self.world_ranks)

    def wait(self, request: Any, claim: str, patience: float) -> None:
        """Poll: the other ranks may need this core, and one that never comes must become an error."""
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > patience:
                raise CommError(f"rank {self.world_ranks[self.rank]} waited {patience:g} s in {claim}; not all of the ranks "
                                f"{', '.join(map(str, self.world_ranks))} came")
            if waited > 1e-2 and self.ending:
                self.ending.require_hope(self.world_ranks, claim)
            if waited > 1e-4:
                time.sleep(1e-6 if waited < 1e-2 else 1e-4)

    @cached_property
    def world_ranks(self) -> list[int]:
        """The numbers in the world of this communicator's ranks."""
        group, world = self.raw.Get_group(), self.MPI.COMM_WORLD.Get_group()
        return list(self.MPI.Group.Translate_ranks(group, list(range(self.size)), world))

    def _sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        grid, key = tuple(dims.items()), (tuple(dims.items()), keep)
        if grid not in self.subs:
            sizes = tuple(dims.values())
            raw = self.raw.Create_cart(sizes, periods=[False] * len(sizes), reorder=False)
            self.subs[grid] = MpiComm(raw, tuple(dims), self.ledger, self.checked, self.ending, self.timeout)
        if key not in self.subs:
            raw = self.subs[grid].raw.Sub([axis in keep for axis in dims])
            self.subs[key] = MpiComm(raw, keep, self.ledger, self.checked, self.ending, self.timeout)
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


@cache
def mpi_world(checked: bool = True) -> MpiComm:
    """MPI's world, made once, with the hooks that end all ranks when one fails or ends early (ending.py)."""
    MPI = load_mpi()
    ending = end_together(MPI) if MPI.COMM_WORLD.Get_size() > 1 else None
    return MpiComm(MPI.COMM_WORLD, checked=checked, ending=ending)
