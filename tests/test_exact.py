"""Localises a term that is lost, doubled or rounded: on dyadic data linear and selection ops must be right to the last bit.

There is no tolerance here.  Every sum fits 24 bits, so float32, float64, any order of summation, any number of ranks and
integer arithmetic must agree bit for bit.  What divides, takes a root or an exponential is left out.
"""
from fractions import Fraction

import numpy as np
import pytest

import refimpl.parallel  # noqa: F401 (registers the collectives)
from refimpl.autograd import REGISTRY
from refimpl.cases import COLLECTIVES, EXACT, ON_RANKS
from refimpl.cases.collectives import every_split
from refimpl.cases.exact import UNIT, dyadic_array
from refimpl.check.tools import cast, evaluate, floats, is_float, pull
from refimpl.comm import shares
from refimpl.ops import fft_conv, linear, matmul, scatter_add, sum
from refimpl.rng import draw

ALL = [pytest.param(REGISTRY[name], case, id=f"{name}-{case.name}") for name, cases in EXACT.items() for case in cases]
LINEAR = [p for p in ALL if p.values[0].linearity and not p.values[0].surrogate]
ROUNDS = {"fft_conv"}                                   # linear, but its FFT rounds: tested below


def run(op, arrays, static):
    """The outputs, the cotangents of all arguments, and dy."""
    ys, vjp = evaluate(op, arrays, static)
    dy = [dyadic_array(f"dy {i}", y.shape).astype(y.dtype) for i, y in enumerate(ys)]
    return ys, pull(op, vjp, dy, arrays), dy


def same(a, b):
    """Equal values, exactly, whatever the dtypes."""
    return a is b is None or (a.shape == b.shape and bool(np.all(a == b)))


def inner(a, b):
    """Σ a·b in exact rational arithmetic."""
    total = Fraction(0)
    for x, y in zip(np.ravel(a).tolist(), np.ravel(b).tolist()):
        total += Fraction(x) * Fraction(y)
    return total


def test_every_linear_op_is_here():
    pure = {name for name, op in REGISTRY.items() if op.linearity and name not in ON_RANKS}
    assert pure - ROUNDS <= set(EXACT)


@pytest.mark.parametrize("op, case", ALL)
def test_float32_equals_float64(op, case):
    ys, dxs, _ = run(op, case.arrays, case.static)
    low_ys, low_dxs, _ = run(op, cast(case.arrays, np.float32), case.static)
    assert all(y.dtype == np.float32 for y in low_ys)
    assert all(map(same, low_ys + low_dxs, ys + dxs))


@pytest.mark.parametrize("op, case", LINEAR)
def test_the_vjp_is_the_transpose_exactly(op, case):
    """<dy, f(v)> = <vjp(dy), v> for each argument, the others held; the bias of linear and b of add are subtracted."""
    _, dxs, dy = run(op, case.arrays, case.static)
    for k in floats(case.arrays):
        v = dyadic_array(f"v {k}", case.arrays[k].shape)
        at_v, at_0 = (evaluate(op, [w if j == k else a for j, a in enumerate(case.arrays)], case.static)[0]
                      for w in (v, np.zeros_like(v)))
        left = Fraction(0)
        for c, a, b in zip(dy, at_v, at_0):
            left += inner(c, a) - inner(c, b)
        assert left == inner(dxs[k], v), f"argument {k}"


def integers(a):
    """The same numbers in units of 2^-3, as Python integers: no rounding, no overflow."""
    return np.vectorize(lambda x: int(x / UNIT), otypes=[object])(a) if is_float(a) else a


def added_at(n, ids, x):
    y = np.zeros((n, *x.shape[1:]), object)
    np.add.at(y, ids, x)
    return y


def convolved(x, w):
    y = np.zeros(x.shape, object)
    for t in range(x.shape[1]):
        for j in range(len(w)):
            if t - (len(w) - 1) + j >= 0:
                y[:, t] += w[j] * x[:, t - (len(w) - 1) + j]
    return y


