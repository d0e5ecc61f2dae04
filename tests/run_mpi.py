"""Run the tests that take `ranks` under mpirun: python tests/run_mpi.py 4 [pytest arguments].  A time limit is a failure.

Every rank runs the same tests in the same order.  Verdicts are gathered (conftest.py), so rank 0 speaks for all; another
rank is heard only when it fails alone.
"""
import io
import subprocess
import sys
from contextlib import redirect_stdout

from refimpl.comm.launch import launcher, mpirun_command, world

LIMIT = 300                                             # seconds


def start(n: int, arguments: list[str]) -> int:
    command = [*mpirun_command(n), sys.executable, __file__, *arguments]
    mpirun = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return mpirun.wait(LIMIT)
    except subprocess.TimeoutExpired:
        print(f"FAILED: the tests on {n} ranks did not end within {LIMIT} s", file=sys.stderr)
        mpirun.terminate()                              # mpirun takes its ranks down with it
        try:
            mpirun.wait(10)
        except subprocess.TimeoutExpired:
            mpirun.kill()
        return 1


def run(arguments: list[str]) -> int:
    """The status of rank 0's pytest, or of the first rank that failed alone."""
    import pytest
    comm = world()
    heard = io.StringIO()
    arguments = ["--color=no", *arguments]              # the launcher may give us a terminal of its own
    if comm.rank == 0:
        code = int(pytest.main(arguments))
    else:
        with redirect_stdout(heard):
            code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    codes = [int(c) for c in comm.gather_objects(str(code))]            # nobody ends before rank 0 has reported
    if code and not codes[0]:
        sys.stderr.write(f"rank {comm.rank}:\n{heard.getvalue()}")
        sys.stderr.flush()
    return next((c for c in codes if c), 0)


if __name__ == "__main__":
    if launcher():
        sys.stdout.flush()
        code = run(sys.argv[1:])
        sys.stdout.flush()
        raise SystemExit(code)                          # all ranks end with the same status: none needs to abort the others
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
