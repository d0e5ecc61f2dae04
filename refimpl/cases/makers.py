"""How the inputs of a case are made: from the hash of "op/case/argument", or given."""
import math
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from refimpl.rng import draw, integers, stream

Maker = Callable[[str], Any]


@dataclass(frozen=True)
class Case:
    """Arguments of one call: op.array(*arrays, **static)."""
    name: str
    arrays: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)


def uniform(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Maker:
    return lambda name: np.asarray(draw(name, shape, scale) + mean)


def ids(*shape: int, below: int, but: dict[int, int] | None = None) -> Maker:
    """Integers below `below`, with the values of `but` planted at flat indices."""
    def make(name: str) -> np.ndarray:
        made = integers(stream(0, name), np.arange(math.prod(shape)), below)
        for where, value in (but or {}).items():
            made[where] = value
        return made.reshape(shape)
    return make


def bools(*shape: int) -> Maker:
    return lambda name: np.asarray(draw(name, shape) > 0)


def shifted(make: Maker) -> Maker:
    """Away from 0, with both signs."""
    return lambda name: np.asarray(make(name) + 2 * np.sign(make(name)))


def grouped(B: int, H: int, G: int, T: int, S: int, K: int) -> tuple[Maker, Maker, Maker]:
    return uniform(B, H, T, K), uniform(B, G, S, K), uniform(B, G, S, K)


def given(values: Any, dtype: str | None = None) -> Maker:
    return lambda name: np.array(values, dtype)


def case(name: str, *makers: Maker | None, **static: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return name, makers, static


def qkv(B: int, H: int, T: int, S: int, K: int, scale: float = 1.0) -> tuple[Maker, Maker, Maker]:
    return uniform(B, H, T, K, scale=scale), uniform(B, H, S, K, scale=scale), uniform(B, H, S, K)
