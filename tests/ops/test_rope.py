"""Localises the wrong pairing of channels, the wrong sign of rotation, and angles computed in low precision."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import interleaved_to_half, rope
from refimpl.rng import draw

PAIRINGS = ("interleaved", "half")


@pytest.mark.parametrize("pairing, y", [("interleaved", [-1.1426, 1.9221, 2.9599, 4.0298]),
                                        ("half", [-1.9841, 1.9599, 2.4624, 4.0198])])
def test_published_values(pairing, y):
    """known_failures: [1, 2, 3, 4] at position 1 with the frequencies (1, 0.01), which theta = 10⁴ gives for 4 channels."""
    got, _ = rope.array(np.array([[1.0, 2, 3, 4]]), np.array([1]), theta=1e4, pairing=pairing)
    assert got[0] == pytest.approx(y, abs=5e-5)


def test_a_quarter_turn_by_hand():
    """Position 1, one pair, frequency 1: (1, 0) -> (cos 1, sin 1), (0, 1) -> (-sin 1, cos 1); and back again."""
    y, vjp = rope.array(np.array([[1.0, 0], [0, 1]]), np.array([1, 1]))
    assert y == pytest.approx(np.array([[math.cos(1), math.sin(1)], [-math.sin(1), math.cos(1)]]), abs=1e-16)
    assert vjp(y)[0] == pytest.approx(np.eye(2), abs=1e-15) and vjp(y)[1] is None


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_position_0_changes_nothing_and_lengths_never_change(pairing):
    x = draw("x", (2, 3, 5, 8))
    assert np.array_equal(rope.array(x, np.zeros(5, int), pairing=pairing)[0], x)
    y, _ = rope.array(x, np.arange(5) * 37, pairing=pairing)
    np.testing.assert_allclose((y * y).sum(axis=-1), (x * x).sum(axis=-1), rtol=1e-14)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shift", [1, 100, 12345])
def test_the_score_depends_on_the_distance_of_the_positions_alone(pairing, shift):
    q, k, at = draw("q", (5, 8)), draw("k", (5, 8)), np.array([0, 1, 2, 7, 30])

    def scores(by):
        return rope.array(q, at + by, pairing=pairing)[0] @ rope.array(k, at + by, pairing=pairing)[0].T
    np.testing.assert_allclose(scores(shift), scores(0), rtol=0, atol=1e-11)
    moved = rope.array(q, at + 1, pairing=pairing)[0] @ rope.array(k, at, pairing=pairing)[0].T
    assert np.abs(moved - scores(0)).max() > 0.1


def test_the_permutation_turns_one_pairing_into_the_other():
    x, at, order = draw("x", (3, 5, 8)), np.array([0, 1, 5, 9, 100]), interleaved_to_half(8)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved, _ = rope.array(x, at, pairing="interleaved")
    half, _ = rope.array(x[..., order], at, pairing="half")
    assert np.array_equal(half, interleaved[..., order])
    assert not np.allclose(rope.array(x, at, pairing="half")[0], interleaved)


def test_the_permutation_converts_weights_and_keeps_scores():
    """q and k weights w[D, K] with their columns in the new order give the same attention scores under the other pairing."""
    x, wq, wk, at, order = draw("x", (5, 6)), draw("wq", (6, 8)), draw("wk", (6, 8)), np.arange(5), interleaved_to_half(8)

    def scores(wq, wk, pairing):
        return rope.array(x @ wq, at, pairing=pairing)[0] @ rope.array(x @ wk, at, pairing=pairing)[0].T
    np.testing.assert_allclose(scores(wq[:, order], wk[:, order], "half"), scores(wq, wk, "interleaved"), rtol=0, atol=1e-13)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_angles_far_away_are_exact_in_float32(pairing):
    """At position 10⁶ an angle in float32 would be off by up to 0.03; y is off by the rounding of x, cos and sin alone."""
    x, at = draw("x", (4, 8)), np.array([1_000_003, 999_983, 1_048_575, 16_777_217])
    exact, _ = rope.array(x, at, pairing=pairing)
    low, _ = rope.array(x.astype(np.float32), at, pairing=pairing)
    assert low.dtype == np.float32
    assert np.abs(low - exact).max() < 3e-7
    angle = (at[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32)
    assert np.abs(np.cos(angle) - np.cos(at[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8))).max() > 1e-3


def test_an_angle_by_arithmetic_with_many_digits():
    """cos of 10⁶ radians is 0.936752127..., of 10⁶/100 (the second pair of four channels) cos 10⁴ = -0.952155368..."""
    y, _ = rope.array(np.array([[1.0, 1, 0, 0]]), np.array([10 ** 6]), pairing="half")
    assert y[0, :2] == pytest.approx([0.936752127533, -0.952155368259], abs=1e-10)


def test_only_the_first_channels_turn():
    x = draw("x", (3, 8))
    y, vjp = rope.array(x, np.array([1, 2, 3]), rotated=4)
    assert np.array_equal(y[:, 4:], x[:, 4:])
    assert np.array_equal(y[:, :4], rope.array(x[:, :4], np.array([1, 2, 3]))[0])
    assert np.array_equal(vjp(x)[0][:, 4:], x[:, 4:])


@pytest.mark.parametrize("x, positions, static, words", [
    ((3, 5), [0, 1, 2], {}, "an even rotated of at most 5"), ((3, 4), [0, 1], {}, "needs one position per row of x"),
    ((3, 4), [0, 1, 2], {"pairing": "neox"}, "pairing interleaved or half"), ((3, 4), [0, 1, 2], {"rotated": 6}, "at most 4"),
    ((3, 4), [0, 1, 2], {"rotated": 3}, "an even rotated"), ((4,), [0], {}, r"x\[4\] must be \[..., T, K\]"),
    ((3, 4), [0.0, 1, 2], {}, "positions integers, got float64")])
def test_wrong_arguments_are_named(x, positions, static, words):
    with pytest.raises(ValueError, match="rope: .*" + words):
        rope.array(np.zeros(x), np.array(positions), **static)


def test_check_catches_a_gradient_rotated_the_same_way():
    def wrong(x):
        y, _ = rope.array(x, np.arange(3))
        return y, lambda dy: rope.array(dy, np.arange(3))[0]

    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, draw("x", (3, 4)))
