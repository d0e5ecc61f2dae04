"""Which mistake it is: simple relations between a stack's value and the right one, and runs that make the usual mistakes.

How much of the error a suspect *explains* is how much vanishes when its run is taken for the right one: 1 is all of it.  For
errors that rounding hides in every element there is the *projection*, what of the stack's error lies along the suspect's:
amount 1 is just that mistake, 0 none of it; z is the amount over what rounding alone would give.
"""
import math
from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from refimpl.golden.bundle import Bundle
from refimpl.golden.check import RUNGS, Key, Line, Parts, every_rank, part_of, same_form, sigma_in
from refimpl.golden.limits import LIMITS
from refimpl.golden.noise import rms
from refimpl.golden.suspects import SUSPECTS, Suspect

EXPLAINED = 0.7                                         # of the error: less is no explanation
SEEN = 1e-3                                             # of sigma: a smaller difference is none
ENOUGH = 16                                             # numbers: along fewer, any error looks like any other
NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Cause:
    what: str
    explained: float


@dataclass(frozen=True)
class Hidden:
    """A mistake that rounding hides: found along the suspect's error at `key`, `amount` of it, at `z` times rounding's own."""
    what: str
    key: str
    amount: float
    z: float


def relation(actual: np.ndarray, expected: np.ndarray) -> str:
    """How a wrong value is made of the right one, in words; "" where it is not simply."""
    a, e = np.asarray(actual, float), np.asarray(expected, float)
    size = rms(e)
    if not np.isfinite(a).all() or not size:
        return ""

    def near(b: np.ndarray) -> bool:
        return b.shape == a.shape and rms(a - b) < (1 - EXPLAINED) / 3 * rms(a - e)
    if not a.any():
        return "all zeros"
    if a.ndim > 1 and near(np.swapaxes(e, -1, -2)):
        return "the right value, transposed"
    factor = float(np.vdot(e, a) / np.vdot(e, e))
    if e.size > 1 and near(factor * e):
        return f"the right value times {factor:.6g}"
    for axis in range(a.ndim):
        for by in (1, -1):
            if a.shape[axis] > 1 and near(np.roll(e, by, axis)):
                return f"the right value, moved by {by} along axis {axis}"
    if a.ndim and a.shape[-1] % 2 == 0:
        half = np.concatenate([e[..., ::2], e[..., 1::2]], axis=-1)
        if near(half) or near(np.stack(np.split(e, 2, axis=-1), axis=-1).reshape(e.shape)):
            return "the right value with its channels in another order (halves for pairs, as of RoPE)"
    return ""


def cause(values: Mapping[Key, np.ndarray], lines: Sequence[Line], bundle: Bundle, dtype: str) -> Cause | None:
    """The suspect that explains most of the errors up to the first rung that fails, if it explains enough.

    Explained: 1 - √(Σ left² / Σ error²) in units of sigma, beyond rounding; what is right counts, too, and later rungs follow
    """
    held = [line for line in lines if line.rho and (line.key, line.rank) in values]
    first = next((RUNGS.index(line.rung) for line in held if line.failed), -1)
    held = [line for line in held if RUNGS.index(line.rung) <= first and (line.rung != "inputs" or first == 0)]
    best = None
    for suspect, run in runs(bundle):
        error = left = 0.0
        for line in held:
            a, e = values[line.key, line.rank], bundle.value(line.key, line.rank)
            sigma = None if line.rung == "inputs" else sigma_in(bundle, line.key, line.rank, dtype)
            unit = (rms(e) * 2.0 ** -24 if sigma is None else rms(sigma)) or 1.0
            if np.isfinite(a).all() and same_form(run, bundle, line.key):
                error += beyond((a - e) / unit)
                left += beyond((a - part_of(run, bundle, line.key, line.rank)) / unit)
        explained = 1 - math.sqrt(left / error) if error and math.isfinite(left) else 0.0
        if explained > max(EXPLAINED, best.explained if best else 0.0):
            best = Cause(suspect.what, explained)
    return best


def beyond(error: np.ndarray) -> float:
    """Σ error², in units of sigma, less what rounding is allowed: 2² each."""
    return max(0.0, float(np.square(error).sum()) - 4.0 * error.size)


def hidden(values: Mapping[Key, np.ndarray], bundle: Bundle, dtype: str) -> list[Hidden]:
    """Mistakes that are made, though no value fails.  Wider formats hide none that a projection would find."""
    found = [(suspect.what, projected(values, run, bundle, dtype)) for suspect, run in runs(bundle) if dtype in NARROW]
    return [Hidden(what, *at) for what, at in found if at and is_made(*at[1:])]


def projected(values: Mapping[Key, np.ndarray], run: Parts, bundle: Bundle, dtype: str) -> tuple[str, float, float] | None:
    """(key, amount, z) of the stack's error along a suspect's, where that first makes a difference that is there to compare."""
    for key, rank in values:
        entry = bundle.entries[key]
        if entry.role in ("input", "param", "opt") or math.prod(entry.place.shape) < ENOUGH or not same_form(run, bundle, key):
            continue
        expected, sigma = bundle.value(key, rank), sigma_in(bundle, key, rank, dtype)
        d = part_of(run, bundle, key, rank) - expected
        if sigma is not None and (np.abs(d) > SEEN * sigma).any():
            return key, *along(values[key, rank] - expected, d, spread(sigma, entry.uncertainty))
    return None


def spread(sigma: np.ndarray, uncertainty: float) -> np.ndarray:
    """sigma for weights: no element counts for more than 64² typical ones."""
    return np.hypot(np.maximum(sigma, rms(sigma) / 64), uncertainty)


def is_made(amount: float, z: float) -> bool:
    return abs(z) > LIMITS.along and 0.5 < amount < 1.5


def along(error: np.ndarray, d: np.ndarray, sigma: np.ndarray) -> tuple[float, float]:
    """(amount, z) of an error along d, elements weighed by 1/sigma²."""
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(sigma > 0, 1 / np.square(sigma), 0.0)
    size = float(np.sum(weight * d * d))
    dot = float(np.sum(weight * d * error))
    return (dot / size, dot / math.sqrt(size)) if size and math.isfinite(dot) else (0.0, 0.0)


def runs(bundle: Bundle) -> list[tuple[Suspect, Parts]]:
    """Every suspect that applies, and what each rank has where it is made."""
    changed = [(suspect, suspect.changed(bundle.recipe)) for suspect in SUSPECTS if bundle.recipe]
    return [(suspect, every_rank(*change)) for suspect, change in changed if change]
