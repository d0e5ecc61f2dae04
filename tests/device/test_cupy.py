"""Localises entries of the table that the real cupy does not have.  Needs the package cupy and no GPU: make test-gpu-check."""
import inspect
import re
from operator import attrgetter

import numpy as np
import pytest
from device import double

from refimpl import xptable
from refimpl.comm.device import pinned

pytestmark = pytest.mark.gpu_check


def signature(function):
    """The parameter names in order.  Methods written in Cython say them in the first line of their docstring."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        line = function.__doc__.strip().splitlines()[0]
        inside = line[line.index("(") + 1:line.rindex(")")]
        names = [part.partition("=")[0].split()[-1] for part in inside.split(",") if part.strip() not in ("/", "\\*", "")]
    return [n for n in names if n != "self"]


@pytest.mark.parametrize("name", double.FUNCTIONS)
def test_function_takes_what_the_table_says(cupy, name):
    by_position, every = double.parameters(double.FUNCTIONS[name])
    names = signature(attrgetter(name)(cupy))
    if name == "einsum":                                # einsum(*operands, **kwargs)
        assert names == ["operands", "kwargs"]
        return
    assert names[:len(by_position)] == by_position, f"cupy.{name}{names}"
    assert set(every) <= set(names), f"cupy.{name}{names}"


@pytest.mark.parametrize("name", xptable.UFUNCS)
def test_ufunc_has_as_many_arguments_and_no_where(cupy, name):
    by_position, every = double.parameters(xptable.UFUNCS[name])
    ufunc = getattr(cupy, name)
    assert isinstance(ufunc, cupy.ufunc) and ufunc.nin == len(by_position) and ufunc.nout == 1
    line = ufunc.__doc__.strip().splitlines()[0]
    assert set(every) - set(by_position) <= set(re.findall(r"\w+", line)), line
    assert "where" not in line, "cupy's ufuncs have where= by now: say so in refimpl/xptable.py"


@pytest.mark.parametrize("name", double.METHODS)
def test_method_takes_what_the_table_says(cupy, name):
    by_position, every = double.parameters(double.METHODS[name])
    names = signature(getattr(cupy.ndarray, name))
    if double.METHODS[name] == "*shape":
        assert "*shape" in names
        return
    if name == "transpose":                             # transpose(*axes) takes one tuple, too
        by_position, every = ["*axes"], ["*axes"]
    assert names[:len(by_position)] == by_position and set(every) <= set(names), f"cupy.ndarray.{name}{names}"


def test_attributes_operators_and_constants_exist(cupy):
    operators = (*xptable.BINARY, *xptable.COMPARISONS, *xptable.REFLECTED, *xptable.IN_PLACE, *xptable.OTHERS)
    names = (*xptable.ATTRIBUTES, *xptable.DEVICE_ATTRIBUTES, *(f"__{o}__" for o in operators))
    missing = [name for name in names if not hasattr(cupy.ndarray, name)]
    assert not missing
    assert cupy.inf == np.inf and cupy.uint64 is np.uint64


def test_what_the_table_says_cupy_lacks_it_lacks(cupy):
    for reduction in ("sum", "max"):
        assert not {"initial", "where"} & set(signature(getattr(cupy.ndarray, reduction)))
    assert not hasattr(cupy, "longdouble")


def test_an_array_names_its_module_and_is_fetched_and_watched(cupy):
    """What array.py and frames.py take for granted."""
    assert cupy.ndarray.__module__ == "cupy" and hasattr(cupy.ndarray, "get") and hasattr(cupy.ndarray, "__array_priority__")
    assert cupy.ndarray.__weakrefoffset__, "weakref.finalize needs it"
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)


def test_the_way_to_the_host_and_to_mpi_is_there(cupy):
    """What comm/device.py and direct.py take for granted beside the table."""
    assert all(hasattr(cupy.cuda.Device, name) for name in ("synchronize", "__enter__", "__exit__"))
    assert "blocking (bool): If set to ``False``, the copy runs asynchronously" in cupy.ndarray.get.__doc__
    assert hasattr(cupy.ndarray, "__cuda_array_interface__") and hasattr(cupy.ndarray, "__dlpack__")
    nothing = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(0), 0)
    assert memoryview(nothing).nbytes == 0 and not memoryview(nothing).readonly, "numpy makes arrays on it"


def test_where_pinned_memory_cannot_be_had_ordinary_memory_serves(cupy):
    """Without a GPU there is none: the very error that a full machine gives."""
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU, and pinned memory")
    assert pinned(cupy, (2, 3), np.dtype("float32")).shape == (2, 3)
