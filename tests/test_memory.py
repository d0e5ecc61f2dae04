"""Localises memory that goes back to the system at every step, and a call that fails where there is no glibc."""
import subprocess
import sys

import pytest

from refimpl.memory import keep_memory

FAULTS = """
import resource
import numpy as np
from refimpl.memory import keep_memory
kept = {keep}
def work():
    for _ in range(3):
        np.ones(12_000_000)                             # 96 MB: above what malloc keeps by itself
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep):
    done = subprocess.run([sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_kept_memory_is_not_asked_for_again():
    """Three arrays of 96 MB: some 100 pages of 2 MB, or 70,000 of 4 kB; kept, next to none."""
    assert faults("keep_memory()") < 20 < faults("False")


def test_without_glibc_it_says_no(monkeypatch):
    monkeypatch.setattr("refimpl.memory.ctypes.CDLL", lambda name: object())
    assert keep_memory() is False
    monkeypatch.setattr("refimpl.memory.sys.platform", "darwin")
    assert keep_memory() is False
