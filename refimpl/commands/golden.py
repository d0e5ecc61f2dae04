"""python -m refimpl golden: right values for somebody else's stack, and whether its own are right.

    python -m refimpl golden make --model gpt-micro --out golden/gpt                a bundle of right values
    mpirun -n 4 python -m refimpl golden make --mesh dp=2,tp=2 --out golden/gpt22   the same on a mesh (also without mpirun)
    python -m refimpl golden ops --out golden/ops                                   every op's and collective's cases
    python -m refimpl golden show golden/gpt                                        what is in it
    python -m refimpl golden init-code --lang c                                     weights and inputs in your language
    python -m refimpl golden check dump.safetensors --against golden/gpt --dtype bfloat16

check ends with 0: right, 1: wrong, 2: usage, 3: incomplete, 4: a damaged bundle, 5: no power.
"""
import argparse
import math
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Callable

from refimpl.comm import run_threads, world
from refimpl.comm.launch import fail, launched_rank, launcher
from refimpl.comm.mesh import AXES, parse_dims
from refimpl.commands.settings import add_flags, checked, defaults, read_toml
from refimpl.golden import opcases
from refimpl.golden.actual import read as read_actual
from refimpl.golden.bundle import Bundle, read
from refimpl.golden.conventions import FILE, Stated, read_stated
from refimpl.golden.initcode import LANGUAGES, init_code
from refimpl.golden.listing import listing, plural
from refimpl.golden.make import make
from refimpl.golden.manifest import BundleError
from refimpl.golden.match import UsageError
from refimpl.golden.names import NAMES
from refimpl.golden.noise import RUNS
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.report import DAMAGED, USAGE, json_text
from refimpl.golden.session import DTYPES, How, compared
from refimpl.models import Config
from refimpl.parallel import ATTENTIONS, LAYOUTS

EXAMPLE = MODELS["gpt-micro"]
FEWEST = 8                                              # runs: of fewer, right stacks would fail
SETTINGS = {f.name: f.default for f in fields(Recipe) if f.name not in ("config", "mesh")}
HELP = {"seed": "of weights and inputs", "steps": "training steps", "batch_size": "samples of a step",
        "seq_len": "tokens of a sample",
        "lr": "learning rate", "beta1": "AdamW's decay of the first moment", "beta2": "AdamW's decay of the second moment",
        "eps": "AdamW's epsilon", "weight_decay": "weight decay, of matrices and embeddings",
        "clip": "largest norm of the gradient: a larger one is scaled down to it",
        "attention": f"how queries meet keys: {', '.join(ATTENTIONS)}",
        "layout": f"how a sequence is cut over the cp ranks: {', '.join(LAYOUTS)}"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="make | show | check | ops | init-code",
                                    prog="refimpl golden")

    def action(name: str, what: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=what, description=what, usage=f"refimpl golden {name} [--FLAG VALUE ...]",
                                   allow_abbrev=False)
        added.set_defaults(parser=added)
        return added
    to_make = action("make", "run a small model for a few steps and write down everything")
    to_make.add_argument("--model", default="gpt-micro", metavar="NAME|FILE",
                         help=f"{', '.join(MODELS)}, or a TOML file with a section [model] (default: %(default)s)")
    to_make.add_argument("--mesh", default="dp=1", metavar="AXIS=SIZE,...", help="how ranks are used (default: %(default)s)")
    to_make.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle, a new folder")
    to_make.add_argument("--runs", type=int, default=RUNS, metavar="N", help="runs by which rounding is measured (default: "
                         "%(default)s)")
    add_flags(to_make, SETTINGS, HELP)
    to_ops = action("ops", "write the cases of every op and collective, the edge library and the exact suite")
    to_ops.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle, a new folder")
    to_show = action("show", "say what is in a bundle")
    to_show.add_argument("bundle", type=Path, metavar="DIR")
    to_show.add_argument("--values", metavar="PATTERN", help="the numbers of the values that match: step1/loss, '*attn.q*'")
    to_check = action("check", "compare a stack's values with a bundle")
    to_check.add_argument("actual", type=Path, metavar="ACTUAL", help=".safetensors, .npz, a folder of .npy; or a folder with "
                          "one of them for each rank")
    to_check.add_argument("--against", type=Path, required=True, metavar="DIR", help="the bundle")
    to_check.add_argument("--dtype", choices=DTYPES, help="the format the stack computes in (default: that of its arrays)")
    to_check.add_argument("--names", choices=NAMES, help="whose names the arrays have (default: refimpl's)")
    to_check.add_argument("--as", dest="prefix", default="", metavar="PREFIX", help="what is missing before each name, such as "
                          "step1/grad")
    to_check.add_argument("--conventions", type=Path, metavar="FILE", help="what the stack says of its conventions, as JSON "
                          f"(default: {FILE} in ACTUAL, where that is a folder that has it)")
    to_check.add_argument("--local", action="store_true", help="replay every op from the stack's own inputs, to find the one "
                          "that errs")
    to_check.add_argument("--all", action="store_true", help="incomplete (3) unless every value of the bundle was given")
    to_check.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found as JSON")
    to_code = action("init-code", "print a short program that makes the weights and inputs without a file")
    to_code.add_argument("--lang", required=True, choices=LANGUAGES)


