"""The gradient rule: what is summed over which ranks, and the one division.

A gradient says itself over which mesh axes it is still partial (the layout tag recorded it).  A loss is a sum over valid
targets with its count; the step divides once, by the count over all micro-batches and ranks.  A rank without a valid
target adds zero.  Never a mean of means.
"""
from typing import Mapping

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import Layout, Tensor, seam
from refimpl.comm import Comm, Mesh


def reduce_gradients(grads: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Every gradient summed over the mesh axes it is partial over, one bucket for all that share them."""
    buckets: dict[tuple[frozenset[str], str], list[str]] = {}
    for name, g in grads.items():
        if g.partial:
            buckets.setdefault((g.partial, str(g.dtype)), []).append(name)
    out = dict(grads)
    for (axes, _), members in buckets.items():
        arrays = [grads[name].array for name in members]
        for name, total in zip(members, all_reduce_together(arrays, mesh.comm(*axes))):
            out[name] = Tensor(total, Layout(grads[name].varies - axes))
    return out


def all_reduce_together(arrays: list[Array], comm: Comm) -> list[Array]:
    """The sums over ranks of several arrays of one dtype, by one all_reduce of all of them laid end to end."""
    if comm.size == 1:
        return arrays
    ends = np.cumsum([a.size for a in arrays]).tolist()
    flat = comm.all_reduce(xp_of(arrays[0]).concatenate([a.reshape(-1) for a in arrays]))
    return [flat[end - a.size:end].reshape(a.shape) for a, end in zip(arrays, ends)]


@seam
def divide_by_count(grads: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Gradients of the mean from those of the sum; `count` is the number of valid targets of the whole batch."""
    if count < 1:
        raise ValueError("the batch has no valid target: there is nothing to divide by")
    return {name: Tensor(g.array / float(count), g.layout) for name, g in grads.items()}


def total_over(mesh: Mesh, *values: float) -> list[float]:
    """The sums of some numbers over the ranks that hold different samples."""
    return mesh.comm("dp").all_reduce(np.array(values, np.float64)).tolist()
