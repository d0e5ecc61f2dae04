"""Rounding, emulated: a computation in float64 of which every op's results are rounded to a narrower format.

    with Rounding("bfloat16"): ...              to nearest: what a machine with that format gives
    with Rounding("bfloat16", seed=1): ...      up or down by chance (stochastic rounding), in proportion to what is nearer

Runs with different seeds differ by what rounding alone does, so their spread tells how large an error *must* be.  The expected
value of a stochastic rounding is what is rounded, and its variance, over numbers that lie anywhere between two neighbours, is
ulp²/6: twice that of rounding to nearest.  So NEAREST times the spread is that of machines that round to nearest.

Attention errs as FlashAttention's backward pass does, which rounds more than the naive one: it makes probabilities again from
lse, and takes Σ y·dy of the y that it has kept; naive attention's Σ p·dp shares the errors of its dp, so that they cancel.

Products are added up in float32, as the hardware does for all three formats: k sums, each rounded, walk at random.  Their error
has the variance k/6·u²·Σ x²w² where partial sums grow like the square root of their length.
Reference: Higham 2002, chapters 2 and 4 (the model of rounding); Connolly, Higham, Mary 2021 (stochastic rounding).
"""
import math
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from refimpl.autograd import Frame, residuals
from refimpl.autograd.op import Seam, stack
from refimpl.ops.blockwise import by_group, scale_of, shared
from refimpl.ops.mask import Mask
from refimpl.ops.sight import sight
from refimpl.rng import draw24, stream

NEAREST = math.sqrt(0.5)
ATTENTION = ("attention", "blockwise_attention", "ring_attention", "all_to_all_attention")
# Ops that round what they compute inside, before numbers cancel: as if their arguments were off by a unit.
STAGED = (*ATTENTION, "layer_norm", "rms_norm", "cross_entropy", "vocab_parallel_cross_entropy")


@dataclass(frozen=True)
class Format:
    """Binary floating point: multiples of 2**smallest below 2**largest, with so many `digits`, the implicit one included."""
    digits: int
    smallest: int
    largest: int

    @property
    def u(self) -> float:
        """Unit roundoff: the largest relative error of rounding to nearest."""
        return 2.0 ** -self.digits


FORMATS = {"float32": Format(24, -149, 128), "bfloat16": Format(8, -133, 128), "float16": Format(11, -24, 16)}


def rounded(x: np.ndarray, fmt: Format, dither: np.ndarray | None = None) -> np.ndarray:
    """x[...] float64, rounded to `fmt`: to nearest, ties to even; with dither in [0, 1) up where that exceeds what is missing.

    What is too large becomes infinite, as in IEEE 754; numbers below the normal ones keep what digits there are.

    >>> rounded(np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 5e-41]), FORMATS["bfloat16"]).tolist()
    [1.0, 1.015625, inf, 9.183549615799121e-41]
    """
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.frexp(x)[1]
        unit = np.maximum(exponent - fmt.digits, fmt.smallest)
        scaled = np.ldexp(x, -unit)
        whole = np.rint(scaled) if dither is None else np.floor(scaled + dither)
        y = np.where(np.isfinite(x), np.ldexp(whole, unit), x)
        return np.where(np.abs(y) < 2.0 ** fmt.largest, y, np.where(np.isnan(y), y, np.copysign(np.inf, y)))


