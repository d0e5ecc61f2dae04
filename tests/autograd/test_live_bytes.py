"""Localises arrays that stay alive without being a residual: the bytes of a decoder step against a formula written by hand.

Shape letters: B batch, T positions, D model, H heads, F feed-forward, V vocabulary; N valid targets.
"""
import builtins

import numpy as np
import pytest

from refimpl.autograd import Count, Tensor, recompute, value_and_grad
from refimpl.comm import Mesh
from refimpl.models import Config, Context, decoder, init
from refimpl.ops import attention, gelu_tanh, layer_norm, linear, sum, swiglu

CFG = Config(vocab_size=13, n_layers=3, n_heads=2, d_model=6, max_seq_len=5, d_ff=10)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 6, 7, 10, 0], [1, 1, 1, 1, 12]])
TARGETS = np.array([[2, 3, 4, 5, -100], [6, 7, 10, 0, 3], [1, 1, 1, 12, -100]])
B, T, D, H, F, V = *TOKENS.shape, CFG.d_model, CFG.n_heads, CFG.d_ff, CFG.vocab_size
N = int((TARGETS >= 0).sum())
INTEGER = 8                                             # bytes of an index


def elements_of_a_block():
    """What the vjps of one block keep, each array once; parameters are not counted, views belong to their owner."""
    norm = B * T * D + B * T                            # layer_norm: xhat, r
    return builtins.sum({
        "norm1": norm, "q, k and v": B * T * D,         # linear: x, the output of norm1, one array for all three
        "attention": 3 * B * T * D + B * H * T * T,     # q, k, v (the outputs of linear, seen through transposes) and p
        "o": B * T * D,                                 # linear: x, the heads merged
        "norm2": norm, "up": B * T * D,                 # linear: x, the output of norm2
        "gelu_tanh": B * T * F,                         # x (the output of up)
        "down": B * T * F,                              # linear: x, the output of gelu
    }.values())                                         # reshape, transpose, copy_to, reduce_from, add: none


def bytes_of_the_head(itemsize):
    """The last norm and its output; of cross_entropy e, total and lse of the rows that count, their numbers, which of them have
    their targets here, and where, and the count it returned (the sum is a scalar of numpy's, which Count takes for nothing).
    Of the embedding the tokens whose words are here, and their rows."""
    return itemsize * (2 * B * T * D + B * T + N * V + 2 * N) + INTEGER * (3 * N + 1 + 2 * B * T)


def live_after_forward(loss, dtype):
    """Bytes alive when the forward pass is over and its local variables are gone."""
    seen = []

    def fn(p):
        y, _ = loss(p)
        seen.append(count.live)
        return y
    with Count() as count:
        value_and_grad(fn, init(CFG, Mesh(), seed=1, dtype=dtype))
    assert count.peak >= seen[0]
    return seen[0], count


def context():
    return Context(Mesh(), np.arange(B), np.arange(T))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_step_keeps_what_the_formula_says(dtype):
    size = np.dtype(dtype).itemsize
    live, count = live_after_forward(lambda p: decoder.loss(TOKENS, TARGETS, p, CFG, context()), dtype)
    assert live == size * CFG.n_layers * elements_of_a_block() + bytes_of_the_head(size)
    assert count.live == 0, "after the sweep nothing is left but the gradients"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_recomputed_step_keeps_the_inputs_of_its_blocks(dtype):
    def loss(p):
        x = decoder.embed(TOKENS, p, CFG, context())
        for i in range(CFG.n_layers):
            x = recompute(decoder.block, x, p / f"layers.{i}", CFG, context())
        return decoder.cross_entropy(decoder.head(x, p, CFG, context()), TARGETS, CFG, context())
    size = np.dtype(dtype).itemsize
    live, _ = live_after_forward(loss, dtype)
    assert live == size * CFG.n_layers * B * T * D + bytes_of_the_head(size)


@pytest.mark.parametrize("fn, shapes, kept", [
    (linear, ((3, 5), (5, 7)), 0),                      # x and w are inputs; y belongs to nobody
    (gelu_tanh, ((3, 5),), 0),                          # x alone, which is not its own
    (layer_norm, ((3, 5), (5,), (5,)), 3 * 5 + 3),      # xhat, r
    (swiglu, ((3, 5), (3, 5)), 3 * 5),                  # s
    (attention, ((1, 2, 3, 4),) * 3, 2 * 3 * 3)])       # p
def test_the_tape_alone_keeps_the_residuals_alone(fn, shapes, kept):
    """The output y is gone when only the tape holds on to the call: sum keeps its shape, not its values."""
    inputs = [Tensor(np.ones(shape)) for shape in shapes]
    seen = []

    def loss(p):
        y = sum(fn(p["x"], *inputs[1:]))
        seen.append(count.live)
        return y
    with Count() as count:
        value_and_grad(loss, {"x": inputs[0]})
    assert seen == [8 * kept]
