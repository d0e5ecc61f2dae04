"""What a run says while it trains: log.jsonl for programs, a bar or lines for people."""
import fcntl
import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from refimpl.files import replacing

LINES = 20                                              # of a run whose output is not a terminal


class Log:
    """JSON lines in FOLDER/log.jsonl: the run first, then what happened; without a folder, nothing.

    A run that goes on after step `after` keeps the lines up to there and drops what came later, a line cut off in the middle
    included.  Error: ValueError where the folder cannot be written to, or another run is writing to it
    """

    def __init__(self, folder: Path | None, run: dict[str, Any], after: int = 0) -> None:
        self.file = None
        if folder:
            path, kept = folder / "log.jsonl", [json.dumps(run)]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.lock = os.open(folder, os.O_RDONLY)
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)   # gone with the process, however that ends
                if after and path.exists():
                    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if step_of(line) <= after] + kept
                with replacing(path) as part:
                    part.write_text("\n".join(kept) + "\n", encoding="utf-8")
                self.file = open(path, "a", encoding="utf-8")
            except BlockingIOError:
                raise ValueError(f"another run is writing to {folder}: choose another folder") from None
            except OSError as error:
                raise ValueError(f"the results cannot be written to {folder}: {error.strerror or error}") from None

    def write(self, **row: Any) -> None:
        """Error: ValueError where the line cannot be written."""
        if self.file:
            try:
                self.file.write(json.dumps(row) + "\n")
                self.file.flush()
            except OSError as error:
                raise ValueError(f"{self.file.name} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        if self.file:
            with suppress(OSError):                     # what could not be written has been said
                self.file.close()
            os.close(self.lock)
            self.file = None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def step_of(line: str) -> float:
    """The step that a line tells of: 0 for one that begins a run, infinity for what is no row, like half a line."""
    try:
        row = json.loads(line)
    except ValueError:
        return float("inf")
    step = row.get("step", 0) if isinstance(row, dict) else None
    return step if type(step) is int else float("inf")


class Progress:
    """Where a run is: a bar with the loss, tokens/s and the time left on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int, first: int, show: bool) -> None:
        self.steps, self.first, self.show, self.start = steps, first, show, time.perf_counter()
        self.bar = None
        if show and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:
            try:
                import tqdm
                self.bar = tqdm.tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True)
            except ImportError:
                self.say("no progress bar: pip install '.[run]' brings tqdm")

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Step number `step` of 1, 2, ... is done."""
        if self.bar:
            self.bar.set_postfix_str(f"loss {short(loss)}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif self.show and (step in (self.first + 1, self.steps) or step % math.ceil(self.steps / LINES) == 0):
            left = (time.perf_counter() - self.start) / (step - self.first) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  loss {short(loss)}  {tokens_per_second:,.0f} tokens/s  {clock(left)} left")

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.bar:
            self.bar.write(text, file=sys.stderr)
        elif self.show:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.close()


def short(loss: float) -> str:
    """
    >>> short(5.53561), short(1e50)
    ('5.5356', '1.0e+50')
    """
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.1e}"


def printable(text: str) -> str:
    """A text without what a terminal would take for commands."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def clock(seconds: float) -> str:
    """
    >>> clock(59.6), clock(3671)
    ('1:00', '1:01:11')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
