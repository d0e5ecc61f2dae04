"""Which keys a query sees: one object answers for the whole matrix, for a block of it, and for any positions."""
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Mask:
    """A rule over (query position i, key position j); its parts are joined by "and", but for the prefix.

    causal   j ≤ i
    window   i - j < window: `window` keys including the own one (and j - i < window where not causal)
    prefix   the first `prefix` positions see each other both ways: j < prefix is visible to every query

    With fewer queries than keys (cached decoding) the queries are the *last* T of the S positions: bottom-right aligned.
    Documents are told apart by ids given to `attention`, not here: they are data.

    >>> Mask(causal=True).visible(2, 5).astype(int).tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    >>> Mask(causal=True, window=2).visible(3, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    >>> Mask(causal=True, prefix=2).visible(3, 3).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    causal: bool = False
    window: int | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")
        object.__setattr__(self, "causal", bool(self.causal))
        for name in ("window", "prefix"):
            value = getattr(self, name)
            if (name, value) == ("window", None):
                continue
            if not hasattr(value, "__index__") or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer{' or None' if name == 'window' else ''}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (the own position), got {self.window}")
        if self.prefix < 0 or (self.prefix and not self.causal):
            raise ValueError(f"prefix must be at least 0 and needs causal=True, got prefix {self.prefix}, causal {self.causal}")

    def visible(self, T: int, S: int) -> np.ndarray | None:
        """bool[T, S], read-only, or None where every query sees every key."""
        return visible(self, T, S)

    def block(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray | bool:
        """For query and key positions: True (all visible), False (none), or bool[len(queries), len(keys)]."""
        if not self.causal and self.window is None or not queries.size or not keys.size:
            return True
        i, j = queries[:, None], keys[None, :]
        if (answer := self.at_ends(queries.min(), queries.max(), keys.min(), keys.max())) is not None:
            return answer
        seen = j <= i if self.causal else j < i + self.window       # neither: answered above
        if self.window is not None:
            seen &= j > i - self.window
        if self.prefix:
            seen |= j < self.prefix
        return True if seen.all() else bool(seen.any()) and seen

    def at_ends(self, i: int, last_i: int, j: int, last_j: int) -> bool | None:
        """The same for queries i..last_i and keys j..last_j, where their ends tell: most blocks need no look at each pair."""
        back = np.inf if self.window is None else self.window - 1           # how far a query sees
        on = 0 if self.causal else back
        if (j > last_i + on or last_j < i - back) and j >= self.prefix:     # beyond what any of them sees
            return False
        return True if last_i - back <= j and last_j <= i + on or last_j < self.prefix else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=4)                                   # the layers of a model ask for the same one
def visible(mask: Mask, T: int, S: int) -> np.ndarray | None:
    answer = mask.block(np.arange(S - T, S, dtype=np.int32), np.arange(S, dtype=np.int32))
    return None if answer is True else np.broadcast_to(answer, (T, S))      # which is read-only


CAUSAL = Mask(causal=True)
