"""What a rank knows of the others under MPI, and the thread that hears of it, whatever the rank itself is doing.

A rank says so when it fails, when it has waited for a quarter of a second, and when it ends.  Its death is seen by the
ranks that it was connected to (links.py).  The first who knows of a fault tells all; then every rank says what it is doing at
that moment, and from the same answers all make the same sentence (verdict.py): the verdict.  A rank that waits raises it; for
one that computes, or is blocked inside MPI, its watch says it and ends the process.

From a fault to the end of all ranks: up to ANSWER + GRACE + GOODBYE + FORWARDING = 4.5 seconds, mostly 0.6; a little more
where ranks do not answer, or an abort does not end the others (ending.py).
"""
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import Any, Callable, Protocol

from refimpl.comm.arguments import CommError
from refimpl.comm.links import Links
from refimpl.comm.verdict import DEADLOCK, DIED, LATE, Fault, Report, blamed, fault_of, place, sentence

TICK = 0.1                                              # seconds between two looks at what this rank does
PATIENCE = 0.25                                         # seconds of waiting before a rank says that it waits
ANSWER = 1.0                                            # seconds for all ranks to say what they do
STEP = 0.1                                              # seconds between two ranks' verdicts where some do not answer
GRACE = 1.5                                             # seconds for a rank to come to a collective and raise the verdict
GOODBYE = 1.5                                           # seconds for all ranks to have said their last
FORWARDING = 0.5                                        # seconds for the launcher to pass on what a rank said
FLUSHING = 0.5                                          # seconds for what a rank has printed to leave it
CLAIM = 500                                             # characters of what a rank says that it waits in


class Group(Protocol):
    """What a watch needs to know of a communicator."""
    group: str                                          # its name and members
    members: tuple[int, ...]                            # numbers in the world
    checked: bool                                       # no member leaves a collective before all have come

    def claim(self, operation: str, what: Callable[[], str]) -> str: ...


Doing = tuple[Group, int, str, Callable[[], str]]       # the collective a rank is in: the n-th of its group; its claim


