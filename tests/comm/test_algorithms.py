"""Localises a chunk that goes to the wrong rank, is added twice or not at all, or travels in vain, in the algorithms by hand.

Each has two twins: the library's collective, and the formula of what it sends.
"""
import numpy as np
import pytest
from device import double

from refimpl.array import on_device, to_host
from refimpl.comm import Comm, CommError, shares
from refimpl.comm.algorithms import (recursive_doubling_all_reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter,
                                     tree_broadcast)

from .test_comm import require_refusal

ALL_REDUCES = {"ring": ring_all_reduce, "doubling": recursive_doubling_all_reduce}
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "int64": 0.0, "uint8": 0.0}     # of the sum of |x|
SHAPES = ((), (0,), (1,), (2, 0, 3), (3,), (5, 2), (8,), (3, 4, 2))         # nothing, fewer elements than ranks, uneven, even
ROWS = (0, 1, 3, 8, 11)


def piece(rank, shape, dtype="float64"):
    """A different array on every rank, the same wherever it is computed: with roundings where there can be any."""
    x = np.asarray(np.random.default_rng([rank, *shape]).standard_normal(shape))
    return (x if dtype[0] == "f" else np.abs(100 * x).astype(int)).astype(dtype)


def pieces(comm, *args):
    return [piece(r, *args) for r in range(comm.size)]


