"""Localises a log that loses or repeats rows, and progress that says too much, too little, or not where it is looked for."""
import json
import os
import re
import select
import struct
import sys

import pytest

from refimpl.train import log
from refimpl.train.log import LINES, Log, Progress, clock, read_log


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


# -- log.jsonl --------------------------------------------------------------------------------------------------------


def test_rows_are_there_as_soon_as_they_are_written(tmp_path):
    file = Log(tmp_path / "new" / "folder", {"run": 1})
    file.write(step=1, loss=0.1)
    assert rows_of(tmp_path / "new" / "folder") == [{"run": 1}, {"step": 1, "loss": 0.1}]
    file.write(step=2, sample="né\n\u2028\x00 🚀")
    file.close()
    assert rows_of(tmp_path / "new" / "folder")[2] == {"step": 2, "sample": "né\n\u2028\x00 🚀"}
    assert read_log(tmp_path / "new" / "folder" / "log.jsonl") == rows_of(tmp_path / "new" / "folder")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Log(None, {"run": 1})
    file.write(step=1)
    file.close()
    assert not os.listdir(tmp_path)


def test_numbers_come_back_to_the_last_bit(tmp_path):
    file = Log(tmp_path, {})
    file.write(loss=0.1 + 0.2, small=5e-324)
    file.close()
    assert rows_of(tmp_path)[1] == {"loss": 0.1 + 0.2, "small": 5e-324}


@pytest.mark.parametrize("after, kept", [
    (0, [{"run": 2}]), (1, [{"run": 1}, {"step": 1}, {"run": 2}]), (2, [{"run": 1}, {"step": 1}, {"step": 2}, {"run": 2}]),
    (9, [{"run": 1}, {"step": 1}, {"step": 2}, {"step": 3}, {"run": 2}]),
])
def test_a_run_that_goes_on_keeps_the_rows_up_to_its_checkpoint_and_drops_the_rest(tmp_path, after, kept):
    (tmp_path / "log.jsonl").write_text('{"run": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 1, "lo')
    file = Log(tmp_path, {"run": 2}, after)
    file.write(step=after + 1)
    file.close()
    assert rows_of(tmp_path) == kept + [{"step": after + 1}] and os.listdir(tmp_path) == ["log.jsonl"]


def test_a_run_that_goes_on_in_a_new_folder_begins_a_log(tmp_path):
    Log(tmp_path, {"run": 2}, 5).close()
    assert rows_of(tmp_path) == [{"run": 2}]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "deep", "Not a directory")):
        with pytest.raises(ValueError, match=f"the results cannot be written to {folder}: {reason}"):
            Log(folder, {})


# -- lines ------------------------------------------------------------------------------------------------------------


def progress(steps, first=0, show=True):
    p = Progress(steps, first, show)
    for step in range(first + 1, steps + 1):
        p.step(step, 5.0, 1234.5)
    p.close()


@pytest.mark.parametrize("steps", (1, 2, 19, 20, 21, 39, 40, 59, 1000, 1019))
def test_there_are_about_twenty_lines_and_the_last_step_is_one(capsys, steps):
    progress(steps)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"step {steps}/{steps}  loss 5.0000  1,234 tokens/s  0:00 left"
    assert min(steps, LINES // 2) <= len(lines) <= LINES + 1


def test_the_time_left_is_by_the_steps_of_this_run(monkeypatch, capsys):
    """Ten of the hundred steps are done by an earlier run, ten by this one in 30 s: 80 are left, 240 s."""
    now = iter((100.0, 130.0))
    monkeypatch.setattr(log.time, "perf_counter", lambda: next(now))
    Progress(100, 10, True).step(20, 5.0, 10.0)
    assert capsys.readouterr().err == "step 20/100  loss 5.0000  10 tokens/s  4:00 left\n"


def test_what_is_not_to_be_shown_is_not_shown(capsys):
    progress(40, show=False)
    Progress(40, 0, False).say("words")
    assert capsys.readouterr() == ("", "")


def test_words_are_lines_on_stderr_where_there_is_no_bar(capsys):
    Progress(40, 0, True).say("né: words")
    assert capsys.readouterr() == ("", "né: words\n")


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.4, "59:59"),
                                           (3599.6, "1:00:00"), (90061, "25:01:01")])
def test_a_time_as_people_write_it(seconds, text):
    assert clock(seconds) == text


# -- a terminal -------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """terminal(act) -> what `act()` says on stderr, which is a terminal of 120 columns."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))          # a new one has no width

    def said_by(act):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", file)
            act()
        file.write("(end)")                             # a terminal hands on what is written when it comes to it
        file.flush()
        text = b""
        while not text.endswith(b"(end)"):
            assert select.select([master], [], [], 10)[0], text
            text += os.read(master, 1 << 16)
        return text.decode().removesuffix("(end)")
    with open(slave, "w", encoding="utf-8") as file:
        yield said_by
    os.close(master)


def test_a_terminal_has_a_bar_with_loss_speed_and_time_left(terminal):
    pytest.importorskip("tqdm")

    def act():
        p = Progress(12, 2, True)
        p.bar.mininterval, p.bar.start_t, p.bar.last_print_t = 0, p.bar.start_t - 30, p.bar.start_t - 30
        p.step(3, 4.125, 98765.4)                       # the first step of this run, in 30 s: 9 are left
        p.say("words above the bar")
        p.close()
    text = terminal(act)
    assert re.search(r"25%\|\S* *\| 3/12 \[00:3\d<04:3\d, +30\.\d+s/step, loss 4\.1250, 98,765 tokens/s\]", text), text
    assert re.search(r"\r *\rwords above the bar\r\n", text)


def test_a_bar_that_is_not_wanted_is_not_there_on_a_terminal_either(terminal):
    assert terminal(lambda: progress(3, show=False)) == ""


def test_without_tqdm_a_terminal_has_a_sentence_and_lines(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    first, *lines = terminal(lambda: progress(2)).splitlines()
    assert first == "no progress bar: pip install '.[run]' brings tqdm"
    assert [line[:8] for line in lines] == ["step 1/2", "step 2/2"]
