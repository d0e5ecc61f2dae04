"""Localises faults of one rank after which another hangs, ends too late, or does not say who waited where.

A matrix: what goes wrong, when, and the ranks as threads or under the MPI of this Python.  As threads a rank cannot be killed
or stopped by itself: all would be.
"""
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refimpl.comm.launch import mpirun_command

from .programs import LAUNCHERS

PROGRAM = Path(__file__).parent / "faulty.py"
SOON = 5                                                # seconds after the fault in which all ranks have ended
TIMEOUT = 1                                             # seconds, where only a time-out can tell that there is a fault
LIMIT = 30                                              # seconds after which this test ends them
TICK = 0.05                                             # seconds between two looks at the clock

LATE = f"rank 1 did not come within {TIMEOUT} s"
DIED = "rank 1 died: its process is gone"
WAIT = "the ranks wait for one another"
FAULTS = {                                              # what all say, and the exit status (None: not 0)
    "raise": ("rank 1 failed (ValueError: the cause)", 1),
    "assert": ("rank 1 failed (AssertionError: the cause)", 1),
    "text": ("rank 1 exits with status 1 (the cause)", 1),
    "status": ("rank 1 exits with status 3", 3),
    "system_exit": ("rank 1 exits with status 3", 3),
    "early": ("rank 1 has ended", 1),
    "kill": (DIED, None), "gone": (DIED, None),
    "stop": (LATE, 1), "deaf": (LATE, 1), "sleep": (LATE, 1),
    "axis": (WAIT, 1), "order": (WAIT, 1),
}
DIFFERENT = {                                           # what rank 1 is about to do where the others do all_reduce
    "operation": "broadcast over tp: float64[3] from rank 0",
    "shape": "all_reduce over tp: sum of float64[4]",
    "dtype": "all_reduce over tp: sum of float32[3]",
    "argument": "all_reduce over tp: takes an array, got list: np.asarray a list or a number, give a Tensor's .array",
}
PROCESS = ("kill", "gone", "stop", "deaf")              # not for threads, nor is the moment "deaf"
MOMENTS = {                                             # see faulty.py
    "first": "raise text early kill shape",
    "between": "raise assert text status system_exit early kill gone stop deaf sleep operation shape dtype argument",
    "cross": "axis",
    "sub": "raise early kill shape order",
    "backward": "raise early kill shape",
    "data": "raise status kill gone",
    "transfer": "raise kill",
    "busy": "raise early kill argument",
    "deaf": "raise kill",
    "end": "raise status kill",
}
CELLS = [(moment, fault) for moment, faults in MOMENTS.items() for fault in faults.split()]
RANKS = {"cross": 4, "sub": 4}                          # dp=2,tp=2; else tp=3

LINES = {mark: k for k, text in enumerate(PROGRAM.read_text().splitlines(), 1)
         for mark in re.findall(r"# waits: (\w+)$", text)}


def waits(line, doing="all_reduce over tp: sum of float64[3]"):
    return re.escape(f"waits in {doing} (faulty.py:{LINES[line]})")


def states(moment, fault, backend):
    """A pattern for what each rank is said to do at the fault; rank 1 is only mentioned where the fault is nobody's."""
    dp = waits("dp", "all_reduce over dp: sum of float64[3]"), waits("axis", "all_reduce over dp: sum of float64[3]")
    large = "a collective over tp" if backend == "threads" else "all_reduce over tp: sum of float64[524288]"
    anywhere = r"(waits in .* \(\w+\.py:\d+\)|is at \w+\.py:\d+|has ended)"    # nobody knows how far it has come
    return {
        "first": [anywhere] * 3,
        "between": [waits("between")] * 3,
        "cross": [anywhere, dp[1], anywhere, waits("barrier", "barrier over world")],
        "sub": [waits("tp"), dp[1], dp[1], waits("tp")] if fault == "order" else [waits("tp"), "", dp[0], dp[0]],
        "backward": [waits("backward")] * 3,
        "data": [waits("data", large)] * 3,
        "transfer": [anywhere] * 3,
        "busy": [waits("idle"), "", rf"is at faulty\.py:{LINES['busy']}"],
        "deaf": [waits("deaf"), "", "does not answer"],
        "end": ["has ended"] * 3,
    }[moment]


