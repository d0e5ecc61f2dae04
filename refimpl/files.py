"""Files that are whole or not there, whenever the process is killed (where the machine may fail, too: checkpoint.py).

And JSON of others, which is hostile until checked.
"""
import json
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Another name to write to, which takes the place of `path` at the end: never half a file.

    Missing folders are made.  Error: ValueError where writing fails, and `path` is as it was.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):                         # gone already, if all went well
            part.unlink()


def parse_json(text: bytes) -> Any:
    """JSON as the standard has it: no NaN, no name twice.  Error: ValueError ("is not JSON: ...")."""
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("it has a name twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"it has no {constant}")
    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:       # not utf-8, not JSON, a number of 5000 digits
        raise ValueError(f"is not JSON: {error}") from None
