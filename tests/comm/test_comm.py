"""Localises wrong numbers, aliased or edited buffers, and silence about wrong use, in the collectives of every backend."""
import time
from pathlib import Path

import numpy as np
import pytest

from refimpl.autograd import Tensor
from refimpl.comm import Comm, CommError, Mesh, SerialComm, shares

DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8")


def piece(rank, shape=(2, 3), dtype="float64"):
    """A different array on every rank, the same wherever it is computed."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) * (rank + 1) % 7).astype(dtype)


def pieces(comm, *args, **kwargs):
    return [piece(r, *args, **kwargs) for r in range(comm.size)]


def on_all(comm, y, x):
    """What `reduce` gives the last rank, where the others get nothing, as an array on every rank."""
    assert (y is None) == (comm.rank != comm.size - 1)
    return np.zeros_like(x, order="C") if y is None else y


def own_call(comm, name, x):
    """The collective `name` of x, in a form that every rank may use."""
    p, n = comm.size, x.shape[0] if x.ndim else 0
    to_the_next = [[n * (d == (s + 1) % p) for d in range(p)] for s in range(p)]
    return {"all_reduce": lambda: comm.all_reduce(x), "all_gather": lambda: comm.all_gather(x, axis=0),
            "reduce_scatter": lambda: comm.reduce_scatter(x, axis=0), "broadcast": lambda: comm.broadcast(x),
            "reduce": lambda: on_all(comm, comm.reduce(x, root=comm.size - 1), x),
            "all_to_all": lambda: comm.all_to_all(x, to_the_next),
            "ring": lambda: comm.ring(x), "start_ring": lambda: comm.start_ring(x, -1).wait(),
            "start_all_reduce": lambda: comm.start_all_reduce(x, "max").wait()}[name]()


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "ring", "start_ring",
              "start_all_reduce")


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_is_the_sum_and_the_maximum(ranks, dtype):
    def check(comm: Comm):
        x = piece(comm.rank, dtype=dtype)
        everybodys = pieces(comm, dtype=dtype)
        for how, y in (("sum", np.sum(everybodys, axis=0, dtype=dtype)), ("max", np.max(everybodys, axis=0))):
            got = comm.all_reduce(x, how)
            assert got.dtype == np.dtype(dtype) and got.shape == x.shape
            assert np.array_equal(got, y)
    ranks.run(check)


def test_half_precision_is_summed_in_float32(ranks):
    def check(comm: Comm):
        x = np.array([2048.0 if comm.rank == 0 else 0.75], np.float16)           # float16 has steps of 2 there
        true = np.float32(2048 + 0.75 * (comm.size - 1)).astype(np.float16)
        assert comm.all_reduce(x)[0] == true
        assert comm.reduce_scatter(x, axis=0).tolist() == ([true] if comm.rank == 0 else [])
    ranks.run(check)


@pytest.mark.parametrize("dtype", ("uint8", "int8", "int16", "uint16", "int32"))
def test_sums_of_integers_wrap_round_as_numpys_do(ranks, dtype):
    """Open MPI's vector code saturates small ones, in whole vectors and not in what is left over."""
    def check(comm: Comm):
        x = np.full(70, np.iinfo(dtype).max, dtype)
        total = np.sum([x] * comm.size, axis=0, dtype=dtype)
        for y in (comm.all_reduce(x), comm.fixed_order().all_reduce(x), comm.start_all_reduce(x).wait()):
            assert y.dtype == x.dtype and np.array_equal(y, total)
        assert np.array_equal(comm.all_gather(comm.reduce_scatter(x, 0), 0, shares(70, comm.size)), total)
    ranks.run(check)


def test_maximum_keeps_nan_of_any_rank(ranks):
    def check(comm: Comm):
        x = np.arange(float(comm.size))
        x[comm.rank] = np.nan
        assert np.isnan(comm.all_reduce(x, "max")).all()
    ranks.run(check)


