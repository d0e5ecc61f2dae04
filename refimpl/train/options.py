"""How to train: one dataclass, whose fields are the flags of the command line and the keys of [training] in a TOML file."""
import math
from dataclasses import dataclass

from refimpl.array import FLOATS
from refimpl.models import Plan
from refimpl.train.adamw import GROUPS
from refimpl.train.schedule import SCHEDULES

DTYPES = (*map(str, FLOATS), "bfloat16")


@dataclass(frozen=True)
class Options:
    """
    steps           training steps
    batch_size      samples of a step over all ranks and micro-batches
    seq_len         tokens of a sample
    accumulate      micro-batches of a step
    lr              the learning rate; schedule, warmup and floor: see schedule.py; beta1, beta2, weight_decay: see adamw.py
    decay           the groups of parameters that weight_decay applies to
    clip            the largest norm of a gradient, of all parameters together; 0: any
    dtype           float64, float32, or bfloat16: emulated, with float32 master weights (autograd/rounding.py)
    zero            the optimizer's state is cut over the dp ranks (parallel/zero.py)
    validation      the share of the tokens, the last ones, that are kept to judge by
    eval_every      steps between two evaluations, of eval_batches batches each; 0: after the last step only
    patience        stop after so many evaluations in a row that are no better than the best; 0: never
    sample_every    steps between two samples; 0: after the last step only
    save_every      steps between two checkpoints, of which the last `keep` stay (0: all); one more after the last step; 0: none
    merged          rank 0 writes the whole checkpoint, instead of each rank its part
    seed            of the initial weights, the samples and dropout
    device          numpy, or cupy: one GPU per local rank
    attention, layout, sequence_parallel, regather, ring, block     see Plan in models/context.py
    check_replicas  steps between two checks that ranks hold the same copies of parameters; 0: never
    """
    steps: int = 60
    batch_size: int = 8
    seq_len: int = 64
    accumulate: int = 1
    lr: float = 1e-3
    schedule: str = "constant"
    warmup: int = 0
    floor: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    decay: tuple[str, ...] = ("matrices", "embeddings")
    clip: float = 0.0
    seed: int = 0
    dtype: str = "float64"
    device: str = "numpy"
    attention: str = "naive"
    layout: str = "contiguous"
    sequence_parallel: bool = False
    regather: bool = False
    ring: int = 1
    block: int = 0
    zero: bool = False
    validation: float = 0.05
    eval_every: int = 0
    eval_batches: int = 4
    patience: int = 0
    sample_every: int = 0
    save_every: int = 0
    keep: int = 2
    merged: bool = False
    check_replicas: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"the learning rate must be a positive number, got {self.lr}")
        for name in ("warmup", "weight_decay", "clip", "eval_every", "patience", "sample_every", "save_every", "keep",
                     "check_replicas"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        for name, allowed in (("schedule", SCHEDULES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}")
        for name in ("beta1", "beta2", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for group in self.decay:
            if group not in GROUPS:
                raise ValueError(f"decay must list some of {', '.join(GROUPS)}, got {group!r}")
        self.plan                                       # whose names are right, or said now
        if self.patience and not (self.eval_every and self.validation):
            raise ValueError("patience needs evaluations: set eval_every, and validation, too")

    @property
    def plan(self) -> Plan:
        return Plan(self.attention, self.layout, self.sequence_parallel, self.regather, self.ring, self.block)

    @property
    def array_dtype(self) -> str:
        """That of the parameters' arrays."""
        return "float32" if self.dtype == "bfloat16" else self.dtype
