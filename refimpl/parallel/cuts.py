"""How a parameter lies on a mesh: whole on every rank, or cut along one numpy axis.

A table of placements (models/placements.py) drives initialisation, the gradient rule, checkpoints and bundles.
"""
from dataclasses import dataclass
from typing import Mapping, TypeGuard

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import Layout, LayoutError, Tensor
from refimpl.autograd.layout import NOWHERE
from refimpl.comm import Comm, Mesh, shares


@dataclass(frozen=True)
class Replicated:
    """The whole array on every rank."""


@dataclass(frozen=True)
class Cut:
    """Cut along numpy `axis` over the mesh axis `over`; rank r there holds bounds[r] = (start, stop)."""
    axis: int
    bounds: tuple[tuple[int, int], ...]
    over: str = "tp"

    def __post_init__(self) -> None:
        """Error: ValueError unless the parts follow one another without a hole; they may overlap."""
        starts, stops = zip(*self.bounds)
        in_order = list(starts) == sorted(starts) and list(stops) == sorted(stops) and all(a <= b for a, b in self.bounds)
        if starts[0] != 0 or not in_order or any(start > stop for stop, start in zip(stops, starts[1:])):
            raise ValueError(f"the bounds {self.bounds} must start at 0 and follow one another without a hole")

    @classmethod
    def even(cls, axis: int, n: int, comm: Comm) -> "Cut":
        """`n` in shares that differ by at most one."""
        return cls(axis, even_bounds(n, comm.size), comm.name)


Placement = Replicated | Cut


@dataclass(frozen=True)
class Rows:
    """Of the part that `of` gives a rank, the rows (axis 0) that are its share over dp: how the state of an optimizer lies
    (zero.py)."""
    of: Placement


def share(n: int, comm: Comm) -> slice:
    """This rank's share of n rows, of shares that differ by at most one."""
    return slice(*even_bounds(n, comm.size)[comm.rank])


def even_sizes(n: int, comm: Comm) -> tuple[int, ...]:
    """How much each rank has of n, in shares that differ by at most one."""
    return shares(n, comm.size)


