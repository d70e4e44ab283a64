"""Regret curves with bootstrap bands, drawn on a private matplotlib figure (no pyplot, no global state)."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ensemblepp.errors import ParameterError, check_choice
from ensemblepp.files import atomic_file
from ensemblepp.intervals import STATISTIC_NAMES, Statistic, bootstrap_band

MAX_POINTS = 200
"""Points drawn per curve: one every few pixels, so more would cost time and change nothing."""

# Okabe and Ito's palette, which stays distinct under the common forms of colour blindness. Black (white on dark) comes
# last; yellow is left out on white and dark blue is lightened on dark, where the contrast would be too low.
_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DARK = ("#56B4E9", "#E69F00", "#2FC79A", "#CC79A7", "#F0E442", "#5C9DFF", "#FFFFFF")
# Line styles change when the colours are used up, and tell lines apart in a grey print.
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class Theme:
    """Colours of one plot: canvas, text, grid lines and the curve colours in order of use."""

    canvas: str
    text: str
    grid: str
    curves: Sequence[str]


THEMES = {
    "light": Theme("#FFFFFF", "#1F2328", "#DDE1E6", _LIGHT),
    "dark": Theme("#161B22", "#E6EDF3", "#343B44", _DARK),
}


@dataclass(frozen=True)
class _Band:
    label: str
    steps: NDArray[np.float64]
    center: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def plot_regret(
    path: str | os.PathLike[str] | None,
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    title: str = "",
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    theme: str = "light",
    size: tuple[float, float] = (8.0, 4.6),
    y_label: str = "cumulative regret (reward units)",
) -> Figure:
    """Draw one curve with its pointwise bootstrap band per label, each over its own steps.

    Legend entries stand in the order of the curves' last values, as the curves do at the right edge. A replica with
    a NaN or infinite value is left out of its curve, and the legend says how many were.

    Args:
        path: File to write, PNG or SVG by its suffix; None writes nothing.
        curves: Per label the steps (points,) and the values (replicas, points) in reward units.
        title: Text above the axes.
        statistic: "mean", "iqm" or "median" over replicas.
        confidence: Pointwise coverage of the bands.
        theme: "light" or "dark".
        size: Width and height in inches; a long legend adds to the height.
        y_label: Text of the value axis.

    Returns:
        The figure, drawn on a canvas of its own.

    Raises:
        ParameterError: If there is no curve, shapes disagree, or the suffix is neither .png nor .svg.
    """
    owner = "plot_regret"
    if not curves:
        raise ParameterError("curves", owner, "hold at least one curve", "none")
    check_choice("theme", owner, theme, THEMES)
    check_choice("statistic", owner, statistic, STATISTIC_NAMES)
    target = None if path is None else _check_suffix(path)
    bands = [_make_band(label, *curve, statistic, confidence) for label, curve in curves.items()]

    colors = THEMES[theme]
    columns = 2 if size[0] >= 6 and len(bands) > 1 and max(len(band.label) for band in bands) <= 48 else 1
    # Long legends lengthen the figure instead of squeezing the axes.
    height = size[1] + 0.2 * max(0, math.ceil(len(bands) / columns) - 3)
    figure = Figure(figsize=(size[0], height), dpi=200, facecolor=colors.canvas, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=colors.canvas)
    # Labels may hold "$", which matplotlib would otherwise read as mathematics.
    axes.set_title(title, loc="left", color=colors.text, fontsize=12, fontweight="bold", parse_math=False, wrap=True)
    axes.set_xlabel("step", color=colors.text, fontsize=10)
    axes.set_ylabel(y_label, color=colors.text, fontsize=10)
    _style_axes(axes, colors)
    _draw_bands(axes, bands, colors)
    note = f"{STATISTIC_NAMES[statistic]} over replicas, {100 * confidence:g} % bootstrap band"
    _draw_legend(figure, axes, bands, colors, columns, note)
    if target is not None:
        with atomic_file(target) as file:
            file.write(render_figure(figure, target.suffix[1:].lower()))
    return figure


def render_figure(figure: Figure, file_format: str = "png") -> bytes:
    """Return the figure's file content ("png" or "svg"), without a date so that it depends on the data alone."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else {"Software": None}
    figure.savefig(buffer, format=file_format, facecolor=figure.get_facecolor(), metadata=metadata)
    return buffer.getvalue()


