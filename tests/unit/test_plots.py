from __future__ import annotations

import io
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ensemblepp.errors import ParameterError
from ensemblepp.plots import MAX_POINTS, plot_regret, render_figure

STEPS = np.arange(1, 6)
VALUES = np.cumsum(np.ones((3, 5)) * [[1.0], [2.0], [3.0]], axis=1)


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_png_is_written_at_the_asked_size(tmp_path):
    figure = plot_regret(tmp_path / "regret.png", {"a": (STEPS, VALUES)}, "title", size=(5.0, 3.0))
    with Image.open(tmp_path / "regret.png") as image:
        assert image.size == (1000, 600)
        assert len(image.convert("L").getcolors()) > 10  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["regret.png"]
    assert isinstance(figure, Figure)


def test_svg_is_chosen_by_the_suffix_and_carries_no_date(tmp_path):
    plot_regret(tmp_path / "regret.SVG", {"a": (STEPS, VALUES)})
    text = (tmp_path / "regret.SVG").read_text()
    assert "<svg" in text
    assert "<dc:date>" not in text


def test_curve_is_the_statistic_over_replicas_at_the_given_steps():
    axes = plot_regret(None, {"a": (STEPS, VALUES)}).axes[0]
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_xdata(), STEPS)
    np.testing.assert_allclose(line.get_ydata(), [2.0, 4.0, 6.0, 8.0, 10.0])
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "cumulative regret (reward units)"


def test_curves_keep_their_own_length():
    long = (np.arange(1, 11), np.ones((2, 10)))
    lines = plot_regret(None, {"a": (STEPS, VALUES), "b": long}).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [5, 10]  # type: ignore[arg-type]


def test_long_curves_are_thinned_with_both_ends_kept():
    steps = np.arange(10_000)
    x = plot_regret(None, {"a": (steps, np.ones((2, 10_000)))}).axes[0].get_lines()[0].get_xdata()
    assert len(x) <= MAX_POINTS  # type: ignore[arg-type]
    assert (x[0], x[-1]) == (0, 9999)  # type: ignore[index]


def test_legend_follows_the_curves_from_top_to_bottom():
    figure = plot_regret(None, {"low": (STEPS, VALUES), "high": (STEPS, 2 * VALUES)})
    assert legend_texts(figure) == ["high", "low"]
    assert figure.legends[0].get_title().get_text() == "mean over replicas, 95 % bootstrap band"


def test_missing_and_single_replicas_are_said_in_the_legend():
    broken = VALUES.copy()
    broken[0, 3:] = np.nan
    figure = plot_regret(
        None, {"a": (STEPS, broken), "b": (STEPS, VALUES[:1]), "c": (STEPS, np.full((2, 5), np.nan))}, "t", "iqm"
    )
    assert set(legend_texts(figure)) == {
        "a (1 of 3 replicas missing)",
        "b (one replica, no band)",
        "c (2 of 2 replicas missing)",
    }
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata()[-1], 12.5)  # type: ignore[index]


def test_labels_are_text_not_mathematics_or_private(tmp_path):
    labels = ["$\\broken{$", "_hidden", "<script>"]
    figure = plot_regret(tmp_path / "x.png", {label: (STEPS, VALUES) for label in labels}, "$\\oops{$")
    assert sorted(legend_texts(figure)) == sorted(labels)


def test_many_curves_differ_in_colour_or_dashes():
    figure = plot_regret(None, {f"agent {i}": (STEPS, VALUES + i) for i in range(16)})
    looks = {f"{line.get_color()} {line.get_linestyle()} {line._dash_pattern}" for line in figure.axes[0].get_lines()}
    assert len(looks) == 16


def test_single_point_is_visible():
    line = plot_regret(None, {"a": ([10], [[1.0], [2.0]])}).axes[0].get_lines()[0]
    assert line.get_marker() == "o"


def test_same_input_gives_the_same_bytes():
    first, second = (render_figure(plot_regret(None, {"a": (STEPS, VALUES)}, "t")) for _ in range(2))
    assert first == second
    assert Image.open(io.BytesIO(first)).format == "PNG"


def test_no_global_state_is_touched():
    before = dict(mpl.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    render_figure(plot_regret(None, {"a": (STEPS, VALUES)}, theme="dark"))
    assert dict(mpl.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("x.pdf", {"a": (STEPS, VALUES)}), {}, "path of plot_regret must end in .png or .svg; got 'x.pdf'"),
        ((None, {}), {}, "curves of plot_regret must hold at least one curve; got none"),
        ((None, {"a": (STEPS[:3], VALUES)}), {}, r"curve 'a' of plot_regret must have steps .* \(3,\) and \(3, 5\)"),
        ((None, {"a": (STEPS, VALUES)}), {"theme": "red"}, "theme of plot_regret must be one of 'dark', 'light'"),
        ((None, {"a": (STEPS, VALUES)}), {"statistic": "max"}, "statistic of plot_regret must be one of"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, options, message):
    with pytest.raises(ParameterError, match=message):
        plot_regret(*arguments, **options)
