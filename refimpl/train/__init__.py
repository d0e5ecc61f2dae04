"""Training: read data.py, step.py, adamw.py, schedule.py, loop.py."""
from refimpl.train.adamw import AdamW
from refimpl.train.data import Batch, Sampler
from refimpl.train.loop import Options, Result, train
from refimpl.train.schedule import learning_rate
from refimpl.train.step import Gradients, gradients

__all__ = ["AdamW", "Batch", "Gradients", "Options", "Result", "Sampler", "gradients", "learning_rate", "train"]
