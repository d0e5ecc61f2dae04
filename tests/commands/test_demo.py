"""Localises a demo that says OK where the runs disagree, compares old results, or gives up on a mesh that is fine."""
import argparse
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command
from refimpl.commands import demo


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return str(path)


def run(*arguments, **environment):
    """The demo, in a process of its own."""
    try:
        mpirun_command(2)
    except CommError as error:
        pytest.skip(str(error))
    return subprocess.run([sys.executable, "-m", "refimpl", "demo", *arguments], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env=os.environ | environment)


def test_the_demo_agrees_on_a_mesh_and_says_so(tmp_path, text):
    done = run("--mesh", "dp=1,tp=2", "--steps", "3", "--text", text, "--out", str(tmp_path / "demo"), HOME="/proc/none")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "OK: sharded equals serial" in done.stdout and "the same from both runs" in done.stdout
    assert "ok   (4·L + 2)·b·T·D + 3·b·T = 10·8·64·96 + 3·8·64" in done.stdout and "DISAGREE" not in done.stdout
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "demo" / "loss.png").stat().st_size > 5000
    else:
        assert "no picture: pip install" in done.stdout


def test_the_demo_agrees_in_one_step_on_uneven_shares_of_the_batch(tmp_path, text):
    done = run("--mesh", "dp=3", "--steps", "1", "--text", text, "--out", str(tmp_path / "demo"))
    assert done.returncode == 0 and "OK: sharded equals serial" in done.stdout, done.stdout + done.stderr


def test_the_demo_fails_where_a_run_fails(tmp_path):
    done = run("--steps", "1", "--text", "missing.txt", "--out", str(tmp_path / "demo"))
    assert done.returncode != 0 and "missing.txt cannot be read" in done.stderr and "the run failed: " in done.stderr
    assert "OK" not in done.stdout


def test_the_demo_refuses_a_text_that_it_can_read_only_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = run("--text", str(tmp_path / "pipe"), "--out", str(tmp_path / "demo"))
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "pipe is not a file: two runs read it, so save what comes through a pipe first" in done.stderr


# -- planted disagreements: two serial runs take the place of the two --------------------------------------------------


def nudge(file, name, place, relative):
    """Change one element of a saved array by `relative` times the array's largest."""
    def plant(out):
        path = out / f"{file}.safetensors"
        arrays = tensorfile.read(path)
        arrays[name][place] += relative * np.abs(arrays[name]).max()
        tensorfile.write(path, arrays)
    return plant


def summary(**values):
    """Change what a run says of itself."""
    def plant(out):
        path = out / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return plant


PLANTED = {
    "a parameter": (nudge("params", "layers.1.mlp.up.w", (3, 5), 1e-6), "DISAGREE, at most 1e-08   layers.1.mlp.up.w[3, 5]"),
    "a gradient of step 1": (nudge("grads_first", "layers.0.attn.q.w", (2, 1), 1e-9),
                             "DISAGREE, at most 1e-12   layers.0.attn.q.w[2, 1]"),
    "a gradient of the last step": (nudge("grads_last", "norm.g", (4,), 1e-6), "DISAGREE, at most 1e-08   norm.g[4]"),
    "a loss": (summary(losses=[5.0, 5.0]), "DISAGREE, at most 1e-08"),
    "a loss that is gone": (summary(losses=[float("nan")] * 2), "DISAGREE, at most 1e-08"),
    "what travelled": (summary(payload={"tp": 7}), "tp    counted         7   formula         0   DISAGREE"),
    "nothing": (lambda out: None, "OK: sharded equals serial"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_demo_fails_where_the_runs_disagree(tmp_path, text, monkeypatch, capsys, case):
    plant, said = PLANTED[case]

    def serial(title, launcher, mesh, out, args):
        assert main(["train", "--text", text, "--out", str(out), "--steps", str(args.steps), "--no-bar", "--sample", "1"]) == 0
        if out.name == "sharded":
            plant(out)
    monkeypatch.setattr(demo, "start", serial)
    monkeypatch.setattr(demo, "picture", lambda *args: "")
    code = main(["demo", "--mesh", "dp=1", "--steps", "2", "--out", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert said in printed and printed.count("DISAGREE") == (case != "nothing"), printed
    assert code == (case != "nothing") and ("FAILED: sharded and serial disagree" in printed) == (case != "nothing")


# -- one run -----------------------------------------------------------------------------------------------------------


def start(monkeypatch, out, **environment):
    """demo.start with a training that does nothing; the environment it would have had."""
    seen = {}

    def nothing(command, env, **kwargs):
        seen.update(env)
        return subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(subprocess, "run", nothing)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="the run failed"):
        demo.start("title", [], "dp=1", out, argparse.Namespace(steps=1, device="numpy", text=None))
    return seen


def test_results_of_an_earlier_run_are_gone_before_a_run(tmp_path, monkeypatch):
    files = ("summary.json", "log.jsonl", "grads_first.safetensors", "grads_last.safetensors", "params.safetensors")
    for file in files:
        (tmp_path / file).write_text("old")
    (tmp_path / "notes.txt").write_text("not ours")
    start(monkeypatch, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_gets_one_blas_thread_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start(monkeypatch, tmp_path)["OMP_NUM_THREADS"] == "1"
    assert start(monkeypatch, tmp_path, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"
