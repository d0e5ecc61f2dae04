"""Localises dropped mean terms, the unbiased variance, eps in the wrong place and statistics over the wrong axis."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import layer_norm, rms_norm
from refimpl.rng import draw

X, G, B = np.array([1.0, 2, 3, 4]), np.ones(4), np.zeros(4)
R = 1 / np.sqrt(1.25)                                   # 1 / σ of X, the biased one


def test_values_by_hand():
    y, vjp = layer_norm.array(X, 2 * G, B + 1, eps=0.0)
    assert y == pytest.approx(1 + 2 * R * np.array([-1.5, -0.5, 0.5, 1.5]))
    dx, dg, db = vjp(np.array([1.0, 0, 0, 0]))
    # dxhat = (2, 0, 0, 0); dx = r·(dxhat - 1/2 - xhat·xhat_0/2), xhat_0·xhat = (1.8, 0.6, -0.6, -1.8)
    assert dx == pytest.approx(R * np.array([2 - 0.5 - 0.9, -0.5 - 0.3, -0.5 + 0.3, -0.5 + 0.9]))
    assert dg == pytest.approx([-1.5 * R, 0, 0, 0])
    assert db.tolist() == [1, 0, 0, 0]


def test_eps_is_added_to_the_variance():
    y, _ = layer_norm.array(X, G, B, eps=0.75)          # σ² + eps = 2
    assert y == pytest.approx(np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(2))


def test_equal_values_give_the_bias():
    y, _ = layer_norm.array(np.full((2, 4), 7.0), G, B + 3)
    assert y.tolist() == [[3] * 4] * 2


def test_gradients_of_gain_and_bias_sum_over_all_rows():
    """x̂ = ±1, dy = 1 in both rows: dg sums x̂ and db counts rows."""
    _, vjp = layer_norm.array(np.array([[[-1.0, 1]], [[3, 1]]]), np.ones(2), np.zeros(2), eps=0.0)
    _, dg, db = vjp(np.array([[[1.0, 2]], [[10, 20]]]))
    assert dg.tolist() == [-1 + 10, 2 - 20]
    assert db.tolist() == [11, 22]


@pytest.mark.parametrize("x, g, b", [((3, 0), (0,), (0,)), ((), (), ()), ((2, 3), (2,), (3,)), ((2, 3), (3,), (1,)),
                                     ((2, 3), (1, 3), (3,))])
def test_a_mean_over_nothing_and_wrong_shapes_are_named(x, g, b):
    with pytest.raises(ValueError, match=r"layer_norm: x\[.*needs g and b of shape \[.\], D > 0; got g\[.*b\["):
        layer_norm.array(np.zeros(x), np.zeros(g), np.zeros(b))


def test_rms_norm_by_hand():
    """x = (1, 7): mean square 25, xhat = (0.2, 1.4)."""
    y, vjp = rms_norm.array(np.array([[1.0, 7]]), np.array([10.0, 100]), eps=0.0)
    assert y[0] == pytest.approx([2, 140])
    dx, dw = vjp(np.array([[1.0, 0]]))                  # dxhat = (10, 0); mean(dxhat·xhat) = 1
    assert dx[0] == pytest.approx([(10 - 0.2) / 5, -1.4 / 5])
    assert dw == pytest.approx([0.2, 0])


def test_rms_norm_in_the_1_plus_w_form():
    """Gemma's w = 0 is LLaMA's w = 1; the same weights give other numbers, and the same gradient of w."""
    x, w, dy = draw("x", (3, 5)), draw("w", (5,)), draw("dy", (3, 5))
    (y, vjp), (plain, plain_vjp) = rms_norm.array(x, w, gain="1+w"), rms_norm.array(x, 1 + w)
    assert np.array_equal(y, plain)
    assert all(np.array_equal(a, b) for a, b in zip(vjp(dy), plain_vjp(dy)))
    assert np.array_equal(rms_norm.array(x, np.zeros(5), gain="1+w")[0], rms_norm.array(x, np.ones(5))[0])
    assert not np.allclose(y, rms_norm.array(x, w)[0])


def test_rms_norm_adds_eps_to_the_mean_square_and_takes_no_mean_off():
    y, _ = rms_norm.array(np.array([3.0, 3]), np.ones(2), eps=7.0)      # 3/√(9 + 7)
    assert y.tolist() == [0.75, 0.75]
    y, vjp = rms_norm.array(np.zeros((1, 3)), np.ones(3), eps=0.25)
    assert y.tolist() == [[0, 0, 0]] and vjp(np.ones((1, 3)))[0].tolist() == [[2, 2, 2]]


def test_rms_norm_and_layer_norm_agree_where_the_mean_is_0():
    x = np.array([[-1.5, -0.5, 0.5, 1.5]])
    np.testing.assert_allclose(rms_norm.array(x, G, eps=1e-5)[0], layer_norm.array(x, G, B, eps=1e-5)[0], rtol=1e-15)


@pytest.mark.parametrize("x, w, gain", [((3, 0), (0,), "w"), ((), (), "w"), ((2, 3), (2,), "w"), ((2, 3), (1, 3), "w"),
                                        ((2, 3), (3,), "w+1")])
def test_wrong_shapes_and_forms_of_rms_norm_are_named(x, w, gain):
    with pytest.raises(ValueError, match=r"rms_norm: x\[.*needs w of shape \[.\], D > 0, and gain w or 1\+w; got w\["):
        rms_norm.array(np.zeros(x), np.zeros(w), gain=gain)


def test_check_catches_dropped_terms():
    def variant(inner):
        def wrong(x, g, b):
            y, vjp = layer_norm.array(x, g, b)
            c = x - x.mean(axis=-1, keepdims=True)
            r = 1 / np.sqrt((c * c).mean(axis=-1, keepdims=True) + 1e-5)
            return y, lambda dy: (r * inner(g * dy, c * r, lambda a: a.mean(axis=-1, keepdims=True)), *vjp(dy)[1:])
        return wrong

    args = draw("x", (3, 5)), draw("g", (5,)), draw("b", (5,))
    check_vjp(variant(lambda d, xhat, mean: d - mean(d) - xhat * mean(d * xhat)), *args)
    for inner in (lambda d, xhat, mean: d - mean(d), lambda d, xhat, mean: d - xhat * mean(d * xhat), lambda d, xhat, mean: d,
                  lambda d, xhat, mean: d - mean(d) - xhat * mean(d * xhat) * 5 / 4):       # D - 1: unbiased
        with pytest.raises(AssertionError, match="argument 0"):
            check_vjp(variant(inner), *args)
