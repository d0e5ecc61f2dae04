"""Localises faults of placement: parts that are put together wrongly, a wrong sharded run that passes, a rank's part lost."""
import itertools

import numpy as np
import pytest

from refimpl.comm.mesh import AXES
from refimpl.golden.place import HOW, SHARED, located, per_rank
from refimpl.rng import draw

KV = ((0, 2), (1, 3))                                   # kv heads 0, 1 and 1, 2 of three
WHOLE = draw("value", (4, 6, 3))


def dims(dp=1, tp=1):
    return dict(zip(AXES, (dp, 1, tp)))


def cut(a, axis, sizes):
    return np.split(a, np.cumsum(sizes)[:-1], axis)


def summands(a, n):
    """n arrays that add up to a, each of another pattern."""
    parts = [draw(f"part {k}", a.shape) for k in range(n - 1)]
    return [*parts, a - sum(parts)]


def require(parts, serial, mesh, along, kv=((0, 1),)):
    """Located so, and put together from the holders' parts alone it is the serial value."""
    place = located("x", parts, serial, mesh, kv)
    assert place.along == along and place.shape == serial.shape and place.dims == mesh
    whole = place.whole({r: parts[r] for r in place.holders()})
    assert np.abs(whole - serial).max(initial=0) <= 1e-12 * np.abs(serial).max(initial=0)
    assert [tuple(b - a for a, b in box) for box in place.boxes] == [p.shape for p in parts]
    assert all(HOW.fullmatch(how) for how in place.along.values())
    return place


def test_one_rank_has_everything():
    assert require([WHOLE], WHOLE, dims(), {}).holders() == [0]


@pytest.mark.parametrize("n", (2, 3, 4))
def test_replicated(n):
    place = require([WHOLE.copy() for _ in range(n)], WHOLE, dims(tp=n), {"tp": "replicated"})
    assert place.holders() == [0] and [place.holder(r) for r in range(n)] == [0] * n


@pytest.mark.parametrize("axis, sizes", [(0, [2, 2]), (1, [3, 3]), (0, [3, 1]), (1, [3, 2, 1]), (2, [1, 1, 1]), (1, [2, 4, 0]),
                                         (0, [0, 4])])
def test_cut_along_an_axis_evenly_unevenly_or_into_nothing(axis, sizes):
    parts = cut(WHOLE, axis, sizes)
    place = require(parts, WHOLE, dims(tp=len(sizes)), {"tp": f"axis {axis}"})
    assert place.holders() == list(range(len(sizes)))
    assert [box[axis] for box in place.boxes] == list(zip(np.cumsum([0, *sizes]), np.cumsum(sizes)))


@pytest.mark.parametrize("n", (2, 5))
def test_partial(n):
    assert require(summands(WHOLE, n), WHOLE, dims(dp=n), {"dp": "partial"}).holders() == list(range(n))


def test_overlapping_kv_heads_hold_the_same():
    parts = [WHOLE[:, 2 * a:2 * b] for a, b in KV]
    place = require(parts, WHOLE, dims(tp=2), {"tp": "axis 1"}, KV)
    assert [box[1] for box in place.boxes] == [(0, 4), (2, 6)]


def test_overlapping_kv_heads_add_up():
    """Of a gradient that is not yet summed: what both hold are two parts."""
    a, b = (WHOLE[:, 2 * start:2 * stop].copy() for start, stop in KV)
    share = draw("share", (4, 2, 3))
    a[:, 2:] -= share
    b[:, :2] = share
    place = require([a, b], WHOLE, dims(tp=2), {"tp": f"axis 1{SHARED}"}, KV)
    assert place.holders() == [0, 1]


COMBINED = {
    ("axis 0", "axis 2"): lambda: [p for row in cut(WHOLE, 0, [3, 1]) for p in cut(row, 2, [1, 2])],
    ("axis 0", "replicated"): lambda: [p for row in cut(WHOLE, 0, [3, 1]) for p in (row, row.copy())],
    ("replicated", "axis 1"): lambda: [p for _ in range(2) for p in cut(WHOLE, 1, [4, 2])],
    ("replicated", "replicated"): lambda: [WHOLE.copy() for _ in range(4)],
    ("partial", "replicated"): lambda: [p for part in summands(WHOLE, 2) for p in (part, part.copy())],
    ("replicated", "partial"): lambda: [*summands(WHOLE, 2), *summands(WHOLE, 2)],
    ("axis 0", "partial"): lambda: [p for row in cut(WHOLE, 0, [2, 2]) for p in summands(row, 2)],
    ("partial", "axis 1"): lambda: [p for part in summands(WHOLE, 2) for p in cut(part, 1, [4, 2])],
    ("partial", "partial"): lambda: summands(WHOLE, 4),
}