def _check_suffix(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise ParameterError("path", "plot_regret", "end in .png or .svg", repr(str(path)))
    return target


def _make_band(label: str, steps: ArrayLike, values: ArrayLike, statistic: Statistic, confidence: float) -> _Band:
    """Check one curve, thin it to `MAX_POINTS` points with both ends kept, and bootstrap it."""
    steps_array = np.asarray(steps, dtype=np.float64)
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.size == 0 or steps_array.shape != array.shape[1:]:
        raise ParameterError(
            f"curve {label!r}",
            "plot_regret",
            "have steps (points,) and values (replicas, points) with at least one value",
            f"shapes {steps_array.shape} and {array.shape}",
        )
    # Replicas are judged on the whole curve, not on the points that are drawn.
    finite = np.isfinite(array).all(axis=1)
    missing = int(len(array) - finite.sum())
    note = f" ({missing} of {len(array)} replicas missing)" if missing else ""
    note += " (one replica, no band)" if finite.sum() == 1 else ""
    points = len(steps_array)
    chosen = np.unique(np.linspace(0, points - 1, min(points, MAX_POINTS)).round().astype(int))
    if not finite.any():
        empty = np.full(len(chosen), np.nan)
        return _Band(label + note, steps_array[chosen], empty, empty, empty)
    center, low, high = bootstrap_band(array[np.ix_(finite, chosen)], statistic, confidence)
    return _Band(label + note, steps_array[chosen], center, low, high)


def _draw_bands(axes: Axes, bands: Sequence[_Band], colors: Theme) -> None:
    """Draw all bands below all curves."""
    for number, band in enumerate(bands):
        color = colors.curves[number % len(colors.curves)]
        dashes = _DASHES[number // len(colors.curves) % len(_DASHES)]
        axes.fill_between(band.steps, band.low, band.high, color=color, alpha=0.18, linewidth=0, zorder=2)
        marker = "o" if len(band.steps) == 1 else ""  # one point makes no line
        axes.plot(band.steps, band.center, color=color, linestyle=dashes, linewidth=1.9, zorder=3, marker=marker)
    axes.margins(x=0)
    axes.set_xlim(left=0)
    if all(np.nanmin(band.center, initial=0.0) >= 0 for band in bands):
        axes.set_ylim(bottom=0)


def _draw_legend(figure: Figure, axes: Axes, bands: Sequence[_Band], colors: Theme, columns: int, note: str) -> None:
    """Name the curves in the order in which they end, under a note that says what curve and band are."""
    lines = axes.get_lines()
    # A curve without any finite replica has no last value and goes to the end.
    order = sorted(range(len(bands)), key=lambda i: (-np.nan_to_num(bands[i].center[-1], nan=-np.inf), bands[i].label))
    # Below the axes, where no legend can hide a curve.
    legend = figure.legend(
        [lines[i] for i in order],
        [bands[i].label for i in order],
        loc="outside lower left",
        ncols=columns,
        title=note,
        title_fontsize=8.5,
        alignment="left",
        frameon=False,
        labelcolor=colors.text,
        fontsize=9,
        handlelength=2.2,
    )
    legend.get_title().set_color(colors.text)
    legend.get_title().set_alpha(0.8)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _style_axes(axes: Axes, colors: Theme) -> None:
    """Leave two axis lines, light grid lines and whole-number step ticks with thousands separators."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colors.grid)
    axes.grid(True, color=colors.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colors.text, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
