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
    try:
        return subprocess.run(command, timeout=LIMIT, stdin=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired:
        print(f"FAILED: the tests on {n} ranks did not end within {LIMIT} s", file=sys.stderr)
        return 1


def run(arguments: list[str]) -> int:
    import pytest
    heard = io.StringIO()
    if world().rank == 0:
        return int(pytest.main(arguments))
    with redirect_stdout(heard):
        code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    if code:
        sys.stderr.write(heard.getvalue())
    return code


if __name__ == "__main__":
    if launcher():
        sys.exit(run(sys.argv[1:]))
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
