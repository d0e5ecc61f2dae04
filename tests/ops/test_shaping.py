"""Localises elements that end up in the wrong place: heads split the wrong way round, the inverse of a transpose."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import reshape, transpose
from refimpl.rng import draw


def test_heads_are_split_as_blocks_of_channels():
    x = np.arange(8.0).reshape(1, 2, 4)                 # 2 positions, 2 heads of 2 channels
    heads, _ = transpose.array(reshape.array(x, shape=(1, 2, 2, 2))[0], axes=(0, 2, 1, 3))
    assert heads[0, 0].tolist() == [[0, 1], [4, 5]]     # head 0: channels 0 and 1 of both positions
    assert heads[0, 1].tolist() == [[2, 3], [6, 7]]


def test_gradients_go_back_where_they_came_from():
    x = np.arange(24.0).reshape(2, 3, 4)
    for op, static in ((transpose, {"axes": (2, 0, 1)}), (transpose, {"axes": (-1, 0, 1)}), (reshape, {"shape": (4, -1)})):
        y, vjp = op.array(x, **static)
        assert np.array_equal(vjp(y), x)


def test_outputs_are_views_where_numpy_can_make_them():
    x = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(reshape.array(x, shape=(6,))[0], x) and np.shares_memory(transpose.array(x, axes=(1, 0))[0], x)
    assert not np.shares_memory(reshape.array(x.T, shape=(6,))[0], x)


@pytest.mark.parametrize("shape", [(5,), (4, -1), (0, -1)])
def test_shapes_that_do_not_fill_are_named(shape):
    with pytest.raises(ValueError, match=r"reshape: x\[2, 3\] has 6 elements, which do not fill the shape"):
        reshape.array(np.zeros((2, 3)), shape=shape)


@pytest.mark.parametrize("axes", [(), (0,), (0, 0), (1, -1), (0, 1, 2)])
def test_axes_that_are_no_permutation_are_named(axes):
    with pytest.raises(ValueError, match=r"transpose: axes .* must name each of the 2 axes of x\[2, 3\] once"):
        transpose.array(np.zeros((2, 3)), axes=axes)


def test_check_catches_the_forward_order_used_backward():
    def wrong(x):
        return x.transpose(2, 0, 1), lambda dy: dy.transpose(2, 0, 1)

    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, draw("x", (3, 3, 3)))
