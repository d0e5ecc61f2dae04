"""Localises ranks that sit at the wrong place of the mesh, groups that overlap or miss somebody, and bad mesh texts."""
import numpy as np
import pytest

from refimpl.comm import AXES, Comm, CommError, Mesh, SerialComm
from refimpl.comm.paper import paper_mesh


def meshes(size):
    """Every dp x cp x tp of `size` ranks."""
    sizes = range(1, size + 1)
    return [{"dp": a, "cp": b, "tp": c} for a in sizes for b in sizes for c in sizes if a * b * c == size]


def members(comm: Comm, world_rank: int) -> list[int]:
    return comm.all_gather(np.array([world_rank]), axis=0).tolist()


def test_tp_varies_fastest(ranks):
    def check(comm: Comm):
        for dims in meshes(comm.size):
            mesh = Mesh(**dims, comm=comm)
            dp, cp, tp = (mesh.at[a] for a in AXES)
            assert comm.rank == (dp * dims["cp"] + cp) * dims["tp"] + tp
            assert (mesh.dp.rank, mesh.cp.rank, mesh.tp.rank) == (dp, cp, tp)
            assert (mesh.dp.size, mesh.cp.size, mesh.tp.size) == tuple(dims.values())
    ranks.run(check)


@pytest.mark.parametrize("axes", (("dp",), ("cp",), ("tp",), ("dp", "cp"), ("dp", "tp"), ("cp", "tp"), ("dp", "cp", "tp")))
def test_groups_partition_the_ranks_and_differ_along_their_axes_only(ranks, axes):
    def check(comm: Comm):
        for dims in meshes(comm.size):
            mesh = Mesh(**dims, comm=comm)
            group = mesh.comm(*axes)
            mine = members(group, comm.rank)
            assert mine[group.rank] == comm.rank and mine == sorted(mine) and group.axes == axes
            assert len(mine) == group.size == np.prod([dims[a] for a in axes])
            everybodys = {tuple(map(int, text.split())) for text in comm.gather_texts(" ".join(map(str, mine)))}
            assert sorted(r for g in everybodys for r in g) == list(range(comm.size))    # everybody once
            for r in mine:
                at = dict(zip(AXES, np.unravel_index(r, tuple(dims.values()))))
                assert all(at[a] == mesh.at[a] for a in AXES if a not in axes)
    ranks.run(check)


def test_a_communicator_is_made_once_and_in_the_mesh_order(ranks):
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        assert mesh.comm("tp", "dp") is mesh.comm("dp", "tp") and mesh.comm("dp", "tp").name == "dp+tp"
        assert mesh.comm("dp") is mesh.dp and mesh.dp.ledger is mesh.ledger is comm.ledger
    ranks.run(check)


def test_many_meshes_do_not_use_up_the_communicators(ranks):
    """MPICH has about 2,000: a suite, or a program that makes a mesh per step, must not run out of them."""
    def check(comm: Comm):
        for _ in range(700 if comm.size == 4 else 1):
            mesh = Mesh(tp=comm.size, comm=comm)
        assert mesh.tp.all_reduce(np.ones(1)) == comm.size
    ranks.run(check)


def test_a_mesh_of_another_size_is_the_same_sentence_on_every_rank(ranks):
    def check(comm: Comm):
        with pytest.raises(ValueError) as caught:
            Mesh(dp=3, tp=7, comm=comm)
        assert str(caught.value) == ("the mesh dp=3,tp=7 needs 21 ranks (dp * cp * tp, each at least 1), "
                                     f"there {'is' if comm.size == 1 else 'are'} {comm.size}")
        assert len(set(comm.gather_texts(str(caught.value)))) == 1
    ranks.run(check)


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="the mesh dp=0 needs 0 ranks"):
        Mesh(dp=0)
    with pytest.raises(ValueError, match="the mesh dp=-1,tp=-1 needs 1 rank "):
        Mesh(dp=-1, tp=-1)


def test_text_and_mesh_are_each_others_inverse(ranks):
    def check(comm: Comm):
        for dims in meshes(comm.size):
            mesh = Mesh(**dims, comm=comm)
            assert Mesh.parse(str(mesh), comm).dims == dims
    ranks.run(check)


def test_text_may_have_spaces_and_any_order():
    assert str(Mesh.parse(" tp=1 , dp=1")) == "dp=1"


@pytest.mark.parametrize("text, part", (
    ("dp=2,pp=2", "pp=2"), ("dp=two", "dp=two"), ("dp=2,dp=2", "dp=2"), ("tp", "tp"), ("", ""), ("dp=-1", "dp=-1"),
    ("dp=2;tp=2", "dp=2;tp=2"), ("dp=2,", "")))
def test_bad_texts_are_named(text, part):
    with pytest.raises(ValueError, match="not AXIS=SIZE") as caught:
        Mesh.parse(text)
    assert f"mesh {text!r}: {part!r} is not AXIS=SIZE with each axis (dp, cp, tp) once" == str(caught.value)


@pytest.mark.parametrize("axes", (("pp",), ("dp", "dp"), ("dp", "x")))
def test_axes_that_a_mesh_does_not_have_are_refused(axes):
    with pytest.raises(ValueError, match="are not distinct ones of dp, cp, tp"):
        Mesh().comm(*axes)


def test_a_mesh_on_paper_has_shares_and_nobody_to_talk_to():
    mesh = paper_mesh("dp=2,tp=3")
    assert (mesh.dp.size, mesh.tp.size, mesh.comm("dp", "tp").size, mesh.tp.rank) == (2, 3, 6, 0)
    with pytest.raises(CommError, match=r"nobody to talk to on a mesh on paper: all_reduce over tp: sum of float64\[2\]"):
        mesh.tp.all_reduce(np.ones(2))


def test_one_rank_needs_no_backend():
    mesh = Mesh()
    assert all(isinstance(mesh.comm(*axes), SerialComm) for axes in (("dp",), ("cp",), ("tp",), ("dp", "tp")))
    assert mesh.at == {"dp": 0, "cp": 0, "tp": 0}
