"""The command line: python -m refimpl train | demo | doctor.  `python -m refimpl COMMAND --help` explains each."""
import argparse
import sys
import time
from typing import NoReturn, Sequence

from refimpl.comm import CommError, world
from refimpl.comm.launch import launcher
from refimpl.commands import demo, doctor, train

COMMANDS = {"train": train, "demo": demo, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  What the user got wrong ends in one sentence, without a traceback, and all ranks end."""
    parser = argparse.ArgumentParser(prog="refimpl", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").partition(": ")[2].partition("\n")[0],
                                                 description=module.__doc__,
                                                 formatter_class=argparse.RawDescriptionHelpFormatter))
    args = parser.parse_args(argv)
    try:
        return int(COMMANDS[args.command].run(args))
    except (ValueError, ArithmeticError, CommError, OSError) as error:
        if args.traceback:
            raise
        fail(f"refimpl {args.command}: {error}")


def fail(sentence: str) -> NoReturn:
    """End all ranks with one sentence.  Where all made the same mistake all come here: rank 0 speaks, the others let it."""
    if launcher():
        time.sleep(0 if world().rank == 0 else 2)
    sys.exit(sentence)


if __name__ == "__main__":
    sys.exit(main())
