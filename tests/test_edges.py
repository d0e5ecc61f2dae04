"""Localises what breaks at the edges: nan that spreads, memory orders, signed zeros, overflow, sizes 0 and 1, duplicate ids."""
import numpy as np
import pytest

from refimpl.autograd import REGISTRY
from refimpl.cases import CASES
from refimpl.cases.edges import CALLS, EDGES, FINITE, VIEWS, edge_cases
from refimpl.check.tools import cotangents, evaluate, pull

DTYPES = ("float64", "float32")
ROUNDING = {"float64": 1e-13, "float32": 2e-5}          # allowed between two memory orders, relative to the largest value
ELEMENTWISE = ("exp", "log", "sqrt", "power", "tanh", "sigmoid", "softplus", "erf", "relu", "silu", "quick_gelu", "gelu_erf",
               "gelu_tanh", "add", "subtract", "mul", "divide", "swiglu", "scale", "stop_gradient", "straight_through")
BY_ROWS = (*ELEMENTWISE, "softmax", "log_softmax", "logsumexp", "cumsum", "norm", "sum", "mean", "max", "layer_norm",
           "rms_norm", "linear", "matmul", "einsum", "attention", "rope", "dropout", "cross_entropy", "where", "split",
           "repeat", "pad")
MOVES = ("reshape", "transpose", "concat", "split", "slice_axis", "pad", "repeat", "gather", "embedding", "where",
         "stop_gradient", "straight_through", "max")    # they compute nothing: every bit arrives, also the sign of 0
ODD = ("tanh", "erf", "sqrt", "cumsum", "relu")     # f(-0.0) = -0.0
CONSTANT_SLOPE = ("add", "subtract", "scale", "relu", "stop_gradient", "straight_through")
NO_VALUE_BELOW_0 = ("log", "sqrt")                      # and an infinite slope at 0


def results(name, case):
    """The outputs, and the cotangents of all arguments."""
    op = REGISTRY[name]
    ys, vjp = evaluate(op, case.arrays, case.static)
    return ys, pull(op, vjp, cotangents(ys, "dy"), case.arrays)


def one(name, edge, dtype="float64", view=""):
    return next(case for case in edge_cases(name, dtype, view) if case.name == edge)


def close(a, b, allowed):
    finite = np.isfinite(b)
    size = np.abs(b[finite]).max(initial=0)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.allclose(a, b, rtol=0, atol=allowed * size, equal_nan=True)


def test_every_op_meets_the_edges():
    assert set(CALLS) == set(CASES)
    assert set(BY_ROWS) | set(MOVES) | set(ODD) <= set(CALLS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(CALLS) - set(NO_VALUE_BELOW_0)))
def test_finite_edges_give_finite_values_of_the_same_dtype_without_a_warning(name, dtype):
    """But for e^10000, which is infinite."""
    for case in edge_cases(name, dtype):
        if case.name in FINITE and (name, case.name) != ("exp", "huge logits"):
            ys, dxs = results(name, case)
            for a in [*ys, *(dx for dx in dxs if dx is not None)]:
                assert a.dtype.kind != "f" or a.dtype == dtype, case.name
                assert np.isfinite(a).all(), case.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_memory_order_gives_the_values_of_the_contiguous_array(name, dtype):
    with np.errstate(all="ignore"):                     # of ∞ - ∞ numpy warns
        for view in VIEWS:
            for plain, seen in zip(edge_cases(name, dtype), edge_cases(name, dtype, view)):
                (ys, dxs), (ys_seen, dxs_seen) = results(name, plain), results(name, seen)
                if (name, plain.name) != ("fft_conv", "infinite"):      # all nan, but in which sums ∞ - ∞ is met may differ
                    for a, b in zip([*ys_seen, *dxs_seen], [*ys, *dxs]):
                        assert a is b is None or close(a, b, ROUNDING[dtype]), f"{view}, {plain.name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("edge", ["nan", "infinite", "fully masked row"])
