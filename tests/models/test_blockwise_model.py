"""Localises blocks of the blockwise transformer that keep what they should not, or differ from the whole.

That its losses and gradients are those of one block on every mesh is in tests/train/test_matrix.py.
"""
import numpy as np
import pytest

from refimpl.analysis import activations
from refimpl.autograd import Count, Frame, Tensor, value_and_grad
from refimpl.comm import Mesh
from refimpl.models import Config, Context, Plan, decoder, init

B, T, D, BLOCK = 2, 64, 8, 8


class Widths(Frame):
    """The largest result, in elements, of the feed-forward's ops, and of any op."""

    def __init__(self):
        self.ffn = self.any = 0

    def call(self, op, run, *arrays, **static):
        y, vjp = run(*arrays, **static)
        if vjp is not None and hasattr(y, "size") and y.dtype.kind == "f":
            self.any = max(self.any, y.size)
            self.ffn = max(self.ffn, y.size if op.name in ("relu", "gelu_tanh") else 0)
        return y, vjp


def step(plan, d_ff, n_layers=1, frame=None):
    cfg = Config(vocab_size=7, n_layers=n_layers, n_heads=2, d_model=D, d_ff=d_ff, max_seq_len=T, ffn="relu")
    tokens = np.arange(B * T).reshape(B, T) % 7
    ctx = Context.over(Mesh(), np.arange(B), T, plan)
    with frame or Widths() as seen:
        (loss, _), grads = value_and_grad(lambda p: decoder.loss(Tensor(tokens), tokens, p, cfg, ctx), init(cfg, Mesh(), 0))
    return seen, float(loss), grads


@pytest.mark.parametrize("ratio", (4, 16))
def test_hidden_units_are_there_for_one_block_only(ratio):
    """The slides' 8bsh and 2bsh, and Gemma-2B's ratio 16: at once the hidden units are d_ff/h times x, by blocks a block's."""
    at_once, by_blocks = (step(Plan("blockwise", block=block), ratio * D)[0] for block in (0, BLOCK))
    sizes = activations.peaks(activations.LayerSizes(B, T, D, 2, ratio * D, 1), BLOCK)
    assert at_once.ffn == sizes["memory-efficient"][1] == ratio * B * T * D
    assert by_blocks.ffn == ratio * B * BLOCK * D
    assert sizes["blockwise"] == (B * T * D, B * T * D)
    whole = step(Plan("naive"), ratio * D)[0]
    assert whole.any == at_once.any                     # the scores stay inside their op


def test_what_a_layer_keeps_is_x_k_and_v():
    """From one layer to two the bytes alive at the peak grow by x, k and v: no scores, no hidden units."""
    def growth(plan):
        first, second = (step(plan, 16 * D, n, Count())[0].peak for n in (1, 2))
        return (second - first) / (8 * B * T * D)
    assert growth(Plan("blockwise", block=BLOCK)) == pytest.approx(3, abs=0.05)         # in units of b·s·h
    assert 16 < growth(Plan("blockwise")) < growth(Plan("naive"))


def test_blocks_need_blockwise_attention():
    for name in ("block", "ring"):
        with pytest.raises(ValueError, match=f"{name} must be an integer, got 2.5"):
            Plan("blockwise", **{name: 2.5})
    for wrong in ({"ring": 2}, {"ring": 2, "attention": "ring"}, {"ring": 0, "attention": "all_to_all"}):
        with pytest.raises(ValueError, match="ring must be at least 1, and needs attention 'all_to_all', got ring"):
            Plan(**wrong)
    for wrong in ({"block": 8}, {"block": 8, "attention": "ring"}, {"block": -1, "attention": "blockwise"},
                  {"block": 8, "attention": "blockwise", "sequence_parallel": True}):
        with pytest.raises(ValueError, match="block must be at least 0, and needs attention 'blockwise' without"):
            Plan(**wrong)
    with pytest.raises(ValueError, match="regather needs sequence_parallel: without it there is nothing to join"):
        Plan(regather=True)
    for name in ("attention", "layout"):
        with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'flash'"):
            Plan(**{name: "flash"})
