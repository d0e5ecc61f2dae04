"""What a checkpoint says about its run, and whether a run may go on from it."""
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refimpl.comm import Mesh
from refimpl.models import Config
from refimpl.train.checkpoint import read_manifest
from refimpl.train.data import Data
from refimpl.train.options import Options

PARTS = ("config", "options", "data", "source", "sampling")
MUST_STAY = ("seed", "batch_size", "seq_len", "dtype")  # of the options: what settles the samples and the numbers


def describe(cfg: Config, options: Options, mesh: Mesh, data: Data, sampling: Any, best: float, waited: int) -> dict[str, Any]:
    """What is written into a checkpoint: all settings, what the data are, and how far early stopping is."""
    return {"config": cfg.to_dict(), "options": asdict(options), "mesh": str(mesh), "data": data.fingerprint,
            "source": dict(data.source), "sampling": asdict(sampling) if sampling else {},
            "best": best if math.isfinite(best) else None, "waited": waited}


def read_origin(path: Path) -> dict[str, Any]:
    """What the checkpoint at `path` says about its run.  Error: ValueError where it was not saved in training."""
    about = read_manifest(path)["about"]
    best, waited = about.get("best", ""), about.get("waited")
    if not all(isinstance(about.get(part), dict) for part in PARTS) or type(waited) is not int or waited < 0 \
            or not (best is None or type(best) in (int, float)):
        raise ValueError(f"{path} does not say of which run it is: it was not saved in training")
    return about


def require_same(path: Path, mine: dict[str, Any]) -> tuple[float, int]:
    """Its best validation loss and the evaluations since.  Error: ValueError unless the checkpoint is of the run `mine`."""
    saved = read_origin(path)
    for part, names in (("config", mine["config"]), ("options", MUST_STAY), ("data", mine["data"])):
        for name in names:
            if saved[part].get(name) != mine[part][name]:
                changed = " (the text, its tokens or its validation part have changed)" if part == "data" else ""
                raise ValueError(f"{path} is of another run: {name} of its {part} is {saved[part].get(name)}, here it is "
                                 f"{mine[part][name]}{changed}")
    return math.inf if saved["best"] is None else saved["best"], saved["waited"]
