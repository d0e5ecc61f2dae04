"""How a program gets its ranks: from mpirun, from threads (`--simulate N`), or alone.  What the launcher says in the
environment is read here; the package's own switches are read in switches.py.

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
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

import numpy as np

from refimpl.comm.arguments import CommError
from refimpl.comm.base import Comm, SerialComm
from refimpl.comm.direct import require
from refimpl.comm.ending import INTERRUPTED
from refimpl.comm.library import INSTALL, find_mpi, library
from refimpl.comm.mpi import MpiComm
from refimpl.comm.mpi_world import mpi_world
from refimpl.comm.switches import Settings, read_switches, switches_set
from refimpl.comm.threads import run_threads
from refimpl.comm.trace import TraceError, traced
from refimpl.comm.verdict import Told

MPICH, OPEN_MPI = "MPICH's or Intel MPI's mpirun (or srun --mpi=pmi2)", "Open MPI's mpirun"
SIZES = {"PMI_SIZE": MPICH, "OMPI_COMM_WORLD_SIZE": OPEN_MPI, "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun"}
TASKS = "SLURM_STEP_NUM_TASKS"                          # srun's, which also starts what mpirun starts the ranks with
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
DEAF = 'trap "" USR1; "$@"; exit $?'                     # shells to start a rank with, see mpirun_command
PATIENT = '"$@"; status=$?; [ $status -le 130 ] || sleep 2; exit $status'      # (up to 130: its own, or Ctrl-C)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def launcher() -> tuple[str, int | None] | None:
    """The launcher that started this process and the number of ranks it started (None: it does not say); None without one."""
    told = {who: int(os.environ[v]) for v, who in SIZES.items() if os.environ.get(v, "").isdecimal()}
    if len(told) > 1 and OPEN_MPI in told:              # one was started in a rank of the other: which, the library knows
        told = {who: n for who, n in told.items() if (who == OPEN_MPI) == library(find_mpi()).startswith("Open MPI")}
    if told:
        return next(iter(told.items()))
    if "PMIX_RANK" in os.environ:
        return "a PMIx launcher (srun --mpi=pmix, prun)", None
    tasks = os.environ.get(TASKS, "")
    return ("srun", int(tasks)) if tasks.isdecimal() and tasks != "1" else None


def launched_rank() -> int:
    """This process' rank as the launcher told it, without MPI; 0 without a launcher."""
    found = launcher()
    names = sorted(RANKS, key=lambda v: v.startswith("OMPI") != (found is not None and found[0] == OPEN_MPI))
    return next((int(os.environ[v]) for v in names if os.environ.get(v, "").isdecimal()), 0) if found else 0


def fail(sentence: str, status: int = 1) -> NoReturn:
    """End all ranks with one sentence.  Where all ranks come here, rank 0 speaks and the others let it; no rank asks
    another whether it comes too."""
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)    # one Ctrl-C may come twice, from the terminal and from the launcher
    if launched_rank():
        time.sleep(2)
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(Told(status))


def world(checked: bool | None = None, timeout: float | None = None) -> Comm:
    """All ranks of this program: MPI's under mpirun, else one.  Made once; sets the BLAS threads of this process.

    From then on a failure of a rank ends all (ending.py), among them `sys.exit` with a status that is not 0: under MPI it
    ends the process at once, where it could be caught before.

    checked  compare what the ranks do before each collective (mpi.py); default: the switch REFIMPL_CHECKED
    timeout  seconds that a rank waits in a collective (mpi_world.py); default: the switch REFIMPL_TIMEOUT
    Error:   CommError, when the launcher started N processes and the MPI library of mpi4py knows of another number, and where
             the ranks' switches differ; ValueError, where a switch has a value that it does not take, and where the world
             has been made with other arguments
    """
    if MADE and (checked, timeout) not in ((None, None), MADE[0][:2]):
        raise ValueError(f"world() was made before, with checked={MADE[0][0]} and timeout={MADE[0][1]}: the arguments are for "
                         "the first call")
    if not MADE:
        MADE.append((checked, timeout, make_world(checked, timeout)))
    return MADE[0][2]


MADE: list[tuple[bool | None, float | None, Comm]] = []             # the one world, once there is one


def make_world(checked: bool | None, timeout: float | None) -> Comm:
    started, settings, failure = launcher(), Settings(), ""
    try:
        settings = read_switches()
    except ValueError as error:
        failure = str(error)
    if started and is_foreign(library(find_mpi())):
        raise CommError(misfit(*started, "cannot work with it"))
    comm: Comm = SerialComm() if not started else mpi_world(settings.checked if checked is None else checked,
                                                            settings.timeout if timeout is None else timeout)
    require_same_switches(comm)
    if failure:
        raise ValueError(failure)
    if started and started[1] not in (None, comm.size):
        raise CommError(misfit(*started, f"sees {comm.size}: each would believe to be alone"))
    if settings.cuda_aware and isinstance(comm, MpiComm) and comm.size > 1:
        require(comm, local_rank(comm))
        comm.direct = True
    set_blas_threads(default_blas_threads(comm))
    return comm


