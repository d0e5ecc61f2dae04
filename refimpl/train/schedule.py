"""The learning rate of each step."""
import math

SCHEDULES = ("constant", "cosine")


def learning_rate(step: int, steps: int, lr: float, schedule: str = "constant", warmup: int = 0, floor: float = 0.0) -> float:
    """That of step 0, 1, ... of `steps`: up in a straight line to `lr` in `warmup` steps, then constant, or down a half cosine
    to floor·lr in the last step.

    Reference: Loshchilov and Hutter 2017 (SGDR), eq. 5; Radford et al. 2018 (GPT), section 4.1

    >>> [learning_rate(step, 7, 1.0, "cosine", warmup=2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return lr * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
