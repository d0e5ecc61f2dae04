"""ZeRO, stage 1: of the optimizer's state, each data-parallel rank keeps that of its own rows only.

                 replicated state                    ZeRO-1, rank r of p
    gradients    all_reduce         g                reduce_scatter   g[rows r]
    state        m, v               whole            m[rows r], v[rows r]                1/p of it
    update       p                  whole            p[rows r]
    parameters                                       all_gather       p

Both exchange as much: an all_reduce is a reduce_scatter and an all_gather.  Rows are those of each parameter's part on this
rank (axis 0), so every rank has a share of every parameter, and the shares are boxes, which a checkpoint can place.
Reference: Rajbhandari et al. 2020 (ZeRO), section 5.1; torch ZeroRedundancyOptimizer, Megatron DistributedOptimizer
"""
from typing import Any, Mapping

from refimpl.autograd import Layout, Tensor
from refimpl.comm import Mesh, shares
from refimpl.parallel.cuts import Placement, Rows, share
from refimpl.parallel.data import Reduction


class RowReduction(Reduction):
    """`Reduction` that gives each dp rank its own rows of the sums.

    Deviation from Megatron: a reduce_scatter for each parameter, when its gradient is complete, rather than for buckets of them
    while the backward pass goes on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        if self.mesh.wide(grad.partial) != {"dp"} or grad.shared:
            super().add(name, grad)                     # whole: finish takes the rows
        else:
            array = self.before[name].array + grad.array if name in self.before else grad.array
            self.rows[name] = Tensor(self.mesh.dp.reduce_scatter(array, axis=0), Layout(grad.varies - grad.partial | {"dp"}))

    def finish(self) -> dict[str, Tensor]:
        return take_rows(super().finish(), self.mesh) | self.rows


def take_rows(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """This dp rank's rows of whole parameters, or of gradients that have been reduced."""
    return {name: t.like(t.array[share(t.shape[0], mesh.dp)], Layout(t.varies | {"dp"})) for name, t in tensors.items()}


def gather_rows(rows: Mapping[str, Tensor], whole: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Parameters like `whole`, of which each dp rank has given its rows."""
    return {name: whole[name].like(mesh.dp.all_gather(t.array, axis=0, sizes=shares(whole[name].shape[0], mesh.dp.size)))
            for name, t in rows.items()}


def row_table(table: Mapping[str, Placement]) -> dict[str, Rows]:
    """How the rows lie: placements for clipping and checkpoints."""
    return {name: Rows(place) for name, place in table.items()}
