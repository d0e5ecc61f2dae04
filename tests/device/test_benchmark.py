"""Localises a GPU benchmark that no longer runs, or counts wrongly.  Here on the CPU, in a tiny size."""
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_it_runs_on_numpy_and_counts_bytes_and_flops():
    done = run("--device", "numpy", "--size", "tiny", "--rounds", "3")
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert sum("measured ceilings: copy" in line for line in lines) == 2, "float32 and float64"
    rows = {line[:22].strip(): line[22:].replace(" -", " ").split() for line in lines if line[22:32].strip()[:1].isdigit()}
    assert len(rows) == 2 * 18
    for name, (ms, low, high, bandwidth, *_) in rows.items():
        assert 0 <= float(low) <= float(ms) <= float(high), name
        assert bandwidth == "view" or float(bandwidth) > 0, name
    assert {name for name, row in rows.items() if row[3] == "view"} == {"add vjp", "sum vjp", "transpose", "transpose vjp"}
    products = ("linear", "linear up", "linear head", "attention")
    assert {name for name, row in rows.items() if len(row) == 7} == {f"{op}{what}" for op in products for what in ("", " vjp")}


def test_what_it_cannot_do_is_a_sentence():
    done = run("nonsense", "--device", "numpy")
    assert done.returncode == 2 and "no op is called nonsense; there are linear, " in done.stderr
    done = run("--device", "tpu")
    assert done.returncode == 2 and "device 'tpu' is not supported: use one of numpy, cupy" in done.stderr