def require_equal(got, wanted, parts):
    """Within TOLERANCE of the sum over the absolute values; integers exactly."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    if got.dtype.kind == "f":
        off = np.abs(got.astype(np.float64) - wanted) / np.maximum(np.sum(np.abs(parts), axis=0, dtype=np.float64), 1e-300)
        assert off.max(initial=0.0) <= TOLERANCE[got.dtype.name]
    else:
        assert np.array_equal(got, wanted)


def require_same_bits_everywhere(comm, y):
    assert len(set(comm.gather_texts(y.tobytes().hex()))) == 1


def cuts(n, p):
    """Shares of n rows: as even as possible, all on the first rank, all on the last, and every rank another number."""
    odd = [n * (r + 1) // (p * p) for r in range(p - 1)]
    return [None, [n] + [0] * (p - 1), [0] * (p - 1) + [n], odd + [n - sum(odd)]]


def growing(p):
    """Sizes that tell every chunk from every other, one of them nothing: 0, 1, 3, 6 .."""
    return [r * (r + 1) // 2 for r in range(p)]


# -- equal to the library's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_all_reduces_equal_the_librarys(ranks, name, dtype):
    def check(comm: Comm):
        for shape in SHAPES:
            x = piece(comm.rank, shape, dtype)
            y = ALL_REDUCES[name](comm, x)
            require_equal(y, comm.all_reduce(x), pieces(comm, shape, dtype))
            require_same_bits_everywhere(comm, y)
    ranks.run(check)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_ring_reduce_scatter_equals_the_librarys(ranks, dtype):
    def check(comm: Comm):
        for n in ROWS:
            for sizes in cuts(n, comm.size):
                x, mine = piece(comm.rank, (n, 2), dtype), sizes or shares(n, comm.size)
                own = slice(sum(mine[:comm.rank]), sum(mine[:comm.rank + 1]))
                require_equal(ring_reduce_scatter(comm, x, sizes), comm.reduce_scatter(x, 0, sizes),
                              [part[own] for part in pieces(comm, (n, 2), dtype)])
    ranks.run(check)


@pytest.mark.parametrize("dtype", [*TOLERANCE, "bool"])
def test_ring_all_gather_is_the_librarys(ranks, dtype):
    def check(comm: Comm):
        for n in ROWS:
            for sizes in (*cuts(n, comm.size)[1:], None):
                x = piece(comm.rank, (sizes[comm.rank] if sizes else n, 2), dtype)
                y, wanted = ring_all_gather(comm, x, sizes), comm.all_gather(x, 0, sizes)
                assert y.dtype == wanted.dtype and np.array_equal(y, wanted)
    ranks.run(check)


@pytest.mark.parametrize("dtype", [*TOLERANCE, "bool"])
def test_tree_broadcast_is_the_librarys_from_every_root(ranks, dtype):
    def check(comm: Comm):
        for shape in SHAPES:
            for root in range(comm.size):
                x = piece(comm.rank, shape, dtype)
                y = tree_broadcast(comm, x, root)
                assert y.dtype == x.dtype and y.shape == shape and np.array_equal(y, comm.broadcast(x, root))
    ranks.run(check)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_half_precision_is_summed_in_float32(ranks, name):
    def check(comm: Comm):
        x = np.full(comm.size, 0.75 if comm.rank else 2048.0, np.float16)        # float16 has steps of 2 there
        true = np.float32(2048 + 0.75 * (comm.size - 1)).astype(np.float16)
        assert (ALL_REDUCES[name](comm, x) == true).all()                        # in every chunk, so in every order
        assert ring_reduce_scatter(comm, x).tolist() == [true]
    ranks.run(check)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_nan_infinity_and_minus_zero_arrive(ranks, name):
    def check(comm: Comm):
        x = np.array([np.nan if comm.rank == comm.size - 1 else 1.0, np.inf, -0.0])
        y = ALL_REDUCES[name](comm, x)
        assert np.isnan(y[0]) and y[1] == np.inf and y[2] == 0 and np.signbit(y[2])
    ranks.run(check)


# -- what is done with the arguments -------------------------------------------------------------------------------


CALLS = {"ring_reduce_scatter": ring_reduce_scatter, "ring_all_gather": ring_all_gather, "ring_all_reduce": ring_all_reduce,
         "doubling": recursive_doubling_all_reduce, "tree_broadcast": tree_broadcast}


@pytest.mark.parametrize("name", CALLS)
def test_any_memory_order_is_accepted(ranks, name):
    def check(comm: Comm):
        base = np.arange(24.0).reshape(4, 6) + comm.rank
        for x in (base.T, base[:, ::2], base[::-1, 1:4], np.broadcast_to(base[0], (3, 6)), np.asfortranarray(base)):
            assert np.array_equal(CALLS[name](comm, x), CALLS[name](comm, x.copy(order="C")))
    ranks.run(check)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_not_written_to_and_results_are_new(ranks, name):
    def check(comm: Comm):
        for shape in ((3, 2), (0, 2), (5, 0, 2), (1,), (17,)):
            for dtype in ("float64", "float16"):
                x = piece(comm.rank, shape, dtype)
                before = x.copy()
                x.flags.writeable = False                                        # what the tape hands over
                y = CALLS[name](comm, x)
                assert np.array_equal(x, before) and not x.flags.writeable
                if comm.size > 1:
                    assert not np.shares_memory(x, y)
                    y += 1                                                       # the result is ours to change
                    comm.barrier()
                    assert np.array_equal(x, before)
    ranks.run(check)


@pytest.mark.parametrize("name", CALLS)
def test_device_arrays_come_back_as_such(ranks, name):
    def check(comm: Comm):
        x = piece(comm.rank, (5, 2))
        y = CALLS[name](comm, double.asarray(x))
        assert on_device(y) and np.array_equal(to_host(y), CALLS[name](comm, x))
    ranks.run(check)


WRONG = {
    "list": (lambda c: ring_all_reduce(c, [1.0]), TypeError, "ring_all_reduce over world: takes an array, got list"),
    "bool": (lambda c: recursive_doubling_all_reduce(c, np.zeros(2, bool)), TypeError,
             "recursive_doubling_all_reduce over world: MPI neither adds nor compares bool arrays"),
    "no axis": (lambda c: ring_reduce_scatter(c, np.array(1.0)), ValueError, r"there is no axis 0 in an array of shape \(\)"),
    "shares": (lambda c: ring_reduce_scatter(c, np.zeros(5), [2] * c.size), ValueError, "do not add up to 5 along axis 0"),
    "sizes": (lambda c: ring_all_gather(c, np.zeros(2), [2] * (c.size + 1)), (ValueError, CommError),
              r"rank 0 of . holds 2 along axis 0, sizes say \(2, "),
    "root": (lambda c: tree_broadcast(c, np.zeros(2), c.size), ValueError, "the root . is not one of . ranks"),
}
APART = {
    "operation": lambda c: ring_all_reduce(c, np.ones(4)) if c.rank else recursive_doubling_all_reduce(c, np.ones(4)),
    "size": lambda c: ring_all_reduce(c, np.ones(4 if c.rank else 5)),
    "shape in the ring": lambda c: ring_all_reduce(c, np.ones((2, 3) if c.rank else (3, 2))),
    "shape in doubling": lambda c: recursive_doubling_all_reduce(c, np.ones((2, 3) if c.rank else (3, 2))),
    "shape in the tree": lambda c: tree_broadcast(c, np.ones((2, 3) if c.rank else (3, 2))),
    "dtype, widened": lambda c: ring_reduce_scatter(c, np.ones(4, "f2" if c.rank else "f4")),
    "shares": lambda c: ring_reduce_scatter(c, np.ones(4), [4, 0, *[0] * (c.size - 2)] if c.rank else None),
    "unequal without sizes": lambda c: ring_all_gather(c, np.ones(3 if c.rank else 4)),
    "root": lambda c: tree_broadcast(c, np.ones(4), 0 if c.rank else 1),
    "wrong on one rank": lambda c: tree_broadcast(c, np.ones(4) if c.rank else [1.0]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_gets_a_sentence(ranks, case):
    require_refusal(ranks, *WRONG[case])


@pytest.mark.parametrize("case", APART)
def test_ranks_that_do_not_agree_all_get_the_same_sentence(ranks, case):
    sentence = "do not agree .*: rank 0: (ring|rec|tree).*; rank 1.*: (ring|rec|tree)"
    require_refusal(ranks, APART[case], CommError, sentence, sizes=range(2, 99))


# -- counted: elements on the wire and rounds ----------------------------------------------------------------------


def counted(comm, call, *args):
    """(rounds, [elements that each rank sends]) of a call, equal on all ranks; all that travels is permute's."""
    comm.ledger.clear()
    call(comm, *args)
    total = comm.ledger.total()
    assert total == comm.ledger.total(operation="permute") and total.elements == total.wire
    rounds, wire = comm.all_gather(np.array([[total.calls], [total.wire]]), axis=1).tolist()
    assert len(set(rounds)) == 1                                                 # every rank calls every step
    return rounds[0], wire


