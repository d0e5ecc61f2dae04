"""The device double: arrays on a device that does not exist, for machines without a GPU.  This module stands in for cupy.

A `DeviceArray` holds its numbers where numpy cannot see them, and offers what xptable.py lists and no more: another function,
method or keyword is an AttributeError or TypeError.  Stricter than cupy where cupy is lenient and the numbers would be wrong
or slow: host arrays are refused as indices and operands, and so are assignments to repeated indices.  As cupy does it:

    asarray(host), array.get()     the only ways in and out
    index arrays                   wrap round where they are out of range
    reductions                     give 0-d arrays, never numpy scalars
    float(), int(), bool(), get    wait for the device; `waits` counts them
    kernels and copies             run on streams, which the host may be ahead of (stream.py)

`used` collects what was used of the table.
"""
import operator
from typing import Collection

import numpy as np

from refimpl import xptable

from . import stream

waits = stream.waits
used = set()
METHODS = {**xptable.METHODS, **xptable.DEVICE_METHODS}
FUNCTIONS = {**xptable.FUNCTIONS, **xptable.DEVICE_FUNCTIONS}


class DeviceArray:
    """An n-dimensional array on the device.  `base` is the array whose memory it shares."""

    __array_ufunc__ = None                              # numpy's functions refuse it; numpy arrays leave operators to it
    __array_priority__ = 100
    __hash__ = None
    __iter__ = None
    __contains__ = None

    def __init__(self, hidden, *relatives):
        self._hidden = np.asarray(hidden)
        shares = (r for r in relatives if isinstance(r, DeviceArray) and np.may_share_memory(r._hidden, self._hidden))
        self._base = next((r if r._base is None else r._base for r in shares), None)
        self._device = stream.device()
        self._wrote()

    def _wrote(self):
        """The last work on the memory of this array was queued just now."""
        (self if self._base is None else self._base)._work = stream.current().queue()

    @property
    def _last_work(self):
        return (self if self._base is None else self._base)._work

    @property
    def __cuda_array_interface__(self):
        """For an MPI that reads and writes the memory itself, now."""
        assert stream.is_done(self._last_work), "handed over before the device has done all work on it"
        data = (self._hidden.ctypes.data, False)
        return {"shape": self._hidden.shape, "typestr": self._hidden.dtype.str, "data": data, "version": 3,
                "strides": self._hidden.strides}

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_function__(self, function, *args):
        raise TypeError(f"numpy.{function.__name__} of an array on the device")

    def __getattr__(self, name):
        if name in xptable.ATTRIBUTES:
            used.add(name)
            if name == "base":
                return self._base
            value = getattr(self._hidden, name)
            return DeviceArray(value, self) if isinstance(value, np.ndarray) else value
        if name == "device":
            used.add(name)
            return self._device
        if name not in METHODS:
            raise AttributeError(f"arrays have no {name} that both numpy and cupy have: see refimpl/xptable.py")
        return Function(name, METHODS[name], self)

    def __getitem__(self, index):
        used.add("getitem")
        return DeviceArray(self._hidden[self._inside(index)], self)

    def __setitem__(self, index, value):
        used.add("setitem")
        self._wrote()
        if isinstance(index, DeviceArray) and index._hidden.dtype.kind == "b" and not isinstance(value, DeviceArray):
            self._hidden[index._hidden] = operand(value)        # a number under a mask: no shape depends on the mask
            return
        where = self._inside(index)
        if any(isinstance(i, np.ndarray) for i in where):
            hits = np.zeros(self._hidden.shape, int)
            np.add.at(hits, where, 1)
            if hits.max(initial=0) > 1:
                raise ValueError("assignment to repeated indices: which value stays is not defined on a device")
        self._hidden[where] = operand(value)

    def _inside(self, index):
        """The index for numpy: as many entries as axes, index arrays wrapped into range."""
        entries = list(index) if isinstance(index, tuple) else [index]
        for e in entries:
            if not (e is None or e is Ellipsis or type(e) in (int, slice) or isinstance(e, (np.integer, DeviceArray))):
                raise IndexError(f"an index is made of integers, slices, None, ... and device arrays, got {type(e)}")
            if isinstance(e, DeviceArray) and e._hidden.dtype.kind not in "iu":
                raise IndexError(f"an index array must hold integers, got {e._hidden.dtype}")
        if not any(e is Ellipsis for e in entries):
            entries.append(Ellipsis)                    # without it numpy gives a scalar for a single element
        axis, out = 0, []
        for e in entries:
            if isinstance(e, DeviceArray):
                out.append(e._hidden % max(1, self._hidden.shape[axis]))
            else:
                out.append(e)
            axis += 0 if e is None else 1 if e is not Ellipsis else \
                self._hidden.ndim - sum(i is not None and i is not Ellipsis for i in entries)
        return tuple(out)

    def __len__(self):
        used.add("len")
        return len(self._hidden)

    def __neg__(self):
        used.add("neg")
        return DeviceArray(-self._hidden)

    def __repr__(self):
        return f"DeviceArray({self._hidden.dtype}{list(self._hidden.shape)})"


