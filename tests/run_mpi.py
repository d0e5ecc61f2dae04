"""Run the tests that take `ranks` under mpirun: python tests/run_mpi.py 4 [pytest arguments].  A time limit is a failure,
and a test that does not end leaves its traceback.

Every rank runs the same tests in the same order.  Verdicts are gathered (conftest.py), so rank 0 speaks for all; another
rank is heard only when it fails alone.
"""
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

from refimpl.comm import CommError
from refimpl.comm.launch import fail, launcher, mpirun_command, world

TEST_LIMIT = 60                                         # seconds for one test
LIMIT = 600                                             # for all; more than the 300 s that a collective waits for a rank
UNABLE = 213                                            # Open MPI's mpirun itself could not start (no rank ran)


def start(n: int, arguments: list[str]) -> int:
    command = [*mpirun_command(n), sys.executable, __file__, *arguments]
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:          # as in conftest.py
        for _ in range(3):
            mpirun = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": folder})
            status = end(mpirun, n)
            if status != UNABLE:
                break
    return status


def end(mpirun: "subprocess.Popen[bytes]", n: int) -> int:
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
    with TemporaryDirectory() as folder:                # ranks that share pytest's would delete each other's
        arguments = ["--basetemp", folder, "--color=no", "-o", f"faulthandler_timeout={TEST_LIMIT}",
                     "-o", "faulthandler_exit_on_timeout=true", *arguments]
        if comm.rank == 0:                              # (no colour: the launcher may give us a terminal of its own)
            code = int(pytest.main(arguments))
        else:
            with redirect_stdout(heard):
                code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    codes = [int(c) for c in comm.gather_texts(str(code))]            # nobody ends before rank 0 has reported
    if code and not codes[0]:
        sys.stderr.write(f"rank {comm.rank}:\n{heard.getvalue()}")
        sys.stderr.flush()
    return next((c for c in codes if c), 0)


def main() -> int:
    if not launcher():
        return start(int(sys.argv[1]), sys.argv[2:])
    raise SystemExit(run(sys.argv[1:]))                 # all ranks end with the same status: none needs to abort the others


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommError as error:                          # there is no MPI, or it is not that of the launcher
        fail(f"run_mpi.py: {error}")
