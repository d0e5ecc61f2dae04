"""Localises checks that cannot fail: every kind of mistake is planted, and the sentence must name it.

The last part is the well-known argument about the gradient of an all-reduce, settled by naming layouts.
"""
import numpy as np
import pytest

from refimpl.autograd import Op
from refimpl.check import (check_adjoint, check_docstring, check_dtypes, check_op, check_purity, check_residuals, check_views,
                           check_vjp)
from refimpl.rng import draw

X = draw("x", (3, 4))
DOC = """Square.

    Equation:   y = x²
    Shapes:     x[...] -> y[...]
    VJP:        dx = 2·x·dy
    Residuals:  x
    Reference:  none needed
    """


def make(body, doc=DOC, **traits):
    """An op, not registered, from a function of arrays."""
    body.__doc__ = doc
    body.__name__ = "square"
    return Op(body, **traits)


def square(x):
    return x * x, lambda dy: 2 * x * dy


def test_a_right_op_passes():
    check_op(make(lambda x: square(x)), X)
    check_op(make(lambda x: square(x), analytic=False), X)
    check_vjp(square, X)                                # a plain function will do


def fails(check, body, *arrays, match, doc=DOC, **static):
    with pytest.raises(AssertionError, match="square:? " + match) as error:
        check(make(body, doc), *(arrays or (X,)), **static)
    assert "\n" not in str(error.value).partition("\nassert")[0], "one sentence"


# -- numbers ----------------------------------------------------------------------------------------------------------

def test_a_wrong_factor_is_named_with_both_numbers():
    fails(check_vjp, lambda x: (x * x, lambda dy: x * dy),
          match=r"argument 0, direction 0: <dy, J v> is \S+ by finite differences, <vjp\(dy\), v> is \S+; they differ by")


def test_one_wrong_element_is_found():
    def body(x):
        y, vjp = square(x)

        def wrong(dy):
            dx = vjp(dy)
            dx[1, 2] += 1e-9
            return dx
        return y, wrong
    fails(check_vjp, body, match=r"argument 0, .* by the complex step")
    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(make(body), X)


def test_finite_differences_alone_catch_one_part_in_100000():
    def body(x):
        return x * x, lambda dy: 2 * x * dy * (1 + 1e-5)
    with pytest.raises(AssertionError, match="finite differences"):
        check_vjp(make(body, analytic=False), X)


@pytest.mark.parametrize("factor", [1e-150, 1e-6, 1e6, 1e150])
def test_the_tolerance_follows_the_scale(factor):
    def scaled(wrong):
        return lambda x: (factor * (x * x), lambda dy: 2 * factor * x * dy * wrong)
    check_vjp(scaled(1.0), X)
    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(scaled(1.00001), X)


def test_a_vjp_that_is_not_linear_in_dy_is_found():
    """Right for the cotangent of the first test alone: its absolute value is off for others."""
    fails(check_vjp, lambda x: (x * x, lambda dy: 2 * x * dy + 1e-3 * dy * dy), match="argument 0")

    def clipped(x):
        return x * x, lambda dy: 2 * x * np.clip(dy, -1, 1)
    fails(check_vjp, clipped, match="the vjp is not linear in dy: argument 0 is off by")


def test_outputs_may_be_tuples_and_integers_are_skipped():
    def body(x, n):
        return (x * n, x * x, n * 2), lambda dy, dz, dn: (dy * n + 2 * x * dz, None)
    check_vjp(make(body), X, np.array(3))

    def loses_one(x, n):
        return (x * n, x * x, n * 2), lambda dy, dz, dn: (dy * n, None)
    fails(check_vjp, loses_one, X, np.array(3), match="argument 0")


def test_forms_of_the_answer_are_checked():
    fails(check_vjp, lambda a, b: (a * b, lambda dy: dy * b), X, X, match="the vjp gave 1 cotangents for 2 arguments")
    fails(check_vjp, lambda a, b: (a * b, lambda dy: (dy * b, None)), X, X, match="argument 1, direction 0")
    fails(check_vjp, lambda a, n: (a * n, lambda dy: (dy * n, dy * a)), X, np.array([1, 2, 3, 4]),
          match="argument 1 is no float array but got a cotangent")
    fails(check_vjp, lambda a, b: (a * b, lambda dy: (dy * b, dy * a)), X, draw("row", (4,)),
          match=r"the cotangent of argument 1 is float64\[3, 4\], the argument float64\[4\]")


