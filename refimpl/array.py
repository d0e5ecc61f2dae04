"""Which library an array belongs to, and the few things that numpy and cupy do differently.

Every op asks `xp_of(x)` for the module that made its input, so the same lines run on a CPU and on a GPU.  What they may use
of that module is listed in xptable.py.  cupy is imported in one place, `device_module`, when somebody asks for it by name.
"""
import sys
from types import ModuleType
from typing import Any, Callable

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
FLOATS = (np.dtype("float64"), np.dtype("float32"))
DEVICES = ("numpy", "cupy")
CACHED = 1 << 16                                        # elements: a core's cache holds several arrays of that many


def on_device(a: Any) -> bool:
    """Whether `a` is an array that does not live on the host: it has to be fetched with `.get()`."""
    return hasattr(a, "get") and hasattr(a, "dtype")


def is_array(a: Any) -> bool:
    return isinstance(a, np.ndarray) or on_device(a)


def xp_of(*arrays: Array) -> ModuleType:
    """The array module of the arguments: numpy unless one of them lives on a device."""
    for a in arrays:
        if type(a) is not np.ndarray and on_device(a):
            return sys.modules[type(a).__module__]
    return np


def device_module(name: str, local_rank: int = 0) -> ModuleType:
    """numpy, or cupy with the GPU of this local rank selected: the ranks of a machine take its GPUs in turn.

    Error: ValueError that says what to do where cupy or a GPU is missing.
    """
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not supported: use one of {', '.join(DEVICES)}")
    if name == "numpy":
        return np
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f"the device cupy needs the package cupy ({error}): pip install '.[gpu]'") from None
    try:
        gpus = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:                       # CUDARuntimeError is one: no driver, or no GPU
        raise ValueError(f"the device cupy needs a GPU, and cupy finds none: {str(error).splitlines()[0]}") from None
    cupy.cuda.Device(local_rank % gpus).use()
    return cupy


def to_host(a: Array) -> np.ndarray:
    """`a` as a numpy array (a copy from the device where it lives there, made when all work on it has ended)."""
    return a.get() if on_device(a) else np.asarray(a)


def freeze(y: Array) -> Array:
    """`y` as an array that refuses writes, so that a later edit cannot falsify the backward pass.

    numpy returns scalars from full reductions: they become 0-d arrays.  cupy arrays have no such flag.
    """
    if type(y) is np.ndarray:
        y.flags.writeable = False
        return y
    return freeze(np.asarray(y)) if isinstance(y, np.generic) else y


def owner(a: Array) -> Array:
    """The array that owns the memory of `a` (views share one owner)."""
    while is_array(a.base):
        a = a.base
    return a


def in_cache(f: Callable, *arrays: Array, rows: bool = False) -> Any:
    """f(*arrays), a block at a time, so that what one line of `f` makes is still in the cache when the next one reads it.

    f works element by element on arrays of one shape; with `rows`, on each vector along the last axis by itself.  It gives an
    array or a tuple of them.
    """
    each = max(1, arrays[0].shape[-1]) if rows and arrays[0].ndim else 1
    n, step = arrays[0].size // each, max(1, CACHED // each)
    if n <= step or any(map(on_device, arrays)):        # a GPU wants all at once
        return f(*arrays)
    flat = [a.reshape(n, a.shape[-1]) if rows else a.reshape(n) for a in arrays]
    wholes: list[Array] = []
    for start in range(0, n, step):
        y = f(*[a[start:start + step] for a in flat])
        parts = y if type(y) is tuple else (y,)
        wholes = wholes or [np.empty((n, *part.shape[1:]), part.dtype) for part in parts]
        for whole, part in zip(wholes, parts):
            whole[start:start + step] = part
    leading = arrays[0].shape[:-1] if rows else arrays[0].shape
    out = tuple(whole.reshape(*leading, *whole.shape[1:]) for whole in wholes)
    return out if type(y) is tuple else out[0]


def in_pairs(parts: Any) -> Any:
    """The sum of the parts, added up in pairs, then pairs of pairs: (0+1) + (2+3), and (0+1) + 2.

    Of a power of two of parts, the halves (and quarters ...) are sums of their own, whoever makes them.
    """
    parts = list(parts)
    while len(parts) > 1:
        left = parts[-1:] if len(parts) % 2 else []
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])] + left
    return parts[0]
