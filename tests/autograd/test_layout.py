"""Localises missing or doubled communication: a wrong sharding must be an error, and gradients must know what they lack.

Everything runs without ranks: tags do not depend on the size of a mesh axis.
"""
import numpy as np
import pytest

from refimpl.autograd import Layout, LayoutError, Tensor, recompute, value_and_grad
from refimpl.comm import Mesh, run_threads
from refimpl.ops import (add, cross_entropy, dropout, embedding, gelu_tanh, layer_norm, linear, max, mul, reshape, scale,
                         softmax, sum, transpose)
from refimpl.parallel import (all_gather, all_to_all, all_to_all_rows, as_partial, broadcast, broadcast_from,
                              column_parallel_linear, copy_to, gather_from, reduce_from, reduce_scatter, ring_shift, scatter_to)
from refimpl.rng import draw

TP, DP = frozenset({"tp"}), frozenset({"dp"})
MESH = Mesh()
D, F = 4, 6


def weight(name, shape, axis=None):
    """A parameter, cut over tp along `axis` or replicated."""
    return Tensor(draw(name, shape), Layout(TP if axis is not None else frozenset()), name=name,
                  cut=None if axis is None else {"tp": axis})


PARAMS = {"g": weight("g", (D,)), "b": weight("b", (D,)), "up.w": weight("up.w", (D, F), 1), "up.b": weight("up.b", (F,), 0),
          "down.w": weight("down.w", (F, D), 0), "down.b": weight("down.b", (D,))}


def x(varies=frozenset()):
    return Tensor(draw("x", (3, D)), Layout(varies))


def run(fn, params=None):
    """fn is given the parameters -> (value, gradients)"""
    return value_and_grad(fn, PARAMS if params is None else params)


def mlp(p, mesh=MESH, f=True, g=True, bias_early=False, data=None):
    """The lecture's two-layer MLP, with switches for the usual mistakes."""
    h = layer_norm(data or x(), p["g"], p["b"])
    h = copy_to(h, comm=mesh.tp) if f else h
    h = gelu_tanh(linear(h, p["up.w"], p["up.b"]))
    y = linear(h, p["down.w"], p["down.b"]) if bias_early else linear(h, p["down.w"])
    y = reduce_from(y, comm=mesh.tp) if g else y
    return y if bias_early else y + p["down.b"]


def test_the_right_model_is_accepted_and_its_loss_is_whole():
    value, grads = run(lambda p: sum(mlp(p)))
    assert value.layout == Layout()
    assert {name: g.layout for name, g in grads.items()} == {
        name: Layout(TP if t.cut else frozenset()) for name, t in PARAMS.items()}


# -- the two errors, and their kin ------------------------------------------------------------------------------------

def test_a_missing_f_is_an_error():
    with pytest.raises(LayoutError, match=r"linear: an activation of shape \(3, 4\) is replicated over tp, its partner is not: "
                                          r"copy_to it first \(f\)"):
        run(lambda p: sum(mlp(p, f=False)))


@pytest.mark.parametrize("nonlinear", [gelu_tanh, softmax, lambda y: layer_norm(y, PARAMS["g"], PARAMS["b"]),
                                       lambda y: cross_entropy(y, np.array([0, 1, 2]))[0]])
def test_a_nonlinearity_of_a_partial_value_is_an_error(nonlinear):
    """Slide 120: GELU(X_0 A_0 + X_1 A_1) is not GELU(X_0 A_0) + GELU(X_1 A_1)."""
    with pytest.raises(LayoutError, match=r"(\w+) of a value that is partial over tp: reduce before a nonlinearity "
                                          r"\(reduce_from\): \1 of a sum is not the sum of \1s"):
        run(lambda p: sum(nonlinear(linear(x(TP), weight("w", (D, D), 0)))))


def test_a_row_cut_first_layer_is_an_error():
    """The other way round, rows first: the product is partial before the GELU."""
    with pytest.raises(LayoutError, match="reduce before a nonlinearity"):
        run(lambda p: sum(gelu_tanh(linear(scatter_to(x(), comm=MESH.tp), weight("w", (D, F), 0)))))


