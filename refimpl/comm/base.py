"""The one interface of all communicators, and the serial one.

A communicator joins the ranks along one or more mesh axes and knows their names.  The methods here check their arguments,
let the ranks agree on what they are about to do, count in the ledger, and are seams, so that recorders see what travels;
a backend supplies `_all_reduce` and its kin for contiguous host arrays; an array on a device travels by way of the host,
which waits until the device has made it.  Arguments are never written to; results are new arrays, except on one rank,
where every collective is the identity.
"""
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np

from refimpl.array import Array, to_host, xp_of
from refimpl.autograd import seam, stack
from refimpl.comm.ledger import Key, Ledger

REDUCTIONS = ("sum", "max")
T = TypeVar("T")


class CommError(RuntimeError):
    """Ranks that do not agree on a collective, or a rank that will never come."""


def shares(n: int, parts: int) -> tuple[int, ...]:
    """`n` in `parts` shares that differ by at most one, the larger ones first.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(n // parts + (r < n % parts) for r in range(parts))


class Comm:
    """`size` ranks along the mesh axes `axes`; this one is `rank`.

    Errors, on every rank: TypeError or ValueError where all ranks give the same wrong arguments, CommError where the
    ranks differ in operation, shape, dtype or other arguments, or where one of them does not come.
    """

    def __init__(self, rank: int, size: int, axes: tuple[str, ...], ledger: Ledger | None = None) -> None:
        self.rank, self.size, self.axes = rank, size, axes
        self.ledger = ledger if ledger is not None else Ledger()

    @property
    def name(self) -> str:
        return "+".join(self.axes)

    @seam
    def all_reduce(self, x: Array, how: str = "sum") -> Array:
        """The sum (or max) over ranks of x, on every rank.  Shapes: x[...] -> y[...], equal on all ranks."""
        with self.arguments("all_reduce"):
            self.check(x)
            check_reduction(x, how)
        if self.size == 1:
            return x
        return self.run("all_reduce", f"{how} of {form(x)}", widened(x), how).astype(x.dtype, copy=False)

    @seam
    def all_gather(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The ranks' arrays joined along `axis`, on every rank.

        Shapes: x[.., n_r, ..] -> y[.., n_0 + n_1 + .., ..].  `sizes` are the n_r where they are not all equal.
        """
        with self.arguments("all_gather"):
            self.check(x)
            axis = axis_of(x, axis)
            sizes = (x.shape[axis],) * self.size if sizes is None else tuple(map(int, sizes))
            if len(sizes) != self.size or sizes[self.rank] != x.shape[axis]:
                raise ValueError(f"rank {self.rank} of {self.size} holds {x.shape[axis]} along axis {axis}, sizes say {sizes}")
        if self.size == 1:
            return x
        y = self.run("all_gather", f"{form(x, axis)}, sizes {sizes}", np.moveaxis(to_host(x), axis, 0), sizes)
        return xp_of(x).asarray(np.moveaxis(y, 0, axis))        # backends join along axis 0

    @seam
    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int] | None = None) -> Array:
        """The sum over ranks of x, cut along `axis`: every rank gets its share.

        Shapes: x[.., n, ..] -> y[.., n_r, ..].  `sizes` are the shares n_r; default `shares(n, size)`.
        """
        with self.arguments("reduce_scatter"):
            self.check(x)
            check_reduction(x, "sum")
            axis = axis_of(x, axis)
            sizes = shares(x.shape[axis], self.size) if sizes is None else tuple(map(int, sizes))
            if len(sizes) != self.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
                raise ValueError(f"the shares {sizes} of {self.size} ranks do not add up to {x.shape[axis]} along axis {axis}")
        if self.size == 1:
            return x
        y = self.run("reduce_scatter", f"{form(x)} along axis {axis}, shares {sizes}",
                     np.moveaxis(to_host(widened(x)), axis, 0), sizes)
        return xp_of(x).asarray(np.moveaxis(y, 0, axis).astype(x.dtype, copy=False))

    @seam
    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Rank `root`'s x, on every rank.  Shapes: equal on all ranks; the others' x gives shape and dtype only."""
        with self.arguments("broadcast"):
            self.check(x)
            if not 0 <= root < self.size:
                raise ValueError(f"the root {root} is not one of {self.size} ranks")
        return x if self.size == 1 else self.run("broadcast", f"{form(x)} from rank {root}", x, root)

    @seam
    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            self._agree(f"barrier over {self.name}")
            self._barrier()

    def agree(self, claim: str) -> None:
        """Every rank says what it is about to do, or what it holds: CommError on all ranks where they differ."""
        if self.size > 1:
            self._agree(claim)

    def gather_objects(self, text: str) -> list[str]:
        """Every rank's text, on every rank (verdicts, error sentences; travels as bytes)."""
        raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        sizes = self.all_gather(np.array([raw.size]), axis=0).tolist()
        joined = self.all_gather(raw, axis=0, sizes=sizes).tobytes()
        ends = np.cumsum(sizes)
        return [joined[e - n:e].decode("utf-8", "surrogatepass") for e, n in zip(ends, sizes)]

    def on_first(self, act: Callable[[], T]) -> T | None:
        """What `act` gives on rank 0, None on the others.  Where it fails, ValueError with the same sentence on every rank."""
        result, failure = None, ""
        if self.rank == 0:
            try:
                result = act()
            except (OSError, ValueError) as error:
                failure = str(error)
        failure = self.gather_objects(failure)[0]
        if failure:
            raise ValueError(failure)
        return result

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> "Comm":
        """The ranks that differ from this one along the mesh axes `keep` only; `dims` are the mesh's axes and sizes."""
        if self.size == 1:
            return SerialComm(keep, self.ledger)
        self._agree(f"the making of a communicator over {'+'.join(keep)} of the mesh {dims}")
        return self._sub(dims, keep)

    def coordinates(self, dims: dict[str, int]) -> dict[str, int]:
        """This rank's place in a mesh of `dims`, whose last axis varies fastest."""
        return dict(zip(dims, map(int, np.unravel_index(self.rank, tuple(dims.values())))))

    # -- inside ------------------------------------------------------------------------------------------------

    @contextmanager
    def arguments(self, operation: str) -> Iterator[None]:
        """Wrong arguments are an error on every rank, also where a rank's own were right."""
        try:
            yield
        except (TypeError, ValueError) as error:
            sentence = f"{operation} over {self.name}: {error}"
            try:
                if self.size > 1:
                    self._agree(sentence, patience=5.0)
            except CommError as shared:
                raise shared from None
            raise type(error)(sentence) from None

    def check(self, x: Array) -> None:
        if not isinstance(x, (np.ndarray, np.generic)) and xp_of(x) is np:
            raise TypeError(f"takes an array, got {type(x).__name__}: np.asarray a list, give a Tensor's .array")
        if x.dtype.kind not in "fiub" or not x.dtype.isnative:
            raise TypeError(f"takes native float, integer or bool arrays, got {x.dtype.str}")

    def run(self, operation: str, what: str, x: Array, *args: Any) -> Array:
        """The backend's `_operation`, once the ranks have agreed on it."""
        start = time.perf_counter()
        self._agree(f"{operation} over {self.name}: {what}")
        backend = getattr(self, f"_{operation}")
        y = backend(np.ascontiguousarray(to_host(x)).reshape(x.shape), *args)   # (ascontiguousarray makes 0-d arrays 1-d)
        self.ledger.add(Key(self.name, operation, stack.phase), x.size, x.nbytes, time.perf_counter() - start)
        return xp_of(x).asarray(y)

    # A backend supplies these, for contiguous host arrays, with shares along axis 0, on more than one rank.
    _agree: Callable[..., None]                         # (claim, patience=seconds)
    _sub: Callable[..., "Comm"]                         # (dims, keep)
    _all_reduce: Callable[..., np.ndarray]              # (x, how)
    _all_gather: Callable[..., np.ndarray]              # (x, sizes)
    _reduce_scatter: Callable[..., np.ndarray]          # (x, sizes)
    _broadcast: Callable[..., np.ndarray]               # (x, root)
    _barrier: Callable[[], None]


