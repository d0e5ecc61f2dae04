"""Localises gradients lost or summed twice between buckets, buckets that wait for the end of the backward pass, and ranks
whose buckets set out in different orders.

Gradients are small integers times powers of two, so sums are exact in any order and equality is equality.
"""
import numpy as np
import pytest

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.autograd.frames import Frame
from refimpl.autograd.op import stack
from refimpl.comm import Comm, Mesh
from refimpl.ops import sum as total
from refimpl.parallel import Cut, Reduction, Replicated, gather, reduce_gradients, shard

DP, TP = frozenset({"dp"}), frozenset({"tp"})
BUCKETS = (1, 2, 5, 11, 1 << 20)                        # elements: each gradient alone ... all in one


def table(mesh: Mesh):
    """kv.w: tp rank r holds rows r and r + 1, so neighbours share one."""
    bounds = tuple((r, r + 2) for r in range(mesh.tp.size))
    return {"kv.w": Cut(0, bounds), "kv.b": Cut(0, bounds), "up.w": Cut.even(1, 7, mesh.tp)}


def gradients(mesh: Mesh, scale=1.0):
    """One of each kind, as rank r finds it: 2**r times 1, 2, 3 ..."""
    def counted(shape, layout, dtype="float64"):
        a = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape) * 2.0 ** mesh.world.rank * scale
        return Tensor(a.astype(dtype), layout)
    return {"a": counted((2, 3), Layout(DP, DP)), "f32": counted((3,), Layout(DP, DP), "float32"),
            "kv.w": counted((2, 3), Layout(DP | TP, DP)), "both": counted((4,), Layout(DP | TP, DP | TP)),
            "done": counted((9,), Layout(TP)), "up.w": counted((1, 7), Layout(DP | TP, DP)),
            "kv.b": counted((2,), Layout(TP)), "tp": counted((2, 2), Layout(TP, TP)), "scalar": counted((), Layout(DP, DP)),
            "none": counted((0, 3), Layout(DP, DP)), "f32.both": counted((2,), Layout(DP | TP, DP | TP), "float32")}


def powers(mesh: Mesh, dp_ranks, tp_ranks):
    """Σ 2**r over the ranks r at these places."""
    return float(sum(2 ** (d * mesh.tp.size + t) for d in dp_ranks for t in tp_ranks))


def sums_by_hand(mesh: Mesh):
    """What `gradients` sums up to, in units of 1, 2, 3 ..."""
    all_dp, all_tp, d, t = range(mesh.dp.size), range(mesh.tp.size), [mesh.dp.rank], [mesh.tp.rank]
    unit = {name: np.arange(1.0, 1 + g.array.size).reshape(g.shape) for name, g in gradients(mesh).items()}
    over = {"both": powers(mesh, all_dp, all_tp), "f32.both": powers(mesh, all_dp, all_tp), "tp": powers(mesh, d, all_tp),
            "done": powers(mesh, d, t)}
    want = {name: u * over.get(name, powers(mesh, all_dp, t)) for name, u in unit.items()}
    for name, dp_ranks in (("kv.w", all_dp), ("kv.b", d)):              # row r + 1 is on ranks r (its second) and r + 1
        part = unit[name]
        want[name] = part * powers(mesh, dp_ranks, t)
        if t[0] > 0:
            want[name][0] += part[1] * powers(mesh, dp_ranks, [t[0] - 1])
        if t[0] < mesh.tp.size - 1:
            want[name][1] += part[0] * powers(mesh, dp_ranks, [t[0] + 1])
    return want


def reduced(mesh: Mesh, grads, **static):
    reduction = Reduction(mesh, table(mesh), **static)
    for name, g in grads.items():
        reduction.add(name, g)
    return reduction.finish()