def test_ring_reduce_scatter_sends_all_chunks_but_the_own(ranks):
    def check(comm: Comm):
        p = comm.size
        for sizes in [shares(n, p) for n in ROWS] + [growing(p)]:
            n = sum(sizes) * 3
            rounds, wire = counted(comm, ring_reduce_scatter, np.zeros((sum(sizes), 3)), sizes)
            assert rounds == p - 1 and wire == [n - sizes[r] * 3 for r in range(p)] and sum(wire) == (p - 1) * n
    ranks.run(check)


def test_ring_all_gather_sends_all_chunks_but_that_of_the_next_rank(ranks):
    def check(comm: Comm):
        p = comm.size
        for sizes in [shares(n, p) for n in ROWS] + [growing(p)]:
            n = sum(sizes) * 3
            rounds, wire = counted(comm, ring_all_gather, np.zeros((sizes[comm.rank], 3)), sizes)
            assert rounds == p - 1 and wire == [n - sizes[(r + 1) % p] * 3 for r in range(p)] and sum(wire) == (p - 1) * n
    ranks.run(check)


@pytest.mark.parametrize("dtype", ("float64", "float16"))
def test_ring_all_reduce_sends_twice_all_but_two_chunks(ranks, dtype):
    """Its own, which ends here in the first phase, and the next rank's, which begins there in the second."""
    def check(comm: Comm):
        p = comm.size
        for n in (0, 1, 5, 7, 8, 16, 1001):
            c = shares(n, p)
            rounds, wire = counted(comm, ring_all_reduce, np.zeros(n, dtype))
            assert rounds == 2 * (p - 1) and sum(wire) == 2 * (p - 1) * n
            assert wire == [2 * n - c[r] - c[(r + 1) % p] for r in range(p)]
    ranks.run(check)


# number of ranks -> rounds of recursive doubling, and how often each rank sends all n
DOUBLING = {1: (0, [0]), 2: (1, [1, 1]), 3: (3, [2, 1, 1]), 4: (2, [2] * 4), 5: (4, [3, 2, 2, 2, 1]),
            6: (4, [3, 3, 2, 2, 1, 1]), 7: (4, [3, 3, 3, 2, 1, 1, 1]), 8: (3, [3] * 8)}


