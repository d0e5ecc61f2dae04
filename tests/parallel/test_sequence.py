"""Localises positions that no rank has, or two have, parts that are put together in another order, and targets that are shifted
after the cut.

All by hand or by counting; equality is equality.
"""
import numpy as np
import pytest

from refimpl.comm import Comm
from refimpl.parallel import LAYOUTS, SequenceLayout

BY_HAND = {
    ("contiguous", 8, 2): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("zigzag", 8, 2): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ("striped", 8, 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
    ("contiguous", 7, 3): [[0, 1, 2], [3, 4], [5, 6]],
    ("zigzag", 7, 3): [[0, 1, 6], [2, 5], [3, 4]],      # pieces of 2 1 1 1 1 1
    ("striped", 7, 3): [[0, 3, 6], [1, 4], [2, 5]],
    ("contiguous", 3, 4): [[0], [1], [2], []],
    ("zigzag", 3, 4): [[0], [1], [2], []],
    ("striped", 3, 4): [[0], [1], [2], []],
    ("zigzag", 6, 4): [[0], [1], [2, 5], [3, 4]],       # pieces of 1 1 1 1 1 1 0 0
    ("zigzag", 16, 4): [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
}


@pytest.mark.parametrize("kind, length, size", BY_HAND)
def test_positions_by_hand(kind, length, size):
    layout = SequenceLayout(kind, length)
    assert [layout.positions(r, size).tolist() for r in range(size)] == BY_HAND[kind, length, size]
    assert layout.sizes(size) == tuple(map(len, BY_HAND[kind, length, size]))
    assert layout.order(size).tolist() == sum(BY_HAND[kind, length, size], [])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_position_is_on_one_rank_and_the_shares_are_even(kind):
    """Also zigzag's: a rank's two pieces are one of the longer ones at the front and one of the shorter ones at the back."""
    for length in range(41):
        for size in range(1, 9):
            layout = SequenceLayout(kind, length)
            assert sorted(layout.order(size).tolist()) == list(range(length))
            assert max(layout.sizes(size)) - min(layout.sizes(size)) <= 1
            for r in range(size):
                mine = layout.positions(r, size)
                assert (np.diff(mine) > 0).all() and mine.dtype.kind == "i" and not mine.flags.writeable


@pytest.mark.parametrize("kind", LAYOUTS)
def test_on_one_rank_a_sequence_lies_in_its_order(kind):
    for length in range(10):
        assert SequenceLayout(kind, length).positions(0, 1).tolist() == list(range(length))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_is_cut_and_gathered_is_whole_again_by_the_order(ranks, kind):
    def check(comm: Comm):
        for length in (0, 1, 5, 16, 23):
            layout, whole = SequenceLayout(kind, length), np.arange(2.0 * length * 3).reshape(2, length, 3)
            own = layout.own(whole, comm, axis=1)
            assert own.shape == (2, layout.sizes(comm.size)[comm.rank], 3)
            joined = comm.all_gather(own, axis=1, sizes=layout.sizes(comm.size))
            assert np.array_equal(joined, whole[:, layout.order(comm.size)])
            assert np.array_equal(joined[:, np.argsort(layout.order(comm.size))], whole)
            assert np.array_equal(layout.own(whole[..., 0], comm), own[..., 0])         # the last axis by default
    ranks.run(check)


def test_targets_are_shifted_before_the_cut_by_hand():
    """Tokens 0..7 on 2 ranks, zigzag; shifted after the cut rank 0 would have 1 6 7 -100."""
    tokens, layout = np.arange(8), SequenceLayout("zigzag", 8)
    targets = np.append(tokens[1:], -100)
    assert tokens[layout.positions(0, 2)].tolist() == [0, 1, 6, 7]
    assert targets[layout.positions(0, 2)].tolist() == [1, 2, 7, -100]
    assert targets[layout.positions(1, 2)].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_each_token_keeps_its_own_target(ranks, kind):
    def check(comm: Comm):
        layout, tokens = SequenceLayout(kind, 19), np.arange(19)[None]
        targets = layout.own(np.append(tokens[:, 1:], [[-100]], axis=1), comm)
        mine = layout.own(tokens, comm)
        assert np.array_equal(targets, np.where(mine == 18, -100, mine + 1))
        ignored = comm.all_reduce(np.array([(targets == -100).sum()]))
        assert ignored.tolist() == [1]                  # one token has no next one; of each rank's last one it would be size
    ranks.run(check)


def test_a_layout_is_written_and_read():
    layout = SequenceLayout("striped", 7)
    assert layout.to_dict() == {"kind": "striped", "length": 7}
    assert SequenceLayout(**layout.to_dict()) == layout != SequenceLayout("zigzag", 7)


@pytest.mark.parametrize("kind, length, words", [
    ("zig-zag", 8, "a sequence is cut as one of contiguous, zigzag, striped, got 'zig-zag'"),
    (None, 8, "a sequence is cut as one of contiguous, zigzag, striped, got None"),
    ("zigzag", -1, "the length of a sequence is an integer from 0, got -1"),
    ("zigzag", 8.0, "the length of a sequence is an integer from 0, got 8.0")])
def test_a_wrong_layout_is_one_sentence(kind, length, words):
    with pytest.raises(ValueError) as error:
        SequenceLayout(kind, length)
    assert str(error.value) == words
