"""Localises docs/golden.md showing what is not so: its commands are run in an empty folder, in their order, and must print
what the page shows.  Numbers that depend on how a machine rounds may differ: rho, and the element where it is largest.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "golden.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
TABLE = re.compile(r"(  (?:trace|gradients) .*\d) +\S+ +\S+")
STATUS = {"MISMATCH": 1, "PASS": 0}


def commands():
    """Every command of the page and the lines that it prints."""
    out = []
    for block in BLOCK.findall(PAGE):
        for line in block.splitlines():
            if line.startswith("$ "):
                out.append((line[2:], []))
            else:
                out[-1][1].append(line)
    return out


def masked(lines):
    """Without the numbers that may differ."""
    lines = [re.sub(r"^(  (?:rho|there is) +).*", r"\1...", line) for line in lines]
    return [found[1] + " ..." if (found := TABLE.fullmatch(line)) else line for line in lines]


@pytest.fixture
def shell(tmp_path):
    """Run a command line in an empty folder, where `python` is this one and refimpl this checkout."""
    folder, programs = tmp_path / "empty", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    shutil.copy(ROOT / "docs" / "golden_torch.py", folder)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(line):
        return subprocess.run(line, shell=True, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              encoding="utf-8", timeout=300)
    return run


def test_the_page_shows_what_its_commands_print(shell):
    assert len(commands()) > 8, "the page has its commands in blocks of console"
    for line, shown in commands():
        done = shell(line)
        assert masked(done.stdout.splitlines()) == masked(shown), line
        verdict = next((word for word in STATUS if shown and shown[0].endswith(f": {word}")), "PASS")
        assert done.returncode == STATUS[verdict], line


def test_the_page_fits_80_columns():
    long = [line for block in BLOCK.findall(PAGE) for line in block.splitlines() if len(line) > 80]
    assert not long


def test_a_wrong_number_on_the_page_is_found():
    shown = ["  inputs         38     0      0", "  trace          29     0      0    1.11     5.18"]
    assert masked(shown) == ["  inputs         38     0      0", "  trace          29     0      0 ..."]
    assert masked(["  rho           1.1 of the whole"]) == masked(["  rho           1.2 of the whole"])
    assert masked(["  trace          28     0      0    1.11     5.18"]) != masked(shown[1:])
