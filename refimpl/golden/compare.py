"""Compare two sets of named arrays: the largest difference of each, relative to its scale.

The scale of an array is its largest magnitude, a bound on the rounding error of the sums it is made of.  A gauge parameter
(a bias of k, which softmax ignores) has a gradient that is rounding alone: there the scale is its weight's, the same sum
with x in place of 1.
"""
from dataclasses import dataclass
from typing import Collection, Mapping

import numpy as np

from refimpl.array import Array, to_host


@dataclass(frozen=True)
class Difference:
    """|actual - expected| / scale is largest, `relative`, at `index` of the array `name`."""
    name: str
    relative: float
    index: tuple[int, ...]


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], scale_from: Mapping[str, str] | None = None
            ) -> list[Difference]:
    """The differences, worst first.  nan or infinity that does not match counts as infinite.

    scale_from  name -> the array whose magnitude is its scale, for arrays that are analytically zero
    Error:      ValueError for names or shapes that do not match, or nothing to compare
    """
    if set(actual) != set(expected) or not expected:
        odd = sorted(set(actual) ^ set(expected))
        raise ValueError(f"the two sets do not have the same names: {', '.join(odd[:5]) or 'both are empty'}")
    out = []
    for name, e in expected.items():
        a, e = to_host(actual[name]), to_host(e)
        if a.shape != e.shape:
            raise ValueError(f"{name}: shapes {list(a.shape)} and {list(e.shape)} do not match")
        out.append(_difference(name, a, e, magnitude(to_host(expected[(scale_from or {}).get(name, name)]))))
    return sorted(out, key=lambda d: -d.relative)


def _difference(name: str, a: np.ndarray, e: np.ndarray, scale: float) -> Difference:
    if not e.size:
        return Difference(name, 0.0, ())
    with np.errstate(invalid="ignore"):
        d = np.abs(a.astype("float64") - e)
    d = np.where((a == e) | (np.isnan(a) & np.isnan(e)), 0.0, np.where(np.isnan(d), np.inf, d))
    index = np.unravel_index(int(np.argmax(d)), d.shape)
    worst = float(d[index])
    return Difference(name, worst / scale if scale else worst and np.inf, tuple(map(int, index)))


def magnitude(a: np.ndarray) -> float:
    """The largest finite |a|, 0 where there is none."""
    finite = np.abs(a[np.isfinite(a)])
    return float(finite.max(initial=0.0))


def gauge_scales(gauges: Collection[str]) -> dict[str, str]:
    """name -> the weight beside each gauge bias: layers.0.attn.k.b -> layers.0.attn.k.w."""
    return {name: name.rpartition(".")[0] + ".w" for name in gauges}
