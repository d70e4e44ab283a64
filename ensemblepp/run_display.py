"""What a run shows while it goes: a progress bar, and scalar curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ensemblepp.store import RunFolder


def progress_bar(figure: str, shown: bool) -> Progress:
    """Return a bar with steps, a figure (a format of the field "shown") and the time left."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(figure), TimeRemainingColumn(compact=True))
    return Progress(*columns, disable=not shown)


@contextmanager
def recording(folder: RunFolder | None, writer: Any, cpu_seconds: Callable[[], float]) -> Iterator[None]:
    """Close the TensorBoard writer when the block ends, and mark the run failed where it raises."""
    try:
        yield
    except BaseException as error:
        if folder is not None:
            folder.fail(error, max(0.0, cpu_seconds() - folder.manifest.cpu_seconds))
        raise
    finally:
        if writer is not None:
            writer.close()


def scalar_writer(folder: RunFolder, step: int) -> Any:
    """Return a TensorBoard writer into the run folder that continues at `step`."""
    # Imported late: TensorBoard takes longer to import than a short run takes.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=step or None)
