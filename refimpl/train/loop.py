"""The training loop: steps, evaluations, samples, checkpoints, and what a comparison with another run needs."""
import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from refimpl import tensorfile
from refimpl.array import device_module, to_host
from refimpl.autograd import Round, Tensor, bfloat16
from refimpl.comm import Mesh, local_rank
from refimpl.files import replacing
from refimpl.generate import sample
from refimpl.models import Config, init
from refimpl.parallel import Reduction, RowReduction, check_replicas, clip, gather, gather_rows, gradient_norm
from refimpl.text import Tokenizer, write_tokenizer
from refimpl.train.adamw import AdamW
from refimpl.train.checkpoint import complete_ones, latest
from refimpl.train.data import Data, Sampler
from refimpl.train.evaluate import evaluate
from refimpl.train.log import Log, Progress
from refimpl.train.options import Options
from refimpl.train.origin import describe, require_same
from refimpl.train.report import Report, Result
from refimpl.train.schedule import learning_rate
from refimpl.train.state import State
from refimpl.train.step import gradients


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

    With `out`, rank 0 writes log.jsonl and, for comparisons, the gradient of the first and last step, before it is clipped, and
    the final parameters, gathered, as safetensors; all ranks write checkpoints, to out/checkpoints.
    Errors, on every rank: ArithmeticError where the loss is no longer finite, which names the step, and where ranks have come
    to hold different copies of a parameter; ValueError where rank 0 cannot write to `out`, before the first step, for a mesh
    that training cannot use, and for a text that is too short.
    """

    def __init__(self, data: Data, cfg: Config, options: Options, mesh: Mesh, out: Path | None = None,
                 sampling: Sampling | None = None) -> None:
        self.data, self.cfg, self.options, self.mesh, self.out, self.sampling = data, cfg, options, mesh, out, sampling
        self.sampler = Sampler(data.train, options.seq_len, options.seed)
        if len(data.validation):
            Sampler(data.validation, options.seq_len, options.seed, "validation")       # long enough, or said now
        elif options.patience:
            raise ValueError("patience needs something to evaluate on: the text must have two samples of seq_len + 1 tokens")
        if sampling:
            self.prompt(sampling)                       # there is one, or said now
        self.xp = device_module(options.device, local_rank(mesh.world))
        optimizer = AdamW(options.lr, (options.beta1, options.beta2), weight_decay=options.weight_decay, decay=options.decay)
        self.state = State(cfg, mesh, init(cfg, mesh, options.seed, options.array_dtype, self.xp), optimizer, options.zero)
        self.best, self.waited = math.inf, 0            # the best validation loss, and how many were not better since
        self.checkpoints = out / "checkpoints" if out else Path()

    def run(self, bar: bool = False) -> Result:
        """Train to the last step, or until `patience` has run out, and write what there is then."""
        o, first = self.options, self.state.optimizer.t
        if first > o.steps:
            raise ValueError(f"the checkpoint is of step {first}, and the run has {o.steps} steps: there is nothing to do")
        grads, ended = None, first == o.steps or self.out_of_patience()
        self.report = Report(self.mesh.world, (lambda: self.new_log(first)) if self.out and not ended else None,
                             Progress(o.steps, first, bar and self.mesh.world.rank == 0), first + 1, o.batch_size * o.seq_len)
        try:
            for step in range(first, first if ended else o.steps):
                start = time.perf_counter()
                grads, row = self.step(step)
                self.report.step(step + 1, row, time.perf_counter() - start, self.mesh.ledger.by_axes())
                if self.out and not step:
                    self.write("grads_first", self.whole_rows(grads))
                stop = step == o.steps - 1
                if len(self.data.validation) and (stop or due(o.eval_every, step)):
                    stop = self.judge(step, stop)
                if self.sampling and (stop or due(o.sample_every, step)):
                    self.draw_sample(step, self.sampling, stop)
                if self.out and o.save_every and (stop or due(o.save_every, step)):
                    self.save()
                if stop:
                    break
            if ended:
                self.tell_again(first - 1)
            if self.out and grads:
                self.write("grads_last", self.whole_rows(grads))
            if self.out:
                self.write("params", self.state.params)
        finally:
            self.report.close()
        self.report.result.params = self.state.params
        return self.report.result

    def new_log(self, first: int) -> Log:
        if not first and (old := latest(self.checkpoints)):
            raise ValueError(f"{self.out} has checkpoints, the last is {old.name}: resume from there, or choose another folder")
        log = Log(self.out, {"config": self.cfg.to_dict(), "options": asdict(self.options), "mesh": str(self.mesh)}, first)
        if self.out and self.data.tokenizer:
            write_tokenizer(self.out / "tokenizer.json", self.data.tokenizer)
        return log

    def step(self, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Step 0, 1, ...: the gradient, before it is clipped, and what is to be logged.  The ledger holds this step alone."""
        o, state, mesh = self.options, self.state, self.mesh
        if o.check_replicas and step % o.check_replicas == 0:
            check_replicas(state.params, state.placements, mesh)
        mesh.ledger.clear()
        batches = self.sampler.step(step, o.batch_size, o.accumulate, mesh)
        with self.computing() as weights:
            g = gradients(weights, batches, self.cfg, mesh, o.seed, step, RowReduction if o.zero else Reduction, o.plan)
        row, grads = {"loss": g.loss}, g.grads
        self.require_number("loss", g.loss, step)
        if o.clip:
            row["norm"] = norm = gradient_norm(grads, state.optimizer_table, mesh)
            self.require_number("gradient's norm", norm, step)
            grads = clip(grads, norm, o.clip)
        row["lr"] = state.optimizer.lr = learning_rate(step, o.steps, o.lr, o.schedule, o.warmup, o.floor)
        state.update(grads)
        return g.grads, row

    @contextmanager
    def computing(self) -> Iterator[dict[str, Tensor]]:
        """The weights that the model computes with; for bfloat16 the rounded masters, and what ops give is rounded, too."""
        rounded = self.options.dtype == "bfloat16"
        with Round() if rounded else nullcontext(), np.errstate(all="ignore"):      # a number that is lost is said in words
            yield {n: t.like(bfloat16(t.array)) for n, t in self.state.params.items()} if rounded else self.state.params

    def require_number(self, what: str, value: float, step: int) -> None:
        """Error: ArithmeticError, which names the last checkpoint whose parameters still gave a loss."""
        if not math.isfinite(value):
            good = [c for c in complete_ones(self.checkpoints) if c.name < f"step-{step:08d}"] if self.out else []
            raise ArithmeticError(f"the {what} is {value} at step {step + 1}: try a smaller learning rate than "
                                  f"{self.options.lr}" + (f"; the last good checkpoint is {good[-1]}" if good else ""))

    def judge(self, step: int, stop: bool) -> bool:
        """Evaluate -> whether this step is the last, because it is or because `patience` has run out."""
        with self.computing() as weights:
            e = evaluate(weights, self.data, self.cfg, self.mesh, self.options)
        self.require_number("validation loss", e.loss, step)
        if due(self.options.eval_every, step):          # one that is due at the end of the run only does not count
            self.best, self.waited = min(e.loss, self.best), 0 if e.loss < self.best else self.waited + 1
        early = not stop and self.out_of_patience()
        self.report.evaluation(step + 1, e, stop or early)
        if early:
            self.tell_why(step)
        return stop or early

    def out_of_patience(self) -> bool:
        return 0 < self.options.patience <= self.waited

    def tell_why(self, step: int) -> None:
        self.report.stop(step + 1, f"stopped at step {step + 1} of {self.options.steps}: the best validation loss is still "
                                   f"{self.best:.4f} (patience {self.options.patience})")

    def draw_sample(self, step: int, how: Sampling, last: bool) -> None:
        tokens, tokenizer = self.prompt(how)
        with self.computing() as weights:
            tokens = sample(weights, tokens, how.sample, self.cfg, self.mesh, how.temperature, self.options.seed,
                            self.options.plan)
        self.report.sample(step + 1, tokenizer.decode(tokens), last)

    def prompt(self, how: Sampling) -> tuple[np.ndarray, Tokenizer]:
        """The prompt as tokens.  Error: ValueError for one that has none."""
        tokenizer = self.data.tokenizer
        try:
            tokens = tokenizer.encode(how.prompt) if tokenizer else np.zeros(0)
        except UnicodeEncodeError:
            raise ValueError(f"the prompt {how.prompt!r} is not utf-8") from None
        if not tokenizer or not tokens.size:
            raise ValueError("a sample needs a prompt of one token at least, and a tokenizer")
        return tokens, tokenizer

    def tell_again(self, step: int) -> None:
        """Of a run that had ended: its evaluation, why it stopped, and a sample."""
        if len(self.data.validation):
            with self.computing() as weights:
                self.report.evaluation(step + 1, evaluate(weights, self.data, self.cfg, self.mesh, self.options), True)
        if self.out_of_patience() and step < self.options.steps - 1:
            self.tell_why(step)
        if self.sampling:
            self.draw_sample(step, self.sampling, True)

    def save(self) -> Path:
        """A checkpoint of where the run is.  Errors: CheckpointError, ArithmeticError for a parameter that is not finite."""
        about = self.about() if self.mesh.world.rank == 0 else {}
        return self.state.save(self.checkpoints, about, self.options.keep, self.options.merged)

    def about(self) -> dict[str, Any]:
        """What a checkpoint says about its run (rank 0 writes it)."""
        return describe(self.cfg, self.options, self.mesh, self.data, self.sampling, self.best, self.waited)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same model and data, saved on any mesh.  Error: ValueError, the same on every rank."""
        best, waited = self.mesh.world.on_first(lambda: self.require_own(path)) or (0.0, 0)
        best, waited = self.mesh.world.broadcast(np.array([best, waited])).tolist()
        self.best, self.waited = best, int(waited)
        self.state.load(path, self.xp)

    def require_own(self, path: Path) -> tuple[float, int]:
        """As `require_same`.  Error: ValueError also where `out` has another checkpoint, beside which new ones would come."""
        numbers, last = require_same(path, self.about()), latest(self.checkpoints)
        if last and not last.samefile(path):
            raise ValueError(f"{self.out} has checkpoints of its own, the last is {last.name}: go on from there, or choose "
                             "another folder")
        return numbers

    def whole_rows(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of all rows, also with ZeRO."""
        return gather_rows(grads, self.state.params, self.mesh) if self.options.zero else grads

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """The global arrays of `tensors` as out/NAME.safetensors.  Error: ValueError, the same on every rank."""
        whole = gather(tensors, self.state.placements, self.mesh)

        def to_file() -> None:
            with replacing((self.out or Path()) / f"{name}.safetensors") as part:
                tensorfile.write(part, {name: to_host(a) for name, a in whole.items()})
        self.mesh.world.on_first(to_file)


def due(every: int, step: int) -> bool:
    """Whether step 0, 1, ... ends a round of `every` steps; 0: none does."""
    return every > 0 and (step + 1) % every == 0


def train(data: Data, cfg: Config, options: Options, mesh: Mesh, out: Path | None = None, bar: bool = False) -> Result:
    """A run from the beginning to the end."""
    return Trainer(data, cfg, options, mesh, out).run(bar)
