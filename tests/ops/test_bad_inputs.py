"""Localises inputs that give a wrong number, or numpy's error, instead of a sentence: shapes, axes, dtypes, ids of every op."""
import numpy as np
import pytest

import refimpl.parallel  # noqa: F401 (registers the collectives)
from refimpl.autograd import REGISTRY, Layout, Tensor, recompute, value_and_grad
from refimpl.cases import CASES, COLLECTIVES
from refimpl.cases.edges import CALLS
from refimpl.comm import Mesh
from refimpl.ops import add, linear

PARALLEL = {"column_parallel_linear": 1, "row_parallel_linear": 0}      # along which axis the weight is cut
ONE = np.ones((2, 3))
ANY_SHAPE = {"exp", "log", "sqrt", "power", "tanh", "sigmoid", "softplus", "erf", "relu", "silu", "quick_gelu", "gelu_erf",
             "gelu_tanh", "scale", "stop_gradient"}     # elementwise functions of one array
SHAPES = [                                              # op, shapes of its arrays (or arrays), static, words
    ("add", [(2, 3), (2,)], {}, r"a\[2, 3\] and b\[2\] do not broadcast: counted from the last axis on, sizes must be equal"),
    ("subtract", [(2, 3), (2, 2)], {}, r"a\[2, 3\] and b\[2, 2\] do not broadcast"),
    ("mul", [(3,), (2,)], {}, r"a\[3\] and b\[2\] do not broadcast"),
    ("divide", [(3, 1, 2), (4, 1, 3)], {}, r"a\[3, 1, 2\] and b\[4, 1, 3\] do not broadcast"),
    ("where", [np.ones((2, 3), bool), (2, 3), (2,)], {}, r"a\[2, 3\] and b\[2\] do not broadcast"),
    ("where", [np.ones(2, bool), (3,), (3,)], {}, r"condition\[2\] and a\[3\] do not broadcast"),
    ("swiglu", [(2, 3), (3,)], {}, r"gate\[2, 3\] and up\[3\] must have one shape"),
    ("straight_through", [(2, 3), (3,)], {}, r"hard float64\[2, 3\] and soft float64\[3\] must have one shape and dtype"),
    ("softmax", [()], {}, r"x\[\] has no last axis to normalise over"),
    ("log_softmax", [()], {}, r"x\[\] needs a last axis with at least one element"),
    ("log_softmax", [(2, 0)], {}, r"x\[2, 0\] needs a last axis with at least one element"),
    ("logsumexp", [(2, 0)], {}, r"x\[2, 0\] needs a last axis with at least one element"),
    ("layer_norm", [(2, 3), (3,), (2,)], {}, r"x\[2, 3\] needs g and b of shape \[3\], D > 0; got g\[3\], b\[2\]"),
    ("rms_norm", [(2, 3), (2,)], {}, r"x\[2, 3\] needs w of shape \[3\], D > 0, .* got w\[2\]"),
    ("linear", [(2, 3), (2, 3)], {}, r"x\[2, 3\], w\[2, 3\], bNone: x's last axis must equal w's first"),
    ("column_parallel_linear", [(2, 3), (2, 3)], {}, r"x\[2, 3\], w\[2, 3\], bNone: x's last axis must equal w's first"),
    ("column_parallel_linear", [(2, 3), (3, 3)], {"pieces": 2}, r"axis 1 of w\[3, 3\] cannot be cut into 2 equal pieces"),
    ("row_parallel_linear", [(2, 3), (2, 3)], {}, r"x\[2, 3\], w\[2, 3\], bNone: x's last axis must equal w's first"),
    ("row_parallel_linear", [(2, 3), (3, 2)], {"pieces": 2}, r"axis 0 of w\[3, 2\] cannot be cut into 2 equal pieces"),
    ("matmul", [(2, 3), (2, 3)], {}, r"a\[2, 3\] · b\[2, 3\]: both need two axes or more, and a's last must equal b's"),
    ("matmul", [(3,), (3, 2)], {}, r"a\[3\] · b\[3, 2\]: both need two axes or more"),
    ("matmul", [(4, 2, 3), (5, 3, 2)], {}, r"a\[4, 2, 3\] and b\[5, 3, 2\] do not broadcast: counted from axis -3 on"),
    ("einsum", [(2, 3), (4, 5)], {"spec": "ab,bc->ac"}, r"'ab,bc->ac' of a\[2, 3\] and b\[4, 5\]: a letter has two sizes"),
    ("attention", [(1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], {}, r"q\[1, 3, 2, 4\], .* with G dividing H"),
    ("blockwise_attention", [(1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], {}, r"q\[1, 3, 2, 4\], .* with G dividing H"),
    ("cross_entropy", [(2, 3), np.zeros(3, int)], {}, r"logits\[2, 3\] with V > 0 need integer targets\[2\], got int64\[3\]"),
    ("rope", [(3, 4), np.zeros(2, int)], {}, r"x\[3, 4\], positions\[2\], .* needs one position per row of x"),
    ("rope", [(4,), np.zeros(1, int)], {}, r"x\[4\] must be \[..., T, K\]"),
    ("dropout", [(3,), np.zeros(2, int)], {"shape": (3,)}, r"x\[3\] needs one coordinate per element along each axis"),
    ("embedding", [(3,), np.zeros(2, int)], {}, r"w\[3\] must be \[V, D\]"),
    ("gather", [(3, 2), np.zeros((2, 2), int)], {}, r"x\[3, 2\] and ids\[2, 2\] must be \[N, ...\] and \[M\]"),
    ("scatter_add", [(3, 2), np.zeros(2, int)], {"n": 3}, r"x\[3, 2\] and ids\[2\] must be \[M, ...\] and \[M\]"),
    ("scatter_add", [(2, 2), np.zeros(2, int)], {"n": -1}, "n must be at least 0, got -1"),
    ("depthwise_conv", [(1, 5, 3), (2, 4)], {}, r"x\[1, 5, 3\] and w\[2, 4\] must be \[B, T, D\] and \[W, D\] with W > 0"),
    ("fft_conv", [(1, 5, 3), (4, 3)], {}, r"x\[1, 5, 3\] and k\[4, 3\] must be \[B, T, D\] and \[T, D\]"),
    ("reshape", [(2, 3)], {"shape": (4,)}, r"x\[2, 3\] has 6 elements, which do not fill the shape \(4,\)"),
    ("transpose", [(2, 3)], {"axes": (0, 0)}, r"axes \(0, 0\) must name each of the 2 axes of x\[2, 3\] once"),
    ("transpose", [(2, 3)], {"axes": (2, 1)}, r"axes \(2, 1\) must name each of the 2 axes"),
    ("transpose", [()], {"axes": (0,)}, r"axes \(0,\) must name each of the 0 axes of x\[\] once"),
    ("concat", [(2, 3), (3, 3)], {"axis": 1}, r"along axis 1 of \[\[2, 3\], \[3, 3\]\]: all other axes must be equal"),
    ("concat", [], {}, "got no array, needs one or more"),
    ("split", [(2, 3)], {"sizes": (1, 1)}, r"the sizes \(1, 1\) must be .* add up to the 3 along axis -1 of x\[2, 3\]"),
    ("split", [(2, 3)], {"sizes": (-1, 4)}, r"the sizes \(-1, 4\) must be one or more, at least 0"),
    ("slice_axis", [(2, 3)], {"start": 2, "stop": 5}, r"2..5 is not inside axis -1 of x\[2, 3\]"),
    ("slice_axis", [(2, 3)], {"start": -1}, r"-1..3 is not inside axis -1 of x\[2, 3\]"),
    ("pad", [(2, 3)], {"before": -1}, "before and after must be at least 0, got -1 and 0"),
    ("repeat", [(2, 3)], {"times": -1}, "times must be at least 0, got -1"),
    ("mean", [(2, 0)], {"axis": 1}, r"over axis 1 of x\[2, 0\]: there is nothing to take the mean of"),
    ("max", [(0,)], {}, r"over axis None of x\[0\]: there is nothing to take the max of"),
]
WITH_AXIS = [("sum", {}), ("mean", {}), ("max", {}), ("cumsum", {}), ("norm", {}), ("concat", {}), ("split", {"sizes": (3,)}),
             ("slice_axis", {}), ("pad", {}), ("repeat", {})]
IDS = [("embedding", {}), ("gather", {}), ("scatter_add", {"n": 3})]
FLOATS = [pytest.param(name, k, id=f"{name}-{k}") for name, cases in CASES.items()
          for k, a in enumerate(cases[0].arrays) if a.dtype.kind == "f"]
SEVERAL = sorted({p.values[0] for p in FLOATS if p.values[1] == (2 if p.values[0] == "where" else 1)})


@pytest.mark.parametrize("name, arrays, static, words", SHAPES)
def test_a_shape_that_does_not_fit_gets_a_sentence(name, arrays, static, words):
    """The op's name first, then what it got and what would be right."""
    arrays = [np.ones(a) if isinstance(a, tuple) else a for a in arrays]
    with pytest.raises(ValueError, match=f"^{name}:? {words}"):
        REGISTRY[name].array(*arrays, **static)


def test_every_op_that_can_get_a_wrong_shape_is_here():
    assert {row[0] for row in SHAPES} | {name for name, _ in WITH_AXIS} | ANY_SHAPE == set(CASES)


@pytest.mark.parametrize("axis", [2, -3, 0.5, "last"])
@pytest.mark.parametrize("name, static", WITH_AXIS)
def test_an_axis_that_does_not_exist_gets_a_sentence(name, static, axis):
    with pytest.raises(ValueError, match=rf"^{name}: x\[2, 3\] has no axis {axis!r}: axes are integers from -2 to 1"):
        REGISTRY[name].array(ONE, axis=axis, **static)


@pytest.mark.parametrize("name, static", WITH_AXIS)
def test_a_scalar_has_no_axis(name, static):
    with pytest.raises(ValueError, match=rf"^{name}: x\[\] has no axis 0: it has none"):
        REGISTRY[name].array(np.array(1.0), axis=0, **static)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "norm"])
