"""Run a recipe and keep everything: the values of a trace, by key, in the order in which they came to be.

    params/layers.0.attn.q.w            the parameters before the first step
    step1/tokens  step1/targets
    step1/act/layers.0.attn.q           what an op gave (the name of a linear is its weight's)
    step1/dact/layers.0.attn.q          the gradient of the mean loss by it, all uses together
    step1/comm/NAME.in  NAME.out        what a collective was given, and gave
    step1/loss                          mean over the valid targets of all ranks
    step1/grad/layers.0.attn.q.w        the gradient of that by a parameter, summed over ranks, not yet clipped
    step1/grad_norm
    step1/m/...  step1/v/...            AdamW's moments
    step1/params/...                    after the update

Of later steps there are the tokens, targets, loss, grad_norm and params.
"""
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import numpy as np

from refimpl.autograd import Frame, Record, Tensor
from refimpl.autograd.frames import Entry
from refimpl.autograd.op import Seam, stack
from refimpl.comm import Comm, Mesh
from refimpl.golden.emulate import Rounding
from refimpl.golden.recipe import Recipe, batch, weights
from refimpl.models import placements
from refimpl.models.placements import count
from refimpl.parallel import clip, gradient_norm
from refimpl.train import AdamW
from refimpl.train.step import gradients

VIEWS = ("reshape", "transpose")                        # ops whose results are the same numbers again
PLAIN = {"column_parallel_linear": "head", "vocab_parallel_cross_entropy": "cross_entropy"}     # names that a tied head has not
WAYS = re.compile(r"\b(blockwise|ring|all_to_all)_attention\b")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


@dataclass
class Value:
    """This rank's part of one value.

    role    input, param, act, grad, comm or opt (loss and norm are acts)
    phase   forward, backward or update
    terms   how many products or numbers are added up in one element: the reduction length
    """
    array: np.ndarray
    role: str
    phase: str
    step: int
    terms: int = 1


class Terms(Frame):
    """The longest sum within each op, by the op's name and phase."""

    def __init__(self) -> None:
        self.longest: Counter[tuple[str, str]] = Counter()

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "product":
            key = stack.name.rpartition(".")[0], stack.phase
            self.longest[key] = max(self.longest[key], arrays[0].shape[-1])
        return run(*arrays, **static)


def trace(recipe: Recipe, comm: Comm, rounding: Rounding | None = None, frames: Iterable[Frame] = (),
          gradients_become: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, dtype: str = "float64"
          ) -> dict[str, Value]:
    """Every value of the recipe's steps on this rank, computed in float64, or as `rounding` says, under `frames`.

    dtype             what numpy computes in: float64 or float32
    gradients_become  what the optimizer of step 1 is given instead of the gradients
    Sums over ranks are made in a fixed order, so the bits are the same on every backend.
    """
    mesh = Mesh(**recipe.mesh, comm=comm.fixed_order())
    table = placements(recipe.config, mesh)
    params = {name: t.like(t.array.astype(dtype)) for name, t in weights(recipe, mesh).items()}
    n, total = recipe.batch_size * recipe.seq_len, count(recipe.config)
    optimizer = AdamW(recipe.lr, (recipe.beta1, recipe.beta2), recipe.eps, recipe.weight_decay)
    values = {f"params/{name}": Value(t.array, "param", "forward", 0) for name, t in params.items()}
    for step in range(1, recipe.steps + 1):
        samples, record, terms = batch(recipe, mesh, step), Record(), Terms()
        with ExitStack() as entered:
            for frame in (terms, *([rounding] if rounding else []), *frames, *([record] if step == 1 else [])):
                entered.enter_context(frame)
            used = {name: t.like(rounding.round(t.array)) for name, t in params.items()} if rounding else params
            result = gradients(used, [samples], recipe.config, mesh, plan=recipe.plan)
            loss, computed = result.loss, result.grads
            if rounding:                                # division by the number of targets is rounded, too
                loss = rounding.total(loss, n)
                computed = {name: t.like(rounding.round(t.array)) for name, t in computed.items()}
            grads = gradients_become(computed) if step == 1 else computed
            norm = gradient_norm(grads, table, mesh)
            if rounding:
                norm = rounding.total(norm, total)
            params = optimizer.step(params, clip(grads, norm, recipe.clip))
        new = of_step(step, n, loss, norm, params, total)
        new |= {f"step{step}/{name}": Value(getattr(samples, name), "input", "forward", step) for name in ("tokens", "targets")}
        if step == 1:
            new |= dict(of_trace(record, terms, result.count, rounding.round if rounding else lambda a: a))
            new |= {f"step1/grad/{name}": Value(t.array, "grad", "backward", 1, n) for name, t in computed.items()}
            new |= {f"step1/{kind}/{name}": Value(a, "opt", "update", 1, n) for kind in "mv"
                    for name, a in getattr(optimizer, kind).items()}
        values |= {key: new[key] for key in sorted(new, key=order)}
    return values


def of_step(step: int, n: int, loss: float, norm: float, params: dict[str, Tensor], total: int) -> dict[str, Value]:
    """n: positions of the batch; total: parameters of the model."""
    return {f"step{step}/loss": Value(np.array(loss), "act", "forward", step, n),
            f"step{step}/grad_norm": Value(np.array(norm), "act", "backward", step, total),
            **{f"step{step}/params/{name}": Value(t.array, "param", "update", step, n) for name, t in params.items()}}


def of_trace(record: Record, terms: Terms, count: int, rounded: Callable[[Any], Any]) -> Iterator[tuple[str, Value]]:
    """What the ops and collectives of one step gave; gradients come in the order of the backward pass."""
    ops = [e for e in record if not isinstance(e.op, Seam) and e.op.name not in VIEWS]
    for e in ops:
        for name, y in outputs(e.name, e.y):
            yield f"step1/act/{name}", Value(y, "act", e.phase, 1, longest(e, terms, "forward"))
    for e in reversed(ops):
        for name, dy in outputs(e.name, e.dy):
            yield f"step1/dact/{name}", Value(rounded(dy / count), "grad", "backward", 1, longest(e, terms, "backward"))
    for e in record:
        if isinstance(e.op, Seam) and e.op.name in COLLECTIVES and "." in e.name and e.inputs[0].size > 1:
            for part, a in (("in", e.inputs[1]), ("out", e.y)):
                yield f"step1/comm/{e.name}.{part}", Value(np.asarray(a), "comm", e.phase, 1)


def outputs(name: str, y: Any) -> Iterator[tuple[str, np.ndarray]]:
    """An op's floating point results by name; several are numbered."""
    if type(y) is tuple and len(y) == 1:
        y = y[0]
    name = plain(name)
    for k, a in enumerate(y if type(y) is tuple else (y,)):
        if getattr(a, "dtype", np.dtype(int)).kind == "f":
            yield f"{name}:{k}" if type(y) is tuple else name, a


def plain(name: str) -> str:
    """The name of a value, however it was computed.

    >>> plain("layers.0.attn.ring_attention"), plain("column_parallel_linear")
    ('layers.0.attn.attention', 'head')
    """
    return PLAIN.get(name, WAYS.sub("attention", name))


def longest(e: Entry, terms: Terms, phase: str) -> int:
    return terms.longest[e.name.partition("#")[0], phase] or 1


ORDER = ("tokens", "targets", "act", "loss", "dact", "comm", "grad", "grad_norm", "m", "v", "params")


def order(key: str) -> int:
    """Where in a step a value comes to be; within a kind they stay as they came."""
    return ORDER.index(key.split("/")[1])
