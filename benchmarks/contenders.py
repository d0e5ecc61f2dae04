"""Programs that are timed side by side: each is a process (or the ranks of one) that sleeps until it is its turn.

In every round each makes one step, in an order drawn anew, so that a slow moment of the machine hits all.  The parent makes
`Contender`s and calls `rounds`; in a contender's process `take_turns` runs the steps, and `leave` says what it wants to say at
the end.  What they compute must agree.
"""
import ctypes
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Sequence

CORES = len(os.sched_getaffinity(0))
HERE = Path(__file__).parent


# ---- in a contender's process

def status(field: str) -> int:
    """Bytes of this process, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def forget_peak() -> int:
    """Let VmHWM, the largest memory that this process has had, begin anew, and give the present one: Linux, `man proc`."""
    ctypes.CDLL(None).malloc_trim(0)                    # what has been freed, but not given back, would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def take_turns(folder: Path, comm: Any, run: Callable[[int], float]) -> int:
    """Make step 0, 1, ... whenever the parent says so, and say how long it took and what came of it.  Gives their number."""
    rank = comm.rank if comm else 0
    go, step = open(folder / f"go.{rank}", "rb", buffering=0), 0
    while go.read(1) == b"s":
        if comm:
            comm.barrier()
        start = time.perf_counter()
        result = run(step)
        if comm:
            comm.barrier()
        took, step = time.perf_counter() - start, step + 1
        if rank == 0:
            with open(folder / "done", "w") as done:
                done.write(json.dumps([took, result]))
    return step


def leave(folder: Path, comm: Any, facts: Sequence[float]) -> None:
    (folder / f"at-the-end.{comm.rank if comm else 0}").write_text(json.dumps(list(facts)))


# ---- in the parent

class Contender:
    """`script --contend ARGUMENTS FOLDER`, as one process or as ranks, each with so many BLAS threads."""

    def __init__(self, name: str, script: Path | str, arguments: Sequence[str], folder: Path, ranks: int = 1, threads: int = 1
                 ) -> None:
        self.name, self.ranks, self.folder = name, ranks, folder
        folder.mkdir()
        for fifo in ("done", *(f"go.{rank}" for rank in range(ranks))):
            os.mkfifo(folder / fifo)
        from refimpl.comm.launch import THREAD_VARIABLES, mpirun_command
        launcher = mpirun_command(ranks) if ranks > 1 else []
        command = [*launcher, sys.executable, str(script), "--contend", *arguments, str(folder)]
        cores = sorted(os.sched_getaffinity(0))[:1 if ranks * threads == 1 else CORES]
        environment = os.environ | {name: str(threads) for name in THREAD_VARIABLES} | {"PYTHONPATH": str(HERE.parent)}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL,
                                        preexec_fn=lambda: os.sched_setaffinity(0, cores))
        self.go = [os.open(folder / f"go.{rank}", os.O_RDWR) for rank in range(ranks)]  # both ways: opening waits for nobody
        self.done = os.open(folder / "done", os.O_RDWR)
        self.seconds: list[float] = []
        self.results: list[float] = []

    def step(self) -> None:
        for go in self.go:
            os.write(go, b"s")
        while not select.select([self.done], [], [], 1.0)[0]:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} has ended with status {self.process.returncode}: why is above")
        seconds, result = json.loads(os.read(self.done, 4096))
        self.seconds.append(seconds)
        self.results.append(result)

    def end(self) -> list[list[float]]:
        """What each rank says when it leaves."""
        for go in self.go:
            os.write(go, b"q")
        if self.process.wait(timeout=60):
            raise SystemExit(f"{self.name} failed")
        return [json.loads((self.folder / f"at-the-end.{rank}").read_text()) for rank in range(self.ranks)]


def rounds(contenders: list[Contender], n: int, tolerance: float) -> None:
    """One step to warm up, then n rounds; the results of all must agree."""
    for contender in contenders:
        contender.step()
        contender.seconds.clear()
    for _ in range(n):
        for contender in random.sample(contenders, len(contenders)):
            contender.step()
    for contender in contenders[1:]:
        worst = max(abs(a - b) for a, b in zip(contender.results, contenders[0].results))
        if worst > tolerance:
            raise SystemExit(f"{contender.name} and {contenders[0].name} do not compute the same: they differ by {worst}")


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (list(values) * 3)
    return f"{middle:5.2f} ({low:.2f} to {high:.2f})"


def machine(packages: Sequence[str]) -> str:
    """Cores, processor, and versions, in a line."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{CORES} cores of {cpu}, Python {platform.python_version()}, {versions}"
