"""What a run tells: log.jsonl and the bar while it goes on, a Result at its end."""
from dataclasses import dataclass, field
from typing import Any, Callable

from refimpl.autograd import Tensor
from refimpl.comm import Comm
from refimpl.train.evaluate import Evaluation
from refimpl.train.log import Log, Progress, printable


@dataclass
class Result:
    """params are this rank's parts, the losses those of the steps from number `first` on; `payload` is what travelled in the
    last step, by mesh axes; `stopped` says why the run ended early; the others are None where nobody asked."""
    first: int
    params: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    payload: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    evaluation: Evaluation | None = None
    sample: str | None = None
    stopped: str = ""


class Report:
    """Tells what happens.  Steps are numbered 1, 2, ...; `last`: what happens then is told by who asked for the Result.

    Rank 0 writes the log.  Error: ValueError, the same on every rank, where it cannot.
    """

    def __init__(self, comm: Comm, new_log: Callable[[], Log] | None, progress: Progress, first: int, tokens: int) -> None:
        self.comm, self.progress, self.tokens = comm, progress, tokens
        self.logging, self.log = new_log is not None, comm.on_first(new_log) if new_log else None
        self.result = Result(first)

    def write(self, **row: Any) -> None:
        if self.logging:
            self.comm.on_first(lambda: self.log.write(**row) if self.log else None)

    def step(self, step: int, row: dict[str, float], seconds: float, payload: dict[str, int]) -> None:
        self.result.losses.append(row["loss"])
        self.result.payload = payload
        self.result.seconds += seconds
        self.result.tokens_per_second = self.tokens * len(self.result.losses) / self.result.seconds
        self.write(step=step, **row, seconds=round(seconds, 6), tokens_per_second=round(self.tokens / seconds, 1))
        self.progress.step(step, row["loss"], self.tokens / seconds)

    def evaluation(self, step: int, e: Evaluation, last: bool) -> None:
        self.result.evaluation = e
        self.write(step=step, validation_loss=e.loss, bits_per_byte=e.bits_per_byte)
        if not last:
            self.progress.say(f"step {step}: {e}")

    def sample(self, step: int, text: str, last: bool) -> None:
        self.result.sample = text
        self.write(step=step, sample=text)
        if not last:
            self.progress.say(f"step {step}: {printable(text)}")

    def stop(self, step: int, why: str) -> None:
        self.result.stopped = why
        self.write(step=step, stopped=why)

    def close(self) -> None:
        self.progress.close()
        if self.log:
            self.log.close()
