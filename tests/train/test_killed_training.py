"""Localises a kill that loses something: a last checkpoint that cannot be read, or one from which the run does not become the
undisturbed one again.

The killed runs go on without end; how far they got decides how many steps the undisturbed one has that they are compared with.
"""
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from resume_programs import ENVIRONMENT, HERE, LIMIT, TINY, command, loaded, require_equal, trained, write_corpus

from refimpl import tensorfile
from refimpl.train import latest
from refimpl.train.checkpoint import complete_ones
from refimpl.train.log import read_log

ENDLESS = ["--steps", str(10 ** 6)]
HOW = ["--clip", "0.5", "--dropout", "0.1", "--accumulate", "2"]


def members(mark):
    """{pid: command line} of the processes that have this text, the path of a test's own folder, among their arguments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:                             # it has ended
                continue
            if str(mark) in line and state != "Z" and int(entry.name) != os.getpid():
                found[int(entry.name)] = line
    return found


def ranks_of(found):
    """Of those, the ranks: not mpirun, nor the shells that start ranks."""
    return [pid for pid, line in found.items() if line[1:4] == ["-m", "refimpl", "train"]]


def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_until(holds, what):
    end = time.monotonic() + LIMIT
    while not (found := holds()):
        assert time.monotonic() < end, f"{what}: not within {LIMIT} s"
        time.sleep(0.0005)
    return found


def lines(folder):
    try:
        return (folder / "log.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def killed(draw, out, arguments, ranks=0, alone=False):
    """Start the command, let it save some steps more, and kill all of it, or one rank `alone`; -> its standard error."""
    before = latest(out / "checkpoints")
    with open(out.parent / "stderr", "w+") as heard:
        process = subprocess.Popen(command("train", *arguments, "--out", out, ranks=ranks), stdout=subprocess.DEVNULL,
                                   stderr=heard, stdin=subprocess.DEVNULL, cwd=HERE, env=ENVIRONMENT, start_new_session=True)
        try:
            wait_until(lambda: process.poll() is not None or latest(out / "checkpoints") not in (None, before), "a checkpoint")
            target = lines(out) + draw.randrange(4)
            wait_until(lambda: process.poll() is not None or lines(out) >= target, "more steps")
            end = time.perf_counter() + draw.uniform(0, 0.02)           # about two steps: any moment of one
            while time.perf_counter() < end:
                pass
            heard.seek(0)
            assert process.poll() is None, heard.read()
            found = members(out)
            those = sorted(ranks_of(found))
            assert len(those) == max(1, ranks), found
            kill([draw.choice(those)] if alone else [*those, *found])
            wait_until(lambda: not members(out), "the end of all ranks")
            assert process.wait(LIMIT) != 0
        finally:
            kill(members(out))
            process.kill()
            process.wait()
        heard.seek(0)
        return heard.read()


def check_kills(tmp_path, kills, arguments, ranks=0, alone=lambda number: False):
    """Kill after kill; after each the last checkpoint loads; -> the undisturbed run agrees with each, and with the end."""
    draw, out = random.Random(0), tmp_path / "killed"
    given = ["--text", write_corpus(tmp_path / "text"), *TINY, *HOW, *arguments, "--save-every", "1"]
    found, kept = [], 2
    for number in range(kills):
        go_on = ["--resume"] if number else []
        killed(draw, out, [*given, *ENDLESS, "--keep", "2", *go_on], ranks, alone(number))
        path = latest(out / "checkpoints")
        found.append((path.name, loaded(path)))
        most = max(2, kept) + 1                         # the kill came before the oldest was removed, as may the next
        kept = len(complete_ones(out / "checkpoints"))
        assert 1 <= kept <= most
    names = [name for name, _ in found]
    assert sorted(set(names)) == names                  # each run got further than the one before
    steps = int(names[-1][5:]) + 2
    trained(*given, "--steps", steps, "--keep", "2", "--resume", "--out", out, ranks=ranks)
    trained(*given, "--steps", steps, "--keep", "0", "--out", tmp_path / "whole", ranks=ranks)
    for name, arrays in found:
        require_equal(arrays, loaded(tmp_path / "whole/checkpoints" / name))
    for file in ("params.safetensors", "grads_last.safetensors"):
        require_equal(tensorfile.read(out / file), tensorfile.read(tmp_path / "whole" / file))
    rows, wanted = ([(row["step"], row["loss"], row["norm"]) for row in read_log(folder / "log.jsonl") if "loss" in row]
                    for folder in (out, tmp_path / "whole"))
    assert rows == wanted and len(rows) == steps
    assert not list((out / "checkpoints").glob("*.part")) and len(complete_ones(out / "checkpoints")) == 2


def test_a_run_killed_at_many_random_moments_becomes_the_undisturbed_one(tmp_path):
    check_kills(tmp_path, 30, [])


@pytest.mark.parametrize("arguments", (["--mesh", "dp=2", "--zero"], ["--mesh", "tp=2"]), ids=("dp=2, zero", "tp=2"))
def test_ranks_killed_together_or_alone_become_the_undisturbed_run(tmp_path, arguments):
    """In turn the whole group and one rank: the others must end, and must not complete what the killed one has not written."""
    check_kills(tmp_path, 4, arguments, ranks=2, alone=lambda number: number % 2 == 1)


def test_a_kill_between_the_last_checkpoint_and_the_final_parameters_loses_nothing(tmp_path):
    """Such a kill, played: the checkpoint of the last step is there, the results are not."""
    given = ["--text", write_corpus(tmp_path / "text"), *TINY, "--steps", "3", "--save-every", "1", "--out", tmp_path / "a"]
    trained(*given)
    wanted = (tmp_path / "a/params.safetensors").read_bytes()
    for name in ("params.safetensors", "grads_last.safetensors", "summary.json"):
        (tmp_path / "a" / name).unlink()
    trained(*given, "--resume")
    assert (tmp_path / "a/params.safetensors").read_bytes() == wanted


def test_what_a_killed_run_has_left_half_written_is_in_nobodys_way(tmp_path):
    given = ["--text", write_corpus(tmp_path / "text"), *TINY, "--save-every", "1", "--out", tmp_path / "a"]
    trained(*given, "--steps", "3")
    checkpoints = tmp_path / "a/checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000004.part")
    (checkpoints / "step-00000004.part/rank-00000.safetensors").write_bytes(b"half")
    (checkpoints / "step-00000004.part/manifest.json").unlink()
    for name in ("log.jsonl.part", "params.safetensors.part", "grads_last.safetensors.part"):
        (tmp_path / "a" / name).write_bytes(b"half")
    trained(*given, "--steps", "5", "--resume")
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000004", "step-00000005"]
    assert not list((tmp_path / "a").glob("*.part"))
    assert all(np.isfinite(a).all() for a in loaded(checkpoints / "step-00000005").values())
