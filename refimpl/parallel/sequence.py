"""How a sequence is cut over the cp ranks: which positions each has.  Tokens, targets, documents and masks all go by it.

    8 positions on 2 ranks, by the rank that has them
    contiguous   0 0 0 0 1 1 1 1      neighbours stay together, but with a causal mask the last rank has most of the work
    zigzag       0 0 1 1 1 1 0 0      2p pieces, rank r has the r-th from the front and from the back: equal work
    striped      0 1 0 1 0 1 0 1      equal work, but for the diagonals

Lengths need not divide: the first pieces are longer by one.  Positions are global, and RoPE, masks and dropout go by them.
Targets are shifted before anything is cut.
Reference: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention); zigzag: Grattafiori et al.
2024 (Llama 3), section 3.3.2, zhuzilin/ring-flash-attention.  Megatron `get_batch_on_this_cp_rank`
"""
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from refimpl.comm import Comm, shares

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class SequenceLayout:
    """`length` positions, cut in one of the ways of LAYOUTS.  Error: ValueError for another, and for a length below 0.

    >>> SequenceLayout("zigzag", 8).positions(0, 2).tolist()
    [0, 1, 6, 7]
    """
    kind: str
    length: int

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"a sequence is cut as one of {', '.join(LAYOUTS)}, got {self.kind!r}")
        if not hasattr(self.length, "__index__") or self.length < 0:
            raise ValueError(f"the length of a sequence is an integer from 0, got {self.length!r}")

    def positions(self, rank: int, size: int) -> np.ndarray:
        """int[T_r], read-only: the positions that this rank of `size` has, in its order."""
        return positions(self, size)[rank]

    def own_positions(self, comm: Comm) -> np.ndarray:
        """Those of this rank."""
        return self.positions(comm.rank, comm.size)

    def sizes(self, size: int) -> tuple[int, ...]:
        """How many positions each rank has."""
        pieces = shares(self.length, 2 * size)          # of which each rank has two
        return shares(self.length, size) if self.kind != "zigzag" else tuple(pieces[r] + pieces[-1 - r] for r in range(size))

    def piece(self, size: int) -> int:
        """How many of a rank's positions lie together, at most: no block should have some of two such pieces.

        Where the length does not divide, a piece may have one less, and a block one of the other piece.
        """
        return -(-self.length // (2 * size if self.kind == "zigzag" else size))

    def order(self, size: int) -> np.ndarray:
        """int[S]: the positions in the order in which all_gather joins the ranks' parts."""
        return np.concatenate(positions(self, size))

    def own(self, a: np.ndarray, comm: Comm, axis: int = -1) -> np.ndarray:
        """This rank's part of an array with a whole sequence along `axis`."""
        return np.take(a, self.own_positions(comm), axis=axis)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache
def positions(layout: SequenceLayout, size: int) -> tuple[np.ndarray, ...]:
    n = layout.length
    if layout.kind == "striped":
        out = [np.arange(r, n, size) for r in range(size)]
    else:
        pieces = np.split(np.arange(n), np.cumsum(shares(n, size * (2 if layout.kind == "zigzag" else 1)))[:-1])
        out = pieces if layout.kind == "contiguous" else [np.concatenate([pieces[r], pieces[-1 - r]]) for r in range(size)]
    for a in out:
        a.flags.writeable = False
    return tuple(out)
