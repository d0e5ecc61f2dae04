"""Differences that heal: what an op gave is another value, and nothing that is made of it is.

A stack may keep heads or channels in another order, or add to all keys what softmax takes away again.  That is no mistake, if
all that follows is right, gradients of parameters included, and if the reference, too, given the stack's values in place of its
own, gets all that follows right: a small mistake may hide in what rounding does to the values behind it, but not in float64.
"""
from typing import Mapping, Sequence

import numpy as np

from refimpl.comm import Comm, run_threads
from refimpl.comm.base import SerialComm
from refimpl.golden.bundle import Bundle
from refimpl.golden.check import Key, Line, sigma_in
from refimpl.golden.judge import rho
from refimpl.golden.replay import replayed, valid_targets

UNSEEN = 0.25                                           # rho of what heals, behind it: less than a quarter of rounding


def heal(lines: Sequence[Line], values: Mapping[Key, np.ndarray], bundle: Bundle, dtype: str) -> None:
    """Set the verdict of lines that heal to "gauge", and say so."""
    acts = [line for line in lines if line.failed and line.key.startswith("step1/act/") and line.rho]
    gradients = {line.key.replace("/act/", "/dact/") for line in acts}
    healing = [line for line in lines if line.failed and (line in acts or line.key in gradients)]
    behind = [line for line in lines[lines.index(acts[0]) + 1:] if line.verdict == "pass"] if acts else []
    seen = any(line.key == "step1/loss" or line.key.startswith("step1/grad/") for line in behind)
    parts = bundle.ranks == 1 or all(line.rank is not None for line in acts)
    odd = any(line.rho.what for line in acts if line.rho)                       # nan or inf where there should be none
    if not bundle.recipe or odd or not parts or not seen or any(line.failed for line in lines if line not in healing):
        return
    made = forward(bundle, [{line.key: values[line.key, line.rank] for line in acts if (line.rank or 0) == r}
                            for r in range(bundle.ranks)])
    for line in behind:
        sigma = sigma_in(bundle, line.key, line.rank, dtype) if line.rung == "trace" else None
        if sigma is not None and (line.rank is not None or bundle.ranks == 1):
            r = rho(made[line.rank or 0][line.key], bundle.value(line.key, line.rank), sigma, line.entry.uncertainty, dtype)
            if r.norm > UNSEEN:
                return
    for line in healing:
        line.verdict, line.note = "gauge", "heals: all that is made of it is right"


def forward(bundle: Bundle, put: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """What each rank's reference makes of values that are put in place of its own."""
    assert bundle.recipe
    recipe, count = bundle.recipe, valid_targets(bundle.recipe)

    def main(comm: Comm) -> dict[str, np.ndarray]:
        return {key: value.array for key, value in replayed(recipe, comm, put[comm.rank], count).items()}
    return run_threads(bundle.ranks, main) if bundle.ranks > 1 else [main(SerialComm())]
