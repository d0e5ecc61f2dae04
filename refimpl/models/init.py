"""Initial weights: each rank makes its own part, bit for bit the slice of the serial run's (rng.py)."""
from types import ModuleType

import numpy as np

from refimpl.autograd import Tensor
from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.models.placements import parameters
from refimpl.parallel import box, parameter
from refimpl.rng import flat_index, stream, uniform_weights


def init(cfg: Config, mesh: Mesh, seed: int, dtype: str = "float64", xp: ModuleType = np) -> dict[str, Tensor]:
    """This rank's parameters, made on the device of `xp` (numpy or cupy): the same bits there.

    The scale comes from the whole matrix, never from a shard's fan-in.
    """
    out = {}
    for name, row in parameters(cfg, mesh).items():
        where = box(row.placement, row.shape, mesh)
        if row.scale:
            index = flat_index([xp.arange(s.start, s.stop) for s in where], row.shape)
            local = uniform_weights(stream(seed, name), index, row.scale, dtype)
        else:
            local = xp.full([s.stop - s.start for s in where], 1.0 if row.scale is None else 0.0, dtype)
        out[name] = parameter(name, local, row.placement)
    return out