def contracted(a, b, spec):
    return np.einsum(spec, a, b, optimize=False)


BY_INTEGERS = {
    "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "sum": lambda x, axis=None: x.sum(axis=axis), "cumsum": lambda x, axis=-1: np.add.accumulate(x, axis=axis),
    "where": lambda c, a, b: np.where(c, a, b), "max": lambda x, axis: x.max(axis=axis),
    "relu": lambda x: np.where(x > 0, x, 0),
    "linear": lambda x, w, b=0: x @ w + 8 * b,          # a product is in units of 2^-6
    "column_parallel_linear": lambda x, w, b, pieces: x @ w + 8 * b, "row_parallel_linear": lambda x, w, pieces: x @ w,
    "matmul": lambda a, b: a @ b, "einsum": contracted, "depthwise_conv": convolved,
    "embedding": lambda w, ids: w[ids], "gather": lambda x, ids: x[ids], "scatter_add": lambda x, ids, n: added_at(n, ids, x),
    "repeat": lambda x, times, axis: np.concatenate([x] * times, axis=axis).reshape(2, times, 3, 5).swapaxes(1, 2).reshape(
        2, 3 * times, 5),
}
PRODUCTS = ("mul", "linear", "column_parallel_linear", "row_parallel_linear", "matmul", "einsum", "depthwise_conv")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(BY_INTEGERS))
def test_the_value_equals_integer_arithmetic(name, dtype):
    for case in EXACT[name]:
        y, _ = REGISTRY[name].array(*cast(case.arrays, dtype), **case.static)
        expected = BY_INTEGERS[name](*map(integers, case.arrays), **case.static)
        unit = UNIT * UNIT if name in PRODUCTS else UNIT
        assert same(np.asarray(y), np.asarray(expected * unit, dtype)), case.name


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_order_of_summation_gives_the_same_bits(dtype):
    x, w, order = dyadic_array("x", (3, 257)).astype(dtype), dyadic_array("w", (257, 5)).astype(dtype), np.argsort(
        dyadic_array("order", (257,)), kind="stable")
    ids = np.arange(257) % 7
    for f in (lambda o: matmul.array(x[:, o], w[o])[0], lambda o: linear.array(x[:, o], w[o])[0],
              lambda o: sum.array(w[o], axis=0)[0], lambda o: scatter_add.array(w[o], ids[o], n=7)[0],
              lambda o: linear.array(w[o], x[:, :5].T)[1](w[o][:, :3])[1]):             # dw: summed over the rows
        plain = f(np.arange(257))
        assert same(f(order), plain) and same(f(np.arange(257)[::-1]), plain)


