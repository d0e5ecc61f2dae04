"""Localises an optimizer's state that, cut over dp, gives other parameters than the whole one, sends more, or keeps more.

test_matrix.py trains every model with it on every mesh; here are its parts, what travels, and what stays in memory.
Gradients of the first part are small integers, whose sums are exact in any order, and equality is equality.
"""
import gc
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from device import double

from refimpl import tensorfile
from refimpl.array import owner, to_host
from refimpl.autograd import Layout, Tensor
from refimpl.comm import Comm, Mesh, run_threads, shares
from refimpl.models import Config, init, parameters
from refimpl.parallel import (Cut, Reduction, Replicated, RowReduction, Rows, box, gather_rows, reduce_gradients, row_table,
                              shard, take_rows)
from refimpl.parallel.cuts import overlap
from refimpl.train import AdamW, Batch, Data, Options, State, Trainer, gradients

DP, TP = frozenset({"dp"}), frozenset({"tp"})


def table(mesh: Mesh):
    """kv.w: tp rank r holds rows r and r + 1, so neighbours share one; none: a part without rows."""
    bounds = tuple((r, r + 2) for r in range(mesh.tp.size))
    return {"a": Replicated(), "kv.w": Cut(0, bounds), "kv.b": Cut(0, bounds), "up.w": Cut.even(1, 7, mesh.tp),
            "down.w": Cut.even(0, 13, mesh.tp), "q_norm": Replicated(), "none": Replicated(), "f32": Replicated(),
            "unused": Replicated()}


def as_found(mesh: Mesh, scale=1.0, asarray=np.asarray):
    """What each rank's backward pass ends with: 2**rank times 1, 2, 3 ... of this rank's part."""
    shapes = {"a": (5, 3), "kv.w": (mesh.tp.size + 1, 2), "kv.b": (mesh.tp.size + 1,), "up.w": (3, 7), "down.w": (13, 2),
              "q_norm": (4,), "none": (0, 3), "f32": (9,), "unused": (6,)}
    out = {}
    for name, place in table(mesh).items():
        whole = np.arange(1.0, 1 + math.prod(shapes[name])).reshape(shapes[name])
        part = whole[box(place, shapes[name], mesh)] * 2.0 ** mesh.world.rank * scale
        over = TP if isinstance(place, Cut) else frozenset()
        partial = {"q_norm": DP | TP, "unused": frozenset()}.get(name, DP)
        if name == "unused":
            part *= 0
        out[name] = Tensor(asarray(part.astype("float32" if name == "f32" else "float64")), Layout(over | partial, partial),
                           shared=TP if overlap(place) else frozenset())
    return out


def row_sums(mesh: Mesh, bucket=1 << 20, before=None, scale=1.0, asarray=np.asarray):
    reduction = RowReduction(mesh, table(mesh), before, bucket)
    for name, g in as_found(mesh, scale, asarray).items():
        reduction.add(name, g)
    return reduction.finish()


