"""What golden values are made of: a model, its weights, a batch for each step and an optimizer, all by the hash of rng.py.

    value(name, i) = offset + (n - 2**23)·scale·2**-23          n: the i-th of the 24-bit draws of stream(seed, name)
    token(step, i) = integer below vocab_size                   of stream(seed, "tokens", step); i counts [B, T + 1] in C order
    target(step, i) is the token that follows, or -100 (ignored) where draw i of stream(seed, "ignored", step) is below 2**20

With an offset the lowest bit of n - 2**23 is cleared, so that every value is exact in float32.  No file is needed, in any
language, and a rank makes its part alone (`python -m refimpl golden init-code` prints a generator).

A mistake must move numbers, so nothing is zero or one here: biases and gains are random, too, and weights are as large as
keeps each layer's output about 1: in trained networks no softmax is flat and no GELU is a straight line.
"""
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refimpl.autograd import Tensor
from refimpl.comm import Mesh, shares
from refimpl.comm.mesh import AXES
from refimpl.models import Config, Plan
from refimpl.models.placements import Row, parameters, power_of_two
from refimpl.ops.losses import IGNORE
from refimpl.parallel import box, parameter
from refimpl.rng import draw24, flat_index, integers, stream, uniform_weights
from refimpl.train.data import Batch

EMBEDDINGS = ("embed.w", "positions.w")

MODELS = {
    "gpt-micro": Config(vocab_size=40, n_layers=2, n_heads=4, head_dim=6, d_model=16, max_seq_len=8, d_ff=32),
    "llama-micro": Config(vocab_size=40, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_model=16, max_seq_len=8, d_ff=24,
                          norm="rms_norm", positions="rope", ffn="swiglu", biases=(), tied=False),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that golden values depend on; `to_dict` is what the manifest says of it."""
    config: Config
    mesh: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    seed: int = 0
    steps: int = 3
    batch_size: int = 4
    seq_len: int = 8
    lr: float = 2.0 ** -7
    beta1: float = 0.875
    beta2: float = 0.9375
    eps: float = 2.0 ** -20
    weight_decay: float = 0.125
    clip: float = 1.0
    attention: str = "naive"
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"seed must be at least 0 and below 2**63, got {self.seed}")
        for name, low, high in (("lr", 0, math.inf), ("beta1", 0, 1), ("beta2", 0, 1), ("weight_decay", 0, math.inf)):
            if not low <= getattr(self, name) < high:
                raise ValueError(f"{name} must be at least {low} and below {high}, got {getattr(self, name)}")
        for name in ("eps", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if self.seq_len > self.config.max_seq_len:
            raise ValueError(f"seq_len is {self.seq_len}, the model has max_seq_len {self.config.max_seq_len}")
        if self.config.dropout:
            raise ValueError(f"golden values are made without dropout, the model has dropout {self.config.dropout}")
        self.plan                                       # whose names are right, or said now

    @property
    def plan(self) -> Plan:
        """How sequences are treated, which changes no value: only where its parts lie."""
        return Plan(self.attention, self.layout)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "config": self.config.to_dict()}


def spread(name: str, row: Row) -> tuple[float, float]:
    """(offset, scale) of a parameter's values: uniform in [offset - scale, offset + scale), powers of two."""
    if row.scale is None:
        return 1.0, 0.5                                 # a gain
    if row.scale == 0:
        return 0.0, 0.25                                # a bias, or a gain as its difference from 1
    return 0.0, 1.0 if name in EMBEDDINGS else power_of_two(1 / math.sqrt(row.shape[0]))


def weights(recipe: Recipe, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parameters in float64."""
    out = {}
    for name, row in parameters(recipe.config, mesh).items():
        where = box(row.placement, row.shape, mesh)
        index = flat_index([np.arange(s.start, s.stop) for s in where], row.shape)
        out[name] = parameter(name, values(recipe.seed, name, index, *spread(name, row)), row.placement)
    return out


def values(seed: int, name: str, index: np.ndarray, offset: float, scale: float) -> np.ndarray:
    """float64: the values of parameter `name` at the flat indices `index`."""
    if not offset:
        return uniform_weights(stream(seed, name), index, scale)
    n = draw24(stream(seed, name), index).astype(np.int64) - 2 ** 23
    return offset + (n & ~1) * (scale * 2.0 ** -23)


def batch(recipe: Recipe, mesh: Mesh, step: int) -> Batch:
    """This dp rank's samples of step 1, 2, ..., whole ones; shares may be uneven."""
    B, T, mine = recipe.batch_size, recipe.seq_len, shares(recipe.batch_size, mesh.dp.size)
    rows = np.arange(mine[mesh.dp.rank]) + sum(mine[:mesh.dp.rank])
    index = flat_index([rows, np.arange(T + 1)], (B, T + 1))
    tokens = integers(stream(recipe.seed, "tokens", step), index, recipe.config.vocab_size)
    ignored = draw24(stream(recipe.seed, "ignored", step), flat_index([rows, np.arange(T)], (B, T))) < 2 ** 20
    return Batch(rows, tokens[:, :-1], np.where(ignored, IGNORE, tokens[:, 1:]))