@pytest.mark.parametrize("axis", (0, 1, -1))
def test_all_gather_joins_even_and_uneven_shares(ranks, axis):
    def check(comm: Comm):
        even = pieces(comm)
        assert np.array_equal(comm.all_gather(even[comm.rank], axis=axis), np.concatenate(even, axis))
        sizes = [(r + 2) % 3 for r in range(comm.size)]                          # 2, 0, 1, 2 ...
        uneven = [piece(r, (n, 4) if axis == 0 else (4, n)) for r, n in enumerate(sizes)]
        assert np.array_equal(comm.all_gather(uneven[comm.rank], axis=axis, sizes=sizes), np.concatenate(uneven, axis))
    ranks.run(check)


@pytest.mark.parametrize("n", (0, 1, 5, 8))
def test_reduce_scatter_gives_every_rank_its_share(ranks, n):
    """n = 1 is smaller than the number of ranks: some get nothing."""
    def check(comm: Comm):
        for axis, shape in ((0, (n, 3)), (1, (2, n)), (-1, (2, 3, n))):
            total = np.sum(pieces(comm, shape), axis=0)
            for sizes in (shares(n, comm.size), (0,) * (comm.size - 1) + (n,)):
                start = sum(sizes[:comm.rank])
                want = np.take(total, range(start, start + sizes[comm.rank]), axis)
                got = comm.reduce_scatter(piece(comm.rank, shape), axis=axis, sizes=sizes)
                assert got.shape == want.shape and np.array_equal(got, want)
            default = comm.reduce_scatter(piece(comm.rank, shape), axis=axis)
            assert default.shape[axis] == shares(n, comm.size)[comm.rank]
    ranks.run(check)


def test_reduce_scatter_then_all_gather_is_all_reduce(ranks):
    def check(comm: Comm):
        x = piece(comm.rank, (7, 2))
        mine = comm.reduce_scatter(x, axis=0)
        assert np.array_equal(comm.all_gather(mine, axis=0, sizes=shares(7, comm.size)), comm.all_reduce(x))
    ranks.run(check)


def test_broadcast_from_every_root(ranks):
    def check(comm: Comm):
        for root in range(comm.size):
            assert np.array_equal(comm.broadcast(piece(comm.rank), root), piece(root))
            assert comm.broadcast(np.array([comm.rank % 2 == 0]), root).tolist() == [root % 2 == 0]
    ranks.run(check)


def test_reduce_is_the_sum_on_the_root_and_nothing_elsewhere(ranks):
    def check(comm: Comm):
        for root in range(comm.size):
            for dtype in ("float64", "float16", "int32"):
                total = np.sum(pieces(comm, dtype=dtype), axis=0, dtype=dtype)
                got = comm.reduce(piece(comm.rank, dtype=dtype), root)
                assert (got is None) == (comm.rank != root)
                assert got is None or got.dtype == np.dtype(dtype) and np.array_equal(got, total)
    ranks.run(check)


def test_all_to_all_gives_every_rank_its_rows_in_the_order_of_the_sources(ranks):
    def check(comm: Comm):
        for table in ([[1] * comm.size] * comm.size,
                      [[(s + 2 * d) % 3 for d in range(comm.size)] for s in range(comm.size)],      # some get nothing
                      [[3 * (d == 0) for d in range(comm.size)] for s in range(comm.size)]):        # all to rank 0
            def rows(s, d):
                return [[100 * s + 10 * d + k, -1] for k in range(table[s][d])]
            x = np.array(sum((rows(comm.rank, d) for d in range(comm.size)), []), float).reshape(-1, 2)
            want = np.array(sum((rows(s, comm.rank) for s in range(comm.size)), []), float).reshape(-1, 2)
            assert np.array_equal(comm.all_to_all(x, table), want)
            if table[0] == [1] * comm.size:
                assert np.array_equal(comm.all_to_all(x), want)
    ranks.run(check)


