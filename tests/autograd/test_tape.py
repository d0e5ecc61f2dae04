"""Localises mistakes of the sweep: gradients sent twice, lost or overwritten, their order, memory kept alive, recompute."""
import gc
import weakref

import numpy as np
import pytest

from refimpl.autograd import Guard, Op, Params, Tensor, op, recompute, value_and_grad
from refimpl.autograd.op import REGISTRY
from refimpl.ops import (CAUSAL, add, attention, cross_entropy, dropout, embedding, gelu_tanh, layer_norm, linear, mul, reshape,
                         scale, softmax, sum, transpose)
from refimpl.rng import draw


def parameters(**arrays):
    return {name: Tensor(np.array(a, float) if np.isscalar(a) or isinstance(a, list) else a) for name, a in arrays.items()}


def gradients(fn, params, **options):
    return {name: g.array for name, g in value_and_grad(fn, params, **options)[1].items()}


@pytest.fixture
def three_outputs():
    """An op with a tuple of outputs, one of them of integers, that is registered for one test only."""
    @op(analytic=False)
    def three_outputs(x):
        y, z, n = 2 * x, x * x, np.asarray(x.size)

        def vjp(dy, dz, dn):
            return 2 * dy + 2 * x * dz
        return (y, z, n), vjp
    yield three_outputs
    del REGISTRY["three_outputs"]


# -- sums over paths --------------------------------------------------------------------------------------------------

def test_a_shared_node_sends_its_gradient_once():
    """m = x·a, f = m·x + m·x + (x·x)·a at x = a = 1: df/dx = 6; a recursive sweep without an order gives 7."""
    def f(p):
        x, a = p["x"], p["a"]
        m = mul(x, a)
        return add(add(mul(x, m), mul(x, m)), mul(mul(x, x), a))
    grads = gradients(f, parameters(x=1.0, a=1.0))
    assert grads["x"] == 6
    assert grads["a"] == 3


def test_long_chains_of_shared_nodes_are_not_expanded():
    """y = x + x, 200 times: 2^200 paths, one sweep."""
    def f(p):
        y = p["x"]
        for _ in range(200):
            y = y + y
        return y
    assert gradients(f, parameters(x=1.0))["x"] == 2.0 ** 200


def test_fan_out_adds_up_and_changes_no_array_in_place():
    """The vjp of add gives one array to both arguments: adding up in place would change the other's gradient."""
    def f(p):
        y = add(p["a"], p["b"])
        return sum(add(add(y, mul(p["a"], p["a"])), p["a"]))
    grads = gradients(f, parameters(a=[1.0, 2.0], b=[3.0, 4.0]))
    assert grads["a"].tolist() == [1 + 2 + 1, 1 + 4 + 1]
    assert grads["b"].tolist() == [1, 1]


def test_a_tied_matrix_gets_both_contributions():
    """logits = w[ids]·wᵀ: the lookup and the product both contribute (GPT-2's head)."""
    w, ids = draw("w", (3, 2)), np.array([1, 1, 2])
    weights = Tensor(draw("weights", (3, 3)))

    def lookup_and_product(p):
        return sum(mul(linear(embedding(p["in"], ids), transpose(p["out"], axes=(1, 0))), weights))
    apart = gradients(lookup_and_product, parameters(**{"in": w, "out": w}))
    tied = gradients(lambda p: lookup_and_product({"in": p["w"], "out": p["w"]}), parameters(w=w))
    assert np.allclose(tied["w"], apart["in"] + apart["out"], rtol=0, atol=1e-15)
    assert apart["in"].any() and apart["out"].any()


def test_repeated_ids_add_up():
    grads = gradients(lambda p: sum(embedding(p["w"], np.array([1, 1, 2]))), parameters(w=[[0.0], [0.0], [0.0]]))
    assert grads["w"].ravel().tolist() == [0, 2, 1]


def test_a_parameter_used_twice_in_one_op():
    assert gradients(lambda p: mul(p["x"], p["x"]), parameters(x=3.0))["x"] == 6
    assert gradients(lambda p: add(p["x"], p["x"]), parameters(x=3.0))["x"] == 2


