"""The state of a run: parameters and the optimizer's moments, and how they go into a checkpoint and come back on any mesh.

    params/layers.0.attn.q.w    float32 masters where the precision is bfloat16
    m/layers.0.attn.q.w         AdamW's first and second moment
    v/layers.0.attn.q.w

Every element is written by one rank, its owner (cuts.own_box); every rank reads the box that it holds.
"""
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Mapping

import numpy as np

from refimpl.array import Array, to_host
from refimpl.autograd import Tensor
from refimpl.comm import Mesh
from refimpl.models import Config, parameters
from refimpl.parallel import box, gather, gather_rows, own, own_box, parameter, row_table, take_rows
from refimpl.train.adamw import AdamW
from refimpl.train.checkpoint import Piece, Wanted, load, save


@dataclass
class State:
    """params are this rank's parts; with `zero` the optimizer has the moments of this rank's rows of them only."""
    cfg: Config
    mesh: Mesh
    params: dict[str, Tensor]
    optimizer: AdamW
    zero: bool = False

    def __post_init__(self) -> None:
        rows = parameters(self.cfg, self.mesh)
        self.shapes = {name: row.shape for name, row in rows.items()}
        self.placements = {name: row.placement for name, row in rows.items()}
        self.optimizer_table: Mapping[str, Any] = row_table(self.placements) if self.zero else self.placements
        self.optimizer.start(take_rows(self.params, self.mesh) if self.zero else self.params)

    def save(self, folder: Path, about: dict[str, Any], keep: int = 2, merged: bool = False) -> Path:
        """A checkpoint of the optimizer's step.  `merged`: rank 0 writes all of it.

        Errors: CheckpointError, ArithmeticError where a parameter is not finite, the same on every rank
        """
        self.require_finite()
        pieces = self.whole() if merged else self.own()
        return save(folder, self.optimizer.t, pieces, about, self.mesh.world, keep)

    def own(self) -> dict[str, Piece]:
        """What this rank writes."""
        pieces = {}
        for kind, arrays, table in self.kinds():
            for name, a in arrays.items():
                where = own_box(table[name], self.shapes[name], self.mesh)
                if where and all(s.stop > s.start for s in where):
                    mine = to_host(a[own(table[name], a.ndim, self.mesh)])
                    pieces[f"{kind}/{name}"] = Piece(mine, tuple(s.start for s in where), self.shapes[name])
        return pieces

    def whole(self) -> dict[str, Piece]:
        """Everything, on rank 0; nothing on the others."""
        pieces = {}
        for kind, arrays, _ in self.kinds():
            parts = {name: parameter(name, a, self.placements[name]) for name, a in arrays.items()}
            if kind != "params" and self.zero:
                parts = gather_rows(parts, self.params, self.mesh)
            for name, a in gather(parts, self.placements, self.mesh).items():
                pieces[f"{kind}/{name}"] = Piece(to_host(a), (0,) * a.ndim, self.shapes[name])
        return pieces if self.mesh.world.rank == 0 else {}

    def kinds(self) -> list[tuple[str, Mapping[str, Array], Mapping[str, Any]]]:
        params = {name: t.array for name, t in self.params.items()}
        return [("params", params, self.placements), ("m", self.optimizer.m, self.optimizer_table),
                ("v", self.optimizer.v, self.optimizer_table)]

    def update(self, grads: Mapping[str, Tensor]) -> None:
        """A step of the optimizer.  With `zero`, the gradients are those of this rank's rows."""
        if self.zero:
            rows = self.optimizer.step(take_rows(self.params, self.mesh), grads)
            self.params = gather_rows(rows, self.params, self.mesh)
        else:
            self.params = self.optimizer.step(self.params, grads)

    def load(self, path: Path, xp: ModuleType = np) -> None:
        """Become what was saved, on whatever mesh that was.  Error: CheckpointError, the same on every rank."""
        dtype = next(iter(self.params.values())).dtype
        wanted = {f"{kind}/{name}": Wanted(self.shapes[name], box(table[name], self.shapes[name], self.mesh), dtype)
                  for kind, _, table in self.kinds() for name in self.params}
        self.optimizer.t, arrays = load(path, wanted, self.mesh.world)
        loaded = {name: xp.asarray(a) for name, a in arrays.items()}
        for name, p in self.params.items():
            self.params[name] = parameter(name, loaded[f"params/{name}"], self.placements[name])
            self.optimizer.m[name], self.optimizer.v[name] = loaded[f"m/{name}"], loaded[f"v/{name}"]

    def require_finite(self) -> None:
        """Error: ArithmeticError, the same on every rank, which names an array that is not."""
        lost = [f"{kind}/{name}" for kind, arrays, _ in self.kinds() for name, a in arrays.items()
                if not bool(np.isfinite(to_host(a)).all())]
        lost = [name for name in self.mesh.world.gather_texts(lost[0] if lost else "") if name]
        if lost:
            raise ArithmeticError(f"{lost[0]} is no longer finite after step {self.optimizer.t}: it is not saved")
