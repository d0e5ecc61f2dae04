"""Files that are whole or not there, whenever the process is killed.  (Where the machine may fail, too: checkpoint.py.)"""
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator


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
