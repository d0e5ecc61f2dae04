"""Localises a norm that counts replicated elements once per rank, or cut ones on one rank only, and clipping that rounds."""
import math

import numpy as np
import pytest

from refimpl.autograd import Layout, LayoutError, Tensor
from refimpl.comm import Comm, Mesh
from refimpl.parallel import Cut, Replicated, Rows, clip, gather, gradient_norm, row_table, shard, take_rows


def cut_by(bounds, comm: Comm, numbers, dtype="float64"):
    """A mesh over tp, and the norm there of one gradient, of which rank r holds numbers[r]."""
    mesh = Mesh(tp=comm.size, comm=comm)
    g = Tensor(np.array(numbers[comm.rank], dtype), Layout(frozenset({"tp"})))
    return gradient_norm({"w": g}, {"w": Cut(0, tuple(bounds))}, mesh)


# -- the norm ------------------------------------------------------------------------------------------------------


def test_replicated_elements_count_once_and_cut_ones_on_every_rank(ranks):
    """[3] on all ranks, [0] and [4] cut: 5.  Every rank's squares added up: √34 = 5.831; one rank's alone: 3."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        whole = np.zeros(comm.size)
        whole[-1] = 4
        table = {"norm.g": Replicated(), "w": Cut.even(0, comm.size, mesh.tp)}
        grads = shard({"norm.g": np.array([3.0]), "w": whole}, table, mesh)
        assert gradient_norm(grads, table, mesh) == 5
        own = sum(float(g.array @ g.array) for g in grads.values())
        wrong = math.sqrt(float(comm.all_reduce(np.array(own))))
        assert comm.size != 2 or (wrong == pytest.approx(5.831, abs=5e-4) and (comm.rank or math.sqrt(own) == 3))
    ranks.run(check)


def test_shared_elements_count_once_on_their_lowest_holder(ranks):
    """Rank r holds elements r and r + 1; what a higher holder has of a shared one (1000) does not matter."""
    def check(comm: Comm):
        bounds = [(r, r + 2) for r in range(comm.size)]
        numbers = [[1000.0 if r else 1.0, 1.0] for r in range(comm.size)]
        assert cut_by(bounds, comm, numbers) == math.sqrt(comm.size + 1)
    ranks.run(check)


def test_what_all_ranks_hold_counts_once_and_a_rank_may_hold_nothing(ranks):
    def check(comm: Comm):
        others = [[7.0, 9.0]] * (comm.size - 1)
        assert cut_by([(0, 2)] * comm.size, comm, [[3.0, 4.0], *others]) == 5
        assert cut_by([(0, 0)] * (comm.size - 1) + [(0, 2)], comm, [[]] * (comm.size - 1) + [[3.0, 4.0]]) == 5
        assert cut_by([(0, 0)] * comm.size, comm, [[]] * comm.size) == 0
        assert gradient_norm({}, {}, Mesh(tp=comm.size, comm=comm)) == 0
    ranks.run(check)


def random_cut(rng, axis, n, over, parts):
    """A cut of n in `parts` that may overlap, be equal, or empty."""
    stops = sorted(rng.integers(0, n + 1, parts - 1).tolist()) + [n]
    starts = [0]
    for last in stops[:-1]:
        starts.append(int(rng.integers(starts[-1], last + 1)))
    return Cut(axis, tuple(zip(starts, stops)), over)


@pytest.mark.parametrize("seed", range(5))
def test_the_norm_is_that_of_the_gathered_gradient(ranks, seed):
    """Cuts along any axis, over tp and over dp.  Tolerance: 200 squares in another order."""
    def check(mesh: Mesh):
        rng = np.random.default_rng(seed)
        tensors = {name: rng.standard_normal((5, 7)) for name in "abcde"}
        table = {"a": random_cut(rng, 0, 5, "tp", mesh.tp.size), "b": random_cut(rng, 1, 7, "dp", mesh.dp.size),
                 "c": random_cut(rng, 1, 7, "tp", mesh.tp.size), "d": Replicated(), "e": Cut.even(0, 5, mesh.tp)}
        grads = shard(tensors, table, mesh)
        norm = gradient_norm(grads, table, mesh)
        back = gather(grads, table, mesh)
        want = math.sqrt(sum(float((back[name] ** 2).sum()) for name in tensors))
        assert all(np.array_equal(back[name], a) for name, a in tensors.items())
        assert abs(norm - want) <= 1e-14 * want
        assert set(mesh.world.gather_texts(norm.hex())) == {norm.hex()}          # or ranks would clip differently
    ranks.run_meshes(check)


@pytest.mark.parametrize("seed", range(3))
def test_the_norm_of_rows_is_that_of_the_whole(ranks, seed):
    """Rows over dp of parts that tp cuts along any axis, overlapping and empty.  What a higher holder has of a shared element
    does not matter.  Tolerance: 200 squares in another order."""
    def check(mesh: Mesh):
        rng = np.random.default_rng(seed)
        tensors = {name: rng.standard_normal((5, 7)) for name in "abcde"}
        table = {"a": random_cut(rng, 0, 5, "tp", mesh.tp.size), "b": random_cut(rng, 1, 7, "tp", mesh.tp.size),
                 "c": Cut(0, ((0, 5),) * mesh.tp.size), "d": Replicated(), "e": Cut.even(0, 5, mesh.tp)}
        grads = shard(tensors, table, mesh)
        for name, place in table.items():
            if isinstance(place, Cut):                  # what a lower rank holds, too
                start = place.bounds[mesh.tp.rank][0]
                stop = max([b[1] for b in place.bounds[:mesh.tp.rank]], default=0)
                np.moveaxis(grads[name].array, place.axis, 0)[:max(0, stop - start)] = 1e3
        rows = {name: Tensor(t.array, t.layout, name=name) for name, t in take_rows(grads, mesh).items()}
        norm = gradient_norm(rows, row_table(table), mesh)
        want = math.sqrt(sum(float((a ** 2).sum()) for a in tensors.values()))
        assert abs(norm - want) <= 1e-14 * want
        assert set(mesh.world.gather_texts(norm.hex())) == {norm.hex()}
    ranks.run_meshes(check)


def test_of_rows_one_number_travels_over_dp_and_one_over_all(ranks):
    def check(mesh: Mesh):
        table = {"a": Cut.even(0, 8, mesh.tp), "b": Cut.even(1, 8, mesh.tp), "d": Replicated()}
        grads = take_rows(shard({name: np.ones((8, 8)) for name in table}, table, mesh), mesh)
        mesh.ledger.clear()
        assert gradient_norm(grads, {name: Rows(place) for name, place in table.items()}, mesh) == math.sqrt(3 * 64)
        assert [(*key, t.calls, t.elements) for key, t in mesh.ledger.rows()] == [
            (axes, "all_reduce", "forward", 1, 1) for axes in sorted({"+".join(sorted(mesh.wide(over))) for over in (
                {"dp"}, {"dp", "tp"})}) if axes]
    ranks.run_meshes(check)


def test_one_number_travels_for_each_axis_that_cuts(ranks):
    def check(mesh: Mesh):
        table = {"a": Cut.even(0, 8, mesh.tp), "b": Cut.even(1, 8, mesh.tp), "c": Cut.even(0, 8, mesh.dp), "d": Replicated()}
        grads = shard({name: np.ones((8, 8)) for name in table}, table, mesh)
        mesh.ledger.clear()
        assert gradient_norm(grads, table, mesh) == 16
        assert [(*key, t.calls, t.elements) for key, t in mesh.ledger.rows()] == [
            (axis, "all_reduce", "forward", 1, 1) for axis in ("dp", "tp") if mesh.comm(axis).size > 1]
    ranks.run_meshes(check)


def test_squares_that_float32_cannot_hold(ranks):
    """3e30 and 4e30: their squares are beyond 3e38; 3e-30 and 4e-30: theirs would be 0."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        table = {"a": Replicated(), "w": Cut.even(0, comm.size, mesh.tp)}
        for size in (1e30, 1e-30):
            whole = np.zeros(comm.size, np.float32)
            whole[-1] = 4 * size
            grads = shard({"a": np.array([3 * size], np.float32), "w": whole}, table, mesh)
            assert gradient_norm(grads, table, mesh) == pytest.approx(5 * size, rel=1e-7)
        many = {"a": Tensor(np.full(1 << 12, 4097.0, np.float32))}               # 4097² has 25 bits
        assert gradient_norm(many, table, mesh) == 64 * 4097
    ranks.run(check)


