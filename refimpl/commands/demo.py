"""python -m refimpl demo: train a model under mpirun and once more serially, and hold the two against each other.

    python -m refimpl demo                          the mesh dp=2,tp=2 on the documentation of the standard library
    python -m refimpl demo --mesh tp=2 --text FILE  another mesh, another text (two runs read it: a file, not a pipe)
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from refimpl import tensorfile
from refimpl.analysis import local_parameters, step_payload
from refimpl.comm import Mesh
from refimpl.comm.launch import mpirun_command
from refimpl.comm.paper import paper_mesh
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.commands.train import SMALL
from refimpl.golden import Difference, compare, gauge_scales
from refimpl.models import parameters
from refimpl.train import Options

ONE_STEP = 1e-12        # design: the same sums in another order differ by rounding, 1e-16 times a few hundred summands
WHOLE_RUN = 1e-8        # training multiplies a rounding difference (measured: by up to 1e5 in 250 steps); a forgotten f gives 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", help="train on this utf-8 text (default: the documentation of the standard "
                        "library)")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="the mesh (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--device", default="numpy", help="numpy, or cupy: one GPU per local rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="results (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    mesh = paper_mesh(args.mesh)
    options = Options(steps=args.steps)
    if args.text and Path(args.text).exists() and not Path(args.text).is_file():
        raise ValueError(f"the text {args.text} is not a file: two runs read it, so save what comes through a pipe first")
    n = local_parameters(SMALL, Mesh())
    text = args.text or "the documentation of Python's standard library"
    print(f"A GPT-2 of {SMALL.n_layers} layers, d_model {SMALL.d_model}, {SMALL.n_heads} heads: {n:,} parameters, "
          f"{options.dtype}, bytes as tokens.\nText: {text}.  {options.steps} steps of {options.batch_size} x "
          f"{options.seq_len} tokens.\n")
    sharded, serial = args.out / "sharded", args.out / "serial"
    start(f"mpirun -n {mesh.world.size}, mesh {mesh}", mpirun_command(mesh.world.size), args.mesh, sharded, args)
    start("serial, the same seed, one core", [], "dp=1", serial, args)
    return report(args, mesh, options, *(json.loads((d / "summary.json").read_text("utf-8")) for d in (sharded, serial)))


def start(title: str, launcher: list[str], mesh: str, out: Path, args: argparse.Namespace) -> None:
    """One training run in processes of its own.  Error: SystemExit where it fails; it has said why."""
    print(title, flush=True)
    for old in (*out.glob("*.safetensors"), out / "summary.json", out / "log.jsonl"):
        old.unlink(missing_ok=True)                     # an old result must not pass for a new one
    bar = "--bar" if sys.stderr.isatty() else "--no-bar"
    command = [*launcher, sys.executable, "-m", "refimpl", "train", "--mesh", mesh, "--device", args.device, "--out", str(out),
               "--steps", str(args.steps), bar, *(["--text", str(Path(args.text).resolve())] if args.text else [])]
    one_thread = {"OMP_NUM_THREADS": "1", **os.environ}     # matrices this small do not gain from a second BLAS thread
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=one_thread)
    if done.returncode or not (out / "summary.json").exists():
        raise SystemExit(f"the run failed: {' '.join(command)}")


def report(args: argparse.Namespace, mesh: Mesh, options: Options, a: dict[str, Any], b: dict[str, Any]) -> int:
    """Both runs side by side.  1 where they disagree."""
    losses = list(zip(a["losses"], b["losses"]))
    print(f"\n{'':24}{str(mesh):>14}{'serial':>14}{'difference':>14}")
    for step in sorted({0, *(options.steps * k // 5 - 1 for k in range(1, 6))} - {-1}):
        x, y = losses[step]
        print(f"loss, step {step + 1:<13}{x:14.10f}{y:14.10f}{abs(x - y):14.1e}")
    print(f"{'tokens per second':24}{a['tokens_per_second']:14,.0f}{b['tokens_per_second']:14,.0f}")

    print("\nlargest |sharded - serial| / scale, over every element of every array")
    checks = [(f"{len(losses)} losses", max(abs(x - y) / y for x, y in losses), "", WHOLE_RUN)]
    for what, file, limit in (("gradients, step 1", "grads_first", ONE_STEP),
                              (f"gradients, step {options.steps}", "grads_last", WHOLE_RUN),
                              (f"parameters, step {options.steps}", "params", WHOLE_RUN)):
        worst = differences(args.out, file)[0]
        checks.append((what, worst.relative, f"{worst.name}{list(worst.index)}", limit))
    for what, relative, where, limit in checks:
        print(f"  {what:24}{relative:10.1e}  {'ok' if relative <= limit else 'DISAGREE'}, at most {limit:.0e}   {where}")

    print("\npayload per rank and step, in elements")
    agree = all(relative <= limit for _, relative, _, limit in checks)
    formulas = step_payload(SMALL, mesh, options.batch_size, options.seq_len)
    for axis in dict.fromkeys([*formulas, *a["payload"]]):
        counted, (elements, formula) = a["payload"].get(axis, 0), formulas.get(axis, (0, "nothing travels"))
        equal = counted == elements
        agree = agree and equal
        print(f"  {axis:6}counted {counted:>9,}   formula {elements:>9,}   {'ok' if equal else 'DISAGREE'}   {formula}")

    same = "the same from both runs" if a["sample"] == b["sample"] else "of the sharded run"
    print(f"\nsample, {same}:\n  " + "\n  ".join(a["sample"].splitlines()))
    print(f"\n{picture(args.out, mesh, a['losses'], b['losses'])}\nlogs: {args.out}/*/log.jsonl")
    print("OK: sharded equals serial" if agree else "FAILED: sharded and serial disagree")
    return 0 if agree else 1


def differences(out: Path, file: str) -> list[Difference]:
    """The two runs' arrays in `file`, compared.  A gauge parameter's update is noise: its value is left out."""
    a, b = (tensorfile.read(out / run / f"{file}.safetensors") for run in ("sharded", "serial"))
    gauges = {name for name, row in parameters(SMALL, Mesh()).items() if row.gauge}
    if file == "params":
        a, b = ({name: t for name, t in x.items() if name not in gauges} for x in (a, b))
        gauges = set()
    return compare(a, b, gauge_scales(gauges))


def picture(out: Path, mesh: Mesh, sharded: list[float], serial: list[float]) -> str:
    """Both loss curves and their difference, as loss.png.  Says where it is, or what is missing."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    figure, (top, bottom) = plot.subplots(2, 1, sharex=True, figsize=(7, 4.6), height_ratios=(3, 1), layout="constrained")
    steps = range(1, len(serial) + 1)
    top.plot(steps, serial, color="#bbbbbb", linewidth=5, label="serial")
    top.plot(steps, sharded, color="#1f5fa8", linewidth=1.2, label=f"mpirun -n {mesh.world.size}, mesh {mesh}")
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False)
    bottom.semilogy(steps, [max(abs(x - y), 1e-17) for x, y in zip(sharded, serial)], ".", color="#1f5fa8", markersize=3)
    bottom.set_ylim(1e-17, 1e-8)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    figure.savefig(out / "loss.png", dpi=110)
    plot.close(figure)
    return f"picture: {out / 'loss.png'}"