def rows_of(n, mesh: Mesh):
    """This dp rank's share of n rows: the first n % dp ranks have one more."""
    at, p = mesh.dp.rank, mesh.dp.size
    return slice(at * (n // p) + min(at, n % p), (at + 1) * (n // p) + min(at + 1, n % p))


# -- the sums, and the way to and from rows ----------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", (1, 11, 1 << 20))
def test_each_rank_gets_its_rows_of_the_sums(ranks, bucket):
    """Of gradients that are partial over dp, over dp and tp, that overlap, that nobody used, without rows; on 8 ranks some
    have no row."""
    def check(mesh: Mesh):
        whole = reduce_gradients(as_found(mesh), mesh, table(mesh))
        mine = row_sums(mesh, bucket)
        assert set(mine) == set(whole)
        for name, g in mine.items():
            want = whole[name].array[rows_of(len(whole[name].array), mesh)]
            assert np.array_equal(g.array, want) and g.dtype == whole[name].dtype and not g.partial and not g.shared, name
            assert g.varies == whole[name].varies | DP, name
    ranks.run_meshes(check)


def test_earlier_micro_batches_are_added_before_the_sum(ranks):
    def check(mesh: Mesh):
        once, both = row_sums(mesh), row_sums(mesh, before=as_found(mesh, 4.0))
        assert all(np.array_equal(both[name].array, 5 * g.array) for name, g in once.items())
        want = as_found(mesh, 4.0)
        again = as_found(mesh, 4.0)
        row_sums(mesh, before=again)
        assert all(np.array_equal(again[name].array, g.array) for name, g in want.items())      # arguments are left alone
    ranks.run_meshes(check)


def test_rows_are_gathered_to_what_they_were_cut_from(ranks):
    """And they partition it: each row on one dp rank, in the order of the ranks, shares that differ by one at most."""
    def check(mesh: Mesh):
        tensors = {n: np.arange(3.0 * n).reshape(n, 3) for n in (0, 1, 5, 13)}
        params = shard({str(n): a for n, a in tensors.items()}, {str(n): Replicated() for n in tensors}, mesh)
        rows = take_rows(params, mesh)
        back = gather_rows(rows, params, mesh)
        for n, a in tensors.items():
            mine = rows[str(n)]
            assert np.array_equal(mine.array, a[rows_of(n, mesh)]) and mine.varies == DP and mine.name == str(n)
            assert np.array_equal(back[str(n)].array, a) and back[str(n)].layout == params[str(n)].layout
            assert len(mine.array) in (n // mesh.dp.size, -(-n // mesh.dp.size))
    ranks.run_meshes(check)


def test_what_is_gathered_knows_its_cut_and_who_shares_it(ranks):
    def check(mesh: Mesh):
        params = shard({"kv.b": np.arange(mesh.tp.size + 1.0), "up.w": np.ones((3, 7))}, table(mesh), mesh)
        for name, t in gather_rows(take_rows(params, mesh), params, mesh).items():
            p = params[name]
            assert (t.name, t.cut, t.shared, t.layout, t.dtype) == (p.name, p.cut, p.shared, p.layout, p.dtype)
            assert np.array_equal(t.array, p.array)
    ranks.run_meshes(check)


def test_rows_have_a_table_of_their_own():
    places = {"a": Replicated(), "b": Cut(0, ((0, 3),))}
    assert row_table(places) == {"a": Rows(Replicated()), "b": Rows(places["b"])}


def test_rows_travel_from_and_to_a_device(ranks):
    """The double's arrays, by way of the host: numpy's bits, and nothing that cupy lacks."""
    def check(mesh: Mesh):
        want, got = row_sums(mesh), row_sums(mesh, asarray=double.asarray)
        params = shard({"a": np.arange(15.0).reshape(5, 3)}, table(mesh), mesh)
        there = {"a": Tensor(double.asarray(params["a"].array), name="a")}
        want["back"], got["back"] = params["a"], gather_rows(take_rows(there, mesh), there, mesh)["a"]
        for name, g in got.items():
            assert type(g.array) is double.DeviceArray and to_host(g.array).tobytes() == want[name].array.tobytes(), name
    ranks.run_meshes(check)


# -- training ------------------------------------------------------------------------------------------------------

GROUPED = Config(vocab_size=11, n_layers=1, n_heads=9, n_kv_heads=3, head_dim=2, d_model=10, d_ff=7, max_seq_len=4,
                 ffn="swiglu", norm="rms_norm", positions="rope", tied=False, biases=("qkv", "mlp"), vocab_multiple=4,
                 dropout=0.25)
PLAIN = Config(vocab_size=11, n_layers=2, n_heads=8, d_model=16, max_seq_len=4, d_ff=9)
LR = 1e-2


def batch(mesh: Mesh, cfg, rows=7):
    """This rank's samples of 7: on 8 dp ranks one has none."""
    tokens, targets = np.random.default_rng(1).integers(0, cfg.vocab_size, (2, rows, 4))
    ends = np.cumsum((0, *shares(rows, mesh.dp.size)))
    mine = np.arange(ends[mesh.dp.rank], ends[mesh.dp.rank + 1])
    return Batch(mine, tokens[mine], targets[mine])


def trained(cfg, mesh: Mesh, zero, steps=2, dtype="float64", xp=np):
    state = State(cfg, mesh, init(cfg, mesh, 3, dtype, xp), AdamW(LR, weight_decay=0.1), zero)
    for step in range(steps):
        micro = [batch(mesh, cfg), batch(mesh, cfg, 3)]
        state.update(gradients(state.params, micro, cfg, mesh, 5, step, RowReduction if zero else Reduction).grads)
    return state


def whole_state(state: State):
    """Global parameters, m and v, on rank 0."""
    return {name: piece.array for name, piece in state.whole().items()}


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("cfg, dtype", ((GROUPED, "float32"), (PLAIN, "float64")), ids=("grouped", "plain"))
def test_parameters_and_moments_have_the_bits_of_the_whole_state_in_a_fixed_order(ranks, cfg, dtype):
    """A sum over ranks in one order, and an update element by element: nothing is left that could round otherwise."""
    def check(comm: Comm):
        for dims in ranks.meshes():
            if dims["tp"] <= cfg.n_heads:
                mesh = Mesh(**dims, comm=comm.fixed_order())
                same_bits(*(whole_state(trained(cfg, mesh, zero, dtype=dtype)) for zero in (True, False)))
    ranks.run(check)


def test_on_two_dp_ranks_the_bits_are_those_in_any_order(ranks):
    """a + b = b + a.  (What neighbours on tp share is summed over both axes, so over four ranks: `plain` shares nothing.)"""
    def check(mesh: Mesh):
        if mesh.dp.size == 2:
            same_bits(*(whole_state(trained(PLAIN, mesh, zero)) for zero in (True, False)))
    ranks.run_meshes(check)


def test_training_with_rows_on_a_device_has_numpys_bits(ranks):
    def check(mesh: Mesh):
        if mesh.dp.size > 1 and mesh.tp.size <= 2:
            there = trained(GROUPED, mesh, True, xp=double)
            assert all(type(a) is double.DeviceArray for moments in (there.optimizer.m, there.optimizer.v)
                       for a in moments.values())
            assert_rows_alone(there)
            same_bits(*({f"{kind}/{name}": to_host(a) for kind, arrays, _ in state.kinds() for name, a in arrays.items()}
                        for state in (there, trained(GROUPED, mesh, True))))
    ranks.run_meshes(check)


def on_all(comm: Comm, path):
    """Rank 0's folder, on every rank: under MPI each has one of its own."""
    return Path(comm.gather_texts(str(path))[0])


def test_a_run_goes_on_with_rows_or_without_on_another_mesh(ranks, tmp_path):
    """Saved whole and loaded as rows, and the other way round, on dp x tp turned round: every bit of p, m and v comes back."""
    def check(comm: Comm):
        first, other = Mesh(dp=comm.size, comm=comm), Mesh(tp=comm.size, comm=comm)
        for zero in (False, True):
            saved = trained(GROUPED, first, zero)
            folder = saved.save(on_all(comm, tmp_path) / f"{zero}", {}, merged=zero and comm.size % 2 == 0)
            for mesh, rows in ((first, not zero), (other, not zero), (first, zero)):
                back = State(GROUPED, mesh, init(GROUPED, mesh, 4, "float64", np), AdamW(LR), rows)
                back.load(folder)
                same_bits(whole_state(back), whole_state(saved))
                assert back.optimizer.t == 2
                assert_rows_alone(back)
    ranks.run(check)


# -- what travels --------------------------------------------------------------------------------------------------


def payload(cfg, mesh: Mesh, clip: bool):
    """What a rank hands to collectives in a step with ZeRO-1 to reduce gradients and gather parameters, by (axes, operation).

    n   elements of this rank's part of a parameter;   r   those of its rows of it

        dp      reduce_scatter  Σ n, of the gradients that are partial over dp alone
        dp+tp   all_reduce      Σ n of those that are partial over both (norms of q and k), and Σ of the whole arrays of those
                                whose parts overlap;  clipping: 1, for the parameters that are cut
        dp      all_reduce      2, loss and count;  clipping: 1, for the replicated ones
        dp      all_gather      Σ r, of all
    """
    out = dict.fromkeys([("dp", "reduce_scatter"), ("dp+tp", "all_reduce"), ("dp", "all_reduce"), ("dp", "all_gather")], 0)
    for name, row in parameters(cfg, mesh).items():
        n, r = (math.prod(s.stop - s.start for s in box(place, row.shape, mesh))
                for place in (row.placement, Rows(row.placement)))
        of_heads = cfg.qk_norm and name.split(".")[-2] in ("q_norm", "k_norm")
        if overlap(row.placement):
            out["dp+tp", "all_reduce"] += math.prod(row.shape)
        elif of_heads and mesh.tp.size > 1:
            out["dp+tp", "all_reduce"] += n
        else:
            out["dp", "reduce_scatter"] += n
        out["dp", "all_gather"] += r
    out["dp", "all_reduce"] += 2 + clip
    out["dp+tp", "all_reduce"] += clip and mesh.tp.size > 1
    return {key: n for key, n in out.items() if n}


NORMS = Config(vocab_size=11, n_layers=1, n_heads=8, d_model=16, max_seq_len=4, d_ff=9, qk_norm=True)


@pytest.mark.parametrize("clip", (False, True), ids=("free", "clipped"))
@pytest.mark.parametrize("cfg", (GROUPED, PLAIN, NORMS), ids=("grouped", "plain", "norms of q and k"))
def test_what_travels_over_dp_is_the_formula(ranks, cfg, clip):
    def check(mesh: Mesh):
        if mesh.dp.size == 1 or mesh.tp.size > cfg.n_heads:
            return
        options = Options(steps=1, batch_size=5, seq_len=4, clip=0.1 * clip, zero=True, check_replicas=0, validation=0)
        Trainer(CORPUS, cfg, options, mesh).run()
        got = dict[tuple[str, str], int]()
        for key, total in mesh.ledger.rows():
            if "dp" in key.axes:
                got[key.axes, key.operation] = got.get((key.axes, key.operation), 0) + total.elements
        assert got == payload(cfg, mesh, clip)
    ranks.run_meshes(check)


def test_what_travels_by_hand():
    """Two dp ranks: w of 3 x 2 and b of 3, 9 elements to reduce_scatter; rank 0 gathers 4 and 2 of them, rank 1 2 and 1."""
    def on_rank(comm):
        mesh = Mesh(dp=2, comm=comm)
        params = {"w": Tensor(np.ones((3, 2)), name="w"), "b": Tensor(np.ones(3), name="b")}
        reduction = RowReduction(mesh)
        for name, p in params.items():
            reduction.add(name, Tensor(p.array, Layout(DP, DP)))
        gather_rows({name: g for name, g in reduction.finish().items()}, params, mesh)
        return [(*key, t.calls, t.elements) for key, t in mesh.ledger.rows()]
    assert run_threads(2, on_rank) == [[("dp", "all_gather", "forward", 2, n), ("dp", "reduce_scatter", "forward", 2, 9)]
                                       for n in (6, 3)]


CORPUS = Data(np.arange(200) * 31 % 97 % 11)


def test_the_loop_trains_with_rows_as_with_the_whole_state(ranks, tmp_path):
    """Losses of five clipped steps of two micro-batches, and the files for comparisons.  Tolerance: an update divides by √v, so
    it multiplies the rounding of small gradients; three steps' worth, as in test_loop.py."""
    def check(comm: Comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), on_all(comm, tmp_path)
        options = dict(steps=5, batch_size=5, seq_len=4, accumulate=2, clip=0.1, lr=LR, validation=0)
        runs = [Trainer(CORPUS, GROUPED, Options(**options, zero=zero), mesh, folder / f"{zero}").run()
                for zero in (True, False)]
        np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-12)
        comm.barrier()
        for file in ("grads_first", "grads_last", "params"):
            a, b = (tensorfile.read(folder / f"{zero}" / f"{file}.safetensors") for zero in (True, False))
            assert a.keys() == b.keys() == set(parameters(GROUPED, mesh))
            for name in a:
                assert np.abs(a[name] - b[name]).max() <= 1e-10 * np.abs(b[name]).max(), (file, name)
    ranks.run(check)


# -- what is kept --------------------------------------------------------------------------------------------------


def assert_rows_alone(state: State):
    """m and v own what they hold, and hold this rank's rows."""
    for moments in (state.optimizer.m, state.optimizer.v):
        assert moments.keys() == state.params.keys()
        for name, a in moments.items():
            want = state.params[name].array[rows_of(len(state.params[name].array), state.mesh) if state.zero else slice(None)]
            assert a.shape == want.shape and owner(a).nbytes == a.nbytes, name


def kept(state: State):
    """Bytes that the optimizer keeps alive: of the owners of its arrays, each once."""
    owners = {id(owner(a)): owner(a) for moments in (state.optimizer.m, state.optimizer.v) for a in moments.values()}
    return sum(a.nbytes for a in owners.values())


@pytest.mark.parametrize("cfg", (GROUPED, PLAIN), ids=("grouped", "plain"))
def test_each_rank_keeps_twice_its_rows(ranks, cfg):
    """2·Σ rows·columns, at most 2·Σ ⌈rows/dp⌉·columns; over dp they add up to what one rank of the whole state keeps."""
    def check(mesh: Mesh):
        if mesh.tp.size > cfg.n_heads:
            return
        state, dense = trained(cfg, mesh, True, 1), trained(cfg, mesh, False, 1)
        assert_rows_alone(state)
        rows = whole = most = 0
        for name, p in state.params.items():
            n, width = len(p.array), math.prod(p.shape[1:])
            mine = rows_of(n, mesh)
            rows, whole, most = rows + (mine.stop - mine.start) * width, whole + n * width, most + -(-n // mesh.dp.size) * width
        assert kept(state) == 2 * 8 * rows <= 2 * 8 * most and kept(dense) == 2 * 8 * whole
        assert mesh.dp.all_reduce(np.array(kept(state))) == kept(dense)
    ranks.run_meshes(check)


MEASURED = Config(vocab_size=96, n_layers=2, n_heads=4, d_model=48, max_seq_len=32)


@pytest.mark.parametrize("dp", (1, 2, 3, 4))
def test_memory_measured_is_that_of_the_formula(dp):
    """tracemalloc over all ranks (threads of this process): what the optimizers keep is 16 bytes for each parameter once, and
    dp times without ZeRO-1.  Allowed: 250 bytes for each array, of the object itself and its entry in a dict."""
    n = sum(math.prod(row.shape) for row in parameters(MEASURED, Mesh()).values())

    def measured(zero):
        def on_rank(comm):
            mesh = Mesh(dp=dp, comm=comm)
            state = State(MEASURED, mesh, init(MEASURED, mesh, 0, "float64", np), AdamW(LR), zero)
            for _ in range(2):
                grads = {name: Tensor(np.ones(p.shape)) for name, p in state.params.items()}
                state.update(take_rows(grads, mesh) if zero else grads)
            return state.optimizer
        gc.collect()
        tracemalloc.start()
        try:
            optimizers = run_threads(dp, on_rank)
            gc.collect()
            with_them = tracemalloc.get_traced_memory()[0]
            arrays = sum(len(o.m) + len(o.v) for o in optimizers)
            for o in optimizers:
                o.m, o.v = {}, {}
            return with_them - tracemalloc.get_traced_memory()[0], arrays
        finally:
            tracemalloc.stop()
    measured(True)                                      # what is made once, at the first call
    for zero, copies in ((True, 1), (False, dp)):
        nbytes, arrays = measured(zero)
        assert 0 <= nbytes - 16 * n * copies <= 250 * arrays, (nbytes, 16 * n * copies)


def test_the_update_of_a_rank_without_rows_is_nothing(ranks):
    """A parameter of one row: rank 0 has it, the others' state is empty, and all have it after."""
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        params, optimizer = {"w": Tensor(np.array([[2.0, 3.0]]), name="w")}, AdamW(0.5, weight_decay=0.0)
        after = gather_rows(optimizer.step(take_rows(params, mesh), take_rows({"w": Tensor(np.array([[1.0, -1.0]]))}, mesh)),
                            params, mesh)
        np.testing.assert_allclose(after["w"].array, [[1.5, 3.5]], rtol=1e-7)      # the first step is lr·sign(g)
        assert optimizer.m["w"].shape == (1 if comm.rank == 0 else 0, 2)
    ranks.run(check)