class SerialComm(Comm):
    """One rank: every collective is the identity."""

    def __init__(self, axes: tuple[str, ...] = ("world",), ledger: Ledger | None = None) -> None:
        super().__init__(0, 1, axes, ledger)


def check_reduction(x: Array, how: str) -> None:
    if how not in REDUCTIONS:
        raise ValueError(f"the reduction {how!r} is not one of {', '.join(REDUCTIONS)}")
    if x.dtype.kind == "b":
        raise TypeError("MPI neither adds nor compares bool arrays: astype an integer first")


def axis_of(x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"there is no axis {axis} in an array of shape {tuple(x.shape)}")
    return axis % x.ndim


def widened(x: Array) -> Array:
    """Half precision is added up in float32, so that the sum is rounded once."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def form(x: Array, free_axis: int | None = None) -> str:
    """The dtype and shape as ranks must agree on them: float64[2, *, 3], * where sizes may differ."""
    return f"{x.dtype}[{', '.join('*' if k == free_axis else str(n) for k, n in enumerate(x.shape))}]"


def require_agreement(claims: Sequence[str], ranks: Sequence[int]) -> None:
    """Error: CommError, where the claims of the ranks differ: who does what, the same sentence on all."""
    who: dict[str, list[str]] = {}
    for claim, rank in zip(claims, ranks):
        who.setdefault(claim, []).append(str(rank))
    if len(who) > 1:
        raise CommError("the ranks do not agree on what to do together: " + "; ".join(
            f"rank {', '.join(members)}: {claim}" for claim, members in who.items()))
