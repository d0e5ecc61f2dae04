"""Localises traffic that is counted twice, not at all, or under the wrong mesh axis or phase."""
import numpy as np

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Ledger, Mesh
from refimpl.comm.ledger import Key
from refimpl.ops import sum as total
from refimpl.parallel import as_partial, copy_to, reduce_from


def counted(ledger, **match):
    t = ledger.total(**match)
    return t.calls, t.elements, t.bytes


def test_every_collective_counts_what_a_rank_hands_to_it(ranks):
    def check(comm: Comm):
        comm.all_reduce(np.zeros((2, 3)))
        comm.all_reduce(np.zeros(4, np.float32), "max")
        comm.all_gather(np.zeros((5, 2), np.int32), axis=1)
        comm.reduce_scatter(np.zeros((2, 8)), axis=1)
        comm.broadcast(np.zeros(7))
        comm.barrier()
        many = comm.size > 1                             # nothing travels on one rank
        assert counted(comm.ledger, operation="all_reduce") == (2 * many, 10 * many, 64 * many)
        assert counted(comm.ledger, operation="all_gather") == (many, 10 * many, 40 * many)
        assert counted(comm.ledger, operation="reduce_scatter") == (many, 16 * many, 128 * many)
        assert counted(comm.ledger, operation="broadcast") == (many, 7 * many, 56 * many)
        assert counted(comm.ledger) == (5 * many, 43 * many, 288 * many)
        assert counted(comm.ledger, axes="world", phase="forward") == counted(comm.ledger)
        assert counted(comm.ledger, axes="tp") == (0, 0, 0)
        assert (comm.ledger.total().seconds > 0) == many
        comm.ledger.clear()
        assert counted(comm.ledger) == (0, 0, 0)
    ranks.run(check)


def test_a_call_that_was_refused_counts_nothing(ranks):
    def check(comm: Comm):
        try:
            comm.all_reduce(np.zeros(2), "mean")
        except ValueError:
            pass
        assert counted(comm.ledger) == (0, 0, 0)
    ranks.run(check)


def test_axes_are_counted_apart(ranks):
    def check(mesh: Mesh):
        mesh.dp.all_reduce(np.zeros(2))
        mesh.tp.all_reduce(np.zeros(3))
        mesh.comm("dp", "tp").all_reduce(np.zeros(5))
        dp, tp = mesh.dp.size > 1, mesh.tp.size > 1
        assert [counted(mesh.ledger, axes=a)[1] for a in ("dp", "tp", "dp+tp")] == [2 * dp, 3 * tp, 5 * (dp or tp)]
        assert [key.axes for key, _ in mesh.ledger.rows()] == ["dp"] * dp + ["dp+tp"] * (dp or tp) + ["tp"] * tp
    ranks.run_meshes(check)


def test_phases_are_counted_apart(ranks):
    """f costs an all_reduce backward, g one forward."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        w = Tensor(np.ones((2, 3)))
        mine = Tensor(np.ones((2, 3)), Layout(frozenset({"tp"})))

        def loss(p):
            part = as_partial(copy_to(p["w"], comm=mesh.tp) * mine, comm=mesh.tp)
            return total(reduce_from(part, comm=mesh.tp))
        value_and_grad(loss, {"w": w})
        many = comm.size > 1
        assert counted(comm.ledger, axes="tp", phase="forward") == (many, 6 * many, 48 * many)
        assert counted(comm.ledger, axes="tp", phase="backward") == (many, 6 * many, 48 * many)
    ranks.run(check)


def test_totals_add_up_what_matches():
    ledger = Ledger()
    ledger.totals[Key("tp", "all_reduce", "forward")].add(3, 24, 0.5)
    ledger.totals[Key("tp", "all_reduce", "forward")].add(3, 24, 0.5)
    ledger.totals[Key("dp", "all_gather", "backward")].add(1, 4, 0.25)
    assert counted(ledger) == (3, 7, 52) and ledger.total().seconds == 1.25
    assert counted(ledger, axes="tp") == (2, 6, 48) and counted(ledger, operation="all_gather", phase="forward") == (0, 0, 0)
    assert [(k.axes, t.calls) for k, t in ledger.rows()] == [("dp", 1), ("tp", 2)]


def test_the_table_shows_what_was_counted_by_hand():
    """An all_reduce of 1000 and one of 234 float64, a permute of 50 float32 to a neighbour and one that this rank only gets."""
    ledger = Ledger()
    assert str(ledger) == "nothing travelled"
    ledger.totals[Key("tp", "permute", "backward")].add(50, 200, 0.0025, wire=50)
    ledger.totals[Key("tp", "permute", "backward")].add(0, 0, 0.0005)
    ledger.totals[Key("dp+cp", "all_reduce", "forward")].add(1000, 8000, 0.25)
    ledger.totals[Key("dp+cp", "all_reduce", "forward")].add(234, 1872, 0.5)
    ledger.totals[Key("tp", "permute", "forward")].add(0, 0, 0.0)
    assert str(ledger).splitlines() == [
        "axes   operation   phase     calls  elements  bytes  wire   seconds",
        "dp+cp  all_reduce  forward       2     1,234  9,872     -  0.750000",
        "tp     permute     backward      2        50    200    50  0.003000",
        "tp     permute     forward       1         0      0     0  0.000000",
        "elements, bytes: what this rank hands to the calls;  wire: elements that refimpl itself sends, - where the MPI "
        "library does"]


def test_the_table_of_a_run_has_its_counts(ranks):
    """A ring is ours, an all_reduce is the library's."""
    def check(comm: Comm):
        comm.ledger.clear()
        comm.all_reduce(np.zeros(3))
        comm.ring(np.zeros(4, np.float32))
        rows = [line.split()[:-1] for line in str(comm.ledger).splitlines()[1:-1]]
        assert rows == ([] if comm.size == 1 else [["world", "all_reduce", "forward", "1", "3", "24", "-"],
                                                   ["world", "permute", "forward", "1", "4", "16", "4"]])
    ranks.run(check)
