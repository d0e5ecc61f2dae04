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


def draw_losses(path: Path, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], unit: str,
                nested: bool = False) -> str:
    """Curves by their label, each (steps, losses), as a picture -> where it is, or what is missing.

    nested  they lie on each other: each is drawn thinner than the one under it
    """
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    figure, axes = plot.subplots(figsize=(7, 4), layout="constrained")
    for under, (label, (steps, losses)) in zip(reversed(range(len(curves))), curves.items()):
        style = "o-" if len(steps) < 30 else "-"        # few points would hardly be seen
        axes.plot(steps, losses, style, markersize=3, linewidth=1.2 + 2.4 * under * nested, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plot.close(figure)
    return f"picture: {path}"