def test_an_unused_parameter_gets_zeros_of_its_shape_and_dtype():
    params = {"used": Tensor(np.ones(2)), "unused": Tensor(np.ones((2, 3), np.float32))}
    grads = gradients(lambda p: sum(p["used"]), params)
    assert grads["unused"].dtype == np.float32
    assert grads["unused"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_the_loss_may_be_a_parameter():
    assert gradients(lambda p: p["x"], parameters(x=3.0, y=1.0)) == {"x": 1, "y": 0}


def test_every_output_of_a_tuple_sends_its_gradient(three_outputs):
    def f(p, uses):
        y, z, n = three_outputs(p["x"])
        assert n.tape is None and int(n.array) == 2
        return sum({"y": y, "z": z, "both": y + z}[uses])
    params = parameters(x=[1.0, 5.0])
    assert gradients(lambda p: f(p, "y"), params)["x"].tolist() == [2, 2]
    assert gradients(lambda p: f(p, "z"), params)["x"].tolist() == [2, 10]
    assert gradients(lambda p: f(p, "both"), params)["x"].tolist() == [4, 12]


def test_what_comes_with_the_loss_is_returned_without_a_tape():
    def f(p):
        total, count = cross_entropy(p["x"], np.array([0, 1]))
        return total, count, "text"
    (total, count, text), grads = value_and_grad(f, parameters(x=[[0.0, 0.0], [0.0, 0.0]]))
    assert float(total) == pytest.approx(2 * np.log(2)) and int(count.array) == 2 and text == "text"
    assert total.tape is None and count.tape is None
    assert grads["x"].array.tolist() == [[-0.5, 0.5], [0.5, -0.5]]


def test_float32_stays_float32_through_a_whole_layer():
    p = {n: Tensor(draw(n, s).astype(np.float32)) for n, s in (
        ("x", (1, 2, 3, 4)), ("g", (4,)), ("b", (4,)), ("w", (4, 4)))}

    def f(p):
        x = layer_norm(p["x"], p["g"], p["b"], eps=np.float64(1e-5))
        y = attention(x, linear(x, p["w"]), x * (1 / np.sqrt(4)), mask=CAUSAL, scale=1 / np.sqrt(4))
        return sum(softmax(gelu_tanh(y) + x * 0.5) * p["x"])
    loss, grads = value_and_grad(f, p)
    assert {loss.dtype, *(g.dtype for g in grads.values())} == {np.dtype("float32")}


# -- nobody edits what the backward pass needs ------------------------------------------------------------------------

def test_outputs_refuse_writes_and_parameters_stay_writable():
    x = np.ones((2, 2))
    for y in (reshape(Tensor(x), shape=(4,)), transpose(Tensor(x), axes=(1, 0)), gelu_tanh(Tensor(x)), sum(Tensor(x))):
        with pytest.raises(ValueError, match="read-only"):
            y.array[...] = 0
    x[0, 0] = 2                                         # the caller's own array is not frozen by an op that views it


def test_guard_names_the_residual_that_was_edited():
    params = parameters(x=draw("x", (2, 3)), w=draw("w", (3, 2)))

    def f(p, edit):
        y = gelu_tanh(linear(p["x"], p["w"]))
        params["w"].array[0, 0] += edit
        return sum(y)
    with Guard():
        gradients(lambda p: f(p, 0.0), params)
    with Guard(), pytest.raises(ValueError, match="w: the residual w of linear was edited between forward and backward"):
        gradients(lambda p: f(p, 1.0), params)


# -- memory -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_each_closure_is_dropped_as_it_is_used(no_collector):
    alive, seen = [], []

    def probe(x):
        def vjp(dy):
            seen.append(len([ref for ref in alive if ref() is not None]))
            return dy
        y = x + 0
        alive.append(weakref.ref(vjp))
        return y, vjp
    probe_op = Op(probe)

    def f(p):
        y = p["x"]
        for _ in range(4):
            y = probe_op(y)
        return sum(y)
    gradients(f, parameters(x=[1.0, 2.0]))
    assert seen == [4, 3, 2, 1]


def test_no_circle_keeps_arrays_alive(no_collector):
    kept = []

    def f(p):
        h = gelu_tanh(linear(p["x"], p["w"]))
        again = recompute(lambda a, w: gelu_tanh(linear(a, w)), h, p["w"])
        tied = linear(again, transpose(p["w"], axes=(1, 0)))
        kept.extend(weakref.ref(t.array) for t in (h, again, tied))
        return sum(tied), h
    value, grads = value_and_grad(f, parameters(x=draw("x", (2, 3)), w=draw("w", (3, 3))))
    assert [ref() is None for ref in kept] == [False, True, True]           # h is in the value
    del value, grads
    assert kept[0]() is None


# -- recompute --------------------------------------------------------------------------------------------------------

def layer(x, p, key=5):
    h = gelu_tanh(linear(x, p["up.w"], p["up.b"]))
    at = [np.arange(n) for n in h.shape]
    h = dropout(h, *at, key=key, rate=0.25, shape=h.shape)
    return x + linear(h, p["down.w"])


LAYER = {"x": draw("x", (3, 4)), "mlp.up.w": draw("up.w", (4, 6)), "mlp.up.b": draw("up.b", (6,)),
         "mlp.down.w": draw("down.w", (6, 4)), "other": draw("other", (2,))}


def test_recompute_gives_the_same_bits_with_dropout_and_params():
    def plain(p):
        return sum(gelu_tanh(layer(layer(p["x"], p / "mlp", key=1), p / "mlp", key=2)))

    def checkpointed(p):
        x = recompute(lambda x, p: layer(x, p, key=1), p["x"], p / "mlp")
        return sum(gelu_tanh(recompute(layer, x, p / "mlp", 2)))
    expected, got = gradients(plain, parameters(**LAYER)), gradients(checkpointed, parameters(**LAYER))
    assert {name: g.tobytes() for name, g in got.items()} == {name: g.tobytes() for name, g in expected.items()}


def test_recompute_keeps_no_activation_inside_the_function(no_collector):
    inside = []

    def f(x, p):
        h = linear(x, p["up.w"], p["up.b"])
        inside.append(weakref.ref(h.array))
        return linear(gelu_tanh(h), p["down.w"])

    def loss(p):
        y = sum(recompute(f, p["x"], p / "mlp"))
        assert inside[0]() is None
        return y
    gradients(loss, parameters(**LAYER))
    assert len(inside) == 2, "once forward, once again in the backward pass"


def test_recompute_nests_and_passes_constants_through():
    def inner(x, by):
        return gelu_tanh(scale(x, by=by))

    def outer(x, by):
        return recompute(inner, mul(x, x), by)
    params = parameters(x=[1.0, -2.0])
    assert np.array_equal(gradients(lambda p: sum(recompute(outer, p["x"], 0.5)), params)["x"],
                          gradients(lambda p: sum(inner(mul(p["x"], p["x"]), 0.5)), params)["x"])


def test_recompute_refuses_a_tensor_that_is_not_an_argument():
    with pytest.raises(ValueError, match="recompute: the function uses a Tensor that is not among its arguments"):
        value_and_grad(lambda p: sum(recompute(lambda x: mul(x, p["w"]), p["x"])), parameters(x=[1.0], w=[2.0]))


# -- on_leaf ----------------------------------------------------------------------------------------------------------

def test_on_leaf_reports_every_parameter_once_when_its_gradient_is_complete():
    def f(p):
        y = mul(p["first"], p["tied"])
        y = mul(y, p["second"])
        linear(Tensor(np.ones((1, 1))), p["beside"])        # not on the way to the loss
        return sum(mul(y, p["tied"]))
    params = parameters(first=[2.0], second=[3.0], tied=[5.0], beside=[[1.0]], unused=[7.0])
    reported = []
    _, grads = value_and_grad(f, params, on_leaf=lambda name, g: reported.append((name, g.array.tolist())))
    assert sorted(name for name, _ in reported) == sorted(params)
    assert dict(reported) == {name: g.array.tolist() for name, g in grads.items()}
    order = [name for name, _ in reported]
    assert order == ["unused", "beside", "second", "first", "tied"]     # backward; tied only after its first use


# -- wrong use --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fn, words", [
    (lambda p: p["x"], r"needs a scalar that depends on the parameters, got Tensor\(x: \(2,\)"),
    (lambda p: sum(Tensor(np.ones(2))), "needs a scalar that depends on the parameters"),
    (lambda p: 3.0, "got 3.0"), (lambda p: None, "got None")])
