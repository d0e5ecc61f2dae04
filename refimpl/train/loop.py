"""The training loop: steps, evaluations, samples, checkpoints, and what a comparison with another run needs."""
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from refimpl import tensorfile
from refimpl.array import device_module, to_host
from refimpl.autograd import Round, Tensor, bfloat16
from refimpl.comm import Ledger, Mesh, local_rank
from refimpl.files import replacing
from refimpl.generate import sample
from refimpl.models import Config, init
from refimpl.parallel import Reduction, RowReduction, check_replicas, clip, gather, gather_rows, gradient_norm
from refimpl.text import Tokenizer
from refimpl.train.adamw import AdamW
from refimpl.train.checkpoint import latest, read_manifest
from refimpl.train.data import Data, Sampler
from refimpl.train.evaluate import Evaluation, evaluate
from refimpl.train.log import Log, Progress, printable
from refimpl.train.options import Options
from refimpl.train.schedule import learning_rate
from refimpl.train.state import State
from refimpl.train.step import gradients

MUST_STAY = ("seed", "batch_size", "seq_len", "dtype")  # what a run that goes on cannot change: its samples, its numbers


@dataclass
class Result:
    """params are this rank's parts, the losses those of the steps from number `first` on; `payload` is what travelled in the
    last step; `stopped` says why the run ended early; the others are None where nobody asked."""
    params: dict[str, Tensor]
    first: int
    losses: list[float]
    payload: dict[str, int]
    tokens_per_second: float
    evaluation: Evaluation | None = None
    sample: str | None = None
    stopped: str = ""


@dataclass(frozen=True)
class Sampling:
    """What a sample starts with, how many tokens follow, and how boldly they are drawn (generate/sample.py)."""
    prompt: str = "The "
    sample: int = 200
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.sample < 0 or not 0 <= self.temperature < math.inf:
            raise ValueError(f"sample and temperature must be at least 0, got {self.sample} and {self.temperature}")


