"""What a collective may be given, and how ranks describe to one another what they give."""
from typing import Any, Sequence

import numpy as np

from refimpl.array import Array, xp_of

REDUCTIONS = ("sum", "max")
Pairs = tuple[tuple[int, int], ...]                     # (from rank, to rank), of a permutation


class CommError(RuntimeError):
    """Ranks that do not agree on a collective, or a rank that will never come."""


def shares(n: int, parts: int) -> tuple[int, ...]:
    """`n` in `parts` shares that differ by at most one, the larger ones first.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(n // parts + (r < n % parts) for r in range(parts))


def check_array(x: Array) -> None:
    if type(x) is not np.ndarray and not isinstance(x, (np.ndarray, np.generic)) and xp_of(x) is np:
        raise TypeError(f"takes an array, got {type(x).__name__}: np.asarray a list or a number, give a Tensor's .array")
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


def check_rank(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"the root {root} is not one of {size} ranks")


def axis_of(x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"there is no axis {axis} in an array of shape {tuple(x.shape)}")
    return axis % x.ndim


def sizes_of(x: Array, axis: int, sizes: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """What each rank holds along `axis`: `sizes`, or as much as this one."""
    sizes = (x.shape[axis],) * size if sizes is None else tuple(map(int, sizes))
    if len(sizes) != size or sizes[rank] != x.shape[axis] or min(sizes) < 0:
        raise ValueError(f"rank {rank} of {size} holds {x.shape[axis]} along axis {axis}, sizes say {sizes}")
    return sizes


def shares_of(x: Array, axis: int, sizes: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """What each rank shall get along `axis`: `sizes`, or shares as even as possible."""
    sizes = shares(x.shape[axis], size) if sizes is None else tuple(map(int, sizes))
    if len(sizes) != size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise ValueError(f"the shares {sizes} of {size} ranks do not add up to {x.shape[axis]} along axis {axis}")
    return sizes


def table_of(x: Array, counts: Any, rank: int, size: int) -> np.ndarray:
    """counts[source][target] as a checked int64[size, size], whose row of this rank are the rows of x."""
    axis_of(x, 0)
    table = np.array(counts, np.int64)
    if table.shape != (size, size) or (table < 0).any():
        raise ValueError(f"counts[source][target] of {size} ranks are {size} x {size} numbers of rows, got {counts}")
    if table[rank].sum() != x.shape[0]:
        raise ValueError(f"rank {rank} holds {x.shape[0]} rows, its counts {table[rank].tolist()} are {table[rank].sum()}")
    return table


def check_pairs(pairs: Any, size: int) -> Pairs:
    """The pairs of a permutation, of which no rank sends twice or is sent to twice."""
    pairs = tuple((int(source), int(target)) for source, target in pairs)
    for what, ranks in (("sends", [s for s, _ in pairs]), ("is sent to", [t for _, t in pairs])):
        if len(set(ranks)) < len(ranks):
            twice = next(r for r in ranks if ranks.count(r) > 1)
            raise ValueError(f"rank {twice} {what} more than once in the pairs {pairs}")
        if ranks and not 0 <= min(ranks) <= max(ranks) < size:
            raise ValueError(f"the pairs {pairs} name a rank that is not one of {size}")
    return pairs


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
