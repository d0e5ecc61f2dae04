"""Localises cuts that are lost, guessed or contradicted on their way through the ops: a rank's part taken for the whole."""
import numpy as np
import pytest

import refimpl.parallel  # noqa: F401  registers the collectives
from refimpl.autograd import REGISTRY, Layout, LayoutError, Tensor, value_and_grad
from refimpl.cases import CASES
from refimpl.comm import Mesh
from refimpl.ops import (add, attention, divide, einsum, gather, gelu_tanh, linear, matmul, mean, mul, repeat, reshape, scale,
                         scatter_add, softmax, sum, transpose, where)
from refimpl.parallel import (all_gather, all_to_all, all_to_all_rows, as_partial, broadcast, broadcast_from,
                              column_parallel_linear, copy_to, gather_from, reduce_from, ring_shift, row_parallel_linear,
                              scatter_to)

TP, CP = frozenset({"tp"}), frozenset({"cp"})
MESH = Mesh()


def cut(shape, axis, over="tp", name=""):
    """A value of this rank, cut over a mesh axis."""
    return Tensor(np.ones(shape), Layout(frozenset({over})), name=name, cut={over: axis})


def worked_along():
    for name, op in REGISTRY.items():
        case = next((c for c in CASES.get(name, []) if all(a is None or a.size for a in c.arrays)), None)
        if op.along and case:
            for number, a in enumerate(case.arrays):
                if a is not None and a.dtype.kind == "f":
                    yield pytest.param(op, case, number, id=f"{name}-{number}")


@pytest.mark.parametrize("op, case, number", list(worked_along()))
def test_an_op_refuses_the_axes_it_works_along_and_no_others(op, case, number):
    shape = case.arrays[number].shape
    along = op.along(case.static, len(shape), number)
    assert along, "an op that works along an axis says along which"
    for axis in range(len(shape)):
        args = [None if a is None else Tensor(a, Layout(TP) if a.dtype.kind == "f" else Layout()) for a in case.arrays]
        args[number] = Tensor(case.arrays[number], Layout(TP), cut={"tp": axis})
        if axis in along:
            with pytest.raises(LayoutError, match=f"{op.name} works along axis {axis} of .* which is cut over tp"):
                op(*args, **case.static)
        else:
            op(*args, **case.static)


def test_every_op_that_mixes_an_axis_says_so():
    """An op that neither works along an axis nor has a rule of its own treats elements alone: y_i depends on x_i only."""
    elementwise = {"add", "subtract", "mul", "divide", "where", "scale", "dropout", "exp", "log", "sqrt", "power", "tanh",
                   "sigmoid", "softplus", "erf", "gelu_erf", "gelu_tanh", "relu", "silu", "quick_gelu", "swiglu",
                   "stop_gradient", "straight_through"}
    assert {name for name in CASES if not REGISTRY[name].along and not REGISTRY[name].cut} == elementwise


def test_two_column_cuts_in_a_row_are_refused_on_one_rank_too():
    h = column_parallel_linear(cut((3, 4), 0, "dp"), cut((4, 6), 1))
    with pytest.raises(LayoutError, match="is cut by columns over tp, a weight is not cut by rows there"):
        linear(h, cut((6, 5), 1))


def test_sequence_parallel_rows_have_to_be_gathered_before_a_cut_weight():
    rows = scatter_to(Tensor(np.ones((1, 4, 3))), comm=MESH.tp, axis=1)
    with pytest.raises(LayoutError, match="is cut by rows over tp, and so is a weight, along another axis: all_gather"):
        linear(rows, cut((3, 6), 1))
    assert linear(all_gather(rows, comm=MESH.tp, axis=1), cut((3, 6), 1)).cut == {"tp": 2}


