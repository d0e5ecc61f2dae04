"""Localises faults of --device cupy: the wrong GPU for a rank, a traceback where a sentence is due, arrays left on the host.

The double stands in for cupy.
"""
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from device import double

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.array import device_module
from refimpl.comm import local_rank


class FakeCupy(SimpleNamespace):
    """cupy with two GPUs, whose arrays are the double's."""

    def __init__(self, gpus):
        self.chosen = []
        super().__init__(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: gpus()), Device=self.device))

    def device(self, number):
        return SimpleNamespace(use=lambda: self.chosen.append(number))

    def __getattr__(self, name):
        return getattr(double, name)


def no_gpu():
    raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected\nmore")


def test_ranks_take_the_gpus_in_turn(ranks, monkeypatch):
    fake = FakeCupy(lambda: 2)
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def on_rank(comm):
        assert local_rank(comm) == comm.rank            # all ranks of the tests are on one machine
        assert device_module("cupy", local_rank(comm)) is fake
        assert comm.rank % 2 in fake.chosen
    ranks.run(on_rank)


def test_without_cupy_or_a_gpu_there_is_a_sentence(monkeypatch):
    assert device_module("numpy") is np
    with pytest.raises(ValueError, match="device 'tpu' is not supported: use one of numpy, cupy"):
        device_module("tpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=r"needs the package cupy .*: pip install '\.\[gpu\]'"):
        device_module("cupy")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(no_gpu))
    with pytest.raises(ValueError, match="needs a GPU, and cupy finds none: cudaErrorNoDevice: no CUDA-capable device is det"):
        device_module("cupy")


def test_train_on_a_device_writes_the_bits_of_numpy(monkeypatch, tmp_path):
    fake = FakeCupy(lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    tiny = "--no-bar --d-model 8 --n-layers 1 --steps 2 --batch-size 4 --seq-len 8 --sample 5 --dropout 0.1".split()
    for device in ("numpy", "cupy"):
        where = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / device), "--device", device]
        assert main(["train", *where, *tiny]) == 0
    assert fake.chosen == [0]
    for file in ("params", "grads_first", "grads_last"):
        a, b = (tensorfile.read(tmp_path / device / f"{file}.safetensors") for device in ("numpy", "cupy"))
        assert set(a) == set(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)