def test_an_axis_named_twice_or_out_of_range_in_a_tuple_gets_a_sentence(name):
    with pytest.raises(ValueError, match=rf"^{name}: axis \(0, -2\) of x\[2, 3\] names an axis twice"):
        REGISTRY[name].array(ONE, axis=(0, -2))
    with pytest.raises(ValueError, match=rf"^{name}: x\[2, 3\] has no axis 5"):
        REGISTRY[name].array(ONE, axis=(0, 5))


def test_cumsum_runs_along_one_axis():
    with pytest.raises(ValueError, match=r"^cumsum: x\[2, 3\] has no axis None"):
        REGISTRY["cumsum"].array(ONE, axis=None)


@pytest.mark.parametrize("name, k", FLOATS)
def test_integers_for_values_get_a_sentence(name, k):
    """numpy would compute in float64, or round to integers, without a word."""
    arrays = list(CASES[name][0].arrays)
    for dtype in (np.int64, bool, np.uint8):
        arrays[k] = np.ones(arrays[k].shape, dtype)
        with pytest.raises(TypeError, match=f"^{name}: argument {k} is {np.dtype(dtype)}: it must be float64 or float32"):
            REGISTRY[name](*arrays, **CASES[name][0].static)


@pytest.mark.parametrize("name", SEVERAL)
def test_two_float_dtypes_get_a_sentence(name):
    """The output's dtype is the input's, so there must be one: nothing is promoted."""
    case = CASES[name][0]
    values = [k for k, a in enumerate(case.arrays) if a.dtype.kind == "f"]
    for k in values:
        arrays = [a.astype(np.float32) if j == k else a for j, a in enumerate(case.arrays)]
        first, second = ("float32", "float64") if k == values[0] else ("float64", "float32")
        with pytest.raises(TypeError, match=f"^{name}: its arguments are {first} and {second}: they must have one dtype"):
            REGISTRY[name](*map(Tensor, arrays), **case.static)