def test_permute_sends_along_its_pairs(ranks):
    def check(comm: Comm):
        p, r = comm.size, comm.rank
        sizes = [s % 3 for s in range(p)]
        x = np.full((sizes[r], 2), r)
        for pairs in (((0, p - 1),), tuple((s, p - 1 - s) for s in range(p)), (), tuple((s, s) for s in range(p)), [[0, 0]]):
            source = {t: s for s, t in pairs}.get(r)
            for y in (comm.permute(x, pairs, sizes), comm.start_permute(x, pairs, sizes).wait()):
                assert y is None if source is None else np.array_equal(y, np.full((sizes[source], 2), source))
        for shift in (1, -1, 3):
            assert np.array_equal(comm.ring(np.array([r]), shift), [(r - shift) % p])
    ranks.run(check)


def test_transfers_under_way_may_be_waited_for_in_any_order(ranks):
    def check(comm: Comm):
        p, r = comm.size, comm.rank
        x = [np.full(1000, float(r + k)) for k in range(4)]
        under_way = [comm.start_ring(x[0]), comm.start_all_reduce(x[1]), comm.start_ring(x[2], -1), comm.start_all_reduce(x[3])]
        comm.progress()
        assert comm.all_reduce(np.ones(1)) == p                                  # other collectives may come between
        for k in (2, 0, 3, 1):
            want = {0: (r - 1) % p, 2: (r + 1) % p + 2}.get(k, sum(s + k for s in range(p)))
            y = under_way[k].wait()
            assert (y == want).all() and under_way[k].wait() is y and under_way[k].test()
    ranks.run(check)


def test_what_is_changed_while_it_travels_is_an_error(ranks):
    def check(comm: Comm):
        for start in (comm.start_ring, comm.start_all_reduce):
            x = np.ones((2, 3), np.float32)
            transfer = start(x)
            x[1, 2] = 2.0
            with pytest.raises(CommError, match=r"float32\[2, 3\] was changed while it travelled: wait\(\) first"):
                transfer.wait()
            transfer = start(x)
            transfer.wait()
            x[1, 2] = 3.0
            transfer.wait()
    ranks.run(check)


def test_a_transfer_arrives_while_somebody_polls(ranks):
    def check(comm: Comm):
        transfer = comm.start_ring(np.full(1 << 18, float(comm.rank)))
        deadline = time.monotonic() + 20
        while not transfer.test() and time.monotonic() < deadline:
            comm.progress()
        assert transfer.test() and (transfer.wait() == (comm.rank - 1) % comm.size).all()
    ranks.run(check)


def test_nobody_leaves_a_barrier_before_all_have_come(ranks, tmp_path_factory):
    """Each rank leaves a file before it comes; the folder is that of rank 0."""
    folder = tmp_path_factory.mktemp("barrier")

    def check(comm: Comm):
        shared = Path(comm.gather_texts(str(folder))[0])
        for k in range(3):
            time.sleep(0.003 * ((comm.rank + k) % comm.size))       # each is late once (the barrier is right without it, too)
            (shared / f"{comm.size} {k} {comm.rank}").touch()
            comm.barrier()
            assert len(list(shared.glob(f"{comm.size} {k} *"))) == comm.size
            comm.barrier()                              # as the folder of the threads is one
    ranks.run(check)


NOT_WHOLE = {
    "root": lambda c: c.broadcast(np.zeros(2), 0.5), "root of a reduce": lambda c: c.reduce(np.zeros(2), "0"),
    "shift": lambda c: c.ring(np.zeros(2), 0.5), "pairs": lambda c: c.permute(np.zeros(2), [(0, 0.5)]),
    "sizes": lambda c: c.all_gather(np.zeros(2), 0, [2.9] * c.size),
    "shares": lambda c: c.reduce_scatter(np.zeros(2 * c.size), 0, ["2"] * c.size),
    "counts": lambda c: c.all_to_all(np.zeros(c.size), [[1.9] * c.size] * c.size),
}


