"""Which library an array belongs to, and the few things that numpy and cupy do differently.

Every op asks `xp_of(x)` for the module that made its input, so the same lines run on a CPU and on a GPU.  cupy is
never imported here: an array that came from cupy can only exist if somebody imported it.
"""
import sys
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
FLOATS = (np.dtype("float64"), np.dtype("float32"))


def xp_of(*arrays: Array) -> ModuleType:
    """The array module of the arguments: numpy unless one of them is a cupy array."""
    for a in arrays:
        if type(a).__module__.partition(".")[0] == "cupy":
            return sys.modules["cupy"]
    return np


def float_dtype(name: str) -> np.dtype:
    """The training dtype called `name`.  Error: ValueError that lists the allowed ones."""
    allowed = [str(d) for d in FLOATS]
    if name not in allowed:
        raise ValueError(f"dtype {name!r} is not supported: use one of {', '.join(allowed)}")
    return np.dtype(name)


def to_host(a: Array) -> np.ndarray:
    """`a` as a numpy array (a copy from the device where it lives there)."""
    return a if isinstance(a, np.ndarray) else a.get() if hasattr(a, "get") else np.asarray(a)


def freeze(y: Array) -> Array:
    """`y` as an array that refuses writes, so that a later edit cannot falsify the backward pass.

    numpy returns scalars from full reductions: they become 0-d arrays.  cupy arrays have no such flag.
    """
    if type(y) is np.ndarray:
        y.flags.writeable = False
        return y
    return freeze(np.asarray(y)) if isinstance(y, np.generic) else y


def owner(a: np.ndarray) -> np.ndarray:
    """The array that owns the memory of `a` (views share one owner)."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a