def test_the_loss_must_be_a_scalar_of_the_parameters(fn, words):
    with pytest.raises(ValueError, match=words):
        value_and_grad(fn, parameters(x=[1.0, 2.0]))


def test_tensors_of_two_tapes_are_refused():
    def outer(p):
        return value_and_grad(lambda q: sum(mul(q["y"], p["x"])), parameters(y=[1.0]))[0]
    with pytest.raises(ValueError, match="mul: its inputs belong to two different value_and_grad calls"):
        value_and_grad(outer, parameters(x=[1.0]))


def test_arrays_are_given_by_position_and_settings_by_name():
    x = Tensor(np.ones((2, 3)))
    with pytest.raises(TypeError, match="embedding: ids is a Tensor given by name: arrays are given by position"):
        embedding(x, ids=Tensor(np.array([0])))
    with pytest.raises(TypeError, match="embedding: ids is a ndarray given by name"):
        embedding(x, ids=np.array([0]))
    with pytest.raises(TypeError, match="reshape: argument 1 is a tuple: arrays are given by position, anything else by name"):
        reshape(x, (3, 2))
    with pytest.raises(TypeError, match="add: argument 1 is a float"):
        add(x, 1.0)


def test_operators_take_tensors_arrays_and_numbers_on_both_sides():
    x = Tensor(np.array([1.0, 4], np.float32))
    for y, expected in ((x + 1, [2, 5]), (1 + x, [2, 5]), (x - 1, [0, 3]), (x * 2, [2, 8]), (2 * x, [2, 8]), (x / 2, [0.5, 2]),
                        (-x, [-1, -4]), (x + x, [2, 8]), (x - x, [0, 0]), (x * x, [1, 16]), (x / x, [1, 1]),
                        (np.ones(2, np.float32) + x, [2, 5]), (x + np.ones(2, np.float32), [2, 5])):
        assert y.array.tolist() == expected and y.dtype == np.float32