@pytest.mark.parametrize("case", NOT_WHOLE)
def test_half_a_rank_is_refused(ranks, case):
    """MPI would take 0.5 for 0 on some ranks and fail on others, or bring a message to the wrong call."""
    require_refusal(ranks, NOT_WHOLE[case], TypeError, "must be integers, got|are numbers of rows, got")


def test_integers_of_any_kind_are_the_same(ranks):
    def check(comm: Comm):
        kind = (int, np.int64, np.uint8)[comm.rank % 3]
        x = np.full(2, float(comm.rank))
        assert (comm.broadcast(x, kind(0)) == 0).all()
        got = comm.permute(x, [[kind(0), kind(comm.size - 1)]] if comm.rank % 2 else ((kind(0), kind(comm.size - 1)),))
        assert got is None if comm.rank < comm.size - 1 else (got == 0).all()
        assert (comm.ring(x, kind(1)) == (comm.rank - 1) % comm.size).all()
    ranks.run(check)


def test_masked_arrays_are_refused(ranks):
    masked = np.ma.array([1.0, 100.0], mask=[0, 1])
    require_refusal(ranks, lambda c: c.all_reduce(masked), TypeError, "takes no masked arrays")


def test_an_array_that_was_changed_under_way_is_an_error_each_time(ranks):
    def check(comm: Comm):
        x = np.zeros(3)
        transfer = comm.start_ring(x)
        x[0] = 1
        for _ in range(2):
            if comm.size > 1:
                with pytest.raises(CommError, match="changed while it travelled"):
                    transfer.wait()
    ranks.run(check)


def test_texts_of_any_length_and_alphabet_are_gathered(ranks):
    texts = ["", "plain", "größer ≥ 大きい 🙂", "\n\0", "\udcff from a file name", "", "x" * 5000, "y"]

    def check(comm: Comm):
        assert comm.gather_texts(texts[comm.rank]) == texts[:comm.size]
        assert comm.gather_texts("") == [""] * comm.size
    ranks.run(check)


def test_what_rank_0_does_alone_succeeds_or_fails_on_every_rank(ranks):
    def check(comm: Comm):
        assert comm.on_first(lambda: "done") == (None if comm.rank else "done")
        for error in (ValueError("not today"), OSError("not today")):
            def act(error=error):
                assert comm.rank == 0
                raise error
            with pytest.raises(ValueError, match="^not today$"):
                comm.on_first(act)
        assert comm.all_reduce(np.ones(1)) == comm.size                          # and they are still in step
    ranks.run(check)


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_memory_order_is_accepted(ranks, name):
    """mpi4py refuses what is not contiguous: the copy is ours to make, on threads too."""
    def check(comm: Comm):
        base = np.arange(24.0).reshape(4, 6) + comm.rank
        for x in (base.T, base[:, ::2], base[::-1, 1:4], base[:, ::-1], np.broadcast_to(base[0], (3, 6)), base[::-1, ::-1],
                  np.asfortranarray(base), np.moveaxis(base.reshape(2, 3, 4), 0, 2)):
            assert np.array_equal(own_call(comm, name, x), own_call(comm, name, x.copy()))
    ranks.run(check)


@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_are_not_written_to_and_results_are_new(ranks, name):
    def check(comm: Comm):
        for shape in ((3, 2), (0, 2), (5, 0, 2), (1,)):
            x = piece(comm.rank, shape)
            x.flags.writeable = False                                            # what the tape hands over
            before = x.copy()
            y = own_call(comm, name, x)
            assert np.array_equal(x, before)
            if comm.size > 1:
                assert not np.shares_memory(x, y)
                y += 1                                                           # the result is ours to change
                comm.barrier()
                assert np.array_equal(x, before)
    ranks.run(check)


def test_arrays_without_axes_stay_without(ranks):
    def check(comm: Comm):
        for x in (np.array(2.5), np.float64(2.5)):
            assert comm.all_reduce(x).shape == () and comm.all_reduce(x) == 2.5 * comm.size
            assert comm.broadcast(x).shape == () and comm.broadcast(x) == 2.5
    ranks.run(check)


