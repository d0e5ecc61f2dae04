"""How large the error of each element must be in a format: measured on runs that differ by rounding alone (emulate.py).

sigma is the root mean square, over runs, of an element's error.  It follows what the model does with each element: it is
small where little was added up, zero where nothing is rounded, large behind a nonlinearity's steep part, so near-zero elements
neither fail for nothing nor hide a mistake.  A bundle keeps it as one byte per element, in steps of 2^(1/8), and its largest.
"""
from typing import Iterable

import numpy as np

from refimpl.comm import Comm
from refimpl.golden.emulate import FORMATS, NEAREST, Reordered, Rounding
from refimpl.golden.recipe import Recipe
from refimpl.golden.trace import Value, trace

RUNS = 32                                               # sigma is known to one part in √(2·RUNS): 12%
STEPS = 8                                               # codes per factor of two


def sigma(truth: dict[str, Value], runs: Iterable[dict[str, Value]], factor: float = 1.0) -> dict[str, np.ndarray]:
    """The root mean square deviation of the runs from the truth, of each element but of inputs, times `factor`.

    Infinite where a run has overflowed: nothing can be said of such an element in this format.
    """
    total, n = {key: np.zeros(v.array.shape) for key, v in truth.items() if v.role != "input"}, 0
    for run in runs:
        n += 1
        for key in total:
            a, right = run[key].array.astype(np.float64), truth[key].array.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                total[key] += np.where((a == right) | ((a != a) & (right != right)), 0.0, np.square(a - right))
    return {key: factor * np.sqrt(np.where(np.isnan(t), np.inf, t) / n) for key, t in total.items()}


def measured(recipe: Recipe, comm: Comm, truth: dict[str, Value], dtype: str, runs: int = RUNS) -> dict[str, np.ndarray]:
    """sigma of a computation in `dtype`, of this rank's part of every value.

    AdamW's first step goes by the sign of the gradient, which rounding turns where |g| is not much larger than its sigma.  That
    is seldom, so a few runs may not have it: a parameter's sigma is at least lr·sigma(g)/|g|, and at most of that lr.
    """
    found = at_least(truth, sigma(truth, (trace(recipe, comm, Rounding(dtype, seed)) for seed in range(runs)), NEAREST), dtype)
    for key in found:
        if truth[key].phase == "update" and "/params/" in key:
            name = key.partition("/params/")[2]
            size, unsure = np.abs(truth[f"step1/grad/{name}"].array), found[f"step1/grad/{name}"]
            flips = np.divide(unsure, size, out=np.sign(unsure), where=size > unsure)      # (no gradient at all turns nowhere)
            found[key] = np.hypot(found[key], recipe.lr * flips)
    return found


def at_least(truth: dict[str, Value], found: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """No sigma below half a unit roundoff, where a value is rounded at all.

    A number that happens to lie on one of the format's is never rounded in the runs; a stack that has it one unit off, from
    what it does within an op, is right, too.
    """
    def smallest(key: str) -> float:
        wide = truth[key].phase == "update" or key.endswith(("/loss", "/grad_norm", "/cross_entropy:0"))
        return FORMATS["float32" if wide else dtype].u / 2
    with np.errstate(invalid="ignore"):
        return {key: np.maximum(s, smallest(key) * np.where(np.isfinite(truth[key].array), np.abs(truth[key].array), 0.0))
                if s.any() else s for key, s in found.items()}


def uncertainty(recipe: Recipe, comm: Comm, truth: dict[str, Value], runs: int = 2) -> dict[str, float]:
    """How far the reference itself, in float64, can be relied on: root mean square over the elements of each value."""
    found = sigma(truth, (trace(recipe, comm, frames=[Reordered(seed)]) for seed in range(runs)))
    return {key: rms(s) for key, s in found.items()}


def rms(a: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(a)))) if a.size else 0.0


def encoded(sigma: np.ndarray, largest: float) -> np.ndarray:
    """uint8: 0 for 0, else 255 for `largest`, 1 less for each factor of 2^(1/8) that it is smaller (and 1 for what is smaller
    still, by 2^-32)."""
    with np.errstate(divide="ignore"):
        code = 255 + np.ceil(STEPS * np.log2(sigma / (largest or 1.0)))
    return np.where(sigma > 0, np.clip(code, 1, 255), 0).astype(np.uint8)


def decoded(code: np.ndarray, largest: float) -> np.ndarray:
    """float64 again: up to 2^(1/8) larger than it was.

    >>> decoded(encoded(np.array([0, 1e-9, 0.9, 2.0]), 2.0), 2.0).round(9).tolist()
    [0.0, 1e-09, 0.917004043, 2.0]
    """
    return np.where(code, largest * np.exp2((code.astype(np.float64) - 255) / STEPS), 0.0)
