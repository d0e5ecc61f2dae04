"""Localises shards that overlap, miss elements or come back in another order, elements that two ranks or none call their own,
and tables made for another mesh."""
import numpy as np
import pytest
from device import double

from refimpl.array import to_host
from refimpl.autograd import Tensor
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.parallel import Cut, Replicated, Rows, box, gather, own_box, shard

TENSORS = {"whole": np.arange(6.0).reshape(2, 3), "columns": np.arange(35.0).reshape(5, 7),
           "rows": np.arange(22.0).reshape(11, 2), "by hand": np.arange(24).reshape(4, 6)}


def table(mesh: Mesh):
    """`by hand`: all on the last rank, so the others hold nothing."""
    last = [(0, 0)] * (mesh.tp.size - 1) + [(0, 6)]
    return {"whole": Replicated(), "columns": Cut.even(1, 7, mesh.tp), "rows": Cut.even(0, 11, mesh.tp),
            "by hand": Cut(1, tuple(last))}


def test_gather_gives_back_what_shard_cut(ranks):
    def check(mesh: Mesh):
        local = shard(TENSORS, table(mesh), mesh)
        back = gather(local, table(mesh), mesh)
        for name, a in TENSORS.items():
            assert back[name].dtype == a.dtype and np.array_equal(back[name], a)
    ranks.run_meshes(check)


