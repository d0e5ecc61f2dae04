"""Tensor: an array with a layout tag and a place on a tape; Params: named Tensors, seen through a prefix."""
from typing import Any, Iterator, Mapping

from refimpl.array import Array
from refimpl.autograd.layout import NOWHERE, REPLICATED, Layout


class Tensor:
    """An array that ops accept.

    array   numpy or cupy, never written to
    layout  over which mesh axes it varies and is partial (layout.py)
    tape    the tape it is recorded on, None where no gradient is wanted
    slot    its place on that tape
    name    a parameter's full name, "" for anything else
    cut     {mesh axis: numpy axis} along which it is cut, where known: it tells `linear` that a product is a partial sum
    shared  mesh axes over which the ranks' parts of a parameter overlap: its gradient is to be summed over the holders
    made_of the parameters it is made of, when it is made of parameters alone
    """
    __slots__ = ("array", "layout", "tape", "slot", "name", "cut", "shared", "made_of")

    def __init__(self, array: Array, layout: Layout = REPLICATED, tape: Any = None, name: str = "",
                 cut: Mapping[str, int] | None = None, shared: frozenset[str] = NOWHERE) -> None:
        self.array, self.layout, self.tape, self.name = array, layout, tape, name
        self.cut: Mapping[str, int] = cut or {}
        self.shared = shared
        self.slot = -1
        self.made_of: tuple["Tensor", ...] = ()

    def like(self, array: Array, layout: Layout | None = None) -> "Tensor":
        """Another value of the same parameter."""
        return Tensor(array, layout or self.layout, None, self.name, self.cut, self.shared)

    @property
    def leaves(self) -> tuple["Tensor", ...]:
        """The parameters behind this value, () for an activation."""
        return (self,) if self.name else self.made_of

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def varies(self) -> frozenset[str]:
        return self.layout.varies

    @property
    def partial(self) -> frozenset[str]:
        return self.layout.partial

    def __len__(self) -> int:
        return len(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __repr__(self) -> str:
        tags = "".join(f", {k}={'+'.join(sorted(v))}" for k, v in self.layout._asdict().items() if v)
        name = f"{self.name}: " if self.name else ""
        return f"Tensor({name}{tuple(self.shape)}, {self.dtype}{tags})"

    __array_ufunc__ = None                              # `array + tensor` is refused by numpy and comes to us
    __add__: Any                                        # the operators are supplied by ops/arithmetic.py
    __radd__: Any
    __sub__: Any
    __rsub__: Any
    __mul__: Any
    __rmul__: Any
    __truediv__: Any
    __rtruediv__: Any
    __pow__: Any
    __neg__: Any


class Params(Mapping[str, Tensor]):
    """Named parameters.  `params / "attn"` is a view: its keys drop the prefix, nothing is copied.

    >>> p = Params({"layers.0.attn.q.w": Tensor(0), "head.w": Tensor(1)})
    >>> list(p / "layers.0" / "attn")
    ['q.w']
    """

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix

    def full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def __truediv__(self, name: str) -> "Params":
        return Params(self.tensors, self.full(name))

    def __getitem__(self, name: str) -> Tensor:
        full = self.full(name)
        if full not in self.tensors:
            raise KeyError(f"no parameter {full!r}; under {self.prefix!r} there are: {', '.join(self) or 'none'}")
        return self.tensors[full]

    def get(self, name: str, default: Any = None) -> Any:
        return self.tensors.get(self.full(name), default)

    def __contains__(self, name: object) -> bool:
        return self.full(str(name)) in self.tensors

    def __iter__(self) -> Iterator[str]:
        skip = len(self.prefix) + 1 if self.prefix else 0
        return (name[skip:] for name in self.tensors if not skip or name.startswith(self.prefix + "."))

    def __len__(self) -> int:
        return sum(1 for _ in self)
