"""Localises faults of the command line: a traceback where a sentence is due, a zero status after a failure, a hang."""
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.comm import CommError
from refimpl.comm.launch import THREAD_VARIABLES, mpirun_command
from refimpl.comm.library import load_mpi

HERE = Path(__file__).parents[2]
TINY = ["--d-model", "8", "--n-layers", "1", "--steps", "2", "--batch-size", "4", "--seq-len", "8", "--sample", "5", "--no-bar"]


def run(*arguments, ranks=0, limit=90, **environment):
    command = [*(mpirun_command(ranks) if ranks else []), sys.executable, "-m", "refimpl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL,
                          env=os.environ | environment)


def need_mpi():
    try:
        load_mpi()
        mpirun_command(2)
    except CommError as error:
        pytest.skip(f"there is no MPI on this machine: {error}")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return str(path)


def test_train_writes_what_it_says(tmp_path, text):
    done = run("train", "--text", text, "--out", str(tmp_path / "out"), *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss 5.5") and "The " in done.stdout and not done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["losses"]) == 2 and summary["payload"] == {}
    assert tensorfile.read(tmp_path / "out" / "params.safetensors")["embed.w"].shape == (256, 8)


@pytest.mark.parametrize("arguments, sentence", [
    (["--mesh", "tp=2"], "the mesh tp=2 needs 2 ranks (dp * cp * tp, each at least 1), there is 1"),
    (["--mesh", "tp=two"], "mesh 'tp=two': 'tp=two' is not AXIS=SIZE"),
    (["--text", "missing.txt"], "the text missing.txt cannot be read: No such file or directory"),
    (["--sample", "-5"], "sample and temperature must be at least 0, got -5 and 0.7"),
    (["--temperature", "-1"], "sample and temperature must be at least 0, got 5 and -1.0"),
    (["--weight-decay", "-1"], "weight_decay must be finite and at least 0, got -1.0"),
    (["--lr", "nan"], "the learning rate must be a positive number, got nan"),
    (["--lr", "0"], "the learning rate must be a positive number, got 0.0"),
    (["--dtype", "float16"], "dtype must be one of float64, float32, bfloat16, got 'float16'"),
    (["--d-model", "9"], "d_model must be a multiple of n_heads, got d_model 9, n_heads 4"),
    (["--seq-len", "100", "--max-seq-len", "64"], "seq_len 100 is longer than the model's max_seq_len 64"),
    (["--out", "/proc/results"], "the results cannot be written to /proc/results: No such file or directory"),
])
def test_what_the_user_got_wrong_is_one_sentence(text, arguments, sentence):
    done = run("train", "--text", text, *TINY, *arguments)
    assert done.returncode != 0 and sentence in done.stderr
    assert done.stderr.startswith("refimpl train: ") and done.stderr.count("\n") == 1


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "short").write_text("short")
    done = run("train", "--text", str(tmp_path / "short"), *TINY)
    assert done.returncode != 0 and "the text has 5 tokens: a sample needs seq_len + 1 = 9" in done.stderr


def test_the_same_mistake_on_all_ranks_is_one_sentence_under_mpirun(text):
    need_mpi()
    done = run("train", "--text", "missing.txt", "--mesh", "tp=2", *TINY, ranks=2)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.count("the text missing.txt cannot be read: No such file or directory") == 1


def test_a_folder_that_only_rank_0_uses_and_cannot_is_one_sentence_under_mpirun(text):
    need_mpi()
    done = run("train", "--text", text, "--mesh", "tp=2", *TINY, "--out", "/proc/results", ranks=2, limit=30)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.count("the results cannot be written to /proc/results") == 1