def test_a_gradient_that_still_has_to_be_reduced_is_refused(ranks):
    def check(mesh: Mesh):
        for axes in ({"dp"}, {"tp"}, {"dp", "tp"}):
            layout = Layout(frozenset(axes), frozenset(axes))
            with pytest.raises(LayoutError, match=rf"the gradient of w is partial over {'.'.join(sorted(axes))}: "
                                                  "reduce_gradients first"):
                gradient_norm({"w": Tensor(np.ones(2), layout)}, {"w": Replicated()}, mesh)
    ranks.run_meshes(check)


# -- clipping ------------------------------------------------------------------------------------------------------

GRADS = {"a": Tensor(np.array([3.0, 0.0])), "b": Tensor(np.array([[4.0]], np.float32), Layout(frozenset({"tp"})))}


@pytest.mark.parametrize("max_norm, factor", [(2.5, 0.5), (1.25, 0.25), (0.0, 0.0)])
def test_a_larger_norm_is_scaled_to_the_largest_allowed(max_norm, factor):
    clipped = clip(GRADS, 5.0, max_norm)
    for name, g in GRADS.items():
        c = clipped[name]
        assert np.array_equal(c.array, g.array * factor) and c.dtype == g.dtype and c.layout == g.layout
    assert GRADS["a"].array.tolist() == [3, 0] and list(clipped) == list(GRADS)  # arguments are left alone


