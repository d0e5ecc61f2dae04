"""Localises programs that hang, or end with status 0, after one rank failed or came to its end while others wait for it."""
import signal
import subprocess
import sys
import time

import pytest

from refimpl.comm.launch import mpirun_command

from .programs import QUICK, execute

# One rank does something else, the others go on to a collective.
BARE = """
import sys, time, numpy as np
from refimpl.comm import Mesh, world
comm = world()
mesh = Mesh(tp=comm.size, comm=comm)

def main():
    if comm.rank == 1:
        {failure}
    mesh.tp.all_reduce(np.ones(3))
main()
"""

LAUNCHED = """
import sys, numpy as np
from refimpl.comm import launch

def main(comm):
    if comm.rank == 1:
        {failure}
    comm.all_reduce(np.ones(3))

if __name__ == "__main__":
    launch(main)
"""

FAILURES = {
    "exception": ("raise ValueError('the ' + 'cause')", 1, "ValueError: the cause"),
    "text": ("sys.exit('the ' + 'cause')", 1, "the cause"),
    "status": ("sys.exit(3)", 3, "rank 1 exits with status 3, all ranks end"),
    "interrupt": ("raise KeyboardInterrupt", 130, "rank 1 was interrupted, all ranks end"),
}
GONE = "rank 1 has ended; rank 0 waits in all_reduce over "
ENDINGS = ("raise SystemExit(3)", "exit(3)", "quit('text')", "sys.exit(0)", "return")     # no hook sees these


@pytest.fixture
def program(tmp_path):
    def write(text, failure=""):
        (tmp_path / "program.py").write_text(text.format(failure=failure))
        return tmp_path / "program.py"
    return write


@pytest.mark.parametrize("name", FAILURES)
def test_one_ranks_failure_ends_all_under_mpirun_and_is_heard(mpirun, program, name):
    failure, status, said = FAILURES[name]
    code, _, err, seconds = mpirun(program(BARE, failure))
    assert code == status and seconds < QUICK
    assert said in err and ("Traceback" in err) == (name == "exception"), err
    what = {"exception": "failed (ValueError: the cause)", "text": "exits with status 1 (the cause)",
            "status": "exits with status 3", "interrupt": "was interrupted"}[name]
    assert f"rank 0 ends: rank 1 {what}; rank 0 waits in all_reduce over tp: sum of float64[3] (program.py:" in err, err


@pytest.mark.parametrize("failure, status, said", (
    FAILURES["exception"], ("raise SystemExit(3)", 3, "rank 1 exits with status 3, all ranks end"),
    ("raise KeyboardInterrupt", 130, "program.py: interrupted"), ("sys.exit(0)", 1, GONE + "world")),
    ids=("exception", "status", "interrupt", "early"))
def test_one_ranks_failure_ends_all_through_launch(mpirun, program, failure, status, said):
    code, _, err, seconds = mpirun(program(LAUNCHED, failure))
    assert code == status and seconds < QUICK and said in err, err


@pytest.mark.parametrize("ending, n", [*((ending, 2) for ending in ENDINGS), ("return", 3)])
def test_a_rank_that_ends_while_others_wait_for_it_is_an_error(mpirun, program, ending, n):
    code, _, err, seconds = mpirun(program(BARE, ending), n=n)
    assert code != 0 and seconds < QUICK and GONE + "tp: sum of float64[3]" in err, err


@pytest.mark.parametrize("status", (0, 3))
def test_a_rank_that_goes_on_alone_is_left_to_finish(mpirun, program, status):
    """The others end, by any status: rank 1 computes for longer than they would wait for a launcher to notice."""
    script = program("""
import time, numpy as np
from refimpl.comm import world
comm = world()
comm.all_reduce(np.ones(3))
if comm.rank == 1:
    time.sleep(3)
    print("late")
raise SystemExit({failure} if comm.rank == 0 else 0)
""", status)
    code, out, err, _ = mpirun(script)
    assert (code, out.strip()) == (status, "late"), err


