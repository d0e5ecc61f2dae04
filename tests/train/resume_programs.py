"""What the tests of resumed, killed and failing training share: small runs in this process, the real command in others.

    python resume_programs.py limited BYTES RANK train ...      `refimpl train`, whose rank RANK may write BYTES to a file
"""
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from refimpl.comm import Mesh
from refimpl.comm.launch import RANKS, SIZES, TASKS, mpirun_command, world
from refimpl.models import Config, init
from refimpl.train import AdamW, Trainer
from refimpl.train.checkpoint import read_manifest
from refimpl.train.state import State

LIMIT = 60                                              # seconds, for a command that should take one or two
HERE = Path(__file__).parents[2]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in (*SIZES, *RANKS, TASKS)}
TINY = ["--d-model", "8", "--n-layers", "1", "--n-heads", "2", "--batch-size", "3", "--seq-len", "8", "--validation", "0",
        "--sample", "0", "--no-bar"]


class Stopped(Exception):
    """A run ends on all ranks, as if it were killed."""


class Stopping(Trainer):
    """A run that ends before step `at` = 0, 1, ...; what it holds before step `look` is `seen`."""
    at = look = -1

    def step(self, step):
        if step == self.look:
            self.seen = held(self)
        if step == self.at:
            raise Stopped
        return super().step(step)


def stop(trainer, at):
    """Train up to step `at` and end as a killed run does: no last evaluation, no last checkpoint, no final parameters."""
    trainer.at = at
    try:
        trainer.run()
    except Stopped:
        return trainer
    raise AssertionError(f"the run did not get to step {at}")


def shared(comm, tmp_path):
    """Rank 0's folder: ranks of MPI have one each."""
    return Path(comm.gather_texts(str(tmp_path))[0])


def held(trainer):
    """Bit for bit what this rank holds: step, parameters and moments."""
    arrays = {f"{kind}/{name}": (a.dtype, a.shape, a.tobytes())
              for kind, of, _ in trainer.state.kinds() for name, a in of.items()}
    assert len(arrays) == 3 * len(trainer.state.params)
    return arrays | {"t": trainer.state.optimizer.t}


def global_state(trainer):
    """The global arrays on rank 0, nothing on the others."""
    return {name: piece.array for name, piece in trainer.state.whole().items()}


def loaded(path):
    """Everything in a checkpoint of training, read by one rank."""
    about = read_manifest(path)["about"]
    cfg = Config(**about["config"])
    state = State(cfg, Mesh(), init(cfg, Mesh(), 0, about["options"]["dtype"]), AdamW(1e-3))
    state.load(path)
    return {f"{kind}/{name}": a for kind, arrays, _ in state.kinds() for name, a in arrays.items()}


def write_corpus(path):
    path.write_text("".join(chr(97 + n * 31 % 97 % 26) for n in range(900)))
    return path


def command(*arguments, ranks=0, program=("-m", "refimpl"), python=sys.executable):
    start = mpirun_command(ranks) if ranks else []
    if ranks and python != sys.executable:              # it has an MPI of its own
        start = json.loads(said_by(python, f"import json; from refimpl.comm.launch import mpirun_command as command; "
                                           f"print(json.dumps(command({ranks})))"))
    return [*start, python, *map(str, program), *map(str, arguments)]


def said_by(python, program):
    return subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=True, cwd=HERE,
                          env=ENVIRONMENT).stdout


def execute(*arguments, ranks=0, program=("-m", "refimpl"), limit=LIMIT, python=sys.executable):
    """The finished command; a time limit is a failure."""
    return subprocess.run(command(*arguments, ranks=ranks, program=program, python=python), capture_output=True, text=True,
                          timeout=limit, stdin=subprocess.DEVNULL, cwd=HERE, env=ENVIRONMENT)


def trained(*arguments, ranks=0, python=sys.executable):
    done = execute("train", *arguments, ranks=ranks, python=python)
    assert done.returncode == 0, done.stderr
    return done


def require_sentence(done, *words):
    """The command failed with one sentence that has these words, said once."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("refimpl train: ")]
    assert done.returncode != 0 and "Traceback" not in done.stderr and len(lines) == 1, done.stderr
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


def require_equal(found, wanted):
    assert list(found) == list(wanted)
    for name, a in wanted.items():
        assert (found[name].dtype, found[name].shape, found[name].tobytes()) == (a.dtype, a.shape, a.tobytes()), name


def require_close(found, wanted, tolerance=1e-12):
    """|a - b| <= tolerance · the largest of b."""
    assert set(found) == set(wanted)
    for name, a in wanted.items():
        assert found[name].shape == a.shape
        assert np.abs(found[name] - a).max(initial=0) <= tolerance * np.abs(a).max(initial=0), name


def limited(size, rank, *arguments):
    """(Once MPI has made its files.)"""
    from refimpl.__main__ import main
    if world().rank == int(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    sys.exit(main(arguments))


if __name__ == "__main__":
    program, *rest = sys.argv[1:]
    globals()[program](*rest)
