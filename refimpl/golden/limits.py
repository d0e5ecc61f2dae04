"""How large rho may be: from the study of right stacks in docs/false_alarms.json (benchmarks/false_alarms.py repeats it).

The study compares right stacks, which round in many ways, with bundles, and keeps of every comparison the largest rho over all
its values.  These maxima are of a Gumbel distribution, nearly: for each format and way to round their mean and standard
deviation tell which one is exceeded once in 1/RATE comparisons.  A limit is the largest of these numbers, or of the maxima that
were seen where one is larger, times MARGIN for the ways that the study has not, rounded up to the next half.
"""
import math
from dataclasses import dataclass
from typing import Any, Mapping

RATE = 1e-3                                             # false alarms in one comparison of a whole trace
MARGIN = 1.25
EULER = 0.5772156649015329


@dataclass(frozen=True)
class Limits:
    """Of rho of a whole value and of an element, of the trace and in local replay; of a projection on a suspect's error; and of
    the z of a factor."""
    norm: float
    element: float
    local_norm: float
    local_element: float
    along: float
    factor: float


LIMITS = Limits(norm=6.5, element=11.5, local_norm=8.5, local_element=38.5, along=4.0, factor=8.5)


def exceeded(mean: float, deviation: float, rate: float = RATE) -> float:
    """What a Gumbel variable of this mean and standard deviation exceeds with probability `rate`.

    >>> round(exceeded(0.0, 1.0, 1e-3), 3)
    4.936
    """
    return mean + deviation * math.sqrt(6) / math.pi * (-math.log(-math.log1p(-rate)) - EULER)


def limits_of(study: Mapping[str, Any]) -> Limits:
    """The limits that the rule makes of the study: study["comparisons"][...]["norm"] = {"mean", "deviation", "max", ...}; those
    of local replay have "local" in their names."""
    def limit(of: str, local: bool = False) -> float:
        cells = [cell[of] for name, cell in study["comparisons"].items() if of in cell and ("local" in name) == local]
        return math.ceil(2 * MARGIN * max(max(exceeded(c["mean"], c["deviation"]), c["max"]) for c in cells)) / 2
    return Limits(limit("norm"), limit("element"), limit("norm", True), limit("element", True), limit("along"),
                  limit("factor"))
