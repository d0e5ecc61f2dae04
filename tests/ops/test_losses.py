"""Localises means of means, ignored targets that leak in, targets out of range, and overflow in the cross entropy."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import IGNORE, cross_entropy, softmax
from refimpl.rng import draw


def test_equal_logits_cost_the_logarithm_of_the_classes():
    (y, count), _ = cross_entropy.array(np.zeros((3, 4)), np.array([0, 1, 3]))
    assert y == pytest.approx(3 * math.log(4)) and count == 3


def test_values_by_hand():
    (y, count), vjp = cross_entropy.array(np.array([[0, math.log(3)], [0, 0]]), np.array([0, 1]))
    assert (y, count) == (pytest.approx(math.log(4) + math.log(2)), 2)
    assert vjp(np.array(1.0))[0] == pytest.approx(np.array([[1 / 4 - 1, 3 / 4], [1 / 2, 1 / 2 - 1]]))
    assert vjp(np.array(2.0))[0] == pytest.approx(np.array([[-3 / 2, 3 / 2], [1, -1]]))


def test_ignored_rows_add_nothing():
    logits, targets = draw("logits", (4, 5)), np.array([1, IGNORE, 4, IGNORE])
    (y, count), vjp = cross_entropy.array(logits, targets)
    (kept, _), kept_vjp = cross_entropy.array(logits[::2], targets[::2])
    assert (y, count) == (kept, 2)
    assert np.array_equal(vjp(np.array(1.0))[0][::2], kept_vjp(np.array(1.0))[0])
    assert not vjp(np.array(1.0))[0][1::2].any()


@pytest.mark.parametrize("rows", [0, 3])
def test_without_a_valid_target_the_sum_is_0_and_nothing_is_nan(rows):
    (y, count), vjp = cross_entropy.array(draw("logits", (rows, 5)), np.full(rows, IGNORE))
    assert (y, count) == (0, 0)
    assert not vjp(np.array(1.0))[0].any()


def test_huge_logits_neither_overflow_nor_vanish():
    (y, _), vjp = cross_entropy.array(np.array([[1e4, 0, 0], [1e4, 0, 0]]), np.array([1, 0]))
    assert y == 1e4
    assert vjp(np.array(1.0))[0].tolist() == [[1, -1, 0], [0, 0, 0]]


def test_sums_of_parts_add_up_where_means_do_not():
    logits, targets = draw("logits", (5, 7)), np.array([3, IGNORE, 0, 6, IGNORE])
    parts = [cross_entropy.array(logits[a], targets[a])[0] for a in (slice(0, 2), slice(2, 5))]
    whole, count = cross_entropy.array(logits, targets)[0]
    assert sum(y for y, _ in parts) == pytest.approx(whole, abs=1e-14) and sum(n for _, n in parts) == count
    assert np.mean([y / n for y, n in parts]) != pytest.approx(whole / count, abs=1e-3)


LOGITS = np.array([2, 1, 0, -1, -2, 0.5, 1.5, -0.5])


@pytest.mark.parametrize("over, value", [("all", 1.9907), ("others", 2.0024)])
def test_both_forms_of_label_smoothing_have_their_published_values(over, value):
    """known_failures: α = 0.1, target 1; PyTorch spreads over all V classes, Megatron over the V - 1 others."""
    (y, _), vjp = cross_entropy.array(LOGITS[None], np.array([1]), smoothing=0.1, smoothing_over=over)
    assert y == pytest.approx(value, abs=5e-5)
    t = np.full(8, 0.1 / 8 if over == "all" else 0.1 / 7)
    t[1] = 0.9 + (0.1 / 8 if over == "all" else 0)
    p, _ = softmax.array(LOGITS)
    assert y == pytest.approx(-np.sum(t * np.log(p))) and np.sum(t) == pytest.approx(1)
    assert vjp(np.array(1.0))[0][0] == pytest.approx(p - t)


def test_smoothing_by_0_is_the_plain_loss_and_moves_continuously():
    def loss(**static):
        return cross_entropy.array(LOGITS[None], np.array([1]), **static)[0][0]
    for over in ("all", "others"):
        assert loss(smoothing=0.0, smoothing_over=over) == loss()
        assert loss(smoothing=1e-9, smoothing_over=over) == pytest.approx(loss(), abs=1e-8)


@pytest.mark.parametrize("static", [{"smoothing": 0.1}, {"smoothing": 0.1, "smoothing_over": "others"}, {"z_loss": 0.01}])
def test_ignored_rows_add_nothing_to_smoothing_and_z_loss(static):
    logits, targets = draw("logits", (4, 5)), np.array([1, IGNORE, 4, IGNORE])
    (y, count), vjp = cross_entropy.array(logits, targets, **static)
    (kept, _), kept_vjp = cross_entropy.array(logits[::2], targets[::2], **static)
    assert (y, count) == (pytest.approx(kept, abs=1e-14), 2)
    dx = vjp(np.array(1.0))[0]
    np.testing.assert_allclose(dx[::2], kept_vjp(np.array(1.0))[0], rtol=0, atol=1e-15)
    assert not dx[1::2].any()


def test_z_loss_by_hand():
    """Logits (0, ln 3): lse = ln 4; the loss gains z·lse², its gradient 2·z·lse·p."""
    z, lse, p = 0.5, math.log(4), np.array([0.25, 0.75])
    (y, _), vjp = cross_entropy.array(np.array([[0, math.log(3)]]), np.array([0]), z_loss=z)
    assert y == pytest.approx(lse + z * lse ** 2)
    assert vjp(np.array(1.0))[0][0] == pytest.approx(p * (1 + 2 * z * lse) - [1, 0])


def test_an_ignored_row_may_hold_anything():
    logits = np.array([[0.0, 0], [np.nan, np.inf], [-np.inf, -np.inf]])
    (y, count), vjp = cross_entropy.array(logits, np.array([0, IGNORE, IGNORE]))
    assert (y, count) == (pytest.approx(math.log(2)), 1)
    assert vjp(np.array(1.0))[0].tolist() == [[-0.5, 0.5], [0, 0], [0, 0]]


@pytest.mark.parametrize("static", [{"smoothing": -0.1}, {"smoothing": 1.0}, {"smoothing": 0.1, "smoothing_over": "rest"}])
def test_wrong_smoothing_is_named(static):
    with pytest.raises(ValueError, match=r"cross_entropy: smoothing must be in \[0, 1\) and smoothing_over one of all, others"):
        cross_entropy.array(LOGITS[None], np.array([1]), **static)


@pytest.mark.parametrize("logits, targets, words", [
    ((2, 3), np.array([0, 3]), r"targets must be in \[0, 3\) or -100, got 0 to 3"),
    ((2, 3), np.array([-1, 0]), r"targets must be in \[0, 3\) or -100, got -1 to 0"),
    ((2, 3), np.array([0, 1, 2]), r"logits\[2, 3\] with V > 0 need integer targets\[2\], got int64\[3\]"),
    ((2, 3), np.array([0.0, 1.0]), r"logits\[2, 3\] with V > 0 need integer targets\[2\], got float64\[2\]"),
    ((2, 0), np.array([0, 0]), r"logits\[2, 0\] with V > 0"),
    ((), np.array(0), r"logits\[\] with V > 0")])
def test_wrong_targets_are_named(logits, targets, words):
    with pytest.raises(ValueError, match="cross_entropy: " + words):
        cross_entropy.array(np.zeros(logits), targets)


def test_check_catches_dropped_terms():
    def variant(change):
        def wrong(logits, targets):
            (y, count), vjp = cross_entropy.array(logits, targets)
            return (y, count), lambda dy, dcount: (change(vjp(dy)[0], softmax.array(logits)[0], dy), None)
        return wrong

    logits, targets = draw("logits", (3, 5)), np.array([1, IGNORE, 4])
    check_vjp(variant(lambda dx, p, dy: dx), logits, targets)
    for change in (lambda dx, p, dy: p * dy,                                    # no one-hot
                   lambda dx, p, dy: dx / 2,                                    # the mean's gradient for the sum
                   lambda dx, p, dy: dx + p * dy * np.array([[0], [1], [0]])):  # an ignored row takes part
        with pytest.raises(AssertionError, match="argument 0"):
            check_vjp(variant(change), logits, targets)


@pytest.mark.parametrize("over", ["all", "others"])
def test_one_class_costs_nothing_however_it_is_smoothed(over):
    """There are no others to give α to: the target keeps all."""
    (y, _), vjp = cross_entropy.array(np.array([[2.0], [-3.0]]), np.zeros(2, int), smoothing=0.1, smoothing_over=over)
    assert y == 0 and vjp(np.array(1.0))[0] == pytest.approx(np.zeros((2, 1)), abs=1e-16)


@pytest.mark.parametrize("z_loss", [-1e-4, float("nan"), float("inf")])
def test_a_wrong_z_loss_gets_a_sentence(z_loss):
    with pytest.raises(ValueError, match="^cross_entropy: z_loss must be finite and at least 0, got"):
        cross_entropy.array(np.zeros((2, 3)), np.zeros(2, int), z_loss=z_loss)
