"""Is a difference rounding, or a mistake?  rho = a stack's error / the error that rounding in its format must make.

    normwise     root mean square of the error / root mean square of sigma
    elementwise  the largest |error| / sigma of the element

An element's sigma is never taken for less than INSIDE units of numbers as large as the whole's, for where an op rounds inside,
as many right ones do, such numbers may cancel.  Where nothing is rounded (a masked score, the gradient of a word that does not
occur) it is FLOOR of the whole's.

A right stack has a normwise rho of about 1, one that rounds less often a smaller one.  What is infinite or not a number must be
so in the same places, which is looked at first.  The limits come from a study of right stacks (limits.py).
"""
from dataclasses import dataclass

import numpy as np

from refimpl.golden.emulate import FORMATS, rounded
from refimpl.golden.noise import rms

FLOOR, INSIDE = 2.0 ** -6, 2.0
FLOAT64 = 2.0 ** (24 - 53)                              # sigma of float64 is that of float32 times the ratio of their units


@dataclass(frozen=True)
class Rho:
    """Of one value, or one rank's part of it.  worst is the element whose error is largest for its sigma."""
    norm: float
    element: float
    worst: tuple[int, ...]
    actual: float
    expected: float
    what: str = ""                                      # a difference in kind: "nan", "inf"

    @property
    def infinite(self) -> bool:
        return bool(self.what)


def rho(actual: np.ndarray, expected: np.ndarray, sigma: np.ndarray, uncertainty: float = 0.0, dtype: str = "") -> Rho:
    """Of float64 arrays of one shape, of a computation in `dtype`.  Where nothing is rounded (sigma and uncertainty are 0) any
    difference is infinite."""
    if not actual.size:
        return Rho(0.0, 0.0, (), 0.0, 0.0)
    odd = ~np.isfinite(actual) | ~np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if (odd & ~same).any():
        at = first(odd & ~same)
        return Rho(np.inf, np.inf, at, float(actual[at]), float(expected[at]), kind(actual[at], expected[at]))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(actual - expected))
    whole = np.hypot(rms(sigma), uncertainty)
    inside = INSIDE * (FORMATS[dtype].u if dtype in FORMATS else 2.0 ** -53) * rms(expected[~odd])
    each = np.hypot(np.where(sigma > 0, np.maximum(sigma, inside), FLOOR * whole), uncertainty)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > 0, error / each, 0.0)
    at = tuple(map(int, np.unravel_index(int(np.argmax(ratio)), ratio.shape)))
    norm = rms(error) / whole if whole else (np.inf if error.any() else 0.0)
    return Rho(float(norm), float(ratio[at]), at, float(actual[at]), float(expected[at]))


def first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(np.argmax(where)), where.shape)))


def kind(actual: float, expected: float) -> str:
    def name(x: float) -> str:
        return "nan" if np.isnan(x) else "a number" if np.isfinite(x) else "inf" if x > 0 else "-inf"
    return f"{name(actual)} where {name(expected)} belongs"


def same_in(actual: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """Whether an input or an initial weight is the expected one, or that to the nearest number of the format."""
    return any(np.array_equal(actual, right, equal_nan=True)
               for right in (expected, *([rounded(expected, FORMATS[dtype])] if dtype in FORMATS else [])))
