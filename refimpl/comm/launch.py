"""How a program gets its ranks: from mpirun, from threads (`--simulate N`), or alone.  Environment is read here only.

    if __name__ == "__main__":
        launch(main, ranks=(2, 4))          # main(comm) runs on every rank
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

import numpy as np

from refimpl.comm.arguments import CommError
from refimpl.comm.base import Comm, SerialComm
from refimpl.comm.ending import INTERRUPTED
from refimpl.comm.library import INSTALL, load_mpi
from refimpl.comm.mpi import MpiComm
from refimpl.comm.mpi_world import mpi_world
from refimpl.comm.threads import run_threads
from refimpl.comm.verdict import Told

SIZES = {"PMI_SIZE": "MPICH's or Intel MPI's mpirun", "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
         "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun"}
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def launcher() -> tuple[str, int | None] | None:
    """The launcher that started this process and the number of ranks it started (None: it does not say); None without one."""
    for variable, who in SIZES.items():
        if os.environ.get(variable, "").isdecimal():
            return who, int(os.environ[variable])
    return ("a PMIx launcher (srun --mpi=pmix, prun)", None) if "PMIX_RANK" in os.environ else None


def launched_rank() -> int:
    """This process' rank as the launcher told it, without MPI; 0 without a launcher."""
    return next((int(os.environ[v]) for v in RANKS if os.environ.get(v, "").isdecimal()), 0) if launcher() else 0


def fail(sentence: str, status: int = 1) -> NoReturn:
    """End all ranks with one sentence.  Where all ranks come here, rank 0 speaks and the others let it; no rank asks
    another whether it comes too."""
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)    # one Ctrl-C may come twice, from the terminal and from the launcher
    if launched_rank():
        time.sleep(2)
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(Told(status))


@cache
def world(checked: bool = True) -> Comm:
    """All ranks of this program: MPI's under mpirun, else one.  Made once; sets the BLAS threads of this process.

    checked  compare what the ranks do before each collective (mpi.py); a benchmark may turn it off
    Error:   CommError, when the launcher started N processes and the MPI library of mpi4py knows of another number
    """
    started = launcher()
    comm: Comm = mpi_world(checked) if started else SerialComm()
    if started and started[1] not in (None, comm.size):
        raise CommError(
            f"{started[0]} started {started[1]} processes, but the MPI library that mpi4py loaded sees {comm.size}: "
            f"each would believe to be alone.  Use the mpirun of that library ({library(load_mpi())}); "
            f"`python -m refimpl doctor` shows both")
    set_blas_threads(default_blas_threads(comm))
    return comm


def local_rank(comm: Comm) -> int:
    """This rank's number among the ranks of its machine: which GPU it takes.  All ranks call it together."""
    if not isinstance(comm, MpiComm):
        return comm.rank
    node = comm.raw.Split_type(comm.MPI.COMM_TYPE_SHARED)
    rank = int(node.Get_rank())
    node.Free()
    return rank


def library(MPI: Any) -> str:
    return " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")


def launch(main: Callable[[Comm], Any], ranks: Sequence[int] | None = None, argv: Sequence[str] | None = None) -> None:
    """Run `main(comm)` on every rank; a failure of any rank ends all of them with a non-zero status.

    `--simulate N` runs N ranks as threads of this process instead of under mpirun.  A number of ranks that is not among
    `ranks` gets a sentence.
    """
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(prog=script, description=sys.modules[main.__module__].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, metavar="N", help="run N ranks as threads of this process, without MPI")
    simulate = parser.parse_args(argv).simulate
    if simulate is not None and (simulate < 1 or launcher()):
        parser.error("--simulate N is for a process of its own, not under mpirun" if launcher() else
                     f"--simulate needs at least 1 rank, got {simulate}")
    try:
        comm = SerialComm() if simulate else world()
    except CommError as error:
        fail(f"{script}: {error}")
    size = simulate or comm.size
    if ranks is not None and size not in ranks:
        if comm.rank == 0:
            wanted = " or ".join(map(str, ranks))
            print(f"{script} needs {wanted} ranks, got {size}: mpirun -n {ranks[0]} python {sys.argv[0]}, or without MPI "
                  f"python {sys.argv[0]} --simulate {ranks[0]}", file=sys.stderr)
        raise SystemExit(2)                             # every rank takes this way: nobody is left waiting
    try:
        if simulate:
            set_blas_threads(1)
            run_threads(simulate, main)
        else:
            main(comm)
    except SystemExit as status:                        # sys.exit(0) on a rank is a return
        if status.code:
            sys.exit(status.code)                       # under MPI the hook of ending.py: ends all ranks
    except KeyboardInterrupt:
        fail(f"{script}: interrupted", INTERRUPTED)


def mpirun_command(n: int) -> list[str]:
    """The command that starts `n` ranks: the mpirun beside this Python, else the one on PATH.

    Open MPI wants to be told that more ranks than (physical) cores are meant, and that root is.  MPICH's kills all ranks at
    once when one is killed: told not to, it lets the others say who waited where (watch.py) before they end.
    Error: CommError where there is no mpirun.
    """
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise CommError(f"no mpirun found beside this Python or on PATH: {INSTALL}")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    flags = []
    if "Open MPI" in version or "prrte" in version.lower():
        flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    elif "HYDRA" in version:
        flags = ["-disable-auto-cleanup"]
    return [mpirun, *flags, "-n", str(n)]


# -- BLAS threads --------------------------------------------------------------------------------------------------


def default_blas_threads(comm: Comm) -> int:
    """This process' share of the cores (`share_of_cores`)."""
    mine = affinity()
    everybody = mine[None, :]
    if isinstance(comm, MpiComm) and comm.size > 1:
        node = MpiComm(comm.raw.Split_type(comm.MPI.COMM_TYPE_SHARED), ("node",), checked=comm.checked)
        everybody = node.all_gather(mine[None, :], axis=0)
        node.raw.Free()
    return share_of_cores(mine, everybody, cgroup_cores())


def share_of_cores(mine: np.ndarray, everybody: np.ndarray, quota: float | None) -> int:
    """Own cores / ranks of this node that may run on any of them, capped by the cgroup's quota per rank; at least 1.

    Open MPI binds ranks to cores, MPICH does not: counting the ranks whose affinity overlaps is right for both.
    Shapes: mine bool[cores], everybody bool[ranks of this node, cores]
    """
    overlapping = int((everybody & mine).any(axis=1).sum())
    threads = int(mine.sum()) // max(1, overlapping)
    return max(1, threads if quota is None else min(threads, int(quota / len(everybody))))


def affinity() -> np.ndarray:
    """bool[4096]: the cores this process may run on."""
    cores = np.zeros(4096, bool)
    if hasattr(os, "sched_getaffinity"):
        cores[[c for c in os.sched_getaffinity(0) if c < len(cores)]] = True
    else:
        cores[:os.cpu_count() or 1] = True
    return cores


def cgroup_cores(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Cores that the control group's quota amounts to, None without a quota."""
    try:
        quota, period = Path(path).read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def set_blas_threads(n: int) -> None:
    """Limit the BLAS of this process to `n` threads, unless the user has set a number or threadpoolctl is missing."""
    if any(os.environ.get(v) for v in THREAD_VARIABLES):
        return
    try:
        import threadpoolctl
    except ImportError:
        return
    threadpoolctl.threadpool_limits(n)
