"""Which tokens a step sees.  Sample number n is a window of the corpus whose place is a hash of (seed, n), so the order is
the same on every mesh and needs no state."""
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from refimpl.comm import Mesh, shares
from refimpl.rng import integers, stream


@dataclass(frozen=True)
class Batch:
    """rows int[B]: global sample numbers;  tokens, targets int[B, T]: a target is the token that follows."""
    rows: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Sampler:
    """Windows of seq_len tokens.  Error: ValueError where the corpus is shorter than one window and its target."""
    corpus: np.ndarray
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.corpus) <= self.seq_len:
            raise ValueError(f"the text has {len(self.corpus)} tokens: a sample needs seq_len + 1 = {self.seq_len + 1}")

    def batch(self, rows: np.ndarray) -> Batch:
        """The samples with the global numbers `rows`.  Targets are shifted here, before anything is cut."""
        start = integers(stream(self.seed, "data"), rows, len(self.corpus) - self.seq_len)
        windows = self.corpus[start[:, None] + np.arange(self.seq_len + 1)]
        return Batch(rows, windows[:, :-1], windows[:, 1:])

    def step(self, step: int, batch_size: int, accumulate: int, mesh: Mesh) -> Iterator[Batch]:
        """This rank's micro-batches of a step.  Each micro-batch is cut over dp; the shares may be uneven."""
        first = step * batch_size
        for size in shares(batch_size, accumulate):
            mine = shares(size, mesh.dp.size)
            start = first + sum(mine[:mesh.dp.rank])
            yield self.batch(np.arange(start, start + mine[mesh.dp.rank]))
            first += size