def test_an_end_right_after_a_collective_is_not_an_early_one(mpirun, program):
    """Rank 0 is late to see that a collective is complete which rank 1 has left, and ended."""
    script = program("""
import time, numpy as np
from refimpl.comm import world
comm = world()
raw = comm.raw

class Late:
    def __init__(self, request):
        self.request, self.start = request, time.monotonic()

    def Test(self):
        return time.monotonic() - self.start > 1 and self.request.Test()

class Raw:
    def Iallgather(self, *args):
        return Late(raw.Iallgather(*args))
if comm.rank == 0:
    comm.raw = Raw()
comm.agree("the last")
if comm.rank == 0:
    print("rank 1 had ended", comm.watch.ended == {{1}}, "after as many", comm.watch.reports[1].counts == comm.watch.counts)
""")
    code, out, err, _ = mpirun(script)
    assert (code, out.strip()) == (0, "rank 1 had ended True after as many True"), err


def test_a_program_that_finalizes_mpi_itself_ends(mpirun, program):
    code, _, err, _ = mpirun(program("from refimpl.comm import world\nworld().MPI.Finalize()\n"))
    assert code == 0, err


def test_ranks_that_wait_in_different_groups_are_found(mpirun, program):
    code, _, err, seconds = mpirun(program(BARE, "comm.barrier()"))
    sentence = "the ranks wait for one another; rank 0 waits in all_reduce over tp: sum of float64[3] (program.py:10); " \
        "rank 1 waits in barrier over world (program.py:9)"
    assert code != 0 and seconds < QUICK and f"rank 0 ends: {sentence}\n" in err and f"rank 1 ends: {sentence}\n" in err, err


def test_the_world_is_made_once(mpirun, program):
    """A second call of one rank alone does not wait for the others."""
    code, out, err, _ = mpirun(program("""
from refimpl.comm import world
comm = world()
if comm.rank == 1:
    assert world() is comm
    print("OK")
"""))
    assert (code, out.strip()) == (0, "OK"), err


@pytest.mark.parametrize("failure, said", (
    ("raise ValueError('two\\n  lines')", "failed (ValueError: two lines)"), ("sys.exit(256)", "exits with status 256"),
    ("class Mute(Exception): __str__ = None\n        raise Mute", "failed (Mute)")))
def test_odd_failures_are_one_line_and_not_a_success(mpirun, program, failure, said):
    code, _, err, seconds = mpirun(program(BARE, failure))
    assert code != 0 and seconds < QUICK and f"\nrank 0 ends: rank 1 {said}; rank 0 waits in " in "\n" + err, err


def test_what_was_printed_is_not_lost_where_another_fails(mpirun, program):
    """Standard output is a pipe, so Python keeps what is printed until somebody flushes it."""
    busy = "    print('printed')\n    all(iter(lambda: True, False))\n    mesh.tp.all_reduce"
    text = BARE.replace("    mesh.tp.all_reduce", busy)
    command = program(text, "time.sleep(0.5)\n        raise ValueError('the ' + 'cause')")
    code, out, err, _ = mpirun(command, PYTHONUNBUFFERED="")
    assert code != 0 and "ValueError: the cause" in err and "printed" in out, (out, err)


CHILD = """
import os, sys
child = os.fork()
if not child:
    {failure}
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("failure, status, said", (
    ("sys.exit(0)", 0, ""), ("sys.exit(3)", 3, ""), ("raise ValueError('of the child')", 1, "ValueError: of the child"),
    ("comm.barrier()", 1, "CommError: a child process of rank 1 cannot take part in its collectives")))
def test_a_ranks_child_ends_alone(mpirun, program, failure, status, said):
    """It does not finalize MPI in the rank's place, and does not meet the other ranks."""
    child = CHILD.format(failure=failure).replace("\n", "\n        ") + f"\n        assert status == {status}, status"
    code, _, err, seconds = mpirun(program(BARE, child))
    assert code == 0 and seconds < QUICK and said in err, err


