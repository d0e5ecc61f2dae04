"""The inputs that the checks of ops run on: one table for the tests and for golden op cases.

    CASES["layer_norm"]         cases of an op: its positional arrays and its static arguments
    COLLECTIVES["copy_to"]      cases of a collective: layouts before and after, the global shape, how it is cut
    VOCABULARY["..."]           the same for what works on a cut vocabulary: the second argument are ids
    SEQUENCES["ring_attention"] the same for attention over a cut sequence
    ON_RANKS                    all of these three
    EDGES, edge_cases("max")    the edge library: arrays that break things, and each op called on them (edges.py)
    EXACT["matmul"]             dyadic inputs, on which a linear op rounds nothing (exact.py)
    unchecked()                 registered ops of this package that have neither; a test wants it empty

Values are rng.py's hash of "op/case/argument", so any language can make them without a file.  Every op meets odd and prime
sizes, sizes 0 and 1, and the values that break it: equal and huge logits, rows without a key, ignored targets, repeated ids.
"""
from typing import Any

from refimpl.autograd import REGISTRY
from refimpl.cases.collectives import COLLECTIVES, VOCABULARY, Collective
from refimpl.cases.edges import EDGES, edge_cases
from refimpl.cases.exact import EXACT
from refimpl.cases.makers import Case
from refimpl.cases.ops import CASES
from refimpl.cases.sequences import SEQUENCES

ON_RANKS: dict[str, Any] = {**COLLECTIVES, **VOCABULARY, **SEQUENCES}


def unchecked() -> list[str]:
    """Registered ops of this package without a case.  Import all its modules first."""
    on_ranks = {**COLLECTIVES, **VOCABULARY, **SEQUENCES}
    return sorted(name for name, op in REGISTRY.items() if op.__module__.partition(".")[0] == "refimpl"
                  and not (on_ranks if op.collective else {**CASES, **on_ranks}).get(name))


__all__ = ["CASES", "COLLECTIVES", "Case", "Collective", "EDGES", "EXACT", "ON_RANKS", "SEQUENCES", "VOCABULARY", "edge_cases",
           "unchecked"]
