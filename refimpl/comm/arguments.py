"""What a collective may be given, and how ranks describe to one another what they give."""
from contextlib import contextmanager
from functools import lru_cache, wraps
from operator import index
from typing import Any, Callable, Iterable, Iterator, NoReturn, Sequence

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import seam

REDUCTIONS = ("sum", "max")
Pairs = tuple[tuple[int, int], ...]                     # (from rank, to rank), of a permutation


class CommError(RuntimeError):
    """Ranks that do not agree on a collective, or a rank that will never come."""


def collective(method: Callable) -> Any:
    """A seam in which wrong arguments are (in checked mode) an error on every rank, also where a rank's own were right."""
    @seam
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            refuse(self, method.__name__, error)
    return call


def refuse(comm: Any, name: str, error: Exception) -> NoReturn:
    """Raise the error on every rank: those that found nothing wrong go on to something else, which is then a CommError."""
    sentence = f"{name} over {comm.name}: {error}"
    try:
        comm.agree(sentence, patience=2.0)
    except CommError as shared:
        raise shared from None
    raise type(error)(sentence) from None


@contextmanager
def refused_by_all(comm: Any, name: str) -> Iterator[None]:
    """For an op of several collectives: wrong arguments are an error on every rank before the first of them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        refuse(comm, name, error)


@lru_cache
def shares(n: int, parts: int) -> tuple[int, ...]:
    """`n` in `parts` shares that differ by at most one, the larger ones first.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(n // parts + (r < n % parts) for r in range(parts))


def check_array(x: Array) -> None:
    if type(x) is not np.ndarray and not isinstance(x, (np.ndarray, np.generic)) and xp_of(x) is np:
        raise TypeError(f"takes an array, got {type(x).__name__}: np.asarray a list or a number, give a Tensor's .array")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("takes no masked arrays, whose masks would not travel: fill it (.filled(0)) first")
    if x.dtype.kind not in "fiub":
        raise TypeError(f"takes float, integer or bool arrays, got {x.dtype.str}")
    if not x.dtype.isnative:
        raise TypeError(f"takes arrays in this machine's byte order, got {x.dtype.str}, which is "
                        f"{'big' if x.dtype.str[0] == '>' else 'little'}-endian: astype({x.dtype.newbyteorder('=').name!r})")


def check_reduction(x: Array, how: str = "sum") -> None:
    if how not in REDUCTIONS:
        raise ValueError(f"the reduction {how!r} is not one of {', '.join(REDUCTIONS)}")
    if x.dtype.kind == "b":
        raise TypeError("MPI neither adds nor compares bool arrays: astype an integer first")


def integers(what: str, values: Iterable[Any]) -> tuple[int, ...]:
    """The values as ints.  Error: TypeError where one is none, such as 0.5: rounding would send something elsewhere."""
    values = tuple(values)
    try:
        return tuple(map(index, values))
    except TypeError:
        raise TypeError(f"{what} must be integers, got {', '.join(map(repr, values))}") from None


def check_rank(root: int, size: int) -> None:
    if not 0 <= integers("ranks", [root])[0] < size:
        raise ValueError(f"the root {root} is not one of {size} ranks")


def axis_of(x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"there is no axis {axis} in an array of shape {tuple(x.shape)}")
    return axis % x.ndim


def sizes_of(x: Array, axis: int, sizes: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """What each rank holds along `axis`: `sizes`, or as much as this one."""
    if sizes is None:
        return (x.shape[axis],) * size
    sizes = integers("sizes", sizes)
    if len(sizes) != size or sizes[rank] != x.shape[axis] or min(sizes) < 0:
        raise ValueError(f"rank {rank} of {size} holds {x.shape[axis]} along axis {axis}, sizes say {sizes}")
    return sizes


def shares_of(x: Array, axis: int, sizes: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """What each rank shall get along `axis`: `sizes`, or shares as even as possible."""
    if sizes is None:
        return shares(x.shape[axis], size)
    sizes = integers("sizes", sizes)
    if len(sizes) != size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise ValueError(f"the shares {sizes} of {size} ranks do not add up to {x.shape[axis]} along axis {axis}")
    return sizes


def table_of(x: Array, counts: Any, rank: int, size: int) -> np.ndarray | None:
    """counts[source][target] as a checked int64[size, size], row `rank` adding up to the rows of x; None: equal."""
    axis_of(x, 0)
    if counts is None:
        if x.shape[0] % size:
            raise ValueError(f"{x.shape[0]} rows are no equal shares for {size} ranks: give counts[source][target]")
        return None
    table = np.array(counts)
    if table.dtype.kind not in "iu":
        raise TypeError(f"counts[source][target] are numbers of rows, got {counts}")
    table = table.astype(np.int64)
    if table.shape != (size, size) or (table < 0).any():
        raise ValueError(f"counts[source][target] of {size} ranks are {size} x {size} numbers of rows, got {counts}")
    if table[rank].sum() != x.shape[0]:
        raise ValueError(f"rank {rank} holds {x.shape[0]} rows, its counts {table[rank].tolist()} are {table[rank].sum()}")
    return table


def route_of(x: Array, pairs: Pairs, sizes: Sequence[int] | None, rank: int, size: int) -> Any:
    """Of a permutation: this rank's source and target, the sizes, the elements that it sends, and what ranks agree on."""
    check_array(x)
    axis_of(x, 0)
    n = sizes_of(x, 0, sizes, rank, size)
    targets, sources = check_pairs(tuple(map(tuple, pairs)), size)
    target, source = targets.get(rank), sources.get(rank)
    sent = 0 if target is None or target == rank else x.size
    return source, target, n, sent, lambda: f"{form(x, 0)}, pairs {tuple(targets.items())}, sizes {n}"


@lru_cache
def check_pairs(pairs: Pairs, size: int) -> tuple[dict[int, int], dict[int, int]]:
    """The target of each source, and the source of each target; no rank sends twice or is sent to twice."""
    pairs = tuple((source, target) for source, target in (integers("ranks", pair) for pair in pairs))
    for what, ranks in (("sends", [s for s, _ in pairs]), ("is sent to", [t for _, t in pairs])):
        if len(set(ranks)) < len(ranks):
            twice = next(r for r in ranks if ranks.count(r) > 1)
            raise ValueError(f"rank {twice} {what} more than once in the pairs {pairs}")
        if ranks and not 0 <= min(ranks) <= max(ranks) < size:
            raise ValueError(f"the pairs {pairs} name a rank that is not one of {size}")
    return dict(pairs), {target: source for source, target in pairs}


@lru_cache(typed=True)
def ring_pairs(shift: int, size: int) -> Pairs:
    """Every rank to the one `shift` further on."""
    return tuple((r, (r + shift) % size) for r in range(size))


def as_dtype(y: Array, dtype: Any) -> Array:
    return y if y.dtype == dtype else y.astype(dtype)


def widened(x: Array) -> Array:
    """What is added up in more than 16 bits: half precision, so that the sum is rounded once, and small integers, which wrap
    round in numpy but saturate in Open MPI's vector code."""
    if x.dtype.char not in "ebBhH":
        return x
    return x.astype(np.float32 if x.dtype.kind == "f" else np.int32)


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
