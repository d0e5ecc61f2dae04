"""The training loop: steps, a progress bar and a JSONL log on rank 0, and what a comparison with another run needs."""
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from refimpl import tensorfile
from refimpl.array import device_module, float_dtype, to_host
from refimpl.autograd import Tensor
from refimpl.comm import Ledger, Mesh, local_rank
from refimpl.models import Config, init, placements
from refimpl.parallel import check_replicas, clip, gather, gradient_norm
from refimpl.train.adamw import AdamW
from refimpl.train.data import Sampler
from refimpl.train.schedule import SCHEDULES, learning_rate
from refimpl.train.step import gradients


@dataclass(frozen=True)
class Options:
    """How to train.

    batch_size      samples of a step over all ranks and micro-batches
    lr              the learning rate; schedule, warmup and floor: see schedule.py
    clip            the largest norm of a gradient, of all parameters together; 0: any
    check_replicas  before the first of so many steps, ranks compare what they hold in common; 0: never
    """
    steps: int = 60
    batch_size: int = 8
    seq_len: int = 64
    accumulate: int = 1
    lr: float = 1e-3
    schedule: str = "constant"
    warmup: int = 0
    floor: float = 0.0
    weight_decay: float = 0.1
    clip: float = 0.0
    seed: int = 0
    check_replicas: int = 100
    dtype: str = "float64"
    device: str = "numpy"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {self.warmup}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}")
        for name in ("clip", "check_replicas"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        float_dtype(self.dtype)


@dataclass
class Result:
    """params and grads (of the last step) are this rank's parts; `payload` is what travelled in the last step."""
    params: dict[str, Tensor]
    losses: list[float]
    payload: dict[str, int]
    tokens_per_second: float


def train(corpus: np.ndarray, cfg: Config, options: Options, mesh: Mesh, out: Path | None = None, bar: bool = False) -> Result:
    """Train from the hash's initial weights.  With `out`, rank 0 writes log.jsonl and, for comparisons, the gradient of the
    first and last step and the final parameters, gathered, as safetensors.

    Errors, on every rank: ArithmeticError where the loss is no longer finite, which names the step, and where ranks have come
    to hold different copies of a parameter; ValueError where rank 0 cannot write to `out`, before the first step, and for a
    mesh that training cannot use.
    """
    if mesh.cp.size > 1:
        raise ValueError(f"training does not cut the sequence yet, so the ranks of cp={mesh.cp.size} would all do the same: "
                         "use dp and tp")
    table = placements(cfg, mesh)
    sampler = Sampler(corpus, options.seq_len, options.seed)
    params = init(cfg, mesh, options.seed, options.dtype, device_module(options.device, local_rank(mesh.world)))
    optimizer = AdamW(options.lr, weight_decay=options.weight_decay)
    run = {"config": cfg.to_dict(), "options": asdict(options), "mesh": str(mesh)}
    log = mesh.world.on_first(lambda: Log(out, run)) or Log(None, run)
    losses: list[float] = []
    payload: dict[str, int] = {}
    seconds = 0.0
    tokens = options.batch_size * options.seq_len
    for step in progress(options.steps, bar and mesh.world.rank == 0):
        if options.check_replicas and step % options.check_replicas == 0:
            check_replicas(params, table, mesh)
        mesh.ledger.clear()
        start = time.perf_counter()
        batches = sampler.step(step, options.batch_size, options.accumulate, mesh)
        g = gradients(params, batches, cfg, mesh, options.seed, step)
        if not math.isfinite(g.loss):
            raise ArithmeticError(f"the loss is {g.loss} at step {step + 1}: try a smaller learning rate than {options.lr}")
        norm = gradient_norm(g.grads, table, mesh) if options.clip else 0.0
        if not math.isfinite(norm):
            raise ArithmeticError(f"the gradient's norm is {norm} at step {step + 1}: try a smaller learning rate than "
                                  f"{options.lr}")
        optimizer.lr = learning_rate(step, options.steps, options.lr, options.schedule, options.warmup, options.floor)
        params = optimizer.step(params, clip(g.grads, norm, options.clip) if options.clip else g.grads)
        elapsed = time.perf_counter() - start
        seconds += elapsed
        losses.append(g.loss)
        payload = payload_by_axis(mesh.ledger)
        log.write(step=step + 1, loss=g.loss, lr=optimizer.lr, seconds=round(elapsed, 6),
                  tokens_per_second=round(tokens / elapsed, 1),
                  **({"norm": norm} if options.clip else {}))
        if out and step == 0:
            save(out / "grads_first.safetensors", g.grads, cfg, mesh)
        if out and step == options.steps - 1:
            save(out / "grads_last.safetensors", g.grads, cfg, mesh)
    if out:
        save(out / "params.safetensors", params, cfg, mesh)
    log.close()
    return Result(params, losses, payload, options.steps * tokens / seconds)


def payload_by_axis(ledger: Ledger) -> dict[str, int]:
    """Elements by mesh axis."""
    axes = sorted({key.axes for key, _ in ledger.rows()})
    return {axis: ledger.total(axis).elements for axis in axes}


def save(path: Path, tensors: Mapping[str, Tensor], cfg: Config, mesh: Mesh) -> None:
    """The global arrays of `tensors` as one file, written by rank 0 under another name first: never half a file."""
    whole = gather(tensors, placements(cfg, mesh), mesh)
    if mesh.world.rank == 0:
        part = path.with_suffix(".part")
        tensorfile.write(part, {name: to_host(a) for name, a in whole.items()})
        part.replace(path)


def progress(steps: int, bar: bool) -> Any:
    """range(steps), with a progress bar where one is wanted and tqdm is there."""
    if not bar:
        return range(steps)
    try:
        import tqdm
    except ImportError:
        print("no progress bar: pip install '.[run]' brings tqdm", flush=True)
        return range(steps)
    return tqdm.trange(steps, unit="step", dynamic_ncols=True)


class Log:
    """JSON lines: the run first, then one line a step."""

    def __init__(self, folder: Path | None, run: dict[str, Any]) -> None:
        self.file = None
        if folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.file = open(folder / "log.jsonl", "w", encoding="utf-8")
            except OSError as error:
                raise ValueError(f"the results cannot be written to {folder}: {error.strerror}") from None
            self.write(**run)

    def write(self, **row: Any) -> None:
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
