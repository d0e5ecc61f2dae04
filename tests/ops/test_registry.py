"""Localises wrong vjps, dtypes, writes, aliases and residuals: the same checks for every op that exists, none can escape.

Whether y itself is right is worked out by hand in the other modules here.
"""
import importlib
import pkgutil

import numpy as np
import pytest

import refimpl.parallel
from refimpl.autograd import REGISTRY, Op, op
from refimpl.cases import CASES, COLLECTIVES, unchecked
from refimpl.check import check_adjoint, check_op, check_vjp

ALL_CASES = [pytest.param(REGISTRY[name], case, id=f"{name}-{case.name}") for name, cases in CASES.items() for case in cases]
FLOAT_ARGUMENTS = [pytest.param(REGISTRY[name], k, id=f"{name}-{k}") for name, cases in CASES.items()
                   if not REGISTRY[name].surrogate          # these are worked by hand in test_shaping.py
                   for k, a in enumerate(cases[0].arrays) if a.dtype.kind == "f"]


def test_every_op_has_cases():
    for module in pkgutil.walk_packages(refimpl.__path__, "refimpl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)        # registers every op, also one that nothing imports yet
    assert unchecked() == []
    assert set(CASES) | set(COLLECTIVES) <= set(REGISTRY)


def test_an_op_without_cases_is_found(monkeypatch):
    def forgotten(x):
        return x, lambda dy: dy

    def forgotten_collective(x, comm=None):
        return x, lambda dy: dy

    forgotten.__module__ = forgotten_collective.__module__ = "refimpl.parallel.somewhere"
    try:
        op(forgotten), op(forgotten_collective, collective=True)
        assert unchecked() == ["forgotten", "forgotten_collective"]
        monkeypatch.setitem(CASES, "forgotten_collective", CASES["add"])
        assert unchecked() == ["forgotten", "forgotten_collective"], "cases of a pure op must not excuse a collective"
        monkeypatch.setitem(COLLECTIVES, "forgotten_collective", COLLECTIVES["copy_to"])
        monkeypatch.setitem(CASES, "forgotten", [])
        assert unchecked() == ["forgotten"], "an empty list of cases is no excuse"
    finally:
        REGISTRY.pop("forgotten"), REGISTRY.pop("forgotten_collective")


@pytest.mark.parametrize("op, case", ALL_CASES)
def test_op_passes_every_check(op, case):
    check_op(op, *case.arrays, **case.static)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_collective_is_the_adjoint_of_its_vjp_on_all_ranks(ranks, name, dtype):
    def on_rank(comm):
        for case in COLLECTIVES[name]:
            x, static = case.arguments(comm, dtype)
            check_adjoint(REGISTRY[name], comm, case.before, case.after, x, **static)
    ranks.run(on_rank)


@pytest.mark.parametrize("mistaken_rank", ["all", "last"])
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_a_planted_mistake_in_a_collective_is_caught(ranks, name, mistaken_rank):
    def on_rank(comm):
        def wrong(x, comm=None, **static):
            y, vjp = REGISTRY[name].array(x, comm=comm, **static)
            mistaken = mistaken_rank == "all" or comm.rank == comm.size - 1
            return y, lambda dy: vjp(dy) * (1.01 if mistaken else 1)
        wrong.__doc__ = REGISTRY[name].__doc__
        case = COLLECTIVES[name][0]
        x, static = case.arguments(comm, "float64")
        with pytest.raises(AssertionError, match=f"wrong on {comm.size} ranks: rank "):
            check_adjoint(Op(wrong, linearity="each"), comm, case.before, case.after, x, **static)
    ranks.run(on_rank)


def planted(op, k, change):
    """`op` with a mistake: cotangent k of its vjp goes through `change`."""
    def wrong(*arrays, **static):
        y, vjp = op.array(*arrays, **static)

        def wrong_vjp(*dy):
            dxs = vjp(*dy)
            dxs = list(dxs) if isinstance(dxs, tuple) else [dxs]
            dxs[k] = change(dxs[k])
            return tuple(dxs)
        return y, wrong_vjp
    wrong.analytic, wrong.linearity = op.analytic, op.linearity
    return wrong


def larger(dx):
    return dx * dx.dtype.type(1.01)


def slightly_larger(dx):
    return dx * dx.dtype.type(1 + 1e-9)


def lost(dx):
    return np.zeros_like(dx)


def back_to_front(dx):
    return np.flip(dx)


def without_its_last_element(dx):
    dx = dx.copy()
    dx.flat[-1:] = 0
    return dx


@pytest.mark.parametrize("change", [larger, slightly_larger, lost, back_to_front, without_its_last_element])
@pytest.mark.parametrize("op, k", FLOAT_ARGUMENTS)
def test_a_planted_mistake_is_caught(op, k, change):
    for case in CASES[op.name]:
        y, vjp = op.array(*case.arrays, **case.static)
        ys = y if isinstance(y, tuple) else (y,)
        dxs = vjp(*(np.linspace(1, 2, a.size).reshape(a.shape) for a in map(np.asarray, ys)))
        dx = np.asarray((dxs if isinstance(dxs, tuple) else (dxs,))[k])
        if dx.size and np.abs(change(dx) - dx).max() > 1e-10 * np.abs(dx).max():    # elsewhere the mistake changes nothing
            with pytest.raises(AssertionError, match=f"argument {k}"):
                check_vjp(planted(op, k, change), *case.arrays, **case.static)
            return
    pytest.fail(f"no case of {op.name} can show this mistake")
