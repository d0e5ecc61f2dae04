"""Localises faults of one rank after which another hangs, ends too late, or does not say who waited where.

A matrix: what goes wrong, when (faulty.py), and the ranks as threads or under the MPI of this Python.
"""
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from refimpl.comm.launch import mpirun_command

from .programs import LAUNCHERS, unlocked

PROGRAM = Path(__file__).parent / "faulty.py"
SOON = 5                                                # seconds after the fault in which all ranks have ended
TIMEOUT = 1                                             # seconds, where only a time-out can tell that there is a fault
LIMIT = 30                                              # seconds after which this test ends the program
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
MOMENTS = {
    "first": "raise text early kill shape",
    "between": "raise assert text status system_exit early kill gone stop deaf sleep operation shape dtype argument",
    "cross": "axis",
    "sub": "raise early kill sleep shape order",
    "backward": "raise early kill sleep shape",
    "data": "raise status kill gone",
    "transfer": "raise kill",
    "busy": "raise early kill argument",
    "deaf": "raise kill",
    "end": "raise status kill",
}
CELLS = [(moment, fault) for moment, faults in MOMENTS.items() for fault in faults.split()]
FAULTY_CELLS = [cell for cell in CELLS if cell[1] in FAULTS]
DIFFERENT_CELLS = [cell for cell in CELLS if cell[1] in DIFFERENT]
RANKS = {"cross": 4, "sub": 4}                          # dp=2,tp=2; else tp=3
OF_A_PROCESS = ("kill", "gone", "stop", "deaf")         # threads share theirs

LINES = {mark: k for k, text in enumerate(PROGRAM.read_text().splitlines(), 1)
         for mark in re.findall(r"# waits: (\w+)$", text)}
ANYWHERE = r"(waits in .* \(\w+\.py:\d+\)|is at \w+\.py:\d+|has ended)"        # nobody knows how far it has come


def waits(line, doing="all_reduce over tp: sum of float64[3]"):
    return re.escape(f"waits in {doing} (faulty.py:{LINES[line]})")


def states(moment, fault, backend):
    """A pattern for what each rank is said to do at the fault; the faulty one only where the fault is nobody's."""
    dp, axis = (waits(line, "all_reduce over dp: sum of float64[3]") for line in ("dp", "axis"))
    large = "a collective over tp" if backend == "threads" else "all_reduce over tp: sum of float64[524288]"
    return {
        "first": [ANYWHERE] * 3,
        "between": [waits("between")] * 3,
        "cross": [ANYWHERE, axis, ANYWHERE, waits("barrier", "barrier over world")],
        "sub": [waits("tp"), axis, axis, waits("tp")] if fault == "order" else [waits("tp"), "", dp, dp],
        "backward": [waits("backward")] * 3,
        "data": [waits("data", large)] * 3,
        "transfer": [ANYWHERE] * 3,
        "busy": [waits("idle"), "", rf"is at faulty\.py:{LINES['busy']}"],
        "deaf": [waits("deaf"), "", "does not answer"],
        "end": ["has ended"] * 3,
    }[moment]


class End:
    """How a program ended: its status, what it said, how many seconds after the fault, and what was left of it."""

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
            self.said = process.communicate(timeout=LIMIT)[0].replace("\0", "")     # (Open MPI)
        fault = re.search(r"^fault at (.*)$", self.said, re.MULTILINE)
        self.status, self.seconds = process.returncode, clock.since(float(fault[1])) if fault else 0.0
        self.sentences = re.findall(r"^rank (\d+) ends: (.*)$", self.said, re.MULTILINE)

    def require_soon(self, fault=""):
        assert self.over, self.said
        assert not self.left, self.said
        assert self.seconds < SOON + TIMEOUT * late(fault), self.said


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


def late(fault):
    return FAULTS.get(fault, ("",))[0] == LATE


def run(folder, fault, moment, backend, *how):
    start = [sys.executable, str(PROGRAM), fault, moment, str(folder), *how]
    environment = {"REFIMPL_TIMEOUT": str(TIMEOUT)} if late(fault) else {}
    n = RANKS.get(moment, 3)
    if backend == "threads":
        return End([*start, "--simulate", str(n)], folder, **environment)
    return End([*mpirun_command(n), *start], folder, **environment)


