"""Where the parts of a value lie, found out by evidence and proved: put together as claimed, they are the serial run's value.

Along each mesh axis a value is the same on all ranks ("replicated"), cut along a numpy axis ("axis 1"; of positions over cp
also "axis 1 zigzag", "axis 1 striped"), or a part of a sum ("partial"). Where two parts of a cut overlap (a kv head whose
query heads lie on two ranks), they hold the same, or, of a gradient that is not yet reduced, parts of a sum there. `located`
tries these claims on the values themselves, and ends with an error where none puts the serial value together: then the sharded
run is wrong, and no bundle is made of it.
"""
import itertools
import re
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from refimpl.comm.mesh import AXES
from refimpl.parallel import LAYOUTS, SequenceLayout

ROUNDING = 1e-12                                        # of the largest element: how far sharded and serial may differ
SHARED = ", shared parts add up"
HOW = re.compile(f"replicated|partial|per rank|axis [0-9]({SHARED}| zigzag| striped)?")     # per rank: parts of nothing
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placement:
    """A global array of `shape` on a mesh of `dims` (axis -> ranks; the last varies fastest).

    along  how it lies along each mesh axis that has more than one rank
    boxes  each rank's part: (start, stop) of every numpy axis; parts may overlap.  Of an axis that is cut zigzag or striped:
           (0, how many positions the rank has)
    """
    dims: dict[str, int]
    shape: tuple[int, ...]
    along: dict[str, str]
    boxes: tuple[Box, ...]

    def coordinates(self, rank: int) -> dict[str, int]:
        return dict(zip(self.dims, map(int, np.unravel_index(rank, tuple(self.dims.values())))))

    def holder(self, rank: int) -> int:
        """The lowest rank that has the same part: along replicated axes the first."""
        at = self.coordinates(rank)
        first = [0 if self.along.get(axis, "replicated") == "replicated" else at[axis] for axis in self.dims]
        return int(np.ravel_multi_index(first, tuple(self.dims.values())))

    def holders(self) -> list[int]:
        """The ranks whose parts make up the value."""
        return [r for r in range(len(self.boxes)) if self.holder(r) == r]

    def whole(self, parts: Sequence[np.ndarray] | Mapping[int, np.ndarray]) -> np.ndarray:
        """The global value from the holders' parts."""
        out = np.zeros(self.shape, parts[0].dtype)
        for r in self.holders():
            out[self.where(r)] = out[self.where(r)] + parts[r] if self.adds else parts[r]
        return out

    def where(self, rank: int) -> tuple[Any, ...]:
        """The rank's part, as an index."""
        box = [slice(a, b) for a, b in self.boxes[rank]]
        kind, axis = layout_of(self.along.get("cp", ""))
        if kind == "contiguous":
            return tuple(box)
        index = [np.arange(part.start, part.stop) for part in box]
        index[axis] = SequenceLayout(kind, self.shape[axis]).positions(self.coordinates(rank)["cp"], self.dims["cp"])
        return np.ix_(*index)

    @property
    def adds(self) -> bool:
        """Whether parts are summands."""
        return any(how == "partial" or SHARED in how for how in self.along.values())

    def off(self, parts: Sequence[np.ndarray], serial: np.ndarray) -> float:
        """The largest error of the sums, or of any rank's part (of overlapping ones `whole` takes the last alone)."""
        errors = [self.whole(parts) - serial] if self.adds else [p - serial[self.where(r)] for r, p in enumerate(parts)]
        return float(np.max([np.abs(e).max(initial=0.0) for e in errors]))      # nan where one is


def layout_of(how: str) -> tuple[str, int]:
    """How positions are cut, and along which axis.

    >>> layout_of("axis 2 zigzag"), layout_of("replicated")
    (('zigzag', 2), ('contiguous', 0))
    """
    _, _, kind = how.rpartition(" ")
    return (kind, int(how[5])) if kind in LAYOUTS else ("contiguous", 0)


