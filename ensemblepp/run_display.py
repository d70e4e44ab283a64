"""What a run shows while it goes: a progress bar, and scalar curves for TensorBoard."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ensemblepp.store import RunFolder


def progress_bar(figure: str, shown: bool) -> Progress:
    """Return a bar with steps, a figure (a format of the field "shown") and the time left."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(figure), TimeRemainingColumn(compact=True))
    return Progress(*columns, disable=not shown)


def scalar_writer(folder: RunFolder, step: int) -> Any:
    """Return a TensorBoard writer into the run folder that continues at `step`."""
    # Imported late: TensorBoard takes longer to import than a short run takes.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=step or None)
