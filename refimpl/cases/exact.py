"""Inputs on which linear and selection ops round nothing: multiples of a power of two, so small that float32 holds all sums.

    EXACT["matmul"]     cases as in CASES

Values are integers in [-32, 32) times 2^-3.  A product of two has 10 bits, and up to 2^13 of them add up within the 24 bits
of float32, so any order of summation, float32 and float64, and integer arithmetic give the same bits.
"""
from typing import Any

import numpy as np

from refimpl.cases.makers import Case, Maker, bools, case, ids
from refimpl.rng import integers, stream

UNIT = 2.0 ** -3


def dyadic(*shape: int) -> Maker:
    return lambda name: dyadic_array(name, shape)


def dyadic_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    index = np.arange(int(np.prod(shape)))
    return ((integers(stream(0, name), index, 64) - 32) * UNIT).reshape(shape)


def given(values: Any) -> Maker:
    return lambda name: np.asarray(values)


TABLE = {
    "add": [case("rows", dyadic(3, 5), dyadic(5))], "subtract": [case("rows", dyadic(3, 5), dyadic(5))],
    "mul": [case("rows", dyadic(3, 5), dyadic(5)), case("columns", dyadic(7, 1), dyadic(7, 3))],
    "scale": [case("a quarter", dyadic(3, 5), by=0.25)],
    "where": [case("broadcast", bools(7, 1), dyadic(5), dyadic(7, 5))],
    "sum": [case("all", dyadic(13, 17)), case("axis", dyadic(13, 17), axis=0)],
    "mean": [case("of sixteen", dyadic(3, 16), axis=-1)],
    "max": [case("two winners of four", given([[1.5, 3, 3, 2], [-1, -1, -2, -4]]), axis=-1)],
    "cumsum": [case("long", dyadic(3, 101)), case("first axis", dyadic(101, 3), axis=0)],
    "relu": [case("matrix", dyadic(11, 13))],
    "linear": [case("bias", dyadic(2, 11, 13), dyadic(13, 7), dyadic(7)), case("long", dyadic(3, 257), dyadic(257, 5))],
    "column_parallel_linear": [case("pieces", dyadic(2, 11, 13), dyadic(13, 8), dyadic(8), pieces=4)],
    "row_parallel_linear": [case("pieces", dyadic(2, 11, 12), dyadic(12, 7), pieces=4)],
    "matmul": [case("batch", dyadic(2, 7, 101), dyadic(2, 101, 5)), case("b repeated", dyadic(3, 5, 7), dyadic(7, 2))],
    "einsum": [
        case("scores", dyadic(2, 3, 5, 11), dyadic(2, 3, 7, 11), spec="bhtk,bhsk->bhts"),
        case("outer", dyadic(5), dyadic(7), spec="a,b->ba"),
        case("heads", dyadic(2, 5, 6), dyadic(6, 3, 4), spec="btd,dhk->bhtk")],
    "embedding": [case("repeated", dyadic(7, 5), ids(2, 23, below=7))],
    "gather": [case("repeated", dyadic(7, 5), ids(41, below=7))],
    "scatter_add": [case("repeated", dyadic(101, 3), ids(101, below=7), n=9)],
    "depthwise_conv": [case("four taps", dyadic(2, 13, 3), dyadic(4, 3))],
    "reshape": [case("merge", dyadic(2, 3, 5), shape=(6, 5))], "transpose": [case("cycle", dyadic(2, 3, 5), axes=(2, 0, 1))],
    "concat": [case("three", dyadic(3, 2), dyadic(3, 1), dyadic(3, 4))],
    "split": [case("two", dyadic(3, 7), sizes=(3, 4))],
    "slice_axis": [case("middle", dyadic(3, 7), start=2, stop=5)], "pad": [case("both", dyadic(3, 5), before=1, after=2)],
    "repeat": [case("heads", dyadic(2, 3, 5), times=3, axis=1)],
    "stop_gradient": [case("matrix", dyadic(3, 5))],
    "straight_through": [case("matrix", dyadic(3, 5), dyadic(3, 5))],
    "dropout": [case("half", dyadic(5, 7), given(np.arange(5)), given(np.arange(7)), key=1, rate=0.5, shape=(5, 7))],
    "rope": [case("the start", dyadic(2, 3, 4), given(np.zeros(3, int)))],
}
EXACT = {op: [Case(name, tuple(make(f"exact/{op}/{name}/{k}") for k, make in enumerate(makers)), static)
              for name, makers, static in rows] for op, rows in TABLE.items()}
