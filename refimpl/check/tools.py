"""How the checks call what they check: evaluation on read-only arguments, derivatives, scales, random inputs."""
import math
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from refimpl.rng import draw

EXACT, DIFFERENCES = 1e-12, 1e-6                        # allowed error / scale
STEP, COMPLEX_STEP, JITTER = 2.0 ** -13, 2.0 ** -66, 2.0 ** -20
SMALL = 64                                              # up to so many elements each is tried by itself
Arrays = Sequence[Any]


def evaluate(f: Any, args: Arrays, static: dict[str, Any], frozen: bool = True) -> tuple[list[Any], Callable]:
    """The outputs as a list, and the vjp.  frozen: on read-only copies, so that a write is caught where it happens."""
    try:
        y, vjp = getattr(f, "array", f)(*([frozen_copy(a) for a in args] if frozen else args), **static)
    except ValueError as error:
        raise written(f, error, "an argument") from error
    return [np.asarray(a) if isinstance(a, np.generic) else a for a in (y if isinstance(y, tuple) else (y,))], vjp


def pull(f: Any, vjp: Callable, dy: Arrays, args: Arrays, frozen: bool = True) -> list[Any]:
    """The cotangent of every argument: None for an integer one, zeros where the vjp gives none to a float one."""
    try:
        dxs = vjp(*([frozen_copy(a) for a in dy] if frozen else dy))
    except ValueError as error:
        raise written(f, error, "dy or a residual") from error
    dxs = dxs if isinstance(dxs, tuple) else (dxs,)
    assert len(dxs) >= len(args), f"{title(f)}: the vjp gave {len(dxs)} cotangents for {len(args)} arguments"
    for k, (dx, a) in enumerate(zip(dxs, args)):
        if dx is not None:
            assert is_float(a), f"{title(f)}: argument {k} is no float array but got a cotangent"
            assert (dx.shape, dx.dtype) == (a.shape, a.dtype), (f"{title(f)}: the cotangent of argument {k} is {dx.dtype}"
                                                                f"{list(dx.shape)}, the argument {a.dtype}{list(a.shape)}")
    return [np.zeros_like(a) if dx is None and is_float(a) else dx for dx, a in zip(dxs, args)]


def written(f: Any, error: ValueError, what: str) -> Exception:
    return AssertionError(f"{title(f)} writes to {what}: {error}") if "read-only" in str(error) else error


def complex_step(f: Any, args: Arrays, static: dict[str, Any], k: int, v: np.ndarray) -> list[Any]:
    v = np.where(np.isfinite(args[k]), v, 0)            # a masked logit, -inf, stays what it is
    moved = [a.astype(complex) if is_float(a) else a for a in args]
    moved[k] = np.asarray(moved[k] + 1j * COMPLEX_STEP * v)
    ys, _ = evaluate(f, moved, static)
    return [y.imag / COMPLEX_STEP for y in ys]


def by_linearity(f: Any, args: Arrays, static: dict[str, Any], k: int, v: np.ndarray) -> list[Any]:
    """f(.., v, ..) - f(.., 0, ..): exact for an op that is linear in argument k, whatever the others add."""
    there, here = (evaluate(f, [w if j == k else a for j, a in enumerate(args)], static)[0] for w in (v, np.zeros_like(v)))
    return [a - b for a, b in zip(there, here)]


def differences(f: Any, args: Arrays, static: dict[str, Any], k: int, v: np.ndarray) -> list[Any]:
    """(8·(f(x + hv) - f(x - hv)) - (f(x + 2hv) - f(x - 2hv))) / 12h"""
    p1, m1, p2, m2 = (evaluate(f, [np.asarray(a + s * STEP * v) if j == k else a for j, a in enumerate(args)], static)[0]
                      for s in (1, -1, 2, -2))
    return [(8 * (a - b) - (c - d)) / (12 * STEP) for a, b, c, d in zip(p1, m1, p2, m2)]


def conditioned(f: Any, args: Arrays, dy: Arrays, static: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """The outputs and cotangents, and the scale of the errors of each that rounding must make."""
    def results(args: Arrays, dy: Arrays) -> list[Any]:
        ys, vjp = evaluate(f, args, static)
        return [*ys, *pull(f, vjp, dy, args)]
    out = results(args, dy)
    scales = [0.0 if a is None else largest([a]) for a in out]
    for trial in range(3):
        moved = results(*([np.asarray(a * (1 + JITTER * np.sign(draw(f"jitter {trial} {k}", a.shape)))) if is_float(a) else a
                           for k, a in enumerate(group)] for group in (args, dy)))
        for i, (a, b) in enumerate(zip(out, moved)):
            if a is not None:
                scales[i] = max(scales[i], largest([b - a]) / JITTER)
    ys = out[:len(dy)]
    for k in floats(args):
        scales[len(dy) + k] += largest(dy) * largest(ys) / max(largest([args[k]]), 1e-300)
    return out, scales


def compare(f: Any, what: str, got: Arrays, expected: Arrays, allowed: float, scales: Sequence[float]) -> None:
    for i, (a, b, scale) in enumerate(zip(got, expected, scales)):
        if b is not None:
            wrong = np.abs(a - b).max(initial=0)
            assert a.shape == b.shape and wrong <= allowed * scale, (
                f"{title(f)}: result {i} (outputs, then cotangents) {what} is off by {wrong:.1e}, allowed is "
                f"{allowed * scale:.1e}")


# -- small things -----------------------------------------------------------------------------------------------------

def title(f: Any) -> str:
    return str(getattr(f, "name", getattr(f, "__name__", "the function")))


def is_array(a: Any) -> bool:
    return isinstance(a, np.ndarray)


def is_float(a: Any) -> bool:
    return is_array(a) and a.dtype.kind == "f"


def floats(arrays: Arrays) -> list[int]:
    return [k for k, a in enumerate(arrays) if is_float(a)]


def cast(arrays: Arrays, dtype: Any) -> list[Any]:
    return [a.astype(dtype) if is_float(a) else a for a in arrays]


def frozen_copy(a: Any) -> Any:
    if is_array(a):
        a = a.copy(order="K")
        a.flags.writeable = False
    return a


def draw_like(name: str, y: np.ndarray) -> np.ndarray:
    """A cotangent: random for floats, zero for integers."""
    return draw(name, y.shape, dtype=str(y.dtype)) if is_float(y) else np.zeros_like(y)


def cotangents(ys: Arrays, name: str) -> list[np.ndarray]:
    return [draw_like(f"{name} {i}", y) for i, y in enumerate(ys)]


def directions(a: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for i in range(2 if a.size else 0):
        yield f"direction {i}", draw(f"v {i}", a.shape)
    for i in range(a.size if a.size <= SMALL else 0):
        v = np.zeros(a.shape)
        v.flat[i] = 1
        yield f"element {list(map(int, np.unravel_index(i, a.shape)))}", v


def finite(arrays: Arrays) -> list[np.ndarray]:
    """The float arrays, with 0 for a masked logit, -inf."""
    return [np.where(a == -np.inf, 0, a) for a in arrays if is_float(a)]


def norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.sum(a * a)) for a in finite(arrays)))


def largest(arrays: Arrays) -> float:
    return max((float(np.abs(a).max(initial=0)) for a in finite([np.asarray(a) for a in arrays])), default=0.0)


def transposed(a: np.ndarray) -> np.ndarray:
    return a.T.copy().T[...]


def strided(a: np.ndarray) -> np.ndarray:
    return np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a


def backward(a: np.ndarray) -> np.ndarray:
    return np.flip(np.flip(a).copy())[...]