class Rounding(Frame):
    """Round what ops give and what their vjps hand on; losses and the optimizer stay float32.

    The same seed draws the same on every rank.
    """

    def __init__(self, dtype: str, seed: int | None = None) -> None:
        self.fmt, self.wide, self.seed, self.drawn = FORMATS[dtype], FORMATS["float32"], seed, 0
        self.inside = self.wide                         # what the op that is running computes in
        self.inner: Callable | None = None              # how the attention that is running gets its Σ y·dy
        self.exact = False                              # sums of products are known to round nothing

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "product":
            return self.summed(run(*arrays)[0], *arrays), None
        if op.name == "row_dot":
            return self.round(self.inner(*arrays) if self.inner else run(*arrays)[0], self.inside), None
        if isinstance(op, Seam):
            y, _ = run(*arrays, **static)
            return self.round(y, self.wide) if op.name == "adamw" else y, None      # float32 masters and moments
        staged, attends, loss = op.name in STAGED, op.name in ATTENTION, "cross_entropy" in op.name
        before, self.inside = self.inside, self.fmt if attends else self.wide
        y, vjp = run(*(self.moved(a) for a in arrays) if staged else arrays, **static)
        self.inside = before

        def rounded_vjp(*dy: Any) -> Any:
            self.inside = self.fmt if attends else self.wide
            dy = tuple(self.moved(d) for d in dy) if staged else dy
            if attends:
                return self.attention_vjp(op, vjp, kept, dy[0], lse_of(op, vjp, arrays, static))
            return self.round(vjp(*dy))
        if loss:
            return (np.array(self.total(float(y[0]), arrays[1].size)), *y[1:]), rounded_vjp
        kept = self.round(y)
        return kept, rounded_vjp

    def moved(self, x: Any, fmt: Format | None = None) -> Any:
        """x up to a unit roundoff larger or smaller, by chance: so an op errs that rounds what it computes inside (Higham 2002,
        section 1.5, backward error)."""
        if self.seed is None or getattr(x, "dtype", None) != "float64":
            return x
        return x * (1 + (fmt or self.inside).u / NEAREST * (2 * self.dither(x.shape) - 1))

    def attention_vjp(self, op: Any, vjp: Callable, y: np.ndarray, dy: np.ndarray, lse: np.ndarray) -> Any:
        """The gradients by q, k, v with FlashAttention's errors.

        Probabilities are made again as p = e^(s - lse), and float32 has lse with an error of a unit: all gradients that come of
        a query err by one factor, as if its dy[B, H, T, K] did.  And Σ y·dy is that of y as it was kept, rounded.
        """
        if self.seed is not None:
            dy = dy * (1 + lse * (self.wide.u / NEAREST) * (2 * self.dither(lse.shape) - 1))

        def inner(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            if op.name == "attention":                  # it asks for Σ p·dp of the same rows
                return self.dot(y, dy).reshape(*a.shape[:-1], 1)
            return self.dot(self.round(a), b)
        self.inner = inner
        dx, self.inner = self.round(vjp(dy)), None
        return dx

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Σ a·b over the last axis, kept as size 1, added up in float32."""
        row, column = a[..., None, :], b[..., None]
        return self.summed(row @ column, row, column)[..., 0]

    def summed(self, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A product with the error of k sums in float32.  (To nearest: as it is, for no order of the sums is known.)"""
        if self.seed is None or self.exact:
            return y
        size = np.sqrt(np.matmul(a * a, b * b)) * (self.wide.u * math.sqrt(a.shape[-1] / 6) / NEAREST)
        return y + size * (math.sqrt(12) * (self.dither(y.shape) - 0.5))

    def round(self, values: Any, fmt: Format | None = None) -> Any:
        """An array, or a tuple of them; ids, conditions and None stay as they are."""
        if type(values) is tuple:
            return tuple(self.round(v, fmt) for v in values)
        if getattr(values, "dtype", None) != "float64":
            return values
        return rounded(values, fmt or self.fmt, None if self.seed is None else self.dither(values.shape))

    def total(self, y: float, n: int) -> float:
        """A sum of n numbers of one sign, added up one after another in float32: n roundings of u·(partial sum)."""
        if self.seed is None:
            return float(self.round(np.array(y), self.wide))
        size = abs(y) * self.wide.u * math.sqrt(n) / 3 / NEAREST
        return float(self.round(np.array(y + size * math.sqrt(12) * (float(self.dither(())) - 0.5)), self.wide))

    def dither(self, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform in [0, 1)."""
        self.drawn += 1
        return draw24(stream(self.seed or 0, f"rounding {self.drawn}"), np.arange(math.prod(shape))).reshape(shape) * 2.0 ** -24


def lse_of(op: Any, vjp: Callable, arrays: Any, static: dict[str, Any]) -> np.ndarray:
    """|lse|[B, H, T, 1] of a call of attention, 0 where a query sees no key; of all_to_all, which has it of other heads, the
    largest, [1, 1, 1, 1]."""
    q, k = arrays[:2]
    if op.name == "attention":
        seen = sight(static.get("mask", Mask()), q.shape[2], k.shape[2], *arrays[3:]).whole()
        s = scale_of(q, static.get("scale")) * by_group(q, k) @ shared(k).swapaxes(-1, -2)
        lse = np.logaddexp.reduce(s if seen is None else np.where(seen[:, None, None], s, -np.inf), axis=-1)
    else:
        lse = residuals(vjp)["lse"]
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    return size.reshape(*q.shape[:3], 1) if op.name != "all_to_all_attention" else np.full((1, 1, 1, 1), size.max(initial=0.0))


class Reordered(Frame):
    """Add up every product in another order: what changes is how far float64 itself can be relied on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name != "product":
            return run(*arrays, **static)
        a, b = arrays
        order = np.argsort(draw24(stream(self.seed, stack.name), np.arange(a.shape[-1])))
        return run(np.ascontiguousarray(a[..., order]), np.ascontiguousarray(b[..., order, :]), **static)