def test_arrays_without_elements_keep_their_shape(ranks):
    def check(comm: Comm):
        x = np.zeros((2, 0, 3), np.float32)
        assert comm.all_reduce(x).shape == (2, 0, 3) and comm.all_reduce(x, "max").dtype == np.float32
        assert comm.all_gather(x, axis=0).shape == (2 * comm.size, 0, 3)
        assert comm.all_gather(x, axis=1).shape == (2, 0, 3)
        assert comm.reduce_scatter(x, axis=2, sizes=[3] + [0] * (comm.size - 1)).shape == (2, 0, 0 if comm.rank else 3)
        assert comm.broadcast(x, comm.size - 1).shape == (2, 0, 3)
    ranks.run(check)


def test_one_rank_gets_its_argument_back():
    x = np.arange(3.0)
    comm = SerialComm()
    assert all(own_call(comm, name, x) is x for name in OPERATIONS)
    assert comm.gather_texts("é") == ["é"] and comm.ledger.total().calls == 0


WRONG = {
    "list": (lambda c: c.all_reduce([1.0]), TypeError, "all_reduce over world: takes an array, got list"),
    "tensor": (lambda c: c.broadcast(Tensor(np.zeros(2))), TypeError, "takes an array, got Tensor"),
    "big-endian": (lambda c: c.all_reduce(np.zeros(2, ">f8")), TypeError, "got >f8, which is big-endian: astype..float64"),
    "complex": (lambda c: c.all_gather(np.zeros(2, complex), 0), TypeError, "got <c16"),
    "objects": (lambda c: c.broadcast(np.array([None])), TypeError, r"got \|O"),
    "bool": (lambda c: c.all_reduce(np.zeros(2, bool)), TypeError, "neither adds nor compares bool arrays"),
    "reduction": (lambda c: c.all_reduce(np.zeros(2), "mean"), ValueError, "the reduction 'mean' is not one of sum, max"),
    "axis": (lambda c: c.all_gather(np.zeros((2, 2)), 2), ValueError, r"there is no axis 2 in an array of shape \(2, 2\)"),
    "no axis": (lambda c: c.reduce_scatter(np.array(1.0), 0), ValueError, r"there is no axis 0 in an array of shape \(\)"),
    "root": (lambda c: c.broadcast(np.zeros(2), c.size), ValueError, "the root . is not one of . ranks"),
    "shares": (lambda c: c.reduce_scatter(np.zeros(5), 0, [2] * c.size), ValueError,
               "reduce_scatter over world: the shares .* of . ranks do not add up to 5 along axis 0"),
    "rows": (lambda c: c.all_to_all(np.zeros(c.size + 1), [[1] * c.size] * c.size), (ValueError, CommError),
             r"rank 0 holds . rows, its counts \[1.*\] are ."),
    "table": (lambda c: c.all_to_all(np.zeros(2), [1, 1]), ValueError, "are . x . numbers of rows, got"),
    "negative count": (lambda c: c.all_to_all(np.zeros(0), [[1, -1] + [0] * (c.size - 2)] * c.size), ValueError,
                       "numbers of rows"),
    "equal rows": (lambda c: c.all_to_all(np.array(1.0) if c.size == 1 else np.zeros(c.size + 1)), ValueError,
                   "rows are no equal shares for . ranks: give counts|no axis 0"),
    "twice": (lambda c: c.permute(np.zeros(2), ((0, 0), (0, 1))), ValueError, "rank 0 sends more than once in the pairs"),
    "no such rank": (lambda c: c.start_permute(np.zeros(2), ((0, 9),)), ValueError, "name a rank that is not one of ."),
    "number": (lambda c: c.all_reduce(3), TypeError, "takes an array, got int: np.asarray a list or a number"),
    "number to start": (lambda c: c.start_all_reduce(2.5), TypeError, "takes an array, got float"),
    "root of a reduce": (lambda c: c.reduce(np.zeros(2), -1), ValueError, "the root -1 is not one of . ranks"),
    "negative share": (lambda c: c.reduce_scatter(np.zeros(1), 0, [2, -1] + [0] * (c.size - 2)), ValueError,
                       "do not add up to 1"),
    "sizes": (lambda c: c.all_gather(np.zeros(2), 0, [2] * (c.size + 1)), (ValueError, CommError),
              r"rank 0 of . holds 2 along axis 0, sizes say \(2, "),
}


