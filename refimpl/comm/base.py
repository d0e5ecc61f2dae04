"""The one interface of all communicators, and the serial one.

A communicator joins the ranks along one or more mesh axes and knows their names.  The methods here check their arguments,
count in the ledger and are seams, so that recorders see what travels; a backend supplies `_all_reduce` and its kin for
contiguous host arrays.  Results are new arrays, arguments are never written to.
"""
import time
from typing import Any, Callable, Sequence

import numpy as np

from refimpl.array import Array
from refimpl.autograd import seam, stack
from refimpl.comm.ledger import Key, Ledger

REDUCTIONS = ("sum", "max")


class CommError(RuntimeError):
    """Ranks that do not agree on a collective, or a rank that will never come."""


def shares(n: int, parts: int) -> tuple[int, ...]:
    """`n` in `parts` shares that differ by at most one, the larger ones first.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(n // parts + (r < n % parts) for r in range(parts))


class Comm:
    """`size` ranks along the mesh axes `axes`; this one is `rank`."""

    def __init__(self, rank: int, size: int, axes: tuple[str, ...], ledger: Ledger | None = None) -> None:
        self.rank, self.size, self.axes = rank, size, axes
        self.ledger = ledger if ledger is not None else Ledger()

    @property
    def name(self) -> str:
        return "+".join(self.axes)

    @seam
    def all_reduce(self, x: Array, how: str = "sum") -> Array:
        """The sum (or max) over ranks of x, on every rank.  Shapes: x[...] -> y[...], equal on all ranks."""
        self.check("all_reduce", x, how)
        return x if self.size == 1 else self.timed("all_reduce", self._all_reduce, x, how)

    @seam
    def all_gather(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The ranks' arrays joined along `axis`, on every rank.

        Shapes: x[.., n_r, ..] -> y[.., n_0 + n_1 + .., ..].  `sizes` are the n_r where they are not all equal.
        """
        self.check("all_gather", x)
        axis = self.axis_of("all_gather", x, axis)
        sizes = tuple(sizes) if sizes is not None else (x.shape[axis],) * self.size
        if len(sizes) != self.size or sizes[self.rank] != x.shape[axis]:
            raise CommError(f"all_gather over {self.name}: rank {self.rank} of {self.size} holds {x.shape[axis]} along axis "
                            f"{axis}, sizes say {sizes}")
        return x if self.size == 1 else self.along(axis, "all_gather", self._all_gather, x, sizes)

    @seam
    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The sum over ranks of x, cut along `axis`: every rank gets its share.

        Shapes: x[.., n, ..] -> y[.., n_r, ..].  `sizes` are the shares n_r; default `shares(n, size)`.
        """
        self.check("reduce_scatter", x)
        axis = self.axis_of("reduce_scatter", x, axis)
        sizes = tuple(sizes) if sizes is not None else shares(x.shape[axis], self.size)
        if len(sizes) != self.size or sum(sizes) != x.shape[axis]:
            raise CommError(f"reduce_scatter over {self.name}: the shares {sizes} of {self.size} ranks do not add up to "
                            f"{x.shape[axis]} along axis {axis}")
        return x if self.size == 1 else self.along(axis, "reduce_scatter", self._reduce_scatter, x, sizes)

    @seam
    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Rank `root`'s x, on every rank.  Shapes: equal on all ranks; the others' x gives shape and dtype only."""
        self.check("broadcast", x)
        if not 0 <= root < self.size:
            raise CommError(f"broadcast over {self.name}: root {root} is not one of {self.size} ranks")
        return x if self.size == 1 else self.timed("broadcast", self._broadcast, x, root)

    @seam
    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            self._barrier()

    def gather_objects(self, text: str) -> list[str]:
        """Every rank's text, on every rank (verdicts, error sentences; travels as bytes)."""
        raw = np.frombuffer(text.encode(), np.uint8)
        sizes = [int(n) for n in self.all_gather(np.array([raw.size]), axis=0)]
        joined = self.all_gather(raw, axis=0, sizes=sizes).tobytes()
        ends = np.cumsum(sizes)
        return [joined[e - n:e].decode() for e, n in zip(ends, sizes)]

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> "Comm":
        """The ranks that differ from this one along the mesh axes `keep` only; `dims` are the mesh's axes and sizes."""
        return SerialComm(keep, self.ledger)

    def coordinates(self, dims: dict[str, int]) -> dict[str, int]:
        """This rank's place in a mesh of `dims`, whose last axis varies fastest."""
        return dict(zip(dims, map(int, np.unravel_index(self.rank, tuple(dims.values())))))

    # -- inside ------------------------------------------------------------------------------------------------

    def check(self, operation: str, x: Array, how: str = "sum") -> None:
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise TypeError(f"{operation} over {self.name} takes an array, got {type(x).__name__}: np.asarray it first")
        if x.dtype.kind not in "fiub" or not x.dtype.isnative:
            raise TypeError(f"{operation} over {self.name} takes native float, integer or bool arrays, got {x.dtype.str}")
        if how not in REDUCTIONS:
            raise ValueError(f"{operation}: reduction {how!r} is not one of {', '.join(REDUCTIONS)}")

    def axis_of(self, operation: str, x: Array, axis: int) -> int:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{operation} over {self.name}: axis {axis} of an array of shape {tuple(x.shape)}")
        return axis % x.ndim

    def timed(self, operation: str, run: Callable, x: Array, *args: Any) -> Array:
        start = time.perf_counter()
        y = run(np.ascontiguousarray(x).reshape(x.shape), *args)
        self.ledger.add(Key(self.name, operation, stack.phase), x.size, x.nbytes, time.perf_counter() - start)
        return y

    def along(self, axis: int, operation: str, run: Callable, x: Array, sizes: tuple[int, ...]) -> Array:
        """Backends cut along axis 0 only: bring `axis` there and back."""
        y = self.timed(operation, run, np.moveaxis(x, axis, 0), sizes)
        return np.moveaxis(y, 0, axis)

    # A backend supplies these, for contiguous host arrays, with shares along axis 0.
    _all_reduce: Callable[..., np.ndarray]              # (x, how)
    _all_gather: Callable[..., np.ndarray]              # (x, sizes)
    _reduce_scatter: Callable[..., np.ndarray]          # (x, sizes)
    _broadcast: Callable[..., np.ndarray]               # (x, root)
    _barrier: Callable[[], None]


class SerialComm(Comm):
    """One rank: every collective is the identity."""

    def __init__(self, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None) -> None:
        super().__init__(0, 1, axes, ledger)
