"""The inputs that the checks of ops run on: one table for the tests and for golden op cases.

    CASES["layer_norm"]         cases of an op: its positional arrays and its static arguments
    COLLECTIVES["copy_to"]      cases of a collective: layouts before and after, the global shape, how it is cut
    unchecked()                 registered ops of this package that have neither; a test wants it empty

Values are rng.py's hash of "op/case/argument", so any language can make them without a file.  Every op meets odd and prime
sizes, sizes 0 and 1, and the values that break it: equal and huge logits, rows without a key, ignored targets, repeated ids.
"""
import math
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from refimpl.autograd import REGISTRY
from refimpl.comm import Comm, shares
from refimpl.ops import CAUSAL, IGNORE
from refimpl.rng import draw, integers, stream

Maker = Callable[[str], Any]


@dataclass(frozen=True)
class Case:
    """Arguments of one call: op.array(*arrays, **static)."""
    name: str
    arrays: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Collective:
    """A collective's input: a global array of `shape`, of which each rank holds its part or, uncut, all.

    shares  along `axis` for a size of comm: None for as even as possible (then `sizes` is not passed)
    """
    name: str
    before: str
    after: str
    shape: tuple[int, ...]
    axis: int | None = None
    shares: Callable[[int], tuple[int, ...]] | None = None

    def arguments(self, comm: Comm, dtype: str) -> tuple[np.ndarray, dict[str, Any]]:
        """This rank's x and the static arguments besides comm."""
        shape, static = list(self.shape), {}
        sizes = self.shares(comm.size) if self.shares else None
        if self.axis is not None:
            shape[self.axis] = sum(sizes) if sizes else shape[self.axis] * comm.size
            static = {"axis": self.axis, **({"sizes": sizes} if sizes else {})}
            if self.before == "shard":
                shape[self.axis] = (sizes or shares(shape[self.axis], comm.size))[comm.rank]
        name = self.name if self.before == "replicated" else f"{self.name}/{comm.rank}"
        return draw(name, tuple(shape)).astype(dtype), static


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


def given(values: Any, dtype: str | None = None) -> Maker:
    return lambda name: np.array(values, dtype)


def case(name: str, *makers: Maker | None, **static: Any) -> tuple[str, tuple[Maker | None, ...], dict[str, Any]]:
    return name, makers, static


def qkv(B: int, H: int, T: int, S: int, K: int, scale: float = 1.0) -> tuple[Maker, Maker, Maker]:
    return uniform(B, H, T, K, scale=scale), uniform(B, H, S, K, scale=scale), uniform(B, H, S, K)


BROADCASTS = [
    case("same shape", uniform(3, 5), uniform(3, 5)), case("b repeated", uniform(2, 3, 5), uniform(5)),
    case("a repeated", uniform(5), uniform(2, 3, 5)), case("both repeated", uniform(3, 1), uniform(1, 7)),
    case("inner axis repeated", uniform(2, 1, 5), uniform(2, 3, 5)), case("scalar", uniform(), uniform(3)),
    case("both scalar", uniform(), uniform()), case("size 1 against size 1", uniform(1, 1), uniform(1)),
    case("no rows", uniform(0, 3), uniform(3)), case("size 1 repeated no times", uniform(1), uniform(0))]

