"""The command line: python -m refimpl train | tokenize | golden | demo | doctor.

`python -m refimpl COMMAND --help` explains each.
"""
import argparse
import os
import re
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from io import StringIO
from typing import Sequence

from refimpl.comm import CommError
from refimpl.comm.launch import INTERRUPTED, fail, launched_rank
from refimpl.commands import demo, doctor, golden, tokenize, train

COMMANDS = {"train": train, "tokenize": tokenize, "golden": golden, "demo": demo, "doctor": doctor}
CLOSED = 141                                            # 128 + SIGPIPE: as of other programs whose reader is gone


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  What the user got wrong ends in one sentence, without a traceback, and all ranks end."""
    with redirect_stderr(StringIO()) if launched_rank() else nullcontext(), \
            redirect_stdout(StringIO()) if launched_rank() else nullcontext():      # rank 0 speaks for all
        args = parse(argv)
    try:
        status = int(COMMANDS[args.command].run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:                             # of `| head`, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (ValueError, ArithmeticError, CommError, OSError) as error:
        if args.traceback:
            raise
        fail(f"refimpl {args.command}: {error}")
    except KeyboardInterrupt:
        fail(f"refimpl {args.command}: interrupted", INTERRUPTED)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refimpl", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, module in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=(module.__doc__ or "").partition(": ")[2].partition("\n")[0],
                                            description=module.__doc__, usage=f"refimpl {name} [--FLAG VALUE ...]",
                                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        module.add_arguments(parsers[name])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        used = getattr(args, "parser", parsers[args.command])           # an action of golden has its own
        flags = set(re.findall(r"--[a-z][a-z0-9-]*", used.format_help()))
        near = get_close_matches(unknown[0].partition("=")[0], flags, n=3)
        used.error(f"there is no {unknown[0]}: " + (
            f"did you mean {' or '.join(near)}?" if near else f"{used.prog} --help lists what there is"))
    return args


if __name__ == "__main__":
    sys.exit(main())
