"""Localises blocks that are skipped though seen, a softmax that is not rescaled where a later block has a larger score, nan
from blocks without a key, and score matrices that are kept after all."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.autograd import Count, residuals
from refimpl.ops import CAUSAL, Mask, attention, blockwise, blockwise_attention
from refimpl.ops.blockwise import Blocks, Partial, attend, by_group, shared
from refimpl.ops.sight import Sight, sight
from refimpl.rng import draw

MASKS = [Mask(), CAUSAL, Mask(causal=True, window=3), Mask(window=2), Mask(causal=True, prefix=4),
         Mask(causal=True, window=2, prefix=2)]
B, H, G, T, S, K = 2, 4, 2, 7, 11, 3
SHAPES = {"q": (B, H, T, K), "k": (B, G, S, K), "v": (B, G, S, K), "dy": (B, H, T, K)}
ALL = [draw(name, shape) for name, shape in SHAPES.items()]


def both(op, q, k, v, dy, *others, **static):
    y, vjp = op.array(q, k, v, *others, **static)
    return [y, *vjp(dy)[:3]]


def assert_same(a, b, scale=1.0):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12 * scale * max(1.0, np.abs(right).max(initial=0)))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_size_of_blocks_gives_what_the_whole_matrix_gives(mask):
    """7 queries and 11 keys: sizes that divide them, do not, and exceed them."""
    whole = both(attention, *ALL, mask=mask)
    for block_q, block_k in itertools.product((1, 2, 3, 7, 16), (1, 2, 4, 5, 11, 16)):
        assert_same(both(blockwise_attention, *ALL, mask=mask, block_q=block_q, block_k=block_k), whole)


@pytest.mark.parametrize("seed", range(5))
def test_keys_in_any_order_with_their_positions_give_the_same(seed):
    rng = np.random.default_rng(seed)
    q, k, v, dy = ALL
    order, mask = rng.permutation(S), Mask(causal=True, window=5)
    whole = both(attention, *ALL, mask=mask)
    at = np.arange(S - T, S)
    for op in (attention, blockwise_attention):
        blocks = {} if op is attention else {"block_q": 3, "block_k": 2}
        y, dq, dk, dv = both(op, q, k[:, :, order], v[:, :, order], dy, None, None, at, order, mask=mask, **blocks)
        back = np.argsort(order)
        assert_same([y, dq, dk[:, :, back], dv[:, :, back]], whole)


@pytest.mark.parametrize("offset", (1e4, -1e4))
def test_scores_far_from_0_neither_overflow_nor_vanish(offset):
    """All scores shifted by 1e4 are other numbers with the same softmax: q gets a channel of `offset`, k one of 1."""
    q, k, v, dy = ALL
    wide = [np.concatenate([a, np.full((*a.shape[:3], 1), c)], axis=3) for a, c in ((q, offset), (k, 1.0), (v, 0.0), (dy, 0.0))]
    y, dq, dk, dv = both(blockwise_attention, *wide, mask=CAUSAL, scale=0.5, block_q=2, block_k=3)
    assert_same([a[..., :K] for a in (y, dq, dk, dv)], both(attention, *ALL, mask=CAUSAL, scale=0.5), scale=abs(offset))


def test_a_later_block_with_a_larger_score_takes_over():
    """By hand: scores 0 and ln 3, one key to a block, in both orders."""
    for order in ((0, 1), (1, 0)):
        k, v = np.array([0, np.log(3)])[list(order)].reshape(1, 1, 2, 1), np.array([4.0, 8.0])[list(order)].reshape(1, 1, 2, 1)
        y, _ = blockwise_attention.array(np.ones((1, 1, 1, 1)), k, v, scale=1.0, block_k=1)
        assert y.ravel() == pytest.approx([0.25 * 4 + 0.75 * 8])


def test_meeting_no_key_changes_nothing():
    q, k, v, _ = ALL
    part, seen = Partial.nothing(q, k), sight(CAUSAL, T, S)
    attend(part, by_group(q, k), shared(k), shared(v), seen, Blocks(2, 3))
    before = [a.copy() for a in (part.out, part.total, part.top)]
    later = Sight(CAUSAL, np.arange(T), np.arange(S) + 100)
    part.add(slice(None), np.full((B, G, H // G, S, T), -np.inf), shared(v))
    attend(part, by_group(q, k), shared(k), shared(v), later, Blocks(2, 3))
    assert all(np.array_equal(a, b) for a, b in zip(before, (part.out, part.total, part.top)))
    y, lse = Partial.nothing(q, k).finished()
    assert not y.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("n", (8, 64))
def test_blocks_above_the_diagonal_cost_nothing(n):
    """Of (n/b)² square blocks (n/b + 1)/2·n/b are left; two products forward and five backward."""
    q, k, v, dy = (draw(name, (1, 1, n, 4)) for name in "abcd")
    blocks = n // 4
    one = 2 * 4 * 4 * 4                                 # FLOPs of a product of a block
    with Count() as count:
        _, vjp = blockwise_attention.array(q, k, v, mask=CAUSAL, block_q=4, block_k=4)
        forward = sum(count.flops.values())
        vjp(dy)
    assert forward == 2 * one * blocks * (blocks + 1) / 2
    assert sum(count.flops.values()) - forward == 5 * one * blocks * (blocks + 1) / 2


def test_blocks_outside_a_window_or_between_documents_cost_nothing():
    q, k, v, _ = (draw(name, (1, 1, 64, 4)) for name in "abcd")
    documents = np.repeat(np.arange(8), 8)[None]

    def blocks(*others, **static):
        with Count() as count:
            blockwise_attention.array(q, k, v, *others, block_q=8, block_k=8, **static)
        return sum(count.flops.values()) / (2 * 2 * 8 * 8 * 4)
    assert blocks(mask=Mask(causal=True, window=9)) == 8 + 7            # the own block and the one before
    assert blocks(documents, documents) == blocks(documents, documents, mask=CAUSAL) == 8
    assert blocks() == 64


def test_what_is_kept_grows_as_the_number_of_queries():
    """q, k, v, y and lse; the matrix of scores would be 64 times as large as q."""
    for n in (64, 256):
        q, k, v = (draw(name, (1, 2, n, 4)) for name in "qkv")
        kept = residuals(blockwise_attention.array(q, k, v, mask=CAUSAL)[1])
        assert sum(a.size for a in kept.values()) == 4 * q.size + 2 * n


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.none() | st.integers(1, 12), st.integers(0, 12), st.lists(st.integers(0, 15), max_size=6),
       st.lists(st.integers(0, 15), max_size=6))
def test_a_block_is_answered_by_its_ends_as_by_each_pair(causal, window, prefix, queries, keys):
    mask = Mask(causal, window, prefix if causal else 0)
    i, j = np.array(queries, int)[:, None], np.array(keys, int)[None, :]
    right = np.ones((len(queries), len(keys)), bool)
    right &= j <= i if causal else True
    right &= i - j < window if window else True
    right &= j - i < window if window and not causal else True
    right |= j < mask.prefix
    answer = mask.block(np.array(queries, int), np.array(keys, int))
    assert np.array_equal(np.broadcast_to(answer, right.shape), right)
    assert answer is True if right.all() else isinstance(answer, np.ndarray) == bool(right.any())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=8),
       st.integers(1, 3), st.integers(1, 3))
def test_documents_are_told_apart_in_any_block(queries, keys, block_q, block_k):
    q, k = np.array([queries, queries[::-1]]), np.array([keys, keys])
    seen = Sight(Mask(), np.arange(len(queries)), np.arange(len(keys)), q, k)
    found = np.zeros((2, len(queries), len(keys)), bool)
    for i, j, view in Blocks(block_q, block_k).visible(seen):
        found[:, i, j] = view
    assert np.array_equal(found, q[:, :, None] == k[:, None, :])


@pytest.mark.parametrize("n, most, piece, sizes", (
    (10, 4, None, [4, 3, 3]), (8, 4, None, [4, 4]), (3, 4, None, [3]), (0, 4, None, []), (10, 4, 5, [3, 2, 3, 2]),
    (9, 4, 5, [3, 2, 4]), (10, 20, 5, [5, 5]), (3, 1, 2, [1, 1, 1]), (2, 3, 0, [2])))
def test_blocks_are_of_nearly_equal_sizes_and_of_one_piece(n, most, piece, sizes):
    found = list(Blocks(most, 1, piece).cut(n, most))
    assert [s.stop - s.start for s in found] == sizes
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(n))


@pytest.mark.parametrize("shape", ((2, 4, 3), (1, 1, 8), (3, 1, 1), (5, 2, 1), (0, 2, 2), (2, 0, 0)))
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_heads_are_taken_so_many_at_once_that_their_scores_fit(shape, dtype, monkeypatch):
    """Each once; whole groups where one fits, whole samples where one fits."""
    q, k = np.zeros((*shape, 6, 2), dtype), np.zeros((*shape[:2], 1, 10, 2), dtype)
    for heads in (0, 1, 2, 3, 6, 12, 13, 24, 100):
        monkeypatch.setattr(blockwise, "BYTES", heads * 4 * 5 * q.itemsize)
        met = np.zeros(shape, int)
        for some in Blocks(4, 5).heads(q, k):
            met[some] += 1
            assert 0 < met[some].size <= max(1, heads)
        assert (met == 1).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ("int8", "uint8", "uint64"))
def test_positions_of_any_integer_type_are_the_same(mask, dtype):
    """i - window is below 0 at the beginning, which unsigned numbers are not."""
    q, at = ALL[0], np.arange(T).astype(dtype)
    for op in (attention, blockwise_attention):
        want = both(op, q, *(a[:, :, :T] for a in ALL[1:3]), ALL[3], mask=mask)
        assert_same(both(op, q, *(a[:, :, :T] for a in ALL[1:3]), ALL[3], None, None, at, at, mask=mask), want)


@pytest.mark.parametrize("heads", (1, 2, 3, 5, 8))
@pytest.mark.parametrize("documents", (False, True))
def test_heads_a_few_at_once_are_the_same(heads, documents, monkeypatch):
    """Some of a group, some groups, some samples: y and gradients, where each sample has documents of its own."""
    q, k, v, dy = (draw(f"few {n}", (3, 4 if n in ("q", "dy") else 2, 9, 2)) for n in ("q", "k", "v", "dy"))
    ids = np.array([[0] * 4 + [1] * 5, [0] * 9, [0, 1, 2] * 3])
    given = (ids, ids) if documents else ()
    monkeypatch.setattr(blockwise, "BYTES", heads * 8 * 3 * 2)
    assert_same(both(blockwise_attention, q, k, v, dy, *given, mask=CAUSAL, block_q=3, block_k=2),
                both(attention, q, k, v, dy, *given, mask=CAUSAL))
    monkeypatch.setattr(blockwise, "BYTES", heads * 8 * 9 * 9)              # blocks are no larger than T and S
    large, all_of = ([*Blocks(side, side).heads(q[:, :, None], k[:, :, None])] for side in (320, 9))
    assert large == all_of


def test_bad_blocks_and_positions_are_refused():
    q, k, v, _ = ALL
    for name in ("block_q", "block_k"):
        for size in (0, 2.5):
            with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {size}"):
                blockwise_attention.array(q, k, v, **{name: size})
    for op in (attention, blockwise_attention):
        with pytest.raises(ValueError, match="positions of the queries and of the keys are given together"):
            op.array(q, k, v, None, None, np.arange(T))
        with pytest.raises(ValueError, match=r"positions int64\[3\] must be integers \[11\]"):
            op.array(q, k, v, None, None, np.arange(T), np.arange(3))
        with pytest.raises(ValueError, match=r"positions float64\[7\] must be integers \[7\]"):
            op.array(q, k, v, None, None, np.arange(T) * 1.0, np.arange(S))