@pytest.mark.parametrize("norm, max_norm", [(5.0, 5.0), (5.0, math.nextafter(5, 6)), (5.0, math.inf), (0.0, 1.0), (0.0, 0.0),
                                            (math.nan, 1.0)])
def test_any_other_norm_leaves_the_arrays_alone(norm, max_norm):
    clipped = clip(GRADS, norm, max_norm)
    assert clipped is not GRADS and all(clipped[name].array is g.array for name, g in GRADS.items())


def test_the_smallest_excess_is_clipped():
    assert clip({"a": Tensor(np.array([5.0]))}, 5.0, math.nextafter(5, 0))["a"].array[0] == math.nextafter(5, 0)


def test_a_clipped_gradient_has_the_largest_norm_allowed(ranks):
    """On every mesh the clipped gradient is the serial one clipped."""
    def check(mesh: Mesh):
        tensors = {name: np.arange(35.0).reshape(5, 7) - 17 for name in "ab"}
        table = {"a": Cut.even(1, 7, mesh.tp), "b": Replicated()}
        grads = shard(tensors, table, mesh)
        norm = gradient_norm(grads, table, mesh)
        assert norm == math.sqrt(2 * 35 * (35 ** 2 - 1) / 12)                     # Σ (k - 17)² over 35 numbers, twice
        clipped = clip(grads, norm, 1.5)
        assert gradient_norm(clipped, table, mesh) == pytest.approx(1.5, rel=1e-14)
        for name, a in gather(clipped, table, mesh).items():
            assert np.array_equal(a, tensors[name] * (1.5 / norm))
    ranks.run_meshes(check)
