"""Which keys the queries of a call see, for any block of them: the mask, by positions, and documents."""
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refimpl.array import Array, to_host
from refimpl.ops.mask import Mask

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Sight:
    """A query sees a key where the mask shows it and their documents are the same.

    q_positions int[T], k_positions int[S]          where in the sequence they stand
    q_documents int[B, T], k_documents int[B, S]    or None: all is one document
    """
    mask: Mask
    q_positions: np.ndarray
    k_positions: np.ndarray
    q_documents: np.ndarray | None = None
    k_documents: np.ndarray | None = None

    def of(self, samples: slice) -> "Sight":
        """That of some samples."""
        if self.q_documents is None or self.k_documents is None:
            return self
        return replace(self, q_documents=self.q_documents[samples], k_documents=self.k_documents[samples])

    def block(self, queries: slice = EVERYTHING, keys: slice = EVERYTHING) -> bool | np.ndarray:
        """True (each of these queries sees each of these keys), False (none), or bool[B or 1, T, S]."""
        seen = self.mask.block(self.q_positions[queries], self.k_positions[keys])
        if self.q_documents is None or self.k_documents is None or seen is False:
            return seen if isinstance(seen, bool) else seen[None]
        q, k = self.q_documents[:, queries], self.k_documents[:, keys]
        if not q.size or not k.size or apart(q, k):
            return False
        if q.min() == k.max() and q.max() == k.min():   # one document, and the same
            return seen if isinstance(seen, bool) else seen[None]
        same = q[:, :, None] == k[:, None, :]
        return same if seen is True else same & seen

    def whole(self) -> np.ndarray | None:
        """bool[B or 1, T, S], or None where every query sees every key."""
        seen = self.block()
        if seen is False:
            return np.zeros((1, len(self.q_positions), len(self.k_positions)), bool)
        return None if seen is True else seen


def apart(q: np.ndarray, k: np.ndarray) -> bool:
    """Whether in every sample the documents of the queries lie before all those of the keys, or behind them."""
    return bool(((q.max(axis=1) < k.min(axis=1)) | (k.max(axis=1) < q.min(axis=1))).all())


def sight(mask: Mask, T: int, S: int, q_documents: Array | None = None, k_documents: Array | None = None,
          q_positions: Array | None = None, k_positions: Array | None = None) -> Sight:
    """The same from what an op is given.  Without positions the queries are the last T of S positions: bottom-right aligned."""
    def host(a: Any) -> np.ndarray | None:
        return None if a is None else to_host(a)
    return Sight(mask, np.arange(S - T, S) if q_positions is None else to_host(q_positions).astype(np.int64),
                 np.arange(S) if k_positions is None else to_host(k_positions).astype(np.int64), host(q_documents),
                 host(k_documents))