def test_a_broken_row_stays_in_its_row(name, edge, dtype):
    """All but row 1 is what it is when row 1 is ordinary, in y and in dx, bit for bit."""
    with np.errstate(all="ignore"):
        ys, dxs = results(name, one(name, edge, dtype))
        healed = EDGES[edge].copy()
        healed[1] = 0.5
        arrays, static = CALLS[name](healed.astype(dtype))
        ys_healed, dxs_healed = results(name, type(one(name, edge))("healed", arrays, static))
    k = 1 if name == "where" else 0                     # argument 0 of where is the condition
    pairs = [(dxs[k], dxs_healed[k])] + ([] if name == "cross_entropy" else [(ys[0], ys_healed[0])])
    for a, b in pairs:
        a, b = (np.squeeze(v, axis=(0, 1)) if v.ndim == 4 else v for v in (a, b))
        assert np.array_equal(a[[0, 2]], b[[0, 2]], equal_nan=True), "log and sqrt of a negative number are nan"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(ELEMENTWISE) - set(NO_VALUE_BELOW_0)))
def test_a_nan_stays_a_nan_in_its_place(name, dtype):
    """No value is made up for it, no neighbour gets it, and numpy has no reason to warn."""
    ys, dxs = results(name, one(name, "nan", dtype))
    expected = np.isnan(EDGES["nan"])
    assert np.array_equal(np.isnan(ys[0]), expected)
    if name not in CONSTANT_SLOPE:
        assert np.array_equal(np.isnan(dxs[1 if name in ("mul", "divide") else 0]), expected)   # d(x·b)/db = x


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_nan_is_never_hidden(name):
    ys, _ = results(name, one(name, "nan")) if name not in NO_VALUE_BELOW_0 else ([np.array(np.nan)], ())
    hidden = name == "dropout" and not np.isnan(ys[0]).any()        # its nan may be dropped
    taken = name == "where" and not CALLS["where"](EDGES["nan"])[0][0][1, 1]
    spared = name in ("embedding", "gather")                        # row 1 is not looked up
    assert hidden or taken or spared or any(np.isnan(y).any() for y in ys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_fully_masked_row_has_gradient_0_and_its_stated_value(name, dtype):
    (y, *_), (dx,) = results(name, one(name, "fully masked row", dtype))
    assert set(np.ravel(y[1])) == {0.0 if name == "softmax" else -np.inf}
    assert not dx[1].any() and np.isfinite(dx).all()
    assert name == "log_softmax" or dx[0, 1] == 0       # a single masked logit: y = x - lse passes its cotangent on


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_keeps_the_sign_of_zero_and_every_nan(name, dtype):
    """Sorted, the bits of what came in are those of what went out, but for zeros that were added (pad)."""
    for edge in ("signed zero", "subnormal", "infinite", "nan"):
        case = one(name, edge, dtype)
        ys, _ = results(name, case)
        kind = np.dtype(dtype).str.replace("f", "u")
        offered = {0, *np.concatenate([a.ravel() for a in case.arrays if a.dtype == dtype]).view(kind).tolist()}
        assert {int(bits) for y in ys for bits in np.ravel(y).view(kind)} <= offered
    x = np.array([[-0.0, -0.0]] * 3, dtype)
    arrays, static = CALLS[name](x)
    y = REGISTRY[name].array(*arrays, **static)[0]
    y = np.asarray(y[0] if isinstance(y, tuple) else y)
    assert np.signbit(y[y == 0]).sum() == np.sum(y == 0) - (9 if name == "pad" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ODD)
def test_odd_functions_keep_the_sign_of_zero(name, dtype):
    y, _ = REGISTRY[name].array(np.array([-0.0], dtype))
    assert np.signbit(y).all() or name == "relu"        # max(-0.0, 0) may be either zero
    y, _ = REGISTRY[name].array(np.array([0.0], dtype))
    assert not np.signbit(y).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicate_ids_add_up_and_ignored_rows_count_nothing(dtype):
    x = np.ones((3, 2), dtype)
    for name in ("embedding", "gather"):
        _, vjp = REGISTRY[name].array(x, np.array([2, 2, 0, 2]))
        assert vjp(np.ones((4, 2), dtype))[0].tolist() == [[1, 1], [0, 0], [3, 3]]
    y, _ = REGISTRY["scatter_add"].array(x, np.array([1, 1, 1]), n=2)
    assert y.tolist() == [[0, 0], [3, 3]]
    broken = np.full((3, 2), np.nan, dtype)
    broken[1] = -np.inf
    (y, count), vjp = REGISTRY["cross_entropy"].array(broken, np.full(3, -100))
    assert (y, count) == (0, 0) and not vjp(np.array(1, dtype))[0].any(), "rows that do not count may hold anything"
