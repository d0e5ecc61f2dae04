"""Localises faults of the command line: a traceback where a sentence is due, a zero status after a failure, a hang."""
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command
from refimpl.comm.mpi import load_mpi
from refimpl.commands import demo

TINY = ["--d-model", "8", "--n-layers", "1", "--steps", "2", "--batch-size", "4", "--seq-len", "8", "--sample", "5", "--no-bar"]


def run(*arguments, ranks=0, limit=90):
    command = [*(mpirun_command(ranks) if ranks else []), sys.executable, "-m", "refimpl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)


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
    (["--mesh", "tp=2"], "the mesh tp=2 needs 2 ranks (dp * cp * tp, each at least 1), there are 1"),
    (["--mesh", "tp=two"], "mesh 'tp=two': 'tp=two' is not AXIS=SIZE"),
    (["--text", "missing.txt"], "the text missing.txt cannot be read: No such file or directory"),
    (["--lr", "nan"], "the learning rate must be a positive number, got nan"),
    (["--lr", "0"], "the learning rate must be a positive number, got 0.0"),
    (["--dtype", "float16"], "dtype 'float16' is not supported: use one of float64, float32"),
    (["--d-model", "9"], "d_model must be a multiple of n_heads, got d_model 9, n_heads 4"),
    (["--seq-len", "100"], "seq_len 100 is longer than the model's max_seq_len 64"),
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


def test_the_demo_agrees_on_a_mesh_and_says_so(tmp_path, text):
    need_mpi()
    done = run("demo", "--mesh", "dp=1,tp=2", "--steps", "3", "--text", text, "--out", str(tmp_path / "demo"), limit=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: sharded equals serial" in done.stdout and "the same from both runs" in done.stdout
    assert "4·L·b·T·D = 4·2·8·64·96" in done.stdout
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 5000


def test_the_demo_fails_where_the_runs_disagree(tmp_path, text, monkeypatch, capsys):
    """Two serial runs take the place of the two; one parameter of the first is then changed by 1e-6."""
    def serial(title, launcher, mesh, out, args):
        assert main(["train", "--text", text, "--out", str(out), "--steps", str(args.steps), "--no-bar", "--sample", "1"]) == 0
        if out.name == "sharded":
            params = tensorfile.read(out / "params.safetensors")
            params["layers.1.mlp.up.w"][3, 5] += 1e-6 * np.abs(params["layers.1.mlp.up.w"]).max()
            tensorfile.write(out / "params.safetensors", params)
    monkeypatch.setattr(demo, "start", serial)
    assert main(["demo", "--mesh", "dp=1", "--steps", "2", "--out", str(tmp_path / "demo")]) == 1
    printed = capsys.readouterr().out
    assert "DISAGREE, at most 1e-08   layers.1.mlp.up.w[3, 5]" in printed and "FAILED: sharded and serial disagree" in printed


def test_the_demo_fails_where_a_run_fails(tmp_path):
    need_mpi()
    done = run("demo", "--steps", "1", "--text", "missing.txt", "--out", str(tmp_path / "demo"))
    assert done.returncode != 0 and "missing.txt cannot be read" in done.stderr and "the run failed: " in done.stderr
    assert "OK" not in done.stdout


def test_doctor_names_what_is_there_and_what_to_do():
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    rows = {line[8:24].strip(): line for line in done.stdout.splitlines()}
    assert rows["numpy"].split()[-1] == np.__version__ and "threads for this rank" in rows["BLAS"]
    assert "two ranks started, two seen" in rows["launcher"] or "missing" in done.stdout
    assert all("pip install" in line or "GPU" in line for line in done.stdout.splitlines() if line.startswith("missing"))


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
    assert "no progress bar: pip install 'refimpl[run]' brings tqdm" in done.stdout


def test_make_has_the_two_commands():
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    for target in ("demo", "test", "test-openmpi"):
        done = subprocess.run(["make", "--dry-run", target], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
