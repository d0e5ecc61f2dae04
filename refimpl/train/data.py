"""Which tokens a step sees.  Sample number n is a window of the corpus whose place is a hash of (seed, n), so the order is
the same on every mesh and needs no state: who goes on at step k sees what he would have seen."""
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterator, Mapping

import numpy as np

from refimpl.comm import Mesh, shares
from refimpl.rng import integers, stream
from refimpl.text import Tokenizer
from refimpl.train.options import Options


@dataclass(frozen=True)
class Data:
    """The tokens to learn from, and those to judge by.

    train, validation  int[n], also memory-mapped ones; validation may be empty
    tokenizer          what they are tokens of, for samples and bits per byte; None: neither
    source             where they come from, in words (for who goes on from a checkpoint)
    """
    train: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    tokenizer: Tokenizer | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def split(cls, tokens: np.ndarray, options: Options, tokenizer: Tokenizer | None = None,
              source: Mapping[str, Any] | None = None) -> "Data":
        """The last `validation` of the tokens, at least one sample, to judge by; the others to learn from.  A text of less than
        two samples has no validation part."""
        total, sample = len(tokens), options.seq_len + 1
        wanted = max(int(options.validation * total), sample) if options.validation and total >= 2 * sample else 0
        n = total - min(wanted, total - sample)
        return cls(tokens[:n], tokens[n:], tokenizer, source or {})

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        """What tells one corpus from another, the same for int64 in memory and uint16 in a file."""
        crc = 0
        for part in (self.train, self.validation):
            for start in range(0, len(part), 1 << 20):
                crc = zlib.crc32(part[start:start + (1 << 20)].astype("<i8").tobytes(), crc)
        return {"train": len(self.train), "validation": len(self.validation), "crc32": crc}


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
    use: str = "data"

    def __post_init__(self) -> None:
        if len(self.corpus) <= self.seq_len:
            part = "the text has" if self.use == "data" else f"the {self.use} part of the text has"
            raise ValueError(f"{part} {len(self.corpus)} tokens: a sample needs seq_len + 1 = {self.seq_len + 1}")

    def batch(self, rows: np.ndarray) -> Batch:
        """The samples with the global numbers `rows`.  Targets are shifted here, before anything is cut."""
        start = integers(stream(self.seed, self.use), rows, len(self.corpus) - self.seq_len)
        windows = np.asarray(self.corpus[start[:, None] + np.arange(self.seq_len + 1)]).astype(np.int64, copy=False)
        return Batch(rows, windows[:, :-1], windows[:, 1:])

    def step(self, step: int, batch_size: int, accumulate: int, mesh: Mesh) -> Iterator[Batch]:
        """This rank's micro-batches of a step.  Each micro-batch is cut over dp; the shares may be uneven."""
        first = step * batch_size
        for size in shares(batch_size, accumulate):
            mine = shares(size, mesh.dp.size)
            start = first + sum(mine[:mesh.dp.rank])
            yield self.batch(np.arange(start, start + mine[mesh.dp.rank]))
            first += size
