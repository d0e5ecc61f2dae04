"""The cases of the collectives: a global array, cut in every way, and its layouts before and after."""
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from refimpl.comm import Comm, shares
from refimpl.rng import draw


@dataclass(frozen=True)
class Collective:
    """A collective's input: a global array of `shape`, of which each rank holds its part or, uncut, all.

    shares  along `axis` for a size of comm: None for as even as possible (then `sizes` is not passed)
    """
    name: str
    before: str
    after: str
    shape: tuple[int, ...]
    axis: int | None = None
    shares: Callable[[int], tuple[int, ...]] | None = None

    def arguments(self, comm: Comm, dtype: str) -> tuple[np.ndarray, dict[str, Any]]:
        """This rank's x and the static arguments besides comm."""
        shape, static = list(self.shape), {}
        sizes = self.shares(comm.size) if self.shares else None
        if self.axis is not None:
            shape[self.axis] = sum(sizes) if sizes else shape[self.axis] * comm.size
            static = {"axis": self.axis, **({"sizes": sizes} if sizes else {})}
            if self.before == "shard":
                shape[self.axis] = (sizes or shares(shape[self.axis], comm.size))[comm.rank]
        name = self.name if self.before == "replicated" else f"{self.name}/{comm.rank}"
        return draw(name, tuple(shape)).astype(dtype), static


def uneven(size: int) -> tuple[int, ...]:
    """Shares 3, 0, 2, 1, 3, 0, 2, 1, ...: one rank in four holds nothing."""
    return tuple((3, 0, 2, 1)[r % 4] for r in range(size))


def both_ways(before: str, after: str) -> list[Collective]:
    """Cut along the last and the first axis, in equal shares and in unequal ones."""
    return [Collective("last axis", before, after, (3, 2), -1), Collective("first axis", before, after, (2, 3, 5), 0),
            Collective("uneven last axis", before, after, (3, 1), -1, uneven),
            Collective("uneven middle axis", before, after, (2, 1, 5), 1, uneven),
            Collective("empty", before, after, (0, 2), 1)]


def uncut(before: str, after: str) -> list[Collective]:
    return [Collective(name, before, after, shape) for name, shape in (
        ("matrix", (3, 5)), ("scalar", ()), ("empty", (0, 3)), ("batch", (2, 3, 7)))]


COLLECTIVES = {
    "copy_to": uncut("replicated", "per_rank"),
    "reduce_from": uncut("partial", "replicated"),
    "as_partial": uncut("per_rank", "partial"),
    "gather_from": both_ways("shard", "replicated"),
    "scatter_to": both_ways("replicated", "shard"),
    "all_gather": both_ways("shard", "per_rank"),
    "reduce_scatter": both_ways("partial", "shard"),
}
