"""What a model is told about one call besides its parameters: the mesh, which samples and positions, and the dropout stream."""
from dataclasses import dataclass, replace

import numpy as np

from refimpl.autograd import Params, Tensor
from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.ops import CAUSAL, Mask, dropout
from refimpl.rng import stream


@dataclass(frozen=True)
class Context:
    """rows int[B]: global sample numbers; positions int[T]: global positions; step None: no dropout."""
    mesh: Mesh
    rows: np.ndarray
    positions: np.ndarray
    mask: Mask = CAUSAL
    seed: int = 0
    step: int | None = None

    def within(self, window: int | None) -> "Context":
        """The same, for a layer whose queries see `window` keys (None: all that the mask shows)."""
        windows = [w for w in (window, self.mask.window) if w is not None]
        return replace(self, mask=replace(self.mask, window=min(windows))) if windows else self


def drop(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """Dropout of x[B, T, D] by the hash of (seed, step, name, sample, position, channel): the same on every mesh."""
    if ctx.step is None or not cfg.dropout:
        return x
    return dropout(x, ctx.rows, ctx.positions, np.arange(cfg.d_model), key=stream(ctx.seed, p.full("dropout"), ctx.step),
                   rate=cfg.dropout, shape=(1, cfg.max_seq_len, cfg.d_model))