def test_every_op_with_several_values_is_among_them():
    assert {"where", "add", "linear", "attention", "layer_norm", "swiglu", "einsum", "concat", "fft_conv"} <= set(SEVERAL)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_arguments_that_fit_pass(name):
    """The control: the same calls with one dtype are accepted, in both."""
    for dtype in ("float64", "float32"):
        arrays, static = CALLS[name](np.full((2, 3), 0.5, dtype))
        if name in PARALLEL:                            # a plain array does not say how it is cut
            arrays = (arrays[0], Tensor(arrays[1], Layout(frozenset({"tp"})), cut={"tp": PARALLEL[name]}), *arrays[2:])
            columns = {"tp": arrays[0].ndim - 1} if name == "row_parallel_linear" else {}
            arrays = (Tensor(arrays[0], Layout(frozenset({"tp"})), cut=columns), *arrays[1:])
        y = REGISTRY[name](*arrays, **static)
        assert (y[0] if isinstance(y, tuple) else y).dtype == dtype


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_collectives_take_floats(name):
    with pytest.raises(TypeError, match=f"^{name}: argument 0 is int64: it must be float64 or float32"):
        REGISTRY[name](np.ones((2, 3), int), comm=Mesh().tp)


def test_a_missing_bias_has_no_dtype():
    assert linear(np.ones((2, 3), np.float32), np.ones((3, 1), np.float32), None).dtype == np.float32


def test_mixed_dtypes_are_found_in_recomputed_functions_and_behind_operators():
    x = Tensor(np.ones(3, np.float32))
    for wrong in (lambda p: add(p["x"], np.ones(3)), lambda p: p["x"] * np.ones(3),
                  lambda p: recompute(add, p["x"], np.ones(3))):
        with pytest.raises(TypeError, match="its arguments are float32 and float64"):
            value_and_grad(wrong, {"x": x})


