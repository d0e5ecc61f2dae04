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
from typing import Mapping

from refimpl.autograd import Layout, Tensor
from refimpl.comm import Mesh, shares
from refimpl.parallel.cuts import Placement, Replicated, Rows, overlap
from refimpl.parallel.data import Reduction


class RowReduction(Reduction):
    """`Reduction` that gives each dp rank its own rows of the sums."""

    def add(self, name: str, grad: Tensor) -> None:
        if self.mesh.wide(grad.partial) != {"dp"} or overlap(self.table.get(name)):
            super().add(name, grad)                     # whole: finish takes the rows
        else:
            array = self.before[name].array + grad.array if name in self.before else grad.array
            self.grads[name] = Tensor(self.mesh.dp.reduce_scatter(array, axis=0), Layout(grad.varies | {"dp"}))

    def finish(self) -> dict[str, Tensor]:
        scattered = {name: g for name, g in self.grads.items() if "dp" in g.varies}
        return own_rows(super().finish(), self.mesh) | scattered


def own_rows(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """This dp rank's rows of whole parameters, or of gradients that have been reduced."""
    over_dp, rows = frozenset({"dp"}), Rows(Replicated())
    return {name: Tensor(t.array[rows.rows(t.shape[0], mesh)], Layout(t.varies | over_dp), None, t.name, t.cut, t.shared)
            for name, t in tensors.items()}


def gather_rows(rows: Mapping[str, Tensor], whole: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Parameters like `whole`, of which each dp rank has given its rows."""
    return {name: Tensor(mesh.dp.all_gather(t.array, axis=0, sizes=shares(whole[name].shape[0], mesh.dp.size)),
                         whole[name].layout, None, name, whole[name].cut, whole[name].shared) for name, t in rows.items()}


def row_table(table: Mapping[str, Placement]) -> dict[str, Rows]:
    """How the rows lie: placements for clipping and checkpoints."""
    return {name: Rows(place) for name, place in table.items()}
