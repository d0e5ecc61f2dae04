"""Real English: a file, or by default the documentation of the Python standard library, which every CPython carries."""
import ast
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
    """The text of a file.  Error: ValueError with the reason: missing, a folder, not utf-8, empty."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"the text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the text {path} is not utf-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    if not text:
        raise ValueError(f"the text {path} is empty")
    return text