def test_a_bias_before_the_reduction_is_an_error():
    words = "the product with down.w is partial over tp; its bias would be added once per rank: add it after reduce_from"
    with pytest.raises(LayoutError, match=words):
        run(lambda p: sum(mlp(p, bias_early=True)))


def test_a_bias_added_to_a_partial_value_is_an_error():
    """Three ways to write the same mistake: add, add of a plain array, and a second linear with a bias."""
    words = "would be (counted|added) once per rank"
    with pytest.raises(LayoutError, match="partial over tp and the parameter down.b of shape .*" + words):
        run(lambda p: sum(mlp(p, g=False)))
    partial = linear(x(TP), weight("w", (D, D), 0))
    with pytest.raises(LayoutError, match="partial over tp and a plain array.*" + words):
        partial + np.ones(D)
    with pytest.raises(LayoutError, match="the product with v is partial over tp.*" + words):
        linear(partial, weight("v", (D, F)), weight("c", (F,)))


def test_partial_plus_replicated_activation_is_an_error():
    with pytest.raises(LayoutError, match="add of a value that is partial over tp and an activation of shape .* which is not"):
        run(lambda p: sum(linear(x(TP), weight("w", (D, D), 0)) + gelu_tanh(x())))


def test_linear_ops_accept_a_partial_value():
    y = linear(x(TP), weight("w", (D, D), 0))
    for z in (scale(y, by=2.0), sum(y), reshape(y, shape=(12,)), transpose(y, axes=(1, 0)), add(y, y),
              mul(y, weight("g", (D,))), linear(y, weight("v", (D, F))),
              dropout(y, np.arange(3), np.arange(D), key=1, rate=0.5, shape=(3, D))):
        assert z.layout == Layout(TP, TP)


def test_a_product_of_two_partial_values_is_an_error():
    y = linear(x(TP), weight("w", (D, D), 0))
    with pytest.raises(LayoutError, match="mul: two inputs vary over tp and one is partial over it; reduce_from it first"):
        mul(y, y)


def test_a_partial_loss_is_an_error():
    with pytest.raises(LayoutError, match="the loss is partial over tp: reduce_from it first"):
        run(lambda p: sum(linear(x(TP), weight("w", (D, D), 0))) + sum(linear(x(TP), p["down.w"])),
            {"down.w": weight("down.w", (D, D), 0)})


def partial():
    return as_partial(x(TP), comm=MESH.tp)


OTHERS = {all_to_all: {"split": 0, "join": 1}, all_to_all_rows: {"counts": [[3]]}}      # arguments that have no default


@pytest.mark.parametrize("collective, given, words", [
    (copy_to, x(TP), "copy_to over tp takes a replicated value, but an activation .* is varying there: a second f would add"),
    (copy_to, partial(), "copy_to over tp takes a replicated value, .* is partial there: reduce_from it first"),
    (reduce_from, x(), "reduce_from over tp takes a partial value, but an activation .* is replicated there: only a sum"),
    (reduce_from, x(TP), "reduce_from over tp takes a partial value, but an activation .* is varying there: only a sum"),
    (reduce_scatter, x(TP), "reduce_scatter over tp takes a partial value, .* is varying there: only a sum"),
    (gather_from, x(), "gather_from over tp takes a varying value, .* is replicated there: there is nothing to join"),
    (scatter_to, x(TP), "scatter_to over tp takes a replicated value, .* is varying there"),
    (as_partial, x(), "as_partial over tp takes a varying value, .* is replicated there: it would be counted once per rank"),
    (all_to_all, x(), "all_to_all over tp takes a varying value, .* is replicated there: scatter_to cuts it"),
    (all_to_all_rows, x(), r"all_to_all_rows over tp .* is replicated there: scatter_to \(axis=0\) gives each rank its rows"),
    (ring_shift, x(), "ring_shift over tp takes a varying value, .* is replicated there: every rank has it already"),
    (broadcast_from, x(), "broadcast_from over tp takes a varying value, .* is replicated there: every rank has it already"),
    (broadcast, x(), "broadcast over tp .* is replicated there: every rank has it already; copy_to lets each do its own thing"),
    *((op, partial(), f"{op.name} over tp takes a varying value, .* is partial there: reduce_from it first")
      for op in (gather_from, all_gather, all_to_all, all_to_all_rows, ring_shift, broadcast_from, broadcast))])