def located(key: str, parts: Sequence[np.ndarray], serial: np.ndarray, dims: dict[str, int],
            kv_bounds: Sequence[tuple[int, int]], proved: bool = True, layout: str = "contiguous") -> Placement:
    """The placement by which the ranks' `parts` are the `serial` value.

    kv_bounds  (start, stop) of each tp rank's kv heads, for parts that overlap
    proved     False for values that are rounding alone: shapes must do
    layout     how positions are cut over cp
    Error:     AssertionError where there is none
    """
    for along in claims(parts, serial.shape, dims, layout):
        try:
            place = Placement(dims, serial.shape, along, boxes(parts, serial.shape, dims, along, kv_bounds))
        except ValueError:                              # parts of these shapes cannot lie so
            continue
        with np.errstate(invalid="ignore"):
            off = place.off(parts, serial)
        if not proved or off <= ROUNDING * np.abs(serial).max(initial=0.0):
            return place
    raise AssertionError(f"{key} on the mesh {dims} is not the serial value, however its parts are put together")


def claims(parts: Sequence[np.ndarray], shape: tuple[int, ...], dims: dict[str, int], layout: str = "contiguous"
           ) -> Iterator[dict[str, str]]:
    """What may be so: replicated first, where the bits are equal; then cut, where the shapes are smaller; then partial."""
    wide = [axis for axis in AXES if dims[axis] > 1]
    grid = np.arange(len(parts)).reshape([dims[axis] for axis in AXES])
    choices: list[list[str]] = []
    for axis in wide:
        lines = np.moveaxis(grid, AXES.index(axis), 0).reshape(dims[axis], -1)
        same = all(parts[r].tobytes() == parts[line[0]].tobytes() for line in lines.T for r in line)
        smaller = [f"axis {a}" for a, n in enumerate(shape) if any(p.shape[a] < n for p in parts)]
        by_layout = [f"{how} {layout}" for how in smaller if axis == "cp" and layout != "contiguous"]
        cut = [*(by_layout or smaller), *(how + SHARED for how in smaller)]
        choices.append([*(["replicated"] if same else []), *cut, "partial"])
    for choice in itertools.product(*choices):
        cut_axes = [how[5] for how in choice if how.startswith("axis")]
        if len(set(cut_axes)) == len(cut_axes):         # no numpy axis is cut twice
            yield dict(zip(wide, choice))


def boxes(parts: Sequence[np.ndarray], shape: tuple[int, ...], dims: dict[str, int], along: dict[str, str],
          kv_bounds: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """Each rank's part.  Error: ValueError where the parts have other shapes."""
    out = []
    for rank, part in enumerate(parts):
        at, box = np.unravel_index(rank, tuple(dims.values())), [(0, n) for n in shape]
        for mesh_axis, how in along.items():
            kind, a = layout_of(how)
            if kind != "contiguous":
                box[a] = (0, SequenceLayout(kind, shape[a]).sizes(dims["cp"])[int(at[list(dims).index("cp")])])
            elif how.startswith("axis"):
                a = int(how.partition(",")[0][5:])
                line = [r for r in range(len(parts)) if differs_only(r, rank, dims, mesh_axis)]
                sizes = [parts[r].shape[a] for r in line]
                box[a] = bounds(sizes, shape[a], kv_bounds)[int(at[list(dims).index(mesh_axis)])]
        if part.shape != tuple(stop - start for start, stop in box):
            raise ValueError
        out.append(tuple(box))
    return tuple(out)


def differs_only(r: int, rank: int, dims: dict[str, int], mesh_axis: str) -> bool:
    """Whether two ranks have the same coordinates but along one mesh axis."""
    a, b = (np.unravel_index(k, tuple(dims.values())) for k in (r, rank))
    return all(p == q for axis, p, q in zip(dims, a, b) if axis != mesh_axis)


def bounds(sizes: Sequence[int], n: int, kv_bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of parts of n elements: one after another, or as the kv heads lie.  Error: ValueError."""
    ends = np.cumsum(sizes).tolist()
    if ends[-1] == n:
        return list(zip([0, *ends[:-1]], ends))
    heads = kv_bounds[-1][1]
    shared = [(a * n // heads, b * n // heads) for a, b in kv_bounds]
    if [b - a for a, b in shared] != list(sizes):
        raise ValueError
    return shared


def per_rank(parts: Sequence[np.ndarray], dims: dict[str, int]) -> Placement:
    """Of parts that belong to nothing global (what a collective was given): alike along a mesh axis, or each rank's own."""
    shape = tuple(max(sizes) for sizes in zip(*(p.shape for p in parts)))
    along = next(claims(parts, shape, dims))
    along = {axis: "replicated" if how == "replicated" else "per rank" for axis, how in along.items()}
    return Placement(dims, shape, along, tuple(tuple((0, n) for n in p.shape) for p in parts))
