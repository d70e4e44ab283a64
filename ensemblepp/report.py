"""Turn folders of runs into tables with intervals, regret curves and one self-contained HTML page."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ensemblepp.errors import check_choice
from ensemblepp.files import write_atomic
from ensemblepp.intervals import STATISTIC_NAMES, Statistic
from ensemblepp.plots import plot_regret, render_figure
from ensemblepp.report_page import (
    Images,
    build_page,
    show_cpu_rate,
    show_difference,
    show_interval,
    show_replicas,
)
from ensemblepp.report_rows import Problem, Row, Section, build_sections, load_runs

__all__ = ["Problem", "Report", "Row", "Section", "build_report"]

_CONFIDENCE = 0.95
_PIPED_WIDTH = 120
_SIZES = {"wide": (8.0, 4.6), "narrow": (4.2, 3.9)}


@dataclass(frozen=True)
class Report:
    """What a report holds, and where it was written.

    Attributes:
        sections: One per environment, with one row per agent, configuration and horizon.
        problems: Runs that entered no figure: failed, unfinished, unreadable, repeated, or of another kind.
        statistic: "mean", "iqm" or "median" over replicas.
        page: The HTML page.
        images: The regret curves, one PNG per section.
    """

    sections: tuple[Section, ...]
    problems: tuple[Problem, ...]
    statistic: Statistic
    page: Path
    images: tuple[Path, ...] = field(default=())

    def print(self, console: Console | None = None) -> None:
        """Print the tables, the replicas that stopped and the runs that were left out."""
        if console is None:
            console = Console()
            if not console.is_terminal:  # a file or pipe has no width of its own, and 80 columns cut names off
                console = Console(width=_PIPED_WIDTH)
        for section in self.sections:
            console.print(_make_table(section, self.statistic))
        for run in (run for section in self.sections for row in section.rows for run in row.runs):
            name = f"{run.name} (seed {run.folder.manifest.seed})"
            for line in run.folder.manifest.describe_stopped():
                console.print(Text(f"stopped: {name}: {line}", style="yellow"))
        for problem in self.problems:
            seed = "" if problem.seed is None else f" (seed {problem.seed})"
            # Text, not markup: names and reasons may hold square brackets.
            console.print(Text(f"{problem.status}: {problem.name}{seed}: {problem.detail}", style="yellow"))
        console.print(Text(f"report: {self.page}"), soft_wrap=True)


def build_report(
    paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    statistic: Statistic = "mean",
    title: str = "Bandit runs",
    console: Console | None = None,
) -> Report:
    """Summarise all runs at or below `paths`, print the tables, and write the curves and `report.html`.

    Runs with the same labels and settings are pooled over their seeds. Runs that share labels but differ in a setting
    get rows (agent settings) or sections (environment settings) that name it; unlike horizons are never pooled.

    Args:
        paths: One folder or several.
        output: Folder for `regret_<environment>.png` and `report.html`; the first path when None.
        statistic: "mean", "iqm" (interquartile mean) or "median" over replicas.
        title: Heading of the page.
        console: Where to print; the standard output when None.

    Returns:
        The figures as printed, and the files written.

    Raises:
        ParameterError: If `statistic` is unknown.
        RunFolderError: If a path is not a folder or holds no run.
    """
    check_choice("statistic", "build_report", statistic, STATISTIC_NAMES)
    roots = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    runs, problems = load_runs(roots)
    sections = build_sections(runs, statistic, _CONFIDENCE)
    folder = Path(roots[0] if output is None else output)
    folder.mkdir(parents=True, exist_ok=True)

    drawn = [_draw(section, statistic) for section in sections]
    files = [folder / f"regret_{slug}.png" for slug in _make_slugs([section.label for section in sections])]
    for file, (picture, _) in zip(files, drawn, strict=True):
        write_atomic(file, picture)
    page = folder / "report.html"
    pictures = [images for _, images in drawn]
    write_atomic(page, build_page(title, sections, pictures, problems, runs, statistic, _CONFIDENCE))
    report = Report(tuple(sections), tuple(problems), statistic, page, tuple(files))
    report.print(console)
    return report


def _draw(section: Section, statistic: Statistic) -> tuple[bytes, Images]:
    """Draw the section's curves, each over its own length: as a titled file, and for the page per theme and width."""
    several = len({row.horizon for row in section.rows}) > 1
    curves = {
        # Two rows may differ in their horizon alone.
        row.label + (f" ({row.horizon:,} steps)" if several else ""): row.curve()
        # Colours follow this order, so that one agent looks alike in all sections; the legend sorts by final regret.
        for row in sorted(section.rows, key=lambda row: row.label)
    }
    file = render_figure(plot_regret(None, curves, section.label, statistic, _CONFIDENCE))
    # The page has a heading above each figure.
    return file, {
        (theme, width): render_figure(plot_regret(None, curves, "", statistic, _CONFIDENCE, theme=theme, size=size))
        for theme in ("light", "dark")
        for width, size in _SIZES.items()
    }


def _make_slugs(labels: Sequence[str]) -> list[str]:
    """Return a distinct, harmless file name part per label."""
    slugs: list[str] = []
    for label in labels:
        slug = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")[:60] or "environment"
        number = 2
        unique = slug
        while unique in slugs:
            unique, number = f"{slug}_{number}", number + 1
        slugs.append(unique)
    return slugs


def _make_table(section: Section, statistic: Statistic) -> Table:
    """Return a table that stays whole at 80 columns: names and headings wrap, figures never do."""
    notes = (
        f"final regret: {STATISTIC_NAMES[statistic]} over replicas [{100 * _CONFIDENCE:g} % interval], reward units",
        "CPU-s / 1000: CPU-seconds per 1000 learner-steps",
    )
    table = Table(
        title=Text.assemble((section.label, "bold"), *("\n" + note for note in notes)),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("agent", overflow="fold", min_width=14)
    table.add_column("final regret", justify="right", no_wrap=True)
    table.add_column("above the best\n(paired)", justify="right", no_wrap=True)
    for heading in ("replicas", "steps", "CPU-s\n/ 1000"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in section.rows:
        final = show_interval(row.final).replace(" (one value, no interval)", "\n(one value,\nno interval)")
        replicas = show_replicas(row).replace(", ", "\n")
        cells = (row.label, final, show_difference(row), replicas, f"{row.horizon:,}", show_cpu_rate(row))
        # Text, because brackets in a plain string would be markup.
        table.add_row(*map(Text, cells))
    return table