def test_recursive_doubling_sends_n_a_round_and_folds_what_is_beyond_a_power_of_two(ranks):
    def check(comm: Comm):
        p = comm.size
        P = max(d for d in (1, 2, 4, 8) if d <= p)
        for n in (0, 1, 5, 16):
            rounds, wire = counted(comm, recursive_doubling_all_reduce, np.zeros(n))
            assert (rounds, wire) == (DOUBLING[p][0], [times * n for times in DOUBLING[p][1]])
            assert sum(wire) == n * (P * np.log2(P) + 2 * (p - P))
    ranks.run(check)


# number of ranks -> children of each rank, counted from the root
CHILDREN = {1: [0], 2: [1, 0], 3: [2, 0, 0], 4: [2, 1, 0, 0], 5: [3, 1, 0, 0, 0], 6: [3, 2, 0, 0, 0, 0],
            7: [3, 2, 1, 0, 0, 0, 0], 8: [3, 2, 1, 1, 0, 0, 0, 0]}


def test_tree_broadcast_reaches_every_rank_once(ranks):
    def check(comm: Comm):
        p = comm.size
        for n in (0, 1, 5):
            for root in range(p):
                rounds, wire = counted(comm, tree_broadcast, np.zeros(n), root)
                assert rounds == np.ceil(np.log2(p)) == CHILDREN[p][0] and sum(wire) == (p - 1) * n
                assert wire == [n * CHILDREN[p][(r - root) % p] for r in range(p)]
    ranks.run(check)


# -- bits ----------------------------------------------------------------------------------------------------------


def added_up(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def test_the_ring_adds_chunk_c_up_in_the_order_of_ranks_from_c_plus_1(ranks):
    def check(comm: Comm):
        p, n = comm.size, 1001
        parts, c = pieces(comm, (n,)), shares(n, comm.size)
        starts = np.cumsum([0, *c])
        chunks = [added_up([parts[(k + 1 + i) % p][starts[k]:starts[k + 1]] for i in range(p)]) for k in range(p)]
        y = ring_all_reduce(comm, parts[comm.rank])
        assert y.tobytes() == np.concatenate(chunks).tobytes()
        assert ring_reduce_scatter(comm, parts[comm.rank]).tobytes() == chunks[comm.rank].tobytes()
    ranks.run(check)


def test_recursive_doubling_adds_up_in_pairs_of_pairs(ranks):
    def check(comm: Comm):
        p = comm.size
        P = max(d for d in (1, 2, 4, 8) if d <= p)
        parts = pieces(comm, (1001,))
        y = recursive_doubling_all_reduce(comm, parts[comm.rank])
        sums = [parts[k] + parts[P + k] if P + k < p else parts[k] for k in range(P)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        assert y.tobytes() == sums[0].tobytes()                                  # so all ranks have the same bits
    ranks.run(check)


def test_only_on_two_ranks_is_there_one_order(ranks):
    """Where the ring and recursive doubling leave the fixed order, and that a + b and b + a are no two orders."""
    def check(comm: Comm):
        x = piece(comm.rank, (1001,))
        fixed = comm.fixed_order().all_reduce(x)
        assert (ring_all_reduce(comm, x).tobytes() == fixed.tobytes()) == (comm.size <= 2)
        assert comm.size not in (1, 2, 4, 8) or recursive_doubling_all_reduce(comm, x).tobytes() == fixed.tobytes()
    ranks.run(check)


def test_equal_numbers_in_different_chunks_may_get_different_sums(ranks):
    """2⁵³ + 1 is 2⁵³ in float64, 2⁵³ + 2 is not: on four ranks the sum of 2⁵³, 0, 1, 1 depends on where the ring begins."""
    def check(comm: Comm):
        if comm.size == 4:
            x = np.full(4, [2.0 ** 53, 0.0, 1.0, 1.0][comm.rank])
            assert (ring_all_reduce(comm, x) - 2.0 ** 53).tolist() == [2, 2, 0, 0]
            assert (recursive_doubling_all_reduce(comm, x) - 2.0 ** 53).tolist() == [2, 2, 2, 2]
            assert (comm.fixed_order().all_reduce(x) - 2.0 ** 53).tolist() == [2, 2, 2, 2]
    ranks.run(check)