TABLE = {
    "add": BROADCASTS,
    "mul": BROADCASTS,
    "scale": [
        case("matrix", uniform(3, 5), by=-0.75), case("scalar", uniform(), by=1 / 3), case("empty", uniform(0, 4), by=2.0),
        case("by zero", uniform(7), by=0.0), case("by an integer", uniform(7), by=3)],
    "sum": [
        case("all", uniform(3, 5)), case("last axis", uniform(2, 3, 5), axis=-1),
        case("two axes", uniform(2, 3, 5), axis=(0, 2)), case("kept axis", uniform(2, 3, 5), axis=1, keepdims=True),
        case("all kept", uniform(3, 5), keepdims=True), case("over nothing", uniform(3, 0), axis=1),
        case("no axis", uniform(3, 5), axis=()), case("one", uniform(1, 1), axis=0), case("scalar", uniform())],
    "linear": [
        case("bias", uniform(2, 3, 5), uniform(5, 7), uniform(7)), case("no bias", uniform(3, 5), uniform(5, 7)),
        case("bias None", uniform(3, 5), uniform(5, 7), None), case("vector", uniform(5), uniform(5, 7), uniform(7)),
        case("no rows", uniform(2, 0, 5), uniform(5, 3), uniform(3)),
        case("no inputs", uniform(2, 0), uniform(0, 3), uniform(3)),
        case("no outputs", uniform(2, 3), uniform(3, 0), uniform(0)),
        case("ones", uniform(1, 1), uniform(1, 1), uniform(1)),
        case("primes", uniform(11, 13), uniform(13, 17), uniform(17))],
    "layer_norm": [
        case("matrix", uniform(2, 3, 5), uniform(5), uniform(5)), case("vector", uniform(7), uniform(7), uniform(7)),
        case("one channel", uniform(3, 1), uniform(1), uniform(1)), case("two", uniform(3, 2), uniform(2), uniform(2)),
        case("no rows", uniform(0, 3), uniform(3), uniform(3)), case("primes", uniform(11, 13), uniform(13), uniform(13)),
        case("equal values", given([[2.0] * 5, [0.0] * 5]), uniform(5), uniform(5)),
        case("far from 0", uniform(3, 5, mean=100), uniform(5), uniform(5)),
        case("large eps", uniform(3, 5), uniform(5), uniform(5), eps=0.5)],
    "gelu_tanh": [
        case("matrix", uniform(3, 5, scale=4)), case("scalar", uniform()), case("one", given([-2.7])),
        case("empty", uniform(0, 3)), case("large", given([-1e4, -30.0, 0.0, 30.0, 1e4]))],
    "softmax": [
        case("matrix", uniform(3, 5, scale=4)), case("vector", uniform(7)), case("one class", uniform(3, 1)),
        case("no rows", uniform(0, 4)), case("no classes", uniform(3, 0)), case("equal", given([[2.0] * 5])),
        case("huge", uniform(3, 5, scale=16384)), case("masked", given([[-np.inf, 1, 2], [-np.inf] * 3, [0, -np.inf, 1]]))],
    "attention": [
        case("all visible", *qkv(2, 3, 5, 5, 7)), case("causal", *qkv(2, 2, 5, 5, 3), mask=CAUSAL),
        case("fewer queries", *qkv(1, 2, 2, 5, 3), mask=CAUSAL), case("one query", *qkv(1, 2, 1, 7, 3), mask=CAUSAL),
        case("rows without a key", *qkv(1, 2, 5, 3, 4), mask=CAUSAL), case("no keys", *qkv(1, 2, 3, 0, 4)),
        case("no queries", *qkv(1, 2, 0, 3, 4), mask=CAUSAL), case("ones", *qkv(1, 1, 1, 1, 1), mask=CAUSAL),
        case("no batch", *qkv(0, 2, 3, 3, 4)), case("primes", *qkv(1, 3, 11, 13, 5), mask=CAUSAL),
        case("own scale", *qkv(1, 2, 3, 5, 4), scale=0.5), case("huge scores", *qkv(1, 1, 3, 5, 4, scale=128), mask=CAUSAL),
        case("equal scores", given(np.zeros((1, 1, 3, 4))), uniform(1, 1, 5, 4), uniform(1, 1, 5, 4), mask=CAUSAL)],
    "cross_entropy": [
        case("matrix", uniform(3, 5, scale=4), ids(3, below=5)), case("batch", uniform(2, 3, 7), ids(2, 3, below=7)),
        case("some ignored", uniform(5, 7), ids(5, below=7, but={1: IGNORE, 4: IGNORE})),
        case("all ignored", uniform(2, 3, 5), given([[IGNORE] * 3] * 2)),
        case("own ignore_index", uniform(5, 7), ids(5, below=7, but={0: 0, 2: 3}), ignore_index=3),
        case("one row", uniform(7), given(2)), case("one class", uniform(3, 1), ids(3, below=1)),
        case("no rows", uniform(0, 5), ids(0, below=5)), case("equal", given([[2.0] * 5] * 3), ids(3, below=5)),
        case("huge", uniform(3, 5, scale=16384), ids(3, below=5)),
        case("32-bit targets", uniform(3, 5), given([4, IGNORE, 0], "int32"))],
    "embedding": [
        case("matrix", uniform(7, 5), ids(2, 3, below=7)), case("repeated", uniform(3, 5), given([1, 1, 2])),
        case("one id", uniform(7, 5), given(3)), case("no ids", uniform(7, 5), ids(0, below=7)),
        case("one row", uniform(1, 3), ids(4, below=1)), case("no channels", uniform(3, 0), ids(2, below=3)),
        case("8-bit ids", uniform(7, 5), given([[6, 0], [0, 6]], "uint8"))],
    "dropout": [
        case("matrix", uniform(5, 7), given(range(5)), given(range(7)), key=1, rate=0.5, shape=(5, 7)),
        case("a part", uniform(2, 3, 5), given([4, 9]), given([6, 7, 8]), given(range(5)), key=2, rate=0.25, shape=(1, 16, 5)),
        case("none", uniform(3, 5), given(range(3)), given(range(5)), key=3, rate=0.0, shape=(3, 5)),
        case("empty", uniform(0, 5), given([], "int64"), given(range(5)), key=4, rate=0.5, shape=(1, 5)),
        case("one", uniform(1), given([11]), key=5, rate=0.5, shape=(12,))],
    "reshape": [
        case("merge", uniform(2, 3, 5), shape=(6, 5)), case("split", uniform(3, 8), shape=(3, 2, 4)),
        case("flatten", uniform(2, 3, 5), shape=(-1,)), case("scalar", uniform(1, 1), shape=()),
        case("empty", uniform(0, 3), shape=(3, 0, 2)), case("same", uniform(2, 3), shape=(2, 3))],
    "transpose": [
        case("matrix", uniform(3, 5), axes=(1, 0)), case("heads", uniform(2, 3, 5, 7), axes=(0, 2, 1, 3)),
        case("cycle", uniform(2, 3, 5), axes=(2, 0, 1)), case("negative axes", uniform(2, 3, 5), axes=(-1, 0, -2)),
        case("empty", uniform(2, 0, 3), axes=(1, 2, 0)), case("same", uniform(2, 3), axes=(0, 1)),
        case("scalar", uniform(), axes=())],
}
CASES = {op: [Case(name, tuple(None if make is None else make(f"{op}/{name}/{k}") for k, make in enumerate(makers)), static)
              for name, makers, static in rows] for op, rows in TABLE.items()}