@pytest.mark.parametrize("rank", (0, 1))
def test_an_error_of_one_rank_alone_ends_all_under_mpirun(tmp_path, text, rank):
    """The ranks that are fine wait in the training's first collective."""
    need_mpi()
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"if '{rank}' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
        "    import refimpl.train.loop\n"
        "    def alone(*args): raise OSError('planted on one rank')\n"
        "    refimpl.train.loop.init = alone\n")
    done = run("train", "--text", text, "--mesh", "tp=2", *TINY, ranks=2, limit=30, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and done.stderr.count("refimpl train: planted on one rank") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_mesh_that_cuts_the_sequence_says_what_one_rank_says(text):
    """But for the speed: losses to four digits, validation and sample."""
    need_mpi()
    cut = run("train", "--text", text, "--mesh", "cp=2", "--attention", "ring", "--layout", "zigzag", *TINY, ranks=2)
    whole = run("train", "--text", text, *TINY)
    assert (cut.returncode, cut.stderr) == (whole.returncode, whole.stderr) == (0, "")
    said = [re.sub("[0-9,]+ tokens/s", "", done.stdout) for done in (cut, whole)]
    assert said[0] == said[1] and "loss 5.5" in said[0]


def test_doctor_names_what_is_there_and_what_to_do():
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    rows = {line[8:24].strip(): line for line in done.stdout.splitlines()}
    assert rows["numpy"].split()[-1] == np.__version__ and "threads for this rank" in rows["BLAS"]
    assert "two ranks started, two seen" in rows["launcher"] or "missing" in done.stdout
    assert all("pip install" in line or "GPU" in line for line in done.stdout.splitlines() if line.startswith("missing"))


@pytest.mark.parametrize("flags", ([], ["--bind-to", "core"]))
def test_doctor_shows_every_rank_under_mpirun(flags):
    """Where it is, the cores and BLAS threads it has, and whether ranks watch over one another."""
    need_mpi()
    if any(os.environ.get(name) for name in THREAD_VARIABLES):
        pytest.skip("the user has set the threads")
    command = mpirun_command(2)
    done = subprocess.run([command[0], *flags, *command[1:], sys.executable, "-m", "refimpl", "doctor"], capture_output=True,
                          text=True, timeout=90, stdin=subprocess.DEVNULL)
    if flags and done.returncode and "bind" in done.stderr:
        pytest.skip("there are not two cores to bind to")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, taken = {line[8:24].strip(): line[24:] for line in done.stdout.splitlines()}, []
    for rank in range(2):
        found = re.fullmatch(r"host (\S+), local rank (\d+), cores? ([\d,-]+), (?:(\d+) BLAS threads?|BLAS threads unknown)",
                             rows[f"rank {rank}"])
        assert found.group(1) == platform.node() and int(found.group(2)) == rank
        spans = [part.partition("-") for part in found.group(3).split(",")]
        taken.append({core for a, _, b in spans for core in range(int(a), int(b or a) + 1)})
        assert 1 <= int(found.group(4) or 1) <= len(taken[rank])
    if flags:
        assert not taken[0] & taken[1]
    assert "the ranks are connected beside MPI" in rows["watch"]


def test_doctor_shows_the_switches(monkeypatch):
    done = run("doctor", REFIMPL_TIMEOUT="inf")
    lines = [line for line in done.stdout.splitlines() if line[8:24].strip() == "switch"]
    assert [line[24:].partition(": ")[0] for line in lines] == [
        "REFIMPL_CHECKED=1 (default)", "REFIMPL_TIMEOUT=inf (set)", "REFIMPL_CUDA_AWARE=0 (default)"]
    done = run("doctor", REFIMPL_TIMEOUT="soon", REFIMPL_CHEKED="0")
    assert done.returncode == 1 and not done.stderr
    assert "wrong   switch          REFIMPL_TIMEOUT=soon is not a number of seconds above 0, or inf" in done.stdout
    assert "wrong   switch          REFIMPL_CHEKED is not one of them" in done.stdout


def test_doctor_shows_a_wrong_switch_under_mpirun_once():
    need_mpi()
    done = run("doctor", ranks=2, REFIMPL_TIMEOUT="soon")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stdout.count("REFIMPL_TIMEOUT=soon is not a number") == 1


def test_doctor_shows_the_launcher_without_a_library(tmp_path):
    need_mpi()
    (tmp_path / "mpi4py.py").write_text("raise ImportError('planted')")
    done = run("doctor", PYTHONPATH=str(tmp_path))
    rows = {line[8:24].strip(): line for line in done.stdout.splitlines()}
    assert "planted" in rows["MPI library"] and "apt-get install mpich" in rows["MPI library"]
    assert f"{mpirun_command(2)[0]}, of no use without a library" in rows["launcher"]


def test_help_of_every_command_reads_without_a_traceback():
    for command in ([], ["train"], ["demo"], ["doctor"]):
        done = run(*command, "--help")
        assert done.returncode == 0 and done.stdout.startswith("usage: refimpl") and not done.stderr


def test_the_package_runs_without_mpi4py_and_without_extras(tmp_path):
    """No MPI library, no threadpoolctl, tqdm or matplotlib: serial training and ranks as threads work."""
    program = ("import sys\n"
               "for name in ('mpi4py', 'threadpoolctl', 'tqdm', 'matplotlib', 'cupy'): sys.modules[name] = None\n"
               "from refimpl.__main__ import main\n"
               "from refimpl.comm import run_threads\n"
               "import numpy as np\n"
               "assert run_threads(2, lambda c: c.all_reduce(np.ones(2)).sum()) == [4.0, 4.0]\n"
               f"raise SystemExit(main({['train', '--text', str(tmp_path / 't'), *TINY[:-1]]!r}))\n")
    (tmp_path / "t").write_text("without anything else " * 20)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss 5." in done.stderr           # lines, where there is no bar


def make(*arguments):
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    return subprocess.run(["make", *arguments], capture_output=True, text=True, timeout=60, cwd=HERE)


def test_make_has_the_two_commands():
    for target in ("demo", "test", "test-openmpi"):
        done = make("--dry-run", target)
        assert done.returncode == 0, done.stderr
    assert 'refimpl demo --text "some file"' in make("--dry-run", "demo", "TEXT=some file").stdout


def test_make_names_a_python_that_is_not_there(tmp_path):
    done = make("demo", f"VENV={tmp_path / 'v'}", "PYTHON=python9")
    assert done.returncode != 0 and "there is no python9 here" in done.stderr and "newer" not in done.stderr