# -- the sums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", BUCKETS)
def test_sums_do_not_depend_on_the_buckets(ranks, bucket):
    """Over dp, tp and both, in two dtypes, and over the holders of what overlaps."""
    def check(mesh: Mesh):
        before, want = gradients(mesh), sums_by_hand(mesh)
        after, at_once = reduced(mesh, before, bucket=bucket), reduce_gradients(before, mesh, table(mesh))
        assert list(after) == list(before) == list(at_once)
        for name, g in after.items():
            assert np.array_equal(g.array, want[name]) and np.array_equal(at_once[name].array, want[name]), name
            assert g.dtype == before[name].dtype and g.layout == at_once[name].layout and g.partial == frozenset(), name
            assert g.varies == before[name].varies - before[name].partial, name
            assert np.array_equal(before[name].array, gradients(mesh)[name].array), name    # arguments are left alone
    ranks.run_meshes(check)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_gradients_of_earlier_micro_batches_are_added_before_the_sum(ranks, bucket):
    """4 times as much before: 5 times the sums, and as much traffic as for one."""
    def check(mesh: Mesh):
        mesh.ledger.clear()
        once = reduced(mesh, gradients(mesh), bucket=bucket)
        traffic = mesh.ledger.total().elements
        both = reduced(mesh, gradients(mesh), before=gradients(mesh, 4.0), bucket=bucket)
        assert mesh.ledger.total().elements == 2 * traffic
        for name, g in both.items():
            assert np.array_equal(g.array, 5 * once[name].array) and g.dtype == once[name].dtype, name
            assert g.layout == once[name].layout
    ranks.run_meshes(check)


def test_sums_over_the_holders_are_the_gradient_of_the_whole(ranks):
    """Each rank uses its part of w: the gradient of an element is the sum over its holders, gathered once."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        bounds = table(mesh)["kv.b"].bounds
        places = {"kv.b": Cut(0, bounds)}
        part = shard({"kv.b": np.zeros(comm.size + 1)}, places, mesh)["kv.b"]
        mine = Tensor(np.ones(part.shape), part.layout)
        whole = gather(reduce_gradients({"kv.b": mine}, mesh, places), places, mesh)["kv.b"]
        assert whole.tolist() == [1.0, *[2.0] * (comm.size - 1), 1.0]
    ranks.run(check)


def test_a_gradient_that_all_ranks_hold_by_a_cut_is_summed(ranks):
    """One kv head, more query heads than ranks: every rank holds all of it; dtype and shape stay."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        g = Tensor(np.full((3, 2), 1.0, np.float32), Layout(TP))
        after = reduce_gradients({"k.w": g}, mesh, {"k.w": Cut(1, ((0, 2),) * comm.size)})["k.w"]
        assert after.dtype == np.float32 and after.array.tolist() == [[comm.size] * 2] * 3 and after.varies == TP
    ranks.run(check)


# -- what travels --------------------------------------------------------------------------------------------------


def test_a_bucket_sets_out_as_soon_as_it_is_full(ranks):
    """Ten gradients of 3 elements: calls for buckets of 1, 4 (two gradients), 9 and 100 elements."""
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        for bucket, calls in ((1, 10), (3, 10), (4, 5), (9, 4), (100, 1)):
            mesh.ledger.clear()
            reduced(mesh, {str(k): Tensor(np.ones(3), Layout(DP, DP)) for k in range(10)}, bucket=bucket)
            rows = [(*key, t.calls, t.elements) for key, t in mesh.ledger.rows()]
            assert rows == ([("dp", "all_reduce", "forward", calls, 30)] if comm.size > 1 else [])
    ranks.run(check)


def test_on_one_rank_nothing_is_copied_or_counted():
    mesh = Mesh()
    before = gradients(mesh)
    after = reduced(mesh, before, bucket=1)
    assert all(after[name].array is g.array and not after[name].partial for name, g in before.items())
    assert not list(mesh.ledger.rows())


def test_what_is_complete_is_not_copied_or_counted(ranks):
    def check(mesh: Mesh):
        g = {"a": Tensor(np.ones(3)), "w": Tensor(np.ones(2), Layout(TP))}
        mesh.ledger.clear()
        reduction = Reduction(mesh, {"a": Replicated(), "w": Cut.even(0, 2 * mesh.tp.size, mesh.tp)}, bucket=1)
        for name in g:
            reduction.add(name, g[name])
        assert all(t.array is g[name].array for name, t in reduction.finish().items()) and not list(mesh.ledger.rows())
    ranks.run_meshes(check)