class End:
    """How a program ended: its status, what it said, how many seconds after the fault, and what is left of it."""

    def __init__(self, command, folder, **environment):
        env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | environment
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **pipes, text=True, env=env) as process:
            clock = Clock()
            while clock.seconds < LIMIT and not clock.tick(process):
                pass
            self.over = process.returncode is not None
            self.left = survivors(folder, time.monotonic() + 1)         # mpirun ends a little before its ranks
            if not self.over:
                process.terminate()
            self.said = process.communicate(timeout=LIMIT)[0].replace("\0", "")    # (Open MPI)
        fault = re.search(r"^fault at (.*)$", self.said, re.MULTILINE)
        self.status, self.seconds = process.returncode, clock.since(float(fault[1])) if fault else 0.0
        self.sentences = re.findall(r"^rank (\d+) ends: (.*)$", self.said, re.MULTILINE)

    def require_soon(self, fault):
        assert self.over, self.said
        assert not self.left, self.said
        assert self.seconds < SOON + TIMEOUT * (FAULTS.get(fault, ("", 0))[0] == LATE), self.said


class Clock:
    """The seconds in which the machine has been running: a virtual one may stand still for some."""

    def __init__(self):
        self.seconds, self.marks = 0.0, [(time.monotonic(), 0.0)]

    def tick(self, process):
        """Wait for the process for a moment: whether it has ended."""
        try:
            process.communicate(timeout=TICK)
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        self.seconds += min(now - self.marks[-1][0], 5 * TICK)
        self.marks.append((now, self.seconds))
        return process.returncode is not None

    def since(self, moment):
        return self.seconds - max(seconds for now, seconds in self.marks if now <= moment)


