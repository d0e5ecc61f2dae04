"""A factor that rounding hides: 3% more of a gradient is less than bfloat16 errs in each number, and more than in all together.

    f = Σ w·e·(a - e) / Σ w·e²,  w = 1/sigma²           by how much of itself a value e is too large, as a whole

The errors of a value's numbers are not independent (all that is made of one rounded number errs with it), so sigma does not
tell how f scatters.  Runs of the reference that round by chance do: z is how far f is from their mean, over their deviation.
"""
from dataclasses import dataclass
from functools import partial
from typing import Iterator, Mapping, Sequence

import numpy as np

from refimpl.golden.bundle import Bundle
from refimpl.golden.check import Key, Parts, every_rank, part_of, sigma_in
from refimpl.golden.diagnose import ENOUGH, NARROW, along, spread
from refimpl.golden.emulate import NEAREST, Rounding
from refimpl.golden.limits import LIMITS
from refimpl.golden.noise import RUNS

LEAST = 0.01                                            # |f|: what is smaller is not looked for


@dataclass(frozen=True)
class Factor:
    """The stack's value `key` is the right one times `times`; rounding makes a z of about 1."""
    key: str
    times: float
    z: float


def hidden_factor(values: Mapping[Key, np.ndarray], bundle: Bundle, dtype: str) -> Factor | None:
    """The first of values that are right in every number, if there is one.  Wider formats hide none."""
    if dtype not in NARROW or bundle.recipe is None:
        return None
    return next((f for f in factors(values, rounded_runs(bundle, dtype), bundle, dtype) if f.z > LIMITS.factor), None)


def rounded_runs(bundle: Bundle, dtype: str) -> list[Parts]:
    assert bundle.recipe
    return [every_rank(bundle.recipe, rounding=partial(Rounding, dtype, seed)) for seed in range(RUNS)]


def factors(values: Mapping[Key, np.ndarray], runs: Sequence[Parts], bundle: Bundle, dtype: str) -> Iterator[Factor]:
    """Of what ops, collectives and gradients gave: every factor that differs from 1 by more than LEAST."""
    for (key, rank), actual in values.items():
        entry = bundle.entries[key]
        part_of_sum = entry.kind == "partial" and rank is not None
        if entry.role not in ("act", "grad", "comm") or actual.size < ENOUGH or entry.kind == "gauge" or part_of_sum:
            continue
        expected, sigma = bundle.value(key, rank), sigma_in(bundle, key, rank, dtype)
        if sigma is None or not np.isfinite(expected).all():
            continue
        each = spread(sigma, entry.uncertainty)
        several = actual, *(part_of(run, bundle, key, rank) for run in runs)
        f, *scattered = (along(a - expected, expected, each)[0] for a in several)
        deviation = NEAREST * np.std(scattered, ddof=1)
        if abs(f) > LEAST and deviation > 0:
            yield Factor(key, 1 + f, float(abs(f - np.mean(scattered)) / deviation))
