"""Localises a picture that is none, lacks a curve or stays open, and a missing matplotlib that is an error."""
import sys

import pytest

from refimpl.commands.pictures import NO_PICTURE, draw_losses, pyplot

CURVES = {"training": ([1, 2, 3], [5.5, 5.0, 4.5]), "validation": ([3], [4.75])}


@pytest.fixture
def figures(monkeypatch):
    """The figures as they are when they are saved: ({label: points}, {label: marker}, legend, axis labels)."""
    plot, seen = pytest.importorskip("matplotlib") and pyplot(), []

    def saved(figure, path, **how):
        axes, = figure.axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        markers = {line.get_label(): line.get_marker() for line in axes.lines}
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        seen.append((lines, markers, legend, axes.get_xlabel(), axes.get_ylabel()))
        return save(figure, path, **how)
    save = plot.Figure.savefig
    monkeypatch.setattr(plot.Figure, "savefig", saved)
    return seen


def test_the_picture_has_every_curve_with_its_points_and_label(figures, tmp_path):
    assert draw_losses(tmp_path / "loss.png", CURVES, "nats per token") == f"picture: {tmp_path / 'loss.png'}"
    (lines, markers, legend, x, y), = figures
    assert lines == {"training": [[1, 5.5], [2, 5.0], [3, 4.5]], "validation": [[3, 4.75]]}
    assert (legend, x, y) == (["training", "validation"], "step", "loss (nats per token)")
    assert markers["validation"] == "o"                 # a line of one point has no length: a short run's could not be seen


def test_the_file_is_a_picture_with_something_on_it(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    draw_losses(tmp_path / "loss.png", CURVES, "nats")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(tmp_path / "loss.png")
    height, width, _ = pixels.shape
    colours = {tuple(c) for c in pixels[..., :3].reshape(-1, 3)}
    assert (height, width) == (440, 770) and len(colours) > 50
    draw_losses(tmp_path / "other.png", {"training": CURVES["training"]}, "nats")
    assert (pixels != image.imread(tmp_path / "other.png")).any()           # one curve less is another picture


def test_more_curves_than_styles_are_all_drawn(figures, tmp_path):
    draw_losses(tmp_path / "loss.png", {f"run {k}": ([1, 2], [k, k]) for k in range(9)}, "nats")
    assert len(figures[0][0]) == 9


def test_no_figure_stays_open(tmp_path):
    pytest.importorskip("matplotlib")
    for _ in range(3):
        draw_losses(tmp_path / "loss.png", CURVES, "nats")
    assert pyplot().get_fignums() == []


def test_without_matplotlib_there_is_a_sentence_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_losses(tmp_path / "loss.png", CURVES, "nats") == NO_PICTURE == \
        "no picture: pip install '.[run]' brings matplotlib"
    assert not any(tmp_path.iterdir())
