"""MpiComm: the collectives by mpi4py, buffer calls only.

Checked mode (the default): before each collective the ranks exchange a hash of what they are about to do, without
blocking.  Where they differ, all of them raise the same sentence, instead of hanging or mixing up each other's data.
While they wait they look out for a verdict that the program cannot go on (watch.py).
"""
import math
import time
from typing import Any, Callable, Iterator

import numpy as np

from refimpl.array import Array, on_device
from refimpl.comm.arguments import CommError, require_agreement, shares
from refimpl.comm.base import Comm
from refimpl.comm.direct import direct
from refimpl.comm.ledger import Ledger
from refimpl.comm.library import load_mpi, maximum
from refimpl.comm.threads import combine
from refimpl.comm.transfer import Arrived, Moving
from refimpl.comm.watch import Watch
from refimpl.rng import fnv1a64

CLAIM_BYTES = 512                                       # how much of each rank's claim an error shows
LARGEST = 2**31 - 1                                     # elements of one message: MPI counts in C ints
ABANDONED: list[Any] = []                               # exchanges that others did not come to: MPI may still write to them


class MpiComm(Comm):
    """Ranks of an MPI communicator.

    checked   exchange a hash of every call before it; as much latency again, so a benchmark may turn it off
    watch     hears of ranks that fail, end or die, and says where this one waits
    largest   elements of one message; what is larger travels in pieces
    """

    def __init__(self, raw: Any, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None, checked: bool = True,
                 watch: Watch | None = None, largest: int = LARGEST) -> None:
        super().__init__(raw.Get_rank(), raw.Get_size(), axes, ledger)
        self.raw, self.MPI, self.checked, self.watch, self.largest = raw, load_mpi(), checked, watch, largest
        self.library_error = self.MPI.Exception
        self.patience = math.inf                        # seconds that it waits for the others where there is no watch to tell
        self.direct = False                             # arrays of a device are handed to MPI as they are (direct.py)
        self.subs: dict[Any, MpiComm] = {}              # MPI has a limited number of communicators: none is made twice
        self.under_way: list[Requests] = []             # shared with the sub-communicators
        group, world = raw.Get_group(), self.MPI.COMM_WORLD.Get_group()
        self.members = tuple(self.MPI.Group.Translate_ranks(group, list(range(self.size)), world))  # numbers in the world
        self.group = f"{self.name}:{','.join(map(str, self.members))}"

    # -- the ranks agree ---------------------------------------------------------------------------------------

    def _enter(self, operation: str, what: Callable[[], str], patience: float | None = None) -> None:
        if self.watch:
            self.watch.enter(self, operation, what)
        if self.checked:
            self.compare(self.claim(operation, what), patience)

    def _leave(self) -> None:
        if self.watch:
            self.watch.doing = None

    def _despair(self) -> None:
        if self.watch:
            self.watch.await_verdict()
            self.watch.require_hope()

    def compare(self, claim: str, patience: float | None) -> None:
        mine, hashes = np.array([fnv1a64(claim)], np.uint64), np.empty(self.size, np.uint64)
        request, start = self.raw.Iallgather(mine, hashes), time.monotonic()
        try:
            while not request.Test():                   # the other ranks may need this core, or never come
                waited = time.monotonic() - start
                if self.watch:
                    self.watch.require_hope()
                if waited > (patience or self.patience):
                    raise CommError(f"rank {self.members[self.rank]} waited {patience or self.patience:g} s for the others: "
                                    f"{claim}")
                if waited > 1e-4:
                    time.sleep(1e-6 if waited < 1e-2 else 1e-4)
        except BaseException:
            ABANDONED.append((request, mine, hashes))
            raise
        if (hashes != hashes[0]).any():                 # on all ranks, or on none
            raw, text = claim.encode(), np.zeros(CLAIM_BYTES, np.uint8)
            if len(raw) > CLAIM_BYTES:                  # they may be the same up to there
                raw = raw[:CLAIM_BYTES - 32] + f" ... (hash {mine[0]:x})".encode()
            text[:len(raw)] = np.frombuffer(raw, np.uint8)
            texts = np.empty((self.size, CLAIM_BYTES), np.uint8)
            self.raw.Allgather(text, texts)
            require_agreement([t.tobytes().rstrip(b"\0").decode(errors="ignore") for t in texts], self.members)

    def _sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        grid, key = tuple(dims.items()), (tuple(dims.items()), keep)
        if grid not in self.subs:
            sizes = tuple(dims.values())
            self.subs[grid] = self.like(self.raw.Create_cart(sizes, periods=[False] * len(sizes), reorder=False), tuple(dims))
        if key not in self.subs:
            self.subs[key] = self.like(self.subs[grid].raw.Sub([axis in keep for axis in dims]), keep)
        return self.subs[key]

    def like(self, raw: Any, axes: tuple[str, ...]) -> "MpiComm":
        comm = MpiComm(raw, axes, self.ledger, self.checked, self.watch, self.largest)
        comm.under_way, comm.direct, comm.patience = self.under_way, self.direct, self.patience
        return comm

    def _direct(self, operation: str, x: Array, args: tuple) -> Array | None:
        return direct(self.raw, operation, x, args, self.order, self.largest) if self.direct and on_device(x) else None

    # -- the collectives ---------------------------------------------------------------------------------------

    def _all_reduce(self, x: np.ndarray, how: str) -> np.ndarray:
        if self.order == "fixed":
            n = shares(x.size, self.size)
            mine = self.sum_in_order(x.reshape(-1), n, how)
            return self._all_gather(mine, n).reshape(x.shape)
        y = np.empty_like(x)
        if x.size <= self.largest:
            self.raw.Allreduce(x, y, self.operation(how))
        else:
            for part in self.pieces(0, x.size):
                self.raw.Allreduce(x.reshape(-1)[part], y.reshape(-1)[part], self.operation(how))
        return y

    def _reduce(self, x: np.ndarray, root: int) -> np.ndarray | None:
        if self.order == "fixed":
            n = tuple(x.size * (r == root) for r in range(self.size))
            total = self.sum_in_order(x.reshape(-1), n, "sum")
            return total.reshape(x.shape) if self.rank == root else None
        y = np.empty_like(x) if self.rank == root else None
        if x.size <= self.largest:
            self.raw.Reduce(x, y, self.MPI.SUM, root)
        else:
            for part in self.pieces(0, x.size):
                self.raw.Reduce(x.reshape(-1)[part], None if y is None else y.reshape(-1)[part], self.MPI.SUM, root)
        return y

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sum(sizes), *x.shape[1:]), x.dtype)
        if y.size > self.largest:
            flat, ends = y.reshape(-1), self.ends(x, sizes)
            flat[ends[self.rank]:ends[self.rank + 1]] = x.reshape(-1)
            for r in range(self.size):
                for part in self.pieces(ends[r], ends[r + 1]):
                    self.raw.Bcast(flat[part], r)
        elif len(set(sizes)) == 1:
            self.raw.Allgather(x, y)
        else:
            self.raw.Allgatherv(x, [y, np.diff(self.ends(x, sizes))])
        return y

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        y = np.empty((sizes[self.rank], *x.shape[1:]), x.dtype)
        if self.order == "fixed":
            y[...] = self.sum_in_order(x, sizes, "sum")
        elif x.size > self.largest:
            ends = self.ends(x, sizes)
            for r in range(self.size):
                for part in self.pieces(ends[r], ends[r + 1]):
                    into = y.reshape(-1)[part.start - ends[r]:part.stop - ends[r]] if r == self.rank else None
                    self.raw.Reduce(x.reshape(-1)[part], into, self.MPI.SUM, r)
        elif len(set(sizes)) == 1:
            self.raw.Reduce_scatter_block(x, y, self.MPI.SUM)
        else:
            self.raw.Reduce_scatter(x, y, np.diff(self.ends(x, sizes)), self.MPI.SUM)
        return y

    def _all_to_all(self, x: np.ndarray, table: np.ndarray | None) -> np.ndarray:
        if table is None and x.size <= self.largest:
            y = np.empty_like(x)
            self.raw.Alltoall(x, y)
            return y
        if table is None:
            table = np.full((self.size, self.size), len(x) // self.size)
        mine, theirs = table[self.rank], table[:, self.rank]
        y = np.empty((theirs.sum(), *x.shape[1:]), x.dtype)
        out, into = self.ends(x, mine), self.ends(x, theirs)
        longest = max(table.sum(axis=0).max(), table.sum(axis=1).max()) * math.prod(x.shape[1:])    # the same on all ranks
        if longest <= self.largest:
            self.raw.Alltoallv([x, (np.diff(out), out[:-1])], [y, (np.diff(into), into[:-1])])
            return y
        for step in range(self.size):                   # in pairs: to the rank `step` further on, from the one as far behind
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            Requests(self, y, self.messages(x, out[to], out[to + 1], to, y, into[source], into[source + 1], source)).wait()
        return y

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        y = x.copy() if self.rank == root else np.empty_like(x)
        if x.size <= self.largest:
            self.raw.Bcast(y, root)
        else:
            for part in self.pieces(0, y.size):
                self.raw.Bcast(y.reshape(-1)[part], root)
        return y

    def _barrier(self) -> None:
        if not self.checked:                            # else to agree on it was one
            self.raw.Barrier()

    def _permute(self, x: np.ndarray, source: int | None, target: int | None, sizes: tuple[int, ...]) -> np.ndarray | None:
        if source in (None, self.rank) or target is None or max(sizes) * math.prod(x.shape[1:]) > self.largest:
            return self._start_permute(x, source, target, sizes).wait()
        y = np.empty((sizes[source], *x.shape[1:]), x.dtype)
        self.raw.Sendrecv(x, target, 0, y, source, 0)
        return y

    def _start_permute(self, x: np.ndarray, source: int | None, target: int | None, sizes: tuple[int, ...]) -> Moving:
        if source == self.rank:
            return Arrived(x.copy())
        y = None if source is None else np.empty((sizes[source], *x.shape[1:]), x.dtype)
        n = 0 if y is None else y.size
        return Requests(self, y, self.messages(x, 0, x.size, target, y, 0, n, source))

    def _start_all_reduce(self, x: np.ndarray, how: str) -> Moving:
        if self.order == "fixed":
            return Arrived(self._all_reduce(x, how))
        y = np.empty_like(x)
        return Requests(self, y, [self.raw.Iallreduce(x.reshape(-1)[part], y.reshape(-1)[part], self.operation(how))
                                  for part in self.pieces(0, x.size)])

    def progress(self) -> None:
        """Move on what `start_...` began: MPI moves data only while it is called."""
        for moving in list(self.under_way):
            moving.test()

    # -- inside ------------------------------------------------------------------------------------------------

    def sum_in_order(self, x: np.ndarray, sizes: tuple[int, ...], how: str) -> np.ndarray:
        """This rank's share of the sum of all ranks' x, added up in pairs of neighbours."""
        parts = self._all_to_all(x, np.tile(np.array(sizes, np.int64), (self.size, 1)))
        return combine(list(parts.reshape(self.size, sizes[self.rank], *x.shape[1:])), how)

    def messages(self, x: np.ndarray, start: int, stop: int, target: int | None,
                 y: np.ndarray | None, first: int, last: int, source: int | None) -> list[Any]:
        """Receive elements first..last of y, then (so that nobody waits for a receiver) send start..stop of x."""
        requests = []
        if y is not None and source is not None:
            requests += [self.raw.Irecv(y.reshape(-1)[part], source) for part in self.pieces(first, last)]
        if target is not None:
            requests += [self.raw.Isend(x.reshape(-1)[part], target) for part in self.pieces(start, stop)]
        return requests

    def pieces(self, start: int, stop: int) -> Iterator[slice]:
        """start..stop, in pieces that one message can hold."""
        return (slice(a, min(a + self.largest, stop)) for a in range(start, stop, self.largest))

    def ends(self, x: np.ndarray, sizes: Any) -> np.ndarray:
        """Where each rank's elements begin and end, for rows of x shared out by `sizes`: int64[size + 1]."""
        return np.concatenate([[0], np.cumsum(sizes)]) * math.prod(x.shape[1:])

    def operation(self, how: str) -> Any:
        return self.MPI.SUM if how == "sum" else maximum(self.MPI)


class Requests:
    """Moving by MPI requests.  y is what arrives."""

    def __init__(self, comm: MpiComm, y: np.ndarray | None, requests: list[Any]) -> None:
        self.comm, self.y, self.requests, self.done = comm, y, requests, False
        comm.under_way.append(self)                     # which keeps the arrays alive, also where nobody waits

    def test(self) -> bool:
        if not self.done and self.comm.MPI.Request.Testall(self.requests):
            self.done = True
            self.comm.under_way.remove(self)
        return self.done

    def wait(self) -> np.ndarray | None:
        if not self.done:
            comm = self.comm
            inside = comm.watch and comm.watch.doing    # a collective, which has said what it is
            if comm.watch and not inside:
                comm.watch.doing = comm, 0, "a transfer", str
            try:
                comm.MPI.Request.Waitall(self.requests)
            except comm.library_error:
                comm._despair()
                raise
            finally:
                if not inside:
                    comm._leave()
            self.test()
        return self.y
