"""Why a program cannot go on, in one sentence that all ranks say: what happened, and who waits where.

Each rank knows how many collectives it has begun in each group.  A rank that waits in its n-th of a group for a member that
has begun fewer and waits elsewhere, or has ended, may be waiting for ever; `stuck` finds out, from what ranks have reported
at any times: such reports never become untrue.
"""
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Iterable

INNER = tuple(str(Path(__file__).parents[1] / part) + os.sep for part in ("comm", "autograd"))
STANDARD = (str(Path(os.__file__).parent) + os.sep, "<frozen")      # Python's own library

DIED = "died: its process is gone"
LATE = "did not come within"


@dataclass(frozen=True)
class Fault:
    """What went wrong first, and the exit status that the program ends with.

    quiet  no other rank need say so (all of them come to the same end)
    """
    rank: int
    what: str
    status: int = 1
    quiet: bool = False

    def __lt__(self, other: "Fault") -> bool:
        """The more likely cause of two that became known at the same time: what others see of a death are its consequences."""
        return (self.what != DIED, self.rank, self.what) < (other.what != DIED, other.rank, other.what)


DEADLOCK = Fault(-1, "the ranks wait for one another")


class Told(int):
    """An exit status of which the reason has been said, in the name of all ranks."""


@dataclass
class Report:
    """A rank that waits in its n-th collective of `group`, or (n = 0) has ended.

    counts  how many collectives it has begun, by group
    group   name and members of a communicator, `members` once more as numbers in the world
    """
    counts: dict[str, int] = field(default_factory=dict)
    n: int = 0
    group: str = ""
    members: tuple[int, ...] = ()


def stuck(reports: dict[int, Report]) -> list[int]:
    """The waiting ranks that no rank can help any more: each waits for one that has ended or that is stuck itself.

    >>> a = Report({"tp:0,1": 1, "dp:0,1": 0}, 1, "tp:0,1", (0, 1))
    >>> b = Report({"tp:0,1": 0, "dp:0,1": 1}, 1, "dp:0,1", (0, 1))
    >>> stuck({0: a, 1: b}), stuck({0: a}), stuck({0: a, 1: Report({"tp:0,1": 1})})
    ([0, 1], [], [])
    """
    hopeless, before = set(reports), -1
    while len(hopeless) != before:                      # take out, until no more can be, who waits for none of them
        before = len(hopeless)
        hopeless -= {r for r in hopeless if reports[r].n and not missing(reports[r], reports, hopeless)}
    return sorted(r for r in hopeless if reports[r].n)


def missing(waiting: Report, reports: dict[int, Report], among: Iterable[int]) -> list[int]:
    """The members of the group that have not come to the collective, as far as the reports `among` which we look say."""
    return [m for m in waiting.members if m in among and reports[m].counts.get(waiting.group, 0) < waiting.n]


def fault_of(reports: dict[int, Report]) -> Fault | None:
    """The ended rank that a stuck one waits for, or that ranks wait for one another; None where nobody is stuck."""
    waiting = stuck(reports)
    ended = [m for r in waiting for m in missing(reports[r], reports, reports) if not reports[m].n]
    return Fault(min(ended), "has ended") if ended else DEADLOCK if waiting else None


def blamed(fault: Fault, states: dict[int, str]) -> Fault:
    """The fault; of a late rank that waits itself, as its state says now, that of the first rank that does not."""
    idle = [r for r, state in sorted(states.items()) if not state.startswith("waits")]
    if fault.what.startswith(LATE) and idle and fault.rank not in idle:
        return replace(fault, rank=idle[0])
    return fault


def sentence(fault: Fault, states: dict[int, str]) -> str:
    """`states`: what the ranks do ("waits in ..."); that of the faulty one is told where it is late, else it is the fault."""
    late = fault.what.startswith(LATE)
    rank = f"rank {fault.rank} " if fault.rank >= 0 else "somebody " if late else ""
    return "; ".join([f"{rank}{fault.what}", *(f"rank {r} {state}" for r, state in sorted(states.items())
                                               if (r != fault.rank or late) and state)])


def failed(rank: int, error: BaseException) -> Fault:
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f" ({one_line(error.code)})"
        return Fault(rank, f"exits with status {status}{said}", int(status) & 255 or 1, isinstance(status, Told))
    text = one_line(error)
    return Fault(rank, f"failed ({type(error).__name__}{': ' if text else ''}{text})")


def one_line(value: Any) -> str:
    """Its text, for a sentence; nothing where it cannot say itself."""
    try:
        return " ".join(str(value)[:500].split())
    except Exception:
        return ""


def place(thread: int | None, waits: bool = False) -> str:
    """The line of code at which a thread of this process is now; where it waits, that which called the collective."""
    frame: Any = sys._current_frames().get(thread or 0)
    while waits and frame and frame.f_back and not frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back                            # (what a collective has called)
    while frame and frame.f_back and (frame.f_code.co_filename.startswith(INNER) or is_standard(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "its end"


def is_standard(file: str) -> bool:
    return file.startswith(STANDARD) and "site-packages" not in file