# -- purity, dtypes, views --------------------------------------------------------------------------------------------

def test_writes_are_found():
    def to_argument(x):
        x *= 2
        return x * x, lambda dy: x * dy

    def to_dy(x):
        def vjp(dy):
            dy *= 2
            return x * dy
        return x * x, vjp

    def to_a_copy_of_its_own(x):
        y = x.copy()
        y *= x

        def vjp(dy):
            dx = 2 * dy
            dx *= x
            return dx
        return y, vjp
    fails(check_vjp, to_argument, match="writes to an argument: .*read-only")
    fails(check_vjp, to_dy, match="writes to dy or a residual: .*read-only")
    check_op(make(to_a_copy_of_its_own), X)


def test_a_write_only_where_it_is_possible_is_found():
    def sly(x):
        y, vjp = square(x)
        if x.flags.writeable:
            x[0] = 0
        return y, vjp
    fails(check_purity, sly, match="writes to an argument")


def test_aliases_are_found():
    fails(check_purity, lambda x: (x, lambda dy: dy), match="output 0 is argument 0 itself")
    fails(check_purity, lambda x: (x[::-1], lambda dy: dy[::-1]), match="output 0 shares memory with argument 0")
    check_purity(make(lambda x: (x[::-1], lambda dy: dy[::-1]), DOC.replace("x²", "x reversed (a view)")), X)


def test_a_call_that_depends_on_earlier_calls_is_found():
    calls = []

    def counts(x):
        calls.append(1)
        return x * len(calls), lambda dy: dy * len(calls)

    def uses_up(x):
        g = 2 * x

        def vjp(dy):
            g[...] = g * dy
            return g
        return x * x, vjp
    fails(check_purity, counts, match="the same call twice gives different values")
    fails(check_purity, uses_up, match="the same call twice gives different values")


def test_promotion_is_found():
    half = np.float64(0.5)
    fails(check_dtypes, lambda x: (x * half, lambda dy: dy * half), match="float32 arguments gave a float64 output 0")
    fails(check_dtypes, lambda x, by=1.0: (x * by, lambda dy: dy * by), match="float32 arguments gave a float64", by=0.5)
    fails(check_dtypes, lambda x: (x * 0.5, lambda dy: dy * half), match="the cotangent of argument 0 is float64")
    check_dtypes(make(lambda x, by=1.0: (x * float(by), lambda dy: dy * float(by))), X, by=0.5)


def test_lost_precision_is_found():
    def half(x):
        y, vjp = square(x)
        return (y.astype(np.float16).astype(x.dtype) if x.dtype == np.float32 else y), vjp
    fails(check_dtypes, half, match=r"result 0 \(outputs, then cotangents\) in float32 is off by")


def test_memory_order_that_matters_is_found():
    def memory_order(x):
        return x.ravel(order="K").reshape(x.shape) ** 2, lambda dy: 2 * x * dy
    fails(check_views, memory_order, match=r"result 0 \(outputs, then cotangents\) of transposed arrays is off by")


# -- documents --------------------------------------------------------------------------------------------------------

def test_a_docstring_without_a_section_is_found():
    for section in ("Equation", "Shapes", "VJP", "Residuals", "Reference"):
        lines = [line for line in DOC.splitlines() if not line.strip().startswith(section)]
        with pytest.raises(AssertionError, match=f"square: the docstring lacks {section}$"):
            check_docstring(make(square, "\n".join(lines)))
    with pytest.raises(AssertionError, match="lacks Equation, Shapes, VJP, Residuals, Reference"):
        check_docstring(make(square, None))


@pytest.mark.parametrize("line, right", [("x", True), ("x (the input, not y)", True), ("none", False), ("x, y", False),
                                         ("y", False), ("x²", False)])
def test_residuals_are_those_of_the_docstring(line, right):
    document = DOC.replace("Residuals:  x", f"Residuals:  {line}")
    if right:
        check_residuals(make(square, document), X)
    else:
        with pytest.raises(AssertionError, match="square: the vjp keeps x, the docstring says"):
            check_residuals(make(square, document), X)


def test_a_residual_in_a_helper_or_a_tuple_is_seen():
    def hidden(x):
        pair = (x, 3)

        def inner(dy):
            return 2 * pair[0] * dy
        return x * x, lambda dy: inner(dy)
    with pytest.raises(AssertionError, match=r"the vjp keeps pair\[0\], the docstring says none"):
        check_residuals(make(hidden, DOC.replace("Residuals:  x", "Residuals:  none")), X)


