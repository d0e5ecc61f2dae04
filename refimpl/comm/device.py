"""Arrays of a device on their way to a collective and back, by way of the host.

    fetched(x)      x on the host, in pinned memory: the device copies there by itself, at the full speed of the bus
    returned(y, x)  y where x lives

MPI and numpy know nothing of the device's streams.  So `fetched` waits until all work on the device has ended, whatever stream
it is on, before it copies; and `returned` waits until its copy has ended, before its pinned memory can be used again.
"""
from types import ModuleType
from typing import Sequence

import numpy as np

from refimpl.array import Array, on_device, xp_of


def fetched(x: Array) -> np.ndarray:
    """x on the host in C order: itself where it is so already."""
    if type(x) is np.ndarray and x.flags.c_contiguous:
        return x
    if not on_device(x):
        return np.asarray(x).copy()
    settle(x)
    return x.get(out=pinned(xp_of(x), x.shape, x.dtype), blocking=True)


def returned(y: Array, x: Array) -> Array:
    """y, an array of the host or of x's device, on x's device (where x is on the host: y itself)."""
    if not on_device(x) or on_device(y):
        return y
    xp = xp_of(x)
    staged = pinned(xp, y.shape, y.dtype)
    np.copyto(staged, y)
    with x.device:
        out = xp.empty(y.shape, y.dtype)
    out.set(staged)
    settle(out)                                         # `staged` is free for the next copy as soon as we return
    return out


def settle(x: Array) -> None:
    """Wait until x's device has done all that it was told to (numpy has done it already)."""
    if on_device(x):
        x.device.synchronize()


def pinned(xp: ModuleType, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array of the host for copies to and from the device: in pinned memory, or where there is no more, in ordinary."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        memory = xp.cuda.alloc_pinned_memory(max(1, size))
    except (RuntimeError, MemoryError):                 # CUDARuntimeError is one: the system limits it
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, memory)
