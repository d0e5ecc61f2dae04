"""Mistakes that are often made, as changes of the reference: a stack that errs as one of them does has probably made it.

Each is run, and its error compared with the stack's (diagnose.py).  A mistake that rounding hides in every single element still
adds up along the direction of its own error.
"""
import fnmatch
import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from refimpl.autograd import Frame
from refimpl.autograd.op import stack
from refimpl.golden.recipe import Recipe
from refimpl.ops import IGNORE, Mask, gelu_erf, gelu_tanh

Applies = Callable[[Recipe], bool]


def one_name(name: str) -> str:
    """All ways to attend are one op here."""
    return "attention" if name.endswith("_attention") else name


class Instead(Frame):
    """Run fn(run, *arrays, **static) in place of every op or seam called `name`, where its place in the model fits `where`."""

    def __init__(self, name: str, fn: Callable, where: str = "*") -> None:
        self.name, self.fn, self.where = name, fn, where

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        here = one_name(op.name) == self.name and fnmatch.fnmatchcase(stack.name, self.where)
        return self.fn(run, *arrays, **static) if here else run(*arrays, **static)


@dataclass(frozen=True)
class Suspect:
    """what was probably done; the recipe's model with another setting, or an op that does something else.

    settings  (field, one value, the other) of the model's configuration: the other than it has
    instead   recipe -> what Instead is made of
    applies   whether it makes a difference to a recipe
    """
    what: str
    settings: tuple[str, Any, Any] | None = None
    instead: Callable[[Recipe], tuple] | None = None
    applies: Applies = lambda recipe: True

    def changed(self, recipe: Recipe) -> tuple[Recipe, list[Frame]] | None:
        """The recipe and the frames of a run that makes this mistake; None where there is nothing to be mistaken in."""
        if not self.applies(recipe):
            return None
        if self.instead:
            return recipe, [Instead(*self.instead(recipe))]
        assert self.settings
        field, *values = self.settings
        now = getattr(recipe.config, field)
        if now not in values:
            return None
        other = values[1 - values.index(now)]
        return replace(recipe, config=replace(recipe.config, **{field: other})), []


def with_static(**changes: Any) -> Callable:
    """The same op with other static arguments."""
    def fn(run: Callable, *arrays: Any, **static: Any) -> Any:
        return run(*arrays, **static | changes)
    return fn


def scaled(factor: float, argument: int) -> Callable:
    """The same op with one argument times a factor."""
    def fn(run: Callable, *arrays: Any, **static: Any) -> Any:
        y, vjp = run(*(a * factor if k == argument and a is not None else a for k, a in enumerate(arrays)), **static)

        def scaled_vjp(*dy: Any) -> Any:
            dx = list(vjp(*dy))
            dx[argument] = None if dx[argument] is None else dx[argument] * factor
            return tuple(dx)
        return y, scaled_vjp
    return fn