class Trainer:
    """A run from the hash's initial weights, or from a checkpoint (`resume`): `Trainer(...).run()`.

    With `out`, rank 0 writes log.jsonl and, for comparisons, the gradient of the first and last step and the final parameters,
    gathered, as safetensors; all ranks write checkpoints, to out/checkpoints.
    Errors, on every rank: ArithmeticError where the loss is no longer finite, which names the step, and where ranks have come
    to hold different copies of a parameter; ValueError where rank 0 cannot write to `out`, before the first step, for a mesh
    that training cannot use, and for a text that is too short.
    """

    def __init__(self, data: Data, cfg: Config, options: Options, mesh: Mesh, out: Path | None = None,
                 sampling: Sampling | None = None) -> None:
        if mesh.cp.size > 1:
            raise ValueError(f"training does not cut the sequence yet, so the ranks of cp={mesh.cp.size} would all do the "
                             "same: use dp and tp")
        self.data, self.cfg, self.options, self.mesh, self.out = data, cfg, options, mesh, out
        self.sampling = sampling
        if sampling:
            self.prompt_tokens(sampling)                # or said now
        self.sampler = Sampler(data.train, options.seq_len, options.seed)
        if len(data.validation):
            Sampler(data.validation, options.seq_len, options.seed, "validation")       # long enough, or said now
        self.xp = device_module(options.device, local_rank(mesh.world))
        optimizer = AdamW(options.lr, (options.beta1, options.beta2), weight_decay=options.weight_decay, decay=options.decay)
        self.state = State(cfg, mesh, init(cfg, mesh, options.seed, options.array_dtype, self.xp), optimizer, options.zero)
        self.best, self.waited = math.inf, 0            # the best validation loss, and how many were not better since
        self.checkpoints = out / "checkpoints" if out else Path()

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same model and data, saved on any mesh.  Error: ValueError, the same on every rank."""
        best, waited = self.mesh.world.on_first(lambda: self.require_own(path)) or (0.0, 0)
        best, waited = self.mesh.world.broadcast(np.array([best, waited])).tolist()
        self.best, self.waited = best, int(waited)
        self.state.load(path, self.xp)

    def require_own(self, path: Path) -> tuple[float, int]:
        """A checkpoint's best validation loss, and the evaluations since.  Error: ValueError unless it is of this run."""
        about, mine = read_manifest(path)["about"], self.about()
        best, waited = about.get("best"), about.get("waited")
        parts = {part: about.get(part) for part in ("config", "options", "data")}
        if not all(isinstance(saved, dict) for saved in parts.values()) or type(waited) is not int or waited < 0 \
                or not (best is None or type(best) in (int, float)):
            raise ValueError(f"{path} does not say of which run it is: it was not saved in training")
        for part, saved in parts.items():
            for name in MUST_STAY if part == "options" else mine[part]:
                if saved.get(name) != mine[part][name]:
                    raise ValueError(f"{path} is of another run: {name} of its {part} is {saved.get(name)}, here it is "
                                     f"{mine[part][name]}")
        last = latest(self.checkpoints)
        if last and not last.samefile(path):
            raise ValueError(f"{self.out} has checkpoints of its own, the last is {last.name}: go on from there, or choose "
                             "another folder")
        return math.inf if best is None else best, waited

    def about(self) -> dict[str, Any]:
        """What a checkpoint says about its run (rank 0 writes it)."""
        return {"config": self.cfg.to_dict(), "options": asdict(self.options), "mesh": str(self.mesh),
                "data": self.fingerprint, "source": dict(self.data.source),
                "sampling": asdict(self.sampling) if self.sampling else {},
                "best": self.best if math.isfinite(self.best) else None, "waited": self.waited}

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        return self.data.fingerprint()

    def run(self, bar: bool = False) -> Result:
        """Train to the last step, or until `patience` is at its end, and write what there is then."""
        o, first = self.options, self.state.optimizer.t
        if first > o.steps:
            raise ValueError(f"the checkpoint is of step {first}, and the run has {o.steps} steps: there is nothing to do")
        self.log = self.mesh.world.on_first(lambda: self.new_log(first)) or Log(None, {})
        self.progress = Progress(o.steps, first, bar and self.mesh.world.rank == 0)
        self.result = Result({}, first + 1, [], {}, 0.0)
        seconds, grads = 0.0, None
        try:
            for step in range(first, o.steps):
                start = time.perf_counter()
                grads, row = self.step(step)
                elapsed = time.perf_counter() - start
                seconds += elapsed
                self.report(step, row, elapsed)
                if self.out and not step:
                    self.write("grads_first", grads)
                if self.after(step, step == o.steps - 1):
                    break
            if grads is None:                           # it had ended, but not told
                self.after(o.steps - 1, True, save=False)
            if self.out and grads:
                self.write("grads_last", grads)
            if self.out:
                self.write("params", self.state.params)
        finally:
            self.log.close()
            self.progress.close()
        self.result.params = self.state.params
        self.result.tokens_per_second = len(self.result.losses) * o.batch_size * o.seq_len / max(seconds, 1e-9)
        return self.result

    def after(self, step: int, last: bool, save: bool = True) -> bool:
        """What is due after a step, all of it after the last -> whether that was the last."""
        o = self.options
        if len(self.data.validation) and (last or due(o.eval_every, step)):
            last = self.judge(step, last)
        if self.sampling and (last or due(o.sample_every, step)):
            self.show_sample(step, self.sampling, last)
        if self.out and save and o.save_every and (last or due(o.save_every, step)):
            self.save()
        return last

    def new_log(self, first: int) -> Log:
        if self.out and not first and (old := latest(self.checkpoints)):
            raise ValueError(f"{self.out} has checkpoints, the last is {old.name}: resume from there, or choose another folder")
        return Log(self.out, {"config": self.cfg.to_dict(), "options": asdict(self.options), "mesh": str(self.mesh)}, first)

    def step(self, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Step 0, 1, ...: the gradient and what is to be logged."""
        o, state, mesh = self.options, self.state, self.mesh
        if o.check_replicas and step % o.check_replicas == 0:
            check_replicas(state.params, state.placements, mesh)
        mesh.ledger.clear()
        batches = self.sampler.step(step, o.batch_size, o.accumulate, mesh)
        with self.precision(), np.errstate(over="ignore", invalid="ignore"):     # what is lost is said below
            g = gradients(self.weights(), batches, self.cfg, mesh, o.seed, step, RowReduction if o.zero else Reduction)
        row, grads = {"loss": g.loss}, g.grads
        self.require_finite("loss", g.loss, step)
        if o.clip:
            row["norm"] = norm = gradient_norm(grads, state.optimizer_table, mesh)
            self.require_finite("gradient's norm", norm, step)
            grads = clip(grads, norm, o.clip)
        row["lr"] = state.optimizer.lr = learning_rate(step, o.steps, o.lr, o.schedule, o.warmup, o.floor)
        state.update(grads)
        return g.grads, row

    def require_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            saved = latest(self.checkpoints) if self.out else None
            raise ArithmeticError(f"the {what} is {value} at step {step + 1}: try a smaller learning rate than "
                                  f"{self.options.lr}" + (f"; the last checkpoint is {saved}" if saved else ""))

    def precision(self) -> Any:
        return Round() if self.options.dtype == "bfloat16" else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """What the model computes with: the parameters, which for bfloat16 are the masters of rounded ones."""
        params = self.state.params
        if self.options.dtype != "bfloat16":
            return params
        return {name: Tensor(bfloat16(t.array), t.layout, None, name, t.cut, t.shared) for name, t in params.items()}

    def report(self, step: int, row: dict[str, float], seconds: float) -> None:
        speed = self.options.batch_size * self.options.seq_len / seconds
        self.result.losses.append(row["loss"])
        self.result.payload = payload_by_axis(self.mesh.ledger)
        self.write_log(step=step + 1, **row, seconds=round(seconds, 6), tokens_per_second=round(speed, 1))
        self.progress.step(step + 1, row["loss"], speed)

    def judge(self, step: int, last: bool) -> bool:
        """Evaluate, and say whether this step is the last, since `patience` is at its end or anyway."""
        o = self.options
        with self.precision():
            e = evaluate(self.weights(), self.data, self.cfg, self.mesh, o)
        self.require_finite("validation loss", e.loss, step)
        self.result.evaluation = e
        self.best, self.waited = min(e.loss, self.best), 0 if e.loss < self.best else self.waited + 1
        self.write_log(step=step + 1, validation_loss=e.loss, bits_per_byte=e.bits_per_byte)
        if o.patience and self.waited >= o.patience and not last:
            self.result.stopped = (f"stopped at step {step + 1} of {o.steps}: the best validation loss is still "
                                   f"{self.best:.4f} (patience {o.patience})")
            self.write_log(step=step + 1, stopped=self.result.stopped)
            return True
        if not last:
            self.progress.say(f"step {step + 1}: {e}")
        return last

    def show_sample(self, step: int, how: Sampling, last: bool) -> None:
        tokens, tokenizer = self.prompt_tokens(how)
        with self.precision():
            tokens = sample(self.weights(), tokens, how.sample, self.cfg, self.mesh, how.temperature, self.options.seed)
        self.result.sample = tokenizer.decode(tokens)
        self.write_log(step=step + 1, sample=self.result.sample)
        if not last:
            self.progress.say(f"step {step + 1}: {printable(self.result.sample)}")

    def prompt_tokens(self, how: Sampling) -> tuple[np.ndarray, Tokenizer]:
        """The prompt as tokens.  Error: ValueError for one that has none."""
        tokenizer = self.data.tokenizer
        try:
            tokens = tokenizer.encode(how.prompt) if tokenizer else np.zeros(0)
        except UnicodeEncodeError:
            raise ValueError(f"the prompt {how.prompt!r} is not utf-8") from None
        if not tokenizer or not tokens.size:
            raise ValueError("a sample needs a prompt of one token at least, and a tokenizer")
        return tokens, tokenizer

    def save(self) -> Path:
        """A checkpoint of where the run is.  Errors: CheckpointError, ArithmeticError for a parameter that is not finite."""
        about = self.about() if self.mesh.world.rank == 0 else {}
        return self.state.save(self.checkpoints, about, self.options.keep, self.options.merged)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """The global arrays of `tensors` as out/NAME.safetensors.  Error: ValueError, the same on every rank."""
        if self.options.zero and name != "params":
            tensors = gather_rows(tensors, self.state.params, self.mesh)
        whole = gather(tensors, self.state.placements, self.mesh)

        def to_file() -> None:
            with replacing((self.out or Path()) / f"{name}.safetensors") as part:
                tensorfile.write(part, {name: to_host(a) for name, a in whole.items()})
        self.mesh.world.on_first(to_file)

    def write_log(self, **row: Any) -> None:
        """A line of the log.  Error: ValueError, the same on every rank."""
        if self.out:
            self.mesh.world.on_first(lambda: self.log.write(**row))


def due(every: int, step: int) -> bool:
    """Whether step 0, 1, ... ends a round of `every` steps; 0: none does."""
    return every > 0 and (step + 1) % every == 0


def train(data: Data, cfg: Config, options: Options, mesh: Mesh, out: Path | None = None, bar: bool = False) -> Result:
    """A run from the beginning to the end."""
    return Trainer(data, cfg, options, mesh, out).run(bar)


def payload_by_axis(ledger: Ledger) -> dict[str, int]:
    """Elements by mesh axis."""
    axes = sorted({key.axes for key, _ in ledger.rows()})
    return {axis: ledger.total(axis).elements for axis in axes}
