"""Ops and seams, and `call`: the single point through which every one of them runs.

An op is one function from arrays to `(y, vjp)`.  `@op` lifts it to Tensors: `gelu_tanh(tensor)` records a node on the
tape, `gelu_tanh.array(x)` is the plain function.  Array arguments are positional, static ones (eps, a Mask, a comm) are
given by name, so every call can be written down and replayed.  A seam (`@seam`) is a plain function without a vjp that
tools want to see: an optimizer step, a collective, a matrix product.

Frames (frames.py) look at calls or change them without touching model code.  The one global is a thread-local stack:
the frames in force, the scope (where in the model we are) and the phase (forward, backward or recompute).
"""
import inspect
import threading
from functools import partial, wraps
from typing import Any, Callable, Iterator

from refimpl.array import freeze
from refimpl.autograd.layout import Layout, LayoutError, carried_cut, join, names, require_whole
from refimpl.autograd.tensor import Params, Tensor


class Stack(threading.local):
    """The frames, the scope, the phase and the name of the running call, one of each per thread."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.scope = ""
        self.phase = "forward"
        self.name = ""

    def enter(self, scope: str, phase: str | None = None) -> tuple[str, str]:
        """Move to `scope` (and `phase`); returns what `enter` needs to come back."""
        before = self.scope, self.phase
        self.scope, self.phase = scope, phase or self.phase
        return before


stack = Stack()
REGISTRY: dict[str, "Op"] = {}                          # every op by name; the checks walk it


def call(op: Any, arrays: Any, static: dict[str, Any]) -> tuple[Any, Any]:
    """Run `op` on plain arrays -> (y, vjp), through the frames in force (the newest is outermost)."""
    run = op.array
    for frame in stack.frames:
        run = partial(frame.call, op, run)
    return run(*arrays, **static)


def named_call(op: Any, name: str, arrays: Any, static: dict[str, Any]) -> tuple[Any, Any]:
    """`call` under a name, for frames to show; seams inside the op are named below it."""
    before, outer = stack.enter(name), stack.name
    stack.name = name
    try:
        return call(op, arrays, static)
    finally:
        stack.enter(*before)
        stack.name = outer


def join_name(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


class Op:
    """A differentiable operation on Tensors, made by `@op`.

    linearity   "joint" (add: linear in all arguments together), "each" (linear in each: linear, mul) or None; only
                linear ops accept a value that still has to be summed over ranks
    layout      the rule (args, static) -> Layout for ops that change layouts; default `join`
    named_by    index of the argument whose parameter names the activation (a linear is called as its weight)
    collective  its backward communicates, so it runs on every rank even where no gradient arrived
    analytic    complex step differentiation applies
    surrogate   its vjp is, by intention, not the derivative (straight_through)
    along       (static, ndim, which input) -> the axes it works along: an input must not be cut there (layout.py)
    cut         (args, static, y) -> {mesh axis: axis of y} for ops that cut or move axes; default: carried_cut
    values      which arguments hold values: floats of one dtype, that of the output; the others are ids and conditions
    """

    def __init__(self, array: Callable, linearity: str | None = None, layout: Callable | None = None,
                 named_by: int | None = None, collective: bool = False, analytic: bool = True,
                 surrogate: bool = False, values: slice = slice(None), along: Callable | None = None,
                 cut: Callable | None = None) -> None:
        self.array, self.name, self.__doc__ = array, array.__name__, array.__doc__
        self.linearity, self.layout, self.named_by = linearity, layout, named_by
        self.collective, self.analytic, self.surrogate, self.detail = collective, analytic, surrogate, False
        self.values, self.along, self.cut = values, along, cut
        self.__wrapped__ = array
        self.__signature__ = inspect.signature(array)
        self.__module__ = array.__module__

    def __call__(self, *args: Any, **static: Any) -> Any:
        tape = None
        arrays = []
        tensors = []
        for a in args:
            if type(a) is Tensor:
                arrays.append(a.array)
                tensors.append(a)
                if a.tape is not None:
                    if tape is not None and a.tape is not tape:
                        raise ValueError(f"{self.name}: its inputs belong to two different value_and_grad calls")
                    tape = a.tape
            elif a is None or hasattr(a, "dtype"):
                arrays.append(a)
            else:
                raise TypeError(f"{self.name}: argument {len(arrays)} is a {type(a).__name__}: arrays are given by position, "
                                f"anything else by name")
        for key, value in static.items():
            if type(value) is Tensor or getattr(value, "shape", None):
                raise TypeError(f"{self.name}: {key} is a {type(value).__name__} given by name: arrays are given by position, "
                                f"a table of sizes as lists (.tolist())")
        self.check_dtypes(arrays)
        layout = self.layout(args, static) if self.layout else join(self, tensors)
        if layout.partial and self.linearity == "joint" and any(type(a) is not Tensor for a in args[self.values]):
            raise LayoutError(f"{self.name} of a value that is partial over {names(layout.partial)} and a plain array: the "
                              f"latter would be counted once per rank; reduce_from before the {self.name}")
        if self.along and any(t.cut for t in tensors):
            require_whole(self, tensors, static)
        scope, weight = stack.scope, None
        if self.named_by is not None:
            weight = getattr(args[self.named_by], "name", None)
        if stack.frames:
            y, vjp = named_call(self, self.call_name(scope, weight), arrays, static)
        else:
            y, vjp = self.array(*arrays, **static)
        outs = tuple(map(freeze, y)) if type(y) is tuple else (freeze(y),)
        made = [Tensor(a, layout, tape if a.dtype.kind in "fc" else None) for a in outs]
        if self.cut or any(t.cut for t in tensors):
            for t in made:
                t.cut = self.cut(args, static, t.array) if self.cut else carried_cut(self, tensors, static, t.array)
        if tape is not None:
            tape.append(self, vjp, args, made, scope, weight)
        leaves = derived_from(tensors)
        for t in made:
            t.made_of = leaves
        return tuple(made) if type(y) is tuple else made[0]

    def check_dtypes(self, arrays: list[Any]) -> None:
        """Error: TypeError unless all values are floats of one dtype, which is then that of the output."""
        dtype: Any = None
        for k, a in enumerate(arrays[self.values], self.values.start or 0):
            if a is None or a.dtype is dtype:
                continue
            if a.dtype.kind != "f" or a.dtype.itemsize not in (4, 8):
                raise TypeError(f"{self.name}: argument {k} is {a.dtype}: it must be float64 or float32")
            if dtype is not None and a.dtype != dtype:  # None alone would compare equal to float64
                raise TypeError(f"{self.name}: its arguments are {dtype} and {a.dtype}: they must have one dtype")
            dtype = a.dtype

    def call_name(self, scope: str, weight: str | None) -> str:
        """The activation's name: the weight's without its last part (attn.q.w -> attn.q), else scope + op."""
        return weight.rpartition(".")[0] or weight if weight else join_name(scope, self.name)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def derived_from(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """The parameters a value is made of, when it is made of parameters alone (the transpose of a tied embedding)."""
    leaves: dict[Tensor, None] = {}                     # in order, each once, though x + x is made of x twice
    for t in tensors:
        if not t.leaves:
            return ()
        leaves.update(dict.fromkeys(t.leaves))
    return tuple(leaves)


def op(array: Callable | None = None, **traits: Any) -> Any:
    """Lift `f(*arrays, **static) -> (y, vjp)` to Tensors and register it.  Traits: see Op."""
    if array is None:
        return partial(op, **traits)
    lifted = Op(array, **traits)
    if lifted.name in REGISTRY:
        raise ValueError(f"two ops are called {lifted.name}: in {REGISTRY[lifted.name].__module__} and {lifted.__module__}")
    REGISTRY[lifted.name] = lifted
    return lifted


class Seam:
    """A function without a vjp that frames see: `@seam` keeps it a plain function and gives it this face in `call`."""

    linearity = None

    def __init__(self, function: Callable, detail: bool) -> None:
        self.function, self.name, self.detail = function, function.__name__, detail

    def array(self, *args: Any, **static: Any) -> tuple[Any, None]:
        return self.function(*args, **static), None


def seam(function: Callable | None = None, detail: bool = False) -> Any:
    """Let frames see calls of `function`.  detail=True: an inner step of an op, which recorders pass over."""
    if function is None:
        return partial(seam, detail=detail)
    face = Seam(function, detail)

    @wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        if not stack.frames:
            return function(*args, **static)
        return named_call(face, join_name(stack.scope, face.name), args, static)[0]

    run.seam = face                                     # type: ignore[attr-defined]
    return run


def scoped(function: Callable) -> Callable:
    """Name what runs inside after the parameters it is given: `attention(x, p)` runs in the scope of `p`."""
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        params: Iterator[Params] = (a for a in args if isinstance(a, Params))
        before = stack.enter(next(params).prefix)
        try:
            return function(*args, **kwargs)
        finally:
            stack.enter(*before)
    return run


__all__ = ["Op", "Seam", "Layout", "LayoutError", "call", "op", "seam", "scoped", "stack", "REGISTRY"]
