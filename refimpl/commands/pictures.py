"""Pictures of loss curves, where matplotlib is there."""
import logging
from pathlib import Path
from typing import Any, Mapping, Sequence

NO_PICTURE = "no picture: pip install '.[run]' brings matplotlib"


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files; None where it is missing."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # it reports a HOME that it cannot write to, and goes on
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def draw_losses(path: Path, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], unit: str) -> str:
    """Curves by their label, each (steps, losses), as a picture -> where it is, or what is missing."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    figure, axes = plot.subplots(figsize=(7, 4), layout="constrained")
    for (label, (steps, losses)), style in zip(curves.items(), ("-", "o-", "--", ":") * len(curves)):
        axes.plot(steps, losses, style, linewidth=1.2, markersize=3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plot.close(figure)
    return f"picture: {path}"
