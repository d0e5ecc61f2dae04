"""Short programs that make golden weights and inputs without a file, for `refimpl golden init-code`.

Each has the same few functions, and a main that prints values, tokens or ignored targets.
"""
from importlib.resources import files

LANGUAGES = {"c": "init.c", "js": "init.js", "python": "init.py.txt"}


def init_code(language: str) -> str:
    return (files("refimpl.golden") / "init" / LANGUAGES[language]).read_text(encoding="utf-8")
