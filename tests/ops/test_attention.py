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
    dq, dk, dv, *_ = vjp(column(1))
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
    seen = CAUSAL.visible(T, S)
    seen = np.ones((T, S), bool) if seen is None else seen
    assert ["".join(map(str, row)) for row in seen.astype(int)] == rows


def test_a_mask_answers_for_blocks_of_positions():
    assert Mask().visible(2, 5) is None
    assert Mask().block(np.arange(2), np.arange(3)) is True
    assert CAUSAL.block(np.array([7, 2]), np.array([2, 3, 7])).tolist() == [[True, True, True], [True, False, False]]
    assert CAUSAL.block(np.arange(4, 6), np.arange(4)) is True and CAUSAL.block(np.arange(2), np.arange(2, 5)) is False
    assert Mask(causal=True, window=2).block(np.arange(5, 7), np.arange(4)) is False, "blocks out of the window are skipped"
    assert CAUSAL.to_dict() == {"causal": True, "window": None, "prefix": 0}


def test_a_window_counts_the_own_key_and_a_prefix_sees_itself_both_ways():
    def rows(mask):
        return ["".join(map(str, row)) for row in mask.visible(4, 4).astype(int)]
    assert rows(Mask(causal=True, window=2)) == ["1000", "1100", "0110", "0011"]
    assert rows(Mask(window=2)) == ["1100", "1110", "0111", "0011"]
    assert rows(Mask(causal=True, prefix=2)) == ["1100", "1100", "1110", "1111"]
    assert Mask(causal=True, window=4).visible(4, 4).tolist() == CAUSAL.visible(4, 4).tolist()
    assert Mask(causal=True, prefix=0) == CAUSAL and Mask(causal=True, prefix=4).visible(4, 4) is None
    with pytest.raises(ValueError, match="window must be at least 1"):
        Mask(window=0)
    with pytest.raises(ValueError, match="needs causal=True, got prefix 3"):
        Mask(prefix=3)


def test_grouped_kv_heads_are_repeated_not_tiled():
    """known_failures: query heads 0,1 use kv head 0 and 2,3 use 1 (0,0,1,1), never 0,1,0,1; dk sums over the group."""
    q, k, v = draw("q", (1, 4, 3, 2)), draw("k", (1, 2, 5, 2)), draw("v", (1, 2, 5, 2))
    y, vjp = attention.array(q, k, v)
    whole, whole_vjp = attention.array(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]])
    np.testing.assert_allclose(y, whole, rtol=1e-14)
    dy = draw("dy", y.shape)
    dq, dk, dv, *_ = vjp(dy)
    wq, wk, wv, *_ = whole_vjp(dy)
    np.testing.assert_allclose(dq, wq, rtol=1e-12)
    for d, w in ((dk, wk), (dv, wv)):
        np.testing.assert_allclose(d, w.reshape(1, 2, 2, 5, 2).sum(axis=2), rtol=1e-12, atol=1e-15)


def test_documents_do_not_see_each_other():
    documents = np.array([[0, 0, 1, 1]])
    q, k, v = (draw(n, (1, 2, 4, 3)) for n in "qkv")
    y, _ = attention.array(q, k, v, documents, documents, mask=CAUSAL)
    for part in (slice(0, 2), slice(2, 4)):
        np.testing.assert_allclose(y[:, :, part], attention.array(q[:, :, part], k[:, :, part], v[:, :, part], mask=CAUSAL)[0],
                                   rtol=1e-14)
    with pytest.raises(ValueError, match="given together, or not at all"):
        attention.array(q, k, v, documents)
    with pytest.raises(ValueError, match=r"documents int64\[1, 3\] must be integers \[1, 4\]"):
        attention.array(q, k, v, documents, documents[:, :3])


def test_a_row_without_a_key_gives_0_and_gradient_0():
    y, vjp = attention.array(draw("q", (1, 1, 4, 2)), draw("k", (1, 1, 3, 2)), draw("v", (1, 1, 3, 2)), mask=CAUSAL)
    dq, dk, dv, *_ = vjp(np.ones((1, 1, 4, 2)))
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
    assert not any(np.any(d[:, :, 1:]) for d in vjp(dy)[:3])


@pytest.mark.parametrize("scale", [None, 1 / np.sqrt(4), np.float64(3)])
def test_float32_stays_float32_everywhere(scale):
    y, vjp = attention.array(*(a.astype(np.float32) for a in (Q, K, V)), mask=CAUSAL, scale=scale)
    assert {a.dtype for a in (y, *vjp(y)[:3])} == {np.dtype("float32")}
    kept = [c.cell_contents for c in vjp.__closure__ if isinstance(c.cell_contents, np.ndarray)]
    assert {a.dtype for a in kept} == {np.dtype("float32")}


@pytest.mark.parametrize("q, k, v", [((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), ((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
                                     ((2, 3, 4), (2, 3, 4), (2, 3, 4)), ((1, 2, 3, 4), (1, 2), (1, 2)),
                                     ((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), ((1, 2, 3, 0), (1, 2, 3, 0), (1, 2, 3, 0))])
def test_shapes_that_do_not_fit_are_named(q, k, v):
    with pytest.raises(ValueError, match=r"attention: q\[.*must be \[B, H, T, K\], \[B, G, S, K\], \[B, G, S, K\] with G div"):
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


def test_masks_agree_with_their_definition_and_are_made_once():
    i, j = np.arange(3, 8)[:, None], np.arange(8)[None]
    for mask, seen in ((Mask(causal=True, window=3), (j <= i) & (i - j < 3)), (Mask(window=2), np.abs(i - j) < 2),
                       (Mask(causal=True, prefix=5), (j <= i) | (j < 5)),
                       (Mask(causal=True, window=2, prefix=2), (j <= i) & (i - j < 2) | (j < 2))):
        assert np.array_equal(mask.visible(5, 8), seen)
        assert mask.visible(5, 8) is mask.visible(5, 8) and not mask.visible(5, 8).flags.writeable


@pytest.mark.parametrize("given", [{"window": 2.5}, {"window": "2"}, {"prefix": 0.5}, {"prefix": None}])
def test_masks_count_in_integers(given):
    with pytest.raises(TypeError, match="^(window|prefix) must be an integer"):
        Mask(causal=True, **given)
