"""Real English: a file or folder, or by default the documentation of Python's standard library, which every CPython carries."""
import ast
import os
import pydoc_data.topics
import sysconfig
from pathlib import Path


def standard_library() -> str:
    """The language reference topics of pydoc and the docstrings of the standard library's modules, about 2 MB.

    Sources are parsed, not imported.  The text varies with the Python version: compare runs of one Python only.
    """
    parts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):       # a broken file in somebody's installation is not our concern
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        parts += [text for node in ast.walk(tree) if isinstance(node, documented) and (text := ast.get_docstring(node))]
    return "\n\n".join(parts)


def read_text(path: str) -> str:
    """The text of a file, or of all files below a folder with blank lines between, sorted by their paths, folder by folder.

    Below a folder, names that begin with a dot, links to folders and empty files are left out.
    Error: ValueError that names the file and the reason: missing, not a file, not utf-8, empty; a folder without a file.
    """
    parts = [read_file(file) for file in (files_below(path) if os.path.isdir(path) else [path])]
    text = "\n\n".join(filter(None, parts))
    if not text:
        raise ValueError(f"the text {path} is empty")
    return text


def read_file(path: str | Path, what: str = "text") -> str:
    """The text of one file, which may be empty.  Error: ValueError with the reason; `what` says of what use the file is."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8")
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {path} is not utf-8: byte {error.start} is {error.object[error.start]:#04x}") from None


def files_below(root: str) -> list[Path]:
    """The files that `read_text` reads in a folder.  Error: ValueError for a pipe or a broken link, and where there is none."""
    def refuse(error: OSError) -> None:
        raise ValueError(f"the folder {error.filename} cannot be read: {error.strerror}")
    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]         # what is left here is walked into
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file: a folder of texts has files and folders alone")
    if not files:
        raise ValueError(f"the folder {root} has no file (names that begin with a dot are left out)")
    return sorted(files)
