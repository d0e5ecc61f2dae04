"""The cases of attention over a sequence that is cut over ranks: every layout, uneven lengths, more ranks than positions, heads
that do not divide, masks, documents."""
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refimpl.comm import Comm
from refimpl.ops import CAUSAL, Mask
from refimpl.parallel.sequence import SequenceLayout
from refimpl.rng import draw

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """shape  (B, H, G, S, K) of the whole.  documents int[B, S] of the whole, or None."""
    name: str
    shape: Shape
    kind: str = "contiguous"
    documents: Any = None
    others: dict[str, Any] = field(default_factory=dict)
    before = ("shard", "shard", "shard", None)
    after = "shard"

    def held(self, size: int, rank: int) -> tuple[Shape, dict[str, Any]]:
        """The shape of this rank's q, and the static arguments besides comm."""
        B, H, _, S, K = self.shape
        layout = SequenceLayout(self.kind, S)
        return (B, H, layout.sizes(size)[rank], K), {"layout": layout, "block_q": 2, "block_k": 3} | self.others

    def whole(self) -> tuple[np.ndarray | None, ...]:
        """q, k, v and documents of the whole sequence."""
        B, H, G, S, K = self.shape
        return (*(draw(f"{self.name}/{a}", (B, n, S, K)) for a, n in (("q", H), ("k", G), ("v", G))),
                None if self.documents is None else np.array(self.documents))

    def arguments(self, comm: Comm, dtype: str) -> tuple[tuple[np.ndarray | None, ...], dict[str, Any]]:
        """This rank's arrays and the static arguments besides comm."""
        static = self.held(comm.size, comm.rank)[1]
        *qkv, documents = self.whole()
        own = [static["layout"].own(a, comm, 2).astype(dtype) for a in qkv if a is not None]
        return (*own, *([] if documents is None else [static["layout"].own(documents, comm)])), static


ROWS = [Cut("contiguous", (2, 2, 2, 8, 3), others={"mask": CAUSAL}),
        Cut("zigzag", (1, 4, 2, 11, 3), "zigzag", others={"mask": CAUSAL}),
        Cut("striped", (1, 3, 1, 9, 2), "striped", others={"mask": Mask(causal=True, window=4)}),
        Cut("fewer positions than ranks", (1, 2, 1, 3, 2), "zigzag", others={"mask": Mask()}),
        Cut("documents", (2, 2, 1, 7, 2), "contiguous", [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], {"mask": CAUSAL}),
        Cut("own scale", (1, 1, 1, 5, 2), "striped", others={"scale": 0.5, "mask": CAUSAL}), Cut("no samples", (0, 2, 1, 5, 2))]
SEQUENCES = {"ring_attention": ROWS, "all_to_all_attention": ROWS}
