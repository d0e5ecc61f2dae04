"""Settings of a run: the fields of dataclasses, from their defaults, a TOML file and flags; what comes later counts more.

    [training]              --steps 200 --lr 3e-4           every field is a flag, and a key of its class' section
    steps = 1000
    [model]
    n_layers = 6            ->  {"training": {"steps": 200, "lr": 3e-4, ...}, "model": {"n_layers": 6, ...}}

`defaults` lists settings, `add_flags` makes flags of them, `read_toml` and `checked` read what a file says of them.
"""
import argparse
import json
import sys
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Mapping

LETTERS = {int: "N", float: "X", str: "TEXT"}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", tuple: "a list of texts or of numbers"}


def defaults(cls: Any, example: Any = None, leave_out: str = "") -> dict[str, Any]:
    """The fields of a dataclass with their defaults; those that have none are as in the `example`."""
    return {f.name: getattr(example, f.name) if f.default is MISSING else f.default for f in fields(cls) if f.name != leave_out}


def add_flags(group: Any, default: Mapping[str, Any], help_of: Mapping[str, str]) -> None:
    """A flag for each setting.  What is not given does not appear in the parsed arguments."""
    for name, value in default.items():
        flag, text = "--" + name.replace("_", "-"), help_of[name]
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else \
            ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text += f" (default: {shown})" if shown else ""
        if isinstance(value, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif isinstance(value, tuple):
            group.add_argument(flag, default=argparse.SUPPRESS, metavar="A,B,...", help=text, type=lambda text: tuple(
                int(part) if part.strip().isdecimal() else part.strip() for part in text.split(",") if part.strip()))
        else:
            group.add_argument(flag, type=type(value), default=argparse.SUPPRESS, metavar=LETTERS[type(value)], help=text)


def checked(values: Any, default: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values from a file for some of the settings, as the kinds that these have.  Error: ValueError that names a bad key, and
    the allowed ones, or a bad value, and what it must be."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table of settings, got {values!r}")
    out = {}
    for name, value in values.items():
        if name not in default:
            raise ValueError(f"{where} has no key {name!r}: its keys are {', '.join(default)}")
        kind = type(default[name])
        if kind is float and type(value) is int and abs(value) < 2 ** 1000:
            value = float(value)
        if kind is tuple and isinstance(value, list) and {type(v) for v in value} in ({int}, {str}, set()):
            value = tuple(value)
        if type(value) is not kind:
            raise ValueError(f"{where}: {name} must be {KINDS[kind]}, got {json.dumps(value, default=str)[:100]}")
        out[name] = value
    return out


def read_toml(path: Path, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, checked; those that it lacks are empty.  Error: ValueError."""
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError("a TOML file needs Python 3.11 or the package tomli: pip install '.[run]'") from None
    try:
        found = toml.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"the settings {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:       # not utf-8, or not TOML
        raise ValueError(f"the settings {path} are not TOML: {error}") from None
    if unknown := found.keys() - sections.keys():
        raise ValueError(f"{path} has no use for {min(unknown)!r}: its sections are {', '.join(f'[{s}]' for s in sections)}")
    return {name: checked(found.get(name, {}), default, f"{path}: [{name}]") for name, default in sections.items()}