class Watch:
    """Rank `rank`'s.  The thread that computes calls enter, require_hope, await_verdict, fail, goodbye, end, and sets `doing`.

    timeout  seconds in one collective after which the ranks that are not there are a fault
    hurry    share of ANSWER that there is after a death, which the launcher sees too, and may end all ranks for
    """

    def __init__(self, links: Links, rank: int, size: int, timeout: float, hurry: float = 1.0) -> None:
        self.links, self.rank, self.size, self.timeout, self.hurry = links, rank, size, timeout, hurry
        self.worker = threading.get_ident()
        self.counts: dict[str, int] = defaultdict(int)  # collectives begun, by group
        self.doing: Doing | None = None
        self.seen: Doing | None = None                  # what the thread saw this rank do, and for how long
        self.waited, self.looked, self.reported = 0.0, time.monotonic(), False
        self.reports: dict[int, Report] = {}
        self.ended: set[int] = set()
        self.gone: set[int] = set()
        self.faults: list[Fault] = []                   # those that the ranks knew of when they first heard of one
        self.failure: Fault | None = None               # this rank's own
        self.progress: Callable[[], Any] = lambda: None  # moves this rank's transfers on
        self.fault = DEADLOCK                           # the one that the verdict is about
        self.states: dict[int, str] = {}                # what each rank did when it heard of the fault
        self.said: set[int] = set()                     # ranks that have said their last
        self.verdict, self.judged, self.taken = "", 0.0, False
        self.over = False
        self.lock = threading.RLock()                   # of everything that both threads change
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.thread.start()
        os.register_at_fork(after_in_child=self.orphan)

    # -- the thread that computes ------------------------------------------------------------------------------

    def enter(self, group: Group, operation: str, what: Callable[[], str]) -> None:
        """This rank begins a collective."""
        self.counts[group.group] = n = self.counts[group.group] + 1
        self.doing = group, n, operation, what
        if self.verdict:
            self.require_hope()

    def require_hope(self) -> None:
        """Error: CommError, the same on all ranks, once there is a verdict."""
        if self.verdict:
            self.take()
            raise CommError(self.verdict)

    def take(self) -> None:
        """The verdict is for the thread that computes to say.  (Where the watch is about to, this does not return.)"""
        with self.lock:
            self.taken = True

    def fail(self, fault: Fault) -> None:
        """This rank has failed: tell all, unless there was a fault before, and return when there is a verdict."""
        with self.lock:
            self.taken, self.failure = True, fault      # it speaks for itself
            if not self.faults:
                self.learn(fault)
        self.await_verdict()

    def await_verdict(self) -> None:
        """Return when there is a verdict, or none can be expected any more."""
        deadline = time.monotonic() + 2 * ANSWER
        while not self.verdict and time.monotonic() < deadline:
            time.sleep(1e-3)

    def goodbye(self) -> int:
        """This rank has said its last: return, with the status for the launcher, when the others have too."""
        deadline = time.monotonic() + GRACE + GOODBYE
        with self.lock:
            self.say()
        while not self.all_said() and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(FORWARDING)
        return self.fault.status if self.verdict else min(self.faults).status

    def aborts(self) -> int:
        """The rank that is to abort the job: one only, for where several do at a time Open MPI's mpirun may never end."""
        cause = (self.fault if self.verdict else min(self.faults)).rank
        able = self.said - self.gone                    # this rank is
        return cause if cause in able else min(able)

    def end(self) -> bool:
        """This rank comes to its end: wait for the others.  False if one of them does not come to its own."""
        with self.lock:
            self.ended.add(self.rank)
            self.reports[self.rank] = Report(dict(self.counts))
            self.links.send({"kind": "ended", "counts": dict(self.counts)})
            self.look_for_stuck_ranks()
        while len(self.ended) < self.size and not self.verdict:
            with suppress(RuntimeError):                # MPI's, where the other is gone
                self.progress()                         # another may wait for what this rank has not quite sent
            time.sleep(1e-3)                            # the others may need this core
        self.over = not self.verdict
        if not self.over:
            self.take()
        return self.over

    def orphan(self) -> None:
        """This process is a child of the rank's: nobody watches over it, and its collectives would be taken for the rank's."""
        self.lock = threading.RLock()                   # the parent's other thread may have held it
        self.verdict = f"a child process of rank {self.rank} cannot take part in its collectives"

    # -- the thread that listens -------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self.over:
                messages = list(self.links.listen(TICK / 10 if self.faults and not self.verdict else TICK))
                with self.lock:
                    for message in messages:
                        self.hear(message["from"], message)
                    self.tick()
        except BaseException:                           # a rank that is not watched any more must not go on
            try:
                traceback.print_exc()
            finally:
                os._exit(1)

    def hear(self, r: int, message: dict[str, Any]) -> None:
        if message.get("gone"):
            if len(self.ended) < self.size:             # else it went for it knew, and passed on, that all have ended
                self.gone.add(r)
                self.links.send({"kind": "gone", "rank": r})
                self.learn(Fault(r, DIED))
        elif message["kind"] == "gone":
            self.gone.add(message["rank"])
        elif message["kind"] == "verdict":
            self.judge(Fault(*message["fault"]), message["verdict"])
        elif message["kind"] == "waits":
            self.reports[r] = Report(message["counts"], message["n"], message["group"], tuple(message["members"]))
            self.look_for_stuck_ranks()
        elif message["kind"] == "ended":
            self.ended.add(r)
            self.reports[r] = Report(message["counts"])
            self.look_for_stuck_ranks()
        elif message["kind"] == "said":
            self.said.add(r)
        else:
            self.states[r] = message["state"]
            self.faults += (Fault(*fault) for fault in message["faults"])
            self.learn()

    def learn(self, *faults: Fault) -> None:
        """Of the first fault: tell all, with what this rank is doing.  Later ones do not count, as others would not know."""
        if self.rank not in self.states:
            self.faults += faults
            self.states[self.rank] = self.state()
            self.judged = time.monotonic()
            self.links.send({"kind": "state", "state": self.states[self.rank],
                             "faults": [astuple(f) for f in self.faults]})
            self.links.wake()

    def state(self) -> str:
        doing = self.doing
        if self.failure:
            return self.failure.what
        if self.rank in self.ended:
            return "has ended"
        if not doing:
            return f"is at {place(self.worker)}"
        group, _, operation, what = doing
        return f"waits in {group.claim(operation, what)[:CLAIM]} ({place(self.worker, waits=True)})"

    def look_for_stuck_ranks(self) -> None:
        fault = fault_of(self.reports)
        if fault and not self.faults:
            self.learn(fault)

    def tick(self) -> None:
        now, doing = time.monotonic(), self.doing
        waited, self.looked = min(now - self.looked, 3 * TICK), now     # a process that was stopped has not waited
        if self.verdict:
            self.speak_for_the_worker(now)
        elif self.faults:
            if len(self.gone | self.states.keys()) == self.size or now - self.judged > self.answer_time():
                states = {r: DIED if r in self.gone else "does not answer" for r in range(self.size)} | self.states
                fault = blamed(min(self.faults), states)
                self.judge(fault, sentence(fault, states))
        elif doing is None or doing is not self.seen:
            self.seen, self.waited, self.reported = doing, 0.0, False
        else:
            self.waited += waited
            self.look_at_the_clock(*doing[:2])

    def answer_time(self) -> float:
        """Seconds for the others to say what they do, a little more on higher ranks, so that one verdict comes first."""
        return (ANSWER + STEP * min(self.rank, 3)) * (self.hurry if min(self.faults).what == DIED else 1.0)

    def judge(self, fault: Fault, verdict: str) -> None:
        """Unless another rank's verdict came first."""
        if not self.verdict:
            self.fault, self.judged, self.verdict = fault, time.monotonic(), verdict
            self.links.send({"kind": "verdict", "fault": astuple(fault), "verdict": verdict})

    def look_at_the_clock(self, group: Group, n: int) -> None:
        if self.waited > PATIENCE and group.checked and n and not self.reported:
            self.reported = True
            self.reports[self.rank] = Report(dict(self.counts), n, group.group, group.members)
            self.links.send({"kind": "waits", **asdict(self.reports[self.rank])})
            self.look_for_stuck_ranks()
        late = [m for m in group.members if self.reports.get(m, Report()).counts.get(group.group, 0) < n]
        ended = [m for m in late if m in self.ended]
        if self.waited > PATIENCE and ended:            # in unchecked mode ranks do not report that they wait
            self.learn(Fault(ended[0], "has ended"))
        elif self.waited > self.timeout:
            self.learn(Fault(late[0] if late and group.checked else -1, f"{LATE} {self.timeout:g} s"))

    def speak_for_the_worker(self, now: float) -> None:
        """Where the rank itself does not come to say the verdict, for it is computing or blocked inside MPI."""
        grace = 0.0 if self.fault.what == DIED else GRACE           # a death is seen by the launcher too, which may be quick
        if not self.taken and (now - self.judged > grace or self.fault.quiet):
            self.taken = True
            flush_stdout()
            if not self.fault.quiet:
                with suppress(OSError, ValueError):                 # it is closed
                    sys.stderr.write(f"rank {self.rank} ends: {self.verdict}\n")
                    sys.stderr.flush()
            self.say()
            deadline = now + GOODBYE
            while not self.all_said() and time.monotonic() < deadline:
                for message in self.links.listen(TICK):
                    self.hear(message["from"], message)
            time.sleep(FORWARDING)
            os._exit(self.fault.status)

    def say(self) -> None:
        self.said.add(self.rank)
        self.links.send({"kind": "said"})

    def all_said(self) -> bool:
        """All ranks that have answered."""
        return self.states.keys() <= self.said | self.gone


def flush_stdout() -> None:
    """Within a time limit: the thread that computes may be writing, and not come back."""
    def flush() -> None:
        with suppress(OSError, ValueError, AttributeError):         # it is closed, or None
            sys.stdout.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(FLUSHING)
