"""The mesh: the ranks laid out along named axes, and a communicator for each axis or group of axes.

    Mesh(dp=2, tp=2, comm=world())       rank 0 1 2 3   is at   (dp, cp, tp) = (0,0,0) (0,0,1) (1,0,0) (1,0,1)

`tp` varies fastest, so tensor-parallel ranks are neighbours.  Axes: dp splits the batch, cp the sequence, tp the layers.
"""
import math
from typing import Iterable

from refimpl.comm.base import Comm, SerialComm

AXES = ("dp", "cp", "tp")


class Mesh:
    """Ranks along dp, cp and tp.  `mesh.tp` is the communicator of an axis, `mesh.comm("dp", "cp")` of several.

    Error: ValueError, the same on every rank, where dp * cp * tp is not the number of ranks.
    """

    def __init__(self, dp: int = 1, cp: int = 1, tp: int = 1, comm: Comm | None = None) -> None:
        self.dims = dict(zip(AXES, (dp, cp, tp)))
        self.world = comm if comm is not None else SerialComm()
        if min(self.dims.values()) < 1 or math.prod(self.dims.values()) != self.world.size:
            ranks = math.prod(self.dims.values())
            raise ValueError(f"the mesh {self} needs {ranks} rank{'s' * (ranks != 1)} (dp * cp * tp, each at least 1), there "
                             f"{'are' if self.world.size != 1 else 'is'} {self.world.size}")
        self.at = self.world.coordinates(self.dims)
        self.comms: dict[tuple[str, ...], Comm] = {}
        self.dp, self.cp, self.tp = (self.comm(axis) for axis in AXES)
        self.ledger = self.world.ledger

    @classmethod
    def parse(cls, text: str, comm: Comm | None = None) -> "Mesh":
        """The mesh called "dp=2,tp=2".  Error: see `parse_dims`."""
        return cls(**parse_dims(text), comm=comm)

    def comm(self, *axes: str) -> Comm:
        """The communicator along `axes` (made at first use: by all ranks, in the same order)."""
        key = tuple(a for a in AXES if a in axes)
        if len(key) != len(axes):
            raise ValueError(f"mesh axes {axes} are not distinct ones of {', '.join(AXES)}")
        if key not in self.comms:
            alone = math.prod(self.dims[a] for a in key) == 1
            self.comms[key] = SerialComm(key, self.world.ledger) if alone else self.world.sub(self.dims, key)
        return self.comms[key]

    def wide(self, axes: Iterable[str]) -> frozenset[str]:
        """Of mesh axes, those with more than one rank: over the others nothing travels."""
        return frozenset(axis for axis in axes if self.dims[axis] > 1)

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.dims.items() if n != 1) or "dp=1"


def parse_dims(text: str) -> dict[str, int]:
    """"dp=2,tp=2" -> {"dp": 2, "tp": 2}.  Error: ValueError that names the bad part and the allowed axes."""
    dims: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or not size.isdecimal() or axis in dims:
            raise ValueError(f"mesh {text!r}: {part.strip()!r} is not AXIS=SIZE with each axis ({', '.join(AXES)}) once")
        dims[axis] = int(size)
    return dims