def require_same_switches(comm: Comm) -> None:
    """Error: CommError on all ranks.  (Open MPI's mpirun gives most variables to the ranks on its own machine only.)"""
    if isinstance(comm, MpiComm):
        texts = MpiComm(comm.raw, watch=comm.watch).gather_texts(switches_set() or "no switch set")
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise CommError(f"rank 0 has {texts[0]}, rank {rank} has {text}: mpirun passes an environment variable on to "
                                f"all ranks by -x NAME (Open MPI) or -genv NAME VALUE (MPICH)")


def is_foreign(version: str) -> bool:
    """Whether the launcher is one that the MPI library of this version cannot understand.  Known before MPI_Init, which
    would end the process (MPICH), or warn at length and let every rank be alone (Open MPI)."""
    told = {v for v in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK") if v in os.environ}
    if version.startswith("Open MPI"):
        return told == {"PMI_SIZE"} and not version.startswith(("Open MPI v3", "Open MPI v4"))      # those know PMI
    return told == {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"}


def misfit(who: str, n: int | None, how: str) -> str:
    version = library(find_mpi())
    return (f"{who} started {n} processes, but the MPI library that mpi4py loaded {how}.  Use the mpirun of that library "
            f"({version}), or srun --mpi={'pmix' if version.startswith('Open MPI') else 'pmi2'}; `python -m refimpl doctor` "
            f"shows both")


def local_rank(comm: Comm) -> int:
    """This rank's number among the ranks of its machine: which GPU it takes.  All ranks call it together."""
    if not isinstance(comm, MpiComm):
        return comm.rank
    node = comm.raw.Split_type(comm.MPI.COMM_TYPE_SHARED)
    rank = int(node.Get_rank())
    node.Free()
    return rank


def launch(main: Callable[[Comm], Any], ranks: Sequence[int] | None = None, argv: Sequence[str] | None = None) -> None:
    """Run `main(comm)` on every rank; a failure of any rank ends all of them with a non-zero status.

    `--simulate N` runs N ranks as threads of this process instead of under mpirun.  A number of ranks that is not among
    `ranks` gets a sentence.  `--trace FILE` writes a timeline (trace.py).
    """
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(prog=script, description=sys.modules["__main__"].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, metavar="N", help="run N ranks as threads of this process, without MPI")
    parser.add_argument("--trace", metavar="FILE", help="write a timeline of all ranks, to open at ui.perfetto.dev")
    args = parser.parse_args(argv)
    simulate, run = args.simulate, main if args.trace is None else traced(main, args.trace)
    if simulate is not None and (simulate < 1 or launcher()):
        parser.error("--simulate N is for a process of its own, not under mpirun" if launcher() else
                     f"--simulate needs at least 1 rank, got {simulate}")
    try:
        timeout = read_switches().timeout if simulate else 0.0
        comm = SerialComm() if simulate else world()
    except (CommError, ValueError) as error:
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
            run_threads(simulate, run, timeout)
        else:
            run(comm)
    except TraceError as error:
        fail(f"{script}: {error}")
    except SystemExit as status:                        # sys.exit(0) on a rank is a return
        if status.code:
            sys.exit(status.code)                       # under MPI the hook of ending.py: ends all ranks
    except KeyboardInterrupt:
        fail(f"{script}: interrupted", INTERRUPTED)


def mpirun_command(n: int) -> list[str]:
    """The command that starts `n` ranks: the mpirun beside this Python, else the one on PATH.

    Open MPI wants to be told that more ranks than (physical) cores are meant, and that root is.  MPICH's kills all ranks as
    soon as one is killed by a signal, Open MPI's a quarter of a second later.  Shown a shell that ends in its stead, normally
    or two seconds later, they leave the others time to say who waited where, and to end (watch.py); MPICH's then tells of
    ends by a signal, which is ignored.
    Error: CommError where there is no mpirun.
    """
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise CommError(f"no mpirun found beside this Python or on PATH: {INSTALL}")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    if "HYDRA" in version:
        return [mpirun, "-disable-auto-cleanup", "-n", str(n), "sh", "-c", DEAF, "sh"]
    if "Open MPI" in version or "prrte" in version.lower():
        flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        return [mpirun, *flags, "-n", str(n), "sh", "-c", PATIENT, "sh"]
    return [mpirun, "-n", str(n)]


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