def run(args: argparse.Namespace) -> int:
    try:
        if args.action != "make" and launcher() and world().size > 1:
            raise UsageError(f"golden {args.action} is for one rank: start it without mpirun")
        return ACTIONS[args.action](args) or 0
    except (ValueError, OSError, MemoryError) as error:
        if args.traceback or isinstance(error, BrokenPipeError):
            raise
        status = DAMAGED if isinstance(error, BundleError) else USAGE
        if args.action == "make":                       # by all ranks
            fail(f"refimpl golden: {error}", status)
        if not launched_rank():
            print(f"refimpl golden: {error}", file=sys.stderr)
        return status


def run_make(args: argparse.Namespace) -> None:
    dims = dict.fromkeys(AXES, 1) | parse_dims(args.mesh)
    config = model(args.model)
    if not hasattr(args, "seq_len") and config.max_seq_len < Recipe.seq_len:
        raise ValueError(f"{args.model} has max_seq_len {config.max_seq_len}, below the default --seq-len {Recipe.seq_len}: "
                         f"give --seq-len {config.max_seq_len}")
    recipe = Recipe(config, dims, **{name: getattr(args, name) for name in SETTINGS if hasattr(args, name)})
    if args.runs < FEWEST:
        raise ValueError(f"--runs must be at least {FEWEST}, got {args.runs}: rounding is measured by how runs differ")
    comm, n = world(), math.prod(dims.values())
    if comm.size == 1 < n:
        run_threads(n, lambda ranks: make(recipe, ranks, args.out, args.runs))
    elif comm.size == n:
        make(recipe, comm, args.out, args.runs)
    else:
        raise ValueError(f"the mesh {args.mesh} needs {plural(n, 'rank')}, there {'are' if comm.size > 1 else 'is'} "
                         f"{comm.size}")
    if comm.rank == 0:
        print(f"{args.out}: {listing(read(args.out)).splitlines()[0]}")


def model(name: str) -> Config:
    """One of the micro models, or what the section [model] of a TOML file says.  Error: ValueError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"--model must be one of {', '.join(MODELS)} or a .toml file, got {name!r}")
    settings = defaults(Config, EXAMPLE)
    given = read_toml(path, {"model": settings})["model"]
    needed = [f.name for f in fields(Config) if f.name in ("vocab_size", "n_layers", "n_heads", "d_model", "max_seq_len")]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{path}: [model] must say {', '.join(missing)}")
    return Config(**checked(given, settings, f"{path}: [model]"))


def run_ops(args: argparse.Namespace) -> None:
    opcases.make(args.out)
    print(f"{args.out}: {listing(read(args.out)).splitlines()[0]}")


def run_show(args: argparse.Namespace) -> None:
    print(listing(opened(args.bundle), args.values))


def run_check(args: argparse.Namespace) -> int:
    if args.json:
        args.json.write_text("", encoding="utf-8")      # where that cannot be, say so before the work
    flags = {"--dtype": args.dtype, "--names": args.names, "--as": args.prefix, "--conventions": args.conventions}
    command = ["python", "-m", "refimpl", "golden", "check", str(args.actual), "--against", str(args.against)]
    command += [word for flag, value in flags.items() if value for word in (flag, str(value))]
    bundle = opened(args.against)
    report = compared(read_actual(args.actual), bundle, How(
        args.dtype, NAMES.get(args.names), args.prefix, stated(args, bundle), args.local, args.all, shlex.join(command)))
    print(report.text(), end="")
    if args.json:
        args.json.write_text(json_text(report), encoding="utf-8")
    return report.status


def stated(args: argparse.Namespace, bundle: Bundle) -> list[Stated]:
    """What the stack says of its conventions, in a file of its own or beside its arrays."""
    beside = args.actual / FILE
    path = args.conventions or (beside if beside.exists() else None)
    return read_stated(path, bundle.conventions) if path else []


def opened(folder: Path) -> Bundle:
    """A bundle.  Error: UsageError where there is no folder; BundleError where it holds no bundle that can be read."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not there: a bundle is a folder, which `refimpl golden make` makes")
    return read(folder)


def run_code(args: argparse.Namespace) -> None:
    print(init_code(args.lang), end="")


ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "make": run_make, "ops": run_ops, "show": run_show, "check": run_check, "init-code": run_code}
