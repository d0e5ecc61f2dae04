"""Localises faults of the switches: a value that is not understood, one that has no effect, ranks whose switches differ."""
import os
import sys

import pytest

from refimpl.comm.launch import mpirun_command
from refimpl.comm.switches import SWITCHES, Settings, read_switches, switches_set, unknown_switches

from .programs import execute

SHOW = """
import sys
from refimpl.comm import launch, world

def main(comm):
    timeout = comm.watch.timeout if hasattr(comm, "watch") else comm.world.timeout
    sys.stdout.write(f"{comm.checked} {timeout:g}\\n")

if __name__ == "__main__":
    EXPLICIT
    launch(main)
"""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in list(os.environ):
        if name.startswith("REFIMPL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def show(tmp_path):
    def script(explicit=""):
        path = tmp_path / "show.py"
        path.write_text(SHOW.replace("EXPLICIT", explicit))
        return path
    return script


def test_without_any_the_defaults_hold_and_each_says_what_it_is():
    assert read_switches() == Settings(checked=True, timeout=300.0, cuda_aware=False)
    assert [(s.name, s.default) for s in SWITCHES] == [
        ("REFIMPL_CHECKED", "1"), ("REFIMPL_TIMEOUT", "300"), ("REFIMPL_CUDA_AWARE", "0")]
    assert switches_set() == "" and all(s.meaning and s.allowed for s in SWITCHES)


@pytest.mark.parametrize("name, text, field, value", (
    ("REFIMPL_CHECKED", "0", "checked", False), ("REFIMPL_CHECKED", "1", "checked", True),
    ("REFIMPL_CHECKED", "", "checked", True),
    ("REFIMPL_TIMEOUT", "1.5", "timeout", 1.5), ("REFIMPL_TIMEOUT", "inf", "timeout", float("inf")),
    ("REFIMPL_CUDA_AWARE", "1", "cuda_aware", True)))
def test_a_value_is_read(monkeypatch, name, text, field, value):
    monkeypatch.setenv(name, text)
    assert getattr(read_switches(), field) == value
    assert switches_set() == (f"{name}={text}" if text else "")


@pytest.mark.parametrize("name, text, sentence", (
    ("REFIMPL_CHECKED", "yes", r"REFIMPL_CHECKED=yes is not 0 or 1 \(whether the ranks compare .*; default 1\)"),
    ("REFIMPL_CHECKED", "2", "REFIMPL_CHECKED=2 is not 0 or 1"),
    ("REFIMPL_CUDA_AWARE", "true", "REFIMPL_CUDA_AWARE=true is not 0 or 1"),
    ("REFIMPL_TIMEOUT", "soon", r"REFIMPL_TIMEOUT=soon is not a number of seconds above 0, or inf \(.*; default 300\)"),
    ("REFIMPL_TIMEOUT", "0", "REFIMPL_TIMEOUT=0 is not"), ("REFIMPL_TIMEOUT", "-1", "REFIMPL_TIMEOUT=-1 is not"),
    ("REFIMPL_TIMEOUT", "nan", "REFIMPL_TIMEOUT=nan is not"),
    ("REFIMPL_CHEKED", "0", "REFIMPL_CHEKED is not a switch: there are REFIMPL_CHECKED, REFIMPL_TIMEOUT, REFIMPL_CUDA_AWARE")))
def test_what_is_not_understood_is_a_sentence(monkeypatch, name, text, sentence):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=sentence):
        read_switches()
    assert unknown_switches() == ([name] if name == "REFIMPL_CHEKED" else [])


@pytest.mark.parametrize("explicit, variables, shown", (
    ("", {}, "True 300"),
    ("", {"REFIMPL_CHECKED": "0", "REFIMPL_TIMEOUT": "12.5"}, "False 12.5"),
    ("", {"REFIMPL_TIMEOUT": "inf"}, "True inf"),
    ("launch = lambda main: main(world(checked=True, timeout=7.0))", {"REFIMPL_CHECKED": "0"}, "True 7")))
def test_ranks_do_what_the_switches_say_unless_the_program_says_otherwise(show, mpirun, explicit, variables, shown):
    code, out, err, _ = execute([*mpirun_command(2), sys.executable, str(show(explicit))], **variables)
    assert code == 0 and out.splitlines() == [shown] * 2, err


def test_threads_wait_as_long_as_the_switch_says(show):
    code, out, err, _ = execute([sys.executable, str(show()), "--simulate", "2"], REFIMPL_TIMEOUT="12.5")
    assert code == 0 and out.splitlines() == ["True 12.5"] * 2, err


@pytest.mark.parametrize("arguments", ([], ["--simulate", "2"]))
def test_a_wrong_value_is_one_sentence(show, arguments):
    code, out, err, _ = execute([sys.executable, str(show()), *arguments], REFIMPL_TIMEOUT="soon")
    assert code == 1 and out == "" and err.startswith("show.py: REFIMPL_TIMEOUT=soon is not a number") and err.count("\n") == 1


def test_a_wrong_value_is_one_sentence_for_all_ranks(show, mpirun):
    code, out, err, _ = execute([*mpirun_command(2), sys.executable, str(show())], REFIMPL_CHECKED="yes")
    assert code != 0 and out.strip() == "" and err.count("show.py: REFIMPL_CHECKED=yes is not 0 or 1") == 1, err
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ("0", "yes"))
def test_switches_that_only_some_ranks_have_are_a_sentence(show, mpirun, text):
    """As when mpirun passes them on to its own machine only: a rank that checks and one that does not would hang."""
    alone = (f"import os\n    if '1' in map(os.environ.get, ('PMI_RANK', 'OMPI_COMM_WORLD_RANK')): "
             f"os.environ['REFIMPL_CHECKED'] = '{text}'")
    code, out, err, _ = execute([*mpirun_command(2), sys.executable, str(show(alone))])
    assert code != 0 and out.strip() == "" and "Traceback" not in err
    assert err.count(f"show.py: rank 0 has no switch set, rank 1 has REFIMPL_CHECKED={text}: mpirun passes an environment "
                     "variable on to all ranks by -x NAME (Open MPI) or -genv NAME VALUE (MPICH)") == 1, err
