"""Localises uses of numpy that are not in the table of what cupy has too (refimpl/xptable.py), and entries nobody uses."""
import ast
from pathlib import Path

import numpy as np
import pytest
from device import double, suite

import refimpl
from refimpl import ops, xptable
from refimpl.array import to_host
from refimpl.autograd import Count, Guard, Tensor, value_and_grad
from refimpl.comm import Mesh, run_threads
from refimpl.comm.device import fetched, returned
from refimpl.models import init
from refimpl.rng import integers

ROOT = Path(refimpl.__file__).parent
FILES = [ROOT / "rng.py", ROOT / "array.py", ROOT / "comm/device.py", ROOT / "comm/direct.py"] + [
    path for part in ("ops", "parallel", "autograd", "models", "train", "generate")
    for path in sorted((ROOT / part).rglob("*.py"))]
BOTH = {**xptable.FUNCTIONS, **xptable.UFUNCS}
MODULE_LEVEL = {**BOTH, **xptable.DEVICE_FUNCTIONS}


def uses(tree):
    """Of `xp.name` and `xp_of(..).name`: the dotted name, and its call or None."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name, base = [], node
        while isinstance(base, ast.Attribute):
            name.insert(0, base.attr)
            base = base.value
        is_xp = isinstance(base, ast.Name) and base.id == "xp" or \
            isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "xp_of"
        if name and is_xp and id(node) not in inner:
            yield ".".join(name), calls.get(id(node)), node.lineno


def test_every_use_of_xp_is_in_the_table_and_every_function_there_is_used():
    found = set()
    for path in FILES:
        for name, call, line in uses(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT.parent)}:{line} uses xp.{name}"
            assert name in MODULE_LEVEL or name in xptable.CONSTANTS, f"{where}, which is not in refimpl/xptable.py"
            found.add(name)
            if call is not None and name in MODULE_LEVEL:
                assert not any(k.arg is None for k in call.keywords), f"{where} with **: its keywords cannot be read"
                if not any(isinstance(a, ast.Starred) for a in call.args):
                    double.bind(f"{where}: {name}", MODULE_LEVEL[name], len(call.args), [k.arg for k in call.keywords])
    assert found == set(MODULE_LEVEL) | set(xptable.CONSTANTS)


def test_a_use_outside_the_table_is_found():
    tree = ast.parse("y = xp_of(x).exp(x, where=x > 0)\nz = xp.fft.rfft(x)\nf = xp.linalg.norm\nxp.zeros(3).cbrt\nnp.cbrt(x)")
    assert sorted((name, call is not None) for name, call, _ in uses(tree)) == [
        ("exp", True), ("fft.rfft", True), ("linalg.norm", False), ("zeros", True)]
    with pytest.raises(TypeError, match=r"exp\(x1, \*, out\) is what both .*, got 1 arguments by position and where"):
        double.bind("exp", MODULE_LEVEL["exp"], 1, ["where"])


def everything():
    """All that the package does with device arrays."""
    for op, case in suite.case_names():
        for dtype in ("float64", "float32"):
            suite.check_case(double, op, case, dtype)
    suite.check_decoder(double, "float64")
    init(suite.CONFIG, Mesh(), seed=0, xp=double)
    integers(0, double.asarray(np.arange(3)), 5)
    with Count(), Guard():
        value_and_grad(lambda p: ops.sum(ops.embedding(p["w"], double.asarray(np.array([1, 0])))),
                       {"w": Tensor(double.asarray(np.eye(3)))})
    run_threads(2, lambda comm: comm.all_reduce(double.asarray(np.arange(3))))
    returned(fetched(double.asarray(np.arange(3))), double.asarray(np.eye(3)))
    to_host(double.asarray(np.eye(3)))
    suite.check_bfloat16(double)


def test_every_method_operator_and_argument_of_the_table_is_used():
    table = {*xptable.CONSTANTS, *xptable.ATTRIBUTES, *xptable.BINARY, *xptable.REFLECTED, *xptable.IN_PLACE, *xptable.OTHERS,
             *xptable.DEVICE_ATTRIBUTES}
    for name, signature in {**MODULE_LEVEL, **double.METHODS}.items():
        table |= {name, *(f"{name}({key})" for key in double.parameters(signature)[1])}
    double.used.clear()
    everything()
    assert double.used <= table | set(xptable.COMPARISONS)
    assert not table - double.used, f"nothing uses {sorted(table - double.used)}: take them out of refimpl/xptable.py"


def test_numpy_has_every_entry():
    for name in [*BOTH, *xptable.CONSTANTS]:
        module, _, last = name.rpartition(".")
        assert hasattr(getattr(np, module) if module else np, last)
    assert all(hasattr(np.ndarray, name) for name in [*xptable.METHODS, *xptable.ATTRIBUTES])
    assert all(hasattr(np.ndarray, f"__{name}__") for name in (
        *xptable.BINARY, *xptable.COMPARISONS, *xptable.REFLECTED, *xptable.IN_PLACE, *xptable.OTHERS))
