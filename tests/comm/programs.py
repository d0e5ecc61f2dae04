"""Programs in processes of their own, each with a time limit: a time limit is a failure."""
import fcntl
import os
import subprocess
import time

from refimpl.comm.launch import RANKS, SIZES, TASKS, THREAD_VARIABLES

LIMIT = 60                                              # seconds, for a program that should take one or two
QUICK = 30                                              # seconds in which a failure must have ended all ranks
LAUNCHERS = (*SIZES, *RANKS, TASKS)


def execute(command, **environment):
    """(status, stdout, stderr, seconds) of a program without a launcher's variables but those given."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS and k not in THREAD_VARIABLES}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
                          env=env | environment)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def unlocked(path):
    """Whether the rank that locked this file for its life is gone."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
