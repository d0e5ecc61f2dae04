"""The gradient rule: what is summed over which ranks, when, and the one division.

A gradient says itself over which mesh axes it is still partial (the layout tag recorded it), and whether other ranks hold parts
of it, too (a kv head whose query heads lie on two ranks): then what the holders have is summed as well.  A loss is a sum over
valid targets with its count; the step divides once, by the count over all micro-batches and ranks.  A rank without a valid
target adds zero.  Never a mean of means.

    reduction = Reduction(mesh, placements(cfg, mesh))
    _, grads = value_and_grad(loss, params, on_leaf=reduction.add)      # buckets set out while the backward pass goes on
    grads = reduction.finish()
"""
import math
from typing import Iterator, Mapping

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import Layout, LayoutError, Tensor, seam
from refimpl.comm import Comm, Mesh
from refimpl.comm.transfer import Transfer
from refimpl.parallel.cuts import Placement, Replicated, box, overlap, spread

BUCKET = 1 << 20                                        # elements: large enough that its latency does not count


class Reduction:
    """Sums gradients over the mesh axes they are partial over, in buckets that set out as soon as they are full.

    table   the placements of the parameters: parts of one may overlap
    before  gradients of earlier micro-batches, which are added to those of this one
    bucket  elements; all ranks add the same parameters in the same order, which the tape's is, so their buckets are alike
    """

    def __init__(self, mesh: Mesh, table: Mapping[str, Placement] | None = None, before: Mapping[str, Tensor] | None = None,
                 bucket: float = BUCKET) -> None:
        self.mesh, self.table, self.before, self.bucket = mesh, table or {}, before or {}, bucket
        self.open: dict[tuple[Comm, str], Bucket] = {}
        self.under_way: list[Bucket] = []
        self.grads: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        """A gradient is complete.  Starts its bucket where that is full now."""
        array, axes, place = grad.array, grad.partial, self.table.get(name, Replicated())
        if grad.shared and not overlap(place):
            raise LayoutError(f"the parts of {name} overlap over {'+'.join(sorted(grad.shared))}, so its holders sum their "
                              f"gradients: give the table of placements")
        if name in self.before:
            array = self.before[name].array + array
        self.grads[name] = Tensor(array, Layout(grad.varies - axes))
        if overlap(place):                              # in its place in a whole of zeros, which all ranks of the cut sum
            array, axes = spread(array, place, self.mesh), axes | {place.over}
        comm = self.mesh.comm(*self.mesh.wide(axes))
        if comm.size > 1:
            bucket = self.open.setdefault((comm, str(array.dtype)), Bucket(comm))
            bucket.arrays[name] = array
            if sum(a.size for a in bucket.arrays.values()) >= self.bucket:
                self.start((comm, str(array.dtype)))
        self.mesh.world.progress()

    def start(self, key: tuple[Comm, str]) -> None:
        bucket = self.open.pop(key)
        bucket.start()
        self.under_way.append(bucket)

    def finish(self) -> dict[str, Tensor]:
        """All gradients, summed."""
        for key in list(self.open):
            self.start(key)
        for bucket in self.under_way:
            for name, total in bucket.wait():
                if overlap(self.table.get(name)):
                    total = total[box(self.table[name], total.shape, self.mesh)]
                self.grads[name] = Tensor(total, self.grads[name].layout)
        return self.grads


class Bucket:
    """Gradients of one dtype that are summed over the same ranks, by one all_reduce of all of them laid end to end."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.arrays = comm, dict[str, Array]()
        self.transfer: Transfer

    def start(self) -> None:
        arrays = list(self.arrays.values())
        self.transfer = self.comm.start_all_reduce(xp_of(arrays[0]).concatenate([a.reshape(-1) for a in arrays], axis=0))

    def wait(self) -> Iterator[tuple[str, Array]]:
        flat, end = self.transfer.wait(), 0
        for name, a in self.arrays.items():
            end += a.size
            yield name, flat[end - a.size:end].reshape(a.shape)


def reduce_gradients(grads: Mapping[str, Tensor], mesh: Mesh, table: Mapping[str, Placement] | None = None
                     ) -> dict[str, Tensor]:
    """Every gradient summed over the mesh axes it is partial over, and where the `table`'s parts overlap over their holders,
    in one bucket for all that are summed over the same ranks."""
    reduction = Reduction(mesh, table, bucket=math.inf)
    for name, g in grads.items():
        reduction.add(name, g)
    return reduction.finish()


@seam
def divide_by_count(grads: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Gradients of the mean from those of the sum; `count` is the number of valid targets of the whole batch."""
    if count < 1:
        raise ValueError("the batch has no valid target: there is nothing to divide by")
    return {name: Tensor(g.array / float(count), g.layout) for name, g in grads.items()}


def total_over(mesh: Mesh, *values: float) -> list[float]:
    """The sums of some numbers over the ranks that hold different samples or positions."""
    return mesh.comm(*mesh.wide(("dp", "cp"))).all_reduce(np.array(values, np.float64)).tolist()