@pytest.mark.parametrize("sizes", [(3, 4, 4), (3, 4, 5), (4, 4, 4)])
def test_products_follow_their_letters_whatever_the_sizes(sizes):
    n, d, m = sizes
    x, w = cut((n, d), 1), cut((d, m), 0)
    for y in (matmul(x, w), einsum(x, w, spec="ab,bc->ac")):
        assert y.partial == TP and not y.cut
        with pytest.raises(LayoutError, match="reduce before a nonlinearity"):
            gelu_tanh(y)
    assert einsum(Tensor(np.ones((n, d))), cut((d, m), 1), spec="ab,bc->ca").cut == {"tp": 0}
    assert matmul(cut((n, d), 0), Tensor(np.ones((d, m)))).cut == {"tp": 0}
    heads = matmul(cut((2, n, d), 0), cut((2, d, m), 0))
    assert heads.cut == {"tp": 0} and not heads.partial
    with pytest.raises(LayoutError, match="its operands are cut over tp along different axes"):
        matmul(cut((n, d), 0), cut((d, m), 1))


def test_inputs_cut_along_different_axes_are_refused():
    with pytest.raises(LayoutError, match="by one input axis 0 of the output would be cut over tp, by another axis 1"):
        add(cut((4, 4), 0), cut((4, 4), 1))
    assert mul(cut((4, 4), 1), cut((4,), 0)).cut == {"tp": 1}               # right-aligned, as in broadcasting


def test_collectives_join_parts_along_the_axis_they_were_cut_along():
    h = cut((4, 2), 1)
    assert gather_from(h, comm=MESH.tp).shape == (4, 2)
    for join in (gather_from, all_gather):
        with pytest.raises(LayoutError, match="is cut over tp along axis 1: its parts cannot be joined along axis 0"):
            join(h, comm=MESH.tp, axis=0)
    with pytest.raises(LayoutError, match="is cut over tp along axis 1: its parts cannot be added up"):
        as_partial(h, comm=MESH.tp)


def test_all_to_all_moves_the_cut_from_one_axis_to_another():
    heads = all_to_all(cut((2, 4, 3, 5), 2, "cp"), comm=MESH.cp, split=1, join=2)
    assert heads.cut == {"cp": 1} and heads.layout == Layout(CP)
    assert all_to_all(heads, comm=MESH.cp, split=-2, join=-3).cut == {"cp": 2}
    both = Tensor(np.ones((4, 3, 2)), Layout(CP | TP), cut={"tp": 0, "cp": 1})
    assert all_to_all(both, comm=MESH.cp, split=2, join=1).cut == {"tp": 0, "cp": 2}        # tp's cut stays
    assert all_to_all(both, comm=MESH.cp, split=0, join=1).cut == {"tp": 0, "cp": 0}
    assert all_to_all(Tensor(np.ones((4, 3)), Layout(TP)), comm=MESH.tp, split=0, join=1).cut == {"tp": 0}
    with pytest.raises(LayoutError, match="is cut over cp along axis 1: its parts cannot be joined along axis 2, only"):
        all_to_all(heads, comm=MESH.cp, split=1, join=2)
    with pytest.raises(ValueError, match=r"over cp: split and join are both axis 1 of x\[2, 4, 3, 5\], but x is cut"):
        all_to_all(heads, comm=MESH.cp, split=1, join=-3)


def test_rows_that_have_changed_places_are_no_cut_of_the_whole():
    moved = all_to_all_rows(Tensor(np.ones((4, 3)), Layout(CP | TP), cut={"cp": 0, "tp": 1}), comm=MESH.cp, counts=[[4]])
    assert moved.cut == {"tp": 1} and moved.varies == CP | TP
    with pytest.raises(LayoutError, match="is cut over tp along axis 1: its parts cannot be joined along axis 0, only"):
        all_to_all_rows(cut((4, 3), 1), comm=MESH.tp, counts=[[4]])         # a part of each row
    with pytest.raises(LayoutError, match="the loss differs between the ranks over tp: reduce_from it first"):
        value_and_grad(lambda p: sum(all_to_all_rows(p["x"], comm=MESH.tp, counts=[[4]])), {"x": cut((4, 3), 0, name="x")})


def test_another_ranks_part_is_no_part_of_this_ranks():
    """So attention takes keys that went round the ring, though it works along the axis that they are cut along."""
    q, k, v = (cut((1, 2, 3, 4), 2, "cp") for _ in "qkv")
    with pytest.raises(LayoutError, match="attention works along axis 2"):
        attention(q, k, v)
    k, v = (ring_shift(a, comm=MESH.cp, sizes=(1,)) for a in (k, v))
    assert not k.cut and attention(q, k, v).cut == {"cp": 2}