def survivors(folder, deadline):
    """Processes of the program that still live at the deadline.  They are ended here."""
    left = []
    for path in folder.iterdir():
        while not (free := unlocked(path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not free:
            left.append(path.name)
            os.kill(int(path.read_text()), signal.SIGKILL)
    return left


def unlocked(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def run(folder, fault, moment, backend, *how):
    start = [sys.executable, str(PROGRAM), fault, moment, str(folder), *how]
    environment = {"REFIMPL_TIMEOUT": str(TIMEOUT)} if FAULTS.get(fault, ("", 0))[0] == LATE else {}
    n = RANKS.get(moment, 3)
    if backend == "threads":
        return End([*start, "--simulate", str(n)], folder, **environment)
    return End([*mpirun_command(n), *start], folder, **environment)


@pytest.fixture(params=("threads", "mpi"))
def backend(request):
    if request.param == "mpi":
        request.getfixturevalue("mpirun")
    return request.param


@pytest.mark.parametrize("moment, fault", [cell for cell in CELLS if cell[1] in FAULTS])
def test_a_fault_ends_all_ranks_with_one_sentence(backend, moment, fault, tmp_path):
    if backend == "threads" and (fault in PROCESS or moment == "deaf"):
        pytest.skip("threads share their process")
    if backend == "threads" and moment == "transfer":
        pytest.skip("as threads what has begun to travel has arrived")
    end = run(tmp_path, fault, moment, backend)
    end.require_soon(fault)
    what, status = FAULTS[fault]
    if (moment, fault) == ("data", "raise"):            # the error of what the ranks had agreed to do
        what = "rank 1 failed (CommError: all_reduce over tp: the cause)"
    assert end.status == status if status else end.status != 0, end.said
    patterns = states(moment, fault, backend)
    told = [f"rank {r} {p}" for r, p in enumerate(patterns) if r != 1 or what == WAIT]
    for r, sentence in end.sentences:
        if (r, backend, fault) == ("1", "threads", "raise"):
            continue                                    # its own CommError
        assert re.fullmatch("; ".join([re.escape(what), *told]), sentence), end.said
    assert len({sentence for r, sentence in end.sentences if r != "1"}) <= 1, end.said
    speakers = [r for r in range(len(patterns)) if r != 1 or what == WAIT]
    if backend == "threads":                            # those that have ended are no more, those that compute do not hear
        speakers = [r for r in speakers if patterns[r].startswith("waits") or "|" in patterns[r]]
    if moment == "deaf":
        speakers.remove(2)
    said = sorted(int(r) for r, _ in end.sentences if r != "1" or what == WAIT)
    assert said == speakers, end.said


@pytest.mark.parametrize("moment, fault", [cell for cell in CELLS if cell[1] in DIFFERENT])
def test_ranks_that_do_not_agree_all_raise_the_same_sentence(backend, moment, fault, tmp_path):
    """Those outside the group hear of it, and say where they wait."""
    end = run(tmp_path, fault, moment, backend)
    end.require_soon(fault)
    assert end.status == 1, end.said
    sentences = {sentence for _, sentence in end.sentences}
    if moment == "busy":                                # nobody knows what rank 2 will do
        there = states(moment, fault, backend)
        found = [s for s in sentences if not s.startswith("rank 1 waited")]
        assert len(found) == 1, end.said
        assert re.fullmatch(rf"rank 1 failed \(CommError: rank 1 waited 2 s for the others: {re.escape(DIFFERENT[fault])}\); "
                            rf"rank 0 {there[0]}; rank 2 {there[2]}", found[0]), end.said
        return
    group = "0" if moment == "sub" else "0, 2"
    what = f"the ranks do not agree on what to do together: rank {group}: all_reduce over tp: sum of float64[3]; " \
        f"rank 1: {DIFFERENT[fault]}"
    raised = re.findall(r"^(?:refimpl\.comm\.arguments\.CommError|rank \d ends): (the ranks do not agree.*)$", end.said,
                        re.MULTILINE)
    assert len(raised) >= (2 if moment == "sub" else 3) and set(raised) == {what}, end.said
    if moment == "sub":
        there = states(moment, fault, backend)
        (heard,) = sentences - {what}
        assert re.fullmatch(rf"rank [01] failed \(CommError: {re.escape(what)}\); rank [01] .*; rank 2 {there[2]}; "
                            rf"rank 3 {there[3]}", heard), end.said


@pytest.mark.parametrize("fault, said, status", (("system_exit", "early", 1), ("early", "early", 1), ("raise", "raise", 1)))
def test_a_program_without_launch_ends_in_the_same_way(mpirun, fault, said, status, tmp_path):
    """No hook sees `raise SystemExit`: for the others it is an early end."""
    end = run(tmp_path, fault, "between", "mpi", "bare")
    end.require_soon(fault)
    assert end.status == status and {s.split("; ")[0] for _, s in end.sentences} == {FAULTS[said][0]}, end.said


@pytest.mark.parametrize("moment", ("sub", "backward", "data", "end"))
def test_without_a_fault_nothing_is_said(backend, moment, tmp_path):
    end = run(tmp_path, "none", moment, backend)
    assert (end.status, end.left) == (0, []) and re.fullmatch("fault at .*\n", end.said), end.said


def test_a_rank_that_ends_before_its_transfer_has_arrived_is_no_fault(backend, tmp_path):
    end = run(tmp_path, "early", "transfer", backend)
    assert (end.status, end.left) == (0, []) and re.fullmatch("fault at .*\n", end.said), end.said


def test_a_killed_rank_ends_all_under_a_plain_mpirun_too(mpirun, tmp_path):
    """The launcher may leave the others no time to say anything."""
    command = mpirun_command(3)
    flags = [flag for flag in command[:command.index("-n")] if flag != "-disable-auto-cleanup"]
    end = End([*flags, "-n", "3", sys.executable, str(PROGRAM), "kill", "between", str(tmp_path)], tmp_path)
    end.require_soon("kill")
    assert end.status != 0 and re.search("signal 9|Killed", end.said), end.said
