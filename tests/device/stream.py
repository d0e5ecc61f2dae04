"""What a device does later than the host: the streams of the double, and its pinned memory.

Work is queued on the current stream and done when the host waits for that stream, or for the device.  Until then the host
cannot rely on it, and here it sees GARBAGE:

    array.get()                     waits for the current stream; an array that another stream makes is not ready
    array.get(out=o, blocking=False)  o is there when the host has waited
    array.set(pinned)               `pinned` is read when the host waits: what is there then, if it was freed or changed
    __cuda_array_interface__        of an array on which work is queued is an AssertionError: MPI would not wait
"""
import threading
import weakref
from collections import Counter

import numpy as np

GARBAGE = 0xA5
waits = Counter()                                       # how often the host waited for the device, and why
pinned = {}                                             # id of a block of pinned memory -> weak reference to it
streams = weakref.WeakSet()
local = threading.local()
lock = threading.RLock()                                # ranks as threads share the device


class Stream:
    """Entered, it is the current stream of this thread."""

    def __init__(self):
        self.queued = self.done = 0
        self.copies = []                                # (id of the pinned block that is read or None, function that copies)
        with lock:
            streams.add(self)

    def queue(self):
        with lock:
            self.queued += 1
            return self, self.queued

    def synchronize(self):
        with lock:
            for _, copy in self.copies:
                copy()
            self.copies.clear()
            self.done = self.queued

    def __enter__(self):
        self.before, local.stream = current(), self
        return self

    def __exit__(self, *error):
        local.stream = self.before


NULL = Stream()


def current():
    return getattr(local, "stream", NULL)


class Device:
    """Entered, it is where this thread's new arrays are made."""

    def __init__(self, number=0):
        self.number = number

    def synchronize(self):
        waits["synchronize"] += 1
        with lock:
            for stream in list(streams):
                stream.synchronize()

    def __enter__(self):
        self.before, local.device = device(), self
        return self

    def __exit__(self, *error):
        local.device = self.before


def device():
    return getattr(local, "device", Device())


def is_done(work):
    stream, number = work
    return stream.done >= number


def garbage(a):
    """As `a`, with other numbers."""
    return np.full(a.nbytes, GARBAGE, np.uint8).view(a.dtype).reshape(a.shape)


def get(a, work, out, blocking):
    """The numbers of a device's array, on which `work` was the last, for the host."""
    out = np.empty(a.shape, a.dtype) if out is None else out
    require_alike(a, out)
    stream = current()
    with lock:
        numbers = a.copy() if work[0] is stream or is_done(work) else garbage(a)
        stream.queue()
        out[...] = garbage(a)
        stream.copies.append((None, lambda: np.copyto(out, numbers)))
    if blocking:
        waits["get"] += 1
        stream.synchronize()
    return out


def require_alike(a, host):
    if type(host) is not np.ndarray or (host.shape, host.dtype) != (a.shape, a.dtype):
        raise TypeError(f"the array on the device is {a.dtype}{list(a.shape)}, the one on the host is not")


def put(a, host):
    """The numbers of `host`, into the device's array `a`."""
    require_alike(a, host)
    a[...] = host
    root = host if host.base is None else host.base
    read = weakref.ref(host)
    with lock:
        if id(root) in pinned:                          # ordinary memory is read at once
            current().copies.append((id(root), lambda: np.copyto(a, garbage(a) if read() is None else read())))


def alloc_pinned_memory(size):
    block = np.full(size, GARBAGE, np.uint8)
    pinned[id(block)] = weakref.ref(block)
    weakref.finalize(block, freed, id(block)).atexit = False
    return block


def freed(block):
    """Somebody else uses that memory now."""
    with lock:
        del pinned[block]
        for stream in list(streams):
            for read, copy in stream.copies:
                if read == block:
                    copy()