def test_a_part_may_be_sent_to_all_but_is_not_the_whole():
    h = Tensor(np.ones((4, 2)), Layout(CP | TP), cut={"tp": 1, "cp": 0})
    assert broadcast(h, comm=MESH.tp).cut == {"cp": 0}                      # the blocks of a matrix product, in turn
    with pytest.raises(LayoutError, match="is cut over tp along axis 1: one rank holds a part only: gather_from joins them"):
        broadcast_from(h, comm=MESH.tp)
    assert broadcast_from(Tensor(np.ones(3), Layout(TP)), comm=MESH.tp).layout == Layout()


def test_a_column_cut_becomes_a_cut_of_heads_and_back():
    h = cut((2, 3, 8), 2)
    heads = reshape(h, shape=(2, 3, 4, 2))
    assert heads.cut == {"tp": 2} and transpose(heads, axes=(0, 2, 1, 3)).cut == {"tp": 1}
    assert reshape(heads, shape=(2, 3, 8)).cut == {"tp": 2} and reshape(h, shape=(6, 8)).cut == {"tp": 1}
    assert reshape(cut((2, 3, 2), 2), shape=(2, 3, 1, 2)).cut == {"tp": 2}  # one local head
    assert not reshape(cut((2, 3, 8), 1), shape=(6, 8)).cut                 # rows of every sample: scattered
    assert repeat(h, times=2, axis=1).cut == {"tp": 2}
    softmax(heads)                                                          # within a head
    with pytest.raises(LayoutError, match="mean works along axis 2"):
        mean(heads, axis=2)
    for lost in (reshape(cut((3, 4), 1), shape=(1, 3, 4)), reshape(heads, shape=(2, 3, 8))):
        with pytest.raises(LayoutError, match="softmax works along axis 2"):
            softmax(lost)


def test_attention_by_heads_by_groups_and_over_gathered_keys_is_accepted():
    for heads, groups in ((4, 4), (4, 2), (1, 1)):
        q, k, v = cut((1, heads, 3, 2), 1), cut((1, groups, 3, 2), 1), cut((1, groups, 3, 2), 1)
        assert attention(q, k, v).cut == {"tp": 1}
    part = cut((1, 2, 3, 2), 2, "cp")
    gathered = [all_gather(part, comm=MESH.cp, axis=2) for _ in "kv"]
    assert attention(part, *gathered).cut == {"cp": 2}      # context parallelism: queries are cut, keys are whole
    with pytest.raises(LayoutError, match="attention works along axis 2"):
        attention(part, part, part)


def test_rows_of_the_own_may_be_picked_and_added_up():
    rows, ids = cut((4, 3), 0), np.array([1, 1, 0, 3])
    assert not gather(rows, ids).cut and not scatter_add(rows, ids, n=5).cut
    assert gather(cut((4, 3), 1), ids).cut == {"tp": 1}


def test_partial_values_pass_linear_ops_whose_other_arguments_are_no_values():
    p = row_parallel_linear(cut((3, 4), 1), cut((4, 2), 0))
    condition = np.array([[True], [False], [True]])
    assert where(condition, p, scale(p, by=2.0)).partial == TP
    with pytest.raises(LayoutError, match="two inputs vary over tp and one is partial over it; reduce_from it first"):
        mul(p, cut((3, 2), 1))
    assert reduce_from(p, comm=MESH.tp).layout == Layout()
    with pytest.raises(LayoutError, match="reduce before a nonlinearity"):
        divide(p, Tensor(np.ones(2)))                   # nonlinear in b: scale by a number, or mul by 1/b


def test_a_loss_may_be_a_sum_over_rows_that_are_cut_over_cp():
    x = cut((3, 4), 0, "cp")
    loss, _ = value_and_grad(lambda p: sum(mul(x, linear(x, p["w"]))), {"w": Tensor(np.eye(4))})
    assert loss.partial == CP
    with pytest.raises(LayoutError, match="the loss is partial over tp"):
        value_and_grad(lambda p: sum(linear(copy_to(Tensor(np.ones((3, 4))), comm=MESH.tp), p["w"])),
                       {"w": cut((4, 2), 1, name="w")})
