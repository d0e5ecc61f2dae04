"""Localises wrong vjps, dtypes, writes, aliases and residuals: the same checks for every op that exists, none can escape.

Whether y itself is right is worked out by hand in the other modules here.
"""
import importlib
import pkgutil

import numpy as np
import pytest

import refimpl.parallel
from refimpl import array
from refimpl.autograd import REGISTRY, Op, op
from refimpl.cases import CASES, COLLECTIVES, ON_RANKS, unchecked
from refimpl.check import check_adjoint, check_op, check_vjp
from refimpl.rng import draw

ALL_CASES = [pytest.param(REGISTRY[name], case, id=f"{name}-{case.name}") for name, cases in CASES.items() for case in cases]
FLOAT_ARGUMENTS = [pytest.param(REGISTRY[name], k, id=f"{name}-{k}") for name, cases in CASES.items()
                   if not REGISTRY[name].surrogate          # these are worked by hand in test_shaping.py
                   for k, a in enumerate(cases[0].arrays) if a.dtype.kind == "f"]


def test_every_op_has_cases():
    for module in pkgutil.walk_packages(refimpl.__path__, "refimpl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)        # registers every op, also one that nothing imports yet
    assert unchecked() == []
    assert set(CASES) | set(ON_RANKS) <= set(REGISTRY)


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


@pytest.mark.parametrize("elements", [1, 4, 7])
@pytest.mark.parametrize("op, case", ALL_CASES)
def test_an_op_computed_part_by_part_is_the_same(monkeypatch, op, case, elements):
    """Cases are smaller than what a cache holds; here the cache holds a few elements."""
    y, vjp = op.array(*case.arrays, **case.static)
    monkeypatch.setattr(array, "CACHED", elements)
    parts, vjp_of_parts = op.array(*case.arrays, **case.static)
    ys, parts = (y, parts) if type(y) is tuple else ((y,), (parts,))
    dys = [draw(f"dy{k}", np.shape(a), dtype=str(a.dtype)) if a.dtype.kind == "f" else None for k, a in enumerate(ys)]
    dxs, of_parts = (dx if type(dx) is tuple else (dx,) for dx in (vjp(*dys), vjp_of_parts(*dys)))
    for a, b in zip((*ys, *dxs), (*parts, *of_parts)):
        assert a is None and b is None or (a.shape == b.shape and a.dtype == b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15) if a is not None else None


@pytest.mark.parametrize("name, dtype", [(name, dtype) for name in sorted(ON_RANKS) for dtype in ("float64", "float32")
                                         if dtype == "float64" or REGISTRY[name].linearity])     # else by differences
def test_collective_is_the_adjoint_of_its_vjp_on_all_ranks(ranks, name, dtype):
    def on_rank(comm):
        for case in ON_RANKS[name]:
            arrays, static = case.arguments(comm, dtype)
            check_adjoint(REGISTRY[name], comm, case.before, case.after, *arrays, **static)
    ranks.run(on_rank)


@pytest.mark.parametrize("mistaken_rank", ["all", "last"])
@pytest.mark.parametrize("name", sorted(ON_RANKS))
def test_a_planted_mistake_in_a_collective_is_caught(ranks, name, mistaken_rank):
    def on_rank(comm):
        def wrong(x, *ids, comm=None, **static):
            y, vjp = REGISTRY[name].array(x, *ids, comm=comm, **static)
            mistaken = mistaken_rank == "all" or comm.rank == at

            def wrong_vjp(*dy):
                dx = vjp(*dy)
                factor = dx[0].dtype.type(1.01 if mistaken else 1) if ids else 1.01 if mistaken else 1
                return (dx[0] * factor, *dx[1:]) if ids else dx * factor
            return y, wrong_vjp
        wrong.__doc__ = REGISTRY[name].__doc__
        case = ON_RANKS[name][0]
        arrays, static = case.arguments(comm, "float64")
        at = max(r for r, n in enumerate(comm.gather_texts(str(arrays[0].size))) if n != "0")   # the last that has something
        with pytest.raises(AssertionError, match=f"wrong on {comm.size} ranks: rank "):
            check_adjoint(Op(wrong, linearity=REGISTRY[name].linearity), comm, case.before, case.after, *arrays, **static)
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
