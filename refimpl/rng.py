"""Random numbers that do not depend on the layout: a hash of (seed, name, global index), never a running generator.

A rank that owns rows 100..199 of a matrix makes exactly these rows; a dropout mask cut over four ranks is the mask of
the serial run.  The hash needs only 64-bit unsigned integers, so any language can make the same weights without a file.
The published test vectors are in tests/test_rng.py.

    mix64(z)      SplitMix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")
    stream key    mix64(FNV1a64(utf-8 name) ^ mix64(seed))
    i-th draw     mix64(key + (i + 1) * 0x9E3779B97F4A7C15), its upper 24 bits: exact in float32, no libm
"""
import math
from typing import Sequence

import numpy as np

from refimpl.array import Array, xp_of

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix64(z: int) -> int:
    """SplitMix64's finaliser on one Python integer: a bijection of the 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fnv1a64(text: str) -> int:
    """The 64-bit FNV-1a hash of the utf-8 bytes of `text`."""
    h = 0xCBF29CE484222325
    for byte in text.encode("utf-8"):
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def stream(seed: int, name: str, step: int | None = None) -> int:
    """The key of the stream `name`.  With a `step`, a new stream for every training step (dropout)."""
    key = mix64(fnv1a64(name) ^ mix64(seed & MASK))
    return key if step is None else mix64(key ^ mix64(step & MASK))


def draw24(key: int, index: Array) -> Array:
    """Draw number `index` (any integer array) of the stream `key`: uniform integers in [0, 2**24), as uint64."""
    xp = xp_of(index)
    one = xp.uint64                                     # wrap-around in uint64 is what the hash is made of
    z = (index.astype(xp.uint64).reshape(-1) + one(1)) * one(GOLDEN_GAMMA) + one(key)     # numpy scalars would warn of it
    z = (z ^ (z >> one(30))) * one(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> one(27))) * one(0x94D049BB133111EB)
    return ((z ^ (z >> one(31))) >> one(40)).reshape(index.shape)


def flat_index(coordinates: Sequence[Array], shape: Sequence[int]) -> Array:
    """C-order flat index in the *global* array of `shape`, for the box spanned by one coordinate vector per axis.

    Shapes: coordinates[k] is int[n_k] -> int64[n_0, n_1, ...].  shape[0] is not needed to count and may be anything.
    """
    index: Array = 0
    for k, (where, size) in enumerate(zip(coordinates, shape)):
        along = where.reshape([-1 if j == k else 1 for j in range(len(shape))])
        index = index * size + along.astype("int64")
    return index if coordinates else np.zeros((), "int64")


def uniform_weights(key: int, index: Array, scale: float, dtype: str = "float64") -> Array:
    """Uniform on [-scale, scale): (n - 2**23) * 2**-23 * scale.  Exact in float32 when `scale` is a power of two."""
    n = draw24(key, index).astype("int64")
    return ((n - 2 ** 23).astype(dtype) * np.dtype(dtype).type(scale * 2.0 ** -23)).reshape(index.shape)


def draw(name: str, shape: Sequence[int], scale: float = 1.0, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    """An array of `shape`, uniform on [-scale, scale), that depends on (seed, name) alone: every rank draws the same."""
    return uniform_weights(stream(seed, name), np.arange(math.prod(shape)), scale, dtype).reshape(tuple(shape))


def integers(key: int, index: Array, below: int) -> Array:
    """Integers in [0, below) for the draws `index`; two draws a number, so that `below` may be up to 2**40."""
    xp, first = xp_of(index), 2 * index.astype("int64")
    high, low = draw24(key, first), draw24(key, first + 1)
    return ((high << xp.uint64(24) | low) % xp.uint64(below)).astype("int64")
