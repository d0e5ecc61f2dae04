"""Training: read data.py, step.py, adamw.py, schedule.py, loop.py; then options.py, evaluate.py, report.py, log.py,
and what outlives a run: checkpoint.py (the format), state.py and origin.py (what goes into it)."""
from refimpl.train.adamw import AdamW
from refimpl.train.checkpoint import CheckpointError, latest
from refimpl.train.data import Batch, Data, Sampler
from refimpl.train.evaluate import Evaluation, evaluate
from refimpl.train.loop import Sampling, Trainer, train
from refimpl.train.options import Options
from refimpl.train.report import Result
from refimpl.train.schedule import learning_rate
from refimpl.train.state import State
from refimpl.train.step import Gradients, gradients

__all__ = ["AdamW", "Batch", "CheckpointError", "Data", "Evaluation", "Gradients", "Options", "Result", "Sampler", "Sampling",
           "State", "Trainer", "evaluate", "gradients", "latest", "learning_rate", "train"]
