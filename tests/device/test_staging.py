"""Localises copies between host and device that do not wait: stale numbers in a collective, pinned memory used again too early.

The double's streams are behind the host until it waits (stream.py), so a missing wait gives wrong numbers here.
"""
import numpy as np
import pytest
from device import double, stream

from refimpl.array import to_host
from refimpl.comm.device import fetched, returned, settle

VALUES = {
    "float64": np.arange(6.0).reshape(2, 3), "float32": np.arange(3, dtype="float32"), "int": np.array([-1, 2 ** 40]),
    "bool": np.array([True, False]), "a number": np.array(2.5), "empty": np.empty((0, 3)), "float16": np.ones(3, "float16"),
}


def late(values):
    """On the device, made by a stream that nobody has waited for."""
    with stream.Stream():
        return double.asarray(values)


def is_pinned(a):
    return id(a.base) in stream.pinned


@pytest.mark.parametrize("what", VALUES)
def test_an_array_is_fetched_when_it_is_made_and_into_pinned_memory(what):
    x = fetched(late(VALUES[what]))
    assert (x.shape, x.dtype, x.tobytes()) == (VALUES[what].shape, VALUES[what].dtype, VALUES[what].tobytes())
    assert type(x) is np.ndarray and x.flags.c_contiguous and is_pinned(x)


@pytest.mark.parametrize("what", VALUES)
def test_an_array_comes_back_before_its_pinned_memory_is_used_again(what):
    y = returned(VALUES[what], double.zeros(3, "float64"))
    assert double.__name__ == type(y).__module__ and not any(s.copies for s in stream.streams)
    assert to_host(y).tobytes() == VALUES[what].tobytes() and y.shape == VALUES[what].shape and y.dtype == VALUES[what].dtype


def test_views_are_fetched_and_returned_in_their_order():
    a = np.arange(24.0).reshape(2, 3, 4)
    for view in (lambda x: x.swapaxes(0, 2), lambda x: x[::-1, :, 1:3], lambda x: x[1, 2]):
        assert fetched(view(late(a))).tobytes() == view(a).tobytes()
        assert to_host(returned(view(a), late(a))).tobytes() == view(a).tobytes()


def test_what_was_written_late_is_fetched():
    x = double.asarray(np.zeros(3))
    settle(x)
    with stream.Stream():
        x[1:] = 5.0
        x[:2] += 1
    assert fetched(x).tolist() == [1, 6, 5]


def test_arrays_of_the_host_stay_as_they_are():
    x = np.arange(6.0).reshape(2, 3)
    assert fetched(x) is x and returned(x, x) is x
    assert fetched(x.T).flags.c_contiguous and fetched(x.T).tolist() == x.T.tolist()
    assert fetched(np.float64(2)).shape == () and type(fetched(np.float64(2))) is np.ndarray
    y = late(x)
    assert returned(y, y) is y, "it did not leave the device"


def test_an_array_comes_back_to_the_device_it_is_for():
    with stream.Device(1):
        x = late(np.ones(3))
    assert returned(np.ones(2), x).device.number == 1 and late(np.ones(2)).device.number == 0


def test_pinned_memory_is_given_back():
    before = len(stream.pinned)
    for _ in range(3):
        assert to_host(returned(fetched(late(np.ones(5))) + 1, late(np.ones(1)))).tolist() == [2.0] * 5
    assert len(stream.pinned) == before


@pytest.mark.parametrize("error", (RuntimeError("cudaErrorMemoryAllocation: out of memory"), MemoryError()))
def test_without_pinned_memory_ordinary_memory_serves(monkeypatch, error):
    def none_left(size):
        raise error
    monkeypatch.setattr(stream, "alloc_pinned_memory", none_left)
    x = fetched(late(np.arange(3.0)))
    assert x.tolist() == [0, 1, 2] and not is_pinned(x)
    assert to_host(returned(x, late(x))).tolist() == [0, 1, 2]


# -- the double's streams are behind ---------------------------------------------------------------------------------


def wrong(a, expected):
    return a.tobytes() != expected.tobytes()


def test_without_a_wait_the_host_sees_garbage():
    a = np.arange(3.0)
    assert wrong(late(a).get(), a), "get waits for the current stream only"
    x = double.asarray(a)
    assert not wrong(x.get(), a)
    out = np.empty(3)
    x.get(out=out, blocking=False)
    assert wrong(out, a)
    settle(x)
    assert not wrong(out, a)


def test_pinned_memory_that_is_freed_or_changed_before_the_copy_ends_spoils_it():
    a = np.arange(3.0)
    for spoil in (lambda host: host.fill(7), lambda host: None):
        host = np.ndarray(3, float, double.cuda.alloc_pinned_memory(24))
        host[:] = a
        x = double.empty(3, "float64")
        x.set(host)
        spoil(host)
        del host
        assert wrong(x.get(), a)
    host = a.copy()                                     # ordinary memory is read at once
    x.set(host)
    host[:] = 7
    assert not wrong(x.get(), a)


def test_an_array_cannot_be_handed_to_mpi_before_it_is_made():
    x = late(np.arange(3.0))
    with pytest.raises(AssertionError, match="before the device has done all work on it"):
        x.__cuda_array_interface__
    settle(x)
    assert x.__cuda_array_interface__["shape"] == (3,)
    x[0] = 1
    with pytest.raises(AssertionError):
        x.__cuda_array_interface__


def test_get_and_set_want_the_same_shape_and_dtype():
    x = double.zeros(3, "float64")
    for wrong_host in (np.zeros(2), np.zeros(3, "float32"), [0.0] * 3):
        with pytest.raises(TypeError):
            x.set(wrong_host)
        with pytest.raises(TypeError):
            x.get(out=wrong_host)


def test_streams_belong_to_threads(ranks):
    def on_rank(comm):
        with stream.Stream() as mine:
            assert stream.current() is mine
            x = late(np.full(3, float(comm.rank)))
            comm.barrier()
            assert fetched(x).tolist() == [comm.rank] * 3 and stream.current() is mine
    ranks.run(on_rank)