@pytest.fixture(params=("threads", "mpi"))
def backend(request):
    if request.param == "mpi":
        request.getfixturevalue("mpirun")
    return request.param


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """How the matrix' programs end of which a test will ask that: two run at a time, for they mostly wait."""
    asked = [item.callspec.params for item in request.session.items if "end" in getattr(item, "fixturenames", ())
             and item.module is request.module]
    pool = ThreadPoolExecutor(2)
    yield {(p["backend"], p["moment"], p["fault"]):
           pool.submit(run, tmp_path_factory.mktemp(p["fault"]), p["fault"], p["moment"], p["backend"])
           for p in asked if p["backend"] == "mpi" or possible_as_threads(p["moment"], p["fault"])}
    pool.shutdown(cancel_futures=True)


def possible_as_threads(moment, fault):
    """All would be killed or stopped; and what has begun to travel has arrived."""
    return fault not in OF_A_PROCESS and moment not in ("deaf", "transfer")


@pytest.fixture
def end(backend, moment, fault, ends):
    if (backend, moment, fault) not in ends:
        pytest.skip("threads share a process, and what has begun to travel has arrived")
    end = ends[backend, moment, fault].result()
    end.require_soon(fault)
    return end


@pytest.mark.parametrize("moment, fault", FAULTY_CELLS)
def test_a_fault_ends_all_ranks_with_one_sentence(end, backend, moment, fault):
    what, status = FAULTS[fault]
    if (moment, fault) == ("data", "raise"):            # an error where the ranks had agreed on what to do
        what = "rank 1 failed (CommError: all_reduce over tp: the cause)"
    assert end.status == status if status else end.status != 0, end.said
    patterns = states(moment, fault, backend)
    if what == LATE:
        patterns[1] = r"(is at faulty\.py:\d+|does not answer)"
    told = [f"rank {r} {p}" for r, p in enumerate(patterns) if r != 1 or what in (WAIT, LATE)]
    sentences = [(int(r), text) for r, text in end.sentences if r != "1" or (backend, fault) != ("threads", "raise")]
    for _, text in sentences:
        assert re.fullmatch("; ".join([re.escape(what), *told]), text), end.said
    assert len({text for _, text in sentences}) <= 1, end.said
    speakers = [r for r in range(len(patterns)) if r != 1 or what == WAIT]
    if backend == "threads":                            # those that compute do not hear, those that have ended are no more
        speakers = [r for r in speakers if "waits" in patterns[r]]
    if moment == "deaf":
        speakers.remove(2)
    assert sorted(r for r, _ in sentences if r != 1 or what == WAIT) == speakers, end.said


@pytest.mark.parametrize("moment, fault", DIFFERENT_CELLS)
def test_ranks_that_do_not_agree_all_raise_the_same_sentence(end, backend, moment, fault):
    """Those outside the group hear of it, and say where they wait."""
    assert end.status == 1, end.said
    there, sentences = states(moment, fault, backend), {text for _, text in end.sentences}
    if moment == "busy":                                # rank 2 has not come: nobody knows what it would do
        heard = [text for text in sentences if not text.startswith("rank 1 waited")]
        assert len(heard) == 1, end.said
        assert re.fullmatch(rf"rank 1 failed \(CommError: rank 1 waited \d s for the others: {re.escape(DIFFERENT[fault])}\); "
                            rf"rank 0 {there[0]}; rank 2 {there[2]}", heard[0]), end.said
        return
    group = "0" if moment == "sub" else "0, 2"
    what = f"the ranks do not agree on what to do together: rank {group}: all_reduce over tp: sum of float64[3]; " \
        f"rank 1: {DIFFERENT[fault]}"
    raised = re.findall(r"^(?:refimpl\.comm\.arguments\.CommError|rank \d ends): (the ranks do not agree.*)$", end.said,
                        re.MULTILINE)
    assert len(raised) >= (2 if moment == "sub" else 3) and set(raised) == {what}, end.said
    if moment == "sub":
        (heard,) = sentences - {what}
        assert re.fullmatch(rf"rank [01] failed \(CommError: {re.escape(what)}\); rank [01] .*; rank 2 {there[2]}; "
                            rf"rank 3 {there[3]}", heard), end.said


@pytest.mark.parametrize("fault, said", (("system_exit", "early"), ("early", "early"), ("raise", "raise")))
def test_a_program_without_launch_ends_in_the_same_way(mpirun, fault, said, tmp_path):
    """No hook sees `raise SystemExit`: for the others it is an early end."""
    end = run(tmp_path, fault, "between", "mpi", "bare")
    end.require_soon()
    assert end.status == 1 and {text.split("; ")[0] for _, text in end.sentences} == {FAULTS[said][0]}, end.said


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
    end.require_soon()
    assert end.status != 0 and re.search("signal 9|Killed", end.said), end.said
