"""Localises copies of a parameter that drifted apart and went unseen, and differences reported where there are none."""
import numpy as np
import pytest

from refimpl.autograd import Tensor
from refimpl.comm import Comm, Mesh
from refimpl.parallel import Cut, Replicated, check_replicas, shard

TENSORS = {"norm.g": np.arange(6.0), "up.w": np.arange(40.0).reshape(5, 8), "down.w": np.arange(16.0, dtype=np.float32),
           "kv.w": np.arange(36.0).reshape(4, 9)}


def table(mesh: Mesh):
    """kv.w: tp rank r holds columns r and r + 1, so neighbours share one."""
    n = mesh.tp.size
    return {"norm.g": Replicated(), "up.w": Cut.even(1, 8, mesh.tp), "down.w": Cut.even(0, 16, mesh.tp),
            "kv.w": Cut(1, tuple((r, 9 if r == n - 1 else r + 2) for r in range(n)))}


def one_bit_less(params, name, at):
    """The parameters with the last bit of one element of `name` changed."""
    a = params[name].array.copy()
    a[at] = np.nextafter(a[at], a.dtype.type(-np.inf))
    return {**params, name: Tensor(a, params[name].layout, name=name)}


def found(params, mesh: Mesh, placements=None):
    """The sentence of check_replicas, which must be the same on every rank; "" where the copies agree."""
    sentence = ""
    try:
        check_replicas(params, placements or table(mesh), mesh)
    except ArithmeticError as error:
        sentence = str(error)
    assert set(mesh.world.gather_texts(sentence)) == {sentence}
    return sentence


def test_equal_copies_are_the_same_on_every_mesh(ranks):
    def check(mesh: Mesh):
        assert found(shard(TENSORS, table(mesh), mesh), mesh) == ""
        assert found({}, mesh, {}) == ""
    ranks.run_meshes(check)


def test_eight_bytes_travel_for_each_piece_between_two_bounds(ranks):
    def check(mesh: Mesh):
        params, n = shard(TENSORS, table(mesh), mesh), mesh.tp.size
        mesh.ledger.clear()
        check_replicas(params, table(mesh), mesh)
        ends = {end for bounds in table(mesh)["kv.w"].bounds for end in bounds}
        assert mesh.ledger.total().bytes == (8 * (1 + n + n + len(ends) - 1) if mesh.world.size > 1 else 0)
    ranks.run_meshes(check)


@pytest.mark.parametrize("name", ("norm.g", "up.w", "down.w", "kv.w"))
def test_one_bit_on_one_dp_rank_names_the_parameter_and_the_rank(ranks, name):
    """The last dp rank, at tp 0.  Its copies are those at tp 0 of the other dp ranks, and norm.g's on all ranks."""
    def check(mesh: Mesh):
        params, odd = shard(TENSORS, table(mesh), mesh), (mesh.dp.size - 1) * mesh.tp.size
        if mesh.world.rank == odd:
            params = one_bit_less(params, name, (0,) * TENSORS[name].ndim)
        others = range(1, mesh.world.size) if mesh.dp.size == 1 else [odd]       # rank 0 is the one that they are compared with
        words = "" if mesh.dp.size == 1 and name != "norm.g" or not others else sentence(name, others)
        assert found(params, mesh) == words
    ranks.run_meshes(check)


def sentence(name, others, first=0):
    others = [str(r) for r in others]
    subject = f"ranks {', '.join(others)} differ" if len(others) > 1 else f"rank {others[0]} differs"
    return f"the copies of {name} are not the same: {subject} from rank {first}"


def test_one_bit_of_a_replicated_parameter_on_one_tp_rank(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        for odd in range(1, comm.size):
            params = shard(TENSORS, table(mesh), mesh)
            assert found(one_bit_less(params, "norm.g", 5) if comm.rank == odd else params, mesh) == sentence("norm.g", [odd])
    ranks.run(check)


def test_the_shared_part_of_overlapping_parts_is_a_copy(ranks):
    """Column r + 1 of kv.w lies on tp ranks r and r + 1 of every dp rank: the second one's differs."""
    def check(mesh: Mesh):
        for r in range(mesh.tp.size - 1):
            params = shard(TENSORS, table(mesh), mesh)
            if mesh.world.rank == r + 1:                # dp 0
                params = one_bit_less(params, "kv.w", (2, 0))
            assert found(params, mesh) == sentence("kv.w", [r + 1], first=r)
    ranks.run_meshes(check)


def test_parts_that_no_other_rank_holds_may_differ(ranks):
    """Cut parameters, and of kv.w the columns that are only on the first and on the last rank."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        params = shard(TENSORS, table(mesh), mesh)
        for name in ("up.w", "down.w"):
            params[name] = Tensor(params[name].array + comm.rank, params[name].layout, name=name)
        if comm.rank in (0, comm.size - 1):
            params = one_bit_less(params, "kv.w", (3, 0 if comm.rank == 0 else -1))
        assert found(params, mesh) == ""
    ranks.run(check)


def test_the_first_parameter_that_differs_is_named_with_all_its_ranks(ranks):
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        params = shard(TENSORS, table(mesh), mesh)
        if comm.rank:
            params = one_bit_less(one_bit_less(params, "down.w", 15), "up.w", (4, 7))
        assert found(params, mesh) == (sentence("up.w", range(1, comm.size)) if comm.size > 1 else "")
    ranks.run(check)


# -- bits, not values ----------------------------------------------------------------------------------------------


def bits(*words):
    return np.array(words, np.uint64).view(np.float64)


QUIET, PAYLOAD = 0x7FF8000000000000, 0x7FF8000000000001


@pytest.mark.parametrize("first, other, same", [
    (bits(0), bits(1 << 63), False), (bits(QUIET), bits(QUIET), True), (bits(QUIET), bits(PAYLOAD), False),
    (bits(0, 1), bits(1, 0), False), (bits(), bits(), True)],
    ids=("0 and -0", "the same nan", "nans of other bits", "another order", "nothing"))
def test_copies_are_compared_by_their_bits(ranks, first, other, same):
    def check(comm: Comm):
        mesh, last = Mesh(dp=comm.size, comm=comm), comm.size - 1
        mine = Tensor(other if comm.rank == last else first)
        words = "" if same or comm.size == 1 else sentence("w", [last])
        assert found({"w": mine}, mesh, {"w": Replicated()}) == words
    ranks.run(check)


def test_equal_bits_in_another_memory_order_are_equal(ranks):
    def check(comm: Comm):
        mesh, a = Mesh(dp=comm.size, comm=comm), np.arange(12.0).reshape(3, 4)
        mine = Tensor(np.asfortranarray(a) if comm.rank % 2 else a)
        for place in (Replicated(), Cut(1, ((0, 4),))):
            assert found({"w": mine}, mesh, {"w": place}) == ""
    ranks.run(check)
