"""Localises code that would fail or go wrong on a GPU, without one: numpy functions on device arrays, host arrays as indices,
names and keywords that cupy lacks, hidden waits.

The double computes with numpy inside, so every result must have the very bits of numpy's.
"""
import numpy as np
import pytest
from device import double, stream, suite

from refimpl import ops
from refimpl.array import on_device, to_host, xp_of
from refimpl.autograd import Clock, Count, Guard, Params, Record, Replace, Tensor, recompute, value_and_grad
from refimpl.cases import ON_RANKS
from refimpl.comm import Mesh
from refimpl.comm.device import fetched
from refimpl.generate import sample
from refimpl.models import Context, decoder, init
from refimpl.rng import draw24, integers, uniform_weights

THREE = [1.0, 2.0, 3.0]


def as_tuple(values):
    return values if isinstance(values, tuple) else (values,)


def on(values):
    return double.asarray(np.array(values))


# -- the suite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op, case", suite.case_names())
def test_op_gives_numpys_bits(op, case, dtype):
    suite.check_case(double, op, case, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_decoder_gives_numpys_bits_on_every_mesh(ranks, dtype):
    """Losses, gradients, dropout and AdamW steps; device arrays travel by way of the host."""
    def on_rank(comm):
        for dims in ranks.meshes():
            if dims["tp"] <= suite.CONFIG.n_heads:
                suite.check_decoder(double, dtype, Mesh(**dims, comm=comm))
    ranks.run(on_rank)


@pytest.mark.parametrize("name", sorted(ON_RANKS))
def test_a_collective_takes_and_gives_device_arrays(ranks, name):
    def on_rank(comm):
        op = suite.REGISTRY[name]
        for case in ON_RANKS[name]:
            arrays, static = case.arguments(comm, "float32")
            there = [double.asarray(a) if a.dtype.kind == "f" else a for a in arrays]     # ids stay on the host
            expected, vjp = op.array(*arrays, comm=comm, **static)
            y, vjp_there = op.array(*there, comm=comm, **static)
            if isinstance(y, tuple):                    # of a loss, the sum and the count
                assert to_host(y[1]) == expected[1]
                y, expected = y[0], expected[0]
            suite.compare(double, y, expected, None)
            for there, here in zip(as_tuple(vjp_there(y)), as_tuple(vjp(expected)), strict=True):
                assert there is here is None or suite.compare(double, there, here, None) is None
    ranks.run(on_rank)


def test_broadcast_and_maximum_take_device_arrays(ranks):
    def on_rank(comm):
        x = np.arange(3.0) - comm.rank
        for act in (lambda a: comm.broadcast(a, comm.size - 1), lambda a: comm.all_reduce(a, "max")):
            suite.compare(double, act(double.asarray(x)), act(x), None)
    ranks.run(on_rank)


def test_a_collective_waits_for_what_another_stream_makes(ranks):
    def on_rank(comm):
        mine, n = np.arange(6.0).reshape(2, 3) * 2 ** comm.rank, comm.size
        acts = [comm.all_reduce, lambda x: comm.all_reduce(x, "max"), comm.reduce, lambda x: comm.all_gather(x, 0),
                lambda x: comm.all_gather(x, 1), lambda x: comm.reduce_scatter(x, 0), lambda x: comm.reduce_scatter(x, 1),
                lambda x: comm.broadcast(x, n - 1), comm.ring, lambda x: comm.start_ring(x).wait(),
                lambda x: comm.start_all_reduce(x).wait()]
        for act in acts:
            with stream.Stream():
                x = double.asarray(mine)
            y, by_host = act(x), act(mine)
            assert (y is None) == (by_host is None)             # of a reduction, where it is not the root
            assert y is None or fetched(y).tobytes() == by_host.tobytes()
    ranks.run(on_rank)


def test_initial_weights_and_draws_are_the_same_bits_on_the_device():
    for name, t in init(suite.CONFIG, Mesh(), seed=3, dtype="float32", xp=double).items():
        suite.compare(double, t.array, init(suite.CONFIG, Mesh(), seed=3, dtype="float32")[name].array, None)
    index = np.arange(12).reshape(3, 4)
    for f in (lambda i: draw24(2 ** 64 - 1, i), lambda i: integers(5, i, 2 ** 40), lambda i: uniform_weights(7, i, 0.5)):
        suite.compare(double, f(double.asarray(index)), f(index), None)


def test_sampling_gives_the_same_tokens():
    for temperature in (0.0, 1.0):
        a, b = (sample(suite.parameters(xp), np.array([1, 2]), 6, suite.CONFIG, Mesh(), temperature) for xp in (double, np))
        assert type(a) is np.ndarray and a.tolist() == b.tolist()


def test_ids_on_the_host_and_on_the_device_give_the_same():
    w, x, ids = on(np.eye(4)), on(np.ones((2, 4))), np.array([3, 1])
    for op, first, static in ((ops.embedding, w, {}), (ops.gather, w, {}), (ops.scatter_add, x, {"n": 5}), (ops.rope, x, {}),
                              (ops.cross_entropy, x, {})):
        (a, vjp), (b, vjp2) = op.array(first, ids, **static), op.array(first, on(ids), **static)
        a, b = (y[0] if isinstance(y, tuple) else y for y in (a, b))
        suite.compare(double, a, to_host(b), None)
        suite.compare(double, vjp(a)[0], to_host(vjp2(b)[0]), None)


def test_ids_out_of_range_are_refused_though_the_device_would_wrap_them():
    assert to_host(on(range(5))[on([5, 6, -1])]).tolist() == [0, 1, 4]
    x = on(np.ones((5, 3)))
    for ids in (np.array([5]), on([5]), on([-1])):
        for call in (lambda: ops.embedding(x, ids), lambda: ops.gather(x, ids), lambda: ops.scatter_add(x[:1], ids, n=5),
                     lambda: ops.cross_entropy(x[:1], ids)):
            with pytest.raises(ValueError, match=r"must be in \[0, "):
                call()


def test_an_infinite_row_stays_with_its_id():
    """Differences of running sums (cupy's add.reduceat) would make nan of every later id, and of -1e9 + 1 too few digits."""
    for xp in (np, double):
        y = ops.scatter_add.array(xp.asarray(np.array([np.inf, 1e20, 1.0, 2.0])), xp.asarray(np.array([0, 1, 2, 2])), n=3)[0]
        assert to_host(y).tolist() == [np.inf, 1e20, 3.0]


# -- tape and frames ------------------------------------------------------------------------------------------------


def loss(p):
    data = suite.batch()
    ctx = Context(Mesh(), data.rows, np.arange(suite.T), seed=7, step=1)
    return decoder.loss(Tensor(data.tokens), data.targets, p, suite.CONFIG, ctx)


def test_frames_see_device_arrays():
    params = suite.parameters(double)
    with Record() as record, Count() as count, Clock() as clock, Guard():
        value_and_grad(loss, params)
    with Count() as on_numpy:
        value_and_grad(loss, suite.parameters(np))
    assert (count.flops, count.calls) == (on_numpy.flops, on_numpy.calls) and clock.spans
    assert all(difference == 0 for _, difference in record.replay())
    assert on_device(record["layers.0.mlp.gelu_tanh"].dy[0])


def test_live_bytes_are_numpys():
    peaks = []
    for xp in (double, np):
        with Count() as count:
            value_and_grad(loss, suite.parameters(xp))
        peaks.append(count.peak)
        assert count.live == 0
    assert 0 < peaks[1] == peaks[0] - 8 * suite.T, "positions were moved, and are kept"


def test_guard_finds_an_edited_residual():
    def edits(p):
        y = ops.exp(p["x"])
        y.array[0] = 7.0                                # a device array has no flag against it
        return ops.sum(y)
    with pytest.raises(ValueError, match="the residual y of exp was edited"), Guard():
        value_and_grad(edits, {"x": Tensor(on(THREE))})


def test_replace_plants_a_mistake():
    with Replace("gelu_tanh", "*", lambda x: ops.relu.array(x)):
        changed = value_and_grad(loss, suite.parameters(double))[0][0]
    assert float(changed) != float(value_and_grad(loss, suite.parameters(double))[0][0])


def test_recompute_gives_the_same_bits():
    def block(p):
        ctx = Context(Mesh(), np.arange(1), np.arange(3), step=1)
        x = ops.reshape(p["positions.w"], shape=(1, suite.CONFIG.max_seq_len, 16))
        x = ops.slice_axis(x, axis=1, stop=3)
        return ops.sum(run(decoder.block, x, p / "layers.0", suite.CONFIG, ctx))
    results = []
    for run in (recompute, lambda f, *args: f(*args)):
        results.append(value_and_grad(lambda p: block(p), suite.parameters(double))[1])
    for name, g in results[0].items():
        suite.compare(double, g.array, to_host(results[1][name].array), None)


def test_operators_of_tensors_take_device_arrays():
    x = Tensor(on(THREE))
    for y, expected in ((on(THREE) * x, [1, 4, 9]), (x + on(THREE), [2, 4, 6]), (2 * x - x / 2, [1.5, 3, 4.5]),
                        (-x, [-1, -2, -3])):
        assert isinstance(y, Tensor) and to_host(y.array).tolist() == expected


def test_a_step_waits_for_the_device_as_often_as_written_here():
    """In the forward pass never, as ids are checked on the host.  In the backward pass to add up gradients by id: twice for the
    positions, which are distinct, and for the tokens until the longest run of equal ids is one sum."""
    double.waits.clear()
    data, params = suite.batch(), suite.parameters(double)
    ctx = Context(Mesh(), data.rows, np.arange(suite.T))
    decoder.loss(Tensor(data.tokens), data.targets, Params(params), suite.CONFIG, ctx)
    assert not double.waits
    value_and_grad(loss, params)
    longest = np.bincount(data.tokens.reshape(-1)).max()
    assert double.waits == {"flatnonzero": 2 + 2 + int(np.ceil(np.log2(longest)))}


# -- the double is strict -------------------------------------------------------------------------------------------


REFUSED = {
    "a numpy function": lambda x: np.sqrt(x),
    "a numpy function of several": lambda x: np.concatenate([x, x]),
    "conversion": lambda x: np.asarray(x),
    "a host array on the right": lambda x: x + np.ones(3),
    "a host array on the left": lambda x: np.ones(3) + x,
    "a host array in place": lambda x: x.__iadd__(np.ones(3)),
    "a 0-d host array": lambda x: x * np.array(2.0),
    "a host array in a function": lambda x: double.where(x > 0, x, np.ones(3)),
    "a host array joined": lambda x: double.concatenate([x, np.ones(3)]),
    "a host array assigned": lambda x: x.__setitem__(slice(None), np.ones(3)),
    "where= of a ufunc": lambda x: double.exp(x, where=x > 0),
    "initial of a reduction": lambda x: x.max(initial=0),
    "an unlisted keyword": lambda x: double.cumsum(x, out=x),
    "too many by position": lambda x: double.argsort(x, -1, "stable"),
    "a float of an array": lambda x: float(x),
    "iteration": lambda x: list(x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_double_refuses_with_a_type_error(what):
    with pytest.raises(TypeError):
        REFUSED[what](on(THREE))


def test_the_double_refuses_other_indices_names_and_repeated_assignment():
    x = on(THREE)
    for index in (np.array([0]), [0], x > 0, x):
        with pytest.raises(IndexError):
            x[index]
    with pytest.raises(IndexError):
        x[3]
    with pytest.raises(ValueError, match="assignment to repeated indices"):
        x[on([0, 1, 0])] = 1.0
    x[x > 2.5] = 0.0                                    # but a number under a mask is fine
    assert to_host(x).tolist() == [1, 2, 0]
    for name in ("add", "longdouble", "tensordot", "fft.fft"):
        with pytest.raises(AttributeError, match="xptable"):
            getattr(double.fft if "." in name else double, name.rpartition(".")[2])
    with pytest.raises(AttributeError, match="xptable"):
        x.flags


def test_the_double_behaves_as_a_device():
    x = on([[1.0, 2.0], [3.0, 4.0]])
    assert xp_of(np.ones(2), x) is double and xp_of(np.ones(2), 3.0, None, Tensor(x)) is np
    total = x.sum()
    assert on_device(total) and total.shape == () and float(total) == 10
    assert on_device(x[0, 1]) and x[0].base is x and x[0][1:].base is x and total.base is None
    host = x.get()
    host[:] = 0
    assert float(x.sum()) == 10, "get and asarray copy"
    x[0, :1] += 5                                       # through a view
    assert to_host(x).tolist() == [[6, 2], [3, 4]]
    assert to_host(np.float64(2) * x)[0, 0] == 12, "numpy's scalars are numbers"
    assert to_host(on(np.arange(12).reshape(3, 4))[on([1, 4]), 0]).tolist() == [4, 4]