@pytest.mark.parametrize("ids, words", [([0, 3], r"ids must be in \[0, 3\), got 0 to 3"), ([-1, 2], "got -1 to 2")])
@pytest.mark.parametrize("name, static", IDS)
def test_ids_out_of_range_get_a_sentence(name, static, ids, words):
    """numpy counts -1 from the end, cupy wraps 3 round to 0."""
    with pytest.raises(ValueError, match=f"^{name}: .*{words}"):
        REGISTRY[name].array(np.ones((2 if static else 3, 2)), np.array(ids), **static)


@pytest.mark.parametrize("dtype", [float, bool])
@pytest.mark.parametrize("name, static", [*IDS, ("rope", {}), ("cross_entropy", {})])
def test_ids_that_are_no_integers_get_a_sentence(name, static, dtype):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*integer.*{np.dtype(dtype)}"):
        REGISTRY[name].array(np.ones((2, 2)), np.ones(2, dtype), **static)


def test_a_condition_that_is_not_bool_gets_a_sentence():
    with pytest.raises(TypeError, match="^where: the condition must be bool, got int64"):
        REGISTRY["where"].array(np.ones(2, int), np.ones(2), np.ones(2))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_wrong_rate_gets_a_sentence(rate):
    with pytest.raises(ValueError, match=r"^dropout: rate must be in \[0, 1\), got"):
        REGISTRY["dropout"].array(np.ones(2), np.arange(2), rate=rate, shape=(2,))


@pytest.mark.parametrize("name, static, words", [
    ("split", {"sizes": (1.5, 1.5)}, r"sizes must be integers, got \(1.5, 1.5\)"),
    ("slice_axis", {"start": 0.5}, "start must be an integer, got 0.5"),
    ("slice_axis", {"stop": 2.0}, "stop must be an integer, got 2.0"), ("pad", {"before": 1.5}, "before must be an integer"),
    ("pad", {"after": 1.0}, "after must be an integer"), ("repeat", {"times": 2.0}, "times must be an integer, got 2.0")])
def test_a_size_that_is_no_integer_gets_a_sentence(name, static, words):
    with pytest.raises(TypeError, match=f"^{name}: {words}"):
        REGISTRY[name].array(ONE, **static)


def test_slots_and_channels_are_counted_in_integers():
    with pytest.raises(TypeError, match="^scatter_add: n must be an integer, got 2.5"):
        REGISTRY["scatter_add"].array(ONE, np.zeros(2, int), n=2.5)
    with pytest.raises(TypeError, match="^rope: rotated must be an integer, got 2.0"):
        REGISTRY["rope"].array(ONE, np.zeros(2, int), rotated=2.0)


@pytest.mark.parametrize("theta", [0, -1.0, float("nan"), float("inf")])
def test_a_wrong_theta_gets_a_sentence(theta):
    with pytest.raises(ValueError, match="^rope: theta must be finite and greater than 0, got"):
        REGISTRY["rope"].array(np.ones((2, 4)), np.zeros(2, int), theta=theta)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
@pytest.mark.parametrize("name, gains", [("layer_norm", 2), ("rms_norm", 1)])
def test_a_wrong_eps_gets_a_sentence(name, gains, eps):
    with pytest.raises(ValueError, match=f"^{name}: eps must be finite and at least 0, got"):
        REGISTRY[name].array(ONE, *[np.ones(3)] * gains, eps=eps)


@pytest.mark.parametrize("rows, columns, shape, error, words", [
    ([0.0, 1.0], [0, 1, 2], (2, 3), TypeError, "axis 0 must be integers, got float64"),
    ([0, -1], [0, 1, 2], (2, 3), ValueError, "axis 0 must be at least 0, got -1 to 0"),
    ([0, 1], [0, 1, 3], (2, 3), ValueError, r"axis 1 must be in \[0, 3\), got 0 to 3"),
    ([0, 1], [-1, 1, 2], (2, 3), ValueError, r"axis 1 must be in \[0, 3\), got -1 to 2")])
def test_coordinates_outside_the_global_shape_get_a_sentence(rows, columns, shape, error, words):
    with pytest.raises(error, match=f"^dropout: the coordinates along {words}"):
        REGISTRY["dropout"].array(ONE, np.array(rows), np.array(columns), rate=0.5, shape=shape)
    REGISTRY["dropout"].array(ONE, np.array([0, 99]), np.arange(3), rate=0.5, shape=(2, 3))     # samples have no end


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "complex128", "complex64"])
def test_floats_of_other_sizes_get_a_sentence(dtype):
    x = np.ones(3, dtype)
    with pytest.raises(TypeError, match=f"^add: argument 0 is {x.dtype}: it must be float64 or float32"):
        add(Tensor(x), Tensor(x))