def uneven(size: int) -> tuple[int, ...]:
    """Shares 3, 0, 2, 1, 3, 0, 2, 1, ...: one rank in four holds nothing."""
    return tuple((3, 0, 2, 1)[r % 4] for r in range(size))


def both_ways(before: str, after: str) -> list[Collective]:
    """Cut along the last and the first axis, in equal shares and in unequal ones."""
    return [Collective("last axis", before, after, (3, 2), -1), Collective("first axis", before, after, (2, 3, 5), 0),
            Collective("uneven last axis", before, after, (3, 1), -1, uneven),
            Collective("uneven middle axis", before, after, (2, 1, 5), 1, uneven),
            Collective("empty", before, after, (0, 2), 1)]


def uncut(before: str, after: str) -> list[Collective]:
    return [Collective(name, before, after, shape) for name, shape in (
        ("matrix", (3, 5)), ("scalar", ()), ("empty", (0, 3)), ("batch", (2, 3, 7)))]


COLLECTIVES = {
    "copy_to": uncut("replicated", "per_rank"),
    "reduce_from": uncut("partial", "replicated"),
    "as_partial": uncut("per_rank", "partial"),
    "gather_from": both_ways("shard", "replicated"),
    "scatter_to": both_ways("replicated", "shard"),
    "all_gather": both_ways("shard", "per_rank"),
    "reduce_scatter": both_ways("partial", "shard"),
}


def unchecked() -> list[str]:
    """Registered ops of this package without a case.  Import all its modules first."""
    return sorted(name for name, op in REGISTRY.items() if op.__module__.partition(".")[0] == "refimpl"
                  and not (COLLECTIVES if op.collective else {**CASES, **COLLECTIVES}).get(name))
