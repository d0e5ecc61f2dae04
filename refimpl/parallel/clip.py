"""The norm of a gradient whose parts lie on many ranks, and clipping by it.

    replicated  [3]  [3]        counts once                                    norm² = 3² + 0² + 4² = 5²
    cut         [0]  [4]        each part counts; shared elements once, on their lowest holder
"""
import math
from typing import Mapping

import numpy as np

from refimpl.array import xp_of
from refimpl.autograd import Tensor, seam
from refimpl.comm import Mesh
from refimpl.parallel.cuts import Placement, Rows, cut_over, own, require_reduced


def gradient_norm(grads: Mapping[str, Tensor], table: Mapping[str, Placement | Rows], mesh: Mesh) -> float:
    """The Euclidean norm of all gradients together, every element counted once; the same on every rank.

    Squares are added up in float64.  One all_reduce of one number for each set of mesh axes that cut a parameter.
    Error: LayoutError for a gradient that still has to be reduced
    """
    squares: dict[frozenset[str], float] = {}           # by the mesh axes of the cut
    for name, g in grads.items():
        require_reduced(name, g)
        place = table[name]
        mine = g.array[own(place, len(g.shape), mesh)].reshape(-1).astype("float64")
        over = mesh.wide(cut_over(place))
        squares[over] = squares.get(over, 0.0) + float(xp_of(mine).einsum("i,i->", mine, mine))
    return math.sqrt(sum(float(mesh.comm(*over).all_reduce(np.array(s))) if over else s for over, s in squares.items()))


@seam
def clip(grads: Mapping[str, Tensor], norm: float, max_norm: float) -> dict[str, Tensor]:
    """The gradients, scaled by max_norm / norm where their norm is larger than max_norm.

    Reference: Pascanu, Mikolov, Bengio 2013, algorithm 1 (torch's clip_grad_norm_ divides by norm + 1e-6).
    """
    if not norm > max_norm:
        return dict(grads)
    return {name: Tensor(g.array * (max_norm / norm), g.layout) for name, g in grads.items()}