def even_bounds(n: int, parts: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each of `parts` shares of n that differ by at most one."""
    ends = np.cumsum(shares(n, parts)).tolist()
    return tuple(zip([0, *ends[:-1]], ends))


def overlap(placement: Placement | None) -> TypeGuard[Cut]:
    """Whether some elements are on more than one rank of the cut."""
    return isinstance(placement, Cut) and any(a < stop for (_, stop), (a, _) in zip(placement.bounds, placement.bounds[1:]))


def cut_over(placement: Placement | Rows) -> frozenset[str]:
    """The mesh axes over which ranks hold different elements."""
    if isinstance(placement, Rows):
        return cut_over(placement.of) | {"dp"}
    return frozenset({placement.over} if isinstance(placement, Cut) else ())


def own(placement: Placement | Rows, ndim: int, mesh: Mesh) -> tuple[slice, ...]:
    """Of this rank's part of a global array, the elements that count as its own: each has one owner on a cut, the lowest rank
    that holds it."""
    where, cut = [slice(None)] * ndim, placement.of if isinstance(placement, Rows) else placement
    if isinstance(cut, Cut):
        rank, bounds = mesh.comm(cut.over).rank, cut.bounds
        start, stop = bounds[rank]
        taken = bounds[rank - 1][1] - start if rank else 0
        if isinstance(placement, Rows) and cut.axis == 0:
            taken -= share(stop - start, mesh.dp).start
        where[cut.axis] = slice(max(0, taken), None)
    return tuple(where)


def own_box(placement: Placement | Rows, shape: tuple[int, ...], mesh: Mesh) -> tuple[slice, ...] | None:
    """The box of the global array of `shape` that is this rank's own: each element is in that of one rank of the whole mesh.
    None on a rank that holds a copy: the first of the ranks with the same part owns it."""
    if any(rank for axis, rank in mesh.at.items() if axis not in cut_over(placement)):
        return None
    where = zip(box(placement, shape, mesh), own(placement, len(shape), mesh))
    return tuple(slice(min(held.start + (mine.start or 0), held.stop), held.stop) for held, mine in where)


def spread(part: Array, placement: Cut, mesh: Mesh) -> Array:
    """A global array of zeros, with this rank's part in its place."""
    shape = list(part.shape)
    shape[placement.axis] = placement.bounds[-1][1]
    whole = xp_of(part).zeros(shape, part.dtype)
    whole[box(placement, tuple(shape), mesh)] = part
    return whole


def box(placement: Placement | Rows, shape: tuple[int, ...], mesh: Mesh) -> tuple[slice, ...]:
    """The part of the global array of `shape` that this rank holds, as one slice per axis.

    Error: ValueError, the same on every rank, where the cut is not one of this mesh and this shape.
    """
    if isinstance(placement, Rows):
        first, *others = box(placement.of, shape, mesh)
        mine = share(first.stop - first.start, mesh.dp)
        return (slice(first.start + mine.start, first.start + mine.stop), *others)
    where = [slice(0, n) for n in shape]
    if isinstance(placement, Cut):
        comm, bounds = mesh.comm(placement.over), placement.bounds
        if len(bounds) != comm.size or min(b[0] for b in bounds) != 0 or max(b[1] for b in bounds) != shape[placement.axis]:
            raise ValueError(f"the bounds {bounds} do not cut axis {placement.axis} of an array of shape {tuple(shape)} over "
                             f"{comm.name}={comm.size}")
        where[placement.axis] = slice(*bounds[comm.rank])
    return tuple(where)


def parameter(name: str, local: Array, placement: Placement) -> Tensor:
    """This rank's part as a named Tensor that knows its cut."""
    if isinstance(placement, Replicated):
        return Tensor(local, name=name)
    over = frozenset({placement.over})
    return Tensor(local, Layout(over), None, name, {placement.over: placement.axis}, over if overlap(placement) else NOWHERE)


def shard(tensors: Mapping[str, Array], table: Mapping[str, Placement], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parameters from global arrays (copies: a shard does not keep the whole alive)."""
    return {name: parameter(name, a[box(table[name], a.shape, mesh)].copy(), table[name]) for name, a in tensors.items()}


def gather(tensors: Mapping[str, Tensor], table: Mapping[str, Placement], mesh: Mesh) -> dict[str, Array]:
    """The global arrays, on every rank (of parameters, or of gradients that have been reduced).

    Where parts overlap, the lowest holder's elements stand.
    Error: LayoutError for a gradient that still has to be reduced
    """
    out = {}
    for name, t in tensors.items():
        require_reduced(name, t)
        p = table[name]
        if isinstance(p, Replicated):
            out[name] = t.array
            continue
        sizes = [stop - start for start, stop in p.bounds]
        joined = mesh.comm(p.over).all_gather(t.array, axis=p.axis, sizes=sizes)
        if overlap(p):                                  # of what was joined: the elements that no lower rank holds
            parts, before, first, end = [], (slice(None),) * p.axis, 0, 0
            for (start, stop), size in zip(p.bounds, sizes):
                parts.append(joined[(*before, slice(first + min(max(0, end - start), size), first + size))])
                end, first = max(end, stop), first + size
            joined = xp_of(joined).concatenate(parts, axis=p.axis)
        out[name] = joined
    return out


def require_reduced(name: str, grad: Tensor) -> None:
    """Error: LayoutError for a gradient that is a part of a sum yet, over ranks or over the holders of a shared part."""
    axes = grad.partial | (grad.shared if not grad.name else NOWHERE)
    if axes:
        raise LayoutError(f"the gradient of {name} is partial over {'+'.join(sorted(axes))}: reduce_gradients first")