def test_collectives_check_the_layout_of_their_input(collective, given, words):
    with pytest.raises(LayoutError, match=words):
        collective(given, comm=MESH.tp, **OTHERS.get(collective, {}))


@pytest.mark.parametrize("collective", [all_gather, all_to_all, all_to_all_rows, ring_shift, broadcast, reduce_scatter,
                                        copy_to])
def test_what_differs_between_ranks_afterwards_says_so(collective):
    given = partial() if collective is reduce_scatter else x() if collective is copy_to else x(TP)
    assert collective(given, comm=MESH.tp, **OTHERS.get(collective, {})).layout == Layout(TP)


@pytest.mark.parametrize("collective", [gather_from, broadcast_from, reduce_from])
def test_what_is_one_value_on_all_ranks_afterwards_says_so(collective):
    assert collective(partial() if collective is reduce_from else x(TP | DP), comm=MESH.tp).layout == Layout(
        frozenset() if collective is reduce_from else DP)


def test_rows_cut_weights_want_a_cut_input():
    with pytest.raises(LayoutError, match="w is cut by rows over tp, so x must be cut by columns there; it is replicated"):
        linear(x(), weight("w", (D, F), 0))


# -- what gradients lack ----------------------------------------------------------------------------------------------

def test_a_replicated_parameter_beside_varying_data_is_partial():
    """Data parallelism: x varies over dp, so every gradient has to be summed over dp, and says so."""
    _, grads = run(lambda p: sum(mlp(p, data=x(DP))))
    assert {name: g.partial for name, g in grads.items()} == dict.fromkeys(PARAMS, DP)
    assert grads["up.w"].varies == TP | DP and grads["g"].varies == DP


def test_only_the_parameters_that_lack_it_are_recorded():
    """A gain applied to this rank's heads (q/k-norm) is used on every rank with other data: its gradient is partial over tp."""
    def f(p):
        h = linear(copy_to(x(), comm=MESH.tp), p["up.w"])
        return sum(reduce_from(linear(mul(h, p["qnorm.g"]), p["down.w"]), comm=MESH.tp))
    _, grads = run(f, {**PARAMS, "qnorm.g": weight("qnorm.g", (F,))})
    assert grads["qnorm.g"].layout == Layout(TP, TP)
    assert {name for name, g in grads.items() if g.partial} == {"qnorm.g"}