@pytest.mark.parametrize("how", COMBINED)
def test_dp_and_tp_combined(how):
    place = require(COMBINED[how](), WHOLE, dims(2, 2), dict(zip(("dp", "tp"), how)))
    kept = [0 if h == "replicated" else 1 for h in how]
    assert place.holders() == [2 * a + b for a, b in itertools.product(*(range(k + 1) for k in kept))]
    assert place.coordinates(2) == {"dp": 1, "cp": 0, "tp": 0}


def test_a_batch_cut_over_dp_of_heads_that_overlap_over_tp():
    parts = [row[:, 2 * a:2 * b] for row in cut(WHOLE, 0, [3, 1]) for a, b in KV]
    require(parts, WHOLE, dims(2, 2), {"dp": "axis 0", "tp": "axis 1"}, KV)


def test_scalars_and_values_without_elements():
    loss = np.array(0.7)
    assert require([loss, loss.copy()], loss, dims(tp=2), {"tp": "replicated"}).boxes == ((), ())
    require([np.array(0.3), loss - 0.3], loss, dims(tp=2), {"tp": "partial"})
    require([np.zeros((0, 2)), np.zeros((0, 2))], np.zeros((0, 2)), dims(tp=2), {"tp": "replicated"})


def test_integers_are_cut_too():
    tokens = np.arange(12).reshape(4, 3)
    place = require(cut(tokens, 0, [2, 2]), tokens, dims(dp=2), {"dp": "axis 0"})
    assert place.whole(cut(tokens, 0, [2, 2])).dtype == tokens.dtype


WRONG = {
    "one element off": lambda: [WHOLE[:2], WHOLE[2:] + 1e-9 * np.eye(6, 3)],
    "parts exchanged": lambda: [WHOLE[2:], WHOLE[:2]],
    "a part twice": lambda: [WHOLE[:2], WHOLE[:2]],
    "too few": lambda: [WHOLE[:2], WHOLE[2:3]],
    "a copy that differs": lambda: [WHOLE, np.where(np.arange(3) == 1, WHOLE + 1e-6, WHOLE)],
    "both wrong alike": lambda: [2 * WHOLE, 2 * WHOLE],
    "a sum counted twice": lambda: [2 * p for p in summands(WHOLE, 2)],
    "nan": lambda: [WHOLE[:2], np.where(np.arange(3) == 1, np.nan, WHOLE[2:])],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_no_placement(what):
    with pytest.raises(AssertionError, match=r"^grad/x on the mesh .*'tp': 2.* is not the serial value"):
        located("grad/x", WRONG[what](), WHOLE, dims(tp=2), ((0, 1), (1, 2)))


def test_overlapping_parts_that_differ_without_adding_up_are_wrong():
    a, b = (WHOLE[:, 2 * start:2 * stop].copy() for start, stop in KV)
    a[0, 3, 0] += 1e-3
    with pytest.raises(AssertionError, match="is not the serial value"):
        located("x", [a, b], WHOLE, dims(tp=2), KV)


def test_rounding_passes_and_what_is_rounding_alone_needs_the_shapes_only():
    a = WHOLE + 1e-14 * draw("rounding", WHOLE.shape)
    assert located("x", cut(a, 1, [3, 3]), WHOLE, dims(tp=2), ((0, 1), (1, 2))).along == {"tp": "axis 1"}
    noise, other = 1e-17 * draw("noise", (6,)), 1e-17 * draw("other", (6,))
    assert located("x", cut(noise, 0, [3, 3]), other, dims(tp=2), ((0, 1), (1, 2)), proved=False).along == {"tp": "axis 0"}
    with pytest.raises(AssertionError):
        located("x", cut(noise, 0, [3, 2, 1])[:2], other, dims(tp=2), ((0, 1), (1, 2)), proved=False)


def test_what_belongs_to_nothing_global_is_each_ranks_own_or_alike():
    a, b = draw("a", (2, 3)), draw("b", (2, 3))
    own = per_rank([a, b], dims(tp=2))
    assert own.along == {"tp": "per rank"} and own.holders() == [0, 1] and own.boxes == (((0, 2), (0, 3)),) * 2
    assert per_rank([a, a.copy()], dims(tp=2)).along == {"tp": "replicated"}
    mixed = per_rank([a, a.copy(), b, b.copy()], dims(2, 2))
    assert mixed.along == {"dp": "per rank", "tp": "replicated"} and mixed.holders() == [0, 2]
    uneven = per_rank([a, b[:1]], dims(dp=2))
    assert uneven.shape == (2, 3) and uneven.boxes == (((0, 2), (0, 3)), ((0, 1), (0, 3)))
    assert all(HOW.fullmatch(how) for place in (own, mixed, uneven) for how in place.along.values())
