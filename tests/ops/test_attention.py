"""Localises masks off by one, top-left alignment, nan from rows without a key, a wrong scale, and float64 creeping in."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import CAUSAL, Mask, attention, softmax
from refimpl.rng import draw

Q, K, V = (draw(name, (1, 2, 3, 4)) for name in "qkv")


def column(*values):
    return np.array(values, float).reshape(1, 1, -1, 1)


def test_one_query_and_two_keys_by_hand():
    y, vjp = attention.array(column(1), column(0, math.log(3)), column(4, 8), scale=1.0)    # p = 1/4, 3/4
    assert y.ravel() == pytest.approx([0.25 * 4 + 0.75 * 8])
    dq, dk, dv = vjp(column(1))
    assert dv.ravel() == pytest.approx([0.25, 0.75])
    assert dk.ravel() == pytest.approx([-0.75, 0.75])               # ds = p·(dp - Σ p·dp) = 1/4·(4 - 7), 3/4·(8 - 7)
    assert dq.ravel() == pytest.approx([0.75 * math.log(3)])


def test_scale_is_one_over_the_root_of_the_head_dim():
    y, _ = attention.array(Q, K, V)
    assert np.array_equal(y, attention.array(Q, K, V, scale=0.5)[0])
    assert not np.allclose(y, attention.array(Q, K, V, scale=1.0)[0])


@pytest.mark.parametrize("T, S, rows", [(2, 5, ["11110", "11111"]), (1, 5, ["11111"]), (3, 3, ["100", "110", "111"]),
                                        (3, 1, ["0", "0", "1"]), (2, 0, ["", ""]), (0, 2, [])])
def test_causal_mask_is_bottom_right_aligned(T, S, rows):
    assert ["".join(map(str, row)) for row in CAUSAL.visible(T, S).astype(int)] == rows


def test_a_mask_answers_for_blocks_of_positions():
    assert Mask().visible(2, 5) is None
    assert Mask().block(np.arange(2), np.arange(3)).tolist() == [[True] * 3] * 2
    assert CAUSAL.block(np.array([7, 2]), np.array([2, 3, 7])).tolist() == [[True, True, True], [True, False, False]]
    assert CAUSAL.to_dict() == {"causal": True}


def test_a_row_without_a_key_gives_0_and_gradient_0():
    y, vjp = attention.array(draw("q", (1, 1, 4, 2)), draw("k", (1, 1, 3, 2)), draw("v", (1, 1, 3, 2)), mask=CAUSAL)
    dq, dk, dv = vjp(np.ones((1, 1, 4, 2)))
    assert y[0, 0, 0].tolist() == [0, 0] and dq[0, 0, 0].tolist() == [0, 0]
    assert np.isfinite([*dk.ravel(), *dv.ravel()]).all()
    _, vjp = attention.array(draw("q", (1, 1, 3, 2)), draw("k", (1, 1, 0, 2)), draw("v", (1, 1, 0, 2)))
    assert vjp(np.ones((1, 1, 3, 2)))[0].tolist() == [[[[0, 0]] * 3]]


def test_the_future_has_no_influence():
    changed = K.copy()
    changed[:, :, 2] = 9
    y, vjp = attention.array(Q, K, V, mask=CAUSAL)
    assert np.array_equal(y[:, :, :2], attention.array(Q, changed, V, mask=CAUSAL)[0][:, :, :2])
    dy = np.zeros_like(y)
    dy[:, :, 0] = 1
    assert not any(np.any(d[:, :, 1:]) for d in vjp(dy))


@pytest.mark.parametrize("scale", [None, 1 / np.sqrt(4), np.float64(3)])
def test_float32_stays_float32_everywhere(scale):
    y, vjp = attention.array(*(a.astype(np.float32) for a in (Q, K, V)), mask=CAUSAL, scale=scale)
    assert {a.dtype for a in (y, *vjp(y))} == {np.dtype("float32")}
    kept = [c.cell_contents for c in vjp.__closure__ if isinstance(c.cell_contents, np.ndarray)]
    assert {a.dtype for a in kept} == {np.dtype("float32")}


@pytest.mark.parametrize("q, k, v", [((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), ((1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)),
                                     ((2, 3, 4), (2, 3, 4), (2, 3, 4)), ((1, 2, 3, 4), (1, 2), (1, 2)),
                                     ((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), ((1, 2, 3, 0), (1, 2, 3, 0), (1, 2, 3, 0))])
def test_shapes_that_do_not_fit_are_named(q, k, v):
    with pytest.raises(ValueError, match=r"attention: q\[.*must be \[B, H, T, K\], \[B, H, S, K\], \[B, H, S, K\] with K > 0"):
        attention.array(np.zeros(q), np.zeros(k), np.zeros(v))


def test_check_catches_the_usual_mistakes():
    def variant(ds_of, dv_of=lambda p, dy: p.swapaxes(2, 3) @ dy, back=0.5):
        def wrong(q, k, v):
            p, _ = softmax.array(0.5 * q @ k.swapaxes(2, 3))

            def vjp(dy):
                dp = dy @ v.swapaxes(2, 3)
                ds = back * ds_of(p, dp)
                return ds @ k, ds.swapaxes(2, 3) @ q, dv_of(p, dy)
            return p @ v, vjp
        return wrong

    def right(p, dp):
        return p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    check_vjp(variant(right), Q, K, V)
    for wrong, argument in [(variant(lambda p, dp: p * dp), 0),                                     # no Σ p·dp
                            (variant(lambda p, dp: p * (dp - dp.mean(axis=-1, keepdims=True))), 0),
                            (variant(right, back=1.0), 0),                                          # scale forgotten
                            (variant(right, dv_of=lambda p, dy: p @ dy), 2)]:                       # p not transposed
        with pytest.raises(AssertionError, match=f"argument {argument}"):
            check_vjp(wrong, Q, K, V)
