"""Programs that save checkpoints and are killed on the way, and what test_checkpoint.py shares with them.

    python checkpoint_programs.py killed_everywhere FOLDER RANKS
    python checkpoint_programs.py killed_at_random FOLDER KILLS
    python checkpoint_programs.py full_disk FOLDER
"""
import json
import os
import resource
import select
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.comm import SerialComm, run_threads
from refimpl.parallel.cuts import even_bounds
from refimpl.train import checkpoint
from refimpl.train.checkpoint import Piece, Wanted, complete_ones, latest, load, read_manifest, save

LIMIT = 20                                              # seconds, for what should take some hundredths of one


def arrays(step):
    """The global arrays of a step."""
    rng = np.random.default_rng(step)
    return {"w": rng.standard_normal((5, 3)), "b": rng.integers(0, 100, 4).astype("float32"), "t": np.array(step)}


def part(shape, rank, size, axis=0):
    """Rank's share of an array along `axis`; rank 0 has all of an array without axes."""
    if not shape:
        return () if rank == 0 else None
    where = [slice(0, n) for n in shape]
    where[axis % len(shape)] = slice(*even_bounds(shape[axis % len(shape)], size)[rank])
    return tuple(where)


def pieces(whole, comm, axis=0):
    boxes = {name: part(a.shape, comm.rank, comm.size, axis) for name, a in whole.items()}
    return {name: Piece(whole[name][box], tuple(s.start for s in box), whole[name].shape)
            for name, box in boxes.items() if box is not None}


def everything(whole):
    return {name: Wanted(a.shape, tuple(slice(0, n) for n in a.shape), a.dtype) for name, a in whole.items()}


def save_step(folder, step, comm, keep=2):
    return save(folder, step, pieces(arrays(step), comm), {"step": step}, comm, keep)


def require_whole(path):
    """The checkpoint is, bit for bit, that of the step in its name -> that step."""
    step = int(path.name[5:])
    assert read_manifest(path)["step"] == step and read_manifest(path)["about"] == {"step": step}
    whole = arrays(step)
    step, found = load(path, everything(whole), SerialComm())
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in whole.items()}, path
    return step


class Operations:
    """Operations on files, counted: before the one of number `at`, or in the middle of it if it writes, `act` is called.

    seen    (operation, path) of those that have begun
    """

    def __init__(self, at=None, act=None):
        self.at, self.act, self.seen, self.lock = at, act, [], threading.Lock()

    def count(self, operation, path):
        with self.lock:
            self.seen.append((operation, str(path)))
            return len(self.seen) - 1 == self.at

    def counted(self, operation, original):
        def call(path, *args, **kwargs):
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            if self.count(operation, name):
                self.act()
            return original(path, *args, **kwargs)
        return call

    def open(self, path, mode="r", **kwargs):
        return Counted(self, open(path, mode, **kwargs)) if "w" in mode else open(path, mode, **kwargs)

    def patch(self, patch):
        for operation in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, operation, self.counted(operation, getattr(os, operation)))
        for module in (tensorfile, checkpoint):
            patch.setattr(module, "open", self.open, raising=False)
        return self


class Counted:
    """A file whose writes are counted, and reach the disk's cache at once."""

    def __init__(self, operations, file):
        self.operations, self.file = operations, file

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.file.close()

    def write(self, data):
        if self.operations.count("write", self.file.name):
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            self.operations.act()
        self.file.write(data)
        self.file.flush()


def prepared(folder):
    """Steps 1 and 2 are complete; a run that was killed has left a part of step 3 and one of step 9."""
    shutil.rmtree(folder, ignore_errors=True)
    for step in (1, 2):
        run_threads(2, lambda comm: save_step(folder, step, comm))
    for step in (3, 9):
        shutil.copytree(folder / "step-00000002", folder / f"step-{step:08d}.part")


def forked(act):
    """The status of a process that calls `act`; one that does not end is killed."""
    pid = os.fork()
    if not pid:
        signal.alarm(LIMIT)
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_everywhere(folder, ranks):
    """Kill the saving of step 3 at its first operation, its second, ... ; after each, go on with step 4."""
    at = 0
    while True:
        prepared(folder)

        def act():
            Operations(at, lambda: os._exit(9)).patch(pytest.MonkeyPatch())
            run_threads(ranks, lambda comm: save_step(folder, 3, comm))
        status = forked(act)
        assert status in (0, 9), (at, status)
        found = [require_whole(path) for path in complete_ones(folder)]
        assert found in ([1, 2], [1, 2, 3], [2, 3]) and (status or found == [2, 3]), (at, status, found)
        if status == 0:
            break
        run_threads(ranks, lambda comm: save_step(folder, 4, comm))
        assert [require_whole(path) for path in complete_ones(folder)] == [found[-1], 4], at
        assert len(list(folder.iterdir())) == 2, (at, list(folder.iterdir()))
        at += 1
    print(f"OK: killed at {at} operations")


def killed_at_random(folder, kills):
    """Kill a process that saves step after step; what was said to be saved must be there, whole."""
    rng, saved = np.random.default_rng(0), 0
    for kill in range(kills):
        ears, mouth = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(LIMIT)

            def saving(comm):
                for step in range(saved + 1, saved + 1000):
                    save_step(folder, step, comm)
                    if comm.rank == 0:
                        os.write(mouth, step.to_bytes(4, "little"))
            run_threads(1 + kill % 2, saving)
            os._exit(1)
        os.close(mouth)
        assert select.select([ears], [], [], LIMIT)[0], "nothing was saved"
        select.select([], [], [], rng.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        said = b""
        while more := os.read(ears, 4096):
            said += more
        os.close(ears)
        told = int.from_bytes(said[-4:], "little")
        found = [require_whole(path) for path in complete_ones(folder)]
        assert int(latest(folder).name[5:]) == found[-1] and found[-1] in (told, told + 1) and len(found) <= 3, (told, found)
        saved = found[-1]
    print(f"OK: {saved} saved, {kills} kills")


def full_disk(folder):
    """Rank 1 of 3 may write no more than 20000 bytes to a file: what each rank says of step 2."""
    run_threads(3, lambda comm: save_step(folder, 1, comm))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    def check(comm):
        try:
            save(folder, 2, {f"x{comm.rank}": Piece(np.zeros(10 if comm.rank != 1 else 10_000), (0,), (10_000,))}, {}, comm)
        except ValueError as error:
            return str(error)
    print(json.dumps(run_threads(3, check)))
    require_whole(latest(folder))


if __name__ == "__main__":
    program, where, *numbers = sys.argv[1:]
    globals()[program](Path(where), *map(int, numbers))