# -- collectives ------------------------------------------------------------------------------------------------------

NO_RESIDUALS = DOC.replace("Residuals:  x", "Residuals:  none")


def all_reduce_with(backward):
    def body(x, comm=None):
        y = comm.all_reduce(x).view()
        return y, (lambda dy: comm.all_reduce(dy)) if backward == "all_reduce" else (lambda dy: dy)
    return make(body, NO_RESIDUALS, linearity="each", collective=True)


def identity_with(backward):
    def body(x, comm=None):
        return x.view(), (lambda dy: comm.all_reduce(dy)) if backward == "all_reduce" else (lambda dy: dy)
    return make(body, NO_RESIDUALS, linearity="each", collective=True)


LAYOUT_DECIDES = [(all_reduce_with, "partial", "replicated", "identity"),
                  (all_reduce_with, "per_rank", "per_rank", "all_reduce"),
                  (identity_with, "replicated", "per_rank", "all_reduce"), (identity_with, "per_rank", "per_rank", "identity"),
                  (identity_with, "replicated", "replicated", "identity"), (identity_with, "partial", "partial", "identity")]


@pytest.mark.parametrize("op, before, after, right", LAYOUT_DECIDES)
def test_the_layouts_decide_what_the_gradient_is(ranks, op, before, after, right):
    """The same forward has two right gradients: which one depends on the layouts, and the check refuses the other."""
    def on_rank(comm):
        shared = before == "replicated"
        x = draw("x" if shared else f"x{comm.rank}", (2, 3))
        check_adjoint(op(right), comm, before, after, x)
        wrong = {"identity": "all_reduce", "all_reduce": "identity"}[right]
        if comm.size > 1:                               # with one rank both are the identity
            with pytest.raises(AssertionError, match=rf"square on {comm.size} ranks: rank 0: .*") as error:
                check_adjoint(op(wrong), comm, before, after, x)
            return str(error.value)
    ranks.run(on_rank)


def test_a_missing_f_is_named_on_every_rank(ranks):
    def on_rank(comm):
        if comm.size == 1:
            return
        with pytest.raises(AssertionError) as error:
            check_adjoint(identity_with("identity"), comm, "replicated", "per_rank", draw("x", (2, 3)))
        text = str(error.value)
        assert "argument 0, replicated -> per_rank: <dy, J v> is" in text
        assert "cotangent 0 should be equal on all ranks and is not" in text
        assert comm.gather_texts(text) == [text] * comm.size, "every rank says the same"
    ranks.run(on_rank)


def test_a_mistake_on_one_rank_alone_is_found(ranks):
    def on_rank(comm):
        def body(x, comm=None):
            return x.view(), lambda dy: comm.all_reduce(dy) * (1 + (comm.rank == comm.size - 1) * 1e-6)
        with pytest.raises(AssertionError, match="square on"):
            check_adjoint(make(body, NO_RESIDUALS, linearity="each"), comm, "replicated", "per_rank", draw("x", (2, 3)))
    ranks.run(on_rank)


def test_an_output_that_is_the_argument_is_found(ranks):
    def on_rank(comm):
        op = make(lambda x, comm=None: (x, lambda dy: comm.all_reduce(dy)), NO_RESIDUALS, linearity="each")
        with pytest.raises(AssertionError, match="output 0 is argument 0 itself"):
            check_adjoint(op, comm, "replicated", "per_rank", draw("x", (2, 3)))
    ranks.run(on_rank)


def test_nonlinear_collectives_are_checked_by_differences(ranks):
    """y = (Σ_r x_r)²: Partial -> Replicated, dx_r = 2·Σ x·dy."""
    def on_rank(comm):
        def body(factor):
            def square(x, comm=None):
                total = comm.all_reduce(x)
                return total * total, lambda dy: factor * total * dy
            return make(square, DOC.replace("Residuals:  x", "Residuals:  total"))
        x = draw(f"x{comm.rank}", (2, 3))
        check_adjoint(body(2), comm, "partial", "replicated", x)
        with pytest.raises(AssertionError, match="argument 0, partial -> replicated"):
            check_adjoint(body(2.01), comm, "partial", "replicated", x)
    ranks.run(on_rank)
