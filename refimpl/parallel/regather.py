"""What is whole while it is used, and a share in between: the input of the matrices with sequence parallelism.

    forward    all_gather -> x -> q, k, v        backward    all_gather -> x -> the gradients of q's, k's and v's matrix
               of x this rank keeps its share                x is let go of again

Backward has one all_gather more, and a rank keeps x/tp in place of x.
Reference: Korthikanti et al. 2022, section 4.2.2
"""
from dataclasses import dataclass, field
from typing import Sequence

from refimpl.array import Array
from refimpl.comm import Comm


@dataclass(eq=False)
class Regathered:
    """The array that all_gather of `share` along `axis` makes, once more for each product whose backward pass wants it.

    Every product that it is an input of says so by `keep`, and calls it once in a backward pass: the first call gathers, the
    last one lets go.
    """
    share: Array
    comm: Comm
    axis: int
    sizes: Sequence[int]
    wanted: int = 0
    asked: int = 0
    whole: Array | None = field(default=None, repr=False)

    def keep(self) -> Array:
        """The share."""
        self.wanted += 1
        return self.share

    def __call__(self) -> Array:
        x = self.comm.all_gather(self.share, axis=self.axis, sizes=self.sizes) if self.whole is None else self.whole
        self.asked += 1
        self.whole = x if self.asked % self.wanted else None
        return x