def require_refusal(ranks, call, kind, sentence, sizes=range(1, 99)):
    """Every rank gets the same sentence, and they are still in step."""
    def check(comm: Comm):
        if comm.size not in sizes:
            return
        with pytest.raises(kind, match=sentence) as caught:
            call(comm)
        said = comm.gather_texts(str(caught.value))
        assert said == said[:1] * comm.size
        assert comm.all_reduce(np.ones(1)) == comm.size
    ranks.run(check)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_gets_a_sentence(ranks, case):
    require_refusal(ranks, *WRONG[case])


APART = {
    "operation": lambda c: c.all_reduce(np.ones(4)) if c.rank else c.broadcast(np.ones(4)),
    "shape": lambda c: c.broadcast(np.ones(4 if c.rank else 5)),
    "dtype": lambda c: c.all_reduce(np.ones(4, "f8" if c.rank else "f4")),
    "how": lambda c: c.all_reduce(np.ones(4), "sum" if c.rank else "max"),
    "root": lambda c: c.broadcast(np.ones(4), 0 if c.rank else 1),
    "axis": lambda c: c.all_gather(np.ones((4, 4)), 0 if c.rank else 1),
    "scatter axis": lambda c: c.reduce_scatter(np.ones((4, 4)), 0 if c.rank else 1),
    "unequal without sizes": lambda c: c.all_gather(np.ones(3 if c.rank else 4), 0),
    "barrier": lambda c: c.barrier() if c.rank else c.all_reduce(np.ones(1)),
    "wrong on one rank": lambda c: c.all_reduce(np.ones(4) if c.rank else [1.0]),
    "mesh": lambda c: Mesh(tp=c.size, comm=c) if c.rank else c.barrier(),
    "counts": lambda c: c.all_to_all(np.ones(c.size), [[1] * c.size] * c.size if c.rank else None),
    "pairs": lambda c: c.permute(np.ones(1), ((0, 1),) if c.rank else ((1, 0),)),
    "started": lambda c: c.start_ring(np.ones(1)) if c.rank else c.start_all_reduce(np.ones(1)),
    "reduce": lambda c: c.reduce(np.ones(3)) if c.rank else c.all_reduce(np.ones(3)),
    "order": lambda c: (c.fixed_order() if c.rank else c).all_reduce(np.ones(3)),
    "end of a long claim": lambda c: c.agree("x" * 2000 + str(min(c.rank, 1))),
    "claim": lambda c: c.agree(f"weights with hash {min(c.rank, 1)}"),
}


@pytest.mark.parametrize("case", APART)
def test_ranks_that_do_not_agree_all_get_the_same_sentence(ranks, case):
    sentence = "the ranks do not agree on what to do together: rank 0: .*; rank 1"
    require_refusal(ranks, APART[case], CommError, sentence, sizes=range(2, 99))


def test_a_disagreement_says_who_does_what(ranks):
    def check(comm: Comm):
        if comm.size == 3:
            with pytest.raises(CommError, match=r"rank 0, 2: all_reduce over world: sum of float64\[2, 3\]; "
                                                r"rank 1: all_gather over world: float64\[2, \*\] along axis 1, sizes"):
                comm.all_gather(np.ones((2, 3)), 1) if comm.rank == 1 else comm.all_reduce(np.ones((2, 3)))
    ranks.run(check)


def test_shares_differ_by_at_most_one():
    for n in range(20):
        for parts in range(1, 9):
            cut = shares(n, parts)
            assert sum(cut) == n and len(cut) == parts and max(cut) - min(cut) <= 1 and list(cut) == sorted(cut, reverse=True)