def tiled(run: Callable, q: Any, k: Any, v: Any, *others: Any, **static: Any) -> Any:
    """Attention whose kv heads repeat 0,1,0,1 instead of 0,0,1,1."""
    H, G = q.shape[1], k.shape[1]
    order = np.arange(H).reshape(H // G, G).T.ravel()
    back = np.argsort(order)
    y, vjp = run(q[:, order], k, v, *others, **static)

    def tiled_vjp(dy: Any) -> Any:
        dq, *rest = vjp(dy[:, order])
        return dq[:, back], *rest
    return y[:, back], tiled_vjp


def repeats_dropped(run: Callable, w: Any, ids: Any, *others: Any, **static: Any) -> Any:
    """An embedding whose gradient keeps the last of a token's occurrences alone (A[ids] += g)."""
    y, vjp = run(w, ids, *others, **static)
    flat = np.asarray(ids).ravel()
    last = {int(token): k for k, token in enumerate(flat)}
    kept = np.isin(np.arange(flat.size), list(last.values())).reshape(np.shape(ids))
    return y, lambda dy: vjp(dy * kept[..., None])


def without_gradient(run: Callable, *arrays: Any, **static: Any) -> Any:
    y, vjp = run(*arrays, **static)
    return y, lambda *dy: tuple(np.zeros_like(dx) for dx in (lambda d: d if type(d) is tuple else (d,))(vjp(*dy)))


def swapped(run: Callable, a: Any, b: Any, **static: Any) -> Any:
    y, vjp = run(b, a, **static)
    return y, lambda *dy: vjp(*dy)[::-1]


def all_counted(run: Callable, logits: Any, targets: Any, **static: Any) -> Any:
    (loss, count), vjp = run(logits, targets, **static)
    return (loss, np.full_like(count, np.size(targets))), vjp


def none_ignored(run: Callable, logits: Any, targets: Any, **static: Any) -> Any:
    return run(logits, np.where(targets == IGNORE, 0, targets), **static)


def l2(run: Callable, p: Any, g: Any, m: Any, v: Any, weight_decay: float = 0.0, **static: Any) -> Any:
    return run(p, g + weight_decay * p, m, v, weight_decay=0.0, **static)


def unbiased(recipe: Recipe) -> tuple[str, Callable]:
    D = recipe.config.d_model
    return "layer_norm", scaled(math.sqrt((D - 1) / D), 1)


def grouped(recipe: Recipe) -> bool:
    return 1 < recipe.config.n_kv_heads < recipe.config.n_heads


SUSPECTS = (
    Suspect("GELU in its erf form where the tanh form belongs", applies=lambda r: "tanh" in r.config.ffn,
            instead=lambda r: ("gelu_tanh", lambda run, x: gelu_erf.array(x))),
    Suspect("GELU in its tanh form where the erf form belongs", applies=lambda r: "erf" in r.config.ffn,
            instead=lambda r: ("gelu_erf", lambda run, x: gelu_tanh.array(x))),
    Suspect("gate and up are exchanged", instead=lambda r: ("swiglu", swapped), applies=lambda r: r.config.ffn == "swiglu"),
    Suspect("RoPE turns other pairs of channels: half where interleaved belongs, or the other way round",
            ("rope_pairing", "half", "interleaved"), applies=lambda r: r.config.positions == "rope"),
    Suspect("a norm's eps of 1e-6 where 1e-5 belongs, or the other way round", ("eps", 1e-5, 1e-6)),
    Suspect("a norm's eps of 1e-12", ("eps", 1e-5, 1e-12)),
    Suspect("a norm's gain is 1 + w where w belongs, or the other way round", ("norm", "rms_norm", "rms_norm_1+w"),
            applies=lambda r: r.config.norm != "layer_norm"),
    Suspect("LayerNorm with the unbiased variance (n - 1 in place of n)", instead=unbiased,
            applies=lambda r: r.config.norm == "layer_norm"),
    Suspect("attention scores are not divided by the root of head_dim",
            instead=lambda r: ("attention", with_static(scale=1.0))),
    Suspect("attention scores are divided by head_dim, not by its root",
            instead=lambda r: ("attention", with_static(scale=1 / r.config.head_dim))),
    Suspect("attention scores are divided by the root of d_model, not of head_dim",
            instead=lambda r: ("attention", with_static(scale=1 / math.sqrt(r.config.d_model)))),
    Suspect("there is no causal mask", instead=lambda r: ("attention", with_static(mask=Mask()))),
    Suspect("kv heads are tiled (0,1,0,1) where they belong in groups (0,0,1,1)", instead=lambda r: ("attention", tiled),
            applies=grouped),
    Suspect("the biases of q, k and v are left out", instead=lambda r: ("column_parallel_linear", scaled(0.0, 2), "*.attn.*"),
            applies=lambda r: "qkv" in r.config.biases),
    Suspect("the bias of a row-parallel layer is added by every tp rank",
            instead=lambda r: ("add", scaled(r.mesh["tp"], 1), "layers.*.*.add"),
            applies=lambda r: r.mesh["tp"] > 1 and "o" in r.config.biases),
    Suspect("the gradient of an embedding keeps one of a token's occurrences (A[ids] += g drops repeats)",
            instead=lambda r: ("vocab_parallel_embedding", repeats_dropped)),
    Suspect("a matrix that is embedding and head gets its gradient from the embedding alone",
            instead=lambda r: ("transpose", without_gradient, "transpose"), applies=lambda r: r.config.tied),
    Suspect("the loss is divided by the number of all targets, the ignored ones included",
            instead=lambda r: ("vocab_parallel_cross_entropy", all_counted)),
    Suspect("gradients, but not the loss, are divided by the number of all targets, the ignored ones included",
            instead=lambda r: ("divide_by_count", lambda run, grads, count: run(grads, r.batch_size * r.seq_len))),
    Suspect("ignored targets (-100) are taken for word 0", instead=lambda r: ("vocab_parallel_cross_entropy", none_ignored)),
    Suspect("gradients are not clipped", instead=lambda r: ("clip", lambda run, grads, norm, max_norm: (dict(grads), None))),
    Suspect("AdamW without bias correction", instead=lambda r: ("adamw", with_static(t=10 ** 6))),
    Suspect("AdamW without weight decay", instead=lambda r: ("adamw", with_static(weight_decay=0.0))),
    Suspect("weight decay added to the gradient (L2), not to the parameter", instead=lambda r: ("adamw", l2)),
    Suspect("weight decay of gains and biases, too", instead=lambda r: ("adamw", with_static(weight_decay=r.weight_decay))),
)