# -- during the backward pass --------------------------------------------------------------------------------------


class Starts(Frame):
    """Notes in `events` each all_reduce that is started, with its phase."""

    def __init__(self, events):
        self.events = events

    def call(self, op, run, *arrays, **static):
        if op.name == "start_all_reduce":
            self.events.append(f"all_reduce, {stack.phase}")
        return run(*arrays, **static)


def events_of_a_step(mesh: Mesh, bucket: int):
    """What happens, in order, while Σ ((x·a)·b)·c is differentiated: a gradient is complete, an all_reduce sets out."""
    events: list[str] = []
    reduction = Reduction(mesh, bucket=bucket)
    x = Tensor(np.arange(3.0) + mesh.dp.rank, Layout(DP))

    def add(name, grad):
        events.append(name)
        reduction.add(name, grad)
    with Starts(events):
        value_and_grad(lambda p: total(x * p["a"] * p["b"] * p["c"]),
                       {name: Tensor(np.full(3, n)) for name, n in (("a", 2.0), ("b", 4.0), ("c", 8.0), ("unused", 1.0))},
                       on_leaf=add)
        events.append("end of the backward pass")
        grads = reduction.finish()
    x_sum = sum(np.arange(3.0) + d for d in range(mesh.dp.size))
    for name, factor in (("a", 32), ("b", 16), ("c", 8), ("unused", 0)):
        assert np.array_equal(grads[name].array, factor * x_sum), name
    return events


GO, END = "all_reduce, backward", "end of the backward pass"
ORDERS = {1: ["unused", "c", GO, "b", GO, "a", GO, END], 3: ["unused", "c", GO, "b", GO, "a", GO, END],
          4: ["unused", "c", "b", GO, "a", END, "all_reduce, forward"],
          100: ["unused", "c", "b", "a", END, "all_reduce, forward"]}


@pytest.mark.parametrize("bucket", ORDERS)
def test_full_buckets_set_out_before_the_last_gradient_is_complete(ranks, bucket):
    """The last layer's gradient is complete first, and its all_reduce starts before the first layer's is."""
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        comm.ledger.clear()
        events = events_of_a_step(mesh, bucket)
        assert events == [e for e in ORDERS[bucket] if comm.size > 1 or not e.startswith("all_reduce")]
        for phase in ("backward", "forward"):
            calls = events.count(f"all_reduce, {phase}")
            assert comm.ledger.total("dp", "all_reduce", phase).calls == calls
        assert comm.ledger.total("dp", "all_reduce").elements == (9 if comm.size > 1 else 0)
        assert len(set(comm.gather_texts("; ".join(events)))) == 1
    ranks.run(check)


def test_ranks_of_a_mesh_set_out_in_the_same_order(ranks):
    """Of parameters that are reduced over dp, tp or both, in one order on all ranks."""
    def check(mesh: Mesh):
        for bucket in BUCKETS:
            events: list[str] = []
            with Starts(events):
                reduction = Reduction(mesh, table(mesh), bucket=bucket)
                for name, g in gradients(mesh).items():
                    events.append(name)
                    reduction.add(name, g)
                events.append(END)
                reduction.finish()
            assert len(set(mesh.world.gather_texts("; ".join(events)))) == 1
    ranks.run_meshes(check)


def test_a_rank_without_valid_samples_takes_part(ranks):
    """Its gradients are 0, and its buckets set out with the others'."""
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        x = Tensor(np.full(3, 1.0 if comm.rank == 0 else 0.0), Layout(DP))
        reduction = Reduction(mesh, bucket=1)
        value_and_grad(lambda p: total(x * p["a"] * p["b"]), {"a": Tensor(np.ones(3)), "b": Tensor(np.full(3, 2.0))},
                       on_leaf=reduction.add)
        grads = reduction.finish()
        assert grads["a"].array.tolist() == [2, 2, 2] and grads["b"].array.tolist() == [1, 1, 1]
    ranks.run(check)
