"""The edge library: the arrays that break things, and how each op is called on them.

    EDGES["nan"]            an array x[rows, columns] in float64
    VIEWS["reversed"]       the same values in another memory order
    CALLS["layer_norm"](x)  the arguments of a call in which x is argument 0: arrays, static
    edge_cases("max")       one Case for every edge array

The other arguments are ordinary.  CALLS names every op that does not communicate.
"""
from typing import Any, Callable

import numpy as np

from refimpl.cases.makers import Case
from refimpl.ops import CAUSAL, IGNORE
from refimpl.rng import draw

TINY = 2.0 ** -149                                      # the smallest subnormal of float32; nothing special in float64
INF, NAN = np.inf, np.nan

EDGES: dict[str, np.ndarray] = {
    "ordinary": draw("ordinary", (3, 4)),
    "length 1": np.array([[0.75]]),
    "one row": draw("one row", (1, 4)),
    "one column": draw("one column", (5, 1)),
    "prime": draw("prime", (7, 11)),
    "no rows": np.zeros((0, 4)),
    "subnormal": np.array([[TINY, -TINY, 3 * TINY, 0], [2.0 ** -1074, -2.0 ** -1074, 2.0 ** -1060, 1], [TINY] * 4]),
    "signed zero": np.array([[-0.0, 0.0, -0.0, -0.0], [0.0] * 4, [-0.0] * 4]),
    "equal": np.array([[2.0] * 4, [-3.0] * 4, [0.0] * 4]),
    "ties": np.array([[3.0, 3, 1, -2], [5, 5, 5, 5], [-1, 0, 0, -1]]),
    "huge logits": np.array([[1e4, -1e4, 0, 1e4], [1e4] * 4, [-1e4] * 4]),
    "infinite": np.array([[1.0, -2, 0.5, 3], [INF, -INF, 1, 0], [0.25, 1, -1, 2]]),
    "fully masked row": np.array([[1.0, -INF, 0.5, 3], [-INF] * 4, [0.25, 1, -1, 2]]),
    "nan": np.array([[1.0, -2, 0.5, 3], [0.5, NAN, 1, -1], [0.25, 1, -1, 2]]),
}
FINITE = [name for name, x in EDGES.items() if np.isfinite(x).all()]

VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: np.asfortranarray(x),
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "inside a larger one": lambda x: np.pad(x, 1, constant_values=7)[1:-1, 1:-1],
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Call = Callable[[np.ndarray], Arguments]


def other(x: np.ndarray, *shape: int) -> np.ndarray:
    """An ordinary argument in the dtype of x."""
    return draw("the other argument", shape, dtype=str(x.dtype))


def alone(**static: Any) -> Call:
    return lambda x: ((x,), static)


def beside(*argument_shapes: Callable[[int, int], tuple[int, ...]], **static: Any) -> Call:
    """x and one ordinary array for each shape, which is given as a function of the rows and columns of x."""
    return lambda x: ((x, *(other(x, *shape(*x.shape)) for shape in argument_shapes)), static)


def same(rows: int, columns: int) -> tuple[int, ...]:
    return rows, columns


def gain(rows: int, columns: int) -> tuple[int, ...]:
    return (columns,)


def weight(rows: int, columns: int) -> tuple[int, ...]:
    return columns, 3


def repeated(x: np.ndarray) -> np.ndarray:
    """Ids of rows of x, most of them more than once; none where there are no rows."""
    return np.array([0, len(x) - 1, 0, 0] if len(x) else [], int)


def with_condition(x: np.ndarray) -> Arguments:
    return (np.arange(x.size).reshape(x.shape) % 2 == 0, x, other(x, *x.shape)), {}


def as_queries(x: np.ndarray) -> Arguments:
    """The rows of x are queries of one head; three ordinary keys more than queries."""
    keys = other(x, 1, 1, len(x) + 3, x.shape[1])
    return (x[None, None], keys, keys), {"mask": CAUSAL}


def with_positions(x: np.ndarray) -> Arguments:
    return (x, np.arange(len(x)) * 1000), {"rotated": x.shape[1] // 2 * 2}


def with_targets(x: np.ndarray) -> Arguments:
    """Row 0 is ignored."""
    targets = np.arange(len(x)) % x.shape[1]
    targets[:1] = IGNORE
    return (x, targets), {}


def with_coordinates(x: np.ndarray) -> Arguments:
    return (x, *map(np.arange, x.shape)), {"key": 5, "rate": 0.5, "shape": x.shape}


CALLS: dict[str, Call] = {
    **{name: alone() for name in ("exp", "log", "sqrt", "power", "tanh", "sigmoid", "softplus", "erf", "relu", "silu",
                                  "quick_gelu", "gelu_erf", "gelu_tanh", "softmax", "log_softmax", "logsumexp", "cumsum",
                                  "norm", "stop_gradient")},
    **{name: beside(same) for name in ("add", "subtract", "mul", "divide", "swiglu")},
    **{name: alone(axis=-1) for name in ("sum", "mean", "max")},
    "straight_through": lambda x: ((x, other(x, *x.shape)), {}),
    "scale": alone(by=-0.5),
    "where": with_condition,
    "layer_norm": beside(gain, gain), "rms_norm": beside(gain),
    "linear": beside(weight), "column_parallel_linear": beside(weight), "row_parallel_linear": beside(weight),
    "matmul": beside(weight), "einsum": beside(weight, spec="ab,bc->ac"),
    "attention": as_queries, "blockwise_attention": as_queries,
    "cross_entropy": with_targets,
    "rope": with_positions,
    "dropout": with_coordinates,
    "embedding": lambda x: ((x, repeated(x)), {}), "gather": lambda x: ((x, repeated(x)), {}),
    "scatter_add": lambda x: ((x, np.zeros(len(x), int) + 1), {"n": 3}),
    "depthwise_conv": lambda x: ((x[None], other(x, 2, x.shape[1])), {}),
    "fft_conv": lambda x: ((x[None], other(x, *x.shape)), {}),
    "reshape": lambda x: ((x,), {"shape": (x.size, 1)}),
    "transpose": alone(axes=(1, 0)),
    "concat": beside(same, axis=0),
    "split": lambda x: ((x,), {"sizes": (len(x), 0), "axis": 0}),
    "slice_axis": lambda x: ((x,), {"axis": 0, "start": min(len(x), 1)}),
    "pad": alone(before=1, after=2), "repeat": alone(times=2),
}


def edge_cases(op_name: str, dtype: str = "float64", view: str = "") -> list[Case]:
    """A Case for every edge array: x in `dtype`, in the memory order of `view`."""
    cases = []
    for name, x in EDGES.items():
        low = x.astype(dtype)
        arrays, static = CALLS[op_name](VIEWS[view](low) if view else low)
        cases.append(Case(name, arrays, static))
    return cases
