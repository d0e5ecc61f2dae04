"""Frames: look at the calls of ops and seams, or change them, without touching model code.

    with Record() as record: loss, grads = value_and_grad(fn, params)

Record keeps every call with its inputs, outputs and gradients; Replace plants another function; Count counts the FLOPs
of the matrix products and the bytes alive; Clock takes the time.  A frame is in force on the thread that entered it.
"""
import fnmatch
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import numpy as np

from refimpl.array import Array, is_array, owner, to_host
from refimpl.autograd.op import stack


class Frame:
    """Base of all frames: passes every call on unchanged."""

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        return run(*arrays, **static)

    def __enter__(self) -> Any:
        stack.frames = stack.frames + [self]
        return self

    def __exit__(self, *error: Any) -> None:
        stack.frames = [f for f in stack.frames if f is not self]


@dataclass
class Entry:
    """One recorded call.  dy and dx stay None for a seam and for an op that no gradient reached."""
    name: str
    op: Any
    phase: str
    inputs: tuple[Any, ...]
    static: dict[str, Any]
    y: Any = None
    dy: tuple[Array, ...] | None = None
    dx: Any = None


class Record(Frame):
    """Every call in order: `entries`, or by name with `record["layers.0.attn.q"]`.

    Names are scope + op (`layers.0.mlp.gelu_tanh`), a linear's is its weight's (`layers.0.attn.q`); a second call of
    the same name in the same phase gets `#2`.  `dy` is the accumulated gradient of the activation.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.count: Counter[tuple[str, str]] = Counter()

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.detail:
            return run(*arrays, **static)
        entry = Entry(self.name_of_call(), op, stack.phase, arrays, static)
        self.entries.append(entry)
        entry.y, vjp = run(*arrays, **static)
        if vjp is None:
            return entry.y, None

        def recorded(*dy: Array) -> Any:
            entry.dy = dy
            entry.dx = vjp(*dy)
            return entry.dx
        return entry.y, recorded

    def name_of_call(self) -> str:
        """Of the call that is running; each may be asked once."""
        key = stack.name, stack.phase
        self.count[key] += 1
        return stack.name + (f"#{self.count[key]}" if self.count[key] > 1 else "")

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"nothing called {name!r} was recorded; names: {', '.join(sorted({e.name for e in self.entries}))}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def replay(self) -> Iterator[tuple[Entry, float]]:
        """Run every recorded op again from its own recorded inputs and dy -> (entry, largest absolute difference).

        Ops are pure, so on one machine the difference is 0; against dumped values of another stack it is that op's own
        error, free of what accumulated before it.  Collectives communicate: all ranks must replay.
        """
        for entry in list(self.entries):
            y, vjp = entry.op.array(*entry.inputs, **entry.static)
            worst = difference(entry.y, y)
            if entry.dy is not None:
                worst = max(worst, difference(entry.dx, vjp(*entry.dy)))
            yield entry, worst


def difference(a: Any, b: Any) -> float:
    """Largest |a - b| over the arrays in two equal structures (tuples, None, arrays); inf where only one is nan."""
    if isinstance(a, (tuple, list)):
        return max((difference(p, q) for p, q in zip(a, b, strict=True)), default=0.0)
    if a is None or b is None:
        return 0.0 if a is b else np.inf
    a, b = to_host(a), to_host(b)
    if a.shape != b.shape:
        return np.inf
    with np.errstate(invalid="ignore"):
        d = np.where((a == b) | ((a != a) & (b != b)), 0.0, np.abs(a - b))
    return float(np.max(np.where(d != d, np.inf, d), initial=0.0))


class Replace(Frame):
    """Run `fn` in place of the op or seam `op_name` where its name matches `scope` (shell pattern): a planted mistake.

    `fn` has the form of what it replaces: arrays -> (y, vjp) for an op, arrays -> y for a seam.
    """

    def __init__(self, op_name: str, scope: str, fn: Callable) -> None:
        self.op_name, self.scope, self.fn, self.used = op_name, scope, fn, 0

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name != self.op_name or not fnmatch.fnmatchcase(stack.name, self.scope):
            return run(*arrays, **static)
        self.used += 1
        y = self.fn(*arrays, **static)
        return y if hasattr(op, "layout") else (y, None)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.used and error[0] is None:
            raise ValueError(f"Replace({self.op_name!r}, {self.scope!r}) matched no call")


class Count(Frame):
    """FLOPs of the matrix products by phase (2mnk each, from the shapes really multiplied), and bytes alive.

    `live` are the bytes of the outputs and residuals of ops that are still alive, `peak` their maximum.
    """

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        if op.name == "product":
            self.flops[stack.phase] += 2 * y.size * arrays[0].shape[-1]
            return y, vjp
        if op.detail:
            return y, vjp
        self.calls[op.name] += 1
        if vjp is not None:
            inputs = {id(owner(a)) for a in arrays if is_array(a)}
            for a in [*(y if isinstance(y, tuple) else (y,)), *residuals(vjp).values()]:
                if is_array(a) and id(owner(a)) not in inputs:
                    self.watch(owner(a))
        return y, vjp

    def watch(self, a: Array) -> None:
        if id(a) not in self.seen:
            self.seen.add(id(a))
            self.live += a.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(a, self.forget, id(a), a.nbytes)

    def forget(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.live -= nbytes


def residuals(vjp: Callable) -> dict[str, Array]:
    """The arrays that a vjp keeps, by the name of the variable in its closure."""
    kept: dict[str, Array] = {}
    for name, cell in zip(vjp.__code__.co_freevars, vjp.__closure__ or ()):
        value = cell.cell_contents
        if hasattr(value, "__array_priority__") and hasattr(value, "shape"):
            kept[name] = value
        elif isinstance(value, (tuple, list)):
            kept.update({f"{name}[{i}]": v for i, v in enumerate(value) if is_array(v)})
        elif callable(value) and hasattr(value, "__closure__"):
            kept.update(residuals(value))
    return kept


@dataclass(slots=True)
class Span:
    """One call.  kind: "op", "vjp" or "seam"."""
    name: str
    op: str
    phase: str
    kind: str
    start: float
    stop: float


@dataclass
class Clock(Frame):
    """When every call ran: `spans`, in seconds of time.perf_counter, in the order of their ends."""
    spans: list[Span] = field(default_factory=list)

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        start = time.perf_counter()
        y, vjp = run(*arrays, **static)
        kind = "seam" if vjp is None else "op"
        self.spans.append(Span(stack.name, op.name, stack.phase, kind, start, time.perf_counter()))
        if vjp is None:
            return y, None

        def timed(*dy: Array) -> Any:
            start = time.perf_counter()
            dx = vjp(*dy)
            self.spans.append(Span(stack.name, op.name, stack.phase, "vjp", start, time.perf_counter()))
            return dx
        return y, timed


class Guard(Frame):
    """Fingerprints what every vjp keeps: an array edited between forward and backward is an error that names it."""

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        if vjp is None:
            return y, None
        kept = residuals(vjp)
        before = {name: a.tobytes() for name, a in kept.items()}
        where = stack.name

        def guarded(*dy: Array) -> Any:
            for name, a in kept.items():
                if a.tobytes() != before[name]:
                    raise ValueError(f"{where}: the residual {name} of {op.name} was edited between forward and backward")
            return vjp(*dy)
        return y, guarded