def test_shards_partition_the_array(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        local = shard(TENSORS, table(mesh), mesh)
        for name in ("columns", "rows", "by hand"):
            mine = local[name].array.reshape(-1)
            held = comm.all_gather(mine, 0, comm.all_gather(np.array([mine.size]), 0))
            assert sorted(held.tolist()) == TENSORS[name].ravel().tolist()
    ranks.run(check)


def test_a_shard_knows_its_cut_and_does_not_keep_the_whole_alive(ranks):
    def check(mesh: Mesh):
        local = shard(TENSORS, table(mesh), mesh)
        assert local["columns"].cut == {"tp": 1} and local["rows"].cut == {"tp": 0} and local["whole"].cut == {}
        assert local["columns"].varies == {"tp"} and local["whole"].varies == frozenset()
        assert all(t.name == name for name, t in local.items())
        for name, t in local.items():
            assert t.array.base is None and not np.shares_memory(t.array, TENSORS[name])
    ranks.run_meshes(check)


def test_uneven_shares_are_the_larger_ones_first(ranks):
    def check(comm: Comm):
        if comm.size == 3:
            assert Cut.even(0, 7, comm).bounds == ((0, 3), (3, 5), (5, 7))
            assert Cut.even(0, 2, comm).bounds == ((0, 1), (1, 2), (2, 2))
    ranks.run(check)


def test_box_is_this_ranks_part(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        where = box(Cut.even(1, 8, mesh.tp), (3, 8), mesh)
        each = 8 // comm.size
        if 8 % comm.size == 0:
            assert where == (slice(0, 3), slice(each * comm.rank, each * (comm.rank + 1)))
        assert box(Replicated(), (3, 8), mesh) == (slice(0, 3), slice(0, 8))
    ranks.run(check)


@pytest.mark.parametrize("bounds", (lambda p: ((0, 4),) * (p + 1), lambda p: ((0, 3),) * p))
def test_a_cut_for_another_mesh_or_shape_is_the_same_sentence_on_every_rank(ranks, bounds):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        with pytest.raises(ValueError, match=rf"do not cut axis 0 of an array of shape \(4, 2\) over tp={comm.size}") as caught:
            box(Cut(0, bounds(comm.size)), (4, 2), mesh)
        assert len(set(comm.gather_texts(str(caught.value)))) == 1
    ranks.run(check)


def test_overlapping_cuts_are_allowed_in_a_box():
    """Fewer kv heads than ranks: two ranks hold the same rows."""
    assert box(Cut(0, ((0, 4),)), (4, 2), Mesh()) == (slice(0, 4), slice(0, 2))


def test_gather_of_plain_tensors_needs_no_names(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        mine = Tensor(np.full((1, 2), float(comm.rank)))
        got = gather({"g": mine}, {"g": Cut.even(0, comm.size, mesh.tp)}, mesh)["g"]
        assert got.tolist() == [[r, r] for r in range(comm.size)]
    ranks.run(check)


@pytest.mark.parametrize("bounds", [((0, 1), (3, 4)), ((2, 4), (0, 2)), ((0, 4), (3, 2)), ((1, 2), (2, 4))])
def test_bounds_with_holes_or_out_of_order_are_refused(bounds):
    with pytest.raises(ValueError, match="must start at 0 and follow one another without a hole"):
        Cut(1, bounds)


def test_overlapping_parts_are_gathered_once():
    """Two ranks share element 2, as ranks share a kv head: the lower rank's stands."""
    def on_rank(comm):
        mesh = Mesh(tp=2, comm=comm)
        table = {"w": Cut(1, ((0, 3), (2, 4)))}
        whole = np.arange(8.0).reshape(2, 4)
        parts = shard({"w": whole}, table, mesh)
        assert parts["w"].shape == (2, (3, 2)[comm.rank])
        return np.array_equal(gather(parts, table, mesh)["w"], whole)
    assert run_threads(2, on_rank) == [True, True]


@pytest.mark.parametrize("axis", (0, 1))
def test_overlapping_parts_are_gathered_on_a_device(axis):
    """The double: no numpy function, no index from the host."""
    whole = np.arange(16.0).reshape(4, 4)

    def on_rank(comm):
        mesh, table = Mesh(tp=2, comm=comm), {"w": Cut(axis, ((0, 3), (2, 4)))}
        got = gather(shard({"w": double.asarray(whole)}, table, mesh), table, mesh)["w"]
        return type(got) is double.DeviceArray and np.array_equal(to_host(got), whole)
    assert run_threads(2, on_rank) == [True, True]


# -- whose an element is -------------------------------------------------------------------------------------------


def cuts(axis, n, over, parts):
    """Ways to cut n: even, with neighbours that share one, all on every rank, all on the last, the first empty and the rest
    overlapping."""
    shared = tuple((r * n // parts, min(n, (r + 1) * n // parts + 1)) for r in range(parts))
    ends = [n * r // parts for r in range(parts)] + [n]
    return [Cut(axis, bounds, over) for bounds in (
        tuple(zip(ends, ends[1:])), shared, ((0, n),) * parts, ((0, 0),) * (parts - 1) + ((0, n),),
        tuple((0, n * r // max(1, parts - 1)) for r in range(parts)) if parts > 1 else ((0, n),))]


def meshes(comm: Comm):
    """All dp x cp x tp of these ranks."""
    for dp in range(1, comm.size + 1):
        for cp in range(1, comm.size // dp + 1):
            if comm.size % (dp * cp) == 0:
                yield Mesh(dp=dp, cp=cp, tp=comm.size // (dp * cp), comm=comm)


def every_placement(mesh: Mesh, shape):
    places = [Replicated(), *(cut for axis in range(len(shape)) for over in ("tp", "cp", "dp")
                              for cut in cuts(axis, shape[axis], over, mesh.comm(over).size))]
    return places + [Rows(p) for p in places if getattr(p, "over", None) != "dp"]


@pytest.mark.parametrize("shape", ((5, 3), (2, 8), (7,), (0, 2)))
def test_every_element_is_one_ranks_own(ranks, shape):
    """Paint each rank's own box: all over the mesh every element is painted once; and it is a part of what the rank holds."""
    def check(comm: Comm):
        for mesh in meshes(comm):
            places = every_placement(mesh, shape)
            painted = np.zeros((len(places), *shape))
            for k, place in enumerate(places):
                mine, held = own_box(place, shape, mesh), box(place, shape, mesh)
                assert len(held) == len(shape) and all(0 <= h.start <= h.stop <= n for h, n in zip(held, shape))
                if mine is not None:
                    assert all(h.start <= m.start <= m.stop <= h.stop for m, h in zip(mine, held)), place
                    painted[(k, *mine)] += 1
            for place, times in zip(places, mesh.world.all_reduce(painted)):
                assert (times == 1).all(), (str(mesh), place, times)
    ranks.run(check)


def test_rows_of_what_neighbours_share_by_hand():
    """Five rows; tp ranks 0 and 1 hold 0-2 and 2-4, so row 2 is rank 0's.  Each has three rows, of which dp rank 0 has two."""
    def on_rank(comm):
        mesh = Mesh(dp=2, tp=2, comm=comm)
        place = Rows(Cut(0, ((0, 3), (2, 5))))
        return [[(s.start, s.stop) for s in where(place, (5,), mesh)][0] for where in (box, own_box)]
    assert run_threads(4, on_rank) == [[(0, 2), (0, 2)], [(2, 4), (3, 4)], [(2, 3), (2, 3)], [(4, 5), (4, 5)]]