def test_ordinary_data_would_round():
    """The control: with all bits of the mantissa in use another order gives other bits, and float32 is not float64."""
    x, w, back = draw("x", (3, 257)) / 3, draw("w", (257, 5)) / 7, np.arange(257)[::-1]
    assert not same(matmul.array(x[:, back], w[back])[0], matmul.array(x, w)[0])
    assert not same(matmul.array(x.astype(np.float32), w.astype(np.float32))[0], matmul.array(x, w)[0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_fft_convolution_rounds_by_less_than_half_a_unit(dtype):
    """Rounded to the grid that the products lie on, it is the direct sum; so are its gradients."""
    x, k, dy = (dyadic_array(n, shape).astype(dtype) for n, shape in (("x", (2, 13, 3)), ("k", (13, 3)), ("dy", (2, 13, 3))))
    y, vjp = fft_conv.array(x, k)
    direct = convolved(integers(x), integers(k)[::-1])
    assert same(np.round(y / UNIT ** 2), direct)
    dx, dk = (np.round(d / UNIT ** 2) for d in vjp(dy))
    assert same(dx, convolved(integers(dy)[:, ::-1], integers(k)[::-1])[:, ::-1])       # a correlation: reversed twice
    expected = [[np.sum(integers(dy)[:, j:, d] * integers(x)[:, :13 - j, d]) for d in range(3)] for j in range(13)]
    assert same(dk, np.array(expected, object))


# -- collectives ------------------------------------------------------------------------------------------------------

def whole(comm, name, shape, dtype):
    """Every rank's array of the same name, which each rank can make for all."""
    return [dyadic_array(f"{name} of rank {r}", shape).astype(dtype) for r in range(comm.size)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_collectives_equal_integer_sums_and_slices_on_any_number_of_ranks(ranks, dtype):
    def on_rank(comm):
        r, last, cuts, columns = comm.rank, comm.size - 1, *(np.cumsum((0, *shares(n, comm.size))) for n in (7, 5))
        own, block, mine = slice(cuts[r], cuts[r + 1]), slice(7 * r, 7 * r + 7), slice(columns[r], columns[r + 1])
        xs, dys, joined_dys = (whole(comm, name, shape, dtype) for name, shape in (
            ("x", (7, 5)), ("dy", (7, 5)), ("joined dy", (7 * comm.size, 5))))
        x, dy, joined_dy, joined = xs[r], dys[0], joined_dys[0], np.concatenate(xs)
        total, dy_total, joined_dy_total = (np.add.reduce(list(map(integers, a))) * UNIT for a in (xs, dys, joined_dys))
        sent, dy_sent = (np.concatenate([a[own] for a in each]) for each in (xs, dys))     # this rank's rows of all ranks
        expected = {                                    # x of this rank, y, dy (that of rank 0 where replicated), dx
            "copy_to": (xs[0], xs[0], dys[r], dy_total), "reduce_from": (x, total, dy, dy),
            "as_partial": (x, x, dys[r], dys[r]), "gather_from": (x, joined, joined_dy, joined_dy[block]),
            "all_gather": (x, joined, joined_dys[r], joined_dy_total[block]),
            "scatter_to": (xs[0], xs[0][own], dy[own], dy), "reduce_scatter": (x, total[own], dy[own], dy),
            "all_to_all": (x, joined[:, mine], joined_dy[:, mine], joined_dy[block]),
            "all_to_all_rows": (x, sent, dy_sent, dys[r]), "ring_shift": (x, xs[r - 1], dys[r], dys[(r + 1) % comm.size]),
            "broadcast_from": (x, xs[last], dy, dy * (r == last)), "broadcast": (x, xs[last], dys[r], dy_total * (r == last)),
        }
        static = {**dict.fromkeys(("gather_from", "all_gather", "scatter_to", "reduce_scatter"), {"axis": 0}),
                  **dict.fromkeys(("broadcast_from", "broadcast"), {"root": last}), "all_to_all": {"split": 1, "join": 0},
                  "all_to_all_rows": {"counts": [shares(7, comm.size)] * comm.size}}
        assert set(expected) == set(COLLECTIVES)
        for name, (given, y, dy_here, dx) in expected.items():
            got, vjp = REGISTRY[name].array(given, comm=comm, **static.get(name, {}))
            assert same(got, y.astype(dtype)), name
            assert same(vjp(dy_here), dx.astype(dtype)), f"the vjp of {name}"
    ranks.run(on_rank)


def dyadic_like(name, a):
    return dyadic_array(name, a.shape).astype(a.dtype)


def sum_of_products(a, b):
    """Σ a·b in units of 2^-6, as an integer that int64 holds."""
    return int(np.sum((a / UNIT).astype(np.int64) * (b / UNIT).astype(np.int64)))


def imbalance(op, comm, before, after, x, static):
    """y, and this rank's share of <dy, y> - <vjp(dy), x>, which over all ranks adds up to nothing."""
    y, vjp = op.array(x, comm=comm, **static)
    dy = dyadic_like("dy" if after in ("replicated", "partial") else f"dy of rank {comm.rank}", y)
    dx = vjp(dy)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    left, right = (sum_of_products(a, b) * (layout != "replicated" or comm.rank == 0)
                   for a, b, layout in ((dy, y, after), (dx, x, before)))
    return y, left - right


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_split_of_a_few_rows(ranks, dtype):
    """Values against slices of the whole, gradients by <dy, y> = <vjp(dy), x>, both to the last bit."""
    def on_rank(comm):
        size, rank, differences = comm.size, comm.rank, []
        n = 4 if size <= 4 else 2
        x, others = dyadic_array("x", (2, n, 3)).astype(dtype), whole(comm, "x", (2, n, 3), dtype)
        total = np.add.reduce(list(map(integers, others))) * UNIT
        for sizes in every_split(n, size):
            ends = np.cumsum((0, *sizes))
            parts = [slice(start, stop) for start, stop in zip(ends, ends[1:])]
            own, behind, turned = parts[rank], parts[rank - 1], sizes[::-1]
            square = dyadic_array("square", (n, n, 2)).astype(dtype)        # rows in `sizes`, columns in `turned`
            to_columns = {"split": 1, "join": 0, "split_sizes": turned, "join_sizes": sizes}
            columns = slice(n - ends[size - rank], n - ends[size - rank - 1])
            counts = [[sizes[(s + t) % size] for t in range(size)] for s in range(size)]
            sent = [np.split(a[0], np.cumsum(row)[:-1]) for a, row in zip(others, counts)]
            along = {"axis": 1, "sizes": sizes}
            for name, given, static, y in (
                    ("gather_from", x[:, own], along, x), ("all_gather", x[:, own], along, x),
                    ("scatter_to", x, along, x[:, own]), ("reduce_scatter", others[rank], along, total[:, own]),
                    ("ring_shift", x[0, own], {"sizes": sizes}, x[0, behind]),
                    ("all_to_all", square[own], to_columns, square[:, columns]),
                    ("all_to_all_rows", others[rank][0], {"counts": counts}, np.concatenate([a[rank] for a in sent]))):
                case = COLLECTIVES[name][0]
                got, difference = imbalance(REGISTRY[name], comm, case.before, case.after, given, static)
                assert same(got, np.asarray(y, dtype)), f"{name}, {sizes}"
                differences.append(difference)
        assert not comm.all_reduce(np.array(differences)).any()
    ranks.run(on_rank)


def scrambled(a):
    """The same values, back to front in memory, the last axis first, with holes between them."""
    return np.flip(np.repeat(np.flip(a).T, 2, axis=0)[::2].T) if a.ndim else a


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_a_collective_gives_the_same_bits_in_every_memory_order_and_dtype(ranks, name):
    def on_rank(comm):
        differences, op = [], REGISTRY[name]
        for case in COLLECTIVES[name]:
            (drawn,), static = case.arguments(comm, "float64")
            x = np.floor(drawn * 32) * UNIT
            y, difference = imbalance(op, comm, case.before, case.after, x, static)
            differences.append(difference)
            dy = dyadic_like("another dy" if case.after != "per_rank" else f"another dy of rank {comm.rank}", y)
            dx = op.array(x, comm=comm, **static)[1](dy)
            assert x.size < 2 or not scrambled(x).flags.c_contiguous
            for again, dy_again in ((scrambled(x), scrambled(dy)), (scrambled(x.astype("float32")), dy.astype("float32"))):
                y_again, vjp = op.array(again, comm=comm, **static)
                dx_again = vjp(dy_again)
                assert same(y_again, y) and same(dx_again, dx), case.name
                assert y_again.dtype == dx_again.dtype == again.dtype
        assert not comm.all_reduce(np.array(differences)).any()
    ranks.run(on_rank)


def test_the_order_of_ranks_does_not_matter(ranks):
    def on_rank(comm):
        xs = whole(comm, "x", (13,), "float32")
        for shift in range(comm.size):
            moved = xs[(comm.rank + shift) % comm.size]
            assert same(comm.all_reduce(moved), comm.all_reduce(xs[comm.rank]))
    ranks.run(on_rank)