def test_a_late_rank_is_named_and_not_those_that_wait_for_it(mpirun, program):
    """Rank 0 waits for rank 1, and rank 2 for rank 0, which comes later than the others."""
    code, _, err, seconds = mpirun(program("""
import time, numpy as np
from refimpl.comm import Mesh, world
comm = world(timeout=1)
mesh = Mesh(dp=2, tp=2, comm=comm)
time.sleep({failure})
mesh.tp.all_reduce(np.ones(3))
mesh.dp.all_reduce(np.ones(3))
""", "100 if comm.rank == 1 else 0.3 if comm.rank == 0 else 0"), n=4)
    said = "rank 1 did not come within 1 s; rank 0 waits in all_reduce over tp: sum of float64[3] (program.py:7); " \
        "rank 1 is at program.py:6; rank 2 waits in all_reduce over dp"
    assert code != 0 and seconds < QUICK and f"rank 3 ends: {said}" in err and f"rank 0 ends: {said}" in err, err


def test_without_connections_the_time_out_ends_all(mpirun, program):
    text = BARE.replace("comm = world()", """from refimpl.comm import mpi_world
class Unconnected:
    def __init__(self, *args):
        raise OSError("a firewall")
mpi_world.Links = Unconnected
comm = world(timeout=1)""")
    code, _, err, seconds = mpirun(program(text, "sys.exit(0)"))
    assert code != 0 and seconds < QUICK and "(a firewall)" in err, err
    assert "rank 0 waited 1 s for the others: all_reduce over tp" in err, err


def test_the_world_is_not_made_anew_with_other_arguments(program):
    text = "from refimpl.comm import world\nassert world() is world() is world(None)\nworld(checked=False)\n"
    code, _, err, _ = execute([sys.executable, str(program(text))])
    assert code == 1 and "ValueError: world() was made before, with checked=None" in err, err


def test_without_checks_an_early_end_is_noticed_too(mpirun, program):
    code, _, err, seconds = mpirun(program(BARE.replace("world()", "world(checked=False)"), "return"))
    assert code != 0 and seconds < QUICK and "rank 0 ends: rank 1 has ended; rank 0 waits in all_reduce over tp" in err, err


STARTING = """
import time
from refimpl.comm import mpi_world, world
from refimpl.comm.launch import launched_rank
mpi_world.SLOW = 1
if launched_rank() == 1:
    def watch_over(raw, timeout):
        {failure}
    mpi_world.watch_over = watch_over
world(timeout=1)
"""


@pytest.mark.parametrize("failure, said", (("raise ValueError('the ' + 'cause')", "ValueError: the cause"),
                                           ("time.sleep(60)", "not all ranks came to world() within 1 s")))
def test_a_failure_before_the_watch_stands_ends_all_too(mpirun, program, failure, said):
    code, _, err, seconds = mpirun(program(STARTING, failure))
    assert code != 0 and seconds < QUICK and said in err, err


@pytest.mark.parametrize("name", FAILURES)
def test_one_ranks_failure_ends_all_as_threads_with_one_traceback(program, name):
    failure, status, said = FAILURES[name]
    code, _, err, seconds = execute([sys.executable, str(program(LAUNCHED, failure)), "--simulate", "3"])
    assert code == status and seconds < QUICK
    if name == "exception":
        assert err.count("Traceback") == 1 and said in err and "CommError" not in err
        assert sys.version_info < (3, 11) or err.endswith("This is rank 1 of 3 ranks as threads.\n")
    else:
        assert err == {"text": "the cause\n", "status": "", "interrupt": "program.py: interrupted\n"}[name]


@pytest.mark.parametrize("command", ([], ["mpirun"]))
def test_an_interrupt_is_a_line_and_not_a_traceback(mpirun, program, command):
    script = program("""
import time
from refimpl.comm import launch

def main(comm):
    print("ready", flush=True)
    time.sleep(60)
launch(main)
""")
    start = [*(mpirun_command(2) if command else []), sys.executable, str(script)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(start, **pipes, text=True) as process:
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=QUICK)
    assert process.returncode != 0 and "Traceback" not in err
    assert command or (process.returncode, err) == (130, "program.py: interrupted\n")
