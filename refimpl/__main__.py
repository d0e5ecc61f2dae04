"""The command line: python -m refimpl train | tokenize | demo | doctor.  `python -m refimpl COMMAND --help` explains each."""
import argparse
import sys
from typing import Sequence

from refimpl.comm import CommError
from refimpl.comm.launch import INTERRUPTED, fail
from refimpl.commands import demo, doctor, tokenize, train

COMMANDS = {"train": train, "tokenize": tokenize, "demo": demo, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  What the user got wrong ends in one sentence, without a traceback, and all ranks end."""
    parser = argparse.ArgumentParser(prog="refimpl", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").partition(": ")[2].partition("\n")[0],
                                                 description=module.__doc__, usage=f"refimpl {name} [--FLAG VALUE ...]",
                                                 formatter_class=argparse.RawDescriptionHelpFormatter))
    args = parser.parse_args(argv)
    try:
        return int(COMMANDS[args.command].run(args))
    except (ValueError, ArithmeticError, CommError, OSError) as error:
        if args.traceback:
            raise
        fail(f"refimpl {args.command}: {error}")
    except KeyboardInterrupt:
        fail(f"refimpl {args.command}: interrupted", INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