def test_recompute_passes_a_tuple_on():
    """A mixer gives (y, state, aux): the Tensors among them are differentiated, the rest is passed on."""
    def mixer(x):
        return scale(x, by=2.0), None, {"note": 1}, mul(x, x)
    x = {"x": Tensor(np.array([3.0]))}

    def f(p):
        y, state, aux, z = recompute(mixer, p["x"])
        assert (state, aux) == (None, {"note": 1})
        return sum(y + z)
    value, grads = value_and_grad(f, x)
    assert float(value) == 6 + 9 and grads["x"].array.tolist() == [2 + 6]


def test_an_exception_in_the_function_leaves_nothing_alive():
    seen = []

    def f(p):
        y = scale(p["x"], by=2.0)
        seen.append(weakref.ref(y.array))
        raise ZeroDivisionError
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            value_and_grad(f, {"x": Tensor(np.ones(3))})
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_vjp_with_wrong_answers_is_named():
    def few(a, b):
        return a + b, lambda dy: (dy,)

    def wrong_shape(a, b):
        return a + b, lambda dy: (dy, dy[:1])

    def wrong_dtype(a, b):
        return a + b, lambda dy: (dy, dy.astype("float32"))
    for fn, words in ((few, "the vjp of few gave 1 cotangents for 2 arguments"),
                      (wrong_shape, r"the vjp of wrong_shape gave \(1,\) float64 for argument 1, which is \(2,\) float64"),
                      (wrong_dtype, r"the vjp of wrong_dtype gave \(2,\) float32 for argument 1")):
        with pytest.raises(ValueError, match=words):
            value_and_grad(lambda p: sum(Op(fn)(p["a"], p["b"])), parameters(a=[1.0, 2.0], b=[3.0, 4.0]))


def test_two_ops_of_one_name_are_refused():
    def gelu_tanh(x):
        return x, lambda dy: dy
    with pytest.raises(ValueError, match="two ops are called gelu_tanh: in refimpl.ops.activations and"):
        op(gelu_tanh)


# -- Params -----------------------------------------------------------------------------------------------------------

def test_params_are_views_by_prefix():
    p = Params({name: Tensor(np.ones(n)) for n, name in enumerate(["layers.1.attn.q.w", "layers.10.attn.q.w", "head.w"], 1)})
    assert list(p / "layers.1") == ["attn.q.w"]
    assert (p / "layers" / "10" / "attn")["q.w"].shape == (2,)
    assert len(p / "layers") == 2 and len(p) == 3 and len(p / "missing") == 0
    with pytest.raises(KeyError, match="no parameter 'layers.1.mlp.w'; under 'layers.1' there are: attn.q.w"):
        (p / "layers.1")["mlp.w"]
