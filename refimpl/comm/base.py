"""The one interface of all communicators, and the serial one.

A communicator joins the ranks along one or more mesh axes and knows their names.  The methods here check their arguments
(arguments.py), let the ranks agree on what they are about to do, count in the ledger, and are seams, so that recorders see
what travels; a backend supplies `_all_reduce` and its kin for contiguous host arrays; an array on a device travels by way
of the host (device.py), or where MPI is CUDA-aware and asked to, directly (direct.py).  Arguments are never written to;
results are new arrays, except on one rank, where every collective is the identity.
"""
import copy
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np

from refimpl.array import Array
from refimpl.autograd import stack
from refimpl.comm.arguments import (CommError, Pairs, as_dtype, axis_of, check_array, check_rank, check_reduction, collective,
                                    form, ring_pairs, route_of, shares_of, sizes_of, table_of, widened)
from refimpl.comm.device import fetched, returned
from refimpl.comm.ledger import Ledger
from refimpl.comm.transfer import Arrived, Moving, Transfer

T = TypeVar("T")
C = TypeVar("C", bound="Comm")


class Comm:
    """`size` ranks along the mesh axes `axes`; this one is `rank`.

    checked  ranks agree on what they do before they do it (ThreadComm: always)
    order    "any": sums as the backend likes; "fixed": in pairs of neighbours, the same bits under every backend

    Errors, on every rank where `checked`: TypeError or ValueError where all ranks give the same wrong arguments, CommError
    where the ranks differ in operation, shape, dtype or other arguments, or where one of them does not come.
    """

    library_error: type[BaseException] | tuple = ()     # what a backend's library raises

    def __init__(self, rank: int, size: int, axes: tuple[str, ...], ledger: Ledger | None = None) -> None:
        self.rank, self.size, self.axes, self.name, self.order = rank, size, axes, "+".join(axes), "any"
        self.checked = True
        self.ledger = ledger if ledger is not None else Ledger()

    def fixed_order(self: C) -> C:
        """The same ranks, whose sums (and whose sub-communicators' sums) are made in pairs: (0+1) + (2+3), (0+1) + 2.

        Chunks change places (all_to_all), each rank sums its own in that order, all_gather: as much travels as in a ring.
        """
        comm = copy.copy(self)
        comm.order = "fixed"
        return comm

    @collective
    def all_reduce(self, x: Array, how: str = "sum") -> Array:
        """The sum (or max) over ranks of x, on every rank.  Shapes: x[...] -> y[...], equal on all ranks."""
        check_array(x)
        check_reduction(x, how)
        if self.size == 1:
            return x
        return as_dtype(self.run("all_reduce", lambda: f"{how} of {form(x)}", widened(x), how), x.dtype)

    @collective
    def reduce(self, x: Array, root: int = 0) -> Array | None:
        """The sum over ranks of x, on rank `root`; None on the others.  Shapes: x[...] -> y[...], equal on all ranks."""
        check_array(x)
        check_reduction(x)
        check_rank(root, self.size)
        if self.size == 1:
            return x
        y = self.run("reduce", lambda: f"sum of {form(x)} on rank {root}", widened(x), root)
        return None if y is None else as_dtype(y, x.dtype)

    @collective
    def all_gather(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The ranks' arrays joined along `axis`, on every rank.

        Shapes: x[.., n_r, ..] -> y[.., n_0 + n_1 + .., ..].  `sizes` are the n_r where they are not all equal.
        """
        check_array(x)
        axis = axis_of(x, axis)
        n = sizes_of(x, axis, sizes, self.rank, self.size)
        if self.size == 1:
            return x
        if axis == 0:
            return self.run("all_gather", lambda: f"{form(x, 0)}, sizes {n}", x, n)
        rows = x.swapaxes(0, axis)                      # backends join along axis 0
        return self.run("all_gather", lambda: f"{form(x, axis)} along axis {axis}, sizes {n}", rows, n).swapaxes(0, axis)

    @collective
    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The sum over ranks of x, cut along `axis`: every rank gets its share.

        Shapes: x[.., n, ..] -> y[.., n_r, ..].  `sizes` are the shares n_r; default `shares(n, size)`.
        """
        check_array(x)
        check_reduction(x)
        axis = axis_of(x, axis)
        n = shares_of(x, axis, sizes, self.size)
        if self.size == 1:
            return x
        rows = widened(x).swapaxes(0, axis) if axis else widened(x)
        y = self.run("reduce_scatter", lambda: f"{form(x)} along axis {axis}, shares {n}", rows, n)
        return as_dtype(y.swapaxes(0, axis) if axis else y, x.dtype)

    @collective
    def all_to_all(self, x: Array, counts: Any = None) -> Array:
        """Every rank's rows, each to the rank that it is for.

        `counts[source][target]` is how many rows go where, the same table on every rank; None for equal shares.
        Shapes: x[n_r, ...] -> y[m_r, ...]: n_r is the sum of row r, m_r of column r.  The rows of x lie in the order of
        their targets, those of y in the order of their sources.
        """
        check_array(x)
        table = table_of(x, counts, self.rank, self.size)
        if self.size == 1:
            return x
        if table is None:
            return self.run("all_to_all", lambda: f"{form(x)}, equal shares", x, None)
        return self.run("all_to_all", lambda: f"{form(x, 0)}, counts {table.tolist()}", x, table)

    @collective
    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Rank `root`'s x, on every rank.  Shapes: equal on all ranks; the others' x gives shape and dtype only."""
        check_array(x)
        check_rank(root, self.size)
        return x if self.size == 1 else self.run("broadcast", lambda: f"{form(x)} from rank {root}", x, root)

    @collective
    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            with self.agreed("barrier", str):
                self._barrier()

    @collective
    def permute(self, x: Array, pairs: Pairs, sizes: Sequence[int] | None = None) -> Array | None:
        """Rank `source`'s x on rank `target`, for each (source, target) of `pairs`; None on a rank that is no target.

        Shapes: x[n_r, ...] -> y[n_source, ...].  `sizes` are the n_r of all ranks where they are not equal.  No rank
        sends, or is sent to, twice.  All ranks call it.  JAX: `ppermute`
        """
        source, target, n, sent, what = route_of(x, pairs, sizes, self.rank, self.size)
        if self.size == 1:
            return None if source is None else x
        return self.run("permute", what, x, source, target, n, payload=sent, wire=sent)

    @collective
    def start_permute(self, x: Array, pairs: Pairs, sizes: Sequence[int] | None = None) -> Transfer:
        """`permute`, of which the result can be waited for later.  x must not change until then."""
        source, target, n, sent, what = route_of(x, pairs, sizes, self.rank, self.size)
        if self.size == 1:
            return Transfer(Arrived(None if source is None else x), fetched(x), self.checked)
        return self.start("permute", what, x, source, target, n, payload=sent, wire=sent)

    def ring(self, x: Array, shift: int = 1, sizes: Sequence[int] | None = None) -> Array:
        """The x of rank `rank - shift`: every rank sends to rank + shift, round the ring.  Shapes: see `permute`."""
        return self.permute(x, ring_pairs(shift, self.size), sizes)

    def start_ring(self, x: Array, shift: int = 1, sizes: Sequence[int] | None = None) -> Transfer:
        """`ring`, of which the result can be waited for later."""
        return self.start_permute(x, ring_pairs(shift, self.size), sizes)

    @collective
    def start_all_reduce(self, x: Array, how: str = "sum") -> Transfer:
        """`all_reduce`, of which the result can be waited for later.  x must not change until then."""
        check_array(x)
        check_reduction(x, how)
        if self.size == 1:
            return Transfer(Arrived(x), fetched(x), self.checked)
        return self.start("all_reduce", lambda: f"{how} of {form(x)}", widened(x), how, payload=x.size, dtype=x.dtype)

    def progress(self) -> None:
        """Move on what `start_...` began, on any communicator of this rank: call it between pieces of a computation."""

    def agree(self, claim: str, patience: float | None = None) -> None:
        """Every rank says what it is about to do, or what it holds: CommError on all, where they differ, if `checked`."""
        if self.size > 1:
            with self.agreed("", lambda: claim, patience):
                pass

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank (verdicts, error sentences; travels as bytes)."""
        raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        sizes = self.all_gather(np.array([raw.size]), axis=0).tolist()
        joined = self.all_gather(raw, axis=0, sizes=sizes).tobytes()
        ends = np.cumsum(sizes)
        return [joined[e - n:e].decode("utf-8", "surrogatepass") for e, n in zip(ends, sizes)]

    def on_first(self, act: Callable[[], T]) -> T | None:
        """What `act` gives on rank 0, None on the others.  Its OSError or ValueError is the same ValueError on every rank."""
        result, failure = None, ""
        if self.rank == 0:
            try:
                result = act()
            except (OSError, ValueError) as error:
                failure = str(error)
        failure = self.gather_texts(failure)[0]
        if failure:
            raise ValueError(failure)
        return result

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> "Comm":
        """The ranks that differ from this one along the mesh axes `keep` only; `dims` are the mesh's axes and sizes."""
        if self.size == 1:
            return SerialComm(keep, self.ledger)
        self.agree(f"the making of a communicator over {'+'.join(keep)} of the mesh {dims}")
        comm = self._sub(dims, keep)
        return comm.fixed_order() if self.order == "fixed" else comm

    def coordinates(self, dims: dict[str, int]) -> dict[str, int]:
        """This rank's place in a mesh of `dims`, whose last axis varies fastest."""
        return dict(zip(dims, map(int, np.unravel_index(self.rank, tuple(dims.values())))))

    # -- inside ------------------------------------------------------------------------------------------------

    def run(self, operation: str, what: Callable[[], str], x: Array, *args: Any, payload: int | None = None,
            wire: int = 0) -> Any:
        """The backend's `_operation`, once the ranks have agreed on it."""
        start = time.perf_counter()
        with self.agreed(operation, what):
            y = self._carry(operation, x, args)
        n = x.size if payload is None else payload
        self.ledger.totals[self.name, operation, stack.phase].add(n, n * x.dtype.itemsize, time.perf_counter() - start, wire)
        return y

    def _carry(self, operation: str, x: Array, args: tuple) -> Array | None:
        """The backend's `_operation`, of an array of the host or of a device."""
        act = getattr(self, "_" + operation)
        if type(x) is np.ndarray:
            return act(fetched(x), *args)
        y = self._direct(operation, x, args)
        y = act(fetched(x), *args) if y is None else y
        return None if y is None else returned(y, x)

    def _direct(self, operation: str, x: Array, args: tuple) -> Array | None:
        """The same where a backend takes arrays of a device as they are; None where it does not."""

    def start(self, operation: str, what: Callable[[], str], x: Array, *args: Any, payload: int, wire: int = 0,
              dtype: Any = None) -> Transfer:
        """The backend's `_start_operation`, once the ranks have agreed on it; what comes becomes `dtype`."""
        start = time.perf_counter()
        with self.agreed(operation, what):
            sent = fetched(x)
            moving = getattr(self, "_start_" + operation)(sent, *args)
        total = self.ledger.totals[self.name, operation, stack.phase]
        total.add(payload, payload * x.dtype.itemsize, time.perf_counter() - start, wire)

        def result(y: np.ndarray | None) -> Array | None:
            return None if y is None else returned(as_dtype(y, dtype or y.dtype), x)

        def spent(seconds: float) -> None:
            total.seconds += seconds
        return Transfer(moving, sent, self.checked, result, spent)

    def claim(self, operation: str, what: Callable[[], str]) -> str:
        """What this rank says of the collective that it is in."""
        details, in_order = what(), " in a fixed order" if self.order == "fixed" and "reduce" in operation else ""
        return details if not operation else f"{operation} over {self.name}{': ' if details else ''}{details}{in_order}"

    @contextmanager
    def agreed(self, operation: str, what: Callable[[], str], patience: float | None = None) -> Iterator[None]:
        """Agree with the other ranks on a collective, and be in it."""
        try:
            self._enter(operation, what, patience)
            yield
        except (TypeError, ValueError) as error:        # the ranks have agreed: they wait for no word on it any more
            raise CommError(f"{operation} over {self.name}: {error}") from error
        except self.library_error:
            self._despair()
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        """This rank waits no longer: for a backend that wants to know."""

    def _despair(self) -> None:
        """The library below has failed, as where another rank is gone: error CommError, where that is known to be the cause."""

    # A backend supplies these, for contiguous host arrays, with shares along axis 0, on more than one rank.
    _enter: Callable[..., None]                         # (operation, what, patience=seconds): ranks agree, and may wait
    _sub: Callable[..., "Comm"]                         # (dims, keep)
    _all_reduce: Callable[..., np.ndarray]              # (x, how)
    _reduce: Callable[..., np.ndarray | None]           # (x, root)
    _all_gather: Callable[..., np.ndarray]              # (x, sizes)
    _reduce_scatter: Callable[..., np.ndarray]          # (x, sizes)
    _all_to_all: Callable[..., np.ndarray]              # (x, table)
    _broadcast: Callable[..., np.ndarray]               # (x, root)
    _permute: Callable[..., np.ndarray | None]          # (x, source, target, sizes)
    _barrier: Callable[[], None]
    _start_permute: Callable[..., Moving]               # (x, source, target, sizes)
    _start_all_reduce: Callable[..., Moving]            # (x, how)


class SerialComm(Comm):
    """One rank: every collective is the identity."""

    def __init__(self, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None) -> None:
        super().__init__(0, 1, axes, ledger)
