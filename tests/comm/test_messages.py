"""Localises faults that only large messages, odd arrays or another MPI show: pieces, order of sums, pickled or scalar calls."""
import ast
import copy
import hashlib
from pathlib import Path

import numpy as np
import pytest

import refimpl.comm
from refimpl.comm import Comm, Mesh, shares
from refimpl.comm.threads import combine
from refimpl.rng import draw

from .test_comm import OPERATIONS, own_call, piece


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("order", ("any", "fixed"))
def test_messages_larger_than_mpi_can_count_travel_in_pieces(ranks, name, order):
    """MPI counts in C ints; the limit of 2^31 - 1 elements is lowered to 7."""
    def check(comm: Comm):
        small = copy.copy(comm)
        small.largest = 7                               # (ranks as threads have no limit)
        small.order = order
        for shape in ((5, 3), (41,), (2, 4, 8), (8,), (0, 9), (1, 7)):
            x = piece(comm.rank, shape, "int64")
            assert np.array_equal(own_call(small, name, x), own_call(comm, name, x))
        x = piece(comm.rank, (3, comm.size, 5))
        sizes = [(r + 1) % 3 for r in range(comm.size)]
        rows = sum(sizes)
        for call in (lambda c: c.all_gather(x, 1), lambda c: c.reduce_scatter(x, 1),
                     lambda c: c.all_to_all(np.moveaxis(x, 1, 0)),
                     lambda c: c.all_gather(piece(c.rank, (sizes[c.rank], 6)), 0, sizes),
                     lambda c: c.reduce_scatter(piece(c.rank, (rows, 6)), 0, sizes)):
            assert np.array_equal(call(small), call(comm))
    ranks.run(check)


def spread_out(rank, n=1003):
    """Numbers of very different size, whose sum depends on the order."""
    return draw(f"mantissa {rank}", (n,)) * 2.0 ** (np.arange(n) * (rank + 3) % 60 - 30)


# sha256 of the sum of spread_out(0) ... spread_out(p - 1), and of the maximum
BITS = {2: ("0e8b07d859baa097", "e292b6ea6182ddce"), 3: ("3cb4ac606af1bf01", "cbb55a06c12d663f"),
        4: ("5a8a44826436ac5d", "30985f6bda799cb3"), 8: ("38d965798bc0cb83", "9875dc70e6fccc55")}


def test_sums_in_fixed_order_have_the_same_bits_under_every_backend(ranks):
    def check(comm: Comm):
        p, fixed = comm.size, comm.fixed_order()
        x, parts = spread_out(comm.rank), [spread_out(r) for r in range(comm.size)]
        for how, k in (("sum", 0), ("max", 1)):
            want = combine(parts, how)
            for got in (fixed.all_reduce(x, how), fixed.all_reduce(x, how), fixed.start_all_reduce(x, how).wait()):
                assert got.tobytes() == want.tobytes()
                assert p not in BITS or hashlib.sha256(got).hexdigest()[:16] == BITS[p][k]
        total, n = combine(parts, "sum"), shares(len(x), p)
        start = sum(n[:comm.rank])
        assert fixed.reduce_scatter(x, 0).tobytes() == total[start:start + n[comm.rank]].tobytes()
        got = fixed.reduce(x, p - 1)
        assert got.tobytes() == total.tobytes() if comm.rank == p - 1 else got is None
        half = [(q * 2.0**-20).astype(np.float16).astype(np.float32) for q in parts]    # added up in float32
        got = fixed.all_reduce((x * 2.0**-20).astype(np.float16))
        assert got.tobytes() == combine(half, "sum").astype(np.float16).tobytes()
    ranks.run(check)


def test_the_order_of_a_sum_matters():
    """Else the test above would show nothing."""
    parts = [spread_out(r) for r in range(3)]
    assert combine(parts, "sum").tobytes() != combine(parts[::-1], "sum").tobytes()


def test_a_mesh_of_an_ordered_communicator_is_ordered(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm.fixed_order())
        assert comm.size == 1 or {mesh.world.order, mesh.tp.order, mesh.comm("dp", "tp").order} == {"fixed"}
        assert Mesh(tp=comm.size, comm=comm).tp.order == comm.order == "any"
        x = spread_out(comm.rank)
        assert mesh.tp.all_reduce(x).tobytes() == combine([spread_out(r) for r in range(comm.size)], "sum").tobytes()
    ranks.run(check)


def test_a_list_of_the_same_array_does_not_confuse_what_is_sent_with_what_arrives(ranks):
    """An array may be handed over again while it travels, and results fed back in: nothing is written in place."""
    def check(comm: Comm):
        x = np.full(5, float(comm.rank))
        y = comm.ring(x)
        for _ in range(comm.size - 1):
            y = comm.ring(y)
        assert np.array_equal(x, y) and (comm.size == 1 or not np.shares_memory(x, y))
        view = x[1:4]                                   # a part of what travels, travels as well
        a, b = comm.start_ring(x), comm.start_ring(view)
        assert np.array_equal(b.wait(), a.wait()[1:4])
    ranks.run(check)


def test_only_buffer_calls_of_mpi_are_used():
    """mpi4py's lower-case methods pickle what they send."""
    forbidden = {"send", "recv", "isend", "irecv", "sendrecv", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce",
                 "allreduce", "scan", "exscan", "mprobe", "ssend", "issend", "bsend", "ibsend"}
    for file in Path(refimpl.comm.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in forbidden:
                where = f"{file.name}:{node.lineno}: {ast.unparse(node)}"
                assert not ast.unparse(node.value).endswith(("raw", "COMM_WORLD")), where
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve"} & set(names), file.name


def test_nothing_is_pickled(ranks):
    def check(comm: Comm):
        before = comm.MPI.pickle.dumps, comm.MPI.pickle.loads

        def refuse(*args):
            raise AssertionError("pickled")
        comm.MPI.pickle.__init__(refuse, refuse)
        try:
            x = np.ones((comm.size, 2))
            for name in OPERATIONS:
                own_call(comm, name, x)
            comm.gather_texts("text")
            comm.on_first(lambda: None)
            Mesh(dp=comm.size, comm=comm).dp.barrier()
            with pytest.raises(AssertionError, match="pickled"):
                comm.MPI.COMM_SELF.sendrecv(x, 0)       # the trap works
        finally:
            comm.MPI.pickle.__init__(*before)
    ranks.run_mpi(check)
