"""Are the copies of a parameter on different ranks still the same?  Data-parallel ranks that began from different weights share
their gradients, and learn, and never agree.
"""
import hashlib
from typing import Iterator, Mapping

import numpy as np

from refimpl.array import to_host
from refimpl.autograd import Tensor
from refimpl.comm import Mesh
from refimpl.parallel.cuts import Cut, Placement


def check_replicas(params: Mapping[str, Tensor], table: Mapping[str, Placement], mesh: Mesh) -> None:
    """Every rank hashes what it holds, 8 bytes for each parameter (where parts overlap, for each piece between two bounds).

    Error: ArithmeticError, the same on every rank, which names the parameter and the ranks whose copies differ
    """
    held = [piece for name, t in params.items() for piece in pieces(name, to_host(t.array), table[name], mesh)]
    mine = np.array([digest for _, digest in held], np.uint64)
    everybodys = mesh.world.all_gather(mine[None], axis=0)                          # (ranks, pieces); 0: not held
    for k in np.flatnonzero([len(set(column[column > 0])) > 1 for column in everybodys.T]):
        column = everybodys[:, k]
        first = next(h for h in column if h)
        ranks = [str(r) for r, h in enumerate(column) if h not in (0, first)]
        raise ArithmeticError(f"the copies of {held[k][0]} are not the same: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} "
                              f"differ{'s' * (len(ranks) == 1)} from rank {int(np.flatnonzero(column)[0])}")


def pieces(name: str, a: np.ndarray, placement: Placement, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """(name, digest) of each piece of the global array between two neighbouring bounds of its cut; digest 0: not held."""
    if not isinstance(placement, Cut):
        yield name, digest(a)
        return
    start, stop = placement.bounds[mesh.comm(placement.over).rank]
    ends = sorted({end for bounds in placement.bounds for end in bounds})
    rows = np.moveaxis(a, placement.axis, 0)
    for first, last in zip(ends, ends[1:]):
        yield name, digest(rows[first - start:last - start]) if start <= first and last <= stop else 0


def digest(a: np.ndarray) -> int:
    """Of the bits of an array; never 0."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(a).tobytes(), digest_size=8).digest(), "big") or 1
