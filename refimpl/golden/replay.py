"""Local replay: run the reference with a stack's own values put in place behind every op, so each op meets what its own met.

What differs then is that op's own error, free of all that had accumulated before it: the first difference of a trace may be
far downstream of the mistake, or the mistake hidden behind rounding; a local one is neither.  Of ops that the stack has not
dumped the reference's results stand, computed from the nearest dumped ones before them.
"""
from dataclasses import replace
from typing import Any, Callable, Mapping

import numpy as np

from refimpl.autograd import Record, Tensor
from refimpl.autograd.op import Seam
from refimpl.comm import Comm, Mesh
from refimpl.golden.emulate import NEAREST, Rounding
from refimpl.golden.noise import at_least, sigma
from refimpl.golden.recipe import Recipe, batch
from refimpl.golden.trace import VIEWS, Value, plain, trace
from refimpl.ops.losses import IGNORE


class Substitute(Record):
    """Where `values` has an op's result, or the gradient by it, keep in `computed` what the op gave, and go on with that.

    With `rounding` what the stack has dumped is known to the format's unit only: it may have gone on with more digits.
    """

    def __init__(self, values: Mapping[str, np.ndarray], count: int, rounding: Rounding | None = None) -> None:
        super().__init__()
        self.values, self.targets, self.rounding = values, count, rounding
        self.computed: dict[str, np.ndarray] = {}

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.detail or isinstance(op, Seam):
            return run(*arrays, **static)
        name = plain(self.name_of_call())
        y, vjp = run(*arrays, **static)
        if type(y) is tuple or op.name in VIEWS:
            return y, vjp

        def replaced(dy: np.ndarray) -> Any:
            return vjp(self.put(f"step1/dact/{name}", dy / self.targets) * self.targets)
        return self.put(f"step1/act/{name}", y), replaced

    def put(self, key: str, computed: np.ndarray) -> np.ndarray:
        self.computed[key] = computed
        return self.given(key, computed)

    def given(self, key: str, otherwise: np.ndarray) -> np.ndarray:
        if key not in self.values:
            return otherwise
        return self.rounding.moved(self.values[key], self.rounding.fmt) if self.rounding else self.values[key]

    def gradients(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the optimizer is given: the stack's own gradients."""
        return {name: g.like(self.given(f"step1/grad/{name}", g.array)) for name, g in grads.items()}


def replayed(recipe: Recipe, comm: Comm, values: Mapping[str, np.ndarray], count: int, rounding: Rounding | None = None
             ) -> dict[str, Value]:
    """What the reference makes of the stack's own values: of every value, from the nearest ones before it that were dumped."""
    frame = Substitute(values, count, rounding)
    found = trace(recipe, comm, rounding, [frame], frame.gradients)
    for key, computed in frame.computed.items():
        if key in found:
            found[key].array = rounding.round(computed) if rounding else computed
    return found


def valid_targets(recipe: Recipe) -> int:
    """Of step 1, over all ranks."""
    return int((batch(replace(recipe, mesh=Mesh().dims), Mesh(), 1).targets != IGNORE).sum())


def local(recipe: Recipe, comm: Comm, values: Mapping[str, np.ndarray], count: int, dtype: str, runs: int
          ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What each op should have given, and its sigma in a format."""
    right = replayed(recipe, comm, values, count)
    noise = sigma(right, (replayed(recipe, comm, values, count, Rounding(dtype, seed)) for seed in range(runs)), NEAREST)
    return {key: v.array for key, v in right.items()}, at_least(right, noise, dtype)