def fetched(convert):
    def method(self):
        if self._hidden.ndim:
            raise TypeError(f"only 0-d arrays convert to {convert.__name__}, got {list(self._hidden.shape)}")
        used.add(convert.__name__)
        waits[convert.__name__] += 1
        return convert(self._hidden)
    return method


def operand(value):
    """What stands beside a device array: another, or a number."""
    if isinstance(value, DeviceArray):
        return value._hidden
    if isinstance(value, (int, float, complex, np.generic)):
        return value
    raise TypeError(f"Unsupported type {type(value)}: an array on the device meets device arrays and numbers only")


def binary(name, apply, swapped=False):
    def method(self, other):
        if hasattr(other, "__array_ufunc__") and other.__array_ufunc__ is None and not isinstance(other, DeviceArray):
            return NotImplemented                       # a Tensor: it takes over
        a, b = self._hidden, operand(other)
        used.add(name)
        return DeviceArray(apply(b, a) if swapped else apply(a, b))
    return method


def in_place(name, apply):
    def method(self, other):
        used.add(name)
        apply(self._hidden, operand(other))             # the array is written, not replaced
        self._wrote()
        return self
    return method


for name in (*xptable.BINARY, *xptable.COMPARISONS):
    setattr(DeviceArray, f"__{name}__", binary(name, getattr(operator, f"__{name}__")))
for name in xptable.REFLECTED:
    setattr(DeviceArray, f"__{name}__", binary(name, getattr(operator, f"__{name[1:]}__"), swapped=True))
for name in xptable.IN_PLACE:
    setattr(DeviceArray, f"__{name}__", in_place(name, getattr(operator, f"__{name}__")))
for convert in (float, int, bool):
    setattr(DeviceArray, f"__{convert.__name__}__", fetched(convert))


class Function:
    """A function or method of the table.  Called, it checks its arguments against the signature there."""

    def __init__(self, name, signature, array=None):
        self.name, self.signature, self.array = name, signature, array

    def __call__(self, *args, **named):
        used.update([self.name, *(f"{self.name}({key})" for key in bind(self.name, self.signature, len(args), named))])
        if self.name == "asarray":
            return args[0] if isinstance(args[0], DeviceArray) else DeviceArray(np.array(args[0]))
        if self.name in ("tobytes", "flatnonzero"):
            waits[self.name] += 1                       # flatnonzero: how many there are decides a shape
        if self.name == "get":
            return stream.get(self.array._hidden, self.array._last_work, named.get("out"), named.get("blocking", True))
        if self.name == "set":
            self.array._wrote()
            return stream.put(self.array._hidden, *args)
        if self.name == "cuda.alloc_pinned_memory":
            return stream.alloc_pinned_memory(*args)
        if self.name == "empty":
            return DeviceArray(stream.garbage(np.empty(*args)))
        if self.array is not None:
            result = getattr(self.array._hidden, self.name)(*args, **named)
            return DeviceArray(result, self.array) if isinstance(result, (np.ndarray, np.generic)) else result
        values = [tuple(map(operand, a)) if self.name == "concatenate" else plain(a) for a in args]
        result = operator.attrgetter(self.name)(np)(*values, **{key: plain(a) for key, a in named.items()})
        if named.get("out") is not None or result is None:
            (args[0] if result is None else named["out"])._wrote()
            return named.get("out")                     # it was written; copyto gives nothing back
        return DeviceArray(result, *args)


def plain(value):
    """An argument of a function: an array of the device, or anything that is no array."""
    if isinstance(value, np.ndarray):
        raise TypeError("a numpy array given to a function of the device: asarray it first")
    return value._hidden if isinstance(value, DeviceArray) else value


def parameters(signature: str) -> tuple[list[str], list[str]]:
    """The names that a signature of the table allows by position, and all of them."""
    by_position, _, by_name = ([n.strip() for n in part.split(",") if n.strip()] for part in signature.partition("*"))
    return by_position, by_position + by_name


def bind(name: str, signature: str, given: int, named: Collection[str]) -> list[str]:
    """The parameters that a call gives.  Error: TypeError where it is not in the table."""
    by_position, every = parameters(signature)
    if signature == "*shape":
        return ["shape"]
    if given > len(by_position) or not set(named) <= set(every):
        raise TypeError(f"{name}({signature}) is what both numpy and cupy have, got {given} arguments by position and "
                        f"{', '.join(named) or 'none'} by name: see refimpl/xptable.py")
    return [*by_position[:given], *named]


class Namespace:
    """A submodule: fft."""

    def __init__(self, prefix):
        self.prefix = prefix

    def __getattr__(self, name):
        return __getattr__(f"{self.prefix}.{name}")


def __getattr__(name):
    """The functions of the module, and its constants."""
    if name in xptable.CONSTANTS:
        used.add(name)
        return getattr(np, name)
    if name in xptable.UFUNCS:
        return Function(name, xptable.UFUNCS[name])
    if name in FUNCTIONS:
        return Function(name, FUNCTIONS[name])
    if any(key.startswith(name + ".") for key in FUNCTIONS):
        return Namespace(name)
    raise AttributeError(f"{name} is not what both numpy and cupy have: see refimpl/xptable.py")
