"""Localises programs that --trace changes, hangs or fails, and a failure that it hides."""
import sys
from collections import Counter

import pytest

from .programs import QUICK, execute
from .timeline import line_up, read

PROGRAM = """
'''Sum, and fail on rank 1 where told to.'''
import os
import numpy as np
from refimpl.comm import launch

def main(comm):
    print("computing")
    comm.all_reduce(np.ones(3))
    if comm.rank == 1 and "PLANTED" in os.environ:
        raise RuntimeError("planted on rank 1")
    comm.all_reduce(np.ones(3))

if __name__ == "__main__":
    launch(main, ranks=(2,))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.fixture(params=("threads", "mpirun"))
def start(request, program):
    """Run the program on two ranks."""
    if request.param == "threads":
        return lambda *arguments, **env: execute([sys.executable, str(program), "--simulate", "2", *arguments], **env)
    mpirun = request.getfixturevalue("mpirun")
    return lambda *arguments, **env: mpirun(program, *arguments, **env)


def test_every_program_can_be_traced(start, tmp_path):
    code, out, err, _ = start("--trace", str(tmp_path / "new" / "t.json"))
    assert (code, err) == (0, ""), err
    assert f"trace: {tmp_path}/new/t.json, 4 spans of 2 ranks: open it at ui.perfetto.dev" in out.splitlines()
    rows, other = read((tmp_path / "new" / "t.json").read_text())
    assert {name: [s["name"] for s in row] for name, row in rows.items()} == {f"rank {r}": ["all_reduce"] * 2 for r in (0, 1)}
    assert [row["elements"] for rank in other["ledger"] for row in rank] == [6, 6]
    line_up(rows, 2, other["clock_error_us"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.json"]


@pytest.mark.parametrize("file, why", (
    ("/proc/t.json", "No such file or directory"), ("/dev/null", "it is there, and not a file"),
    ("program.py/t.json", "Not a directory"), (".", "it is there, and not a file")))
def test_a_file_that_cannot_be_written_is_one_sentence_before_anything_is_computed(start, tmp_path, file, why):
    place = tmp_path / file
    code, out, err, _ = start("--trace", str(place))
    assert code != 0 and out == "" and "Traceback" not in err
    assert err.count(f"program.py: the trace cannot be written to {place}: {why}\n") == 1


def test_a_program_that_fails_says_why_and_ends(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", "1")
    code, out, err, seconds = start("--trace", str(tmp_path / "t.json"))
    assert code != 0 and "planted on rank 1" in err and "trace:" not in out and seconds < QUICK
    assert not list(tmp_path.glob("t.json*"))


def test_training_traces_its_first_steps(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    small = "--d-model 8 --n-layers 1 --steps 5 --batch-size 4 --seq-len 8 --sample 5 --no-bar".split()
    code, out, err, _ = execute([sys.executable, "-m", "refimpl", "train", "--text", str(tmp_path / "text"), *small,
                                 "--trace", str(tmp_path / "t.json")])
    assert (code, err) == (0, ""), err
    row = read((tmp_path / "t.json").read_text())[0]["rank 0"]
    calls = Counter((s["name"], s["cat"]) for s in row)
    assert calls["layers.0.attn.q", "op"] == calls["layers.0.attn.q", "backward"] == calls["divide_by_count", "seam"] == 3
    assert row[-1]["name"] == "adamw" and calls["adamw", "seam"] % 3 == 0
    assert out.count(f"trace: {tmp_path}/t.json, {len(row)} spans of 1 rank: open it at ui.perfetto.dev\n") == 1


def test_training_says_at_once_that_it_cannot_write(tmp_path):
    code, out, err, _ = execute([sys.executable, "-m", "refimpl", "train", "--trace", str(tmp_path)])
    assert code == 1 and err == f"refimpl train: the trace cannot be written to {tmp_path}: it is there, and not a file\n"
    assert out == ""
