"""Localises shards that overlap, miss elements or come back in another order, and tables made for another mesh."""
import numpy as np
import pytest

from refimpl.autograd import Tensor
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.parallel import Cut, Replicated, box, gather, shard

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
