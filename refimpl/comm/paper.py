"""Ranks on paper: a mesh that is not running, to ask what a rank would hold and what would travel."""
import math
from typing import Callable

from refimpl.comm.arguments import CommError
from refimpl.comm.base import Comm
from refimpl.comm.mesh import Mesh, parse_dims


class PaperComm(Comm):
    """Rank 0 of `size` ranks that do not exist: it has coordinates and shares, and nobody to talk to."""

    def __init__(self, size: int, axes: tuple[str, ...] = ("world",)) -> None:
        super().__init__(0, size, axes)

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        return PaperComm(math.prod(dims[axis] for axis in keep), keep)

    def _enter(self, operation: str, what: Callable[[], str], patience: float | None = None) -> None:
        raise CommError(f"there is nobody to talk to on a mesh on paper: {self.claim(operation, what)}")


def paper_mesh(text: str) -> Mesh:
    """The mesh called "dp=2,tp=2", of any size, on one process."""
    dims = parse_dims(text)
    return Mesh(**dims, comm=PaperComm(math.prod(dims.values())))