def test_the_recorded_reduction_makes_the_gradient_whole(ranks):
    """x̂ = r + 1 on rank r, dy = 1: the gain's gradient is 1 + 2 + ... on every rank once it is summed over tp."""
    def on_rank(comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        part = Tensor(np.array([comm.rank + 1.0]), Layout(TP))
        _, grads = value_and_grad(lambda p: reduce_from(as_partial(sum(mul(part, p["g"])), comm=mesh.tp), comm=mesh.tp),
                                  {"g": weight("g", (1,))})
        assert grads["g"].array.tolist() == [comm.rank + 1]
        assert grads["g"].partial == TP
        assert mesh.tp.all_reduce(grads["g"].array).tolist() == [comm.size * (comm.size + 1) / 2]
    ranks.run(on_rank)


def test_a_parameter_used_in_two_ways_is_an_error_that_copy_to_resolves():
    """g scales the whole x and then this rank's columns of h: one gradient is complete, the other a part."""
    params = {"g": weight("g", (D,)), "w": weight("w", (D, D), 1)}

    def f(p, again):
        h = linear(copy_to(mul(x(), p["g"]), comm=MESH.tp), p["w"])
        return reduce_from(sum(mul(h, again(p["g"]))), comm=MESH.tp)
    words = ("the parameter g is used in two ways: its gradient has to be reduced over nothing for mul and over tp for mul; "
             "copy_to it before the use that varies more")
    with pytest.raises(LayoutError, match=words):
        run(lambda p: f(p, again=lambda g: g), params)
    _, grads = run(lambda p: f(p, again=lambda g: copy_to(g, comm=MESH.tp)), params)
    assert grads["g"].layout == Layout()


def test_values_made_of_parameters_are_recorded_where_they_meet_data():
    """The transpose of a tied matrix is made of parameters alone: dp is recorded for the matrix when it meets x."""
    _, grads = run(lambda p: sum(linear(x(DP), transpose(scale(p["w"], by=2.0), axes=(1, 0)))), {"w": weight("w", (F, D))})
    assert grads["w"].layout == Layout(DP, DP)


def test_a_replicated_parameter_that_meets_a_cut_one_is_an_error():
    """It would lose its own reduction in the product of the two."""
    with pytest.raises(LayoutError, match="mul: the parameter g of shape .* is replicated over tp, its partner is not"):
        run(lambda p: sum(linear(x(), mul(p["g"], p["w"]))), {"g": weight("g", (F,)), "w": weight("w", (D, F), 1)})


def test_recompute_records_the_same_reductions():
    def f(p, run_layer):
        return sum(run_layer(lambda data, *ps: mlp(dict(zip(PARAMS, ps)), data=data), x(DP), *p.values()))
    plain = run(lambda p: f(p, lambda fn, *args: fn(*args)))[1]
    again = run(lambda p: f(p, recompute))[1]
    assert {name: g.layout for name, g in again.items()} == {name: g.layout for name, g in plain.items()}
    assert all(np.array_equal(again[name].array, plain[name].array) for name in PARAMS)


# -- sizes do not matter ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mistake", [{"f": False}, {"g": False}, {"bias_early": True}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mistake_is_found_on_every_size_with_the_same_words(mistake, size):
    def words(mesh):
        with pytest.raises(LayoutError) as error:
            value_and_grad(lambda p: sum(mlp(p, mesh=mesh, **mistake)), PARAMS)
        return str(error.value)
    assert set(run_threads(size, lambda comm: words(Mesh(tp=size, comm=comm)))) == {words(MESH)}


# -- cuts are followed through ops ------------------------------------------------------------------------------------

def test_a_scaled_or_transposed_weight_still_knows_its_cut():
    h = x(TP)
    rows, columns = weight("rows", (D, D), 0), weight("columns", (D, D), 1)
    with pytest.raises(LayoutError, match="its bias would be added once per rank"):
        linear(h, scale(rows, by=0.5), weight("bias", (D,)))
    for w in (scale(rows, by=0.5), transpose(columns, axes=(1, 0))):
        assert linear(h, w).partial == TP
        with pytest.raises(LayoutError, match="reduce before a nonlinearity"):
            gelu_tanh(linear(h, w))
    y = column_parallel_linear(x(), transpose(rows, axes=(1, 0)))       # the head that is tied to a table cut by vocabulary
    assert y.cut == {"tp": 1} and y.layout == Layout(TP)


@pytest.mark.parametrize("fn", [
    lambda h: layer_norm(h, weight("g", (F,), 0), weight("b", (F,), 0)), softmax,
    lambda h: cross_entropy(h, np.zeros(3, int)), lambda h: max(h, axis=1), lambda h: softmax(gelu_tanh(scale(h, by=2.0)))])
def test_an_op_that_works_along_a_cut_axis_is_refused(fn):
    h = column_parallel_linear(x(), PARAMS["up.w"])
    with pytest.raises(LayoutError, match="works along axis [01] of .*, which is cut over tp: each rank would see its own"):
        fn(h)
    fn_of_whole = gather_from(h, comm=MESH.tp)
    assert not fn_of_whole.cut and softmax(fn_of_whole).layout == Layout()


def test_a_lookup_in_a_table_cut_by_rows_is_refused():
    with pytest.raises(LayoutError, match="embedding works along axis 0 of the parameter table .* which is cut over tp"):
        embedding(weight("table", (F, D), 0), np.zeros(3, int))
    assert embedding(weight("table", (F, D), 1), np.zeros(3, int)).cut == {"tp": 1}


def test_a_sum_over_a_cut_axis_is_partial_and_over_another_it_is_cut():
    h = column_parallel_linear(x(), PARAMS["up.w"])
    assert sum(h, axis=1).partial == TP and not sum(h, axis=1).cut
    assert sum(h, axis=0).cut == {"tp": 0} and not sum(h, axis=0).partial
    assert sum(h, axis=0, keepdims=True).cut == {"tp": 1}
    with pytest.raises(LayoutError, match="the loss is partial over tp"):
        run(lambda p: sum(mul(h, linear(copy_to(x(), comm=MESH.tp), p["up.w"]))))


def test_a_loss_that_differs_between_tp_ranks_is_refused():
    """all_gather where gather_from was meant: each rank would differentiate its own copy, and all would count."""
    def f(join):
        return lambda p: sum(join(linear(copy_to(x(), comm=MESH.tp), p["up.w"]), comm=MESH.tp))
    with pytest.raises(LayoutError, match="the loss differs between the ranks over tp"):
        run(f(all_gather))
    run(f(gather_from))


def test_a_parameter_gathered_as_one_value_beside_varying_data_is_refused():
    """The mistake of fully sharded data parallelism: gather_from's vjp takes the own slice of this rank's gradient alone."""
    w = {"w": Tensor(draw("w", (D, D)), Layout(DP), name="w", cut={"dp": 0})}

    def f(join):
        return lambda p: sum(linear(x(DP), join(p["w"], comm=MESH.dp, axis=0)))
    with pytest.raises(LayoutError, match="was gathered over dp as one replicated value, its partner varies there"):
        run(f(gather_from), w)
    _, grads = run(f(all_gather), w)
    assert grads["w"].layout == Layout(DP)


def test_a_parameter_of_one_rank_beside_varying_data_is_refused_unless_its_gradient_comes_home():
    """broadcast_from's vjp takes what the root alone found; broadcast adds up what all found."""
    w = {"w": Tensor(draw("w", (D, D)), Layout(DP), name="w")}

    def f(give):
        return lambda p: sum(linear(x(DP), give(p["w"], comm=MESH.dp)))
    with pytest.raises(LayoutError, match=r"over dp as one replicated value, .* all_gather \(of a root's value: broadcast\)"):
        run(f(broadcast_from), w)
    _, grads = run(f(broadcast), w)
    assert grads["w"].layout == Layout(DP)


def test_collectives_refuse_a_value_that_is_partial_over_another_axis_or_mixed():
    partial_over_dp = as_partial(x(DP), comm=MESH.dp)
    with pytest.raises(LayoutError, match="copy_to of a value that is partial over dp: reduce_from it first"):
        copy_to(partial_over_dp, comm=MESH.tp)
    with pytest.raises(LayoutError, match=r"gather_from over dp\+tp takes a varying value, but an activation .* is varying "
                                          r"over dp and replicated over tp there: there is nothing to join"):
        gather_from(x(DP), comm=MESH.comm("dp", "tp"))
    for op in (ring_shift, broadcast, broadcast_from):
        with pytest.raises(LayoutError, match=f"{op.name} of a value that is partial over dp: reduce_from it first"):
            op(Tensor(draw("x", (3, D)), Layout(DP | TP, DP)), comm=MESH.tp)


def test_the_sweep_gives_an_unused_collective_a_zero_cotangent():
    """Rank 1 makes y as well, but its loss goes another way: its all_reduce must still meet rank 0's."""
    def on_rank(comm):
        mesh = Mesh(dp=2, comm=comm)

        def f(p):
            y = copy_to(p["a"], comm=mesh.dp)
            return sum(y) if comm.rank == 0 else sum(mul(p["b"], np.ones(2)))
        return value_and_grad(f, {"a": Tensor(np.ones(2)), "b": Tensor(np.ones(2))})[1]["a"].array.tolist()
    assert run_threads(2, on_rank, timeout=20) == [[1, 1], [1, 1]]
