"""Localises: an example that fails, hangs, prints warnings or gives up with a traceback; a failure on one rank that is missed.

Every script in mpi_examples/ runs in processes of its own, in a foreign directory, with a time limit that is a failure.
"""
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command

EXAMPLES = sorted((Path(__file__).parents[1] / "mpi_examples").glob("*.py"))
SMALLER = {"09_gpt2_small_on_four_ranks.py": ("--layers", "1", "--tokens", "16")}
LIMIT = 120                                             # seconds for a run that takes one or two
SOON = 30                                               # seconds in which a failure must have ended all ranks

FAILS_ON_RANK_1 = """
from refimpl.comm import launch


def main(comm):
    assert comm.rank != 1, "planted on rank 1"
    comm.barrier()
    print("OK")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
"""

# Run the script argv[1] with a mistake in the core.
MISTAKES = """
import runpy
import sys
from refimpl import parallel
from refimpl.comm import Comm

permute, start_permute = Comm.permute, Comm.start_permute
Comm.permute = lambda self, x, pairs, sizes=None: permute(self, x * 0, pairs, sizes)    # what ranks send each other is lost
Comm.start_permute = lambda self, x, pairs, sizes=None: start_permute(self, x * 0, pairs, sizes)
parallel.copy_to.array = lambda x, comm=None: (x.view(), lambda dy: dy)     # f forgets its all_reduce in the backward pass
parallel.reduce_gradients = lambda grads, mesh: grads                       # gradients are not added up over dp
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def finish(command: list[str], cwd: Path, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; one that takes longer than `limit` seconds is killed with all its ranks, and fails the test."""
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)      # mpirun takes its ranks along
            time.sleep(2)
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"no end within {limit} s: {' '.join(command)}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def start(where: str, n: int, *script: Path | str) -> list[str]:
    """The command that runs `script` on `n` ranks, as threads or under mpirun."""
    line = [sys.executable, *map(str, script), *SMALLER.get(Path(script[-1]).name, ())]
    return [*line, "--simulate", str(n)] if where == "threads" else [*mpirun_command(n), *line]


@pytest.fixture(scope="session")
def mpi_is_missing() -> str:
    """Why nothing can run under mpirun, "" where it can.  Found out in a child: a process that loads MPI becomes a rank."""
    try:
        mpirun_command(2)
    except CommError as error:
        return str(error)
    probe = subprocess.run([sys.executable, "-c", "from refimpl.comm.library import load_mpi; load_mpi()"], capture_output=True,
                           text=True, stdin=subprocess.DEVNULL, timeout=LIMIT)
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else ""


@pytest.fixture(params=["threads", "mpirun"])
def where(request, mpi_is_missing):
    if request.param == "mpirun" and mpi_is_missing:
        pytest.skip(mpi_is_missing)
    return request.param


every_example = pytest.mark.parametrize("script", EXAMPLES, ids=[path.stem for path in EXAMPLES])


def test_examples_are_numbered_in_reading_order():
    assert EXAMPLES and [path.name[:3] for path in EXAMPLES] == [f"{i:02d}_" for i in range(1, len(EXAMPLES) + 1)]


@every_example
@pytest.mark.parametrize("n", [2, 4])
def test_example_ends_with_ok(script, n, where, tmp_path):
    done = finish(start(where, n, script), tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK")
    assert len(re.findall("^OK", done.stdout, re.MULTILINE)) == 1, "more ranks than rank 0 speak"


@every_example
def test_wrong_number_of_ranks_gets_a_sentence(script, where, tmp_path):
    done = finish(start(where, 3, script), tmp_path, SOON)
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert f"{script.name} needs 2 or 4 ranks, got 3" in done.stderr


@every_example
def test_help_says_what_it_is_and_how_to_run_it(script, tmp_path):
    done = finish([sys.executable, str(script), "--help"], tmp_path, SOON)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (f"mpirun -n 4 python mpi_examples/{script.name}", f"python mpi_examples/{script.name} --simulate 4",
                 "What to expect", "--simulate N"):
        assert line in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 128


@every_example
def test_mistake_in_the_core_is_noticed(script, tmp_path):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    done = finish(start("threads", 4, "mistakes.py", script), tmp_path, SOON)
    noticed = "AssertionError" in done.stderr or "LayoutError" in done.stderr       # by the example, or by the tag
    assert done.returncode != 0 and noticed and "\nOK" not in done.stdout


@pytest.mark.parametrize("script", [path for path in EXAMPLES if "--plot" in path.read_text()], ids=lambda path: path.stem[:2])
def test_a_picture_is_drawn_where_matplotlib_is(script, tmp_path):
    done = finish([*start("threads", 2, script), "--plot", "runs/picture.png"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    if importlib.util.find_spec("matplotlib"):
        image = importlib.import_module("matplotlib.image").imread(tmp_path / "runs" / "picture.png")
        assert min(image.shape[:2]) > 100 and len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 10
    else:
        assert "no picture: pip install" in done.stdout


@pytest.mark.parametrize("n", [2, 4])
def test_failure_on_one_rank_ends_all(n, where, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    done = finish(start(where, n, "fails.py"), tmp_path, SOON)
    assert done.returncode != 0 and "planted on rank 1" in done.stderr and "OK" not in done.stdout
